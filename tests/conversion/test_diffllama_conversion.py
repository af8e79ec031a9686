"""Convert DiffLlama checkpoints to IHA checkpoints of "diff" layers, and back: both compute the same."""

import pytest
import torch
from helpers import random_model, small_config
from tiny_sources import OTHER_SOURCES, assert_equal_logits, continuation, logits, tiny_source
from transformers import DiffLlamaForCausalLM

from conversion_scripts.convert_diffllama_to_iha import convert_model, iha_config
from conversion_scripts.convert_iha_to_llama import convert_back
from iha_io.command_io import UserError
from modeling_iha import IHAForCausalLM, cpu_precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OTHER_SOURCES)
def test_there_and_back(name, dtype, monkeypatch):
    monkeypatch.setattr(cpu_precision, "SLOW_DTYPES", [])  # as on a CPU with products of the dtype
    source = tiny_source(name, dtype)
    expected, tokens = logits(source), continuation(source)
    model = convert_model(source)
    assert type(model) is IHAForCausalLM and not model.training and model.dtype == dtype
    assert model.config.attention_kinds == ["diff"] * 6
    assert_equal_logits(logits(model), expected)
    assert continuation(model) == tokens

    restored = convert_back(model)
    assert type(restored) is DiffLlamaForCausalLM and not restored.training
    weights, of_source = restored.state_dict(), source.state_dict()
    assert weights.keys() == of_source.keys() and all(torch.equal(weights[key], of_source[key]) for key in weights)
    assert torch.equal(logits(restored), expected)
    assert restored.generation_config.to_dict() == source.generation_config.to_dict()
    ours, theirs = restored.config.to_dict(), source.config.to_dict()
    for field in theirs.keys() - {"architectures"}:
        assert ours[field] == theirs[field], field


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "is a 'llama'; expected 'diffllama'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 with attention kind 'diff'"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is odd"),
        ({"lambda_std_dev": None}, "lambda_std_dev=None; it must be a number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_ro"),
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_refused_by_name(change, message):
    config = tiny_source("llama" if not change else "diffllama").config
    for field, value in change.items():
        setattr(config, field, value)
    with pytest.raises(UserError, match=message):
        iha_config(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_kinds": ["diff", "mha"]}, "Layer 1 is of kind 'mha', full_attention"),
        ({"layer_types": "sliding_attention", "sliding_window": 3}, "Layer 0 is of kind 'diff', sliding_attention"),
        ({"gated_mlp": False}, "gated_mlp=False"),
    ],
    ids=str,
)
def test_what_no_diffllama_computes_does_not_go_back(overrides, message):
    with pytest.raises(UserError, match=message):
        convert_back(random_model(small_config(**{"attention_kinds": "diff", **overrides})))
