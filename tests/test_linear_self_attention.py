"""Linear self-attention with an explicit C, and the study of colliding agents in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import command

from experiments import colliding_agents
from experiments.colliding_agents import EMBEDDINGS, constructed, examples, interactions
from experiments.linear_self_attention import LinearSelfAttention


EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def test_layer_is_the_definition():
    """(X C X^T) X W_V by loops: what j is worth to i, times the value of j."""
    generator = torch.Generator().manual_seed(0)
    x, c, w = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (3, 3), (3, 2)))
    expected = torch.stack([sum((x[i] @ c @ x[j]) * (x[j] @ w) for j in range(5)) for i in range(5)])
    assert torch.allclose(LinearSelfAttention(c, w)(x[None])[0], expected, atol=1e-12)


@pytest.mark.parametrize("cells", [7, 10])
@pytest.mark.parametrize("name", EMBEDDINGS)
@torch.no_grad()
def test_the_construction_is_exact_for_any_number_of_agents(name, cells):
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


def test_study(tmp_path, monkeypatch, capsys):
    """In small: what is learned is the constructed function, in other parameters."""
    sizes = {"cells": 7, "agents": 6, "examples": 300, "steps": 600, "seeds": 0}
    sizes |= {"output": tmp_path / "runs", "results": tmp_path}
    options = [text for name, value in sizes.items() for text in (f"--{name}", value)]
    code, _, errors = command(monkeypatch, capsys, colliding_agents, *options)
    assert code == 0, errors
    assert (tmp_path / "colliding_agents.png").stat().st_size > 0
    rows = json.loads((tmp_path / "colliding_agents.json").read_text())["rows"]
    assert [row["embedding"] for row in rows] == list(EMBEDDINGS)
    for row in rows:
        assert row["training_error"] < 1e-6 and row["constructed_training_error"] < 1e-20
        assert max(row["test_error_by_agents"].values()) < 1e-4
        apart = row["mean_squared_difference_from_constructed"]
        assert apart["T"] < 1e-6 < 1e-3 < min(apart["C"], apart["w"])


def test_a_ring_too_small_is_refused():
    command = [sys.executable, "-m", "experiments.colliding_agents", "--cells", "5"]
    refusal = subprocess.run(command, cwd=EXPERIMENTS.parent, capture_output=True, text=True)
    assert refusal.returncode == 1 and "--cells 5 --radius 1" in refusal.stderr.splitlines()[-1]
