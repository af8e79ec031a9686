"""Kind "talking_heads" against the loops of `references/talking_heads.py`, and what is particular to it: the exact
start from multi-head attention, blocks of queries, and the cores that are refused."""

import fake_flash
import pytest
import torch
from helpers import (
    BF16_GRADIENT,
    BF16_OUTPUT,
    FP32,
    FP64,
    LLAMA,
    assert_attention_matches,
    assert_close,
    assert_gradients_match,
    gradients,
    learn_one_batch,
    logits_in_chunks,
    packing,
    padding,
    random_ids,
    random_model,
    reference_logits,
    relative_error,
    set_core,
    small_config,
    uncached_logits,
)
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from modeling_iha import IHAConfig, IHAForCausalLM, score_matrix, window_blocks
from modeling_iha.score_matrix import BLOCK


CORES = ["eager", "sdpa"]
# A window layer below a global one, and what only windows meet.
GEOMETRIES = {
    "global": {},
    "window_of_1": {"layer_types": "sliding_attention", "sliding_window": 1},
    "hybrid": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
}


def talking_config(geometry="global", **overrides):
    return small_config(**{"attention_kinds": "talking_heads", **GEOMETRIES[geometry], **overrides})


# Against the reference


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids="H{0[0]}G{0[1]}".format)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "gradient_tolerance"),
    [(torch.float32, FP32, FP32), (torch.float64, FP64, FP64), (torch.bfloat16, BF16_OUTPUT, BF16_GRADIENT)],
    ids=str,
)
def test_attention_matches_reference(heads, window, dtype, tolerance, gradient_tolerance):
    config = talking_config(
        hidden_size=8 * heads[0],
        num_hidden_layers=1,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        layer_types="full_attention" if window is None else "sliding_attention",
        sliding_window=window,
    )
    assert_attention_matches(config, tolerance, gradient_tolerance, dtype=dtype)


@pytest.mark.parametrize("inputs", ["plain", "padded", "packed"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("core", CORES)
def test_blocks_match_reference(core, geometry, inputs, monkeypatch):
    """In several blocks of queries, where on SDPA window layers see documents in place of a mask."""
    monkeypatch.setattr(score_matrix, "BLOCK", 4)
    monkeypatch.setattr(window_blocks, "MIN_BLOCK", 4)
    model = random_model(talking_config(geometry))
    set_core(model, core)
    input_ids, real = random_ids(2, 11), torch.ones(2, 11, dtype=torch.bool)
    arguments, reference = {}, {}
    if inputs == "padded":
        real[0, :3] = False
        arguments, reference = padding(real)
    if inputs == "packed":
        arguments, reference = packing((5, 1, 5), rows=len(input_ids))
    logits = model(input_ids, use_cache=False, **arguments).logits
    expected, weights = reference_logits(model, input_ids, **reference)
    assert relative_error(logits[real], expected[real]) < FP32
    actual_gradients = gradients(logits[real], dict(model.named_parameters()))
    assert_gradients_match(actual_gradients, gradients(expected[real], weights), FP32)


# The cache


@pytest.mark.parametrize("chunks", [[BLOCK + 2, 20], [1, BLOCK + 2, 1, 18]], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("core", CORES)
def test_chunks_in_blocks_equal_uncached(core, geometry, chunks):
    """A chunk on top of a cache is cut into blocks of queries; from a dynamic and a static cache."""
    model = random_model(talking_config(geometry))
    set_core(model, core)
    input_ids = random_ids(2, BLOCK + 22)
    expected = uncached_logits(model, input_ids)
    assert_close(logits_in_chunks(model, input_ids, chunks), expected)
    static = StaticCache(config=model.config, max_cache_len=BLOCK + 25)
    assert_close(logits_in_chunks(model, input_ids, chunks, static), expected)


# Multi-head attention is where it starts


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("heads", [4, 2], ids="G{}".format)
def test_a_new_layer_is_multi_head_attention(core, heads):
    """Both maps start at the identity: with a Llama's weights the model gives a Llama's logits and gradients."""
    fields = {**LLAMA, "num_key_value_heads": heads}
    llama = random_model(LlamaConfig(**fields), LlamaForCausalLM)
    model = IHAForCausalLM(IHAConfig(attention_kinds="talking_heads", **fields)).eval()
    missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected and {name.split(".")[-2] for name in missing} == {"score_mix", "weight_mix"}
    set_core(model, core)
    input_ids = random_ids(2, 9)
    logits, expected = model(input_ids).logits, llama(input_ids).logits
    assert_close(logits, expected)
    leaves = dict(llama.named_parameters())
    actual = gradients(logits, {name: parameter for name, parameter in model.named_parameters() if name in leaves})
    assert_gradients_match(actual, gradients(expected, leaves), FP32)


def test_extra_parameters():
    """Two maps of H x H to a layer."""
    sizes = {
        kind: random_model(small_config(attention_kinds=kind)).num_parameters() for kind in ("mha", "talking_heads")
    }
    assert sizes["talking_heads"] - sizes["mha"] == 2 * 2 * 4**2


# Training, refusals


def test_a_batch_can_be_learned():
    torch.manual_seed(0)
    model = IHAForCausalLM(talking_config("hybrid"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    assert learn_one_batch(model, optimizer) < 0.05
    for layer in model.model.layers:
        for talk in (layer.self_attn.score_mix, layer.self_attn.weight_mix):
            assert (talk.weight - torch.eye(4)).abs().max() > 0.01


@pytest.mark.parametrize("core", ["flash_attention_2", "flex_attention"])
def test_cores_without_a_score_matrix_are_refused(core, monkeypatch):
    """When the core is set, and where a model is loaded with it."""
    fake_flash.install(monkeypatch)
    config = talking_config()
    message = (
        f"'talking_heads' changes the scores, which attn_implementation='{core}' never builds: use 'sdpa' or 'eager'"
    )
    model = random_model(config)
    set_core(model, core)
    with pytest.raises(ValueError, match=message), torch.compiler.set_stance("force_eager"):
        model(random_ids(1, 5))
    with pytest.raises(ValueError, match=message):
        IHAForCausalLM.from_pretrained(None, config=config, state_dict=model.state_dict(), attn_implementation=core)
