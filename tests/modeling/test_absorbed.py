"""Test when one new token is decoded from base states, and that it computes the same."""

import pytest
import torch
from helpers import assert_close, causal_4d, random_ids, random_model, set_core, small_config

from modeling_iha import virtual_core
from modeling_iha.interleaving import is_absorbed


def takes(num_keys, batch=1, core="sdpa", dropout=0.0, **fields):
    return is_absorbed(core, small_config(**fields), dropout, torch.empty(batch, 4, 1, 8), num_keys)


def test_one_token():
    """Decode from base states from 64 keys in a row and 128 in the batch on."""
    assert takes(128) and takes(64, batch=2) and not takes(127) and not takes(63, batch=64)
    assert not takes(4096, core="eager") and not takes(4096, dropout=0.1)
    assert not takes(4096, pseudo_collapse="all_heads") and not takes(4096, num_pseudo_heads=1)


@pytest.fixture
def calls(monkeypatch):
    """Record (queries, keys) of each layer that attends to one token from its base states."""
    calls, absorbed = [], virtual_core.absorbed_attention

    def spied(query, key, *args, **kwargs):
        calls.append((query.shape[2], key.shape[2]))
        return absorbed(query, key, *args, **kwargs)

    monkeypatch.setattr(virtual_core, "absorbed_attention", spied)
    return calls


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generation_with_a_cache_of_any_kind(implementation, window, calls):
    """Generate with a static cache too, which is longer than what it holds and so brings a mask."""
    fields = {} if window is None else {"layer_types": "sliding_attention", "sliding_window": window}
    model = random_model(small_config(num_hidden_layers=2, **fields))
    inputs = {"input_ids": random_ids(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    inputs["attention_mask"][0, :4] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    set_core(model, "sdpa")
    expected = model.generate(**inputs, **settings, output_logits=True, return_dict_in_generate=True)
    assert not calls
    set_core(model, "base")
    settings |= {"cache_implementation": implementation, "disable_compile": True}
    actual = model.generate(**inputs, **settings, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(actual.sequences, expected.sequences) and len(calls) == 2 * 7
    for logits, target in zip(actual.logits, expected.logits):
        torch.testing.assert_close(logits, target, atol=2e-5, rtol=2e-5)


def test_one_token_under_a_custom_mask(calls):
    model = random_model(small_config(num_hidden_layers=1), dtype=torch.float64)
    input_ids, hidden = random_ids(1, 6), causal_4d(torch.tensor([[1, 1, 0, 1, 1, 1]]), "additive").double()
    logits = {}
    for form in ("sdpa", "base"):
        set_core(model, form)
        cache = model(input_ids[:, :5], use_cache=True).past_key_values
        logits[form] = model(input_ids[:, 5:], attention_mask=hidden[..., 5:, :], past_key_values=cache).logits
    assert calls == [(1, 6)]
    assert_close(logits["base"], logits["sdpa"], 1e-10)
