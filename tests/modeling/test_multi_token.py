"""Compare the options of kind "multi_token" with the loops of `references/multi_token.py`, and see nothing leak."""

from functools import partial

import pytest
import torch
from helpers import (
    FP64,
    assert_attention_matches,
    assert_close,
    kind_config,
    logits_in_chunks,
    packing,
    padding,
    random_ids,
    random_model,
    relative_error,
    set_core,
    uncached_logits,
)
from transformers import StaticCache

from modeling_iha import IHAForCausalLM
from modeling_iha.transformers_versions import CACHE


KERNELS = {"query_kernel": 3, "key_kernel": 5}
OPTIONS = {
    "pre": {**KERNELS, "convolution": "pre", "head_mixing": None},
    "post": {**KERNELS, "convolution": "post", "head_mixing": None},
    "mixing": {"convolution": None, "head_group": 2},
    "pre, mixing after": {**KERNELS, "convolution": "pre", "head_mixing": "post"},
    "post, mixing before": {**KERNELS, "convolution": "post", "head_mixing": "pre"},
    "one query": {"query_kernel": 1, "key_kernel": 3},
    "one key": {"query_kernel": 2, "key_kernel": 1},
    "one head": {**KERNELS, "head_group": 1},
    "norm": {**KERNELS, "head_norm": True},
    "norm and gate": {**KERNELS, "head_norm": True, "head_gate": True},
    "other layers": {**KERNELS, "every": 3, "head_gate": True},
}


multi_token = partial(kind_config, "multi_token", rms_norm_eps=0.1)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_matches_reference(options):
    """Compare a layer on a cache of either type, too."""
    layers = 2 if options == "other layers" else 1
    config = multi_token(OPTIONS[options], num_hidden_layers=layers, num_key_value_heads=1, use_qk_norm=True)
    assert_attention_matches(config, FP64, dtype=torch.float64, length=8)
    model, input_ids = random_model(config, dtype=torch.float64), random_ids(2, 19)
    expected = uncached_logits(model, input_ids)
    for cache in (None, StaticCache(config=config, max_cache_len=24)):
        cached = logits_in_chunks(model, input_ids, [2, 1, 5, 1, 1, 3, 1, 1, 4], cache)
        assert relative_error(cached, expected) < FP64


REAL = torch.tensor([[False] * 4 + [True] * 10])
# Inputs, token with the signal, and which of the 14 tokens must not see it; those in the last column do.
SIGNALS = {
    "future": ({}, 8, range(8), [8, 9, 13]),
    "next document": (packing((6, 1, 7))[0], 7, range(7), [7, 13]),
    "earlier document": (packing((6, 1, 7))[0], 5, range(6, 14), [5]),
    "document of one token": (packing((6, 1, 7))[0], 6, [*range(6), *range(7, 14)], [6]),
    "padding": (padding(REAL)[0], 3, range(4, 14), []),
}


@pytest.mark.parametrize("core", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SIGNALS)
@torch.no_grad()
def test_nothing_leaks(name, core):
    inputs, position, blind, seeing = SIGNALS[name]
    # Kernels wider than the distance to every border.
    kernels = {"query_kernel": 6, "key_kernel": 11}
    model, input_ids = random_model(multi_token(kernels), dtype=torch.float64), random_ids(1, 14)
    set_core(model, core)
    other = input_ids.clone()
    other[:, position] = 3 + (other[:, position] - 2) % 50
    change = uncached_logits(model, input_ids, **inputs) - uncached_logits(model, other, **inputs)
    moved = change.abs().amax(dim=(0, 2))
    assert moved[list(blind)].max() < 1e-12
    assert all(moved[i] > 1e-6 for i in seeing)


@torch.no_grad()
def test_a_token_that_a_mask_hides_from_itself_keeps_its_row():
    """Compare a layer at its start with multi-head attention, which it equals under such a mask too."""
    mha = random_model(kind_config("mha", rms_norm_eps=0.1))
    model = IHAForCausalLM(multi_token(KERNELS)).eval()
    model.load_state_dict(mha.state_dict(), strict=False)
    visible = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    visible[..., 5, 5] = False
    inputs = {"input_ids": random_ids(1, 9), "attention_mask": visible}
    assert_close(uncached_logits(model, **inputs), uncached_logits(mha, **inputs))


@pytest.mark.parametrize(("every", "layers"), [(1, range(8)), (2, [1, 3, 5, 7]), (3, [1, 4, 7]), (4, [2, 6])])
def test_convolution_in_every_nth_layer(every, layers):
    """Convolve in the authors' layers, and cache queries there only."""
    model = random_model(multi_token({**KERNELS, "every": every}, num_hidden_layers=8))
    assert [i for i, layer in enumerate(model.model.layers) if layer.self_attn.score_conv] == list(layers)
    cache = model(random_ids(1, 5))[CACHE]
    assert [layer.keys.shape[-1] for layer in cache.layers] == [8 + 2 * 8 * (i in layers) for i in range(8)]
    assert all(layer.values.shape[-1] == 8 for layer in cache.layers)


def test_a_window_is_refused():
    with pytest.raises(Exception, match="'multi_token' has no window.*use 'full_attention'"):
        multi_token(layer_types="sliding_attention", sliding_window=4)


@pytest.mark.parametrize("options", [{}, OPTIONS["one query"]], ids=["default", "one query"])
@pytest.mark.parametrize("cached", [0, 4])
def test_a_mask_with_holes_is_refused(options, cached):
    """Refuse a hidden token between others, new or cached, and take one where nothing is convolved."""
    input_ids, mask = random_ids(1, 6), torch.tensor([[0, 1, 1, 0, 1, 1]])
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    model = random_model(multi_token(options))
    cache = model(input_ids[:, :cached])[CACHE] if cached else None
    inputs = {"attention_mask": mask, "position_ids": positions[:, cached:], CACHE: cache}
    with pytest.raises(ValueError, match="hides tokens between others, and kind 'multi_token' convolves"):
        model(input_ids[:, cached:], **inputs)
    model = random_model(multi_token(OPTIONS["mixing"]))
    holes = model(input_ids, attention_mask=mask, position_ids=positions).logits
    assert_close(holes[:, mask[0] == 1], model(input_ids[:, mask[0] == 1]).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_kernel": 4}, "key_kernel=4; it must be an odd"),
        ({"head_group": 3}, "head_group=3, which does not divide num_attention_heads=4"),
        ({"head_group": 2, "head_mixing": None}, "head_group=2 without head_mixing"),
        ({"convolution": None, "head_mixing": None}, "leaves the scores alone"),
        ({"every": 4}, r"every=4, for a convolution in layers 2, 6, \.\.\. \(counted from 0\), and none of them"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(Exception, match=message):
        multi_token(options)
