"""Test when one new token is decoded from base states, and that it computes the same."""

import pytest
import torch
from helpers import assert_close, causal_4d, logits_in_chunks, random_ids, random_model, set_core, small_config

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


@pytest.mark.parametrize("positions", ["interleaved", "shared"])
@torch.no_grad()
def test_bfloat16_weights_and_autocast(positions):
    """Stay as close to float32 as the eager core does, decoding included."""
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
        assert error("base", dtype, autocast) < 1.2 * error("eager", dtype, autocast) < 0.1


def test_gradients_under_autocast():
    """Round the projections under autocast, but not the scores."""
    model = random_model(small_config(num_pseudo_heads=3))
    gradients = {}
    for core in ("base", "eager", None):
        set_core(model, core or "eager")
        model.zero_grad()
        with torch.autocast("cpu", enabled=core is not None):
            model(random_ids(2, 40)).logits.float().square().mean().backward()
        gradients[core] = torch.cat([p.grad.flatten() for p in model.parameters()])
    errors = {core: (gradients[core] - gradients[None]).norm() / gradients[None].norm() for core in gradients}
    assert errors["base"] < 1.2 * errors["eager"] < 0.1


def test_frozen_backbone_and_offloaded_mixing():
    """Train the mixing alone, and read its weights through forward, where a wrapper acts."""
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
