"""The model against the loops of `references/`: forward and gradients, and all attention cores against each other.
What every kind must hold is in test_mechanisms.py, what is particular to another kind in its own file.

Tolerances are relative to the largest entry of what is compared (`relative_error`).
"""

from functools import cache, partial
from itertools import product

import pytest
import torch
from helpers import (
    BF16_GRADIENT,
    BF16_OUTPUT,
    CORES,
    FP32,
    FP64,
    FP64_EXACT,
    HYBRID,
    LLAMA,
    assert_attention_matches,
    assert_gradients_match,
    gradients,
    logits_in_chunks,
    packing,
    padding,
    random_ids,
    random_model,
    reference_logits,
    reference_weights,
    relative_error,
    set_core,
    small_config,
)
from references.iha import causal_lm, iha_attention, mha_attention
from references.options import AttentionOptions, llama_inv_freq
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_iha import IHAConfig, IHAForCausalLM, attention_iha
from modeling_iha.attention_iha import mix


# The reference itself


def test_reference_mha_is_llama():
    """With one pseudo-head that copies its head the reference is Llama, so its RoPE, GQA and softmax are Llama's."""
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
    """A one-token window is P virtual keys: it ends on the query, so it reaches into the token before it."""
    options = AttentionOptions(1, 1, 2, torch.zeros(1, dtype=torch.float64), num_pseudo_heads=3, window=1)
    eye, ones = torch.eye(2, dtype=torch.float64), torch.ones(1, 1, 3, dtype=torch.float64)
    weights = {f"{name}_proj.weight": eye for name in ("k", "v", "o")} | {"q_proj.weight": 0 * eye}
    weights |= {f"{name}_mix.weight": ones for name in "qkv"} | {"collapse.weight": ones[0]}
    hidden = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    # All scores are equal. The three virtual queries of token 1 see 2, 1 and 0 virtual keys of token 0, out of 3.
    expected = torch.tensor([[[3.0, 0.0], [1.0, 2.0]]], dtype=torch.float64)
    assert torch.allclose(iha_attention(hidden, weights, options), expected)


# The attention layer: Algorithm 1


def in_each_form(**choices):
    """Every combination of these choices in both forms of the fixture `form`. One pseudo-head and a collapse over all
    heads are always computed on the virtual sequence: once is enough."""
    names, cases = ("form", *choices), []
    for form, *values in product(["virtual", "base"], *choices.values()):
        fields = dict(zip(choices, values))
        if form == "virtual" or (fields["num_pseudo_heads"] > 1 and fields["pseudo_collapse"] == "per_head"):
            cases.append((form, *values))
    return pytest.mark.parametrize(names, cases, indirect=["form"])


def layer_config(window=None, **overrides):
    window_fields = {} if window is None else {"layer_types": "sliding_attention", "sliding_window": window}
    return small_config(num_hidden_layers=1, **window_fields, **overrides)


@pytest.mark.parametrize(("heads", "window"), [((4, 4), None), ((4, 2), 1), ((3, 1), 7), ((4, 2), 20)], ids=str)
@in_each_form(
    num_pseudo_heads=[1, 2, 3, 4, 5],
    pseudo_positions=["interleaved", "shared"],
    pseudo_collapse=["per_head", "all_heads"],
)
def test_attention_matches_reference(form, num_pseudo_heads, pseudo_positions, pseudo_collapse, heads, window):
    """Every pairing of heads and window at P = 2 is in the mechanism suite."""
    num_heads, num_groups = heads
    config = layer_config(
        window,
        hidden_size=8 * num_heads,
        num_attention_heads=num_heads,
        num_key_value_heads=num_groups,
        num_pseudo_heads=num_pseudo_heads,
        pseudo_positions=pseudo_positions,
        pseudo_collapse=pseudo_collapse,
    )
    assert_attention_matches(config, FP32)


@pytest.mark.parametrize("window", [None, 1, 7])
@in_each_form(num_pseudo_heads=[1, 2, 5], pseudo_collapse=["per_head", "all_heads"])
def test_attention_matches_reference_in_float64(form, num_pseudo_heads, pseudo_collapse, window):
    """Interleaved positions are rotated in float64 throughout, and theta = 16 makes the frequencies 1, 1/2, 1/4 and
    1/8."""
    config = layer_config(
        window,
        num_pseudo_heads=num_pseudo_heads,
        pseudo_collapse=pseudo_collapse,
        rope_parameters={"rope_type": "default", "rope_theta": 16.0},
    )
    assert_attention_matches(config, FP64_EXACT, dtype=torch.float64)


@in_each_form(
    num_pseudo_heads=[1, 2, 3, 4, 5],
    pseudo_collapse=["per_head", "all_heads"],
    pseudo_positions=["interleaved", "shared"],
)
def test_attention_matches_reference_in_bfloat16(form, num_pseudo_heads, pseudo_collapse, pseudo_positions):
    config = layer_config(
        num_pseudo_heads=num_pseudo_heads, pseudo_positions=pseudo_positions, pseudo_collapse=pseudo_collapse
    )
    assert_attention_matches(config, BF16_OUTPUT, BF16_GRADIENT, dtype=torch.bfloat16)


# The whole model


@pytest.mark.parametrize(
    "overrides",
    [
        {"use_qk_norm": True},
        {"attention_bias": True, "mlp_bias": True},
        {"gated_mlp": False, "hidden_act": "gelu", "tie_word_embeddings": True},
        {"head_dim": 6, "pseudo_positions": "shared", "pseudo_collapse": "all_heads"},
        {
            **HYBRID,
            "sliding_window": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "gated_mlp": False,
            "mlp_bias": True,
        },
        {"attention_kinds": ["iha", "mha", "talking_heads", "diff"], "num_hidden_layers": 4},
    ],
    ids=[
        *("qk_norm", "biases", "two_matrix_ffn", "wide_shared_all_heads", "hybrid_everything", "four_kinds"),
    ],
)
def test_model_matches_reference(form, overrides):
    model = random_model(small_config(num_pseudo_heads=3, **overrides), dtype=torch.float64)
    input_ids = random_ids(2, 9)
    logits = model(input_ids).logits
    expected, weights = reference_logits(model, input_ids)
    assert relative_error(logits, expected) < FP64
    assert_gradients_match(gradients(logits, dict(model.named_parameters())), gradients(expected, weights), FP64)


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
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("positions", ["interleaved", "shared"])
@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
def test_rope_types(form, rope_type, positions):
    """Every RoPE type of Transformers: equal to the reference with that type's frequencies, and cached equal to
    uncached."""
    rope = {"rope_type": rope_type, "rope_theta": 100.0, **ROPE_OPTIONS[rope_type]}
    config = small_config(
        attention_kinds=["iha", "mha"], num_pseudo_heads=3, pseudo_positions=positions, rope_parameters=rope
    )
    model = random_model(config)
    input_ids = random_ids(2, 9)
    logits = model(input_ids).logits
    expected, _ = reference_logits(model, input_ids)
    assert relative_error(logits, expected) < FP32

    assert relative_error(logits_in_chunks(model, input_ids, [1] * 9), expected) < FP32


# Kinds side by side on every core


@cache
def two_kinds(positions, inputs):
    """Config of global and window layers of two kinds, input ids, arguments of a forward pass, the tokens that count,
    and the reference's logits and gradients there."""
    config = small_config(**HYBRID, sliding_window=5, num_pseudo_heads=3, pseudo_positions=positions)
    real = torch.ones(1 if inputs == "packed" else 2, inputs if isinstance(inputs, int) else 10, dtype=torch.bool)
    of_model, of_reference = {}, {}
    if inputs == "padded":
        real[0, :3] = False
        of_model, of_reference = padding(real)
    if inputs == "packed":
        of_model, of_reference = packing((7, 1, 2))
    input_ids = random_ids(*real.shape)
    expected, weights = reference_logits(random_model(config), input_ids, **of_reference)
    return config, input_ids, of_model, real, expected[real].detach(), gradients(expected[real], weights)


@pytest.mark.parametrize("inputs", [5, 6, 7, "padded", "packed"], ids=["W", "W+1", "W+2", "padded", "packed"])
@pytest.mark.parametrize("positions", ["interleaved", "shared"])
@pytest.mark.parametrize("core", CORES)
def test_cores_agree(cpu_cores, core, positions, inputs):
    """Logits and gradients; the window of 5 tokens begins to bind at these lengths."""
    config, input_ids, of_model, real, expected, expected_gradients = two_kinds(positions, inputs)
    model = random_model(config)
    set_core(model, core)
    with torch.set_grad_enabled(core != "flex_attention"):  # it has no CPU backward
        logits = model(input_ids, use_cache=False, **of_model).logits
    assert relative_error(logits[real], expected) < FP32
    if logits.requires_grad:
        assert_gradients_match(gradients(logits[real], dict(model.named_parameters())), expected_gradients, FP32)


# What the paper claims of the layer


@pytest.fixture
def recording_core():
    """Registers an attention core that keeps what it is handed: `seen` holds query, key and value of the last call."""
    seen = {}

    def core(module, query, key, value, attention_mask, **kwargs):
        seen.update(query=query, key=key, value=value)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("recording", core)
    yield seen
    del ALL_ATTENTION_FUNCTIONS._global_mapping["recording"]


def test_interleaving_is_a_view(recording_core, monkeypatch):
    """The core is handed the memory that the mixing wrote: one virtual sequence of N * P tokens, head by head."""
    model = random_model(small_config(num_hidden_layers=1, num_pseudo_heads=3))
    model.set_attn_implementation("recording")
    mixed = []
    monkeypatch.setattr(attention_iha, "mix", lambda *args: mixed.append(mix(*args)) or mixed[-1])
    model(random_ids(2, 5))
    value, virtual = recording_core["value"], mixed[-1]
    assert value.shape == (2, 2, 5 * 3, 8)
    assert value.data_ptr() == virtual.data_ptr()
    assert value.untyped_storage().data_ptr() == virtual.untyped_storage().data_ptr()
    assert torch.equal(value[0, 1, 4 * 3 + 2], virtual[0, 4, 2, 1])  # head 1, token 4, pseudo-head 2
    assert all(recording_core[name].stride(-1) == 1 for name in ("query", "key", "value"))


@pytest.mark.parametrize(("num_heads", "num_pseudo_heads"), [(4, 1), (4, 3), (2, 5)])
def test_extra_parameters(num_heads, num_pseudo_heads):
    """4 H^2 P more than multi-head attention: 3 H^2 P of mixing and H^2 P of collapse (IHA, Theorem 2)."""
    sizes = {
        kind: random_model(
            small_config(
                attention_kinds=kind,
                num_attention_heads=num_heads,
                num_key_value_heads=num_heads,
                num_pseudo_heads=num_pseudo_heads,
                pseudo_collapse="all_heads",
                num_hidden_layers=1,
            )
        ).num_parameters()
        for kind in ("mha", "iha")
    }
    assert sizes["iha"] - sizes["mha"] == 4 * num_heads**2 * num_pseudo_heads


def select_pseudo_head(model, selected):
    """Sets every mixing to the identity for all pseudo-heads and every collapse to one of them."""
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
    """IHA, Theorem 2: identity mixing and a collapse that selects one pseudo-head give multi-head attention, under the
    causal mask for the last pseudo-head only. Its query sees all P copies of every token up to its own, each with the
    weight that the softmax gives one copy, so the P-fold sums cancel. The first pseudo-head sees one copy of its own
    token and P of all earlier ones, so its own token is weighted P times too little.
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
    """A model of "mha" layers loads a Llama's state dict as it is and gives its logits."""
    llama = random_model(LlamaConfig(**LLAMA), LlamaForCausalLM)
    model = IHAForCausalLM(IHAConfig(attention_kinds="mha", **LLAMA)).eval()
    model.load_state_dict(llama.state_dict())
    input_ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, llama(input_ids).logits)
