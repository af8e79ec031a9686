"""Reject what no IHA checkpoint of "diff" layers or no DiffLlama computes; test_conversion.py converts the rest."""

import pytest
from helpers import random_model, small_config
from tiny_sources import tiny_source

from iha.conversion.convert_diffllama_to_iha import iha_config
from iha.conversion.convert_iha_to_llama import convert_back
from iha.errors import UserError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "is a 'llama'; expected 'diffllama'"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 with attention kind 'diff'"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is odd"),
        ({"lambda_std_dev": None}, "'lambda_std_dev' with value None"),
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
        ({"mlp_gate_groups": 2}, "mlp_gate_groups=2"),
        ({"exclusive_attention": True}, "exclusive_attention=True"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]; a DiffLlama has no_rope_layers=\[1, 1\] only"),
    ],
    ids=str,
)
def test_what_no_diffllama_computes_does_not_go_back(overrides, message):
    with pytest.raises(UserError, match=message):
        convert_back(random_model(small_config(**{"attention_kinds": "diff", **overrides})))
