"""Share what studies do the same way: runs that are not repeated, intervals over seeds, tables and plots."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from iha import plots
from iha.errors import ROOT, UserError
from iha.files import check_output_file, current_commit, read_json, write_json
from research.benchmarks.harness import environment, processor


# Runs and results


@dataclass(frozen=True)
class Study:
    """Hold the name of a study, its command line, and where its runs, and its table and plot, are kept."""

    name: str
    command: str
    runs: Path
    results: Path

    @property
    def table(self) -> Path:
        return self.results / f"{self.name}.json"  # the name of a text in it may have dots

    @property
    def plot(self) -> Path:
        return self.results / f"{self.name}.png"

    def start(self) -> None:
        """Take one thread, go to the root of the checkout, and check that the results can be written there.

        Raise `UserError`."""
        torch.set_num_threads(1)
        os.chdir(ROOT)
        _origins.clear()
        for path in (self.table, self.plot):
            check_output_file(path, replace=True)


# The origin of each run that the study of this process has made or read: runs of several commands share a table.
_origins: list[dict[str, str]] = []


@cache
def own_origin() -> dict[str, str]:
    """Return the commit and the machine of this process: asked once, for a study may make a hundred runs."""
    return {"commit": current_commit(), "machine": processor()}


def run_once(path: Path, compute: Callable[[], dict], setting: dict | None = None) -> dict:
    """Return what `compute()` returned: a run whose result is in `path` is not repeated.

    The result depends on the name of `path` and on `setting`. Raise `UserError` for a file of another setting, and for
    a damaged one.
    """
    if not path.exists():
        write_json(path, {"setting": setting, **own_origin(), **compute()})
        print(f"{path.stem} done", flush=True)
    try:
        record = read_json(path)
    except UserError as error:
        raise UserError(f"{error} Remove the file: its run is then made again.") from error
    if record.pop("setting", "missing") != setting:
        raise UserError(f"{path} comes from a run of another setting: remove it, or choose another --output.")
    origin = {name: record.pop(name, "unknown") for name in own_origin()}
    if origin != own_origin():
        print(f"Note: {path.name} was made at commit {origin['commit']} on {origin['machine']}.", flush=True)
    if origin not in _origins:
        _origins.append(origin)
    return record


def write(study: Study, plot: Callable[[dict], Figure], **content) -> None:
    """Write the table `content`, with the command line, the machine and the versions, and its plot.

    `origins` has the commit and the machine of each run, which may be older than the table. `plot` draws what was
    written, so that the table alone gives the plot again.
    """
    write_json(study.table, {**environment(study.command), "origins": _origins, **content})
    figure = plot(read_json(study.table))
    plots.save_plot(figure, study.plot)
    print(f"{figure.get_suptitle()}\nWrote {study.table} and .png", flush=True)


# Intervals over seeds


def interval(values: Sequence[float]) -> dict:
    """Return the mean, half the width of its 95% interval by Student's t (`None` for one value), and the values."""
    if len(values) < 2:
        return {"mean": values[0], "half_width": None, "values": list(values)}
    half_width = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {"mean": fmean(values), "half_width": half_width, "values": list(values)}


def differences(values: Sequence[float], base: Sequence[float]) -> dict:
    """Return the interval of how much each value is above that of the base on the same seed."""
    return interval([value - other for value, other in zip(values, base)])


def correct_by_holm(compared: Sequence[dict]) -> None:
    """Add to each of these `differences` its p-value, `p_holm`, corrected for their number (Holm, 1979).

    The p-values are those of Student's t against 0. Differences of one value, of equal ones, or with a run that
    diverged get none.
    """
    tested = [each for each in compared if (each["half_width"] or 0) > 0]  # no NaN, which would spoil the order
    p_values = [float(stats.ttest_1samp(each["values"], 0).pvalue) for each in tested]
    highest = 0.0
    for rank, (p_value, each) in enumerate(sorted(zip(p_values, tested), key=lambda pair: pair[0])):
        highest = max(highest, min(1.0, p_value * (len(tested) - rank)))
        each["p_holm"] = highest


# Plots


def points(intervals: list[dict]) -> list[plots.Point]:
    """Return the mean of each `interval`, and how far it goes down and up, for `plots.dots`."""
    half_widths = [each["half_width"] or 0.0 for each in intervals]
    return [(each["mean"], half_width, half_width) for each, half_width in zip(intervals, half_widths)]


def plot_losses(axes: Axes, places: Sequence[float], curves: Sequence[list], **style) -> None:
    """Plot the mean of curves [step, loss, ...] of several seeds at these places, with its 95% interval as a band."""
    spreads = [interval([point[1] for point in at]) for at in zip(*curves)]
    low, mean, high = ([s["mean"] + sign * (s["half_width"] or 0.0) for s in spreads] for sign in (-1, 0, 1))
    (line,) = axes.plot(places, mean, **style)
    axes.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
