"""Train one linear self-attention layer to tell who is in whose way, for any number of agents.

L agents of radius R stand on a ring of N cells. Agent i is penalised by 1 for each agent within ring distance 2 R,
itself included (Section 7.1 of "A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions").
Cells are embedded as one-hot vectors, or as sines and cosines, in N dimensions. C starts at 0 and w at ones / N;
full-batch gradient descent lowers the mean squared error. The paper does not give its N, L, number of examples and
step size: they are constants of this file.

The table shows what the theorems say. The training error goes to 0 (4.4), and so does the test error for as many
agents (4.6) and for other numbers of them (4.8). The learned layer equals the constructed one as a function, T[mu, nu]
(Corollary 4.9), while C and w differ. This takes about half a minute.

example: python -m research.experiments.colliding_agents --seeds 0 1 2
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial

from common.command_io import run_cli
from research.experiments.options import study_parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return study_parser(__doc__, "colliding_agents", seeds=3).parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure
from torch import nn

from common import plots
from common.command_io import sole_writer
from research.experiments.study import begin, run_once, write


# N of the ring, R of an agent, and L, the examples and the gradient descent of training
SETTING = {"cells": 20, "radius": 1, "agents": 12, "examples": 1000, "steps": 2000, "lr": 0.1}


class LinearSelfAttention(nn.Module):
    """Apply one layer to tuples of embeddings, without softmax, mask or positions.

    Attributes:
        interaction: C, [d, d], what an entity is worth to another; it is no product of queries and keys.
        value: W_V, [d, d_out].
    """

    def __init__(self, interaction: torch.Tensor, value: torch.Tensor):
        super().__init__()
        self.interaction = nn.Parameter(interaction.clone())
        self.value = nn.Parameter(value.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, entities, d_out] of embeddings [batch, entities, d]."""
        return x @ self.interaction @ x.transpose(-1, -2) @ (x @ self.value)

    def function(self, embedding: torch.Tensor) -> torch.Tensor:
        """Return T[mu, nu] = (x(mu)^T C x(nu)) (x(nu)^T w), [cells, cells], for d_out = 1.

        `embedding` [cells, d] is that of a domain. T is equal for any two layers that compute the same for tuples of
        every length (Corollary 4.9).
        """
        return (embedding @ self.interaction @ embedding.T) * (embedding @ self.value).T


def interactions(cells: int, radius: int) -> torch.Tensor:
    """Return -1 for two cells within ring distance 2 R, else 0: [cells, cells]."""
    apart = (torch.arange(cells)[:, None] - torch.arange(cells)).abs()
    return -(torch.minimum(apart, cells - apart) <= 2 * radius).double()


def sinusoidal(cells: int) -> torch.Tensor:
    """Return an orthonormal embedding [cells, cells]: a constant, and a cosine and a sine of each frequency."""
    angle = 2 * math.pi / cells * torch.arange(cells, dtype=torch.float64)[:, None]
    columns = [torch.full_like(angle, cells**-0.5)]
    for frequency in range(1, cells // 2 + 1):
        columns += [(2 / cells) ** 0.5 * (frequency * angle).cos(), (2 / cells) ** 0.5 * (frequency * angle).sin()]
    if cells % 2 == 0:
        # The cosine of the highest frequency alternates, and its sine is 0.
        columns[-2:] = [columns[-2] / 2**0.5]
    return torch.cat(columns, dim=1)


EMBEDDINGS = {"one-hot": partial(torch.eye, dtype=torch.float64), "sinusoidal": sinusoidal}


def constructed(embedding: torch.Tensor, radius: int) -> LinearSelfAttention:
    """Return the layer of the paper's construction for an orthonormal embedding.

    x^T w = 1 for every cell, and C = X^T (interactions) X. For the sinusoidal embedding C is diagonal up to the order
    of sines and cosines.
    """
    value = embedding.T @ torch.ones(len(embedding), 1, dtype=torch.float64)
    return LinearSelfAttention(embedding.T @ interactions(len(embedding), radius) @ embedding, value)


def examples(
    count: int, agents: int, table: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cells of the agents, [count, agents], and their rewards, [count, agents, 1]."""
    positions = torch.randint(len(table), (count, agents), generator=generator)
    return positions, table[positions[:, :, None], positions[:, None, :]].sum(dim=-1, keepdim=True)


@torch.no_grad()
def error(
    layer: LinearSelfAttention, embedding: torch.Tensor, positions: torch.Tensor, rewards: torch.Tensor
) -> float:
    return (layer(embedding[positions]) - rewards).square().mean().item()


def run(name: str, seed: int) -> dict:
    """Train a layer on one embedding and one draw of examples; return its row of the table and what is plotted."""
    cells, radius, agents, count, steps, rate = SETTING.values()
    generator = torch.Generator().manual_seed(seed)
    table, embedding = interactions(cells, radius), EMBEDDINGS[name](cells)
    positions, rewards = examples(count, agents, table, generator)
    layer = LinearSelfAttention(torch.zeros_like(embedding), torch.full_like(embedding[:, :1], 1 / cells))
    optimizer, inputs, curve = torch.optim.SGD(layer.parameters(), lr=rate), embedding[positions], []
    for step in range(steps + 1):
        loss = (layer(inputs) - rewards).square().mean()
        if step % (steps // 50) == 0:
            curve.append((step, loss.item()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    goal = constructed(embedding, radius)
    with torch.no_grad():
        learned = layer.function(embedding)
        apart = {
            "C": (layer.interaction - goal.interaction).square().mean().item(),
            "w": (layer.value - goal.value).square().mean().item(),
            "T": (learned - goal.function(embedding)).square().mean().item(),
        }
    lengths = sorted({2, agents // 2, agents, 2 * agents, 5 * agents})
    row = {
        "embedding": name,
        "seed": seed,
        "training_error": curve[-1][1],
        "test_error_by_agents": {n: error(layer, embedding, *examples(1000, n, table, generator)) for n in lengths},
        "constructed_training_error": error(goal, embedding, positions, rewards),
        "mean_squared_difference_from_constructed": apart,
    }
    matrices = {"C": layer.interaction.tolist(), "T": learned.tolist()}
    return {"row": row, "embedding": name, "curve": curve, **matrices}


def plot(table: dict) -> Figure:
    """Plot a row of panels for each embedding, with the matrices of the first seed."""
    worst = max(max(row["test_error_by_agents"].values()) for row in table["rows"])
    message = (
        f"Linear self-attention learns who is in whose way: the mean squared error in tests is at most {worst:.0e}"
    )
    figure, all_axes = plots.panels(message, 4 * len(EMBEDDINGS), 4, 2.6)
    for place, name in enumerate(EMBEDDINGS):
        training, *matrices, tests = all_axes[4 * place : 4 * place + 4]
        chosen = [run for run in table["runs"] if run["embedding"] == name]
        rows = [row for row in table["rows"] if row["embedding"] == name]
        for index, (run, row) in enumerate(zip(chosen, rows)):
            training.semilogy(*zip(*run["curve"]), color=f"C{index}", label=f"draw of examples {index + 1}")
            found = row["test_error_by_agents"]
            tests.semilogy(list(map(int, found)), list(found.values()), f"C{index}o-", markersize=3)
        training.set(xlabel="step")
        training.set_title(f"{name}:\ntraining error", fontsize="medium")
        tests.set(xlabel="agents")
        tests.set_title("test error\n(lower is better)", fontsize="medium")
        for panel, title in zip(matrices, "CT"):
            matrix = torch.tensor(chosen[0][title])
            panel.imshow(matrix.numpy())
            panel.set_title(f"learned {title}:\n{matrix.min():.2g} to {matrix.max():.2g}", fontsize="medium")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args)
    with sole_writer(args.output):
        runs = [
            run_once(args.output / f"{name}-{seed}.json", partial(run, name, seed), SETTING)
            for name in EMBEDDINGS
            for seed in args.seeds
        ]
    rows = [result.pop("row") for result in runs]
    kept = [run if row["seed"] == args.seeds[0] else {**run, "C": None, "T": None} for row, run in zip(rows, runs)]
    write(args, plot, **SETTING, seeds=args.seeds, dtype="float64", rows=rows, runs=kept)


if __name__ == "__main__":
    run_cli(main)
