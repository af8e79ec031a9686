"""Hold what masks and documents mean beyond what test_drawn.py draws: masks of users, cores of others, encoders."""

import pytest
import torch
from accelerate.utils import send_to_device
from helpers import (
    WAYS,
    assert_close,
    causal_4d,
    decoder,
    geometry_model,
    random_ids,
    random_model,
    set_core,
    small_config,
    uncached_logits,
)
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_iha import IHAForCausalLM, interleave_heads, pair_heads
from modeling_iha.interleaved_attention import LayerMasks, mask_of_plain_module
from modeling_iha.transformers_versions import CACHE
from research.experiments.model_types import tiny_model


MASKED_CORES = ["eager", "sdpa", "flex_attention"]
ONES = torch.ones(1, 10, dtype=torch.long)


pytestmark = pytest.mark.usefixtures("cpu_cores")


def positions(attention_mask):
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


# Custom masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["talking_heads", "hyper", "hyper_feature", "simplicial", "iha"])
@torch.no_grad()
def test_a_custom_mask_of_older_code_hides_as_well(kind, dtype):
    """Hide with -10000, as models did before masks had the lowest number of their dtype; linear kinds add no mask."""
    linear = {kind: {"linear": True}} if kind.startswith("hyper") else {}
    model = random_model(small_config(attention_kinds=kind, attention_options=linear), dtype=dtype)
    input_ids, visible = random_ids(2, 9), causal_4d(torch.tensor([[0] * 3 + [1] * 6, [1] * 9]), "bool")
    expected = model(input_ids, attention_mask=visible, use_cache=False).logits
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, -10000)
    actual = model(input_ids, attention_mask=mask, use_cache=False).logits
    assert_close(actual[0, 3:], expected[0, 3:])
    assert_close(actual[1], expected[1])


def test_a_custom_mask_next_to_windows_raises_an_error_in_a_compiled_model():
    model = torch.compile(geometry_model("window"), backend="eager")
    with pytest.raises(Exception, match="up to the length of the window"):
        model(random_ids(1, 9), attention_mask=causal_4d(torch.ones(1, 9), "bool"))


def hiding():
    """Hide two tokens from themselves: the last key that a query sees is not its own then."""
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    visible[8, 7:9] = False
    visible[11, 10:12] = False
    return visible


def alibi():
    """Return an additive mask that is not 0 where a pair is visible."""
    distance = torch.arange(12)[:, None] - torch.arange(12.0)
    return torch.where(distance >= 0, -0.5 * distance, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("make_mask", "kind", "core"),
    [
        *((hiding, kind, core) for kind in ("mha", "iha", "paired_heads") for core in MASKED_CORES),
        *((alibi, kind, core) for kind in ("mha", "iha", "paired_heads", "dcmha") for core in ("eager", "sdpa")),
        *((mask, kind, "base") for mask in (hiding, alibi) for kind in ("iha", "paired_heads")),
    ],
)
@torch.no_grad()
def test_a_mask_means_the_same_on_a_cache(make_mask, kind, core):
    """Compare chunks on a cache with the whole input."""
    model = random_model(small_config(attention_kinds=kind, num_pseudo_heads=2))
    set_core(model, core)
    input_ids, mask = random_ids(1, 12), make_mask()[None, None]
    expected = model(input_ids, attention_mask=mask, use_cache=False).logits
    assert (expected - model(input_ids, use_cache=False).logits).abs().max() > 0.01
    cache = DynamicCache(config=model.config)
    for tokens in (slice(0, 6), slice(6, 11), slice(11, 12)):
        chunk = {"attention_mask": mask[:, :, tokens, : tokens.stop], CACHE: cache}
        assert_close(model(input_ids[:, tokens], **chunk).logits, expected[:, tokens])


@pytest.mark.parametrize("name", ["iha", "interleaved"])
@torch.no_grad()
def test_a_mask_of_booleans_or_integers_is_the_same_for_all_cores(name, cpu_cores):
    model, input_ids = WAYS[name](None), random_ids(1, 12)
    mask = hiding()[None, None]
    expected = model(input_ids, attention_mask=mask).logits
    for core in MASKED_CORES:
        model.set_attn_implementation(core)
        for given in (mask, mask.long()):
            assert_close(model(input_ids, attention_mask=given).logits, expected)
    model.set_attn_implementation("flash_attention_2")
    with pytest.raises(ValueError, match=r"'flash_attention_2' takes attention_mask \[batch, tokens\] alone"):
        model(input_ids, attention_mask=mask)


@pytest.mark.parametrize("kind", ["talking_heads", "hyper"])
def test_kinds_with_their_own_scores_refuse_a_core_that_they_never_call(kind, monkeypatch):
    """Reject it because Transformers makes no mask for a core that registers none."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "another", sdpa_attention_forward)
    model = random_model(small_config(attention_kinds=kind, attn_implementation="another"))
    with pytest.raises(ValueError, match="'another' never builds: use 'sdpa' or 'eager'"):
        model(random_ids(1, 9))


def test_a_core_of_somebody_else_attends_under_its_own_masks(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "another", sdpa_attention_forward)
    # Transformers looks for mask functions among those that were registered for all models.
    masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(masks, "another", masks["eager"])
    model, mask = geometry_model("hybrid", "eager"), torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    expected = model(random_ids(2, 9), attention_mask=mask).logits[mask.bool()]
    model.config._attn_implementation = "another"
    assert_close(model(random_ids(2, 9), attention_mask=mask).logits[mask.bool()], expected)


@torch.no_grad()
def test_a_core_of_somebody_else_attends_for_a_new_token_too(monkeypatch):
    """Name it like SDPA: one new token over many cached ones is computed without virtual tokens on SDPA alone."""
    lengths = []

    def attend(module, query, *args, **kwargs):
        lengths.append(query.shape[2])
        return sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "my_sdpa", attend)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "my_sdpa", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = random_model(small_config(num_hidden_layers=1))
    model.config._attn_implementation = "my_sdpa"
    cache = DynamicCache(config=model.config)
    for length in (150, 1):
        model(random_ids(1, length), use_cache=True, **{CACHE: cache})
    assert lengths == [2 * 150, 2]


def test_a_core_without_masks_is_refused_by_virtual_heads(monkeypatch):
    """Without a mask padding would be seen, and the tokens of a cache left out."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "maskless", sdpa_attention_forward)
    model = geometry_model("global", "sdpa")
    model.config._attn_implementation = "maskless"
    with pytest.raises(KeyError, match="maskless"):
        model(random_ids(1, 9))


def test_masks_that_the_caller_made_keep_documents_apart():
    """They are dense: only a call that makes its masks itself reads documents as lengths."""
    model = random_model(small_config(layer_types=["sliding_attention", "full_attention"], sliding_window=4))
    positions = torch.cat((torch.arange(70), torch.arange(50)))[None]
    ids = random_ids(1, 120)
    masks = model.model.create_masks(model.get_input_embeddings()(ids), None, None, positions)
    assert all(mask.ndim == 4 for mask in masks.values())
    outputs = [model(ids, attention_mask=each, position_ids=positions, use_cache=False) for each in (masks, None)]
    assert_close(*(output.logits for output in outputs))


@pytest.mark.parametrize("inputs", [{}, {"attention_mask": causal_4d(torch.ones(1, 9), "bool")}], ids=["none", "4d"])
@pytest.mark.parametrize("geometry", ["global", "hyper_linear"])
def test_a_call_registers_nothing(geometry, inputs):
    """Leave the registries of Transformers alone: a change within a compiled call would compile the model twice."""
    model = geometry_model(geometry)
    before = dict(ALL_MASK_ATTENTION_FUNCTIONS), dict(ALL_ATTENTION_FUNCTIONS)
    model(random_ids(1, 9), **inputs)
    assert (dict(ALL_MASK_ATTENTION_FUNCTIONS), dict(ALL_ATTENTION_FUNCTIONS)) == before


# Packing


@pytest.mark.parametrize("places", [[*range(5), *range(4)], [*range(0, 27, 3)]], ids=["restart", "jump"])
@pytest.mark.parametrize("name", ["opt", "bert", "granitemoehybrid", "llama"])
@torch.no_grad()
def test_positions_tell_documents_where_they_do_in_the_base(name, places):
    """All of these but Llama join documents, the hybrid one in its recurrent layers alone."""
    base = tiny_model(name)
    call = {"input_ids": random_ids(1, 9), "position_ids": torch.tensor([places]), "use_cache": False}
    expected = base(**call).logits
    assert_close(interleave_heads(base, 2)(**call).logits, expected)


@torch.no_grad()
def test_documents_are_told_by_the_first_row_of_an_image_models_positions():
    """Keep documents apart as the base does, by positions [4, batch, N] whose first row is that of text."""
    model = tiny_model("qwen2_5_vl", "AutoModelForMultimodalLM")
    tokens = random_ids(1, 12, vocab_size=60)
    positions = torch.cat((torch.arange(5), torch.arange(7))).expand(4, 1, 12)
    expected = torch.cat([model(each, use_cache=False).logits for each in tokens.split((5, 7), dim=1)], dim=1)
    for each in (model, interleave_heads(model, 2)):
        assert_close(each(tokens, position_ids=positions, use_cache=False).logits, expected)


@pytest.mark.parametrize("core", ["eager", "sdpa"])
@pytest.mark.parametrize("layers", [None, [0]])
def test_a_window_does_not_cut_what_an_encoder_has_read(layers, core):
    model = decoder("gpt2", core=core, add_cross_attention=True)
    interleave_heads(model, 2, layers, sliding_window=3)
    encoded = torch.randn(1, 9, model.config.hidden_size, requires_grad=True)
    model(random_ids(1, 8), encoder_hidden_states=encoded, use_cache=False).logits[:, -1].square().sum().backward()
    assert (encoded.grad.abs().sum(dim=-1) > 0).all()


@pytest.mark.parametrize("change", [interleave_heads, pair_heads])
def test_a_window_longer_than_chunks_is_cached(change):
    model = tiny_model("llama4_text")
    change(model, 2, sliding_window=9)
    keys = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    tokens = random_ids(2, 14, vocab_size=60)
    expected = model.generate(tokens, **keys, use_cache=False)
    for more in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}):
        assert torch.equal(model.generate(tokens, **keys, **more), expected)


@torch.no_grad()
def test_a_mask_without_the_newest_tokens_is_refused_on_a_static_cache():
    model, input_ids = geometry_model("global"), random_ids(1, 7)
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(input_ids[:, :3], attention_mask=ONES[:, :3], **{CACHE: cache})
    with pytest.raises(ValueError, match=r"attention_mask \[1, 6\] does not fit 1 rows of 7 tokens"):
        model(input_ids[:, 3:], attention_mask=ONES[:, :6], position_ids=torch.arange(3, 7)[None], **{CACHE: cache})


@pytest.mark.parametrize("core", ["eager", "sdpa"])
def test_a_prefix_that_the_cache_lacks_is_named(core):
    """PEFT 0.21 gives `generate` of Transformers 5.24 the mask of a prefix, but not its keys."""
    mask = torch.tensor([[1] * 4 + [0] * 3 + [1] * 6])
    inputs = {"attention_mask": mask, "position_ids": positions(mask)[:, -9:]}
    for model in (geometry_model("global", core), interleave_heads(decoder("llama", core=core), 2)):
        cache = DynamicCache(config=model.config)
        with pytest.raises(ValueError, match="If the 4 columns of attention_mask without a token are a prefix"):
            model(random_ids(1, 9), **inputs, **{CACHE: cache})


def test_a_copied_block_mask_keeps_that_of_layers_that_are_not_interleaved():
    """Copy as the hooks of accelerate do."""
    of_tokens, of_virtual_tokens = (
        create_block_mask(lambda batch, head, query, key: query >= key, None, None, size, size, device="cpu")
        for size in (64, 128)
    )
    module = torch.nn.Module()
    masks = LayerMasks(of_virtual_tokens, of_tokens)
    assert mask_of_plain_module(masks, module, 64) is of_tokens
    copied = send_to_device(masks, "meta")
    assert copied.shape == of_virtual_tokens.shape and copied.kv_indices.is_meta
    copied = mask_of_plain_module(copied, module, 64)
    assert copied.shape == of_tokens.shape and copied.kv_indices.is_meta


@pytest.mark.parametrize("window", [7, 64])
@pytest.mark.parametrize("kind", ["mha", "iha", "paired_heads", "simplicial", "hyper", "talking_heads"])
def test_a_window_of_the_configuration_that_is_edited_later_is_followed(kind, window):
    """Expect the outputs of a model that was built with the window, uncached and token by token."""
    fields = {"attention_kinds": kind, "num_pseudo_heads": 2, "layer_types": "sliding_attention"}
    model = random_model(small_config(**fields, sliding_window=3))
    other = IHAForCausalLM(small_config(**fields, sliding_window=window)).eval()
    other.load_state_dict(model.state_dict())
    model.config.sliding_window = window
    input_ids = random_ids(2, 12)
    expected = uncached_logits(other, input_ids)
    assert_close(uncached_logits(model, input_ids), expected)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        steps = [model(input_ids[:, [i]], **{CACHE: cache}).logits for i in range(12)]
    assert_close(torch.cat(steps, dim=1), expected)


def test_a_core_without_a_mask_function_gets_no_mask():
    """Run a core of another library, such as vLLM's, which registers attention alone."""
    seen = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen.append(attention_mask)
        return query.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("of_somebody", attend)
    try:
        model = random_model(small_config(attention_kinds="mha"))
        model.config._attn_implementation = "of_somebody"
        model(random_ids(1, 5), use_cache=False)
        assert seen and set(seen) == {None}
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["of_somebody"]
