"""Test that the constructions of Theorem 3 are exact, and that the command runs in small."""

import json

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


def test_polynomial_filters_in_small(tmp_path, monkeypatch):
    monkeypatch.setattr(polynomial_filters, "FILTERS", (4,))
    polynomial_filters.main(["--seeds", "0", "1", "--output", str(tmp_path / "runs"), "--results", str(tmp_path)])
    result = json.loads((tmp_path / "polynomial_filters.json").read_text())
    assert (tmp_path / "polynomial_filters.png").exists()
    assert result["seeds"] == [0, 1] and result["torch"] == torch.__version__
    assert len(result["exactness"]) == 3 and [row["heads"] for row in result["counts"]] == [4, 2]
