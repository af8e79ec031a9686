"""Test that the constructions of Theorem 3 are exact, and that the command runs in small."""

import numpy as np
import pytest
import torch

from iha_io.command_io import UserError
from research.experiments import polynomial_filters
from research.experiments.study import run_once, train


@pytest.fixture(autouse=True)
def draws():
    """Draw the same for a test whatever ran before it."""
    torch.manual_seed(0)


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


def test_polynomial_filters_in_small(run_study):
    sizes = {"FILTERS": (4,), "STEPS": 2}
    result, made = run_study(polynomial_filters, ["--seeds", "0", "1"], sizes, {"STEPS": 3})
    assert made == [len(result["learned"]), 0]
    assert result["seeds"] == [0, 1] and result["torch"] == torch.__version__
    for row in result["learned"]:
        assert len(row["error"]["values"]) == 2 and 0 <= row["error"]["min"] <= row["error"]["max"]
