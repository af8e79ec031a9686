"""The form of an "iha" layer under SDPA on a CPU, by default: the bounds that benchmarks/default_form.py measured."""

import pytest
import torch
from helpers import random_model, small_config
from transformers import DynamicCache

from modeling_iha.absorbed_decode import absorbed_attention
from modeling_iha.collapse_first import collapse_first_attention, share_lanes
from modeling_iha.virtual_sequence import MaskInputs, MaskKey, create_masks


def chosen(length, pseudo_heads=4, batch=1, cached=0, grad=False, form=None, **overrides):
    """The form for `length` new tokens; no layer runs."""
    config = small_config(num_pseudo_heads=pseudo_heads, **overrides)
    config._attn_implementation = "sdpa"
    key, cache = MaskKey(config.layer_types[0], pseudo_heads), None
    if cached:
        cache = DynamicCache(config=config)
        cache.update(*torch.zeros(2, batch, 2, cached, 8), 0)
    with torch.set_grad_enabled(grad):
        inputs = MaskInputs(config, torch.empty(batch, length, 0), None, cache, None, form)
        return create_masks(inputs, [key])[key].attention_form


@pytest.mark.parametrize(
    ("pseudo_heads", "grad", "first"),
    [(4, False, 256), (8, False, 128), (2, False, 1024), (4, True, 512), (8, True, 256), (2, True, None)],
)
def test_lengths(pseudo_heads, grad, first):
    """From the first length on that wins; training with P = 2 never."""
    assert chosen((first or 8192) - 1, pseudo_heads, grad=grad) is None
    expected = collapse_first_attention if first else None
    assert chosen(first or 8192, pseudo_heads, grad=grad) is expected


def test_threads_that_would_idle(monkeypatch):
    """Four heads keep up to five threads busy for 80% of the time, 16 only with rows of the batch."""
    for threads, batch, expected in ((4, 1, True), (5, 1, True), (6, 1, False), (16, 1, False), (16, 4, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        rows, heads, share = share_lanes(batch, 4)
        assert rows * heads <= threads and share == pytest.approx(min(1, batch * 4 / threads))
        assert (chosen(512, batch=batch) is not None) == expected, (threads, batch)


def test_windows():
    sliding = {"layer_types": "sliding_attention"}
    assert chosen(512, **sliding, sliding_window=63) is None
    assert chosen(512, **sliding, sliding_window=64) is collapse_first_attention


@pytest.mark.parametrize("grad", [False, True])
def test_one_token(grad):
    """Absorbed from 128 keys on, over the rows of the batch; never a form without gradients."""
    assert chosen(1, cached=126, grad=grad) is None
    assert chosen(1, cached=127, grad=grad) is absorbed_attention
    assert chosen(1, cached=31, batch=4, grad=grad) is absorbed_attention


def test_the_switch():
    assert chosen(4096, form="virtual") is None and chosen(1, cached=4096, form="virtual") is None
    assert chosen(2, form="base") is collapse_first_attention and chosen(1, form="base") is absorbed_attention

    def own(*args):
        """A kernel of the user's own, for whole inputs and single tokens."""

    assert chosen(2, form=own) is own and chosen(1, cached=3, form=own) is own
    assert chosen(2, cached=3, form=own) is None
    assert random_model(small_config()).base_model.attention_form is None


@pytest.mark.parametrize(
    "overrides", [{"pseudo_collapse": "all_heads"}, {"attention_dropout": 0.1}, {"pseudo_heads": 1}], ids=str
)
def test_what_neither_form_computes(overrides):
    assert chosen(4096, **overrides) is None and chosen(1, cached=4096, **overrides) is None
