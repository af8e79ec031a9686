"""Plot what the paper's schedule gains and costs, for the README's first screen.

The tables are those of language_models and of the benchmark prefill. All panels have the same colours: global
attention, windows alone, and the schedule of "iha" layers with windows. FLOPs are those of the pairs that mask and
window leave; equal time is the median over the seeds.

example: python -m research.experiments.redraw first_screen
"""

from statistics import median

from matplotlib.figure import Figure

from iha_io import plots
from kind_facts.model_cost import model as cost_of
from research.experiments.language_models import VARIANTS, config_of
from research.experiments.study import interval


# Label -> the variant of `language_models`, and the form of `prefill`.
LINES = {
    "global attention": ("mha", "5 mha"),
    "windows alone (4 of 5 layers)": ("global_local", "4 local mha + 1 mha"),
    "IHA's schedule, P = 2": ("iha_2", "4 iha + 1 mha"),
    "IHA's schedule, P = 4": ("iha_4", None),
}
HIGHEST_LOSS = 2.7  # of the axis: all lines fall alike before


def budgets_of(table: dict, variant: str) -> tuple[float, float]:
    """Return the FLOPs and the median of the seconds that a step of a variant takes."""
    (row,) = (row for row in table["rows"] if row["variant"] == variant)
    products = cost_of(config_of(table, **VARIANTS[variant]), table["tokens"]).training
    return 2 * table["batch"] * products, median(row["seconds"]["values"]) / table["steps"]


def plot(losses: dict, prefill: dict) -> Figure:
    """Plot the losses by FLOPs and by time with 95% bands, and the seconds of the prefill by the context."""
    ends = {row["variant"]: row["loss"]["mean"] for row in losses["rows"]}
    message = (
        f"In {losses['steps']} steps IHA's schedule (P = 4) ends {ends['mha'] - ends['iha_4']:.2f} nats below global "
        "attention. Per FLOP, per second and in prefill windows alone lead"
    )
    figure, (by_flops, by_time, by_context) = plots.panels(message, 3, 3, 2.9)
    for index, (label, (variant, form)) in enumerate(LINES.items()):
        style = {"color": f"C{index}", "label": label}
        steps = [point[0] for point in losses["runs"][variant][0]]
        spreads = [interval([point[1] for point in points]) for points in zip(*losses["runs"][variant])]
        low, mean, high = ([s["mean"] + sign * s["half_width"] for s in spreads] for sign in (-1, 0, 1))
        for axes, scale, cost in zip((by_flops, by_time), (1e-12, 1), budgets_of(losses, variant)):
            places = [step * cost * scale for step in steps]
            axes.plot(places, mean, **style)
            axes.fill_between(places, low, high, color=style["color"], alpha=0.2, linewidth=0)
        if form:
            points = [(row["tokens"] / 1024, row["seconds"][form]) for row in prefill["rows"]]
            by_context.loglog(*zip(*points), marker="o", markersize=4, **style)
    for axes, label in ((by_flops, "training TFLOPs"), (by_time, "training CPU seconds, one thread")):
        axes.set(xlabel=label, ylim=(min(ends.values()) - 0.05, HIGHEST_LOSS))
    by_flops.set_title("held-out loss, nats per byte", fontsize="medium")
    by_time.set_title("the same, by time", fontsize="medium")
    by_context.set_title("prefill, seconds", fontsize="medium")
    by_context.set(xlabel="context, × 1,024 tokens")
    plots.ticks(by_context, "x", [row["tokens"] // 1024 for row in prefill["rows"]])
    for axes in (by_flops, by_time, by_context):
        axes.grid(linewidth=0.3)
        axes.set_ylabel("lower is better", fontsize="small")
    return figure
