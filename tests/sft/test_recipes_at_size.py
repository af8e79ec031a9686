"""Run the recipes at their size, without data: no tensor of a step is larger than those of the base's own FFN.

Tensors are on the meta device, and stand-ins take the place of a GPU's kernels (FlashAttention, by SDPA for whole rows
and by `varlen_attn` for documents and windows). A mask for each pair of tokens would have 131,072² entries here."""

import pytest
import torch
import torch.distributed as dist
import yaml
from helpers import decoder
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples import speedrun
from iha.errors import ROOT
from iha.kinds import virtual_tokens_per_token
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, pair_heads, sdpa_in_blocks
from sft.sequence_parallel import shared_rows


QWEN = {  # Qwen2.5-7B, with a small vocabulary, whose weights would else be the largest tensor
    **{"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 64, "max_position_embeddings": 65536},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128},
}
RECIPES = ["long_context_64k/continued", "long_context_64k/sft", "openthoughts/sft", "openthoughts3/sft", "lora/sft"]


class Largest(TorchDispatchMode):
    """Record the number of entries of the largest tensor."""

    entries = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.entries = max([self.entries, *sizes])
        return result


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Stand in for a GPU's kernels where tensors have no data. They keep no scores, and take no mask."""
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, *args, **kwargs):
        if not query.is_meta:  # interleave_heads compares a small model
            return sdpa(query, key, value, *args, **kwargs)
        assert kwargs.get("attn_mask") is None
        calls.append(query.shape)
        return query + key.sum() + value.sum()

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(sdpa_in_blocks, "varlen_attn", attend)
    monkeypatch.setattr(sdpa_in_blocks, "has_varlen_kernel", lambda query, *args: query.is_meta)
    return calls


def recipe(name):
    return yaml.safe_load((ROOT / "sft" / "recipes" / f"{name}.yaml").read_text())


def without_data(changed, **sizes):
    """Return two layers of a model like `changed`, in place, of other sizes and without data."""
    config = changed.config
    for name, value in sizes.items():
        setattr(config, name, value)
    counts = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    config.interleaved_layers = dict.fromkeys(config.interleaved_layers, counts)
    with torch.device("meta"):
        return type(changed)(config).to(torch.bfloat16).train()


def packed_row(length, documents=8):
    """Return one row of documents as TRL's collator gives it."""
    bounds = torch.empty(documents + 1, dtype=torch.int32, device="meta")
    longest = length // 2
    row = torch.empty(1, length, dtype=torch.long, device="meta")
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return {"input_ids": row, "position_ids": row, **lengths}


def padded_rows(length):
    row = torch.empty(1, length, dtype=torch.long, device="meta")
    return {"input_ids": row, "attention_mask": row}


def largest_of_a_step(model, inputs):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with Largest() as largest:
        model.model(**inputs, use_cache=False).last_hidden_state.sum().backward()
    return largest.entries


@pytest.mark.one_of(2)
@pytest.mark.parametrize("window", [None, "paper"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_fine_tuning_step_of_a_decoder_in_place(name, window, kernels):
    given = recipe(name)
    length = given["max_length"]
    small = decoder("qwen2", num_hidden_layers=2, max_position_embeddings=length)
    model = without_data(interleave_heads(small, given["num_pseudo_heads"], sliding_window=window), **QWEN)
    inputs = packed_row(length) if given.get("packing") else padded_rows(length)
    # A row with padding has 8 features more.
    virtual = length * given["num_pseudo_heads"] * (QWEN["hidden_size"] + 8 * QWEN["num_attention_heads"])
    assert largest_of_a_step(model, inputs) <= max(length * QWEN["intermediate_size"], virtual)
    assert kernels
    paired = without_data(pair_heads(decoder("qwen2", num_hidden_layers=2), 2), **QWEN)
    assert largest_of_a_step(paired, packed_row(length)) <= length * QWEN["intermediate_size"]


@pytest.fixture
def eight_processes():
    """Stand in for eight processes, of which this is one in the middle."""
    dist.init_process_group("fake", rank=4, world_size=8, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("window", [None, "paper"])
def test_a_shared_row_of_a_million_tokens(window, kernels, eight_processes):
    length = 2**20
    small = decoder("qwen2", num_hidden_layers=2, max_position_embeddings=length)
    model = without_data(interleave_heads(small, 2, sliding_window=window), **{**QWEN, "num_attention_heads": 32})
    own, whole = packed_row(length // 8), packed_row(length)
    inputs = {**whole, **{name: own[name] for name in ("input_ids", "position_ids")}}
    with shared_rows("sdpa_in_blocks", eight_processes) as attention:
        assert largest_of_a_step(model, inputs) <= length // 8 * QWEN["intermediate_size"]
    assert attention.layers == {0, 1} and kernels


@pytest.mark.parametrize("preset", ["paper-2.4b-iha", "paper-2.4b-global", "paper-2.4b-global-local"])
@pytest.mark.parametrize("name", ["pretrain/sft", "paper_sft/sft"])
def test_a_step_of_the_paper_s_models(name, preset, kernels):
    length = recipe(name).get("max_length", 8192)
    config = IHAConfig.from_preset(preset, num_hidden_layers=5, vocab_size=64)
    with torch.device("meta"):
        model = IHAForCausalLM(config).to(torch.bfloat16).train()
    largest = largest_of_a_step(model, packed_row(length))
    virtual = length * config.num_pseudo_heads * config.hidden_size
    assert largest <= max(length * config.intermediate_size, virtual)
    assert kernels


@pytest.mark.one_of(8)
@pytest.mark.parametrize("stage", ["pretrain", "long", "chat"])
@pytest.mark.parametrize("form", speedrun.FORMS)
@pytest.mark.parametrize("size", ["100m", "2.4b"])
def test_a_step_of_the_speedrun(size, form, stage, kernels):
    run = speedrun.Run(speedrun.parse(["--size", size]))
    config = run.config_of(form, stage)
    config.vocab_size = 64
    given = run.size.stages[stage]
    with torch.device("meta"):
        model = IHAForCausalLM(config).to(torch.bfloat16).train()
    tokens = given.tokens * min(given.rows, given.rows_at_once)
    virtual = virtual_tokens_per_token(config) * config.hidden_size
    assert largest_of_a_step(model, packed_row(tokens)) <= tokens * max(config.intermediate_size, virtual)
    assert kernels
