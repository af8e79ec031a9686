"""Test that every construction of the papers' theorems is exact, and that each command runs in small."""

from itertools import product

import numpy as np
import pytest
import torch

from common.command_io import UserError
from research.experiments import colliding_agents, cpm3, hyper_attention, polynomial_filters, theorem2_inclusion
from research.experiments.colliding_agents import EMBEDDINGS, LinearSelfAttention, constructed, examples, interactions
from research.experiments.study import run_once, train


@pytest.fixture(autouse=True)
def draws():
    """Draw the same for a test whatever ran before it."""
    torch.manual_seed(0)


# Theorem 2


@pytest.mark.parametrize("num_pseudo_heads", [2, 3, 8])
@pytest.mark.parametrize("setting", ["no mask", "causal", "causal, RoPE at n"])
def test_mha_is_the_iha_that_selects_the_last_pseudo_head(setting, num_pseudo_heads):
    assert theorem2_inclusion.inclusion_error(setting, num_pseudo_heads, num_pseudo_heads - 1, seed=0) < 1e-6


def test_the_proof_does_not_hold_under_the_causal_mask_or_interleaved_positions():
    error = theorem2_inclusion.inclusion_error
    assert error("no mask", 3, 0, seed=0) < 1e-6  # the proof's own setting
    assert error("causal", 3, 0, seed=0) > 0.1
    assert error("causal, RoPE at n P + p", 3, 2, seed=0) > 0.1


@torch.no_grad()
def test_only_opposite_values_make_iha_nonlinear_on_repeated_tokens():
    layers = theorem2_inclusion.strict_layers(0)
    nonlinear = {name: theorem2_inclusion.nonlinearity(layer, 0) for name, layer in layers.items()}
    assert nonlinear["MHA"] < 1e-6 and nonlinear["IHA, Appendix B.1"] < 1e-6 and nonlinear["IHA, Section 4.1"] > 0.1

    module = layers["IHA, Section 4.1"].layer
    x = torch.randn(3, theorem2_inclusion.WIDTH, dtype=torch.float64)
    heads = (len(x), theorem2_inclusion.HEADS, theorem2_inclusion.HEAD_DIM)
    query, key, value = (getattr(module, name)(x).view(heads) for name in ("q_proj", "k_proj", "v_proj"))
    expected = value * torch.tanh((query * key).sum(-1, keepdim=True) / theorem2_inclusion.HEAD_DIM**0.5)
    output = theorem2_inclusion.repeated(layers["IHA, Section 4.1"], x)
    assert torch.allclose(output, expected.flatten(1), atol=1e-12)


# Theorem 3


GRAPHS = {name: polynomial_filters.adjacency(graph) for name, graph in polynomial_filters.GRAPHS.items()}
GRAPHS["directed"] = np.random.default_rng(0).integers(0, 2, (7, 7))


@pytest.mark.parametrize("k", [3, 4, 5, 9, 16, 25])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("kind", ["mha", "iha"])
def test_filter_banks_are_exact(kind, graph, k):
    assert polynomial_filters.construction_error(kind, GRAPHS[graph], k, seed=0) < 1e-14


@pytest.mark.parametrize("kind", ["mha", "iha"])
def test_parameters_are_those_of_the_theorem(kind):
    for k in (4, 5, 9):
        assert polynomial_filters.used_parameters(kind, 12, 3, k) == polynomial_filters.theorem_parameters(
            kind, 12, 3, k
        )


# Theorem 4


@pytest.mark.parametrize("length", [4, 7, 9, 16])
@pytest.mark.parametrize("construction", cpm3.CONSTRUCTIONS)
def test_counts_equal_the_brute_force(construction, length):
    assert cpm3.construction_error(construction, length, seed=0) < 1e-9


def test_the_papers_examples():
    collected = cpm3.collect(cpm3.collector("iha", 4), [1, 2, 3, 4], 4)
    assert collected.tolist() == [[1, 2, 3, 4], [2, 3, 4, 1], [3, 4, 1, 2], [4, 1, 2, 3]]
    example = cpm3.paper_example()
    assert [modulus for modulus, counts in example["counts_by_modulus"].items() if counts == [3, 3, 3]] == [3]
    assert not example["order_matters_by_modulus"][3]


def test_the_construction_is_for_full_sequences_only():
    assert cpm3.shorter_error(9, seed=0) >= 1


def test_learned_targets_are_the_counts():
    tokens = torch.randint(cpm3.MODULUS, (4, cpm3.TOKENS), generator=torch.Generator().manual_seed(0))
    counts = cpm3.cpm3(torch.eye(cpm3.MODULUS)[tokens])
    assert counts.tolist() == [cpm3.brute_force(x, cpm3.FACTOR, cpm3.MODULUS) for x in tokens.tolist()]


# Hyper attention


@pytest.mark.parametrize("values", [2, 4])
def test_coupled_features_are_exact(values):
    assert max(hyper_attention.feature_row(values)["error"].values()) < 1e-12


def test_values_of_agents_by_loops():
    x, worth = hyper_attention.draw_features(3)
    functions, agents = hyper_attention.feature_functions(hyper_attention.VALUES), x.unflatten(-1, (3, -1)).argmax(-1)
    for i in range(3):
        pairs = [np.prod([functions[a, agents[i, a], agents[j, a]].item() for a in range(3)]) for j in range(3)]
        assert worth[i].item() == pytest.approx(sum(pairs))


def test_synergies_are_exact_for_any_number_of_agents():
    assert max(hyper_attention.synergy_errors().values()) < 1e-12
    x, gain = hyper_attention.draw_synergy(5)
    states, table = x.argmax(-1).tolist(), hyper_attention.synergy()
    assert gain[:, 0].tolist() == [sum(table[i, j, k].item() for j, k in product(states, states)) for i in states]


def test_what_linear_self_attention_leaves_of_coupled_features_is_what_a_regression_finds(monkeypatch):
    """Fit all functions that are linear in the features of one agent, and quadratic in those of another."""
    monkeypatch.setattr(hyper_attention, "VALUES", 2)
    x, target = hyper_attention.draw_features(20000, hyper_attention.AGENTS, values=2)
    pairs = torch.einsum("bnu,bnv->buv", x, x).flatten(1)
    regression = torch.einsum("bu,bv->buv", x[:, 0], pairs).flatten(1)
    found = hyper_attention.unexplained(regression, target[:, 0, 0])
    assert hyper_attention.features_unexplained() == pytest.approx(found, rel=0.03)


def test_skip_trigrams_form_a_latin_square():
    sentences, completions = hyper_attention.draw_trigrams(200, sources=3)
    fillers, words = hyper_attention.FILLERS, sentences.argmax(-1)
    is_source = (words >= fillers) & (words < fillers + 3)
    assert (is_source.sum(-1) == 1).all() and not is_source[:, -1].any()
    assert torch.equal((words[is_source] - fillers + words[:, -1] - fillers - 3) % 3, completions)


def test_unexplained_is_none_of_a_linear_target_and_all_of_noise():
    features = torch.randn(400, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert hyper_attention.unexplained(features, features.sum(dim=1)) < 1e-20
    assert hyper_attention.unexplained(features, noise) == pytest.approx(1, abs=0.2)


# Colliding agents


def test_linear_self_attention_is_the_definition():
    """Compute (X C X^T) X W_V by loops: what j is worth to i, times the value of j."""
    generator = torch.Generator().manual_seed(0)
    x, c, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (3, 3), (3, 2)))
    expected = torch.stack([sum((x[i] @ c @ x[j]) * (x[j] @ w) for j in range(5)) for i in range(5)])
    assert torch.allclose(LinearSelfAttention(c, w)(x[None])[0], expected, atol=1e-12)


@pytest.mark.parametrize("cells", [7, 10])
@pytest.mark.parametrize("name", EMBEDDINGS)
@torch.no_grad()
def test_agents_rewards_are_exact_for_any_number_of_them(name, cells):
    embedding = EMBEDDINGS[name](cells)
    assert torch.allclose(embedding @ embedding.T, torch.eye(cells, dtype=torch.float64), atol=1e-12)
    layer = constructed(embedding, radius=1)
    assert torch.allclose(layer.function(embedding), interactions(cells, 1), atol=1e-12)
    for agents in (1, 2, 9):
        positions, rewards = examples(4, agents, interactions(cells, 1), torch.Generator().manual_seed(0))
        counted = torch.tensor(
            [
                [-sum(min((a - b) % cells, (b - a) % cells) <= 2 for b in row) for a in row]
                for row in positions.tolist()
            ]
        )
        assert torch.equal(rewards[..., 0], counted.double())
        assert torch.allclose(layer(embedding[positions]), rewards, atol=1e-10)


def test_colliding_agents_in_small(run_study):
    """Expect the constructed function in other parameters."""
    setting = {**colliding_agents.SETTING, "cells": 7, "agents": 6, "examples": 300, "steps": 600}
    small, changed = {"SETTING": setting}, {"SETTING": {**setting, "steps": 700}}
    table, made = run_study(colliding_agents, ["--seeds", "0"], small, changed)
    assert [row["embedding"] for row in table["rows"]] == list(EMBEDDINGS) and made == [2, 0]
    for row in table["rows"]:
        assert row["training_error"] < 1e-6 and row["constructed_training_error"] < 1e-20
        assert max(row["test_error_by_agents"].values()) < 1e-4
        apart = row["mean_squared_difference_from_constructed"]
        assert apart["T"] < 1e-6 < 1e-3 < min(apart["C"], apart["w"])


# What the studies share


def test_models_trained_at_once_are_those_trained_alone():
    def model(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    inputs = 30 * torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(2))
    targets = 30 * inputs.square().sum(dim=-1, keepdim=True)  # so far away that gradients are clipped
    loss = torch.nn.functional.mse_loss
    both = train([model(0), model(1)], lambda: (inputs, targets), loss, steps=5, rate=0.1)(inputs)
    for index in range(2):
        one = slice(index, index + 1)
        alone = train([model(index)], lambda one=one: (inputs[one], targets[one]), loss, steps=5, rate=0.1)
        assert torch.allclose(alone(inputs[one]), both[one], atol=1e-4)

    by_hand, rows = model(0), inputs[0]
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for _ in range(5):
        optimizer.zero_grad()
        loss(by_hand(rows), targets[0]).backward()
        assert torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0) > 1
        optimizer.step()
        schedule.step()
    assert torch.allclose(by_hand(rows), both[0], atol=1e-4)


def test_a_run_that_is_damaged_is_refused(tmp_path):
    for content, expected in (("", "Remove the file: its run is then made again."), ("{}", "another setting")):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(UserError, match=expected):
            run_once(tmp_path / "run.json", dict)


@pytest.mark.parametrize("study", [cpm3, hyper_attention, polynomial_filters])
def test_commands_in_small(study, run_study):
    sizes = {"LENGTHS": (4,), "FILTERS": (4,), "SEQUENCES": 2, "REGRESSION_ROWS": 600, "VALUES": 2, "STEPS": 2}
    sizes = {name: value for name, value in sizes.items() if hasattr(study, name)}
    result, made = run_study(study, ["--seeds", "0", "1"], sizes, {"STEPS": 3})
    assert made == [len(result["learned"]), 0]
    assert result["seeds"] == [0, 1] and result["torch"] == torch.__version__
    for row in result["learned"]:
        measured = row.get("error", row.get("right"))
        assert len(measured["values"]) == 2 and 0 <= measured["min"] <= measured["max"]
