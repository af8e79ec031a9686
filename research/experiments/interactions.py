"""Represent and learn interactions by linear attention, as "A Theoretical Study of (Hyper) Self-Attention" claims.

Agents sit on a ring of cells, and the target of each is minus the number of agents, itself included, within a distance
(the paper's colliding agents, Sections 3 and 7).

Constructed, with layers of the package: self-attention for a random function of two cells (Theorem 3.1), and, from
sinusoidal embeddings, for one of their difference (Theorem B.6); HyperFeatureAttention of order 2 where only agents of
the same label collide (Section 5); HyperAttention of order 3 for any function of three (Theorem G.4, without sharing).

Drawn: how often the numbers of agents in each cell, a matrix of rows and cells, have full column rank (Theorem E.2).

Learned, from random weights: the same three, self-attention from one-hot and from sinusoidal embeddings, and two
layers of self-attention where only agents of the same label collide, which Remark F.6 says they cannot represent.
Errors are mean squares, as shares of the variance of the target: of training (Theorems 4.4 and G.7), on new rows
(Theorem 4.6), and with fewer and more agents (Theorem 4.8). For self-attention the table also says how far the
interaction T[m, n] = (x_m C x_n) (x_n w) is from the constructed one (Corollary 4.9). The study takes ten minutes.

example: python -m research.experiments.interactions
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from iha import plots
from iha.errors import run_cli
from iha.files import sole_writer
from research.experiments.options import study_parser
from research.experiments.polynomial_filters import BareAttention
from research.experiments.study import begin, points, run_once, spread, write


CELLS = 12
REACH = 2
LABELS = 4
AGENTS = 20
OTHER_NUMBERS = (2, 5, 10, 40)
ROWS = 512
DRAWS = 1000
FEW_ROWS = (12, 24, 48, 96)
STEPS = 3000
# Adam's learning rates. At 1e-2 two layers end as far from the target.
ONE_LAYER = 3e-2
TWO_LAYERS = 1e-3
HEADS = 4  # of each of two layers


def window() -> torch.Tensor:
    """Return the effect of each cell on each other, [CELLS, CELLS]."""
    apart = (torch.arange(CELLS)[:, None] - torch.arange(CELLS)).abs()
    return -(torch.minimum(apart, CELLS - apart) <= REACH).double()


def layer_of(kind: str, width: int, channels: int, heads: int = 1, **options) -> BareAttention:
    """Return a linear layer, whose weights are zero."""
    options = {kind: {**options, "linear": True}}
    layer = BareAttention(kind, width, heads, channels, "eager", attention_options=options).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
    return layer


def attend(layers: Sequence[BareAttention], x: torch.Tensor) -> torch.Tensor:
    """Return the first channel of the outputs, [rows, agents]. Every agent sees all."""
    mask = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool)
    for layer in layers:
        x = layer(x, mask)
    return x[..., 0]


def embedding(name: str) -> torch.Tensor:
    """Return an orthonormal embedding of the cells, [CELLS, CELLS]."""
    if name == "one-hot":
        return torch.eye(CELLS).double()
    angles = 2 * math.pi / CELLS * torch.arange(CELLS).double()[:, None] * torch.arange(CELLS // 2 + 1)
    waves = torch.cat((angles.cos(), angles.sin()[:, 1:-1]), dim=1)
    return waves / waves.norm(dim=0)


# Rows of a task: the embedded agents [rows, agents, width], and the targets [rows, agents]
Rows = tuple[torch.Tensor, torch.Tensor]


def interacting(name: str, effect: torch.Tensor, rows: int, agents: int) -> Rows:
    """Draw agents that affect each other by `effect` [CELLS, CELLS], with an embedding of their cells."""
    cells = torch.randint(CELLS, (rows, agents))
    effects = effect[cells[:, :, None], cells[:, None]]  # [rows, agents, agents]
    return embedding(name)[cells], effects.sum(dim=2)


def collisions_by_label(rows: int, agents: int) -> Rows:
    """Draw agents that collide with those of the same label, as one-hot labels and cells side by side."""
    cells = torch.randint(CELLS, (rows, agents))
    labels = torch.randint(LABELS, (rows, agents))
    effects = window()[cells[:, :, None], cells[:, None]] * (labels[:, :, None] == labels[:, None])
    x = torch.cat((torch.eye(LABELS)[labels], torch.eye(CELLS)[cells]), dim=2)
    return x.double(), effects.sum(dim=2)


def effect_of_three() -> torch.Tensor:
    """Return the effect of two labels on a third, a random function [LABELS, LABELS, LABELS]."""
    return torch.randn(LABELS, LABELS, LABELS, generator=torch.Generator().manual_seed(0)).double()


def triples(rows: int, agents: int) -> Rows:
    """Draw agents with one-hot labels, on which each pair of agents has an effect."""
    labels = torch.randint(LABELS, (rows, agents))
    effects = effect_of_three()[labels[:, :, None, None], labels[:, None, :, None], labels[:, None, None]]
    return torch.eye(LABELS).double()[labels], effects.sum(dim=(2, 3))


class Task(NamedTuple):
    """Hold the layers that learn a target, the rows by number of rows and of agents, and the rate of Adam."""

    layers: list[BareAttention]
    draw: Callable[[int, int], Rows]
    rate: float = ONE_LAYER


def self_attention(name: str) -> Task:
    """Return a layer of self-attention, which is HyperFeatureAttention of order 1, for an embedding."""
    return Task([layer_of("hyper_feature", CELLS, CELLS, orders=1)], partial(interacting, name, window()))


def hyper_feature_attention() -> Task:
    """Return a layer of order 2, with a feature for the labels and one for the cells."""
    return Task([layer_of("hyper_feature", LABELS + CELLS, 2 * CELLS, orders=2)], collisions_by_label)


def hyper_attention() -> Task:
    """Return a layer with a channel for each pair of labels of the second and the third agent."""
    return Task([layer_of("hyper", LABELS, LABELS**2, order=3, sharing=False)], triples)


def two_layers() -> Task:
    """Return two layers of self-attention in the place of one of HyperFeatureAttention."""
    width = LABELS + CELLS
    head_dim = width
    first = layer_of("hyper_feature", width, head_dim, HEADS, orders=1)
    second = layer_of("hyper_feature", HEADS * head_dim, head_dim, HEADS, orders=1)
    return Task([first, second], collisions_by_label, TWO_LAYERS)


TASKS = {
    "self-attention, one-hot": partial(self_attention, "one-hot"),
    "self-attention, sinusoidal": partial(self_attention, "sinusoidal"),
    "HyperFeatureAttention, order 2": hyper_feature_attention,
    "two layers of self-attention": two_layers,
    "HyperAttention, order 3": hyper_attention,
}


@torch.no_grad()
def constructed_self_attention(name: str, effect: torch.Tensor) -> Task:
    """Return the layer that represents `effect` [CELLS, CELLS] from an embedding."""
    task = self_attention(name)._replace(draw=partial(interacting, name, effect))
    vectors = embedding(name)
    layer = task.layers[0].layer
    layer.q_proj.weight.copy_(vectors.T @ effect.T @ vectors * CELLS**0.5)
    layer.k_proj.weight.copy_(torch.eye(CELLS))
    layer.v_proj.weight[0] = vectors.sum(dim=0)  # the value of every cell is 1
    return task


@torch.no_grad()
def constructed(seed: int) -> dict[str, float]:
    """Return the largest error of each construction."""
    torch.manual_seed(seed)
    differences = (torch.arange(CELLS)[:, None] - torch.arange(CELLS)) % CELLS
    effects = {
        "one-hot": torch.randn(CELLS, CELLS).double(),
        "sinusoidal": torch.randn(CELLS).double()[differences],
    }
    of_pairs = {name: constructed_self_attention(name, effect) for name, effect in effects.items()}
    features = hyper_feature_attention()
    three = hyper_attention()
    layer = features.layers[0].layer
    layer.q_proj.weight[:LABELS, :LABELS] = torch.eye(LABELS).double() * CELLS**0.5
    layer.k_proj.weight[:LABELS, :LABELS] = torch.eye(LABELS)
    layer.q_proj.weight[CELLS:, LABELS:] = window() * CELLS**0.5
    layer.k_proj.weight[CELLS:, LABELS:] = torch.eye(CELLS)
    layer.v_proj.weight[0, :LABELS] = 1

    layer = three.layers[0].layer
    layer.q_proj.weight.copy_(effect_of_three().flatten(1).T * LABELS)
    second, third = layer.k_proj.weight.chunk(2)
    second.copy_(torch.eye(LABELS).repeat_interleave(LABELS, dim=0))
    third.copy_(torch.eye(LABELS).repeat(LABELS, 1))
    for values in layer.v_proj.weight.chunk(2):
        values[0] = 1

    tasks = {
        "self-attention": of_pairs["one-hot"],
        "self-attention, sinusoidal": of_pairs["sinusoidal"],
        "HyperFeatureAttention, order 2": features,
        "HyperAttention, order 3": three,
    }
    errors = {}
    for name, task in tasks.items():
        x, target = task.draw(64, AGENTS)
        errors[name] = (attend(task.layers, x) - target).abs().max().item()
    return errors


def full_rank(rows: int, agents: int) -> float:
    """Return the share of DRAWS in which the counts [rows, CELLS] of agents by cell have full column rank."""
    cells = torch.randint(CELLS, (DRAWS, rows, agents), generator=torch.Generator().manual_seed(0))
    counts = torch.nn.functional.one_hot(cells, CELLS).sum(dim=2).double()
    return (torch.linalg.matrix_rank(counts) == CELLS).double().mean().item()


def interaction_error(layer: BareAttention, name: str) -> torch.Tensor:
    """Return the mean square of how far the interaction of learned self-attention is from the constructed one."""
    query, key, value = (layer.layer.get_submodule(f"{each}_proj").weight for each in "qkv")
    vectors = embedding(name)
    scores = (vectors @ query.T) @ (vectors @ key.T).T * CELLS**-0.5
    return (scores * (vectors @ value[0]) - window()).square().mean()


def learned(name: str, seed: int) -> dict[str, float]:
    """Train the layers of a task by Adam, and return their errors."""
    torch.manual_seed(seed)
    layers, draw, rate = TASKS[name]()
    weights = [weight for layer in layers for weight in layer.parameters()]
    for weight in weights:
        torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    x, target = draw(ROWS, AGENTS)
    optimizer = torch.optim.Adam(weights, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        batch = torch.randint(ROWS, (32,))
        optimizer.zero_grad()
        (attend(layers, x[batch]) - target[batch]).square().mean().backward()
        optimizer.step()
        schedule.step()

    def error(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (attend(layers, x) - target).square().mean() / target.var()

    with torch.no_grad():
        errors = {"training": error(x, target), "new rows": error(*draw(ROWS, AGENTS))}
        errors |= {f"{agents} agents": error(*draw(ROWS, agents)) for agents in OTHER_NUMBERS}
        if name.startswith("self-attention"):
            errors["interaction"] = interaction_error(layers[0], name.removeprefix("self-attention, "))
        return {name: value.item() for name, value in errors.items()}


def plot(table: dict) -> Figure:
    """Plot the errors of the learned layers."""
    message = "Each layer learns its own interactions; two layers of self-attention do not learn those of labels"
    figure, (axes,) = plots.panels(message, height=4)
    names = list(next(iter(table["learned"].values())))
    series = {name: points([errors.get(each) for each in names]) for name, errors in table["learned"].items()}
    # The error of an interaction is a separate mean square, and no share of the target's variance.
    plots.dots(axes, [name.replace("interaction", "interaction (mean square)") for name in names], series)
    axes.set(
        xscale="log", xlabel="mean squared error as a share of the target's variance, all seeds (lower is better)"
    )
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results."""
    args = study_parser(__doc__, "interactions", seeds=3).parse_args(argv)
    study = begin(args)
    exact = [constructed(seed) for seed in args.seeds]
    found = {}
    with sole_writer(study.runs):
        for name in TASKS:
            file = name.replace(", ", "-").replace(" ", "-")
            paths = {seed: study.runs / f"{file}-{seed}.json" for seed in args.seeds}
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
    ranks = {
        f"{agents} agents": {f"{rows} rows": full_rank(rows, agents) for rows in FEW_ROWS} for agents in (2, AGENTS)
    }
    write(study, plot, **setting, largest_error_of_constructions=largest, full_rank=ranks, learned=found)


if __name__ == "__main__":
    run_cli(main)
