"""What the studies share: options, runs that are not repeated, models of several seeds trained at once, the spread
over seeds, and results as JSON and a plot. Comparisons of attention kinds share more: comparison.py."""

import argparse
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from benchmarks.harness import processor
from common.command_io import read_json, whole_file, write_json


def run_once(path: Path, compute: Callable[..., dict], *values) -> dict:
    """What `compute(*values)` returned: a run whose result is in `path` is not repeated. The name of `path` says all
    that the result depends on."""
    if not path.exists():
        write_json(path, compute(*values))
        print(f"{path.stem} done", flush=True)
    return read_json(path)


def train(
    models: list[nn.Module],
    draw: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    steps: int,
    rate: float,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Trains models of one shape at once with Adam: small ones take little more time together than one by itself.

    Args:
        models: they differ in their weights only.
        draw: gives new inputs and targets, [models, rows, ...].
        loss: a number from the outputs and targets of one model.
        rate: of learning at the start; it falls to 0 along a cosine. Gradients are clipped to a norm of 1.

    Returns:
        A function from inputs [models, rows, ...] to the outputs of the trained models.
    """
    weights, buffers = stack_module_state(models)
    optimizer = torch.optim.Adam(weights.values(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def losses(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return vmap(lambda w, b, x, y: loss(functional_call(models[0], (w, b), (x,)), y))(
            weights, buffers, inputs, targets
        )

    for _ in range(steps):
        optimizer.zero_grad()
        losses(*draw()).sum().backward()
        gradients = [weight.grad.flatten(1) for weight in weights.values() if weight.grad is not None]
        shrink = 1 / torch.cat(gradients, dim=1).norm(dim=1, keepdim=True).clamp_min(1)
        for gradient in gradients:
            gradient.mul_(shrink)
        optimizer.step()
        schedule.step()
    return torch.no_grad()(
        lambda inputs: vmap(lambda w, b, x: functional_call(models[0], (w, b), (x,)))(weights, buffers, inputs)
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """The mean over the runs, and the lowest and the highest."""
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values), "runs": len(values)}


def learned_rows(
    learned: Callable[..., dict], heads_of: dict[str, Sequence[int]], args: argparse.Namespace
) -> list[dict]:
    """One row for each kind and each of its numbers of heads: what `learned(kind, heads, steps, seeds)` returned, its
    lists over the seeds as their spread."""
    rows = []
    for kind, numbers in heads_of.items():
        for heads in numbers:
            seeds = "_".join(map(str, args.seeds))
            path = args.output / f"{kind}-{heads}-{args.steps}-seeds_{seeds}.json"
            run = run_once(path, learned, kind, heads, args.steps, args.seeds)
            run = {name: spread(value) if isinstance(value, list) else value for name, value in run.items()}
            rows.append({"kind": kind, "heads": heads, **run})
    return rows


def plot_spread(axes: Axes, rows: list[dict], name: str, style: str, label: str) -> None:
    """The mean of `name` by heads, with bars from the lowest to the highest seed."""
    spreads = [row[name] for row in rows]
    low_high = [[abs(value[end] - value["mean"]) for value in spreads] for end in ("min", "max")]
    means = [value["mean"] for value in spreads]
    axes.errorbar([row["heads"] for row in rows], means, yerr=low_high, fmt=style, label=label)


def environment(device: str) -> dict:
    """Machine and versions."""
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def save_plot(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)


def write(results: Path, name: str, figure: Figure, **content) -> None:
    """Writes {name}.json and {name}.png to the directory `results`, with the command, the machine and the versions;
    `content` holds the options that matter."""
    write_json(results / f"{name}.json", {"command": f"python -m experiments.{name}", **environment("cpu"), **content})
    save_plot(figure, results / f"{name}.png")
    print(f"Wrote {results / name}.json and .png", flush=True)
