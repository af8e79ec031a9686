"""Compare what `iha cost` counts without data (iha/model_cost.py, iha/step_memory.py) with what models are and do."""

import json
import math
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import random_ids, random_model, set_core, small_config
from tiny_training import decoder
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3Config,
    GptOssConfig,
    Llama4Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    ViTConfig,
)
from transformers.cache_utils import DynamicCache

from iha import cost as cost_command
from iha import counted_attention
from iha.card_template import render_card
from iha.cost_arguments import CostArguments
from iha.counted_adapters import add_adapters
from iha.counted_attention import visible_pairs
from iha.counted_config import of_checkpoint, of_preset
from iha.errors import UserError
from iha.model_cost import cost_of_model, model_cost, passes_of_model
from iha.plain_models import with_mha
from iha.sources import find_source
from iha.step_memory import Counter, StepMemory, Way, of_sharded_training, of_training
from iha.without_data import keep_one_of_each, without_data
from modeling_iha import IHAConfig, interleave_heads, pair_heads
from modeling_iha.flop_matched_window import flop_matched_window
from modeling_iha.modeling_iha import ATTENTION_CLASSES
from modeling_iha.transformers_versions import CACHE
from sft import sequence_parallel


slow = partial(pytest.param, marks=pytest.mark.slow)
# The second layer has no window.
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# Kinds whose attention is an attention function of Transformers, which counts the pairs that a mask leaves.
VARIANTS = {
    "iha": {},
    "all_heads": {"pseudo_collapse": "all_heads", "num_pseudo_heads": 3},
    "qk-norm, biases, tied": {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True},
    "hybrid": {"attention_kinds": ["iha", "mha"], "head_dim": 12},
    "gates": {"attention_kinds": "mha", "mlp_gate_groups": 4, "output_gate": "elementwise"},
    "paired heads": {"attention_kinds": "paired_heads"},
    "diff": {"attention_kinds": "diff"},
    "knocking_heads": {"attention_kinds": "knocking_heads"},
}


def multiply_adds(function) -> int:
    """Return the multiply-adds of products; PyTorch knows neither those in place nor SDPA on a CPU."""
    products = {torch.ops.aten.addmm_: product_in_place, torch.ops.aten.baddbmm_: product_in_place}
    products[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu] = all_pairs
    with FlopCounterMode(display=False, custom_mapping=products) as counter:
        function()
    return counter.get_total_flops() // 2


def product_in_place(total, a, b, **kwargs):
    return 2 * math.prod(a) * b[-1]


def all_pairs(query, key, value, *args, **kwargs):
    return 2 * math.prod(query[:3]) * key[2] * (key[3] + value[3])


def products_of_pairs(config: IHAConfig, tokens: int) -> tuple[int, int]:
    """Return the multiply-adds of the scores of all pairs, and of those that causality and windows leave."""
    total = visible = 0
    for kind, layer_type in zip(config.attention_kinds, config.layer_types):
        virtual = config.num_pseudo_heads if kind in ("iha", "paired_heads") else 1
        length = tokens * virtual
        heads = config.num_attention_heads // (virtual if kind == "paired_heads" else 1)
        channels = heads * config.head_dim * (2 if kind == "diff" else 1)  # a softmax meets two halves of the values
        window = config.sliding_window * virtual if layer_type == "sliding_attention" else length
        total += channels * length**2
        visible += channels * sum(min(query + 1, window) for query in range(length))
    return total, visible


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_are_those_of_a_model_for_the_pairs_that_its_masks_leave(variant):
    config, tokens = small_config(**VARIANTS[variant], **WINDOWS), 11
    real, ids = random_model(config), random_ids(1, tokens)
    real.set_attn_implementation("eager")
    with torch.no_grad():
        forward = multiply_adds(lambda: real(ids, use_cache=False))
    both = multiply_adds(lambda: real(ids, use_cache=False).logits.sum().backward())
    total, visible = products_of_pairs(config, tokens)
    counted = cost_of_model(config, tokens)
    assert counted.parameters == real.num_parameters()
    assert counted.prefill == forward - 2 * (total - visible)
    assert passes_of_model(config, tokens) == (counted.prefill, counted.training)
    assert counted.training == both - 6 * (total - visible) + visible  # the backward pass computes scores again


@pytest.mark.parametrize("variant", ["iha", "hybrid", "paired heads"])
def test_decoding_and_the_cache_are_those_of_a_model(variant):
    config, tokens = small_config(**VARIANTS[variant], **WINDOWS), 11
    real, cache = random_model(config), DynamicCache(config=config)
    set_core(real, "base")
    counted = cost_of_model(config, tokens)
    with torch.no_grad():
        real(random_ids(1, tokens), **{CACHE: cache})
        assert sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) == counted.cache
        assert multiply_adds(lambda: real(random_ids(1, 1), **{CACHE: cache})) == counted.decode


def cost_of_attention(kind):
    return model_cost(small_config(attention_kinds=kind), 8).layers[0].attention


@pytest.fixture(scope="module")
def cost_of_mha():
    return cost_of_attention("mha")


@pytest.mark.parametrize("kind", [kind for kind in ATTENTION_CLASSES if kind != "mha"])
def test_every_kind_is_counted_and_costs_no_less_than_multi_head_attention(kind, cost_of_mha):
    own = cost_of_attention(kind)
    for part in ("parameters", "prefill", "training", "decode", "cache"):
        assert getattr(own, part) >= getattr(cost_of_mha, part) > 0, part


# Decoders of Transformers with what a reader of their configurations would have to know: experts, windows, chunks,
# other names of fields, text next to images, attention without SDPA, biases in some projections.
TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "vocab_size": 61, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0},
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
ROPE_3D = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
BASES = {
    "qwen2": Qwen2Config(**TEXT),
    "qwen3_moe": Qwen3MoeConfig(**TEXT, **EXPERTS),
    "gemma2": Gemma2Config(**{**TEXT, "num_hidden_layers": 2}, sliding_window=5),
    "gemma3": Gemma3Config(text_config={**TEXT, "sliding_window": 5}),
    "gpt_oss": GptOssConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "llama4": Llama4Config(text_config={**TEXT, "num_local_experts": 2, "attention_chunk_size": 4}),
    "opt": OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61),
    "qwen2_5_vl": Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": ROPE_3D}),
}


WITH_WINDOWS_OR_CHUNKS = ("gemma3", "llama4")


@pytest.mark.parametrize("name", [name if name in WITH_WINDOWS_OR_CHUNKS else slow(name) for name in BASES])
def test_a_decoder_of_transformers_is_counted_plain_and_interleaved(name, tmp_path):
    BASES[name].save_pretrained(tmp_path)
    plain, ours = (of_checkpoint(find_source(tmp_path), *changes) for changes in ((), (2,)))
    base, interleaved = model_cost(plain, 16), model_cost(ours, 16)
    assert interleaved.whole.cache >= base.whole.cache > 0  # windows keep one token more
    for part in ("parameters", "prefill", "training", "decode"):
        assert getattr(interleaved.whole, part) > getattr(base.whole, part) > 0
    assert [layer.rest for layer in base.layers] == [layer.rest for layer in interleaved.layers]
    assert base.rest == interleaved.rest


@pytest.mark.parametrize("name", ["qwen3_moe", *(slow(name) for name in BASES if name != "qwen3_moe")])
def test_the_memory_of_a_decoder_of_transformers_is_counted_plain_and_interleaved(name, tmp_path):
    BASES[name].save_pretrained(tmp_path)
    source = find_source(tmp_path)
    peaks = [of_training(of_checkpoint(source, *changes), 1, 16, Way(True)).peak for changes in ((), (2,))]
    assert 0 < peaks[0] < peaks[1]


def test_a_decoder_is_counted_as_it_is_built():
    """Qwen2 has biases in three projections of four, and a converted model in all."""
    counted = model_cost(BASES["qwen2"], 16)
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(BASES["qwen2"])
    assert counted.whole.parameters == real.num_parameters()
    attention = real.model.layers[0].self_attn
    assert counted.layers[0].attention.parameters == sum(weight.numel() for weight in attention.parameters())


def test_windows_and_chunks_of_a_decoder_leave_some_pairs():
    channels = 2 * TEXT["num_attention_heads"] * TEXT["head_dim"]
    for name, reach in (("gemma3", {"window": 5}), ("llama4", {"chunk": 4})):
        layers = [layer.attention.prefill for layer in model_cost(BASES[name], 16).layers]
        assert max(layers) - min(layers) == channels * (visible_pairs(16) - visible_pairs(16, **reach)), name
    assert visible_pairs(10, chunk=4) == 10 + 10 + 3 and visible_pairs(5, window=2) == 9


@pytest.mark.parametrize(("count", "schedule"), [("masked", 1), ("all pairs", 3 / 5)])
def test_flop_matched_window(count, schedule):
    """Give a sliding layer about as many pairs as a causal global layer, for which IHA, Appendix C counts N^2."""
    tokens, virtual = 8192, 4
    window = flop_matched_window(tokens, virtual) * virtual
    of_window, whole = visible_pairs(tokens * virtual, window), visible_pairs(tokens)
    if count == "all pairs":
        of_window, whole = tokens * virtual * window, tokens**2
    assert (4 * of_window + whole) / (5 * whole) == pytest.approx(schedule, rel=0.04)


@pytest.mark.parametrize("source", [slow("preset"), "config"])
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
    assert [line.split("  ")[0] for line in lines[1:4]] == [
        "iha, sliding_attention",
        "mha, full_attention",
        "FFN and norms",
    ]
    total = next(line for line in lines if line.startswith("whole model"))
    assert float(total.split()[2]) == pytest.approx(cost_of_model(config, 256).parameters / 1e6, abs=1e-3)
    assert any("GB, " in line and line.startswith("  this model: ") for line in lines)
    assert any(line.startswith("ratio to global mha everywhere") for line in lines)


SMOLLM2 = {
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    **{"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192},
}


@pytest.mark.parametrize(("window", "ratio"), [(1024, 0.98), (None, 2.54)])
def test_a_plain_base_costs_what_the_pages_say(tmp_path, window, ratio):
    LlamaConfig(**SMOLLM2).save_pretrained(tmp_path)
    base, ours = (of_checkpoint(find_source(tmp_path), *changes) for changes in ((), (2, window)))
    prefills = [passes_of_model(config, 8192).prefill for config in (ours, base)]
    assert prefills[0] / prefills[1] == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize(("name", "how"), [("llama", "paper"), ("mistral", "paired")])
def test_an_interleaved_checkpoint_is_counted_and_compared_with_its_base(tmp_path, name, how, capsys):
    plain = decoder(name, num_hidden_layers=5)
    size = plain.num_parameters()
    if how == "paired":
        changed = pair_heads(plain, 2)
    else:
        changed = interleave_heads(plain, 2, layers="paper", sliding_window=5)
    changed.save_pretrained(tmp_path)
    settings = of_checkpoint(find_source(tmp_path))
    assert cost_of_model(settings, 16).parameters == changed.num_parameters()
    cost_command.cost(CostArguments(16, source=find_source(tmp_path), count_memory=False))
    printed = capsys.readouterr().out
    assert printed.startswith(" ") and ("paired_heads, " if how == "paired" else "iha, window of 5") in printed
    ratio = next(line for line in printed.splitlines() if line.startswith("ratio to the plain model"))
    assert float(ratio.split()[5]) == pytest.approx(changed.num_parameters() / size, abs=1e-3)
    if how == "paper":
        assert of_checkpoint(find_source(tmp_path), 4).num_pseudo_heads == 4
        assert of_checkpoint(find_source(tmp_path), None, 3).interleaved_window == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (("paper-2.4b-global", {}, 4), "--num-pseudo-heads 4: no layer of this model has pseudo-heads"),
        (("paper-2.4b-global", {}, None, 64), "sliding_window=64 with .*None elsewhere"),
        (("paper-2.4b-iha", {}, 300), "leaves no window at 8192 tokens"),
    ],
)
def test_a_change_without_effect_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        of_preset(*source)


def test_a_window_that_a_plain_decoder_would_not_read_is_refused(tmp_path):
    LlamaConfig(**TEXT).save_pretrained(tmp_path / "llama")
    with pytest.raises(UserError, match="--window 5: no layer of this model has a window"):
        of_checkpoint(find_source(tmp_path / "llama"), None, 5)
    MistralConfig(**TEXT, sliding_window=None).save_pretrained(tmp_path / "mistral")
    assert of_checkpoint(find_source(tmp_path / "mistral"), None, 5).sliding_window == 5


def test_a_model_that_is_no_decoder_is_refused_in_one_line():
    with pytest.raises(UserError, match="vit is not a decoder of Transformers"):
        model_cost(ViTConfig(), 16)


@pytest.mark.parametrize("name", ["bamba", "falcon"])
def test_a_decoder_that_cannot_be_interleaved_without_data_is_refused_in_one_line(tmp_path, name):
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"^{name} cannot be counted without data: .*"):
        of_checkpoint(find_source(tmp_path), 2)


@pytest.mark.parametrize("name", ["mamba", "rwkv"])
def test_a_decoder_without_heads_is_counted(tmp_path, name, capsys):
    config = AutoConfig.for_model(name, hidden_size=64, num_hidden_layers=2, vocab_size=128)
    config.save_pretrained(tmp_path)
    cost_command.cost(CostArguments(16, source=find_source(tmp_path), count_memory=False))
    total = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("whole model"))
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    assert float(total.split()[2]) == pytest.approx(parameters / 1e6, abs=1e-3)


# Seven layers of two kinds, of which the first and the last are of different kinds.
MIXED = {
    "num_hidden_layers": 7,
    "attention_kinds": ["iha"] * 4 + ["mha", "iha", "mha"],
    "layer_types": ["sliding_attention"] * 4 + ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
}


def test_a_layer_of_each_kind_is_counted():
    kept = keep_one_of_each(without_data(small_config(**MIXED)))
    types = [layer.self_attn.layer_type for layer in kept.layers]
    assert types == ["sliding_attention", "full_attention"] and kept.like == [0, 0, 0, 0, 1, 0, 1]
    options = {"hyper_feature": {"orders": [1, 1, 2, 2]}}
    alike = keep_one_of_each(without_data(small_config(attention_kinds="hyper_feature", attention_options=options)))
    assert alike.like == [0, 0]


def test_gpus_share_what_stays_and_not_the_rows():
    config = small_config(**MIXED)
    two, four = (of_sharded_training(config, 2, 64, Way(checkpointing=True), gpus) for gpus in (2, 4))
    alone = of_training(config, 2, 64, Way(checkpointing=True))
    assert (two.gradients, two.optimizer) == (2 * four.gradients, 2 * four.optimizer)
    assert two.gradients == alone.gradients // 2 and two.optimizer == pytest.approx(alone.optimizer / 2, rel=0.01)
    saved = sum(getattr(two, name) - getattr(four, name) for name in ("weights", "gradients", "optimizer"))
    assert 0 < two.peak - four.peak <= saved and four.peak < alone.peak
    more = of_sharded_training(config, 4, 64, Way(checkpointing=True), 4)
    assert more.peak > four.peak and more.weights == four.weights


def test_a_loss_in_tiles_keeps_no_logits_of_a_large_vocabulary():
    config, tokens = small_config(vocab_size=40_000), 5_000
    whole, tiled = (of_training(config, 1, tokens, Way(True, tiled)) for tiled in (False, True))
    logits = 4 * tokens * config.vocab_size  # bytes in float32
    assert tiled.peak < logits < whole.peak
    assert whole[:3] == tiled[:3]


def test_several_gpus_a_time_and_a_file(monkeypatch, capsys, tmp_path):
    memory = StepMemory(1, 1, 1, 2_000_000_000)  # to count it takes seconds
    monkeypatch.setattr(cost_command, "of_sharded_training", lambda *_: memory)
    words = ["--preset", "tiny", "--tokens", "256", "--batch", "2", "--gpus", "4", "--tflops", "0.001"]
    monkeypatch.setattr(sys, "argv", ["cost.py", *words, "--json", str(tmp_path / "cost.json")])
    cost_command.main()
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "cost.json").read_text())
    config = IHAConfig.from_preset("tiny")
    counted = cost_of_model(config, 256)
    time = 2 * 2 * counted.training / 1e9
    assert "on each of 4 GPUs, sharded by FSDP2" in printed
    assert "time of a step of 8 rows, if each GPU computes 0.001 TFLOP/s, as --tflops assumes" in printed
    assert f"  this model: {time:.2f} s, {8 * 256 / time:,.0f} tokens/s; " in printed
    assert written["seconds_of_a_step"]["this model"]["nothing saved"] == pytest.approx(time)
    assert written["costs_of_a_sequence"]["whole model"]["parameters"] == counted.parameters
    peak = written["bytes_of_a_step"]["global mha"]["activation checkpointing"]["peak"]
    assert f"{peak / 1e9:.2f} with activation checkpointing," in printed
    for words in (["--gpus", "0"], ["--tflops", "-1"], ["--tflops", "nan"], ["--json", str(tmp_path)]):
        with pytest.raises(UserError, match=f"{words[0]}.*expected|is no regular file"):
            cost_command.main(["--preset", "tiny", "--tokens", "8", *words])


def test_a_forecast_of_a_preset_with_other_fields_in_hours(monkeypatch, capsys, tmp_path):
    for name in ("of_training", "of_sharded_training"):
        monkeypatch.setattr(cost_command, name, None)  # --no-memory counts none
    words = ["--preset", "tiny", "--tokens", "512", "--tflops", "0.5", "--steps", "3600", "--no-memory"]
    fields = {"max_position_embeddings": 512, "vocab_size": 1000, "num_pseudo_heads": 2}
    words += ["--json", str(tmp_path / "cost.json"), "--set", *(f"{name}={value}" for name, value in fields.items())]
    cost_command.main(words)
    written = json.loads((tmp_path / "cost.json").read_text())
    time = 2 * cost_of_model(IHAConfig.from_preset("tiny", **fields), 512).training / 5e11
    assert written["hours"]["this model"]["nothing saved"] == pytest.approx(time)
    assert f"3,600 steps in {time:.3g} h" in capsys.readouterr().out and written["bytes_of_a_step"] == {}
    mistakes = {"--steps 3": "give --tflops too", "--set nothing": "nothing: expected FIELD=VALUE"}
    mistakes |= {"--set no_field=1": "no_field", "--steps 0 --tflops 1": "--steps 0: expected at least 1"}
    for words, named in mistakes.items():
        with pytest.raises(UserError, match=named):
            cost_command.main(["--preset", "tiny", "--tokens", "8", *words.split()])


@pytest.mark.parametrize(("checkpointing", "recompute"), [(False, False), (False, True), (True, False)])
def test_the_memory_of_a_training_step_is_that_of_a_real_one(checkpointing, recompute):
    """Compare layers without windows: on a CPU a window copies keys, where FlashAttention copies none."""
    fields = {**MIXED, "layer_types": "full_attention", "sliding_window": None}
    config = small_config(**fields, recompute_virtual_tokens=recompute)
    counted = of_training(config, 2, 64, Way(checkpointing))
    real, counter = random_model(config).train(), Counter()
    if checkpointing:
        real.activation_checkpointing_enable()
    optimizer, ids = torch.optim.AdamW(real.parameters()), random_ids(2, 64)
    for tensor in (*real.parameters(), *real.buffers()):
        counter.add(tensor)
    with counter:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = real(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counted.peak == pytest.approx(counter.peak, rel=0.05)
    assert counted.weights == sum(tensor.nbytes for tensor in (*real.parameters(), *real.buffers()))
    assert counted.gradients == pytest.approx(sum(weight.nbytes for weight in real.parameters()), rel=0.02)


def test_a_rope_for_each_layer_type_is_that_of_the_layers_it_is_compared_with():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": rope, "sliding_attention": {**rope, "rope_type": "linear", "factor": 0.25}}
    config = small_config(**WINDOWS, attention_kinds="mha", rope_parameters=ropes)
    assert with_mha(config, "full_attention").rope_parameters == rope
    assert with_mha(config).rope_parameters == ropes
    assert "| ratio |" in render_card(config, "name")


# Adapters, checkpoints in the memory of the host, rows that processes share


@pytest.mark.parametrize("how", ["interleaved", slow("plain")])
def test_adapters_and_the_mixing_are_what_is_trained(how, tmp_path):
    BASES["qwen2"].save_pretrained(tmp_path)
    config = of_checkpoint(find_source(tmp_path), 2 if how == "interleaved" else None)
    whole, lora, four_bits = (
        of_training(config, 1, 16, Way(True, lora_r=rank, bits=bits)) for rank, bits in ((None, 32), (3, 32), (3, 4))
    )
    real = without_data(config)
    linear = [module for module in real.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    adapters = sum(3 * (module.in_features + module.out_features) for module in linear)
    mixing = sum(weight.numel() for name, weight in real.named_parameters() if "_mix." in name or "collapse." in name)
    assert (how == "interleaved") == (mixing > 0)
    assert lora.gradients == four_bits.gradients == 4 * (adapters + mixing)
    assert lora.weights - whole.weights == 4 * adapters
    in_bits = sum(module.weight.numel() for module in linear)
    others = real.num_parameters() - in_bits - mixing
    packed = in_bits / 2 + in_bits / 64 + 4 * len(linear) + 2 * others + 4 * (adapters + mixing)
    assert four_bits.weights == pytest.approx(packed, rel=0.05)
    assert four_bits.peak < lora.peak < whole.peak


def test_adapters_spare_the_gradients_of_the_weights_below_them(capsys):
    config, tokens = small_config(**VARIANTS["hybrid"]), 11
    real, ids = random_model(config), random_ids(1, tokens)
    real.set_attn_implementation("eager")
    add_adapters(real, real.model.layers, 3, 32)
    real.model.embed_tokens.float()
    both = multiply_adds(lambda: real(ids, use_cache=False).logits.sum().backward())
    total, visible = products_of_pairs(config, tokens)
    counted = passes_of_model(config, tokens, lora_r=3)
    assert counted.training == both - 6 * (total - visible) + visible
    words = "--preset tiny --tokens 256 --tflops 0.001 --no-memory"
    cost_command.main([*words.split(), "--lora-r", "4"])
    time = 2 * passes_of_model(IHAConfig.from_preset("tiny"), 256, 4).training / 1e9
    printed = capsys.readouterr().out
    assert "time of a step of 1 rows of LoRA of rank 4" in printed and f"this model: {time:.2f} s, " in printed


def test_offload_keeps_the_input_of_each_layer_from_the_peak():
    config, tokens = small_config(num_hidden_layers=12, vocab_size=61), 2_000
    here, there = (of_training(config, 1, tokens, Way(True, True, offload)) for offload in (False, True))
    inputs = 4 * config.num_hidden_layers * tokens * config.hidden_size
    assert 0.8 * inputs <= here.peak - there.peak <= inputs
    assert here[:3] == there[:3]


@pytest.mark.parametrize("window", [None, 20])
def test_rows_are_shared_as_sft_shares_them(window, monkeypatch):
    """Compare shapes and FLOPs with those of sft/sequence_parallel.py, in the middle of a group of processes."""
    size, rank, heads, groups, tokens = 4, 2, 8, 2, 32
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    def exchange(states, counts, received, group):
        return states.new_empty(sum(received), *states.shape[1:])

    monkeypatch.setattr(sequence_parallel, "exchange", exchange)
    AttentionInterface.register("counted_flash", counted_attention.attend)
    module = torch.nn.Module()
    module.config, module.layer_idx = small_config(), 0
    bounds = torch.tensor([0, size * tokens], dtype=torch.int32)
    real = sequence_parallel.AttendInPieces("counted_flash", dist.group.WORLD)
    stand_in = partial(counted_attention.attend_to_shared_row, size)
    found = []
    for attend in (real, stand_in):
        shapes = [(1, heads, tokens, 8), (1, groups, tokens, 8), (1, groups, tokens, 8)]
        states = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
        with FlopCounterMode(display=False, custom_mapping=counted_attention.FLOPS) as flops:
            output, _ = attend(module, *states, None, sliding_window=window, cu_seq_lens_q=bounds)
            output.sum().backward()
        # The stand-in for a flash core counts rows from their start, and a window reaches before a process's tokens.
        found.append((output.shape, None if window else flops.get_total_flops()))
    dist.destroy_process_group()
    assert found[0] == found[1]


def test_what_cannot_be_shared_or_is_not_counted_is_refused():
    for words, named in {
        "--share-rows 3 --gpus 8": "--share-rows 3: expected a divisor of --gpus",
        "--lora-r 8 --gpus 8": "LoRA is counted on one GPU",
        "--bits 4": "give --lora-r",
        "--num-pseudo-heads 2 --set num_pseudo_heads=2": "both say the same field: give one",
        "--window 4 --set sliding_window=4": "both say the same field: give one",
    }.items():
        with pytest.raises(UserError, match=named):
            cost_command.main(["--preset", "tiny", "--tokens", "8", *words.split()])
    words = "--preset tiny --set attention_kinds=talking_heads --tokens 8 --gpus 2 --share-rows 2 --no-memory"
    with pytest.raises(UserError, match="Layers that change scores"):
        cost_command.main(words.split())
    shared = Way(checkpointing=True, share_rows=8)
    with pytest.raises(UserError, match="8 processes cannot share 4 heads"):
        of_sharded_training(small_config(), 1, 64, shared, 8)
    with pytest.raises(UserError, match="Layers that change scores"):
        of_sharded_training(small_config(attention_kinds="talking_heads"), 1, 64, shared, 8)


def test_the_command_counts_shared_rows_and_adapters(capsys, monkeypatch, tmp_path):
    """Look at the ways whose memory is counted; the tests above count it."""
    sharded, alone = [], []

    def of_sharded(config, batch, tokens, way, gpus):
        sharded.append((way, gpus))
        return StepMemory(1, 1, 1, 2_000_000_000)

    def of_one(config, batch, tokens, way):
        alone.append(way)
        return StepMemory(1, 1, 1, 2_000_000_000)

    monkeypatch.setattr(cost_command, "of_sharded_training", of_sharded)
    monkeypatch.setattr(cost_command, "of_training", of_one)
    words = "--preset tiny --tokens 256 --gpus 2 --share-rows 2 --offload --tflops 1"
    cost_command.main([*words.split(), "--json", str(tmp_path / "cost.json")])
    written = json.loads((tmp_path / "cost.json").read_text())
    assert (written["share_rows"], written["lora_r"], written["bits"]) == (2, None, 32)
    printed = capsys.readouterr().out
    assert "training step on each of 2 GPUs, sharded by FSDP2 (not compared with a GPU), 2 of which share" in printed
    assert "with activation checkpointing in the host's memory and TRL's loss" in printed
    assert "time of a step of 1 rows" in printed
    cost_command.main("--preset tiny --tokens 64 --lora-r 4 --bits 4".split())
    assert "training step, LoRA of rank 4 on weights in 4 bits, AdamW" in capsys.readouterr().out
    assert sharded and all(way.share_rows == gpus == 2 for way, gpus in sharded)
    assert [way for way, _ in sharded if way.offload] == 2 * [Way(True, True, True, share_rows=2)]
    assert alone and all((way.lora_r, way.bits) == (4, 4) for way in alone)
