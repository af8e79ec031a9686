"""Drafts that are rejected leave a cache as it was, and a window shortens it.

test_drawn.py compares tokens on a cache with those without one, and test_generate_api.py has other caches.
"""

from functools import partial

import pytest
import torch
import transformers
from helpers import (
    IHA_GEOMETRIES,
    OTHER_KINDS,
    WAYS,
    assert_close,
    decoder,
    geometry_model,
    interleaved,
    random_ids,
    uncached_logits,
)
from packaging.version import Version
from transformers import DynamicCache, GenerationConfig

from modeling_iha.transformers_versions import CACHE


# Functions of a window.
GEOMETRIES = {
    "global": lambda window: geometry_model("global", pseudo_positions="shared"),
    **{name: lambda window, name=name: geometry_model(name) for name in IHA_GEOMETRIES},
    **{name: lambda window, name=name: geometry_model(name) for name in OTHER_KINDS},
}
DECODERS = {
    **WAYS,
    **{name: partial(interleaved, name, layers=[0, 2]) for name in ("gemma3_text", "mistral")},
}
MODELS = GEOMETRIES | DECODERS | {"plain mistral": lambda window: decoder("mistral")}
CACHES = {
    "dynamic": {},
    "in chunks": {"prefill_chunk_size": 4},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


def generate(model, input_ids, assistant=None, **options):
    """Return what `generate` returns. It begins with the same random numbers each time."""
    torch.manual_seed(0)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    config = GenerationConfig(**options, return_dict_in_generate=True)
    mask = (input_ids != 0).long()
    return model.generate(input_ids, attention_mask=mask, generation_config=config, assistant_model=assistant)


DRAFTS = [("prompt", name, None, "dynamic") for name in GEOMETRIES]
DRAFTS += [(draft, name, None, "dynamic") for draft in ("itself", "another") for name in ("global", "hybrid", "dcmha")]
DRAFTS += [("prompt", name, 4, "dynamic") for name in DECODERS]
# Transformers 5.17 hands over more keys than masks, versions before 5.24 draft for no static cache, and none drafts
# for full static caches of windows.
TRANSFORMERS = Version(transformers.__version__)
if TRANSFORMERS >= Version("5.18"):
    DRAFTS += [("another", name, 4, "dynamic") for name in DECODERS]
if TRANSFORMERS >= Version("5.24"):
    DRAFTS += [("another", name, 4, "static") for name in ("interleaved", "some interleaved", "paired")]


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("draft", "name", "window", "cache"), DRAFTS)
def test_rejected_drafts_leave_the_cache(draft, name, window, cache, monkeypatch):
    """Take drafts from the prompt, from a model that is always right, and from one that mostly is not."""
    model, input_ids, cropped = MODELS[name](window).double(), random_ids(1, 4).repeat(1, 3), []
    expected = generate(model, input_ids, use_cache=False, max_new_tokens=16)
    crop = DynamicCache.crop
    monkeypatch.setattr(DynamicCache, "crop", lambda self, n: (cropped.append(n), crop(self, n))[1])
    options = {"max_new_tokens": 16, **CACHES[cache]}
    if draft == "prompt":
        actual = generate(model, input_ids, prompt_lookup_num_tokens=3, **options)
    else:
        assistant = MODELS[name](window) if draft == "itself" else decoder("llama")
        actual = generate(model, input_ids, assistant.double(), **options)
    assert torch.equal(actual.sequences, expected.sequences)
    assert draft == "itself" or any(cropped)


@pytest.mark.parametrize(("layers", "lengths"), [(None, [5, 5, 5]), ([0, 2], [5, 23, 5]), ([1], [23, 5, 23])])
def test_a_given_window_shortens_the_cache(layers, lengths):
    """Keep one token more than a window of virtual tokens needs of tokens."""
    model = interleaved("llama", 5, layers)
    for options in ({}, CACHES["in chunks"]):
        cache = generate(model, random_ids(2, 18), **options)[CACHE]
        assert [layer.keys.shape[2] for layer in cache.layers] == lengths


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("name", [*DECODERS, "plain mistral"])
@torch.no_grad()
def test_a_crop_that_takes_keys_of_the_window_raises_an_error(name, num_tokens):
    """As Mistral does: the keys that a full window has dropped do not come back, but for those it has recorded."""
    model, input_ids = MODELS[name](5), random_ids(1, 20)
    cache = DynamicCache(config=model.config)
    model(input_ids[:, :12], use_cache=True, **{CACHE: cache})
    cache.activate_past_recording()
    model(input_ids[:, 12:15], use_cache=True, **{CACHE: cache})
    expected = uncached_logits(model, input_ids[:, : 13 + num_tokens])[:, 13:]
    cache.crop(-2)
    actual = model(input_ids[:, 13 : 13 + num_tokens], use_cache=True, **{CACHE: cache}).logits
    assert_close(actual, expected)
    cache.crop(-8)
    past = cache.get_seq_length()
    with pytest.raises(RuntimeError):
        model(input_ids[:, past : past + num_tokens], use_cache=True, **{CACHE: cache})
