"""Test that the constructions of the third paper are exact, and that the command runs in small."""

import pytest
import torch

from research.experiments import interactions


def test_constructions_are_exact():
    errors = interactions.constructed(seed=0)
    assert len(errors) == 4 and max(errors.values()) < 1e-12


@pytest.mark.parametrize("name", ["one-hot", "sinusoidal"])
def test_embeddings_are_orthonormal(name):
    vectors = interactions.embedding(name)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(interactions.CELLS).double())


def test_counts_of_random_rows_have_full_rank_where_there_are_enough():
    """Take twelve cells: eleven rows are too few, and two agents touch too few cells in twelve rows."""
    assert interactions.full_rank(11, agents=20) == 0
    assert interactions.full_rank(12, agents=20) > 0.99
    few, more = interactions.full_rank(12, agents=2), interactions.full_rank(24, agents=2)
    assert 0 < few < 0.1 and 0.7 < more < 0.9


def test_interactions_are_learned_in_small(run_study, monkeypatch):
    """Take a ring of 4 cells, whose interactions a few steps find, for other numbers of agents too."""
    sizes = {"CELLS": 4, "REACH": 0, "LABELS": 2, "AGENTS": 4, "OTHER_NUMBERS": (2, 6), "STEPS": 400}
    result, made = run_study(interactions, ["--seeds", "0"], sizes, {"STEPS": 2})
    assert made == [5, 0]
    assert list(result["learned"]) == list(interactions.TASKS)
    for name, errors in result["learned"].items():
        known = {"training", "new rows", "2 agents", "6 agents"}
        assert set(errors) == known | ({"interaction"} if name.startswith("self-attention") else set())
        if name != "two layers of self-attention":
            assert max(error["mean"] for error in errors.values()) < 1e-2, name
