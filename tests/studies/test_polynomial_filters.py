"""Test that the constructions of Theorem 3 are exact, and that the command runs in small."""

import numpy as np
import pytest
import torch

from research.experiments import polynomial_filters


@pytest.fixture(autouse=True)
def draws():
    """Draw the same for a test whatever ran before it."""
    torch.manual_seed(0)


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


def test_polynomial_filters_in_small(run_study):
    sizes = {"FILTERS": (4,), "STEPS": 2}
    result, made = run_study(polynomial_filters, ["--seeds", "0", "1"], sizes, {"STEPS": 3})
    assert made == [len(result["learned"]), 0]
    assert result["seeds"] == [0, 1] and result["torch"] == torch.__version__
    for row in result["learned"]:
        values = row["error"]["values"]
        assert len(set(values)) == 2 and row["error"]["min"] == min(values) and row["error"]["max"] == max(values)
