"""A token on a cache is what it is without one: in a batch with padding, on every core, past every window.

test_mechanisms.py feeds chunks to every kind, with gradients, and test_generate_api.py has other caches.
"""

from functools import partial

import pytest
import torch
import transformers
from helpers import (
    DECODING_CORES,
    IHA_GEOMETRIES,
    OTHER_KINDS,
    PLAIN,
    WAYS,
    assert_close,
    decoder,
    geometry_model,
    interleaved,
    on_cores,
    random_ids,
    random_model,
    set_core,
    small_config,
    uncached_logits,
)
from packaging.version import Version
from transformers import DynamicCache, GenerationConfig

from modeling_iha.sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from modeling_iha.transformers_versions import CACHE


def four_kinds(window):
    fields = {"attention_kinds": ["iha", "paired_heads", "mha", "talking_heads"], "num_hidden_layers": 4}
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    return random_model(small_config(**fields, **types))


def with_additions(geometry, window):
    """Return a model with what its kind may add to its heads."""
    reads_tuples = geometry.startswith(("hyper", "simplicial")) and geometry != "hyper_feature"
    return geometry_model(geometry, output_gate="elementwise", exclusive_attention=not reads_tuples)


# Functions of a window.
GEOMETRIES = {
    "global": lambda window: geometry_model("global", pseudo_positions="shared"),
    **{name: lambda window, name=name: geometry_model(name) for name in IHA_GEOMETRIES},
    **{name: partial(with_additions, name) for name in OTHER_KINDS},
}
DECODERS = {
    **WAYS,
    **{name: partial(interleaved, name, layers=[0, 2]) for name in ("gemma3_text", "mistral")},
}
MODELS = GEOMETRIES | DECODERS | PLAIN | {"four kinds": four_kinds}
ON_CORES = [(name, None, core) for core, name in on_cores(GEOMETRIES, DECODING_CORES)]
ON_CORES += [(name, window, core) for name in DECODERS for window in (None, 4) for core in DECODING_CORES]
ON_CORES += [*((name, None, SDPA_IN_BLOCKS) for name in PLAIN), ("four kinds", None, "sdpa")]
STATIC = {"cache_implementation": "static", "disable_compile": True}
CACHES = {
    "dynamic": {},
    "in chunks": {"prefill_chunk_size": 4},
    "static": STATIC,
    "static, token by token": {**STATIC, "prefill_chunk_size": 1},
}
LONGEST, NEW = 8, 6


def generate(model, input_ids, assistant=None, **options):
    """Return what `generate` returns, with the logits. It begins with the same random numbers each time."""
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
    config = GenerationConfig(**options, output_logits=True, return_dict_in_generate=True)
    mask = (input_ids != 0).long()
    return model.generate(input_ids, attention_mask=mask, generation_config=config, assistant_model=assistant)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("name", "window", "core"), ON_CORES)
@pytest.mark.usefixtures("cpu_cores", "small_blocks")
def test_tokens_of_a_padded_batch_are_those_of_each_row_alone(name, window, core, cache):
    """Compare the logits, from a cache, with those of each row without cache and padding on "eager".

    Some chunks hold nothing but padding, and see nothing. Other cores than these have a dynamic cache alone."""
    options = CACHES[cache if core in ("eager", "sdpa", "base", SDPA_IN_BLOCKS) else "dynamic"]
    model = MODELS[name](window)
    set_core(model, core)
    rows = [random_ids(1, 3, seed=1), random_ids(1, LONGEST, seed=2)]
    padded = torch.cat([torch.nn.functional.pad(row, (LONGEST - row.shape[1], 0)) for row in rows])
    generated = generate(model, padded, **options)
    set_core(model, "eager")
    for i, row in enumerate(rows):
        alone = uncached_logits(model, generated.sequences[i : i + 1, -row.shape[1] - NEW : -1])
        assert_close(torch.stack(generated.logits, dim=1)[i], alone[0, -NEW:])
        assert torch.equal(generated.sequences[i, -NEW:], alone[0, -NEW:].argmax(-1))


MODES = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_k": 5, "num_return_sequences": 2},
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("cache", ["in chunks", "static"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "window", "core"), [case for case in ON_CORES if case[2] in ("sdpa", "base")])
def test_beams_and_samples_are_those_without_a_cache(name, window, core, mode, cache):
    model, input_ids = MODELS[name](window).double(), random_ids(2, LONGEST)
    set_core(model, core)
    expected = generate(model, input_ids, use_cache=False, **MODES[mode])
    assert torch.equal(generate(model, input_ids, **CACHES[cache], **MODES[mode]).sequences, expected.sequences)


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


@pytest.mark.one_of(2)
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
