"""Test that the memory plan is exact where it is arithmetic, and that a run that cannot fit is refused."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from helpers import random_model
from peft import get_peft_model
from tiny_training import recipe, sizes
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, MistralConfig, Trainer
from trl import SFTConfig

from iha_io.command_io import ROOT, UserError, read_json
from modeling_iha import IHAConfig, IHAModel, cpu_precision, interleaving, masks
from sft import memory_plan, train
from sft.arguments import RecipeParser
from sft.base_model import lora_config, run_config
from sft.memory_plan import STATES, Layout, alternatives, estimate, launched_layout, run_setting
from sft.train import USAGE


def parsed(**keys):
    return RecipeParser(SFTConfig, USAGE).parse(["--config", recipe("demo"), *sizes("model", "rows", "out", **keys)])


def setting_of(config, **keys):
    return run_setting(config, *parsed(**keys))


TINY = IHAConfig.from_preset("tiny", num_pseudo_heads=4, num_key_value_heads=4)


RANK_4 = {"use_peft": "true", "lora_r": 4}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("optim", "keys"),
    [
        *((name, {}) for name in STATES if not name.startswith("paged_adamw_8")),
        *(("adamw_torch", {"tie_word_embeddings": True, **adapters}) for adapters in ({}, RANK_4)),
    ],
)
def test_weights_gradients_and_states_are_those_of_a_real_run(optim, keys, dtype, tmp_path):
    pytest.importorskip("bitsandbytes", reason="its optimisers are measured")
    keys = dict(keys)
    fields = {"num_attention_heads": 4, "tie_word_embeddings": keys.pop("tie_word_embeddings", False)}
    config = IHAConfig.from_preset("tiny", hidden_size=256, intermediate_size=512, **fields)
    run, args = parsed(optim=optim, dtype=dtype, eval_strategy="no", output_dir=tmp_path, **keys)
    model = random_model(config, dtype=getattr(torch, dtype)).train()
    if run.use_peft:
        model = get_peft_model(model, lora_config(run, model))
    optimizer = Trainer(model, args).create_optimizer()
    model(input_ids=(ids := torch.arange(8)[None]), labels=ids).loss.backward()
    optimizer.step()
    memory = estimate(run_setting(config, run, args))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert memory.weights == weights
    assert memory.gradients == sum(each.grad.nbytes for each in model.parameters() if each.requires_grad)
    values = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    states = sum(value.nbytes for key, value in values if getattr(value, "ndim", 0) and "qmap" not in key)
    # bitsandbytes keeps the states of small tensors in float32, and Adafactor sums of rows and columns.
    inexact = {"rel": 0.01, "abs": 0.02 * weights * (optim == "adafactor")}
    assert memory.optimizer == (states if optim.startswith("adamw_torch") else pytest.approx(states, **inexact))


SCHEDULE = {
    "attention_kinds": ["iha", "mha"],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 256}
KEPT = {
    "mha": (None, {"attention_kinds": "mha"}),
    "mha-groups": (None, {"attention_kinds": "mha", "gated_mlp": False, "num_key_value_heads": 2}),
    "virtual-2": ("virtual", {"num_pseudo_heads": 2}),
    "virtual-4-groups": ("virtual", {"num_pseudo_heads": 4, "num_key_value_heads": 2}),
    "base-4": ("base", {"num_pseudo_heads": 4}),
    "base-schedule-4": ("base", {"num_pseudo_heads": 4, **SCHEDULE}),
    "schedule-4": ("virtual", {"num_pseudo_heads": 4, **SCHEDULE}),
    "talking-heads": (None, {"attention_kinds": "talking_heads"}),
}


@pytest.mark.parametrize(
    ("name", "autocast", "keys"),
    [
        *((name, False, {}) for name in KEPT),
        *(("mha", True, {}), ("base-schedule-4", True, {})),
        *(("mha", False, RANK_4), ("virtual-2", True, RANK_4)),
        *(("mha", True, {**RANK_4, "dtype": "bfloat16"}), ("virtual-2", False, {**RANK_4, "dtype": "bfloat16"})),
    ],
)
def test_activations_are_what_autograd_keeps(name, autocast, keys, monkeypatch):
    monkeypatch.setattr(cpu_precision, "SLOW_DTYPES", [])  # as on a CPU with products of the dtype
    form, fields = KEPT[name]
    config = IHAConfig.from_preset("tiny", **{**WIDE, **fields})
    run, args = parsed(max_length=512, per_device_train_batch_size=2, **keys)
    setting = replace(run_setting(config, run, args), attention_form=form, autocast=autocast)
    model = random_model(config, dtype=getattr(torch, run.dtype)).train()
    model.base_model.attention_form = form
    if adapters := lora_config(run, model):
        get_peft_model(model, adapters)  # changes `model` in place
        model.train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copies = {tuple(shape) for parameter in model.parameters() for shape in (parameter.shape, parameter.shape[::-1])}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Copies of the weights in the type of computation count as weights.
        if storage.data_ptr() not in weights and not (autocast and tuple(tensor.shape) in copies):
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.model(torch.randint(0, 256, (2, 512)), use_cache=False)
    measured = sum(size for size, _ in kept.values())
    assert estimate(setting).activations == pytest.approx(measured, rel=0.1)


def test_checkpointing_the_lean_form_and_the_sharing_of_devices_take_less():
    setting = setting_of(TINY, max_length=4096, per_device_train_batch_size=1)
    virtual = replace(setting, attention_form="virtual")
    lean, full = estimate(replace(setting, attention_form="base")), estimate(virtual)
    checkpointed = estimate(replace(virtual, checkpointing=True))
    assert lean.activations < full.activations and checkpointed.activations < lean.activations / 2

    # What a step keeps grows with its tokens; DDP has buckets of gradients, and shards are parts.
    assert estimate(replace(virtual, tokens=8192)).activations == pytest.approx(2 * full.activations)
    assert estimate(replace(virtual, batch=2)).activations == pytest.approx(2 * full.activations)
    ddp, sharded = (estimate(replace(virtual, layout=Layout(8, is_sharded))) for is_sharded in (False, True))
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (full.weights, 2 * full.gradients, full.optimizer)
    assert sharded.optimizer == full.optimizer / 8 and sharded.activations == full.activations
    ulysses = estimate(replace(virtual, layout=Layout(8, True, 8)))
    assert ulysses.activations == pytest.approx(full.activations / 8)


def test_shards_of_trained_weights_are_in_float32_under_mixed_precision():
    """Hold what `fsdp2_prepare_model` of accelerate does to weights that are loaded in bfloat16."""
    half, full = (setting_of(TINY, dtype=dtype, bf16="true") for dtype in ("bfloat16", "float32"))
    planned, wanted = (estimate(replace(each, layout=Layout(8, True))) for each in (half, full))
    assert planned.optimizer == 2 * 4 * half.parameters.trained_number / 8
    assert (planned.weights, planned.gradients) == (wanted.weights, wanted.gradients)
    # PEFT makes adapters in float32, and frozen weights stay as they are: the few mixing weights differ.
    lora = replace(setting_of(TINY, dtype="bfloat16", bf16="true", use_peft="true"), layout=Layout(8, True))
    assert estimate(lora).weights == pytest.approx(estimate(replace(lora, autocast=False)).weights, rel=1e-3)
    # On one device the weights stay as they are, and autocast copies none.
    alone = replace(half, autocast=False)
    assert estimate(half).weights == estimate(alone).weights == half.parameters.all
    assert estimate(half).activations == estimate(alone).activations


def test_the_eager_core_keeps_every_pair():
    eager = setting_of(TINY, max_length=512, attn_implementation="eager")
    pairs = 4 * 4 * (512 * 4) ** 2 * 4  # rows, heads, virtual tokens, bytes
    assert estimate(eager).activations > 2 * pairs


def test_a_llama_has_the_plan_of_the_same_model_of_this_package():
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    ours = IHAConfig.from_preset("tiny", attention_kinds="mha")
    assert estimate(setting_of(LlamaConfig(**sizes))) == estimate(setting_of(ours))
    assert run_setting(MistralConfig(**sizes), *parsed()) is None
    assert run_setting(ours, *parsed(optim="lomo")) is None


def test_the_layout_is_that_of_accelerate_launch(monkeypatch):
    assert launched_layout() == Layout()
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launched_layout() == Layout(8)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "4")
    assert launched_layout() == Layout(8, True, 4)
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    assert launched_layout() == Layout(8, False, 4)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for stage in range(4):
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))
        assert launched_layout() == Layout(8, stage == 3, 4)


def test_a_run_that_cannot_fit_is_refused_before_weights_are_read(
    rows_file, in_repository_root, tmp_path, capsys, monkeypatch
):
    TINY.save_pretrained(tmp_path / "model")  # without weights
    command = ["--config", recipe("demo"), *sizes(tmp_path / "model", rows_file, tmp_path / "run")]
    run, args = parsed()
    smaller = "per_device_train_batch_size 1, accumulated 4 times"
    limit = 1.25 * estimate(alternatives(run_setting(TINY, run, args), TINY, run)[smaller]).total / 1e9
    with pytest.raises(UserError, match=f"GB on each device and there are 0.0 GB: it would fit with {smaller}"):
        train.main([*command, "--memory_gb", str(1.001 * limit)])
    out = capsys.readouterr().out
    assert "this run: 1 device" in out and "Limit: 0.01 GB" in out and "max_length" in out and "FSDP2" not in out
    with pytest.raises(UserError, match="cannot be loaded"):
        train.main([*command, "--memory_gb", "1"])
    monkeypatch.setattr(memory_plan, "available_memory", lambda args: 1)
    with pytest.raises(UserError, match="no change that is known"):
        train.main(command)


@pytest.mark.parametrize("words", [["--use-cpu", "true"], ["--use_cpu"], ["--use_cpu=true"], []])
def test_the_command_plans_a_cpu_however_it_is_asked_for(words, tmp_path, capsys):
    path = tmp_path / "sft.yaml"
    path.write_text((ROOT / recipe("pretrain")).read_text() + ("" if words else "use_cpu: true\n"))
    small = ["--config", str(path), "--preset", "tiny", "--max_length", "128"]
    memory_plan.main([*small, *words])
    assert "1 x 128 tokens to a CPU" in capsys.readouterr().out
    memory_plan.main([*small, "--use_cpu", "no"])
    assert "1 x 128 tokens to a GPU" in capsys.readouterr().out


def test_the_window_of_a_preset_follows_the_length(monkeypatch):
    configs = []
    monkeypatch.setattr(memory_plan, "run_setting", lambda config, run, args: configs.append(config))
    length = ["--max_length", "65536", "--max_position_embeddings", "65536", "--rope_theta", "1e12"]
    with pytest.raises(UserError, match="Note: .* is not planned"):
        memory_plan.main(["--config", recipe("pretrain"), "--preset", "paper-2.4b-iha", *length])
    assert configs[0].sliding_window == 65536 // (2 * 20**2)  # N / (2 P^2)


@pytest.mark.parametrize("preset, kind", [("paper-2.4b-global", "mha"), ("paper-2.4b-iha", "iha")])
def test_a_layer_at_64k_keeps_what_the_plan_says(preset, kind, monkeypatch):
    """Keep the paper's layers without memory, in bfloat16 through `varlen_attn` as on a GPU."""
    for module in (masks, interleaving):
        monkeypatch.setattr(module, "has_varlen", lambda *args: True)
    length = 65536
    config = IHAConfig.from_preset(preset, max_position_embeddings=length, num_hidden_layers=1)
    with torch.device("meta"):
        model = IHAModel._from_config(config, dtype=torch.bfloat16).train()
        model.rotary_emb.inv_freq = torch.empty(config.head_dim // 2)
        states = torch.empty(1, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions, bounds = torch.empty(1, length, dtype=torch.long), torch.empty(2, dtype=torch.int32)
        tables = model.rotary_emb.tables(states, positions)
    weights, kept = {parameter.untyped_storage()._cdata for parameter in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = (0 if storage._cdata in weights else storage.nbytes(), tensor)
        return tensor

    documents = {"document_ids": positions.int(), "document_bounds": (bounds, length)}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model.layers[0](states, position_embeddings=tables, position_ids=positions, **documents)
    measured = sum(size for size, _ in kept.values())
    setting = replace(setting_of(config, max_length=length, per_device_train_batch_size=1), on_cpu=False)
    setting = replace(setting, weight_bytes=2, autocast=False)
    planned, working = memory_plan.layer_bytes(setting, kind, config.layer_types[0])
    assert planned == pytest.approx(measured, rel=0.05)
    # Eight GPUs share weights and optimizer; a layer is computed at a time.
    assert estimate(replace(setting, layout=Layout(8, True), checkpointing=True)).total < 80e9


def test_flash_attention_on_a_gpu_sums_gradients_of_queries_in_float32():
    config = IHAConfig.from_preset("paper-2.4b-iha", max_position_embeddings=65536, num_hidden_layers=1)
    setting = setting_of(config, max_length=65536, per_device_train_batch_size=1, dtype="bfloat16")
    on_gpu, on_cpu = (
        memory_plan.layer_bytes(replace(setting, on_cpu=is_cpu), "iha", "full_attention")[1]
        for is_cpu in (False, True)
    )
    assert on_gpu - on_cpu == 65536 * config.num_pseudo_heads * config.num_attention_heads * config.head_dim * 4


@pytest.mark.parametrize(
    ("fields", "blocks"), [({}, False), ({"attention_dropout": 0.1}, True), ({"head_dim": 20}, True)], ids=str
)
def test_a_window_on_a_gpu_goes_in_blocks_without_varlen(fields, blocks):
    config = IHAConfig.from_preset("tiny", sliding_window=128, layer_types="sliding_attention", **fields)
    setting = setting_of(config, max_length=4096, dtype="bfloat16")
    assert memory_plan.goes_in_blocks(replace(setting, on_cpu=False), 2, "sliding_attention") is blocks
    assert memory_plan.goes_in_blocks(setting, 2, "sliding_attention")


# A checkpoint of Qwen2.5-7B-Instruct's size, and one of SmolLM2's.
QWEN_7B = {
    **{"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "attention_bias": True, "max_position_embeddings": 32768},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SMOLLM2 = {
    **{"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
}
LAYOUTS = (Layout(), Layout(8), Layout(8, True), Layout(8, True, 8))
# Start of a row of the table in sft/recipes/README.md -> recipes, and a preset or the fields of a checkpoint.
PLANS = {
    "`openthoughts`": (["openthoughts/sft", "openthoughts3/sft"], QWEN_7B),
    "`lora`": (["lora/sft"], QWEN_7B),
    "`long_context_64k`": (
        ["long_context_64k/continued", "long_context_64k/sft"],
        {**QWEN_7B, "max_position_embeddings": 65536, "rope_parameters": {"rope_type": "default", "rope_theta": 8e6}},
    ),
    "`paper_sft`, `pretrain`: 2.4B, 8192 tokens, IHA": (["paper_sft/sft", "pretrain/sft"], "paper-2.4b-iha"),
    "`paper_sft`, `pretrain`: 2.4B, 8192 tokens, global": (["paper_sft/sft", "pretrain/sft"], "paper-2.4b-global"),
    "`demo`": (["demo/sft"], SMOLLM2),
}


@pytest.mark.parametrize("start", PLANS)
def test_the_documented_memory_is_that_of_the_plan(start):
    recipes, model = PLANS[start]
    if isinstance(model, str):
        config = IHAConfig.from_preset(model)
    else:
        config = IHAConfig(num_pseudo_heads=2, pseudo_positions="shared", **model)
    on_cpu = model is SMOLLM2
    text = (ROOT / "sft" / "recipes" / "README.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {start}") and " GB |" in line)
    documented = [cell.strip().removesuffix(" GB") for cell in row.split("|")[2:-1] if cell.strip()]
    for name in recipes:
        arguments = ["--config", f"{ROOT}/sft/recipes/{name}.yaml"]
        run, args, _ = memory_plan.PlanParser(SFTConfig, USAGE).parse(arguments)
        setting = replace(run_setting(run_config(run, args, deepcopy(config)), run, args), on_cpu=on_cpu)
        totals = [estimate(replace(setting, layout=layout)).total / 1e9 for layout in LAYOUTS]
        assert [f"{total:.{int(on_cpu)}f}" for total in totals][: len(documented)] == documented


def test_the_documented_shares_of_the_measured_peak_are_those_of_the_table():
    text = " ".join((ROOT / "sft" / "recipes" / "README.md").read_text(encoding="utf-8").split())
    results = read_json(ROOT / "research" / "benchmarks" / "results" / "training_plan.json")
    ratios = {(name, row["tokens"]): ratio for row in results["rows"] for name, ratio in row["ratios"].items()}
    halves = [f"{ratio:.3f}" for (name, _), ratio in ratios.items() if "autocast" in name]
    others = [f"{ratio:.3f}" for (name, _), ratio in ratios.items() if "autocast" not in name]
    assert f"plan is {min(others)} to {max(others)} of the measured peak for eight configurations" in text
    assert f"and {min(halves)} and {max(halves)} under bf16 autocast (`{results['command']}`" in text
    assert len(others) == 2 * 8 and len(halves) == 2
