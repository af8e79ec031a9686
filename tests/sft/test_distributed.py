"""Train on more than one device, with two gloo processes on a CPU: they compute what one process does.

Two processes sum in another order: losses agree to 1e-5 of their value, gradients to 1e-5 of each weight's largest,
and weights after the last step of Adam to 1e-6.
"""

import json
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from distributed_driver import forked, run_plans, train_run, whole_gradients
from safetensors.torch import load_file
from tiny_training import decoder, preset_config, recipe, saved, sizes, training_rows, write_jsonl

from iha.errors import ROOT, UserError
from modeling_iha import IHAForCausalLM, pair_heads
from sft import train
from sft.checkpoints import RECORD
from sft.distributed import check_launch


pytestmark = pytest.mark.usefixtures("in_repository_root")
CONFIGS = ROOT / "sft" / "accelerate_configs"
MIXING = sorted(
    f"model.layers.{layer}.self_attn.{module}.weight"
    for layer in range(2)
    for module in ("q_mix", "k_mix", "v_mix", "collapse")
)


def launcher_environment(config: str, *options: str) -> dict[str, str]:
    """Return the variables that accelerate's launcher sets for the training script."""
    command = ["--config_file", str(CONFIGS / config), *options, "sft/train.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    several = (args.multi_gpu or args.use_fsdp) and not args.cpu
    prepared = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    return {
        name: value for name, value in prepared.items() if name.startswith(("ACCELERATE", "FSDP", "PARALL", "MASTER"))
    }


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """Save a tiny model for each geometry, and rows."""
    place = tmp_path_factory.mktemp("distributed")
    models = place / "models"
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    tied = {"tie_word_embeddings": True, "output_gate": "elementwise", "exclusive_attention": True}
    for name, geometry in {"plain": {}, "tied": tied, "window": window}.items():
        torch.manual_seed(0)
        saved(IHAForCausalLM(preset_config(**geometry)), models / name)
    for name in INTERLEAVED:
        saved(decoder(name), models / name)
    paired = preset_config(attention_kinds="paired_heads", output_gate="per_head", **window)
    saved(IHAForCausalLM(paired), models / "paired")
    with pytest.warns(UserWarning, match="are paired"):
        saved(pair_heads(decoder("llama"), 2), models / "paired_llama")
    write_jsonl(place / "rows.jsonl", training_rows(20))
    return place


INTERLEAVED = ("llama", "qwen3_moe")
PAIRED = ("paired", "paired_llama")
# Run -> its model, and the keys of its recipe in one process and in two, which train on four rows a step together.
RUNS = {
    "ddp": ("plain", {"mixing_scale": 10}),  # with a buffer of starts
    "absent": ("absent", {}),
    "shards": ("tied", {"max_steps": 4}),
    "lora": ("plain", {"use_peft": "true", "lora_dropout": 0}),
    **{name: (name, {"num_pseudo_heads": 2}) for name in (*INTERLEAVED, *PAIRED)},
}


def arguments(place: Path, name: str, processes: int, **overrides) -> list[str]:
    """Return the arguments of one of the RUNS in so many processes."""
    model, keys = RUNS[name]
    values = {"per_device_train_batch_size": 4 // processes, "max_steps": 2, "save_total_limit": 2}
    output = place / (name if processes > 1 else f"{name}.one")
    overrides = {**values, **keys, **overrides}
    return ["--config", recipe("demo"), *sizes(place / "models" / model, place / "rows.jsonl", output, **overrides)]


def in_one_process(place: Path, name: str) -> dict:
    """Return the record of a run in this process (see `train_run`), which is made once."""
    record = place / f"{name}.one.pt"
    if not record.exists():
        train_run({"arguments": arguments(place, name, 1), "record": str(record)})
    return torch.load(record, weights_only=True)


def assert_same_gradients(actual: dict, expected: dict, tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    assert any(gradient.any() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


def assert_same_run(place: Path, name: str) -> dict:
    """Compare losses, gradients, parameter groups and final weights of a run with those of `in_one_process`."""
    one, record = in_one_process(place, name), torch.load(place / f"{name}.pt", weights_only=True)
    losses, others = (json.loads((place / run / "loss.json").read_text()) for run in (name, f"{name}.one"))
    for part in ("train", "eval"):
        assert [step for step, _ in losses[part]] == [step for step, _ in others[part]]
        assert [loss for _, loss in losses[part]] == pytest.approx([loss for _, loss in others[part]], rel=1e-5)
    tolerance = 1e-4 if name == "qwen3_moe" else 1e-5  # without interleaved heads its router differs by 4.9e-5
    assert_same_gradients(record["gradients"], one["gradients"], tolerance)
    assert record["groups"] == one["groups"]
    weights, expected = (load_file(place / run / "final" / "model.safetensors") for run in (name, f"{name}.one"))
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        assert (weights[key] - value).abs().max() < 1e-6, key
    return record


# Two processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launched(request, workplace) -> Path:
    """Fork what `accelerate launch` starts, once.

    The processes make runs under FSDP2, the first with sharded state dicts, interrupted and resumed, a step under
    tensor parallelism, and a run under DDP. Models whose tests are not selected are left out.
    """
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    runs = {
        "shards": {"environment": {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}},
        "lora": {},
        **{name: {} for name in (*INTERLEAVED, *PAIRED) if name in asked},
    }
    runs["ddp"] = {"environment": {"ACCELERATE_USE_FSDP": "false"}, "last": True}
    runs = {name: {"arguments": arguments(workplace, name, 2), **plan} for name, plan in runs.items()}
    tensor_parallel = {"model": str(workplace / "models" / "plain"), "ids": torch.arange(24).view(2, 12).tolist()}
    runs = {"shards": runs["shards"], "resumed": runs["shards"], "tensor_parallel": tensor_parallel, **runs}
    plans = [{**plan, "record": str(workplace / f"{name}.pt")} for name, plan in runs.items()]
    plans[0]["interrupted_at"] = 4
    forked(run_plans, plans, launcher_environment("fsdp2.yaml"))
    return workplace


def launch(config: str, driver: str, plans: list[dict], place: Path, *options: str) -> None:
    """Do in this process what `accelerate launch` does; its processes print to the same terminal."""
    (place / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
    command = [str(ROOT / "tests" / "sft" / driver), str(place / "plans.json")]
    args = launch_command_parser().parse_args(["--config_file", str(CONFIGS / config), *options, *command])
    with ThreadPoolExecutor() as threads:
        threads.submit(launch_command, args).result()  # in the main thread it would keep the signals of pytest


@pytest.mark.slow
def test_processes_of_the_launcher_train_like_one(workplace):
    plan = {"arguments": arguments(workplace, "llama", 2), "record": str(workplace / "llama.pt"), "last": True}
    launch("fsdp2.yaml", "distributed_driver.py", [plan], workplace)
    assert assert_same_run(workplace, "llama")["class"] == "FSDPInterleavedLlamaForCausalLM"


def test_two_processes_train_like_one(launched):
    record = assert_same_run(launched, "ddp")
    assert (record["class"], record["sharded"]) == ("IHAForCausalLM", set())


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("shards", "IHA"),
        ("qwen3_moe", "InterleavedQwen3Moe"),
    ],
)
def test_fsdp2_trains_like_one_process(name, family, launched):
    record = assert_same_run(launched, name)
    assert record["class"] == f"FSDP{family}ForCausalLM"
    assert record["sharded"] == set(record["gradients"]) >= set(MIXING)
    (_, *of_others), (spared, *of_spared) = record["groups"]
    assert set(MIXING) <= set(spared) and of_others == of_spared == [pytest.approx(1e-4), 0.0]


@pytest.mark.parametrize(
    ("name", "family"),
    [("paired", "IHA"), pytest.param("paired_llama", "InterleavedLlama", marks=pytest.mark.slow)],
)
def test_fsdp2_trains_paired_heads_like_one_process(name, family, launched):
    record = assert_same_run(launched, name)
    assert record["class"] == f"FSDP{family}ForCausalLM"
    assert record["sharded"] == set(record["gradients"]) and not set(MIXING) & set(record["gradients"])


def test_an_interrupted_run_with_sharded_state_dicts_resumes(launched):
    assert (launched / "shards" / "checkpoint-4" / "pytorch_model_fsdp_0").is_dir()
    # The second call began at step 2, not at 0, whose gradients it would have recorded.
    assert (launched / "shards.pt").exists() and not (launched / "resumed.pt").exists()


def test_adapters_are_merged_under_fsdp2(launched):
    record = assert_same_run(launched, "lora")
    assert record["class"] == "FSDPPeftModelForCausalLM"
    assert len(record["gradients"]) == 2 * 7 * 2 + len(MIXING)
    assert (launched / "lora" / "checkpoint-2" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("directory", ["shards/checkpoint-4", "qwen3_moe/checkpoint-2", "lora/final"])
def test_checkpoints_of_sharded_models_stand_alone(directory, launched):
    """Compare them with those of one process, of which test_sft.py loads one in a clean process."""
    name, _, part = directory.partition("/")
    in_one_process(launched, name)
    one = launched / f"{name}.one" / part
    others = {"trainer_state.json", RECORD}
    files = {file.name for pattern in ("*.py", "*.json", "*.jinja") for file in one.glob(pattern)} - others
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= files
    assert [file for file in files if (launched / directory / file).read_bytes() != (one / file).read_bytes()] == []
    assert not list((launched / directory).glob("_fsdp_*.py"))
    weights, expected = (load_file(place / "model.safetensors") for place in (launched / directory, one))
    assert {key: value.shape for key, value in weights.items()} == {
        key: value.shape for key, value in expected.items()
    }


def test_tensor_parallelism_shares_the_ffn_and_computes_the_same(launched):
    record = torch.load(launched / "tensor_parallel.pt", weights_only=True)
    model, ids = IHAForCausalLM.from_pretrained(launched / "models" / "plain"), torch.arange(24).view(2, 12)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert_same_gradients(record["gradients"], whole_gradients(model))
    ffn = {name for name in record["gradients"] if ".mlp." in name}
    assert record["sharded"] == ffn | {"lm_head.weight", "model.embed_tokens.weight"}


# Launches that are rejected ------------------------------------------------------------------------------------------


def as_launched(patch, environment: dict[str, str], state: DistributedType, processes: int) -> Namespace:
    """Return the training arguments of a process that a launcher has started with these variables."""
    for name, value in environment.items():
        patch.setenv(name, value)
    return Namespace(
        world_size=processes,
        distributed_state=Namespace(distributed_type=state),
        parallelism_config=None,
        fsdp=None,
        fsdp_plugin_args=None,
        deepspeed=None,
        pad_to_multiple_of=None,
        mixed_precision=environment.get("ACCELERATE_MIXED_PRECISION", "no"),
        bf16=False,
        fp16=False,
    )


CPU, GPU, ONE = DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.NO
ALONE = "2 processes were started, and each would train alone.* --use_cpu true"


@pytest.mark.parametrize(
    "config, options, state, processes, named",
    [
        ("fsdp2.yaml", [], CPU, 2, "would silently train unsharded.*ddp.yaml"),
        ("fsdp2.yaml", [], ONE, 1, ALONE),
        ("fsdp2.yaml", ["--num_processes", "1"], ONE, 1, "would silently.*single.yaml"),
        ("fsdp2.yaml", ["--fsdp_version", "1"], GPU, 2, "FSDP version 1.*'fsdp_version: 2'"),
        ("fsdp2.yaml", ["--fsdp_cpu_ram_efficient_loading", "true"], GPU, 2, "cpu_ram_efficient.* shares no buffers"),
        ("ddp.yaml", [], ONE, 1, ALONE),
        ("ddp.yaml", ["--cpu"], ONE, 1, "several processes.*started one.*MULTI_CPU"),
    ],
)
def test_a_launch_that_would_train_something_else_is_refused(monkeypatch, config, options, state, processes, named):
    environment = launcher_environment(config, *options)
    if "--cpu" not in options:
        environment["WORLD_SIZE"] = "1" if "--num_processes" in options else "2"  # torchrun's
    with pytest.raises(UserError, match=named):
        check_launch(as_launched(monkeypatch, environment, state, processes))


@pytest.mark.parametrize(
    "config, state, processes",
    [("single.yaml", ONE, 1), ("ddp.yaml", CPU, 2), ("ddp.yaml", GPU, 2), ("fsdp2.yaml", GPU, 2), (None, ONE, 1)],
)
def test_the_configs_are_accepted_where_they_do_what_they_say(monkeypatch, config, state, processes):
    # Without a launcher, on a cluster that names its main machine.
    environment = launcher_environment(config) if config else {"MASTER_ADDR": "10.0.0.1"}
    if processes > 1:
        environment["WORLD_SIZE"] = str(processes)
    check_launch(as_launched(monkeypatch, environment, state, processes))


@pytest.mark.parametrize("name", ["sp", "tp"])
def test_parallelism_that_would_compute_something_else_is_refused(monkeypatch, name):
    options = ["--use_fsdp", "--fsdp_version=2", "--use_parallelism_config", f"--parallelism_config_{name}_size=2"]
    environment = launcher_environment("fsdp2.yaml", *options)
    args = as_launched(monkeypatch, {**environment, "WORLD_SIZE": "2"}, GPU, 2)
    with pytest.raises(UserError, match=f"drops windows.* mixes all heads: set .*{name}_size"):
        check_launch(args)


def test_deepspeed_is_refused(monkeypatch):
    args = as_launched(monkeypatch, {"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2"}, GPU, 2)
    with pytest.raises(UserError, match="DeepSpeed is not supported: use FSDP2"):
        check_launch(args)


@pytest.mark.parametrize(
    "name, value, keys, named",
    [
        ("USE_FSDP", "true", {}, "would silently train unsharded"),
        ("MIXED_PRECISION", "bf16", {}, "mixed_precision: bf16, and the recipe has neither"),
        # With a recipe that says so too the run goes on to its model.
        ("MIXED_PRECISION", "bf16", {"bf16": "true"}, "absent is neither a directory"),
    ],
)
def test_the_command_refuses_a_launch_before_it_looks_at_the_model(name, value, keys, named, monkeypatch, tmp_path):
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    write_jsonl(tmp_path / "rows.jsonl", training_rows(4))
    with pytest.raises(UserError, match=named):
        train.main(arguments(tmp_path, "absent", 2, **keys))
