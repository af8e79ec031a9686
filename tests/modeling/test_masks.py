"""Pad, pack and mask on every core: a row does not depend on what it is batched or packed with.

What a core would silently ignore is refused. Padding and packing of every kind are in test_mechanisms.py.
"""

import pytest
import torch
from accelerate.utils import send_to_device
from helpers import (
    CORES,
    GEOMETRIES,
    IHA_GEOMETRIES,
    OTHER_KINDS,
    assert_close,
    assert_custom_masks_mean_padding,
    causal_4d,
    cumulative_lengths,
    decoder,
    geometry_model,
    on_cores,
    random_ids,
    random_model,
    set_core,
    small_config,
    uncached_logits,
)
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_iha import IHAForCausalLM, interleave_heads
from modeling_iha.transformers_versions import CACHE
from modeling_iha.first_keys import is_first_key_mask, read_mask
from modeling_iha.masks import _compiled_masks, make_masks
from modeling_iha.virtual_masks import token_mask


FLASH = "flash_attention_2"
MASKED_CORES = ["eager", "sdpa", "flex_attention"]
LENGTHS = [5, 1, 4]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
CU_SEQ_LENS = cumulative_lengths(LENGTHS)
ONES = torch.ones(1, 10, dtype=torch.long)


pytestmark = pytest.mark.usefixtures("cpu_cores")


def positions(attention_mask):
    return (attention_mask.cumsum(-1) - 1).clamp_min(0)


# Padding


@pytest.mark.parametrize("geometry", IHA_GEOMETRIES)
@pytest.mark.parametrize("core", CORES)
@torch.no_grad()
def test_padding_changes_no_row(core, geometry):
    model = geometry_model(geometry, core)
    rows, pads = [random_ids(1, n, seed=n) for n in (3, 8, 1, 5)], [(5, 0), (0, 0), (3, 4), (0, 3)]
    padded = torch.cat([torch.nn.functional.pad(row, pad) for row, pad in zip(rows, pads)])
    attention_mask = (padded != 0).long()
    logits = model(padded, attention_mask=attention_mask, position_ids=positions(attention_mask)).logits
    for row, of_row, real in zip(rows, logits, attention_mask.bool()):
        assert_close(of_row[real], model(row).logits[0])


@pytest.mark.one_of(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("core", "geometry"), on_cores(["global", "hybrid_window_of_2", *OTHER_KINDS, "hybrid"]))
def test_a_row_of_padding_gives_no_nan(core, geometry, dtype):
    """See no NaN in logits and gradients (FlexAttention has no CPU backward), and the other row undisturbed."""
    model = geometry_model(geometry, core, dtype=dtype)
    input_ids = random_ids(2, 8)
    attention_mask = torch.tensor([[0] * 8, [0, 0] + [1] * 6])
    with torch.set_grad_enabled(core != "flex_attention"):
        logits = model(input_ids, attention_mask=attention_mask, position_ids=positions(attention_mask)).logits
    assert logits.isfinite().all()
    if core != "flex_attention":
        logits.float().square().mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        alone = model(input_ids[1:, 2:]).logits[0]
    half = dtype in (torch.bfloat16, torch.float16)
    assert_close(logits[1, 2:].detach().float(), alone.float(), 0.05 if half else 2e-5)
    if core != "flash_attention_2":
        # A custom mask, boolean: the first row sees nothing.
        with torch.no_grad():
            logits = model(input_ids, attention_mask=causal_4d(attention_mask, "bool")).logits
        assert logits.isfinite().all()


# Custom masks


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("core", "geometry"), on_cores(GEOMETRIES, ["base", *MASKED_CORES]))
@torch.no_grad()
def test_custom_masks_equal_the_padding_they_express(core, geometry):
    assert_custom_masks_mean_padding(geometry_model(geometry, core))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["multi_token", "hyper", "hyper_feature", "simplicial", "iha"])
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


@pytest.mark.parametrize("kind", ["hyper", "simplicial"])
@torch.no_grad()
def test_windows_of_pairs_end_at_the_last_key_that_a_mask_of_older_code_shows(kind):
    """Hide later tokens with -10000, which is -9984 in bfloat16, the highest value that still hides."""
    window = {"layer_types": "sliding_attention", "sliding_window": 3}
    config = small_config(attention_kinds=kind, attention_options={kind: {"windows": [2, 3]}}, **window)
    model, input_ids = random_model(config, dtype=torch.bfloat16), random_ids(1, 9)
    mask = torch.full((1, 1, 9, 9), -10000.0, dtype=torch.bfloat16).triu(1)
    expected = model(input_ids, use_cache=False).logits
    assert_close(model(input_ids, attention_mask=mask, use_cache=False).logits, expected)


@pytest.mark.parametrize(("dtype", "shape"), [(torch.long, (1, 1, 9, 9)), (torch.bool, (1, 9, 9)), (torch.long, (9,))])
def test_a_mask_of_another_dtype_or_shape_is_refused(dtype, shape):
    with pytest.raises(ValueError, match=r"attention_mask is torch.*pass one \[batch, tokens\], or a boolean"):
        geometry_model("global", "sdpa")(random_ids(1, 9), attention_mask=torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("core", MASKED_CORES)
@torch.no_grad()
def test_one_row_of_a_mask_serves_every_row(core):
    """Hide padding in a batch of two by a mask [1, N], which Transformers broadcasts."""
    model, tokens, mask = geometry_model("hybrid", core), random_ids(2, 9), torch.tensor([[0] * 3 + [1] * 6])
    both, one = (model(tokens, attention_mask=each, use_cache=False).logits for each in (mask.expand(2, -1), mask))
    assert_close(one[:, 3:], both[:, 3:])
    positions = torch.tensor([[0] * 3 + list(range(6))]).expand(2, -1)  # as many rows as tokens has
    with_positions = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert with_positions.isfinite().all()
    expected = model(tokens, attention_mask=mask.expand(2, -1), position_ids=positions, use_cache=False).logits
    assert_close(with_positions[:, 3:], expected[:, 3:])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_mask_of_three_dimensions_is_refused(name):
    model = interleave_heads(decoder(name), 2)
    with pytest.raises(ValueError, match=r"attention_mask is torch.float32 \[1, 5, 5\]: pass one \[batch, tokens\]"):
        model(random_ids(1, 5), attention_mask=torch.ones(1, 5, 5))


@pytest.mark.parametrize("core", ["sdpa", "eager", "flex_attention"])
def test_a_block_mask_of_the_users_is_refused(core):
    mask = create_block_mask(lambda batch, head, query, key: query >= key, 1, 1, 9, 9, device="cpu")
    model = geometry_model("global", "sdpa")
    model.config._attn_implementation = core  # a compiled core is not wanted here
    with pytest.raises(ValueError, match="attention_mask is a BlockMask"):
        model(random_ids(1, 9), attention_mask=mask)


@pytest.mark.parametrize("kind", ["talking_heads", "hyper"])
def test_kinds_with_their_own_scores_refuse_a_core_that_they_never_call(kind, monkeypatch):
    """Refuse it because Transformers makes no mask for a core that registers none."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "another", sdpa_attention_forward)
    with pytest.raises(ValueError, match="'another' never builds: use 'sdpa' or 'eager'"):
        random_model(small_config(attention_kinds=kind, attn_implementation="another"))


def test_a_core_of_somebody_else_attends_under_its_own_masks(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "another", sdpa_attention_forward)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "another", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model, mask = geometry_model("hybrid", "eager"), torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    expected = model(random_ids(2, 9), attention_mask=mask).logits[mask.bool()]
    model.config._attn_implementation = "another"
    assert_close(model(random_ids(2, 9), attention_mask=mask).logits[mask.bool()], expected)


def test_flex_on_a_cpu_warns():
    model = geometry_model("global", "flex_attention")
    with pytest.warns(UserWarning, match="FlexAttention compiled for a CPU may fail"), torch.no_grad():
        model(random_ids(1, 5))


def test_a_core_without_masks_is_refused_by_virtual_heads(monkeypatch):
    """Without a mask padding would be seen, and the tokens of a cache left out."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "maskless", sdpa_attention_forward)
    model = geometry_model("global", "sdpa")
    model.config._attn_implementation = "maskless"
    with pytest.raises(ValueError, match="'maskless' makes no masks, which interleaved heads need"):
        model(random_ids(1, 9))


@pytest.mark.parametrize("geometry", ["global", "window_mha", "diff"])
def test_flash_refuses_a_custom_mask(geometry):
    with pytest.raises(ValueError, match="flash_attention_2.*no custom mask.*'sdpa'"):
        geometry_model(geometry, FLASH)(random_ids(1, 9), attention_mask=causal_4d(torch.ones(1, 9), "bool"))


@pytest.mark.parametrize("geometry", ["global", "window_mha", "talking_heads"])
@pytest.mark.parametrize("core", ["sdpa", "eager"])
def test_attention_in_both_directions_is_refused(core, geometry):
    """Refuse `is_causal=False`, which Transformers takes as an argument of a call and as a field of a config."""
    model = geometry_model(geometry, core)
    with pytest.raises(ValueError, match="is_causal=False: the layers of this model are causal"):
        model(random_ids(1, 9), is_causal=False)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="is_causal=False: the layers of this model are causal"):
        model(random_ids(1, 9), attention_mask=torch.ones(1, 9))


@pytest.mark.parametrize("inputs", [{}, {"attention_mask": causal_4d(torch.ones(1, 9), "bool")}], ids=["none", "4d"])
@pytest.mark.parametrize("geometry", ["hybrid", "talking_heads"])
def test_a_call_registers_nothing(geometry, inputs):
    """Leave the registries of Transformers alone: a change within a compiled call would compile the model twice."""
    model = geometry_model(geometry)
    before = dict(ALL_MASK_ATTENTION_FUNCTIONS), dict(ALL_ATTENTION_FUNCTIONS)
    model(random_ids(1, 9), **inputs)
    assert (dict(ALL_MASK_ATTENTION_FUNCTIONS), dict(ALL_ATTENTION_FUNCTIONS)) == before


# Packing


@torch.no_grad()
def packing_error(model, rows=1, **inputs):
    """Return the largest difference, over the largest logit, between packed documents and each alone."""
    documents = random_ids(1, sum(LENGTHS)).split(LENGTHS, dim=1)
    separate = torch.cat([model(document).logits for document in documents], dim=1)
    packed = model(torch.cat(documents, dim=1).expand(rows, -1), **inputs).logits
    return ((packed - separate).abs().max() / separate.abs().max()).item()


@pytest.mark.parametrize("geometry", IHA_GEOMETRIES)
@pytest.mark.parametrize("core", CORES)
def test_packed_equals_separate(core, geometry):
    """Pass everything that a padding-free collator gives; `PACKINGS` has interleaved positions."""
    model = geometry_model(geometry, core, pseudo_positions="shared")
    assert packing_error(model, position_ids=POSITIONS, use_cache=False, **CU_SEQ_LENS) < 1e-5


# What declares the documents, and the cores that keep them apart by it.
PACKINGS = {
    "positions": ({"position_ids": POSITIONS, "use_cache": False}, CORES),
    "positions_in_two_rows": ({"position_ids": POSITIONS.expand(2, -1), "use_cache": False, "rows": 2}, MASKED_CORES),
    "positions_for_two_rows": ({"position_ids": POSITIONS, "use_cache": False, "rows": 2}, MASKED_CORES),
    "positions_with_a_cache": ({"position_ids": POSITIONS, "use_cache": True}, [FLASH]),
    "positions_with_a_mask": ({"position_ids": POSITIONS, "attention_mask": ONES, "use_cache": False}, [FLASH]),
    "lengths": ({"use_cache": False, **CU_SEQ_LENS}, [FLASH]),
    "lengths_with_positions_that_run_on": (
        {"position_ids": torch.arange(10)[None], "use_cache": False, **CU_SEQ_LENS},
        [FLASH],
    ),
    "lengths_without_the_longest": (
        {"use_cache": False, **{name: CU_SEQ_LENS[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k")}},
        [],
    ),
    "lengths_with_a_cache": ({"position_ids": POSITIONS, "use_cache": True, **CU_SEQ_LENS}, [FLASH]),
    "lengths_with_a_mask": (
        {"position_ids": POSITIONS, "attention_mask": ONES, "use_cache": False, **CU_SEQ_LENS},
        [FLASH],
    ),
    "lengths_with_padding": (
        {
            "position_ids": POSITIONS,
            "attention_mask": torch.tensor([[1] * 9 + [0]]),
            "use_cache": False,
            **CU_SEQ_LENS,
        },
        [],
    ),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("case", PACKINGS)
@pytest.mark.parametrize("core", CORES)
def test_packing_is_kept_apart_or_refused(core, case):
    """Keep the documents apart, or refuse the call.

    Refused is only what Transformers' masks and dispatch silently join, which a Llama shows.
    """
    inputs, cores = PACKINGS[case]
    model = geometry_model("hybrid", core)
    llama = random_model(
        LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4),
        LlamaForCausalLM,
    )
    llama.set_attn_implementation("sdpa" if core == "base" else core)
    if core in cores:
        assert packing_error(model, **inputs) < 1e-5
        assert packing_error(llama, **inputs) < 1e-5
    else:
        with pytest.raises(ValueError, match="(?s)Packed documents.*keeps them apart if"):
            packing_error(model, **inputs)
        assert packing_error(llama, **inputs) > 0.1


@pytest.mark.parametrize("core", MASKED_CORES)
@torch.no_grad()
def test_a_mask_may_cover_tokens_to_come(core):
    """Look for documents among the tokens of the call: padding may restart positions, real tokens may not."""
    model, to_come = geometry_model("global", core), torch.zeros(2, 8, dtype=torch.long)
    padding = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
    inputs = {"input_ids": random_ids(2, 8), "position_ids": positions(padding)}
    expected = model(**inputs, attention_mask=padding).logits[padding.bool()]
    cache = StaticCache(config=model.config, max_cache_len=16)
    longer = torch.cat((padding, to_come), dim=1)
    assert_close(model(**inputs, attention_mask=longer, **{CACHE: cache}).logits[padding.bool()], expected)
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="Packed documents"):
        model(**inputs, attention_mask=torch.cat((torch.ones_like(padding), to_come), dim=1))


@torch.no_grad()
def test_a_mask_without_the_newest_tokens_is_refused_on_a_static_cache():
    model, input_ids = geometry_model("global"), random_ids(1, 7)
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(input_ids[:, :3], attention_mask=ONES[:, :3], **{CACHE: cache})
    with pytest.raises(ValueError, match="4 tokens come after 3 cached ones.*has fewer than 7 columns"):
        model(input_ids[:, 3:], attention_mask=ONES[:, :6], **{CACHE: cache})


@pytest.mark.parametrize("core", MASKED_CORES)
@torch.no_grad()
def test_documents_with_padding_between_them_are_refused(core):
    """Each document may be padded, so that no restart lies between two real tokens."""
    model = geometry_model("global", core)
    padding = torch.tensor([[1, 1, 1, 0, 1, 1, 1]])
    inputs = {"input_ids": random_ids(1, 7), "attention_mask": padding, "use_cache": False}
    with pytest.raises(ValueError, match="Packed documents"):
        model(**inputs, position_ids=torch.tensor([[0, 1, 2, 0, 0, 1, 2]]))
    model(**inputs, position_ids=positions(padding))  # one document with a hole


@pytest.mark.parametrize("core", MASKED_CORES)
@torch.no_grad()
def test_documents_of_one_token_are_refused_with_a_mask(core):
    """Take two such documents: their positions are equal, and no position is lower than the one before."""
    model = geometry_model("global", core)
    with pytest.raises(ValueError, match="Packed documents"):
        model(random_ids(1, 2), attention_mask=torch.ones(1, 2), position_ids=torch.tensor([[0, 0]]))


@pytest.mark.parametrize("core", CORES)
def test_documents_that_begin_at_different_positions(core):
    """Refuse them on a flash core, which takes the smallest position for the beginning of every document."""
    model = geometry_model("hybrid", core)
    inputs = {"position_ids": POSITIONS + torch.tensor([3] * 5 + [0] * 5), "use_cache": False}
    if core == FLASH:
        with pytest.raises(ValueError, match="Packed documents.*restart at their first value"):
            packing_error(model, **inputs)
    else:
        assert packing_error(model, **inputs) < 1e-5


@pytest.mark.parametrize("core", CORES)
@torch.no_grad()
def test_packing_on_top_of_a_cache_is_refused(core):
    model = geometry_model("global", core)
    cache = model(random_ids(1, 3), use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="Packed documents.*cache"):
        model(random_ids(1, 10), position_ids=POSITIONS, **{CACHE: cache})


def masks_for(core, geometry, length, attention_mask=None, cache=None, device="meta", positions=None):
    """Return the masks of a P = 2 model for one sequence of `length` tokens; no layer runs."""
    model = random_model(small_config(**GEOMETRIES[geometry]))
    set_core(model, core)
    embeds = torch.empty(1 if positions is None else len(positions), length, 0, device=device)
    return make_masks(model.config, embeds, attention_mask, cache, positions)


def test_causal_attention_over_the_whole_input_builds_no_mask():
    """Build none on flash cores, and on SDPA none without windows and padding; nothing is allocated on `meta`."""
    no_mask = {"full_attention": None}
    assert masks_for("sdpa", "global", 65536) == no_mask
    cache = StaticCache(config=small_config(), max_cache_len=70000)
    assert masks_for("sdpa", "global", 65536, cache=cache) == no_mask
    hybrid = masks_for(FLASH, "hybrid", 65536)
    assert len(hybrid) == 2 and not any(mask is not None for mask in hybrid.values())
    assert masks_for("sdpa", "global", 10, ONES, device="cpu") == no_mask


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("rows", [1, 2])
def test_documents_and_windows_build_no_dense_mask_on_sdpa(geometry, rows):
    positions = torch.cat([torch.arange(length) for length in (200, 100, 1)]).expand(rows, -1)
    for mask in masks_for("sdpa", geometry, 301, device="cpu", positions=positions).values():
        assert is_first_key_mask(mask) and len(read_mask(mask).documents().bounds) == 3 * rows + 1
    for layer_type, mask in masks_for("sdpa", geometry, 301, device="cpu").items():
        assert (mask is None) == (layer_type == "full_attention")


@pytest.mark.parametrize("geometry", ["global", "hybrid"])
def test_compiled_code_finds_the_documents_that_eager_code_finds(geometry):
    """Call in eager code the function that makes the masks of compiled code."""
    config = random_model(small_config(**GEOMETRIES[geometry])).config
    embeds, positions = torch.empty(2, 10, 0), torch.cat((POSITIONS, torch.arange(10)[None]))
    compiled = _compiled_masks(config, embeds, None, positions)
    expected = masks_for("sdpa", geometry, 10, device="cpu", positions=positions)
    assert compiled.keys() == expected.keys()
    for layer_type, mask in expected.items():
        assert torch.equal(read_mask(compiled[layer_type]).first, read_mask(mask).first)


@pytest.mark.parametrize("window", [10, 11])
def test_a_window_that_reaches_every_token_is_no_window(window):
    config = small_config(layer_types="sliding_attention", sliding_window=window)
    config._attn_implementation = "sdpa"
    assert make_masks(config, torch.empty(1, 10, 0), None, None, None) == {"sliding_attention": None}


def test_a_copied_block_mask_is_refused_by_layers_that_are_not_interleaved():
    """Copy as the hooks of accelerate do, which makes a new BlockMask from the parts of one."""
    mask = create_block_mask(lambda batch, head, query, key: query >= key, None, None, 128, 128, device="cpu")
    mask.of_tokens = mask
    assert token_mask(mask, 2) is mask
    with pytest.raises(RuntimeError, match="copied the BlockMask .* Use sdpa, or interleave all layers"):
        token_mask(send_to_device(mask, "meta"), 2)


@pytest.mark.parametrize("core", ["eager", "sdpa"])
@torch.no_grad()
def test_a_bias_on_visible_pairs_keeps_the_window_on_a_cache(core):
    """Pass an additive mask that is not 0 where a pair is visible, as ALiBi would, at once and in chunks."""
    model = random_model(small_config(layer_types="sliding_attention", sliding_window=2))
    set_core(model, core)
    input_ids = random_ids(1, 9)
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1) + torch.full((9, 9), 0.5).tril()
    expected = model(input_ids, attention_mask=mask[None, None], use_cache=False).logits
    cache = model(input_ids[:, :5], attention_mask=mask[None, None, :5, :5], use_cache=True)[CACHE]
    rest = model(input_ids[:, 5:], attention_mask=mask[None, None, 5:], **{CACHE: cache}).logits
    assert_close(rest, expected[:, 5:])


@pytest.mark.parametrize("kind", ["mha", "iha", "paired_heads"])
@pytest.mark.parametrize("core", ["eager", "sdpa"])
@torch.no_grad()
def test_a_mask_that_hides_a_token_from_itself_keeps_the_window_on_every_cache(core, kind):
    """The last key that a query sees is not its own then."""
    fields = {"attention_kinds": kind, "num_pseudo_heads": 2, "layer_types": "sliding_attention"}
    model = random_model(small_config(**fields, sliding_window=4))
    set_core(model, core)
    input_ids = random_ids(1, 12)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    visible[8, 7:9] = False
    visible[11, 10:12] = False
    expected = model(input_ids, attention_mask=visible[None, None], use_cache=False).logits
    for cache, width in (
        (DynamicCache(config=model.config), 12),
        (StaticCache(config=model.config, max_cache_len=14), 14),
    ):
        for tokens in (slice(0, 6), slice(6, 11), slice(11, 12)):
            keys = tokens.stop if width == 12 else width
            mask = torch.nn.functional.pad(visible, (0, width - 12))[None, None, tokens, :keys]
            logits = model(input_ids[:, tokens], attention_mask=mask, **{CACHE: cache}).logits
            assert_close(logits, expected[:, tokens])


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
