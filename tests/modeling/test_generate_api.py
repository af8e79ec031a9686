"""Generate with caches that are offloaded, quantised or kept for the next turn of a chat: see test_cache.py.

The tokens are those of plain greedy decoding without a cache. Models are in float64, so equal means equal tokens.
"""

import pytest
import torch
from helpers import (
    assert_close,
    geometry_model,
    logits_in_chunks,
    random_ids,
    uncached_logits,
)
from transformers import (
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
    StaticCache,
    cache_utils,
)

from modeling_iha.transformers_versions import CACHE


PROMPT, NEW = 9, 8


def generate(model, input_ids=None, *, max_new_tokens=NEW, inputs=None, **options):
    """Call `generate` with everything but `inputs` (assistant model, streamer, cache) in a generation config."""
    if input_ids is not None:
        inputs = {"attention_mask": torch.ones_like(input_ids), **(inputs or {}), "inputs": input_ids}
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": max_new_tokens, **options}
    torch.manual_seed(0)
    return model.generate(**inputs, generation_config=GenerationConfig(**options))


# Caches


class Stream:
    """Stand in for a CUDA stream where there is none: everything runs in order anyway."""

    def wait_stream(self, other):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("geometry", ["global", "hybrid"])
def test_offloaded_cache(geometry, cache, monkeypatch):
    """Offload on a GPU when there is one; else with stand-ins for its streams."""
    model = geometry_model(geometry, dtype=torch.float64)
    input_ids = random_ids(2, PROMPT)
    if torch.cuda.is_available():
        model, input_ids = model.cuda(), input_ids.cuda()
    else:
        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    offloaded = []
    for layer_class in (DynamicCache, StaticCache):
        offload = layer_class.offload
        monkeypatch.setattr(
            layer_class, "offload", lambda self, *a, offload=offload: (offloaded.append(a[0]), offload(self, *a))[1]
        )
    expected = generate(model, input_ids, use_cache=False)
    actual = generate(model, input_ids, cache_implementation=cache, disable_compile=True)
    assert torch.equal(actual, expected)
    assert set(offloaded) == set(range(model.config.num_hidden_layers))


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="Transformers has no fp8 cache here")
@pytest.mark.parametrize("geometry", ["global", "no_gqa"])
def test_quantized_cache(geometry):
    """Come close to the uncached logits, but not equal: what comes back from the cache has 8 bits."""
    model, input_ids = geometry_model(geometry), random_ids(2, 24)
    cache = QuantizedCache("fp8", model.config)
    expected = uncached_logits(model, input_ids)
    actual = logits_in_chunks(model, input_ids, [16] + [1] * 8, cache)
    assert_close(actual[:, :16], expected[:, :16])
    error = (actual - expected).abs().max() / expected.abs().max()
    assert 1e-4 < error < 0.1, error

    output = generate(model, input_ids, cache_implementation="quantized", cache_config={"backend": "fp8"})
    assert output.shape == (2, 24 + NEW)


@pytest.mark.parametrize("padding", [0, 2])
def test_a_chat_goes_on_in_one_cache(padding):
    """Pass new tokens alone in the second turn, and take drafts from the prompt where nothing is padded.

    Transformers' assisted decoding passes a mask without the cached tokens, so padding is not known there."""
    model = geometry_model("hybrid", dtype=torch.float64)
    cache, mask = DynamicCache(config=model.config), (torch.arange(5 + padding) >= padding).long()[None]
    chat, drafts = random_ids(1, 5 + padding), {} if padding else {"prompt_lookup_num_tokens": 3}
    for _ in range(2):
        past = int(cache.get_seq_length())
        actual = generate(model, chat[:, past:], **drafts, inputs={CACHE: cache, "attention_mask": mask})
        chat_and_reply = generate(model, chat, use_cache=False, inputs={"attention_mask": mask})
        assert torch.equal(actual, chat_and_reply[:, past:])
        chat = torch.cat([chat_and_reply, random_ids(1, 3)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, NEW + 3), value=1)
