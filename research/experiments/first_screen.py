"""Plot what paired heads and the paper's schedule gain and cost, as docs/figures/first_screen.png for the README.

The losses are those of paired_heads, and the cost that of five attention layers on a GPU. All panels have the same
colours. Equal time is the time of training steps that were taken in turn. It takes a few seconds.

example: python -m research.experiments.first_screen
"""

import argparse

from matplotlib.figure import Figure

from iha import plots
from iha.errors import ROOT, run_cli
from iha.files import read_json
from research.benchmarks.options import RESULTS as BENCHMARKS
from research.experiments.options import RESULTS
from research.experiments.study import plot_losses


TABLES = [RESULTS / "paired_heads.json", BENCHMARKS / "gpu" / "nvidia-h200" / "gpu.json"]
# Label -> the arm of `paired_heads`, and the form of the part "schedule" of the GPU.
LINES = {
    "mha: ordinary attention": ("mha", "mha: sdpa"),
    "windows: the same, with windows in 4 layers of 5": ("windows", "windows: sdpa"),
    "paired: paired heads in the windows, P = 4": ("paired", "paired: sdpa"),
    "iha: the paper's heads and windows, P = 4": ("iha", "iha, P = 4: sdpa"),
}
HIGHEST_LOSS = 2.7  # of the axis: all lines fall alike before


def plot(losses: dict, gpu: dict) -> Figure:
    """Plot the losses by steps and by time with 95% bands, and the ratios of the GPU by the context."""
    rows = {row["variant"]: row for row in losses["rows"]}
    ends = {name: row["loss"]["mean"] for name, row in rows.items()}
    lead = {budget: -rows["paired"]["minus_base"][budget]["difference"]["mean"] for budget in ("steps", "time")}
    schedules = [row for row in gpu["rows"] if row["part"] == "schedule"]
    trained = [row for row in schedules if row["backward"]]
    size = rows["paired"]["parameters"] / 1e6
    message = (
        f"With {size:.1f} million parameters paired heads end {lead['steps']:.2f} nats per byte below windows after "
        f"equal steps, and {lead['time']:.2f} below after equal time"
    )
    figure, (by_steps, by_time, by_context) = plots.panels(message, 3, 3, 2.9)
    for index, (label, (variant, form)) in enumerate(LINES.items()):
        style = {"color": f"C{index}", "label": label}
        steps = [point[0] for point in losses["runs"][variant][0]]
        for axes, cost in ((by_steps, 1), (by_time, losses["step_seconds"][variant])):
            plot_losses(axes, [step * cost for step in steps], losses["runs"][variant], **style)
        points = [(row["tokens"] / 1024, row["ratios"][form]) for row in trained]
        by_context.plot(*zip(*points), marker="o", markersize=4, **style)
    for axes, label in ((by_steps, "training steps"), (by_time, "training CPU seconds, one thread")):
        axes.set(xlabel=label, ylim=(min(ends.values()) - 0.05, HIGHEST_LOSS))
    by_steps.set_title("held-out loss, nats per byte", fontsize="medium")
    by_time.set_title("the same, by time", fontsize="medium")
    by_context.set_title("attention, H200", fontsize="medium")
    by_context.set(xlabel="context, × 1,024 tokens", xscale="log", ylim=(0, None))
    plots.ticks(by_context, "x", [row["tokens"] // 1024 for row in trained])
    for axes in (by_steps, by_time):
        axes.set_ylabel("lower is better", fontsize="small")
    by_context.set_ylabel("time / that of mha", fontsize="small")
    for axes in (by_steps, by_time, by_context):
        axes.grid(linewidth=0.3)
    return figure


def main() -> None:
    """Draw the plot and write it."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    plots.save_plot(plot(*map(read_json, TABLES)), ROOT / "docs" / "figures" / "first_screen.png")


if __name__ == "__main__":
    run_cli(main)
