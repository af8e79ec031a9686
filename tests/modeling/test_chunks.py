"""Run window layers a chunk of tokens at a time: the result is that of the whole row."""

import pytest
import torch
from helpers import (
    FP64,
    assert_close,
    decoder,
    greedy,
    kind_config,
    packing,
    random_ids,
    random_model,
    reference_logits,
    relative_error,
    set_core,
    small_config,
    train_mixing,
    uncached_logits,
)

from modeling_iha import chunks, interleave_heads, pair_heads, virtual_core


LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}


@pytest.fixture
def chunked(monkeypatch):
    """Return a function that sets the tokens of a chunk, and the windows of the calls that went in chunks."""
    windows, attend_in_chunks = [], chunks.attend_in_chunks

    def counted(*args, sliding_window, **kwargs):
        windows.append(sliding_window)
        return attend_in_chunks(*args, sliding_window=sliding_window, **kwargs)

    def choose(tokens):
        windows.clear()
        chosen = lambda heads, query, window: max(tokens, window // heads.num_pseudo_heads)  # noqa: E731
        monkeypatch.setattr(chunks, "chunk_tokens", chosen)
        return windows

    monkeypatch.setattr(virtual_core, "attend_in_chunks", counted)
    return choose


@pytest.mark.parametrize("positions", ["interleaved", "shared"])
@pytest.mark.parametrize(
    ("window", "tokens", "length"),
    [(4, 4, 5), (4, 4, 8), (4, 4, 9), (4, 5, 16), (2, 3, 13), (2, 7, 8), (3, 12, 13), (7, 7, 40)],
)
def test_chunks_equal_the_reference(chunked, small_blocks, window, tokens, length, positions):
    """Compare windows, chunks and lengths around one another in float64, with grouped queries and two rows."""
    model = random_model(
        kind_config("iha", window=window, num_pseudo_heads=3, pseudo_positions=positions), dtype=torch.float64
    )
    windows, input_ids = chunked(tokens), random_ids(2, length)
    logits = uncached_logits(model, input_ids)
    assert windows == [3 * window] * model.config.num_hidden_layers
    assert relative_error(logits, reference_logits(model, input_ids)[0]) < FP64


def test_what_goes_in_chunks(chunked):
    model, input_ids = random_model(small_config(**LAYERS, num_pseudo_heads=3)), random_ids(2, 14)
    whole = uncached_logits(model, input_ids)
    windows = chunked(5)
    assert_close(uncached_logits(model, input_ids), whole)
    ones = torch.ones_like(input_ids)
    assert_close(uncached_logits(model, input_ids, attention_mask=ones), whole)  # as tokenizers give it
    assert windows == [12, 12]
    tokens = model.generate(input_ids, max_new_tokens=4, do_sample=False)
    assert windows == [12, 12, 12] and torch.equal(tokens, greedy(model, input_ids, 4))
    windows.clear()
    static = model.generate(input_ids, max_new_tokens=4, do_sample=False, cache_implementation="static")
    assert torch.equal(static, tokens) and windows == [12]  # the prompt

    windows.clear()
    assert_close(model(input_ids, use_cache=False).logits, whole)  # with gradients
    padded = ones.clone()
    padded[0, :3] = 0
    packed = packing([7, 7], rows=2)[0]
    logits = uncached_logits(model, input_ids, attention_mask=padded), uncached_logits(model, input_ids, **packed)
    uncached_logits(model, input_ids[:, :5])  # one chunk
    assert windows == []
    set_core(model, "eager")
    real = padded.bool()
    assert_close(logits[0][real], uncached_logits(model, input_ids, attention_mask=padded)[real])
    assert_close(logits[1], uncached_logits(model, input_ids, **packed))


def test_frozen_weights_go_in_chunks_and_learned_ones_do_not(chunked):
    model, input_ids = (
        random_model(small_config(**LAYERS, num_pseudo_heads=3)).requires_grad_(False),
        random_ids(2, 14),
    )
    windows = chunked(5)
    model(input_ids, use_cache=False)
    assert windows == [12]
    model.model.layers[0].self_attn.collapse.requires_grad_(True)
    model(input_ids, use_cache=False).logits.sum().backward()
    assert windows == [12]


@pytest.mark.parametrize("own_window", [True, False])
def test_decoders_whose_heads_are_interleaved(chunked, own_window):
    """Take the window of the decoder or one of its layers' own."""
    model = decoder("mistral" if own_window else "llama")
    interleave_heads(model, 3, **({} if own_window else {"sliding_window": 6}))
    train_mixing(model)
    input_ids = random_ids(2, 20)
    whole = uncached_logits(model, input_ids)
    windows = chunked(7)
    assert_close(uncached_logits(model, input_ids), whole)
    assert windows == [18] * 3


def test_paired_heads_are_views_and_take_no_chunks(chunked):
    model = pair_heads(decoder("mistral"), 2)
    windows = chunked(5)
    uncached_logits(model, random_ids(2, 20))
    assert windows == []


@pytest.mark.parametrize(
    ("heads", "window", "tokens"), [(8, 64, 256), (1, 64, 2048), (4096, 64, 64), (4096, 32, 32), (4096, 31, 32)]
)
def test_a_chunk_has_two_megabytes_a_window_and_32_tokens(heads, window, tokens):
    """Take heads of 64 in float32, and P = 4."""
    states = torch.empty(1, heads, 1, 64, device="meta")
    mixed = type("Heads", (), {"num_pseudo_heads": 4})
    assert chunks.chunk_tokens(mixed, states, 4 * window) == tokens


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_dropout_of_the_forward(chunked, reentrant):
    """Reentrant checkpointing computes a row without gradients first, and must not take chunks there."""
    fields = {"num_pseudo_heads": 4, "layer_types": "sliding_attention", "sliding_window": 4, "num_hidden_layers": 1}
    model = random_model(small_config(**fields, attention_dropout=0.5)).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    outputs = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    windows = chunked(4)
    input_ids = random_ids(1, 13)
    model(input_ids, labels=input_ids).loss.backward()
    assert windows == []
    assert len(outputs) == 2 and outputs[0].detach().equal(outputs[1].detach())
    with torch.no_grad():
        model.eval()(input_ids)
    assert not outputs[0].equal(outputs[2])  # something was dropped
