"""Represent and learn interactions by linear attention, as "A Theoretical Study of (Hyper) Self-Attention" claims.

Agents sit on a ring of cells, and the target of each is minus the number of agents, itself included, within a distance
(the paper's colliding agents, Sections 3 and 7).

Constructed, with layers of the package: self-attention for this target (Theorem 3.1); HyperFeatureAttention of order 2
where only agents of the same label collide (Section 5); HyperAttention of order 3 for any function of three
(Theorem G.4, without sharing).

Learned, from one-hot and from sinusoidal embeddings: the error on new rows (Theorems 4.4 and 4.6), with fewer and more
agents (Theorem 4.8), and how far the interaction T[m, n] = (x_m C x_n) (x_n w) is from the constructed one (Corollary
4.9). It takes a minute.

example: python -m research.experiments.interactions
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from matplotlib.figure import Figure

from iha import plots
from iha.errors import run_cli
from iha.files import sole_writer
from research.experiments.options import study_parser
from research.experiments.polynomial_filters import BareAttention
from research.experiments.study import begin, points, run_once, spread, write


CELLS, REACH, LABELS = 12, 2, 4
AGENTS, OTHER_NUMBERS = 20, (2, 5, 10, 40)
ROWS, STEPS, RATE = 512, 3000, 3e-2


def window() -> torch.Tensor:
    """Return the effect of each cell on each other, [CELLS, CELLS]."""
    apart = (torch.arange(CELLS)[:, None] - torch.arange(CELLS)).abs()
    return -(torch.minimum(apart, CELLS - apart) <= REACH).double()


def layer_of(kind: str, width: int, channels: int, **options) -> BareAttention:
    """Return a linear layer of one head, whose weights are zero."""
    options = {kind: {**options, "linear": True}}
    layer = BareAttention(kind, width, 1, channels, "eager", attention_options=options).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
    return layer


def attend(layer: BareAttention, x: torch.Tensor) -> torch.Tensor:
    """Return the first channel of the outputs, [rows, agents]. Every agent sees all."""
    return layer(x, torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool))[..., 0]


def embedding(name: str) -> torch.Tensor:
    """Return an orthonormal embedding of the cells, [CELLS, CELLS]."""
    if name == "one-hot":
        return torch.eye(CELLS).double()
    angles = 2 * math.pi / CELLS * torch.arange(CELLS).double()[:, None] * torch.arange(CELLS // 2 + 1)
    waves = torch.cat((angles.cos(), angles.sin()[:, 1:-1]), dim=1)
    return waves / waves.norm(dim=0)


@torch.no_grad()
def constructed(seed: int) -> dict[str, float]:
    """Return the largest error of each construction."""
    draw = torch.Generator().manual_seed(seed)
    cells, labels = (torch.randint(high, (64, AGENTS), generator=draw) for high in (CELLS, LABELS))
    apart = window()[cells[:, :, None], cells[:, None]]  # [rows, agents, agents]
    pairs = layer_of("hyper_feature", CELLS, CELLS, orders=1)
    pairs.layer.q_proj.weight.copy_(window() * CELLS**0.5)
    pairs.layer.k_proj.weight.copy_(torch.eye(CELLS))
    pairs.layer.v_proj.weight[0] = 1
    found = {"self-attention": (attend(pairs, torch.eye(CELLS).double()[cells]), apart.sum(dim=2))}

    features = layer_of("hyper_feature", LABELS + CELLS, 2 * CELLS, orders=2)
    query, key = features.layer.q_proj.weight, features.layer.k_proj.weight
    query[:LABELS, :LABELS] = torch.eye(LABELS).double() * CELLS**0.5
    key[:LABELS, :LABELS] = torch.eye(LABELS)
    query[CELLS:, LABELS:] = window() * CELLS**0.5
    key[CELLS:, LABELS:] = torch.eye(CELLS)
    features.layer.v_proj.weight[0, :LABELS] = 1
    x = torch.cat((torch.eye(LABELS).double()[labels], torch.eye(CELLS).double()[cells]), dim=2)
    same = labels[:, :, None] == labels[:, None]
    found["HyperFeatureAttention, order 2"] = (attend(features, x), (apart * same).sum(dim=2))

    # A channel for each pair of labels of the second and the third agent
    effect = torch.randn(LABELS, LABELS, LABELS, generator=draw).double()
    triples = layer_of("hyper", LABELS, LABELS**2, order=3, sharing=False)
    triples.layer.q_proj.weight.copy_(effect.flatten(1).T * LABELS)
    second, third = triples.layer.k_proj.weight.chunk(2)
    second.copy_(torch.eye(LABELS).repeat_interleave(LABELS, dim=0))
    third.copy_(torch.eye(LABELS).repeat(LABELS, 1))
    for values in triples.layer.v_proj.weight.chunk(2):
        values[0] = 1
    exact = effect[labels[:, :, None, None], labels[:, None, :, None], labels[:, None, None]].sum(dim=(2, 3))
    found["HyperAttention, order 3"] = (attend(triples, torch.eye(LABELS).double()[labels]), exact)
    return {name: (output - target).abs().max().item() for name, (output, target) in found.items()}


def learned(name: str, seed: int) -> dict:
    """Train self-attention by Adam; return mean squared errors, and that of the interaction T."""
    torch.manual_seed(seed)
    layer, vectors = layer_of("hyper_feature", CELLS, CELLS, orders=1), embedding(name)
    query, key, value = (layer.layer.get_submodule(f"{each}_proj").weight for each in "qkv")
    for weight in (query, key, value):
        torch.nn.init.normal_(weight, std=CELLS**-0.5)

    def error(cells: torch.Tensor) -> torch.Tensor:
        target = window()[cells[:, :, None], cells[:, None]].sum(dim=2)
        return (attend(layer, vectors[cells]) - target).square().mean()

    rows = torch.randint(CELLS, (ROWS, AGENTS))
    optimizer = torch.optim.Adam(layer.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = error(rows[torch.randint(ROWS, (32,))])
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        scores = (vectors @ query.T) @ (vectors @ key.T).T * CELLS**-0.5
        interaction = scores * (vectors @ value[0])
        errors = {"training": error(rows), "new rows": error(torch.randint(CELLS, (ROWS, AGENTS)))}
        errors |= {f"{count} agents": error(torch.randint(CELLS, (ROWS, count))) for count in OTHER_NUMBERS}
        errors["interaction"] = (interaction - window()).square().mean()
        return {name: value.item() for name, value in errors.items()}


def plot(table: dict) -> Figure:
    """Plot the errors of the learned layers."""
    message = "Linear self-attention learns which agents collide, also for other numbers of agents than in training"
    figure, (axes,) = plots.panels(message, height=3.2)
    names = list(next(iter(table["learned"].values())))
    series = {name: points([errors[each] for each in names]) for name, errors in table["learned"].items()}
    plots.dots(axes, names, series)
    axes.set(xscale="log", xlabel="mean squared error, all seeds (lower is better)")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results."""
    args = study_parser(__doc__, "interactions", seeds=3).parse_args(argv)
    begin(args)
    exact = [constructed(seed) for seed in args.seeds]
    found = {}
    with sole_writer(args.output):
        for name in ("one-hot", "sinusoidal"):
            paths = {seed: args.output / f"{name}-{seed}.json" for seed in args.seeds}
            runs = [run_once(path, partial(learned, name, seed), {"steps": STEPS}) for seed, path in paths.items()]
            found[name] = {each: spread([run[each] for run in runs]) for each in runs[0]}
    largest = {name: max(errors[name] for errors in exact) for name in exact[0]}
    setting = {
        "cells": CELLS,
        "reach": REACH,
        "agents": AGENTS,
        "training_rows": ROWS,
        "steps": STEPS,
        "seeds": args.seeds,
    }
    write(args, plot, **setting, largest_error_of_constructions=largest, learned=found)


if __name__ == "__main__":
    run_cli(main)
