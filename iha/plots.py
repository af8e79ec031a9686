"""Draw every plot alike: 800 pixels wide, with a message above, units on the axes and one legend below all panels.

As a command, draw runs of `sft.train` against each other.

example: python -m iha.plots run-windows run-paired --output compared.png
"""

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from math import inf, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from iha.errors import UserError, run_cli
from iha.files import check_output_file, expanded, read_json, whole_file


if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH = 8
DOTS_PER_INCH = 100
LINE = 0.24  # inches, of text
# Figures of the loss.json of a run, and their labels.
FIGURES_OF_RUNS = {
    "eval_bits_per_byte": "held-out text, bits per byte",
    "eval": "held-out loss, nats per token",
    "train": "training loss, nats per token",
    "tokens_per_second": "tokens per second",
}
# A mean, and how far its interval goes down and up.
Point = tuple[float, float, float]


def panels(message: str, count: int = 1, columns: int = 1, height: float = 3) -> tuple[Figure, list[Axes]]:
    """Return a figure under a `message`, and its axes, in rows of `height` inches and at most `columns` columns."""
    columns = min(columns, count)
    rows = -(-count // columns)
    lines = textwrap.wrap(message, 72)
    figure = Figure(figsize=(WIDTH, rows * height + LINE * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize="large", fontweight="bold")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for unused in axes[count:]:
        unused.remove()
    return figure, list(axes[:count])


def dots(
    axes: Axes,
    names: Sequence[str],
    series: Mapping[str, Sequence[Point]],
    limits: tuple[float, float] = (-inf, inf),
    mark: float | None = None,
) -> None:
    """Plot a row for each name, from the top down, with a dot of each of the series.

    A value beyond the `limits` of the axis is a number at its edge and not a dot, and NaN is "diverged" at `mark`. A
    vertical line stands there.
    """
    low, high = limits
    if mark is not None:
        axes.axvline(mark, color="black", linewidth=0.8)
    for index, (label, values) in enumerate(series.items()):
        shift = 0.7 * ((index + 0.5) / len(series) - 0.5)
        placed = [(place + shift, *value) for place, value in enumerate(values)]
        for place, value, *_ in placed:
            if isnan(value):
                axes.text(mark or max(low, 0), place, "diverged", color=f"C{index}", va="center", fontsize="small")
            elif not low <= value <= high:
                text, edge, side = (
                    (f"{value:.2f} →", high, "right") if value > high else (f"← {value:.2f}", low, "left")
                )
                axes.text(edge, place, text, color=f"C{index}", ha=side, va="center", fontsize="small")
        inside = [point for point in placed if low <= point[1] <= high]
        places, means, down, up = zip(*inside) if inside else ((), (), (), ())
        marker: dict[str, Any] = {"fmt": "osD^vPX*"[index % 8], "color": f"C{index}", "markersize": 4, "capsize": 2}
        axes.errorbar(means, places, xerr=(down, up), label=label, elinewidth=1, **marker)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", linewidth=0.3)
    if high < inf:
        axes.set_xlim(low, high)


def plain_numbers(axes: Axes) -> None:
    """Write 0.5 and 2,000 on logarithmic axes, between the powers of ten too where there are few of these."""
    plain = FuncFormatter(lambda value, _: f"{value:,.10g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.0e}")
    few = FuncFormatter(lambda value, place: plain(value, place) if f"{value:e}"[0] in "25" else "")
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log" and not isinstance(axis.get_minor_locator(), NullLocator):
            axis.set_major_formatter(plain)
            ratio = max(low, high) / min(low, high)
            axis.set_minor_formatter(plain if ratio < 12 else few if ratio < 100 else NullFormatter())
            axis.set_tick_params(which="minor", labelsize="small")


def plot_mixing(model: "nn.Module") -> Figure:
    """Draw how far the mixing of each head has moved from its start (`mixing_change`), and which heads it then reads.

    Above are layers and heads. Below are the heads that each head reads, and the pseudo-heads that its collapse reads:
    how much their shares have changed, the root mean square over the layers. All panels of a row have one scale.
    """
    import torch  # here, because the other plots need none of these

    from modeling_iha import mixing_change
    from modeling_iha.mixing_weights import mixing_differences

    moved = mixing_change(model)
    indices = list(moved["queries"])
    distances = {part: torch.stack(list(layers.values())) for part, layers in moved.items()}
    changes = {}
    for part, layers in mixing_differences(model).items():
        squares = torch.stack(list(layers.values())).square().mean(0)  # [sources, heads, P]
        changes[part] = (squares.sum(0).T if part == "collapse" else squares.mean(-1)).sqrt()

    figure = Figure(figsize=(WIDTH, 5.5), layout="constrained")
    figure.suptitle("Change of the mixing from its start", x=0.01, ha="left", fontsize="large", fontweight="bold")
    above, below = figure.subfigures(2, 1, squeeze=False).flat
    scale = "distance; at 1 a pseudo-head\nhas lost its own head"
    for axes in _heat_maps(above, "How far is each head from its start?", distances, scale):
        axes.set(ylabel="layer")
        shown = range(0, len(indices), -(-len(indices) // 8))
        axes.set_yticks(shown, [str(indices[place]) for place in shown])
    scale = "change of a share,\nover all layers"
    for axes in _heat_maps(
        below, "Which heads (or pseudo-heads) does it read more or less than at the start?", changes, scale
    ):
        axes.set(ylabel="pseudo-head" if axes.get_title() == "collapse" else "head that it reads")
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def _heat_maps(figure: SubFigure, title: str, parts: Mapping[str, "Tensor"], scale: str) -> list[Axes]:
    """Draw a matrix of each part of the mixing, [rows, heads], in a row with one scale, and return their axes."""
    figure.suptitle(title, fontsize="medium")
    row = list(figure.subplots(1, len(parts)))
    highest = max(float(matrix.max()) for matrix in parts.values())
    for axes, (part, matrix) in zip(row, parts.items()):
        image = axes.imshow(matrix.numpy(), vmin=0, vmax=highest or 1, aspect="auto")
        axes.set(title=part, xlabel="key/value head" if part in ("keys", "values") else "head")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    figure.colorbar(image, ax=row, label=scale)
    return row


def save_plot(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, with one legend below of all panels that have no legend."""
    named: dict[str, Artist] = {}
    for axes in figure.axes:
        plain_numbers(axes)
        if axes.get_legend() is None:
            for handle, label in zip(*axes.get_legend_handles_labels()):
                named.setdefault(label, handle)
    if named:
        columns = max(1, min(len(named), int(92 / (max(map(len, named)) + 7))))
        figure.set_figheight(figure.get_figheight() + LINE * -(-len(named) // columns))
        figure.legend(
            handles=list(named.values()), labels=list(named), loc="outside lower center", ncols=columns, frameon=False
        )
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH)


def draw_runs(directories: Sequence[Path], path: Path) -> None:
    """Draw the figures that runs of `sft.train` logged, by step, with a line for each run. Raise `UserError`."""
    runs = {str(directory): read_json(directory / "loss.json") for directory in directories}
    shown = [name for name in FIGURES_OF_RUNS if any(run.get(name) for run in runs.values())]
    if not shown:
        raise UserError(f"{', '.join(runs)}: nothing was logged; train for more than logging_steps steps.")
    figure, all_axes = panels("Runs by steps", len(shown), 2)
    for axes, name in zip(all_axes, shown):
        for directory, run in runs.items():
            if run.get(name):
                axes.plot(*zip(*run[name]), marker=".", label=directory)
        axes.set(xlabel="step", ylabel=FIGURES_OF_RUNS[name])
    save_plot(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with the words of a command line. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=expanded, nargs="+", help="output directories of `sft.train`, with a loss.json")
    parser.add_argument("--output", type=expanded, required=True, help="picture to write or replace, a .png")
    args = parser.parse_args(argv)
    check_output_file(args.output, replace=True)
    draw_runs(args.runs, args.output)
    print(f"Wrote {args.output}")


if __name__ == "__main__":
    run_cli(main)
