"""What the comparisons of attention kinds trained from scratch share: options, runs that are not repeated, and
intervals over seeds."""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn

from common.command_io import ROOT, UserError, check_output_file, read_json, write_json
from modeling_iha.attention_kinds import ATTENTION_CLASSES


# Student's t: the 97.5% quantile for 1, 2, ... 9 degrees of freedom.
T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


def finished_run(path: Path, setting: dict, run: Callable[[], dict]) -> dict:
    """The result of `run`, from `path` when it was run before, else written there with its setting. Raises `UserError`
    when the file comes from another setting."""
    if not path.exists():
        write_json(path, {"setting": setting, **run()})
    record = read_json(path)
    if record.get("setting") != setting:
        raise UserError(f"{path} comes from a run of another setting: remove it, or choose another --output.")
    return record


def clock(device: str) -> float:
    """Seconds of this process on the CPU, which others on the machine do not lengthen; of the clock on a GPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.monotonic()


def fit(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    evaluate: Callable[[int], list[float]],
    size: dict,
    schedule: Callable[[int], float],
    evaluations: int,
) -> tuple[list[list[float]], float]:
    """Trains a model with AdamW for size["steps"] steps.

    Args:
        loss: that of the next batch.
        evaluate: what the curve says of a step, called without gradients.
        schedule: the share of size["rate"] at a step.
        evaluations: how many there are, besides that of the end.

    Returns:
        the curve, [step, *evaluate(step)] each, and the seconds of training, without evaluations.
    """
    device, steps = next(model.parameters()).device.type, size["steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=size["rate"], weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    curve, seconds, start = [], 0.0, clock(device)
    for step in range(steps + 1):
        if step % max(1, steps // evaluations) == 0 or step == steps:
            seconds += clock(device) - start
            with torch.no_grad():
                curve.append([step, *evaluate(step)])
            start = clock(device)
        if step == steps:
            break
        optimizer.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return curve, seconds


def rise_and_fall(step: int, steps: int) -> float:
    """The share of the learning rate at a step: it rises for a twentieth of the steps, then falls to 0 on a line."""
    return min(20 * (step + 1) / steps, 1 - step / steps)


def interval(values: list[float]) -> dict:
    """Mean of the seeds' values, and half the width of its 95% interval by Student's t; `None` for a single seed."""
    if len(values) < 2:
        return {"mean": values[0], "half_width": None}
    freedom = len(values) - 1
    # Beyond the table Fisher's expansion at the normal quantile is right to three digits.
    quantile = T[freedom - 1] if freedom <= len(T) else 1.96 + 2.372 / freedom + 2.823 / freedom**2
    return {"mean": mean(values), "half_width": quantile * stdev(values) / math.sqrt(len(values))}


def shown(value: dict, digits: int = 4) -> str:
    """`interval` as text."""
    spread = "" if value["half_width"] is None else f" ± {value['half_width']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{spread}"


def begin(args: argparse.Namespace, study: str) -> tuple[Path, Path]:
    """Checks and completes the options; where the table and the plot go. Raises `UserError`."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch finds no GPU here; use --device cpu.")
    if args.device == "cpu":
        torch.set_num_threads(1)
    name = f"{study}_full" if args.full else study
    args.kinds, args.seeds = list(dict.fromkeys(args.kinds or ATTENTION_CLASSES)), list(dict.fromkeys(args.seeds))
    args.output = args.output or ROOT / "outputs" / name
    paths = (args.results / f"{name}.json", args.results / f"{name}.png")
    for path in paths:
        check_output_file(path, replace=True)
    return paths
