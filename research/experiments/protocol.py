"""Compare variants of a model under one protocol, the same for every study.

1. Every variant learns at the best rate that was found for it on TUNING_SEED, which is not used again, and its mixing
   modules at the best multiple of that rate. What was tried is kept.
   The loss that tuning looks at is on the same held-out rows as the results, with another seed. A rate at which it is
   no better than that of the untrained model ends the search in its direction.
2. On every seed all variants start from the weights that they share with the "mha" model of that size, and read the
   same rows in the same order.
3. There are at least FEWEST_SEEDS. More are added until every 95% interval of a difference from the first variant is
   at most ± the smallest effect worth having, or there are `--most-seeds`. This rule looks at the width of the
   intervals and not at the differences, so that it favours no result. But it stops where they happen to be narrow:
   with 6 to 12 seeds they hold the true difference in 93 to 95% of the cases (simulated for normal losses). A
   `--most-seeds` below FEWEST_SEEDS is a number fixed before, which looks at no interval.
4. The rate is constant after a warm-up, and what is evaluated is a running mean of the weights. So one run tells the
   loss for three budgets: equal steps, equal FLOPs and equal time on this machine. Rates are tuned for equal steps
   alone. The dearer of two variants is read before its end, where a rate tuned for that many steps could be better and
   where the running mean lags behind by a larger share of the run: these budgets favour the cheaper one.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from scipy.interpolate import PchipInterpolator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from iha.errors import UserError, refusing
from iha.files import sole_writer
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.mixing_weights import trained_mixing
from research.experiments.study import differences, run_once


TUNING_SEED = 1000
FEWEST_SEEDS = 6
LEAST_SEEDS = 3  # of `--most-seeds`
FIRST_RATE = 4e-3
RATE_FACTOR = 2.0
MIXING_FACTOR = 4.0
BUDGETS = ("steps", "FLOPs", "time")
WARM_UP = 40  # steps
AVERAGE = 0.98  # of the running mean of the weights, by step


class Rates(NamedTuple):
    """Hold the learning rate of a variant, the multiple of it for its mixing modules, and what was tried.

    `tried` lists the rate, the multiple and the loss at the end of each run of the tuning.
    """

    rate: float
    mixing: float
    tried: list[list[float]]


def start_like(model: nn.Module, base: nn.Module) -> None:
    """Copy to a model what it shares with `base`: of each parameter of one name the entries that both have."""
    shared = dict(base.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in shared:
                common = tuple(slice(min(sizes)) for sizes in zip(parameter.shape, shared[name].shape))
                parameter[common] = shared[name][common]


def new_model(config: IHAConfig, base: IHAConfig, seed: int) -> IHAForCausalLM:
    """Build a variant's model of a seed, with the weights that it shares with the first variant's model, `base`."""
    torch.manual_seed(seed)
    like = IHAForCausalLM(base)
    torch.manual_seed(seed)
    model = IHAForCausalLM(config)
    start_like(model, like)
    return model


def has_mixing(config: IHAConfig) -> bool:
    """Return if a model has mixing modules, which learn at a separate rate."""
    with torch.device("meta"):
        return bool(trained_mixing(IHAForCausalLM(config)))


def fit(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    evaluate: Callable[[nn.Module, int], list[float]],
    steps: int,
    rate: float,
    mixing: float,
    evaluations: int,
) -> tuple[list[list[float]], float]:
    """Train a model with AdamW, and evaluate a running mean of its weights.

    Args:
        loss: gives the loss of the next batch.
        evaluate: gives what the curve says of a model at a step; it is called without gradients.
        rate: is constant after WARM_UP steps.
        mixing: the multiple of the rate with which the mixing modules learn.
        evaluations: how many there are, besides that of the end.

    Returns:
        the curve, [step, *evaluate(model, step)] each, and the seconds that this process took on the CPU for the
        training, without evaluations. Other processes on the machine do not lengthen them.
    """
    mixes = trained_mixing(model)
    found = set(mixes)
    others = [weight for weight in model.parameters() if weight not in found]
    groups = [{"params": others, "lr": rate}, {"params": mixes, "lr": rate * mixing}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE))
    curve = []
    seconds = 0.0
    start = time.process_time()
    for step in range(steps + 1):
        if step % max(1, steps // evaluations) == 0 or step == steps:
            seconds += time.process_time() - start
            with torch.no_grad():
                curve.append([step, *evaluate(average.module, step)])
            start = time.process_time()
        if step == steps:
            break
        optimizer.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
    return curve, seconds


def walk(loss_at: Callable[[float], float], start: float, factor: float) -> float:
    """Return the best of the values start * factor^n: try both neighbors of `start`, and go on beyond the better one.

    On a plateau one neighbor can win by chance, so the other is tried even where the first lowers the loss.
    """
    losses = {value: loss_at(value) for value in (start, start * factor, start / factor)}
    best = min(losses, key=losses.__getitem__)  # the first of equal ones
    if best == start:
        return start
    step = best / start
    lowest = losses[best]
    while (loss := loss_at(best * step)) < lowest:
        best = best * step
        lowest = loss
    return best


def tune(end_of: Callable[[float, float], float], mixes: bool, first: float) -> Rates:
    """Return the best rates by the loss at the end of a run, a function of the rate and of the mixing's multiple.

    The search begins at the rate `first`."""
    tried = []

    def loss_at(rate: float, mixing: float = 1.0) -> float:
        loss = end_of(rate, mixing)
        tried.append([rate, mixing, loss])
        return loss if math.isfinite(loss) else math.inf

    rate = walk(loss_at, first, RATE_FACTOR)
    return Rates(rate, walk(partial(loss_at, rate), 1.0, MIXING_FACTOR) if mixes else 1.0, tried)


@dataclass(frozen=True)
class Plan:
    """Hold what is compared under the protocol.

    Args:
        variants: their names; differences are from the first.
        most_seeds: so many at most. Raise `UserError` for too few.
        effect: smallest difference worth having, in the unit of the loss.
        first_rate: the learning rate at which the tuning begins.
        tuned: false if every variant learns at `first_rate`.
    """

    variants: list[str]
    most_seeds: int
    effect: float
    first_rate: float = FIRST_RATE
    tuned: bool = True

    def __post_init__(self) -> None:
        if self.most_seeds < LEAST_SEEDS:
            raise UserError(f"--most-seeds {self.most_seeds}: expected at least {LEAST_SEEDS}.")


def compare_tuned(
    plan: Plan,
    directory: Path,
    setting: dict,
    run: Callable[[str, int, float, float], dict],
    config_of: Callable[[str], IHAConfig],
    report: Callable[[dict[str, dict], dict[str, list[dict]]], None] = lambda tuning, runs: None,
) -> tuple[dict[str, Rates], dict[str, list[dict]]]:
    """Tune each of the variants of a plan, and run it on seeds 0, 1, ... as the protocol says.

    Args:
        directory: where finished runs are kept.
        setting: all that a run depends on besides its variant, its rates and its seed.
        run: returns from a variant, a seed, a rate and a multiple for the mixing a record with a "curve", whose last
            entry ends with the loss, [step, loss, ...], and the "seconds" of training.
        config_of: returns the config of a variant.
        report: is called after each run, with the best run of the tuning and the runs by seed, of each variant so far.

    Returns:
        the rates, and the runs by seed, of each variant.
    """
    for name in plan.variants:
        with refusing(f"{name} cannot be built at this size", Exception):
            config_of(name)

    def result(name: str, seed: int, rate: float, mixing: float) -> dict:
        path = directory / f"{name}-{rate:g}-{mixing:g}-{seed}.json"
        return run_once(path, partial(run, name, seed, rate, mixing), setting)

    runs: dict[str, list[dict]] = {name: [] for name in plan.variants}
    tuning: dict[str, dict] = {}

    def loss_of_tuning(name: str, rate: float, mixing: float) -> float:
        """Return the loss at the end, or infinity where it is no better than that of the untrained model."""
        run = result(name, TUNING_SEED, rate, mixing)
        if not end(run) < run["curve"][0][1]:
            return math.inf
        if name not in tuning or end(run) < end(tuning[name]):
            tuning[name] = run
        report(tuning, runs)
        return end(run)

    def rates_of(name: str) -> Rates:
        if not plan.tuned:
            return Rates(plan.first_rate, 1.0, [])
        return tune(partial(loss_of_tuning, name), has_mixing(config_of(name)), plan.first_rate)

    with sole_writer(directory):
        rates = {name: rates_of(name) for name in plan.variants}
        for seed in count():
            for name, of_variant in runs.items():
                of_variant.append(result(name, seed, rates[name].rate, rates[name].mixing))
                report(tuning, runs)
            enough = seed + 1 >= FEWEST_SEEDS and widest(runs) <= plan.effect
            if seed + 1 >= plan.most_seeds or enough:
                return rates, runs


def end(run: dict) -> float:
    """Return the loss at the end of a run."""
    return run["curve"][-1][1]


def widest(runs: dict[str, list[dict]]) -> float:
    """Return the largest half width of the intervals of the differences from the first variant; 0 if there is one."""
    base, *others = [[end(run) for run in of_variant] for of_variant in runs.values()]
    widths = (differences(losses, base)["half_width"] for losses in others)
    # One seed has no interval, and runs that diverged have one that is no number.
    return max((math.inf if width is None or not math.isfinite(width) else width for width in widths), default=0.0)


def loss_at(curve: list, step: float) -> float:
    """Return the loss at a step, on a monotone cubic (PCHIP) through the evaluations.

    A line between two evaluations is above the loss, because losses fall ever slower (docs/LOG.md, "Studies", has
    figures). A run with an infinite loss has none: NaN.
    """
    steps, losses = zip(*(point[:2] for point in curve))
    if not np.isfinite(losses).all():
        return math.nan
    return float(PchipInterpolator(steps, losses)(step))


def budgets(runs: dict[str, list[dict]], name: str, base: str, flops: float) -> dict[str, dict]:
    """Return how a variant compares with `base` by each of BUDGETS.

    Args:
        runs: by variant; "seconds" of a run are those of its training.
        flops: of a step of the variant, in steps of `base`.

    Returns:
        for each budget what a step of the variant costs in steps of `base`, and the interval of its loss minus that of
        `base`. Both are compared at the total cost of the cheaper one: the cheaper one at its last step, the dearer
        one at the step where it has cost as much.
    """
    ours, theirs = (median(run["seconds"] for run in runs[each]) for each in (name, base))
    steps = runs[name][0]["curve"][-1][0]
    compared = {}
    for budget, cost in zip(BUDGETS, (1.0, flops, ours / theirs)):
        losses = [loss_at(run["curve"], steps * min(1.0, 1 / cost)) for run in runs[name]]
        of_base = [loss_at(run["curve"], steps * min(1.0, cost)) for run in runs[base]]
        compared[budget] = {"cost": cost, "difference": differences(losses, of_base)}
    return compared
