"""Test what a call costs that declares padding and documents: no features for a mask of ones, and one wait for a GPU.

test_drawn.py looks for tensors with an entry for each pair of tokens, and test_compile.py in compiled code.
docs/SUPPORT.md has the exceptions.
"""

import copy

import pytest
import torch
from helpers import WAYS, assert_close, decoder, random_ids
from stand_in_gpu import GpuTensor, gpus, move
from torch.nn.functional import pad

from modeling_iha import interleave_heads, sdpa_in_blocks
from modeling_iha.transformers_versions import CACHE


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


@pytest.mark.parametrize("call", ["left padding", "right padding"])
@pytest.mark.parametrize(("name", "fields"), [("llama", {}), ("mistral", {"sliding_window": WINDOW})])
def test_padding_sees_what_it_sees_in_the_base(name, fields, call):
    """Compare the logits of padding too, by which left padding predicts the first real token of a row.

    After a prompt with right padding `generate` takes the next token from them."""
    base = decoder(name, **fields)
    model = interleave_heads(copy.deepcopy(base), 2)
    found = []
    for each in (model, base):
        output = each(**inputs_of(call), labels=inputs_of(call)["input_ids"])
        output.loss.backward()
        found.append((output.logits, each.get_output_embeddings().weight.grad))
    for value, target in zip(*found, strict=True):
        assert_close(value, target)


@pytest.mark.parametrize("name", ["left padding", "right padding"])
def test_padding_is_a_document_where_nobody_reads_its_output(name, monkeypatch):
    monkeypatch.setattr(sdpa_in_blocks, "has_flash_attention", lambda device, dtype: True)
    backend = sdpa_in_blocks.Backend(sdpa_in_blocks.NAME, torch.device("cpu"), torch.bfloat16, "bounds")
    call = inputs_of(name)
    arguments = backend, call["input_ids"], call["attention_mask"], call.get("position_ids"), None
    assert sdpa_in_blocks.read_call(*arguments).documents is not None
    with torch.no_grad():
        documents = sdpa_in_blocks.read_call(*arguments).documents
    assert (documents is None) == (name == "right padding")


@pytest.mark.parametrize("core", ["eager", "sdpa"])
@torch.no_grad()
def test_positions_jump_within_a_document_as_in_the_base(core):
    """Next to a cache a row is one document, whatever its positions skip, and without one a jump begins another."""
    base = decoder("llama").eval()
    base.set_attn_implementation(core)
    model = interleave_heads(copy.deepcopy(base), 2)
    call = {"input_ids": random_ids(1, 9), "position_ids": torch.tensor([[0, 1, 2, 3, 10, 11, 12, 13, 30]])}
    for options in ({}, {"use_cache": False}):
        assert_close(model(**call, **options).logits, base(**call, **options).logits)


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
        for positions in (None, torch.arange(LENGTH)[None]):
            with pytest.raises(ValueError, match="tells documents by position_ids alone"):
                model(ids, position_ids=positions, use_cache=False, **LENGTHS)


# Waits


GPU = torch.device("cuda", 0)


def varlen_stand_in(query, key, value, cu_seq_q, *args, scale, window_size, **kwargs):
    """Return values of the right shape, as a GPU would without waiting."""
    return query.clone()


def on_gpu(inputs):
    return {name: GpuTensor(each, GPU) if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}


def one_more_token(call):
    """Return the inputs of the token that follows those of a call."""
    following = {"input_ids": random_ids(2, 1)}
    if "attention_mask" in CALLS[call]:
        following["attention_mask"] = pad(CALLS[call]["attention_mask"], (0, 1), value=1)
    if "position_ids" in CALLS[call]:
        following["position_ids"] = CALLS[call]["position_ids"][:, -1:] + 1
    return following


@pytest.mark.one_of(9)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("name", WAYS)
def test_a_call_waits_at_most_once_for_a_gpu_and_a_new_token_never(name, window, dtype, call, monkeypatch):
    """Count the waits of a forward, of a training step, and of one more token next to a cache."""
    monkeypatch.setattr(sdpa_in_blocks, "varlen_attn", varlen_stand_in)
    model = WAYS[name](window).to(dtype)
    move(model, GPU)
    inputs = on_gpu(inputs_of(call))
    with gpus() as waits:
        with torch.no_grad():
            model(**inputs)
        assert len(waits) <= 1
        waits.clear()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        assert len(waits) <= 1
        if call in PACKED:  # they have no cache
            return
        with torch.no_grad():
            cache = model(**{**inputs, "use_cache": True})[CACHE]
            next_inputs = on_gpu(one_more_token(call))
            waits.clear()
            model(**next_inputs, **{CACHE: cache})
        assert not waits


@torch.no_grad()
def test_a_mask_may_stay_on_the_cpu():
    """Transformers moves it to the device of the tokens."""
    model = WAYS["interleaved"]()
    move(model, GPU)
    inputs = on_gpu(inputs_of("left padding"))
    with gpus():
        expected = model(**inputs).logits.cpu()
        assert torch.equal(model(**{**inputs, "attention_mask": LEFT}).logits.cpu(), expected)


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
