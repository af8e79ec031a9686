"""Test what a call costs that declares padding and documents: no features for a mask of ones, and one wait for a GPU.

test_drawn.py looks for tensors with an entry for each pair of tokens, and test_compile.py in compiled code.
docs/SUPPORT.md has the exceptions.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers import WAYS, assert_close, decoder, random_ids
from stand_in_gpu import GpuTensor, gpus, move

from modeling_iha import interleave_heads, sdpa_in_blocks


LENGTH, WINDOW = 300, 20
DOCUMENTS = (130, 1, 169)
BOUNDS = torch.tensor([0, 130, 131, LENGTH], dtype=torch.int32)
LENGTHS = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 169, "max_length_k": 169}
POSITIONS = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
LEFT, RIGHT = torch.ones(2, LENGTH).long(), torch.ones(2, LENGTH).long()
LEFT[0, :70] = RIGHT[1, -70:] = 0
HOLE = torch.ones(2, LENGTH).long()
HOLE[1, 20:22] = 0
CALLS = {
    "nothing": {},
    "ones": {"attention_mask": torch.ones(2, LENGTH).long()},
    "left padding": {"attention_mask": LEFT, "position_ids": (LEFT.cumsum(-1) - 1).clamp(min=0)},
    "right padding": {"attention_mask": RIGHT},
    "hole": {"attention_mask": HOLE},
    "positions": {"position_ids": POSITIONS},
    "lengths": {"position_ids": POSITIONS, **LENGTHS},
}
PACKED = ("positions", "lengths")


def inputs_of(call):
    return {"input_ids": random_ids(1 if call in PACKED else 2, LENGTH), "use_cache": False, **CALLS[call]}


@pytest.mark.parametrize("name", ["iha", "interleaved", "some interleaved"])
def test_a_mask_of_ones_costs_nothing(name, monkeypatch):
    """Only padding adds features to heads."""
    model, calls = WAYS[name](WINDOW), []
    hide = sdpa_in_blocks.hide_padding
    monkeypatch.setattr(sdpa_in_blocks, "hide_padding", lambda *args: calls.append(1) or hide(*args))
    for call in CALLS:
        calls.clear()
        model(**inputs_of(call))
        assert bool(calls) == ("padding" in call or call == "hole")


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("core", ["eager", "flex_attention", "sdpa"])
def test_packed_rows_with_the_library_s_own_defaults(core, name, cpu_cores):
    """Keep documents apart in a call that makes a cache, or raise an error, with and without a window of the base."""
    model = interleave_heads(decoder(name, sliding_window=None), 2).eval()
    model.set_attn_implementation(core)
    ids = random_ids(1, LENGTH)
    with torch.no_grad():
        expected = model(ids, position_ids=POSITIONS, use_cache=False).logits
        if core == "sdpa":
            assert_close(model(ids, position_ids=POSITIONS).logits, expected, 1e-5)
            return
        with pytest.raises(ValueError, match="Packed documents would attend to one another"):
            model(ids, position_ids=POSITIONS)
        with pytest.raises(ValueError, match="tells documents by position_ids alone"):
            model(ids, use_cache=False, **LENGTHS)


# Waits


def varlen_stand_in(query, key, value, cu_seq_q, *args, scale, window_size, **kwargs):
    """Return values of the right shape, as a GPU would without waiting."""
    return query.clone()


@pytest.mark.one_of(2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("name", ["iha", "interleaved", "some interleaved"])
def test_a_forward_waits_at_most_once_for_a_gpu(name, window, dtype, call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9, total_memory=2**40))
    monkeypatch.setattr(sdpa_in_blocks, "varlen_attn", varlen_stand_in)
    model = WAYS[name](window).to(dtype)
    device = torch.device("cuda", 0)
    move(model, device)
    inputs = {
        key: GpuTensor(each, device) if isinstance(each, torch.Tensor) else each
        for key, each in inputs_of(call).items()
    }
    with gpus() as waits, torch.no_grad():
        model(**inputs)
    assert len(waits) <= 1


# Decoders that keep windows in their masks


@torch.no_grad()
def test_a_decoder_that_hands_on_no_window_keeps_dense_masks():
    """Qwen2-MoE's attention gets its window by the mask alone, which rows longer than the window need."""
    options = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 3}
    plain = decoder("qwen2_moe", num_hidden_layers=3, **options)
    ids = random_ids(1, LENGTH)
    expected = plain(ids, use_cache=False).logits
    assert (expected - plain(ids[:, -WINDOW:], use_cache=False).logits[:, -1:]).abs().max() > 0
    model = interleave_heads(copy.deepcopy(plain), 2)
    assert model.config._attn_implementation == "iha_sdpa"
    assert_close(model(ids, use_cache=False).logits, expected)
