"""Compare HyperAttention and 2-simplicial attention with `references/hyper.py`, and hold what the papers claim.

What every kind must hold is in test_mechanisms.py.
"""

import pytest
import torch
from helpers import (
    FP64,
    assert_attention_matches,
    assert_close,
    assert_gradients_match,
    attention_of_first_layer,
    gradients,
    kind_config,
    largest_saved_tensor,
    packing,
    padding,
    random_ids,
    random_model,
    relative_error,
    uncached_logits,
)

from modeling_iha import tuple_attention
from modeling_iha.tuple_attention import PAIR_BLOCK


OPTIONS = ("order", "sharing", "strict_order", "linear", "windows")


def hyper_config(window=None, kind="hyper", **fields):
    """Return a config of one layer; `fields` that are options of the kind are told from the others by name."""
    options = {name: fields.pop(name) for name in OPTIONS if name in fields}
    return kind_config(kind, options, window, **fields)


# Every kind of pair, without and with separate windows.
PAIRS = {"no_sharing": {"sharing": False}, "strict": {"strict_order": True}, "simplicial": {"kind": "simplicial"}}
BIASES = {"attention_bias": True, "use_qk_norm": True, "num_key_value_heads": 1}
LINEAR = {
    "linear": {"linear": True},
    "linear_order_2": {"linear": True, "order": 2},
    "linear_order_4": {"linear": True, "order": 4, "sharing": False},
    "linear_biases": {"linear": True, "sharing": False, **BIASES},
}
CASES = {
    **PAIRS,
    **{f"{name}_windows": {**case, "window": 4, "windows": [2, 4]} for name, case in PAIRS.items()},
    "k_of_two": {"sharing": False, "window": 4, "windows": [4, 2]},
    "k_of_one": {"sharing": False, "window": 3, "windows": [3, 1]},
    "biases": {"sharing": False, "window": 4, **BIASES},
    "simplicial_biases": {"kind": "simplicial", "window": 4, **BIASES},
    **LINEAR,
}


@pytest.mark.parametrize("case", CASES)
def test_every_option_matches_reference(case):
    assert_attention_matches(hyper_config(**CASES[case]), FP64, dtype=torch.float64, length=7)


@pytest.mark.parametrize("case", [*PAIRS, "simplicial_windows", "linear"])
def test_blocks_of_one_query_match_reference(case, monkeypatch):
    """Take as few scores to a block as there can be."""
    monkeypatch.setattr(tuple_attention, "MAX_SCORES_ON_CPU", 1)
    assert_attention_matches(hyper_config(**CASES[case]), FP64, dtype=torch.float64, length=7)


@pytest.mark.parametrize("core", ["eager", "sdpa"])
@pytest.mark.parametrize("case", PAIRS)
def test_two_windows_with_padding_and_packing_match_reference(small_blocks, case, core):
    config = hyper_config(3, windows=[3, 2], **PAIRS[case])
    # On the left, none, and in the middle: there a window counts the hidden token too.
    real = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    for rows, inputs in ((3, padding(real)), (1, packing((3, 1, 3)))):
        assert_attention_matches(config, FP64, dtype=torch.float64, core=core, length=7, rows=rows, inputs=inputs)


# The linear form


def test_linear_layer_of_order_4_in_chunks(small_blocks):
    """Take documents only: the reference loops over all tuples of three tokens."""
    config = hyper_config(**LINEAR["linear_order_4"], rms_norm_eps=0.1)
    assert_attention_matches(config, FP64, dtype=torch.float64, inputs=packing((4, 1, 4), rows=2), seed=1)


@pytest.mark.parametrize("max_scores", [2**24, 1])
@pytest.mark.parametrize("case", ["linear", "linear_order_4"])
def test_linear_form_under_a_mask_equals_running_sums(small_blocks, case, max_scores, monkeypatch):
    """Compare outputs and gradients with and without a mask that says no more than causal."""
    monkeypatch.setattr(tuple_attention, "MAX_SCORES_ON_CPU", max_scores)
    model = random_model(hyper_config(**LINEAR[case]))
    input_ids, mask = random_ids(2, 7), torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    outputs = [model(input_ids, use_cache=False, **inputs).logits for inputs in ({}, {"attention_mask": mask})]
    assert relative_error(outputs[1], outputs[0].double()) < 1e-5
    leaves = dict(model.named_parameters())
    expected, actual = (gradients(output, leaves) for output in outputs)
    assert_gradients_match(actual, {name: gradient.double() for name, gradient in expected.items()}, 1e-5)


def test_autocast_does_not_round_the_sums_under_a_mask():
    model = random_model(hyper_config(**LINEAR["linear_order_4"]))
    input_ids, mask = random_ids(2, 7), torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [model(input_ids, use_cache=False, **inputs).logits for inputs in ({}, {"attention_mask": mask})]
    assert relative_error(outputs[1], outputs[0].double()) < 1e-5


# Cost


def scores_of(model, length):
    sizes, softmax = [], torch.softmax

    def recording(scores, dim):
        sizes.append(scores.numel())
        return softmax(scores, dim=dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "softmax", recording)
        uncached_logits(model, random_ids(1, length))
    return sizes


@pytest.mark.parametrize("kind", ["hyper", "simplicial"])
def test_windows_bound_the_scores(kind):
    """Expect scores of O(N w1 w2), not O(N^3): a block reaches w - 1 keys further back than it is long."""
    model = random_model(hyper_config(8, kind=kind, windows=[2, 8]))
    shorter, longer = (scores_of(model, blocks * PAIR_BLOCK) for blocks in (5, 10))
    block = 4 * PAIR_BLOCK * (PAIR_BLOCK + 1) * (PAIR_BLOCK + 7)  # heads, queries, columns of j and of k
    assert max(shorter) == max(longer) == block
    assert sum(longer) - sum(shorter) == 5 * block


@pytest.mark.parametrize("kind", ["hyper", "simplicial"])
def test_a_dense_mask_makes_the_blocks_smaller(kind, monkeypatch):
    """Keep the limit of scores where a mask leaves all keys to a block, as on the eager core."""
    monkeypatch.setattr(tuple_attention, "MAX_SCORES_ON_CPU", limit := 4 * 80 * 80 * 3)
    model = random_model(hyper_config(8, kind=kind, windows=[2, 8]))
    model.set_attn_implementation("eager")
    assert 0 < max(scores_of(model, 80)) <= limit


def test_no_scores_are_kept_for_the_backward():
    """Keep the scores of a single block only; several blocks do not even keep those of one query, [1, 4, 1, N, N]."""
    model = random_model(hyper_config(num_hidden_layers=1))
    assert largest_saved_tensor(model, random_ids(1, PAIR_BLOCK)) >= 4 * PAIR_BLOCK**3
    assert largest_saved_tensor(model, random_ids(1, 2 * PAIR_BLOCK)) < 4 * (2 * PAIR_BLOCK) ** 2


# What the papers say of them


def test_a_first_token_without_pairs_gives_zero():
    """Pass on the layer's input there under strict order."""
    for strict in (True, False):
        model = random_model(hyper_config(strict_order=strict))
        _, output = attention_of_first_layer(model, input_ids=random_ids(2, 5))
        assert bool((output[:, 0] == 0).all()) == strict
        assert (output[:, 1:] != 0).any(dim=-1).all()


@pytest.mark.parametrize("case", PAIRS)
def test_weights_are_the_shares_of_the_first_key(case):
    model = random_model(hyper_config(3, **PAIRS[case]))
    model.set_attn_implementation("eager")
    (weights,) = model(random_ids(2, 7), output_attentions=True).attentions
    assert weights.shape == (2, 4, 7, 7)
    assert (weights.triu(1) == 0).all() and (weights.tril(-3) == 0).all()
    totals = torch.ones(2, 4, 7)
    if case == "strict":
        totals[..., 0] = 0
    assert_close(weights.sum(-1), totals, 1e-6)
