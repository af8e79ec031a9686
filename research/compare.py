"""Compare forms of attention on your own text, from random weights: one table and one plot.

Small models learn the bytes of the text. Each form learns at its best rate, on the same rows and seeds, as
research/experiments/protocol.py says; the last tenth of the text is held out. The arms are:

- `windows`: ordinary attention, with windows of N / 16 tokens in four layers of five. The other arms are compared with
  it. If it is left out, they are compared with the first given arm of this list.
- `short_windows`: the same with windows of N / 64 tokens and RoPE positions times 4.
- `mha`: ordinary attention in every layer.
- `paired`: paired heads (P = 4) in windows of N / 16 virtual tokens.
- `iha`: interleaved heads (P = 4) in the paper's windows of N / 32 tokens.

Each arm may have additions in all its layers: `paired+xsa` has exclusive self attention (XSA), `paired+gate` an output
gate, and `paired+xsa+gate` both. The FFN pays for the parameters of the gate.

An arm takes ten to twenty minutes of one core at size "tiny" (267,968 parameters). The sizes "small", "medium" and
"large" have 1, 4 and 16 million parameters, and "large" needs a GPU. `--size seconds` shows in two minutes what the
command prints: it learns too little, at one rate, to compare anything. After each run the command prints the losses so
far, and draws them as so_far.png. The same command resumes a run that was interrupted.

example: python -m research.compare --arms windows mha paired iha --text train.txt --size tiny --seeds 3
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from iha.errors import ROOT, UserError, check_packages, refusing, run_cli


if __name__ == "__main__":
    run_cli(lambda: check_packages("matplotlib", "scipy"))

import torch
from matplotlib.figure import Figure

from iha import plots
from iha.files import read_json, sole_writer
from iha.model_cost import parameters_of, passes_of_model
from iha.step_memory import Way, of_training
from modeling_iha import IHAConfig
from research.benchmarks.harness import processor
from research.experiments.arms import ARMS, SIZES, Size, config_of
from research.experiments.byte_models import EVALUATIONS, given_text, read_text, step_seconds, text_sha256, train
from research.experiments.options import StudyParser, path_from_root
from research.experiments.protocol import BUDGETS, LEAST_SEEDS, WARM_UP, Plan, Rates, budgets, compare_tuned, end
from research.experiments.study import Study, correct_by_holm, interval, plot_losses, points, run_once, write


EFFECT = 0.01  # nats per byte: the smallest difference worth having


@dataclass(frozen=True)
class Comparison:
    """Hold what a command line asks for."""

    plan: Plan
    size: Size
    text: str  # a path, "python" or "prose"
    device: str
    study: Study

    def config_of(self, arm: str) -> IHAConfig:
        return config_of(self.size, ARMS[arm])


# The command line


def read_arguments(argv: Sequence[str] | None = None) -> Comparison:
    """Return what the command line asks for. Raise `UserError`."""
    parser = StudyParser("research.compare", description=__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["windows", "mha", "paired", "iha"], metavar="ARM")
    parser.add_argument(
        "--text", type=given_text, required=True, help="file to learn from, or python or prose (this Python's own)"
    )
    parser.add_argument("--size", choices=SIZES, default="tiny", help="size of the model (default: tiny)")
    parser.add_argument("--tokens", type=int, default=256, help="length of rows, N, in bytes (default: 256)")
    parser.add_argument("--steps", type=int, help="training steps (default: 400 to 800, by size)")
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="at most this many seeds, 3 or more (default: 3); from 6 on training stops once the intervals are narrow",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    where = "(outputs/compare/TEXT-SIZE-TOKENS, with --steps TEXT-SIZE-TOKENS-STEPS); its table is replaced"
    parser.add_argument("--output", type=path_from_root, help=where)
    args = parser.parse_args(argv)

    if args.seeds < LEAST_SEEDS:
        raise UserError(f"--seeds {args.seeds}: expected at least {LEAST_SEEDS}.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no CUDA device here.")
    size = SIZES[args.size].with_rows(args.tokens)
    if args.steps is not None:
        if args.steps < EVALUATIONS:
            raise UserError(f"--steps {args.steps}: expected at least {EVALUATIONS}.")
        if args.steps < WARM_UP:
            print(
                f"Note: --steps {args.steps} ends before the warm-up of {WARM_UP} steps: no rate is reached, or tuned."
            )
        size = replace(size, steps=args.steps)
    arms = sorted(set(args.arms), key=list(ARMS).index)
    for arm in arms:
        with refusing(f"--tokens {args.tokens}: the arm {arm!r} cannot be built; give longer rows", Exception):
            config_of(size, ARMS[arm])
    tuned = args.size != "seconds" and size.steps >= WARM_UP
    output = args.output
    if output is None:
        steps = "" if args.steps is None else f"-{args.steps}"
        output = Path("outputs/compare", f"{Path(args.text).stem}-{args.size}-{args.tokens}{steps}")
    return Comparison(
        plan=Plan(arms, args.seeds, EFFECT, size.first_rate, tuned),
        size=size,
        text=args.text,
        device=args.device,
        study=Study("compare", args.command, ROOT / output / "runs", ROOT / output),
    )


# What is printed and drawn


def so_far(directory: Path, tuning: dict[str, dict], runs: dict[str, list[dict]]) -> None:
    """Print the losses of each arm so far, and plot them by steps.

    An arm without a run of a seed is shown by its best run of the tuning."""
    shown = {name: of_arm or [tuning[name]] for name, of_arm in runs.items() if of_arm or name in tuning}
    width = max(14, *(len(name) + 2 for name in shown))
    print(f"\n{'so far':<{width}}{'bits per byte':>14}{'runs':>16}")
    for name, of_arm in shown.items():
        bits = sum(map(end, of_arm)) / len(of_arm) / math.log(2)
        what = f"{len(runs[name])} seeds" if runs[name] else "of the tuning"
        print(f"{name:<{width}}{bits:>14.4f}{what:>16}")
    print(flush=True)
    figure, (axes,) = plots.panels("Losses in nats per byte so far, by steps")
    for name, of_arm in shown.items():
        curves = [run["curve"] for run in of_arm]
        plot_losses(axes, [point[0] for point in curves[0]], curves, label=name)
    axes.set(xlabel="training steps", ylabel="held-out loss")
    plots.save_plot(figure, directory / "so_far.png")


def table(comparison: Comparison, record: dict) -> str:
    """Return the table of a record as text: a line for each arm."""
    size = comparison.size
    first = record["rows"][0]["arm"]
    titles = ("bits per byte", *(f"equal {budget}" for budget in BUDGETS), "tokens/s", "step, MB")
    width = max(14, *(len(row["arm"]) + 2 for row in record["rows"]))
    lines = [f"{'arm':<{width}}{'parameters':>11}{''.join(f'{title:>18}' for title in titles)}"]
    for row in record["rows"]:
        loss = row["loss"]
        cells = [f"{loss['mean'] / math.log(2):.4f} ± {loss['half_width'] / math.log(2):.4f}"]
        for budget in BUDGETS:
            difference = row["minus_first"][budget]["difference"] if row["arm"] != first else None
            cells.append(f"{difference['mean']:+.4f} ± {difference['half_width']:.4f}" if difference else "-")
        # A row that is longer than half of `tokens_per_step` is alone in its step.
        cells.append(f"{size.batch * size.tokens / record['step_seconds'][row['arm']]:,.0f}")
        peak = of_training(comparison.config_of(row["arm"]), size.batch, size.tokens, Way()).peak
        cells.append(f"{peak / 1e6:,.0f}")
        lines.append(f"{row['arm']:<{width}}{row['parameters']:>11,}{''.join(f'{cell:>18}' for cell in cells)}")
    clock = "wall-clock time" if record["gpu"] else "the CPU time of one thread"
    lines += [
        f"Differences: loss in nats per byte minus that of {first!r}, with 95% intervals over "
        f"{len(record['rows'][0]['loss']['values'])} seeds; below 0 is better.",
        f"Equal time and tokens/s use {clock}, measured once; the intervals do not include its error.",
        "The memory of a training step is counted, not measured, and in bfloat16 autocast.",
    ]
    return "\n".join(lines)


def plot(record: dict) -> Figure:
    """Plot the losses by time, and the differences from the first arm, a panel for each budget."""
    first, *others = record["rows"]
    message = (
        f"Losses in nats per byte by time, and their differences from those of {first['arm']} with 95% intervals: "
        f"rows of {record['tokens']} bytes, {first['parameters']:,} parameters"
    )
    figure, (by_time, *by_budget) = plots.panels(message, 4, 2, height=1.8 + 0.2 * len(record["rows"]))
    for row in record["rows"]:
        curves = record["runs"][row["arm"]]
        seconds = [point[0] * record["step_seconds"][row["arm"]] for point in curves[0]]
        plot_losses(by_time, seconds, curves, label=row["arm"])
    clock = f"seconds on {record['gpu']}" if record["gpu"] else "CPU seconds, one thread"
    # All lines fall alike before the third evaluation.
    shown = [point[1] for curves in record["runs"].values() for curve in curves for point in curve[2:]]
    by_time.set(xlabel=f"training {clock}", ylabel="held-out loss", ylim=(min(shown) - 0.02, max(shown) + 0.02))
    for axes, budget in zip(by_budget, BUDGETS):
        compared = [row["minus_first"][budget]["difference"] for row in others]
        plots.dots(axes, [row["arm"] for row in others], {f"arm minus {first['arm']}": points(compared)}, mark=0)
        axes.set(xlabel=f"difference after equal {budget} (below 0 is better)")
    return figure


# The runs


def rows_of_table(comparison: Comparison, rates: dict[str, Rates], runs: dict[str, list[dict]]) -> list[dict]:
    """Return a row for each arm, with its differences from the first arm and their p-values."""
    first, *_ = runs
    flops = {arm: passes_of_model(comparison.config_of(arm), comparison.size.tokens).training for arm in runs}
    rows = []
    for arm, of_arm in runs.items():
        config = comparison.config_of(arm)
        row = {
            "arm": arm,
            "parameters": parameters_of(config),
            "intermediate_size": config.intermediate_size,
            **rates[arm]._asdict(),
            "loss": interval([end(run) for run in of_arm]),
        }
        if arm != first:
            row["minus_first"] = budgets(runs, arm, first, flops[arm] / flops[first])
        rows.append(row)
    correct_by_holm([row["minus_first"][budget]["difference"] for row in rows[1:] for budget in BUDGETS])
    return rows


def run(comparison: Comparison) -> dict:
    """Train the arms, write the table and the plot, and return the table. Raise `UserError`."""
    plan, size, study = comparison.plan, comparison.size, comparison.study
    study.start()
    text = read_text(comparison.text, size.tokens)
    on_gpu = comparison.device == "cuda"
    setting = {
        **asdict(size),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "text": Path(comparison.text).name,
        "text_sha256": text_sha256(text),
    }
    text = text.to(comparison.device)

    def one_run(arm: str, seed: int, rate: float, mixing: float) -> dict:
        return train(size, text, arm, ARMS[arm], seed, rate, mixing)

    report = partial(so_far, study.results)
    rates, runs = compare_tuned(plan, study.runs, setting, one_run, comparison.config_of, report)
    timed = study.runs / f"seconds-{'-'.join(plan.variants)}.json"
    with sole_writer(study.runs):  # another command that trains there would disturb the times
        take_times = partial(step_seconds, size, text, {arm: ARMS[arm] for arm in plan.variants})
        seconds = run_once(timed, take_times, {**setting, "machine": processor()})
    for arm, of_arm in runs.items():
        for each in of_arm:
            each["seconds"] = seconds[arm] * size.steps
    rows = rows_of_table(comparison, rates, runs)
    curves = {arm: [each["curve"] for each in of_arm] for arm, of_arm in runs.items()}
    write(study, plot, **setting, step_seconds=seconds, rows=rows, runs=curves)
    return read_json(study.table)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the arms, and print their table. Raise `UserError`."""
    comparison = read_arguments(argv)
    record = run(comparison)
    (comparison.study.results / "so_far.png").unlink(missing_ok=True)
    print(table(comparison, record))
    if not comparison.plan.tuned:
        print("No rate was tuned in this short comparison: its differences mean nothing.")


if __name__ == "__main__":
    run_cli(main)
