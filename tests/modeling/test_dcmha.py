"""Compare the options of kind "dcmha" with the loops of `references/dcmha.py`, and hold what the paper says of it.

The FFN and the presets of the DCFormers are here, too.
"""

import math
from functools import partial

import pytest
import torch
from helpers import (
    FP64,
    assert_attention_matches,
    assert_gradients_match,
    attention_of_first_layer,
    gradients,
    kind_config,
    largest_saved_tensor,
    logits_in_chunks,
    random_ids,
    random_model,
    reference_weights,
    relative_error,
    small_config,
    uncached_logits,
)
from references.dcmha import group_gated_mlp
from transformers import AutoConfig

from modeling_iha import IHAForCausalLM
from modeling_iha.attention_dcmha import CompositionWeights
from modeling_iha.score_matrix import BLOCK, HeadMap


# The rows of DCMHA's Table 9, ranks, and groups of heads (Section 3.2).
OPTIONS = {
    "paper": {},
    "static_projection": {"rank": 0, "gate": False, "base_map": True},
    "projection": {"gate": False},
    "gate": {"rank": 0},
    "all": {"base_map": True},
    "query_wise": {"sides": "query"},
    "key_wise": {"sides": "key"},
    "pre": {"stages": "pre"},
    "post": {"stages": "post", "base_map": True},
    "rank_1": {"rank": 1},
    "rank_3": {"rank": 3},
    "groups": {"num_groups": 2, "rank": 1},
    "groups_all": {"num_groups": 2, "base_map": True},
    "groups_gate": {"num_groups": 2, "rank": 0, "base_map": True},
}


dcmha_config = partial(kind_config, "dcmha")


# The layer and its cache


@pytest.mark.parametrize(
    ("options", "modules"),
    [
        ({}, {"pre_query", "pre_key", "post_query", "post_key"}),
        ({"stages": "post", "sides": "key", "base_map": True}, {"post_base", "post_key"}),
        ({"stages": "pre", "rank": 0, "gate": False, "base_map": True}, {"pre_base"}),
    ],
)
def test_a_layer_has_the_modules_of_its_options_only(options, modules):
    """Count the modules here, because the reference composes with those that it finds."""
    layer = random_model(dcmha_config(options)).model.layers[0].self_attn
    assert {name for name, _ in layer.named_children() if name.startswith(("pre_", "post_"))} == modules
    if not options:  # what the paper takes
        assert layer.pre_query.rank == 2 and layer.pre_query.gate is not None


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_matches_reference(options):
    """Compare with a window, QK norm and one group of keys; the cache holds the key-wise weights, too."""
    config = dcmha_config(OPTIONS[options], 3, num_key_value_heads=1, use_qk_norm=True)
    assert_attention_matches(config, FP64, dtype=torch.float64)
    model, input_ids = random_model(config, dtype=torch.float64), random_ids(2, 11)
    cached = logits_in_chunks(model, input_ids, [5, 1, 1, 3, 1])
    assert relative_error(cached, uncached_logits(model, input_ids)) < FP64


@pytest.mark.parametrize("stage", ["pre", "post"])
def test_static_composition_equals_composed_projections(stage):
    """Build heads of H times the width by concatenation, as Theorems 2.1 (scores) and 2.2 (weights) of DCMHA do.

    In equation (2), of Theorem 2.2, the map has to be transposed: by its own proof A'_j is the sum of C_ij A_i, and
    the composition of Section 2 is the sum of C_ji A_i.
    """
    options = {"stages": stage, "rank": 0, "gate": False, "base_map": True}
    model = random_model(dcmha_config(options, num_key_value_heads=4, no_rope_layers=[0]), dtype=torch.float64)
    layer = model.model.layers[0].self_attn
    states, output = attention_of_first_layer(model, input_ids=random_ids(1, 7), use_cache=False)
    heads = range(4)
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    query, key, value = (projection(states)[0].unflatten(-1, (4, -1)).unbind(1) for projection in projections)
    rows_of_output = layer.o_proj.weight.T
    composition = layer.get_submodule(f"{stage}_base").value()[0].T  # C: A'_h is the sum of C[h, j] A_j
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = torch.zeros_like(output[0])
    for h in heads:
        if stage == "pre":
            queries = torch.cat([composition[h, j] * query[j] for j in heads], dim=-1)
            keys = torch.cat(key, dim=-1)
            values, to_output = value[h], rows_of_output.chunk(4)[h]
        else:
            queries, keys = query[h], key[h]
            values = torch.cat([composition[j, h] * value[j] for j in heads], dim=-1)
            to_output = rows_of_output
        scores = queries @ keys.T * layer.head_dim**-0.5
        expected += scores.masked_fill(future, -math.inf).softmax(dim=-1) @ values @ to_output
    assert relative_error(output[0], expected) < FP64


# Training


@pytest.mark.parametrize("window", [None, 24])
def test_training_keeps_no_score_matrix(window):
    config = dcmha_config(window=window, vocab_size=7, hidden_size=16, num_key_value_heads=4)
    model = random_model(config).train()
    one_block, two_blocks = random_ids(1, BLOCK, vocab_size=7), random_ids(1, 2 * BLOCK, vocab_size=7)
    assert largest_saved_tensor(model, one_block) >= 4 * BLOCK**2  # all of it is kept
    assert largest_saved_tensor(model, two_blocks) < 4 * BLOCK**2  # not one block is


def test_initialisation():
    """Draw with the standard deviations of DCMHA, Section 4, for a composition that starts near the identity."""
    torch.manual_seed(0)
    config = dcmha_config({"base_map": True}, hidden_size=256, num_attention_heads=32)
    model = IHAForCausalLM(config)
    weights = model.model.layers[0].self_attn.post_key
    for parameter, std in (
        (weights.w1.weight, math.sqrt(2 / (256 + 128))),  # Xavier; I = 2 H R = 128
        (weights.w2, 0.02 / (math.sqrt(128) * (32 + 2))),
        (weights.gate.weight, 0.05 * math.sqrt(2 / (256 + 32))),
    ):
        # The standard deviation of n normal numbers is known to 1 / sqrt(2 n).
        assert abs(parameter.std().item() / std - 1) < 4 / math.sqrt(2 * parameter.numel())
    assert torch.equal(model.model.layers[0].self_attn.pre_base.weight, torch.eye(32)[None])


@pytest.mark.parametrize("options", ["paper", "all", "groups"])
def test_exact_start_from_llama(options):
    """Zero w_2 and the gates with `init_identity`: the logits are multi-head attention's, and every zero can move."""
    model = random_model(dcmha_config(OPTIONS[options], 3, num_hidden_layers=2))
    mha = random_model(small_config(attention_kinds="mha", layer_types="sliding_attention", sliding_window=3), seed=1)
    mha.load_state_dict({name: p for name, p in model.state_dict().items() if name in mha.state_dict()})
    input_ids = random_ids(2, 9)
    expected = mha(input_ids).logits
    assert relative_error(model(input_ids).logits, expected.double()) > 1e-2
    for module in model.modules():
        if isinstance(module, CompositionWeights):
            module.init_identity()
        elif isinstance(module, HeadMap):
            module.init_mechanism(model.config)
    assert relative_error(model(input_ids).logits, expected.double()) < 1e-5
    model(input_ids, labels=input_ids).loss.backward()
    attention = model.model.layers[0].self_attn
    for module in (attention.pre_query, attention.pre_key, attention.post_query, attention.post_key):
        assert module.w2.grad.chunk(2, dim=1)[1].abs().max() > 0
        assert module.gate.weight.grad.abs().max() > 0


# The FFN of the released models


@pytest.mark.parametrize("num_groups", [1, 4, 24])
def test_group_gated_mlp_matches_reference(num_groups):
    model = random_model(small_config(mlp_gate_groups=num_groups), dtype=torch.float64)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = reference_weights(mlp)
    output, expected = mlp(x), group_gated_mlp(x, weights)
    assert relative_error(output, expected) < FP64
    actual = gradients(output, {"input": x, **dict(mlp.named_parameters())})
    assert_gradients_match(actual, gradients(expected, {"input": x, **weights}), FP64)


def test_no_process_of_tensor_parallelism_gets_a_part_of_the_groups(tmp_path):
    """Leave the FFN whole: its gate scales whole groups of channels. The plan of others, and config.json, stay."""
    config = small_config(mlp_gate_groups=4)
    config.save_pretrained(tmp_path)
    for each in (config, AutoConfig.from_pretrained(tmp_path)):
        assert not each.base_model_tp_plan
    assert small_config().base_model_tp_plan and "tp_plan" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("groups", [5, 0])
def test_groups_that_do_not_divide_the_ffn_raise_an_error(groups):
    with pytest.raises(RuntimeError):
        IHAForCausalLM(small_config(mlp_gate_groups=groups))(random_ids(1, 3))
