"""Share rows between two gloo processes on a CPU: they compute what one process does.

Models are compared in float64, loss, logits and gradients, to 1e-11 of the largest entry of each tensor (a stand-in
for FlashAttention has scores in float32, so to 1e-6). Runs of sft/train.py are compared in float32.
"""

import json
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType
from distributed_driver import forked, train_run
from safetensors.torch import load_file
from shared_rows_driver import DOCUMENTS, MODELS, of_kind, run_plans
from shared_rows_driver import decoder as plain_decoder
from test_distributed import as_launched, assert_same_gradients, launch, launcher_environment
from tiny_training import decoder, preset_config, recipe, saved, sizes, training_rows, write_jsonl

from iha.errors import UserError
from modeling_iha import IHAForCausalLM, interleave_heads
from sft.distributed import check_launch
from sft.shared_row_trainer import check_core, check_heads


pytestmark = pytest.mark.usefixtures("in_repository_root")
WAYS = ("", "flash", "recompute", "checkpointing", "fsdp", "fsdp and checkpointing")
WINDOWS = (None, 12, 40)  # pieces have 32 tokens: no window, the keys of one process before, and most of its piece
CASES = [
    {"model": model, "window": window, "documents": documents, "how": how}
    for model in MODELS
    for window in WINDOWS
    for documents in DOCUMENTS
    for how in WAYS
]
# Those of `make test`: each model once, all of WINDOWS, DOCUMENTS and WAYS; `make test-full` runs all.
FEW = [case for place, case in enumerate(CASES) if place % 53 == 0]
SHARED = {"PARALLELISM_CONFIG_CP_SIZE": "2"}
CONFIG, TWO_PROCESSES = "fsdp2_shared_rows.yaml", ("--num_processes=2", "--parallelism_config_cp_size=2")
PACKED = {
    "packing": "true",
    "pad_to_multiple_of": 4,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
}
# Run -> its model, and the keys of its recipe in one process and in two.
RUNS = {
    "window": ("window", {"max_steps": 10, "eval_steps": 5, "save_steps": 5, "max_grad_norm": 0.1}),
    "lora": ("window", {"use_peft": "true", "lora_dropout": 0}),
    "llama": ("llama", {"num_pseudo_heads": 2, "interleaved_layers": 0, "gradient_checkpointing": "true"}),
    "experts": ("qwen3_moe", {"num_pseudo_heads": 2, "router_aux_loss_coef": 0}),
    "text": ("window", {"packing_strategy": "bfd_split", "assistant_only_loss": "false"}),
}


def arguments(place: Path, name: str, output: str, accumulated: int = 2) -> list[str]:
    model, keys = RUNS[name]
    overrides = {**PACKED, "gradient_accumulation_steps": accumulated, "max_steps": 2, "save_total_limit": 2, **keys}
    rows = place / ("texts.jsonl" if name == "text" else "rows.jsonl")
    return ["--config", recipe("demo"), *sizes(place / "models" / model, rows, place / output, **overrides)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """Save a tiny model for each geometry, and rows."""
    place = tmp_path_factory.mktemp("shared_rows")
    torch.manual_seed(0)
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}
    saved(IHAForCausalLM(preset_config(**window)), place / "models" / "window")
    for name in ("llama", "qwen3_moe"):
        saved(decoder(name), place / "models" / name)
    write_jsonl(place / "rows.jsonl", training_rows(60))
    write_jsonl(place / "texts.jsonl", [{"text": row["conversations"][1]["value"] * 9} for row in training_rows(60)])
    return place


@pytest.fixture(scope="module")
def launched(request, workplace) -> Path:
    """Fork once what `accelerate launch --config_file fsdp2_shared_rows.yaml --num_processes 2` starts.

    What no selected test asks for is left out."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    plans = [{"cases": FEW, "record": str(workplace / "few.json")}]
    if any("all_cases" in item.name for item in items):
        plans.append({"cases": CASES, "record": str(workplace / "all.json")})

    def plan(name: str, output: str, accumulated: int = 2, **more) -> dict:
        record = str(workplace / f"{output}.{len(plans)}.pt")
        more = {"environment": SHARED, "record": record, **more}
        return {"arguments": arguments(workplace, name, output, accumulated), **more}

    plans.append(plan("window", "window", interrupted_at=7))
    plans.append(plan("window", "window"))
    if "mixed" in asked:  # rows of its own for each process, then a shared one, and the other way round
        alone, half = {"PARALLELISM_CONFIG_CP_SIZE": "1"}, 1
        plans.append(plan("window", "mixed_first", interrupted_at=7))
        plans.append(plan("window", "mixed_first", half, environment=alone))
        plans.append(plan("window", "mixed", half, environment=alone, interrupted_at=7))
        plans.append(plan("window", "mixed"))
    plans += [plan(name, name) for name in RUNS if name in asked and name != "window"]
    plans[-1]["last"] = True
    forked(run_plans, plans, launcher_environment(CONFIG, *TWO_PROCESSES))
    return workplace


def assert_cases(record: Path, cases: list[dict]) -> None:
    wrong = [
        (case, result)
        for case, result in zip(cases, json.loads(record.read_text(encoding="utf-8")), strict=True)
        if not isinstance(result, float) or result > (1e-6 if case["how"] == "flash" else 1e-11)
    ]
    assert wrong == []


def test_a_shared_row_computes_what_one_process_does(launched):
    assert {case["model"] for case in FEW} == set(MODELS) and {case["how"] for case in FEW} == set(WAYS)
    assert_cases(launched / "few.json", FEW)


@pytest.mark.slow
def test_processes_of_the_launcher_share_rows(workplace):
    plans = [{"cases": FEW, "record": str(workplace / "launched.json")}]
    launch(CONFIG, "shared_rows_driver.py", plans, workplace, *TWO_PROCESSES)
    assert_cases(workplace / "launched.json", FEW)


@pytest.mark.slow
def test_all_cases_of_shared_rows(launched):
    assert_cases(launched / "all.json", CASES)


def assert_same_run(place: Path, name: str, output: str | None = None) -> None:
    """Compare losses, evaluations and final weights of a run with those of one process."""
    output = output or name
    one = place / f"{name}.one"
    if not one.exists():
        train_run({"arguments": arguments(place, name, one.name), "record": f"{one}.pt"})
    losses, others = (json.loads((run / "loss.json").read_text()) for run in (place / output, one))
    for part in ("train", "eval", *({"eval_bits_per_byte"} & others.keys())):
        assert [step for step, _ in losses[part]] == [step for step, _ in others[part]]
        assert [loss for _, loss in losses[part]] == pytest.approx([loss for _, loss in others[part]], rel=1e-5)
    weights, expected = (load_file(run / "final" / "model.safetensors") for run in (place / output, one))
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        assert (weights[key] - value).abs().max() < 2e-6, key


def test_ten_steps_with_an_evaluation_and_a_resume(launched):
    assert_same_run(launched, "window")
    gradients = [torch.load(file, weights_only=True)["gradients"] for file in launched.glob("window.*.pt")]
    assert len(gradients) == 2  # the resumed run began at step 5, and has none
    assert_same_gradients(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "llama", "experts", "text"])
def test_runs_on_shared_rows(name, launched):
    assert_same_run(launched, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed"])
def test_a_shared_run_resumes_alone_and_the_other_way_round(name, launched):
    assert_same_run(launched, "window", "mixed_first")
    assert_same_run(launched, "window", "mixed")


@pytest.mark.parametrize(
    "keys, named",
    [
        ({"packing": False}, "set packing or padding_free"),
        ({"pad_to_multiple_of": 3}, "pad_to_multiple_of to a multiple of 2"),
        ({"loss_type": "dft"}, "plain loss"),
        ({"label_smoothing_factor": 0.1}, "plain loss"),
        ({"per_device_eval_batch_size": 4}, "evaluated one by one"),
        ({"neftune_noise_alpha": 5.0}, "same noise"),
    ],
)
def test_keys_that_shared_rows_would_train_in_another_way_are_rejected(keys, named, monkeypatch):
    environment = launcher_environment(CONFIG, *TWO_PROCESSES)
    args = as_launched(monkeypatch, {**environment, "WORLD_SIZE": "2"}, DistributedType.MULTI_GPU, 2)
    accepted = {"packing": True, "padding_free": False, "pad_to_multiple_of": 4, "loss_type": "nll"}
    accepted |= {"eval_strategy": "steps", "per_device_eval_batch_size": 1}
    vars(args).update({**accepted, "label_smoothing_factor": 0.0, "neftune_noise_alpha": None})
    check_launch(args)
    vars(args).update(keys)
    with pytest.raises(UserError, match=named):
        check_launch(args)


def test_processes_that_make_no_whole_groups_are_rejected(monkeypatch):
    environment = launcher_environment(CONFIG, *TWO_PROCESSES)
    args = as_launched(monkeypatch, {**environment, "WORLD_SIZE": "3"}, DistributedType.MULTI_GPU, 3)
    with pytest.raises(UserError, match="3 processes are no groups of 2"):
        check_launch(args)


def test_processes_share_heads_that_they_divide():
    for make, size in [
        (lambda: of_kind("iha", None, num_pseudo_heads=2), 8),
        (lambda: of_kind("iha", 12, num_pseudo_heads=2), 3),  # a window is shared by any number
        (lambda: of_kind("paired_heads", None, num_pseudo_heads=2), 4),
        (lambda: interleave_heads(plain_decoder("llama"), 2), 8),
        (lambda: interleave_heads(plain_decoder("llama"), 2, [0], 12), 3),
    ]:
        check_heads(make(), size)
    for make, size in [
        (lambda: of_kind(["iha", "mha"], None, num_pseudo_heads=2), 3),
        (lambda: of_kind("paired_heads", None, num_pseudo_heads=2), 8),
        (lambda: interleave_heads(plain_decoder("llama"), 2, [0]), 16),
    ]:
        with pytest.raises(UserError, match=f"{size} processes cannot share the . heads of layer 0, of . key heads"):
            check_heads(make(), size)


def eager_decoder():
    model = interleave_heads(plain_decoder("llama"), 2)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: of_kind(["mha", "dcmha"], None), "Layers that change scores .* cannot share rows"),
        (lambda: plain_decoder("llama"), "attn_implementation='sdpa' .*--attn_implementation flash_attention_2"),
        (eager_decoder, "attn_implementation='eager' .*flash_attention_2"),
    ],
)
def test_models_that_cannot_attend_to_shared_rows_are_rejected(make, named):
    with pytest.raises(UserError, match=named):
        check_core(make())
