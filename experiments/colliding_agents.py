"""Train one linear self-attention layer to tell who is in whose way, for any number of agents.

L agents of radius R stand on a ring of N cells. Agent i is penalised by 1 for each agent within ring distance 2 R,
itself included (Section 7.1 of "A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions").
Cells are embedded as one-hot vectors, or as sines and cosines, in N dimensions. C starts at 0 and w at ones / N;
full-batch gradient descent lowers the mean squared error. The paper does not give its N, L, number of examples and
step size: they are options here.

The table shows what the theorems say. The training error goes to 0 (4.4), and so does the test error for as many
agents (4.6) and for other numbers of them (4.8). The learned layer equals the constructed one as a function, T[mu, nu]
(Corollary 4.9), while C and w differ. Writes colliding_agents.json and .png in about half a minute.

example: python -m experiments.colliding_agents --cells 20 --radius 1 --agents 12
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial

from common.command_io import UserError, run_cli
from experiments.options import study_parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_parser(__doc__, "colliding_agents", seeds=3)
    parser.add_argument("--cells", type=int, default=20, help="N, of the ring")
    parser.add_argument("--radius", type=int, default=1, help="R, of an agent")
    parser.add_argument("--agents", type=int, default=12, help="L, in training")
    parser.add_argument("--examples", type=int, default=1000, help="in training")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure
from torch import nn

from experiments.study import begin, run_once, write


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


def one_hot(cells: int) -> torch.Tensor:
    return torch.eye(cells, dtype=torch.float64)


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


EMBEDDINGS = {"one-hot": one_hot, "sinusoidal": sinusoidal}


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


def run(name: str, seed: int, args: argparse.Namespace) -> dict:
    """Train a layer on one embedding and one draw of examples; return its row of the table and what is plotted."""
    generator = torch.Generator().manual_seed(seed)
    table, embedding = interactions(args.cells, args.radius), EMBEDDINGS[name](args.cells)
    positions, rewards = examples(args.examples, args.agents, table, generator)
    layer = LinearSelfAttention(torch.zeros_like(embedding), torch.full_like(embedding[:, :1], 1 / args.cells))
    optimizer, inputs, curve = torch.optim.SGD(layer.parameters(), lr=args.lr), embedding[positions], []
    for step in range(args.steps + 1):
        loss = (layer(inputs) - rewards).square().mean()
        if step % (args.steps // 50) == 0:
            curve.append((step, loss.item()))
            if step % (args.steps // 5) == 0:
                print(f"{name}, seed {seed}: step {step}, training error {loss.item():.2e}", flush=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    goal = constructed(embedding, args.radius)
    with torch.no_grad():
        learned = layer.function(embedding)
        apart = {
            "C": (layer.interaction - goal.interaction).square().mean().item(),
            "w": (layer.value - goal.value).square().mean().item(),
            "T": (learned - goal.function(embedding)).square().mean().item(),
        }
    lengths = sorted({2, args.agents // 2, args.agents, 2 * args.agents, 5 * args.agents})
    row = {
        "embedding": name,
        "seed": seed,
        "training_error": curve[-1][1],
        "test_error_by_agents": {n: error(layer, embedding, *examples(1000, n, table, generator)) for n in lengths},
        "constructed_training_error": error(goal, embedding, positions, rewards),
        "mean_squared_difference_from_constructed": apart,
    }
    return {"row": row, "curve": curve, "C": layer.interaction.tolist(), "T": learned.tolist()}


def plot(runs: list[dict]) -> Figure:
    """Plot a row of panels for each embedding, with the matrices of the first seed."""
    figure = Figure(figsize=(13, 6.5))
    for axes, name in zip(figure.subplots(len(EMBEDDINGS), 4), EMBEDDINGS):
        chosen = [result for result in runs if result["row"]["embedding"] == name]
        for result in chosen:
            axes[0].semilogy(*zip(*result["curve"]))
            tests = result["row"]["test_error_by_agents"]
            axes[3].semilogy(list(map(int, tests)), list(tests.values()), marker="o")
        axes[0].set(title=f"{name}: training error", xlabel="step")
        axes[3].set(title="test error", xlabel="agents")
        for panel, title in zip(axes[1:3], "CT"):
            matrix = torch.tensor(chosen[0][title])
            panel.imshow(matrix.numpy())
            panel.set_title(f"learned {title}: {matrix.min():.2g} to {matrix.max():.2g}")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raises `UserError`."""
    args = parse_arguments(argv)
    begin(args)
    if args.cells < 4 * args.radius + 2 or args.radius < 0:
        raise UserError(
            f"--cells {args.cells} --radius {args.radius}: on fewer than 4 R + 2 cells all agents are in each other's "
            "way."
        )
    if args.agents < 2 or args.examples < 1 or args.steps < 50:
        raise UserError("There must be at least 2 agents, 1 example and 50 steps.")

    setting = {name: getattr(args, name) for name in ("cells", "radius", "agents", "examples", "steps", "lr")}
    directory = args.output / "-".join(f"{name}_{value}" for name, value in setting.items())
    runs = [
        run_once(directory / f"{name}-{seed}.json", partial(run, name, seed, args))
        for name in EMBEDDINGS
        for seed in args.seeds
    ]
    rows = [result["row"] for result in runs]
    write(args, plot(runs), **setting, seeds=args.seeds, dtype="float64", rows=rows)


if __name__ == "__main__":
    run_cli(main)
