"""Test that every construction of the papers' theorems is exact, and that each command runs in small."""

import json

import numpy as np
import pytest
import torch

from iha_io.command_io import UserError
from research.experiments import cpm3, polynomial_filters, theorem2_inclusion
from research.experiments.study import run_once


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


def test_the_first_construction_interleaves():
    assert cpm3.CONSTRUCTIONS["IHA, ceil(sqrt(N)) heads"].args == ("iha",)


def test_the_papers_examples():
    collected = cpm3.collect(cpm3.collector("iha", 4), [1, 2, 3, 4], 4)
    assert collected.tolist() == [[1, 2, 3, 4], [2, 3, 4, 1], [3, 4, 1, 2], [4, 1, 2, 3]]
    example = cpm3.paper_example()
    assert [modulus for modulus, counts in example["counts_by_modulus"].items() if counts == [3, 3, 3]] == [3]
    assert not example["order_matters_by_modulus"][3]


def test_the_construction_is_for_full_sequences_only():
    assert cpm3.shorter_error(9, seed=0) >= 1


# What the studies share


def test_a_run_that_is_damaged_is_refused(tmp_path):
    for content, expected in (("", "Remove the file: its run is then made again."), ("{}", "another setting")):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(UserError, match=expected):
            run_once(tmp_path / "run.json", dict)


def test_polynomial_filters_in_small(run_study):
    sizes = {"FILTERS": (4,), "STEPS": 2}
    result, made = run_study(polynomial_filters, ["--seeds", "0", "1"], sizes, {"STEPS": 3})
    assert made == [len(result["learned"]), 0]
    assert result["seeds"] == [0, 1] and result["torch"] == torch.__version__
    for row in result["learned"]:
        assert len(row["error"]["values"]) == 2 and 0 <= row["error"]["min"] <= row["error"]["max"]


@pytest.mark.parametrize("study", [cpm3, theorem2_inclusion])
def test_constructions_in_small(study, tmp_path, monkeypatch):
    for name, value in {"LENGTHS": (4,), "SEQUENCES": 2, "PSEUDO_HEADS": (2,)}.items():
        monkeypatch.setattr(study, name, value, raising=False)
    study.main(["--seeds", "0", "1", "--results", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["seeds"] == [0, 1] and path.with_suffix(".png").exists()
