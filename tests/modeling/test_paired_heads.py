"""Test paired heads beyond what every kind is asked: Algorithm 1, layouts, masks for each head, and any decoder."""

import pytest
import torch
from helpers import (
    FP64_EXACT,
    assert_close,
    decoder,
    logits_in_chunks,
    random_ids,
    random_model,
    relative_error,
    set_core,
    small_config,
    uncached_logits,
)
from transformers import DynamicCache, LlamaForCausalLM

from modeling_iha import (
    IHAConfig,
    IHAForCausalLM,
    pair_heads,
    paired_decoders,
)
from modeling_iha import probes as probing
from modeling_iha.pairing import PairedHeads


# Groups of 2 of 8 heads in 4 groups, all heads, groups of 3 of 6.
HEADS = [(8, 4, 2), (4, 4, 4), (6, 3, 3), (4, 2, 2)]
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


def config_of(heads, groups, num_pseudo_heads, **fields):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 8 * heads}
    return small_config(**{"attention_kinds": "paired_heads", "num_pseudo_heads": num_pseudo_heads, **sizes, **fields})


@torch.no_grad()
def as_algorithm_1(model):
    """Return the "iha" model with the mixing by which Algorithm 1 computes paired heads.

    With S = H / P, alpha[m, h, p] = 1[m = p S + h mod S] and R[h, p] = 1[p = h // S]."""
    config = IHAConfig.from_dict({**model.config.to_dict(), "attention_kinds": "iha"})
    iha = IHAForCausalLM._from_config(config, dtype=torch.float64).eval()
    iha.load_state_dict(model.state_dict(), strict=False)
    for layer in iha.model.layers:
        module = layer.self_attn
        for alpha in (module.q_mix.weight, module.k_mix.weight, module.v_mix.weight):
            size = alpha.shape[0] // config.num_pseudo_heads
            for m, h, p in indices(alpha):
                alpha[m, h, p] = float(m == p * size + h % size)
        size = config.num_attention_heads // config.num_pseudo_heads
        for h, p in indices(module.collapse.weight):
            module.collapse.weight[h, p] = float(p == h // size)
    return iha


def indices(weight):
    return torch.cartesian_prod(*map(torch.arange, weight.shape)).tolist()


# Algorithm 1


@pytest.mark.parametrize("core", ["eager", "sdpa", "base"])
def test_a_mask_for_each_head(core):
    """Hide other keys from each head, in a whole input and for tokens on a cache."""
    model = random_model(config_of(8, 4, 2), dtype=torch.float64)
    iha = as_algorithm_1(model)
    mask = torch.rand(2, 8, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    mask = (mask | torch.eye(9, dtype=torch.bool)) & torch.ones(9, 9, dtype=torch.bool).tril()
    logits = []
    for each in (model, iha):
        set_core(each, core)
        cache = DynamicCache(config=each.config)
        with torch.no_grad():
            for first, last in ((0, 5), (5, 6), (6, 9)):
                inputs = {"attention_mask": mask[:, :, first:last, :last], "past_key_values": cache}
                logits.append(each(random_ids(2, 9)[:, first:last], use_cache=True, **inputs).logits)
    assert relative_error(torch.cat(logits[:3], dim=1), torch.cat(logits[3:], dim=1)) < FP64_EXACT


# Layouts, models of several kinds


def test_training_copies_no_heads(monkeypatch):
    """See queries, keys and values of the whole input viewed as the virtual sequence."""
    copied, make = [], PairedHeads.make_virtual_tokens

    def record(heads, *states):
        virtual = make(heads, *states)
        copied.extend(one.data_ptr() != other.data_ptr() for one, other in zip(virtual, states))
        return virtual

    monkeypatch.setattr(PairedHeads, "make_virtual_tokens", record)
    model = random_model(config_of(8, 4, 2, num_hidden_layers=1))
    model(random_ids(2, 9), use_cache=False)
    assert copied == [False] * 3


# Any decoder


PAIRED = {
    "llama": {},
    "gemma3_text": {},  # windows of the base
    "olmo2": {"layers": [0, 2]},
    "qwen3_moe": {"sliding_window": 3},
    "gpt2": {"layers": "paper"},
}


def paired(name, **options):
    model = decoder(name)
    with pytest.warns(UserWarning, match=f"The heads of this {name} are paired, which changes its outputs"):
        assert pair_heads(model, 2, **{**PAIRED[name], **options}) is model
    return model


@pytest.mark.parametrize("name", PAIRED)
def test_any_decoder_is_paired_in_place(name):
    """Compare chunks on a cache with the whole input; the function itself compares with Algorithm 1."""
    plain, model, input_ids = decoder(name), paired(name), random_ids(2, 9)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    logits = uncached_logits(model, input_ids)
    assert (logits - uncached_logits(plain, input_ids)).abs().max() > 0.01
    for core in ("sdpa", "base"):
        set_core(model, core)
        assert_close(logits_in_chunks(model, input_ids, [4, 1, 1, 3]), logits)


def test_a_probe_that_differs_is_noticed(monkeypatch):
    """Pair neighbours, and not heads that are H / P apart."""

    def make(heads, *states):
        return [each.unflatten(1, (-1, 2)).permute(0, 1, 3, 2, 4).flatten(2, 3) for each in states]

    monkeypatch.setattr(PairedHeads, "make_virtual_tokens", make)
    model = decoder("llama")
    with pytest.raises(ValueError, match="The heads of llama cannot be paired .hidden states differ"):
        pair_heads(model, 2)
    assert not hasattr(model.config, "interleaved_layers")


@pytest.mark.parametrize("probes", range(6))
def test_a_lack_of_memory_is_no_fault_of_the_model_type(probes, monkeypatch):
    """Run out of memory after so many probes: `interleave_heads` runs four, and `pair_heads` two more."""
    run = probing.probe
    calls = []

    def probe(model):
        calls.append(model)
        if len(calls) > probes:
            raise torch.OutOfMemoryError("no memory")
        return run(model)

    for module in (paired_decoders, probing):
        monkeypatch.setattr(module, "probe", probe)
    model = decoder("llama")
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        pair_heads(model, 2)
    assert (type(model), model.config._attn_implementation) == (LlamaForCausalLM, "sdpa")
