"""Compare forms of attention on your own text, from random weights: one table and one plot.

Small models learn the bytes of the text. Each form learns at its best rate, on the same rows and seeds, as
research/experiments/protocol.py says; the last tenth of the text is held out. The arms are:

- `windows`: four layers in five have windows of N / 16 tokens. The other arms are compared with it. If it is left out,
  they are compared with the first given arm of this list.
- `short_windows`: windows of N / 64 tokens with RoPE positions times 4.
- `mha`: ordinary attention in every layer.
- `paired`: paired heads (P = 4) with windows of N / 16 virtual tokens.
- `iha`: the paper's schedule (P = 4).

Each arm may have additions in all its layers: `paired+xsa` has exclusive self attention (XSA), `paired+gate` an output
gate, and `paired+xsa+gate` both. The FFN pays for the parameters of the gate.

An arm takes ten to twenty minutes of one core at size "tiny" (267,968 parameters). The sizes "small", "medium" and
"large" have 1, 4 and 16 million parameters, and "large" needs a GPU. `--size seconds` shows in two minutes what the
command prints: it learns too little, at one rate, to compare anything. After each run the command prints the losses so
far, and draws them as so_far.png. The same command resumes a run that was interrupted.

example: python -m research.compare --arms windows mha paired iha --text train.txt --size tiny --seeds 3
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from iha.errors import ROOT, UserError, check_packages, refusing, run_cli


if __name__ == "__main__":
    run_cli(lambda: check_packages("matplotlib", "scipy"))

from iha import plots
from iha.files import read_json
from iha.step_memory import of_training
from research.experiments import paired_heads
from research.experiments.language_models import config_of, size_of
from research.experiments.options import StudyParser, path_from_root
from research.experiments.paired_heads import ARMS, EFFECT, given_text
from research.experiments.protocol import LEAST_SEEDS, WARM_UP, end
from research.experiments.study import plot_losses


SIZES = {"seconds": 32, "tiny": 64, "small": 128, "medium": 256, "large": 512}  # widths


def table(record: dict) -> str:
    """Return the table of a study's record as text: a line for each arm."""
    first = record["rows"][0]["variant"]
    titles = ("bits per byte", "equal steps", "equal FLOPs", "equal time", "tokens/s", "step, MB")
    width = max(14, *(len(row["variant"]) + 2 for row in record["rows"]))
    lines = [f"{'arm':<{width}}{'parameters':>11}{''.join(f'{title:>18}' for title in titles)}"]
    for row in record["rows"]:
        loss = row["loss"]
        cells = [f"{loss['mean'] / math.log(2):.4f} ± {loss['half_width'] / math.log(2):.4f}"]
        for budget in ("steps", "FLOPs", "time"):
            compared = row.get("minus_base", {}).get(budget)
            difference = compared and compared["difference"]
            cells.append(f"{difference['mean']:+.4f} ± {difference['half_width']:.4f}" if difference else "-")
        # A row that is longer than half of `tokens_per_step` is alone in its step.
        cells.append(f"{record['batch'] * record['tokens'] / record['step_seconds'][row['variant']]:,.0f}")
        config = config_of(record, **ARMS[row["variant"]])
        cells.append(f"{of_training(config, record['batch'], record['tokens'], False).peak / 1e6:,.0f}")
        lines.append(f"{row['variant']:<{width}}{row['parameters']:>11,}{''.join(f'{cell:>18}' for cell in cells)}")
    clock = "wall-clock time" if record["gpu"] else "the CPU time of one thread"
    lines += [
        f"Differences: loss in nats per byte minus that of {first!r}, with 95% intervals over "
        f"{len(record['rows'][0]['loss']['values'])} seeds; below 0 is better.",
        f"Equal time and tokens/s use {clock}, measured once; the intervals do not include its error.",
        "The memory of a training step is counted, not measured, and in bfloat16 autocast.",
    ]
    return "\n".join(lines)


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


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the arms, and print their table. Raise `UserError`."""
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
    if args.output is None:
        steps = "" if args.steps is None else f"-{args.steps}"
        args.output = Path("outputs/compare", f"{Path(args.text).stem}-{args.size}-{args.tokens}{steps}")
    arms = sorted(set(args.arms), key=list(ARMS).index)
    size = size_of(paired_heads.SIZES[SIZES[args.size]], args.tokens)
    for arm in arms:
        with refusing(f"--tokens {args.tokens}: the arm {arm!r} cannot be built; give longer rows", Exception):
            config_of(size, **ARMS[arm])
    if args.steps is not None and args.steps < WARM_UP:
        print(f"Note: --steps {args.steps} ends before the warm-up of {WARM_UP} steps: no rate is reached, or tuned.")
    directory = ROOT / args.output
    study = argparse.Namespace(
        study="paired_heads",
        effect=EFFECT,
        command=args.command,
        kinds=arms,
        text=args.text,
        device=args.device,
        width=SIZES[args.size],
        tokens=args.tokens,
        steps=args.steps,
        most_seeds=args.seeds,
        untuned=args.size == "seconds" or (args.steps or WARM_UP) < WARM_UP,
        output=directory / "runs",
        results=directory,
    )
    path = paired_heads.run(study, partial(so_far, directory))
    (directory / "so_far.png").unlink(missing_ok=True)
    print(table(read_json(path)))
    if args.size == "seconds":
        print("The size seconds tunes no rate and learns for 60 steps: its differences mean nothing.")


if __name__ == "__main__":
    run_cli(main)
