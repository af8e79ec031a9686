"""The default attention implementation of an "iha" layer on a CPU: from the base states, collapsed before the values
are multiplied, and decoded with the mixing absorbed. That
these forms compute what the virtual sequence does is tested in test_reference.py and test_generation.py, by the
fixture `form`, and in the mechanism suite."""

import pytest
import torch
from helpers import (
    HYBRID,
    assert_close,
    causal_4d,
    collapse_short_inputs_first,
    logits_in_chunks,
    random_ids,
    random_model,
    set_core,
    small_config,
)
from transformers import StaticCache

from modeling_iha import virtual_sequence
from modeling_iha.collapse_first import collapse_first_attention


POSITIONS = torch.cat([torch.arange(n) for n in (5, 1, 4)])[None]
ONES = torch.ones(1, 10, dtype=torch.long)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The (path, queries, keys) of each layer that attended from its base states."""
    collapse_short_inputs_first(monkeypatch)
    calls = []

    def spy(name):
        function = getattr(virtual_sequence, name)

        def spied(query, key, *args):
            calls.append((name, query.shape[2], key.shape[2]))
            return function(query, key, *args)

        monkeypatch.setattr(virtual_sequence, name, spied)

    spy("collapse_first_attention")
    spy("absorbed_attention")
    return calls


COLLAPSE, ABSORB = "collapse_first_attention", "absorbed_attention"


@torch.no_grad()
def test_the_default(calls):
    """A prompt, a chunk on the cache and a token, from base states; nothing but the core is named in a config.json."""
    model = random_model(small_config(num_hidden_layers=1))
    assert model.config._attn_implementation == "sdpa"
    logits_in_chunks(model, random_ids(1, 9), [5, 3, 1])
    assert calls == [(COLLAPSE, 5, 5), (COLLAPSE, 3, 8), (ABSORB, 1, 9)]
    assert "attn_implementation" not in model.config.to_json_string()


NOT_COLLAPSED = {
    "another core": {"core": "sdpa"},
    "one pseudo-head": {"num_pseudo_heads": 1},
    "collapse over all heads": {"pseudo_collapse": "all_heads"},
    "attention dropout": {"attention_dropout": 0.1},
    "a multi-head layer": {"attention_kinds": "mha"},
}


@pytest.mark.parametrize("case", NOT_COLLAPSED)
@torch.no_grad()
def test_where_it_is_sdpa(case, calls):
    overrides = dict(NOT_COLLAPSED[case])
    model = random_model(small_config(num_hidden_layers=1, **{k: v for k, v in overrides.items() if k != "core"}))
    if "core" in overrides:
        set_core(model, overrides["core"])
    logits_in_chunks(model, random_ids(1, 9), [5, 3, 1])
    assert not calls


@torch.no_grad()
def test_masks_that_are_not_of_documents_are_sdpa(calls):
    """A custom mask; a static cache, whose keys do not end with the newest token."""
    model = random_model(small_config(**HYBRID, sliding_window=4))
    expected = model(random_ids(1, 10)).logits
    calls.clear()
    assert_close(model(random_ids(1, 10), attention_mask=causal_4d(ONES, "bool")).logits, expected)
    cache = StaticCache(config=model.config, max_cache_len=16)
    assert_close(logits_in_chunks(model, random_ids(1, 10), [4, 3, 1, 1, 1], cache), expected)
    # Filling the empty cache needs no mask; a window layer's keys do end with the newest token.
    assert calls and not {(COLLAPSE, 3, 16), (ABSORB, 1, 16)} & set(calls)


def test_packed_long_rows_build_no_dense_mask(monkeypatch):
    """Nor do padding, windows and chunks on a cache."""
    monkeypatch.setattr(virtual_sequence, "MAX_MASK_BYTES", 0)
    for overrides in ({}, {"layer_types": "sliding_attention", "sliding_window": 3}):
        model = random_model(small_config(**overrides))
        model(random_ids(1, 10), position_ids=POSITIONS, use_cache=False).logits.sum().backward()
        cache = model(random_ids(1, 10), attention_mask=(torch.arange(10) > 3).long()[None]).past_key_values
        model(random_ids(1, 4), past_key_values=cache)


@pytest.mark.parametrize("positions", ["interleaved", "shared"])
@torch.no_grad()
def test_bfloat16_weights_and_autocast(positions, calls):
    """No further from float32 than the eager core is, decoding included."""
    config = small_config(num_pseudo_heads=3, pseudo_positions=positions)
    input_ids = random_ids(2, 40)
    expected = random_model(config)(input_ids).logits

    def error(core, dtype, autocast):
        model = random_model(config, dtype=dtype)
        set_core(model, core)
        with torch.autocast("cpu", enabled=autocast):
            logits = logits_in_chunks(model, input_ids, [30, 8, 1, 1])
        return ((logits - expected).square().mean() / expected.square().mean()).sqrt()

    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        assert error("collapse_first", dtype, autocast) < 1.2 * error("eager", dtype, autocast) < 0.1
    assert {call[0] for call in calls} == {COLLAPSE, ABSORB}


def test_gradients_under_autocast():
    """What autocast rounds are the projections, not the scores; every parameter's gradient stays float32."""
    model = random_model(small_config(num_pseudo_heads=3))
    gradients = {}
    for core in ("collapse_first", "eager", None):
        set_core(model, core or "eager")
        model.zero_grad()
        with torch.autocast("cpu", enabled=core is not None):
            model(random_ids(2, 40)).logits.float().square().mean().backward()
        gradients[core] = torch.cat([p.grad.flatten() for p in model.parameters()])
    errors = {core: (gradients[core] - gradients[None]).norm() / gradients[None].norm() for core in gradients}
    assert errors["collapse_first"] < 1.2 * errors["eager"] < 0.1


def test_only_base_states_are_kept_for_the_backward():
    """Nothing saved for the backward is larger than the layer's widest projection, P = 8 notwithstanding."""
    model = random_model(small_config(num_pseudo_heads=8, num_key_value_heads=4, num_hidden_layers=1))
    attention, largest = model.model.layers[0].self_attn, []
    hidden = torch.randn(1, 64, 32, requires_grad=True)
    tables = model.model.rotary_emb.tables(hidden, torch.arange(64)[None])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: largest.append(t.numel()) or t, lambda t: t):
        output, _ = attention(hidden, tables, attention_form=collapse_first_attention)
    output.sum().backward()
    assert max(largest) == hidden.numel()


def test_frozen_backbone_and_offloaded_mixing():
    """The mixing's gradient does not need those of the states; its weights are read through forward, where a wrapper
    acts."""
    model = random_model(small_config(num_hidden_layers=1))
    expected = torch.autograd.grad(model(random_ids(1, 9)).logits.sum(), model.model.layers[0].self_attn.k_mix.weight)
    model.requires_grad_(False)
    k_mix = model.model.layers[0].self_attn.k_mix
    k_mix.weight.requires_grad_(True)
    kept = k_mix.weight.detach().clone()
    k_mix.weight.data.zero_()

    def fetch(module, args):
        module.weight.data.copy_(kept)

    k_mix.register_forward_pre_hook(fetch)
    actual = torch.autograd.grad(model(random_ids(1, 9)).logits.sum(), k_mix.weight)
    assert_close(actual[0], expected[0], 1e-6)
