"""Colliding agents: one linear self-attention layer learns who is in whose way, and keeps it for any number of agents.

L agents of radius R stand on a ring of N cells; agent i is penalised by 1 for each agent within ring distance 2 R.
(Section 7.1 of "A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions". Each agent counts
itself, too: a constant 1.) Cells are embedded as one-hot vectors, or as sines and cosines, in N dimensions. C starts
at 0 and w at ones / N; full-batch gradient descent on the mean squared error. The paper does not give its N, L, number
of examples and step size; they are options here.

What the theorems say, and the table shows: the training error goes to 0 (4.4), so does the test error for as many
agents (4.6) and for other numbers of them (4.8), and what is learned equals what was constructed once both are seen as
functions, T[mu, nu] (Corollary 4.9), while C and w themselves do not. Writes colliding_agents.json and
colliding_agents.png to experiments/results; takes about half a minute.

example: python -m experiments.colliding_agents --cells 20 --radius 1 --agents 12
"""

import argparse
import json
import math
import platform
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from experiments.linear_self_attention import LinearSelfAttention


RESULTS = Path(__file__).parent / "results"


def interactions(cells: int, radius: int) -> torch.Tensor:
    """-1 for two cells within ring distance 2 R, else 0: [cells, cells]."""
    apart = (torch.arange(cells)[:, None] - torch.arange(cells)).abs()
    return -(torch.minimum(apart, cells - apart) <= 2 * radius).double()


def one_hot(cells: int) -> torch.Tensor:
    return torch.eye(cells, dtype=torch.float64)


def sinusoidal(cells: int) -> torch.Tensor:
    """Orthonormal: a constant, and a cosine and a sine of each frequency. [cells, cells]."""
    angle = 2 * math.pi / cells * torch.arange(cells, dtype=torch.float64)[:, None]
    columns = [torch.full_like(angle, cells**-0.5)]
    for frequency in range(1, cells // 2 + 1):
        columns += [(2 / cells) ** 0.5 * (frequency * angle).cos(), (2 / cells) ** 0.5 * (frequency * angle).sin()]
    if cells % 2 == 0:
        columns = [
            *columns[:-2],
            columns[-2] / 2**0.5,
        ]  # the cosine of the highest frequency alternates, its sine is 0
    return torch.cat(columns, dim=1)


EMBEDDINGS = {"one-hot": one_hot, "sinusoidal": sinusoidal}


def constructed(embedding: torch.Tensor, radius: int) -> LinearSelfAttention:
    """The layer of the paper's construction: x^T w = 1 for every cell, and C = X^T (interactions) X, which is diagonal
    up to the order of sines and cosines for the sinusoidal embedding. The embedding is orthonormal."""
    value = embedding.T @ torch.ones(len(embedding), 1, dtype=torch.float64)
    return LinearSelfAttention(embedding.T @ interactions(len(embedding), radius) @ embedding, value)


def examples(
    count: int, agents: int, table: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cells of the agents, [count, agents], and their rewards, [count, agents, 1]."""
    positions = torch.randint(len(table), (count, agents), generator=generator)
    return positions, table[positions[:, :, None], positions[:, None, :]].sum(dim=-1, keepdim=True)


@torch.no_grad()
def error(
    layer: LinearSelfAttention, embedding: torch.Tensor, positions: torch.Tensor, rewards: torch.Tensor
) -> float:
    return (layer(embedding[positions]) - rewards).square().mean().item()


def study(name: str, args: argparse.Namespace) -> dict:
    """Trains a layer on one embedding; its row of the table, and what is plotted."""
    generator = torch.Generator().manual_seed(args.seed)
    table, embedding = interactions(args.cells, args.radius), EMBEDDINGS[name](args.cells)
    positions, rewards = examples(args.examples, args.agents, table, generator)
    layer = LinearSelfAttention(torch.zeros_like(embedding), torch.full_like(embedding[:, :1], 1 / args.cells))
    optimizer, inputs, curve = torch.optim.SGD(layer.parameters(), lr=args.lr), embedding[positions], []
    for step in range(args.steps + 1):
        loss = (layer(inputs) - rewards).square().mean()
        if step % (args.steps // 50) == 0:
            curve.append((step, loss.item()))
            if step % (args.steps // 5) == 0:
                print(f"{name}: step {step}, training error {loss.item():.2e}", flush=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    goal = constructed(embedding, args.radius)
    with torch.no_grad():
        apart = {
            "C": (layer.interaction - goal.interaction).square().mean().item(),
            "w": (layer.value - goal.value).square().mean().item(),
            "T": (layer.function(embedding) - goal.function(embedding)).square().mean().item(),
        }
        learned = layer.function(embedding)
    lengths = sorted({2, args.agents // 2, args.agents, 2 * args.agents, 5 * args.agents})
    tests = {n: error(layer, embedding, *examples(1000, n, table, generator)) for n in lengths}
    row = {
        "embedding": name,
        "training_error": curve[-1][1],
        "test_error_by_agents": tests,
        "constructed_training_error": error(goal, embedding, positions, rewards),
        "mean_squared_difference_from_constructed": apart,
    }
    return {"row": row, "curve": curve, "matrices": {"learned C": layer.interaction.detach(), "learned T": learned}}


def plot(studies: list[dict], path: Path) -> None:
    figure = Figure(figsize=(13, 6.5))
    for row, result in zip(figure.subplots(len(studies), 4), studies):
        name, tests = result["row"]["embedding"], result["row"]["test_error_by_agents"]
        row[0].semilogy(*zip(*result["curve"]))
        row[0].set(title=f"{name}: training error", xlabel="step")
        for axes, (title, matrix) in zip(row[1:3], result["matrices"].items()):
            axes.imshow(matrix)
            axes.set_title(f"{title}: {matrix.min():.2g} to {matrix.max():.2g}")
        row[3].semilogy(list(tests), list(tests.values()), marker="o")
        row[3].set(title="test error", xlabel="agents")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=20, help="N, of the ring")
    parser.add_argument("--radius", type=int, default=1, help="R, of an agent")
    parser.add_argument("--agents", type=int, default=12, help="L, in training")
    parser.add_argument("--examples", type=int, default=1000, help="in training")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.cells < 4 * args.radius + 2 or args.radius < 0:
        parser.error(
            f"--cells {args.cells} --radius {args.radius}: on fewer than 4 R + 2 cells all agents are in each other's way"
        )
    if args.agents < 2 or args.examples < 1 or args.steps < 50:
        parser.error("there must be at least 2 agents, 1 example and 50 steps")
    torch.set_num_threads(1)

    studies = [study(name, args) for name in EMBEDDINGS]
    setting = {name: getattr(args, name) for name in ("cells", "radius", "agents", "examples", "steps", "lr", "seed")}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "dtype": "float64"}
    args.output.mkdir(parents=True, exist_ok=True)
    rows = [result["row"] for result in studies]
    (args.output / "colliding_agents.json").write_text(
        json.dumps({**setting, **versions, "rows": rows}, indent=1) + "\n"
    )
    plot(studies, args.output / "colliding_agents.png")
    for row in rows:
        tests = ", ".join(f"{n}: {value:.1e}" for n, value in row["test_error_by_agents"].items())
        apart = ", ".join(
            f"{name} {value:.1e}" for name, value in row["mean_squared_difference_from_constructed"].items()
        )
        print(
            f"{row['embedding']}: training error {row['training_error']:.1e}; test error by agents {tests}; from constructed: {apart}"
        )


if __name__ == "__main__":
    main()
