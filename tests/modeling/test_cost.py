"""Compare the cost model (iha/model_cost.py) with what models are and do."""

import json
import math
import sys

import pytest
import torch
from helpers import random_ids, random_model, set_core, small_config
from tiny_training import decoder
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

import iha.kinds.iha
from iha import cost as cost_command
from iha import model_cost as cost
from iha.card_template import render_card
from iha.errors import UserError
from iha.step_memory import Counter, StepMemory, of_sharded_training, of_training, one_layer_of_each
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, pair_heads
from modeling_iha.flop_matched_window import flop_matched_window
from modeling_iha.modeling_iha import ATTENTION_CLASSES
from modeling_iha.transformers_versions import CACHE


VARIANTS = {
    "grouped": {},
    "ungrouped, two-matrix FFN": {"num_key_value_heads": 4, "gated_mlp": False},
    "all_heads": {"pseudo_collapse": "all_heads", "num_pseudo_heads": 3},
    "qk-norm, biases, tied": {
        **{"use_qk_norm": True, "attention_bias": True, "mlp_bias": True},
        "tie_word_embeddings": True,
    },
    "hybrid": {"attention_kinds": ["iha", "mha"], "head_dim": 12},
    "mgate FFN": {"mlp_gate_groups": 4},
    "mha": {"attention_kinds": "mha"},
    "paired heads": {"attention_kinds": "paired_heads"},
    "iha, one pseudo-head": {"attention_kinds": "iha", "num_pseudo_heads": 1},
    "paired heads, groups of one": {"attention_kinds": "paired_heads", "num_pseudo_heads": 1},
    "diff_v2": {"attention_kinds": "diff_v2", "attention_bias": True},
    "gated": {"attention_kinds": "mha", "output_gate": "elementwise"},
    "knocking_heads": {"attention_kinds": "knocking_heads"},
    "knocking_heads, linear": {
        "attention_kinds": "knocking_heads",
        "attention_options": {"knocking_heads": {"queries": True, "keys": True, "values": "linear"}},
    },
    "iha, gated per head and exclusive": {"output_gate": "per_head", "exclusive_attention": True},
}
# Of the other kinds the parameters are exact, and the multiply-adds a leading term.
OTHER_KINDS = {
    "talking_heads": {"attention_kinds": "talking_heads"},
    "diff": {"attention_kinds": "diff"},
    "dcmha": {"attention_kinds": "dcmha"},
    "dcmha, ablated": {
        "attention_kinds": "dcmha",
        "attention_options": {
            "dcmha": {"rank": 1, "gate": False, "base_map": True, "stages": "pre", "sides": "query", "num_groups": 2}
        },
    },
    # A window keeps one token more next to "iha" layers.
    **{
        f"{kind} next to iha": {
            "attention_kinds": ["iha", kind],
            "layer_types": "sliding_attention",
            "sliding_window": 5,
        }
        for kind in ("mha", "talking_heads")
    },
    "hyper_feature": {"attention_kinds": "hyper_feature"},
    "hyper_feature, value product": {
        "attention_kinds": "hyper_feature",
        "attention_bias": True,
        "attention_options": {"hyper_feature": {"orders": [1, 1, 4, 4], "value_product": True}},
    },
}
WITHOUT = ("hyper", "simplicial")  # kinds over pairs: `iha cost` raises an error for them
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


def parameters_of(config):
    with torch.device("meta"):
        model = IHAForCausalLM(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_kind_has_a_cost_and_a_case_here():
    without = {kind for kind, companion in iha.kinds.all_companions().items() if companion.cost is None}
    assert without == {*WITHOUT}
    tested = {kind for fields in (VARIANTS | OTHER_KINDS).values() for kind in small_config(**fields).attention_kinds}
    assert tested == ATTENTION_CLASSES.keys() - without


@pytest.mark.parametrize("kind", [kind for kind in ATTENTION_CLASSES if kind not in WITHOUT])
def test_no_kind_costs_less_than_multi_head_attention(kind):
    config = small_config(attention_kinds=kind)
    own, mha = (iha.kinds.companion_of(each).cost(config, 64, None, "sdpa") for each in (kind, "mha"))
    for part in ("prefill", "training", "decode", "cache"):
        assert getattr(own, part) >= getattr(mha, part) > 0, part


@pytest.mark.parametrize("variant", [*VARIANTS, *OTHER_KINDS])
def test_parameters(variant):
    config = small_config(**{**VARIANTS, **OTHER_KINDS}[variant])
    assert cost.model(config, 16).parameters == parameters_of(config)


@pytest.mark.parametrize("variant", OTHER_KINDS)
def test_cache_of_other_kinds(variant):
    config, tokens = small_config(**OTHER_KINDS[variant]), 11
    with torch.no_grad():
        cache = random_model(config)(random_ids(1, tokens), use_cache=True)[CACHE]
    assert sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) == cost.model(config, tokens).cache


@pytest.mark.parametrize("count, schedule", [("sdpa", 1), ("paper", 3 / 5)])
def test_flop_matched_window(count, schedule):
    """Give a sliding layer about as many pairs as a causal global layer, for which IHA, Appendix C counts N^2."""
    tokens, virtual = 8192, 4
    window = iha.layer_cost.counted_pairs(count, tokens, virtual, flop_matched_window(tokens, virtual))
    whole = iha.layer_cost.counted_pairs(count, tokens)
    assert (4 * window + whole) / (5 * whole) == pytest.approx(schedule, rel=0.04)


def in_place_product(total, a, b, **kwargs):
    return 2 * math.prod(a) * b[-1]


# PyTorch's counter does not know products in place, and that of 2.15 knows SDPA on a CPU, which 2.13's does not.
PRODUCTS = {
    torch.ops.aten.addmm_: in_place_product,
    torch.ops.aten.baddbmm_: in_place_product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *_, **__: 0,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *_, **__: 0,
}


def multiply_adds(function):
    with FlopCounterMode(display=False, custom_mapping=PRODUCTS) as counter:
        function()
    return counter.get_total_flops() // 2


@pytest.mark.one_of(2)
@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full", "window"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_eager_products(variant, windows):
    config, tokens = small_config(**VARIANTS[variant], **windows), 11
    model = random_model(config)
    model.set_attn_implementation("eager")
    expected, ids = cost.model(config, tokens, "eager"), random_ids(1, tokens)
    with torch.no_grad():
        assert multiply_adds(lambda: model(ids, use_cache=False)) == expected.prefill
    counted = multiply_adds(lambda: model(ids, use_cache=False).logits.sum().backward())
    assert counted == expected.training


# The products of SDPA are not counted, so what is counted does without.
@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "variant, form",
    [
        *((variant, "eager") for variant in VARIANTS),
        *((name, "base") for name in (*list(VARIANTS)[:2], "paired heads")),
    ],
)
@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full", "window"])
def test_decode_and_cache(variant, windows, form):
    config, tokens = small_config(**VARIANTS[variant], **windows), 11
    model = random_model(config)
    set_core(model, form)
    expected, cache = cost.model(config, tokens, "sdpa" if form == "base" else form), DynamicCache(config=config)
    with torch.no_grad():
        model(random_ids(1, tokens), **{CACHE: cache})
        assert sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) == expected.cache
        counted = multiply_adds(lambda: model(random_ids(1, 1), **{CACHE: cache}))
    assert counted == expected.decode


def test_unknown_kind_is_refused(monkeypatch):
    monkeypatch.setattr(iha.kinds.iha, "COMPANION", iha.kinds.Companion())
    with pytest.raises(UserError, match="'mha', .*not 'iha': add its function"):
        cost.model(small_config(), 16)


@pytest.mark.parametrize("source", ["preset", "config"])
def test_command(monkeypatch, capsys, tmp_path, source):
    types = ["sliding_attention", "full_attention"]
    few = {"num_hidden_layers": 2, "attention_kinds": ["iha", "mha"], "layer_types": types}
    config = IHAConfig.from_preset("small-1m-iha", **(few if source == "config" else {}))
    config.save_pretrained(tmp_path)
    name = tmp_path if source == "config" else "small-1m-iha"
    if source == "preset":  # to count the memory of a step takes seconds
        monkeypatch.setattr(cost_command, "of_training", lambda *_: StepMemory(1, 1, 1, 2_000_000_000))
    monkeypatch.setattr(sys, "argv", ["cost.py", f"--{source}", str(name), "--tokens", "256"])
    cost_command.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == ["iha, sliding_attention", "mha, full_attention"]
    total = next(line for line in lines if line.startswith("whole model"))
    assert float(total.split()[2]) == pytest.approx(cost.model(config, 256).parameters / 1e6, abs=1e-3)
    assert any("GB, " in line and line.startswith("  this model: ") for line in lines)


SMOLLM2 = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    **{"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192},
}


@pytest.mark.parametrize(("window", "ratio"), [(1024, 0.98), (None, 2.54)])
def test_a_plain_base_costs_what_the_readme_says(tmp_path, window, ratio):
    LlamaConfig(**SMOLLM2).save_pretrained(tmp_path)
    base, ours = (cost_command.settings_of(None, tmp_path, *changes) for changes in ((), (2, window)))
    assert set(base.attention_kinds) == {"mha"} and set(base.layer_types) == {"full_attention"}
    assert cost.model(ours, 8192).prefill / cost.model(base, 8192).prefill == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("how", ["paper", "global", "paired"])
def test_an_interleaved_checkpoint_costs_what_its_model_has(tmp_path, name, how):
    model = decoder(name, num_hidden_layers=5)
    if how == "paired":
        pair_heads(model, 2)
    else:
        window = {"layers": "paper", "sliding_window": 5} if how == "paper" else {}
        interleave_heads(model, 2, **window)
    model.save_pretrained(tmp_path)
    if name == "mistral" and how == "paper":
        with pytest.raises(UserError, match="Its windows are of 5 and of"):
            cost_command.settings_of(None, tmp_path)
        return
    settings = cost_command.settings_of(None, tmp_path)
    assert cost.model(settings, 16).parameters == parameters_of(settings) == model.num_parameters()
    kinds = {"paper": ["iha"] * 4 + ["mha"], "global": ["iha"] * 5, "paired": ["paired_heads"] * 5}[how]
    windows = {"llama": ["full_attention"] * 5, "mistral": ["sliding_attention"] * 5}[name]
    if how == "paper":
        windows = ["sliding_attention"] * 4 + ["full_attention"]
        assert settings.sliding_window == 5
    assert (settings.attention_kinds, settings.layer_types) == (kinds, windows)
    if how != "paired":  # whose heads no group of four divides
        assert cost_command.settings_of(None, tmp_path, 4).num_pseudo_heads == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (("paper-2.4b-global", None, 4), "--num-pseudo-heads 4: no layer of this model has pseudo-heads"),
        (("paper-2.4b-global", None, None, 64), "sliding_window=64 with .*None elsewhere"),
        (("paper-2.4b-iha", None, 300), "leaves no window at 8192 tokens"),
    ],
)
def test_a_change_without_effect_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        cost_command.settings_of(*source)


# Seven layers of two kinds, of which the first and the last are of different kinds.
MIXED = {
    "num_hidden_layers": 7,
    "attention_kinds": ["iha"] * 4 + ["mha", "iha", "mha"],
    "layer_types": ["sliding_attention"] * 4 + ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
}


def test_a_layer_of_each_kind_is_counted():
    short, like = one_layer_of_each(small_config(**MIXED))
    assert short.attention_kinds == ["iha", "mha"] and like == [0, 0, 0, 0, 1, 0, 1]


def test_gpus_share_what_stays_and_not_the_rows():
    config = small_config(**MIXED)
    two, four = (of_sharded_training(config, 2, 64, True, False, gpus) for gpus in (2, 4))
    alone = of_training(config, 2, 64, True)
    assert (two.gradients, two.optimizer) == (2 * four.gradients, 2 * four.optimizer)
    assert two.gradients == alone.gradients // 2 and two.optimizer == pytest.approx(alone.optimizer / 2, rel=0.01)
    saved = sum(getattr(two, name) - getattr(four, name) for name in ("weights", "gradients", "optimizer"))
    assert 0 < two.peak - four.peak <= saved and four.peak < alone.peak
    more = of_sharded_training(config, 4, 64, True, False, 4)
    assert more.peak > four.peak and more.weights == four.weights


def test_a_loss_in_tiles_keeps_no_logits_of_a_large_vocabulary():
    config, tokens = small_config(vocab_size=40_000), 5_000
    whole, tiled = (of_training(config, 1, tokens, True, tiled) for tiled in (False, True))
    logits = 4 * tokens * config.vocab_size  # bytes in float32
    assert tiled.peak < logits < whole.peak
    assert whole[:3] == tiled[:3]


def test_several_gpus_a_time_and_a_file(monkeypatch, capsys, tmp_path):
    words = ["--preset", "small-1m-iha", "--tokens", "256", "--batch", "2", "--gpus", "4", "--tflops", "0.001"]
    monkeypatch.setattr(sys, "argv", ["cost.py", *words, "--json", str(tmp_path / "cost.json")])
    cost_command.main()
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "cost.json").read_text())
    config = IHAConfig.from_preset("small-1m-iha")
    time = 2 * 2 * cost.model(config, 256).training / 1e9
    assert "on each of 4 GPUs, sharded by FSDP2" in printed
    assert "time of a step of 8 rows, if each GPU computes 0.001 TFLOP/s, as --tflops assumes" in printed
    assert f"  this model: {time:.2f} s, {8 * 256 / time:,.0f} tokens/s; " in printed
    assert written["seconds_of_a_step"]["this model"]["nothing saved"] == pytest.approx(time)
    assert written["costs_of_a_sequence"]["whole model"]["parameters"] == parameters_of(config)
    peak = written["bytes_of_a_step"]["global mha"]["activation checkpointing"]["peak"]
    assert f"{peak / 1e9:.2f} with activation checkpointing," in printed
    for words in (["--gpus", "0"], ["--tflops", "-1"], ["--tflops", "nan"], ["--json", str(tmp_path)]):
        with pytest.raises(UserError, match=f"{words[0]}.*expected|is a directory"):
            cost_command.main(["--preset", "tiny", "--tokens", "8", *words])


def test_a_forecast_of_a_preset_with_other_fields_in_hours(monkeypatch, capsys, tmp_path):
    for name in ("of_training", "of_sharded_training"):
        monkeypatch.setattr(cost_command, name, None)  # --no-memory counts none
    words = ["--preset", "small-1m-iha", "--tokens", "512", "--tflops", "0.5", "--steps", "3600", "--no-memory"]
    fields = {"max_position_embeddings": 512, "vocab_size": 1000, "num_pseudo_heads": 2}
    words += ["--json", str(tmp_path / "cost.json"), "--set", *(f"{name}={value}" for name, value in fields.items())]
    cost_command.main(words)
    written = json.loads((tmp_path / "cost.json").read_text())
    time = 2 * cost.model(IHAConfig.from_preset("small-1m-iha", **fields), 512).training / 5e11
    assert written["hours"]["this model"]["nothing saved"] == pytest.approx(time)
    assert f"3,600 steps in {time:.3g} h" in capsys.readouterr().out and written["bytes_of_a_step"] == {}
    mistakes = {"--steps 3": "give --tflops too", "--set nothing": "nothing: expected FIELD=VALUE"}
    mistakes |= {"--set no_field=1": "no_field", "--steps 0 --tflops 1": "--steps 0: expected at least 1"}
    for words, named in mistakes.items():
        with pytest.raises(UserError, match=named):
            cost_command.main(["--preset", "tiny", "--tokens", "8", *words.split()])


@pytest.mark.parametrize(("checkpointing", "recompute"), [(False, False), (False, True), (True, False)])
def test_the_memory_of_a_training_step_is_that_of_a_real_one(checkpointing, recompute):
    config = small_config(**MIXED, recompute_virtual_tokens=recompute)
    counted = of_training(config, 2, 64, checkpointing)
    model, counter = random_model(config).train(), Counter()
    if checkpointing:
        model.activation_checkpointing_enable()
    optimizer, ids = torch.optim.AdamW(model.parameters()), random_ids(2, 64)
    for tensor in (*model.parameters(), *model.buffers()):
        counter.add(tensor)
    with counter:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counted.peak == pytest.approx(counter.peak, rel=0.05)
    assert counted.weights == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert counted.gradients == pytest.approx(sum(weight.nbytes for weight in model.parameters()), rel=0.02)


def test_a_rope_for_each_layer_type_is_that_of_the_layers_it_is_compared_with():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": rope, "sliding_attention": {**rope, "rope_type": "linear", "factor": 0.25}}
    config = small_config(**WINDOWS, attention_kinds="mha", rope_parameters=ropes)
    assert cost.with_mha(config, "full_attention").rope_parameters == rope
    assert cost.with_mha(config).rope_parameters == ropes
    assert "| ratio |" in render_card(config, "name")
