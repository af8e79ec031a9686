"""Compare the options of HyperFeatureAttention with `references/hyper_feature.py`, and hold what the paper claims."""

import pytest
import torch
from helpers import (
    BF16_GRADIENT,
    BF16_OUTPUT,
    FP64,
    assert_attention_matches,
    assert_close,
    kind_config,
    packing,
    padding,
    random_ids,
    random_model,
    set_core,
    small_config,
    uncached_logits,
)


def hyper_feature_config(window=None, **fields):
    """Return a config of one layer; `fields` that are options of the kind are told from the others by name."""
    options = {name: fields.pop(name) for name in ("orders", "value_product", "linear") if name in fields}
    return kind_config("hyper_feature", options, window, **fields)


CASES = {
    "order_1": {"orders": 1},
    "order_2": {"orders": 2},
    "order_4": {"orders": 4},
    "mixed": {"orders": [1, 1, 4, 4]},
    "mixed_no_gqa": {"orders": [2, 1, 1, 4], "num_key_value_heads": 4},
    "one_group": {"orders": 2, "num_key_value_heads": 1},
    "value_product": {"orders": 2, "value_product": True},
    "mixed_value_product": {"orders": [4, 4, 1, 1], "value_product": True, "attention_bias": True},
    "linear": {"orders": 2, "linear": True},
    "linear_mixed_value_product": {"orders": [1, 1, 2, 2], "value_product": True, "linear": True},
    "qk_norm_biases": {"orders": 2, "use_qk_norm": True, "attention_bias": True},
    "three_features": {"orders": 3, "head_dim": 12},
}


@pytest.mark.parametrize("case", CASES)
def test_every_option_matches_reference(case):
    assert_attention_matches(hyper_feature_config(4, **CASES[case]), FP64, dtype=torch.float64)


@pytest.mark.parametrize("core", ["eager", "sdpa"])
@pytest.mark.parametrize("window", [None, 3])
def test_linear_blocks_match_reference(small_blocks, window, core):
    config = hyper_feature_config(window, **CASES["linear_mixed_value_product"])
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    for rows, inputs in ((2, ({}, {})), (2, padding(real)), (1, packing((3, 1, 3)))):
        assert_attention_matches(config, FP64, dtype=torch.float64, core=core, length=7, rows=rows, inputs=inputs)


def test_linear_form_in_bfloat16():
    config = hyper_feature_config(**CASES["linear_mixed_value_product"])
    assert_attention_matches(config, BF16_OUTPUT, BF16_GRADIENT, dtype=torch.bfloat16)


# What the paper says of it


@pytest.mark.parametrize("core", ["eager", "sdpa"])
def test_order_1_is_multi_head_attention(core):
    """Load multi-head attention's parameters, by the same names, and give its numbers."""
    model = random_model(hyper_feature_config(orders=1, value_product=True, num_hidden_layers=2))
    mha = random_model(small_config(attention_kinds="mha"))
    mha.load_state_dict(model.state_dict())
    for each in (model, mha):
        set_core(each, core)
    input_ids = random_ids(2, 9)
    actual, expected = uncached_logits(model, input_ids), uncached_logits(mha, input_ids)
    assert_close(actual, expected, 1e-6)
    assert core != "eager" or torch.equal(actual, expected)
