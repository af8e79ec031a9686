"""Hold the loops of `references/` to Llama and to the paper, and compare with them what test_drawn.py does not draw.

What every kind must hold is in test_drawn.py and test_mechanisms.py, what is particular to a kind in its own file.
"""

from functools import partial

import pytest
import torch
from helpers import (
    FP32,
    FP64,
    FP64_EXACT,
    LLAMA,
    LOCAL_ROPE,
    assert_attention_matches,
    assert_gradients_match,
    gradients,
    greedy,
    kind_config,
    logits_in_chunks,
    random_ids,
    random_model,
    reference_logits,
    reference_weights,
    relative_error,
    set_core,
    small_config,
    uncached_logits,
)
from references.iha import causal_lm, iha_attention, mha_attention
from references.options import AttentionOptions, llama_inv_freq
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from modeling_iha import IHAConfig, IHAForCausalLM, virtual_tokens
from modeling_iha.interleaving import MixedHeads


# The reference itself


def test_reference_mha_is_llama():
    """Compare RoPE, GQA and softmax with Llama's: one pseudo-head that copies its head makes the reference Llama."""
    config = LlamaConfig(**LLAMA)
    model = random_model(config, LlamaForCausalLM, dtype=torch.float64)
    input_ids = random_ids(2, 9)
    options = AttentionOptions(4, 2, 8, llama_inv_freq(8, config.rope_parameters["rope_theta"]), norm_eps=1e-6)
    weights = reference_weights(model)
    expected, logits = (
        causal_lm(input_ids, weights, [partial(mha_attention, options=options)] * 2),
        model(input_ids).logits,
    )
    assert relative_error(logits, expected) < FP64
    assert_gradients_match(gradients(logits, dict(model.named_parameters())), gradients(expected, weights), FP64)


def test_reference_window_counts_virtual_tokens():
    """Count a one-token window as P virtual keys: it ends on the query, so it reaches into the token before it."""
    options = AttentionOptions(1, 1, 2, torch.zeros(1, dtype=torch.float64), num_pseudo_heads=3, window=1)
    eye, ones = torch.eye(2, dtype=torch.float64), torch.ones(1, 1, 3, dtype=torch.float64)
    weights = {f"{name}_proj.weight": eye for name in ("k", "v", "o")} | {"q_proj.weight": 0 * eye}
    weights |= {f"{name}_mix.weight": ones for name in "qkv"} | {"collapse.weight": ones[0]}
    hidden = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    # All scores are equal. The three virtual queries of token 1 see 2, 1 and 0 virtual keys of token 0, out of 3.
    expected = torch.tensor([[[3.0, 0.0], [1.0, 2.0]]], dtype=torch.float64)
    assert torch.allclose(iha_attention(hidden, weights, options), expected)


# The attention layer: Algorithm 1


POSITIONS = ["interleaved", "shared"]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("num_pseudo_heads", [3, 5])
def test_interleaved_positions_are_rotated_in_float64(num_pseudo_heads, window):
    """Set theta to 16, which makes the frequencies exact. test_drawn.py compares whole models."""
    rope = {"rope_type": "default", "rope_theta": 16.0}
    config = kind_config("iha", window=window, num_pseudo_heads=num_pseudo_heads, rope_parameters=rope)
    assert_attention_matches(config, FP64_EXACT, dtype=torch.float64)


# The whole model


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("part_bytes", [1, 2**40])
def test_heads_are_computed_in_parts(part_bytes, positions, monkeypatch):
    """Without gradients a CPU makes the virtual tokens of some key/value heads and their queries at once."""
    config = small_config(num_pseudo_heads=3, pseudo_positions=positions, num_key_value_heads=2)
    model = random_model(config, dtype=torch.float64)
    input_ids, parts, in_parts = random_ids(2, 9), [], MixedHeads.in_parts

    def recorded(heads, count):
        parts.append(in_parts(heads, count))
        return parts[-1]

    monkeypatch.setattr(virtual_tokens, "CPU_PART_BYTES", part_bytes)
    monkeypatch.setattr(MixedHeads, "in_parts", recorded)
    with torch.no_grad():
        logits = model(input_ids).logits
    expected, _ = reference_logits(model, input_ids)
    assert {len(each) for each in parts} == {2 if part_bytes == 1 else 1}
    assert relative_error(logits, expected) < FP64


ROPE_OPTIONS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "proportional": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize(
    ("rope_type", "positions", "core"),
    [
        (rope_type, POSITIONS[n], ["sdpa", "base"][(i + n) % 2])
        for i, rope_type in enumerate(["default", *ROPE_INIT_FUNCTIONS])
        for n in range(2)
    ],
)
def test_rope_types(core, rope_type, positions):
    """Compare every RoPE type of Transformers with the reference at that type's frequencies, uncached and cached."""
    rope = {"rope_type": rope_type, "rope_theta": 100.0, **ROPE_OPTIONS[rope_type]}
    config = small_config(
        attention_kinds=["iha", "mha"], num_pseudo_heads=3, pseudo_positions=positions, rope_parameters=rope
    )
    model = random_model(config)
    set_core(model, core)
    input_ids = random_ids(2, 9)
    logits = model(input_ids).logits
    expected, _ = reference_logits(model, input_ids)
    assert relative_error(logits, expected) < FP32

    assert relative_error(logits_in_chunks(model, input_ids, [1] * 9), expected) < FP32


def test_rope_of_each_layer_type_in_use(tmp_path):
    """Generate, in float32 and in bfloat16 (whose frequencies stay in float32), and load what was saved."""
    model, prompt = random_model(small_config(num_pseudo_heads=3, **LOCAL_ROPE)), random_ids(2, 5)
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, greedy(model, prompt, 6))
    model.save_pretrained(tmp_path)
    loaded = IHAForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    assert torch.equal(uncached_logits(loaded, tokens), uncached_logits(model, tokens))
    frequencies = model.model.rotary_emb_sliding.inv_freq.clone()
    assert torch.equal(model.to(torch.bfloat16).model.rotary_emb_sliding.inv_freq, frequencies)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rope_theta'"):
        IHAForCausalLM.from_pretrained(tmp_path, rope_theta=5.0)


# What the paper claims of the layer


@pytest.mark.parametrize("collapse", ["per_head", "all_heads"])
def test_a_new_layer_copies_its_heads_and_takes_their_mean(collapse):
    config = small_config(num_pseudo_heads=3, pseudo_collapse=collapse, initializer_range=0.0)
    states = torch.randn(2, 5 * 3, 4, 8)
    layer = IHAForCausalLM(config).model.layers[0].self_attn
    for mixing in (layer.q_mix.weight, layer.k_mix.weight, layer.v_mix.weight):
        assert torch.equal(mixing, torch.eye(len(mixing))[..., None].expand(-1, -1, 3))
    collapsed = MixedHeads.of_module(layer, states).collapse_output(states)
    torch.testing.assert_close(collapsed, states.unflatten(1, (5, 3)).mean(2))


def select_pseudo_head(model, selected):
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for mixing in (attention.q_mix, attention.k_mix, attention.v_mix):
                mixing.weight.copy_(torch.eye(mixing.weight.shape[0]).unsqueeze(-1).expand_as(mixing.weight))
            choice = torch.zeros(model.config.num_pseudo_heads)
            choice[selected] = 1
            heads = torch.eye(attention.collapse.weight.shape[0])
            if attention.collapse.weight.shape[1] == len(choice):
                heads = torch.ones(len(heads), 1)
            attention.collapse.weight.copy_(torch.kron(heads, choice))


@pytest.mark.parametrize("collapse", ["per_head", "all_heads"])
@pytest.mark.parametrize("num_pseudo_heads", [2, 3, 4])
def test_mha_is_contained(num_pseudo_heads, collapse):
    """Select one pseudo-head of identity mixing: the last one gives multi-head attention (IHA, Theorem 2).

    Its query sees all P copies of every token up to its own, so the P-fold sums of the softmax cancel. The first
    pseudo-head sees one copy of its token and P of all earlier ones, so its token is weighted P times too
    little.
    """
    config = small_config(num_pseudo_heads=num_pseudo_heads, pseudo_collapse=collapse, pseudo_positions="shared")
    model = random_model(config)
    mha = random_model(small_config(attention_kinds="mha"))
    mha.load_state_dict({k: v for k, v in model.state_dict().items() if k in mha.state_dict()})
    input_ids = random_ids(2, 9)
    with torch.no_grad():
        expected = mha(input_ids).logits.double()
        select_pseudo_head(model, num_pseudo_heads - 1)
        assert relative_error(model(input_ids).logits, expected) < FP32
        select_pseudo_head(model, 0)
        first = model(input_ids).logits
        assert relative_error(first, expected) > 0.1
        # A lone token has nothing before it: there the first pseudo-head is right, too.
        assert relative_error(first[:, :1], expected[:, :1]) < FP32


def test_mha_layers_are_llama():
    llama = random_model(LlamaConfig(**LLAMA), LlamaForCausalLM)
    model = IHAForCausalLM(IHAConfig(attention_kinds="mha", **LLAMA)).eval()
    model.load_state_dict(llama.state_dict())
    input_ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, llama(input_ids).logits)
