"""Plot how the lead of paired heads over windows alone changes while the models train.

The tables of paired_heads have the losses of each seed at ten points of the training. The lead is the loss of a form
minus that of windows alone on the same seed. The plot is results/paired_heads_lead.png. README.md beside this file has
the lead after 20, 40, 60, 80 and 100% of the steps. It takes a few seconds.

example: python -m research.experiments.paired_heads_lead
"""

import argparse

from matplotlib.figure import Figure

from iha import plots
from iha.errors import run_cli
from iha.files import read_json
from research.experiments.options import RESULTS
from research.experiments.study import differences


# Label -> the table, and the variant in it.
LINES = {
    "width 64, code, P = 4": ("paired_heads", "paired_4"),
    "width 64, code, P = 4, 1,600 steps": ("paired_heads_1600", "paired_4"),
    "width 64, code, P = 4, rows of 512 bytes": ("paired_heads_512_600", "paired_4"),
    "width 64, prose, P = 4": ("paired_heads_prose", "paired_4"),
    "width 128, code, P = 4": ("paired_heads_512_128", "paired_4"),
    "width 128, code, P = 8": ("paired_heads_512_128", "paired_8"),
    "width 256, code, P = 8": ("paired_heads_512_256_600", "paired_8"),
    "width 256, code, short windows": ("paired_heads_512_256_600", "wide_4_64"),
    "width 512, code, P = 4": ("paired_heads_1024_512_cuda", "paired_4"),
    "width 512, code, P = 8": ("paired_heads_1024_512_cuda", "paired_8"),
    "width 512, code, short windows": ("paired_heads_1024_512_cuda", "wide_4_64"),
    "width 512, more code, P = 4": ("paired_heads_1024_512_800_packages_cuda", "paired_4"),
    "width 512, more code, short windows": ("paired_heads_1024_512_800_packages_cuda", "wide_4_64"),
}


def lead(table: dict, variant: str) -> list[tuple[int, dict]]:
    """Return each evaluated step, with the interval of a variant's loss minus that of windows alone."""
    ours, base = (zip(*table["runs"][name]) for name in (variant, "global_local"))
    return [
        (at[0][0], differences([loss for _, loss in at], [loss for _, loss in of_base[: len(at)]]))
        for at, of_base in zip(ours, base)
    ]


def plot(tables: dict[str, dict]) -> Figure:
    """Plot the leads by the bytes of training, with 95% bands."""
    figure, (axes,) = plots.panels("The lead over windows alone shrinks as the models train longer", height=4)
    for label, (name, variant) in LINES.items():
        points = lead(tables[name], variant)[1:]
        trained = [step * tables[name]["tokens_per_step"] / 1e6 for step, _ in points]
        low, mean, high = ([each["mean"] + sign * each["half_width"] for _, each in points] for sign in (-1, 0, 1))
        (line,) = axes.plot(trained, mean, marker=".", label=label)
        axes.fill_between(trained, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="million bytes of training")
    axes.set_ylabel("loss minus that of windows alone\nnats per byte (below 0 is better)")
    return figure


def main() -> None:
    """Draw the plot and write it."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tables = {name: read_json(RESULTS / f"{name}.json") for name, _ in LINES.values()}
    plots.save_plot(plot(tables), RESULTS / "paired_heads_lead.png")


if __name__ == "__main__":
    run_cli(main)
