"""Find if a recipe should give the learning rate of the mixing weights by itself, or as a multiple.

The IHA conversion of SmolLM2-135M-Instruct with P = 2 is fine-tuned on the rows of experiments/warm_start.py for a few
steps, with two rates of the backbone and four of the mixing. If the best absolute rate is the same beside both, a
recipe should give it by itself; if the best multiple is the same, as a multiple. The grid is geometric with the ratio
of the two backbone rates, so that multiples meet as well as absolute rates. The 8 runs take about 40 minutes on one
CPU core with bfloat16 instructions.

example: python -m experiments.mixing_rate
"""

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from common.command_io import read_json, run_cli
from experiments.options import study_parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_parser(__doc__, "mixing_rate", runs="outputs/warm_start")
    parser.set_defaults(output=Path("outputs/warm_start"))
    parser.add_argument("--steps", type=int, default=25)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from matplotlib.figure import Figure

from common import plots
from experiments.study import begin, write
from experiments.warm_start import RECIPE, base_model, make_rows, train


RATES = (1.25e-5, 5e-5)
MIXING_RATES = (5e-4, 2e-3, 8e-3, 3.2e-2)


def held_out_loss(rate: float, mixing_rate: float, steps: int, output: Path) -> float:
    """Return the nats per token after `steps` steps."""
    directory = output / "rates" / f"{rate:g}-{mixing_rate:g}-{steps}"
    train(
        directory,
        model_name_or_path=base_model("iha_2", output),
        dataset_name=output / "train.jsonl",
        learning_rate=rate,
        mixing_learning_rate=mixing_rate,
        max_steps=steps,
        eval_steps=steps,
        eval_on_start=False,
        sample_prompts=0,
    )
    return read_json(directory / "loss.json")["eval"][-1][1]


def plot(table: dict) -> Figure:
    """Plot the loss by the mixing's rate, and by its multiple of the backbone's."""
    rows = table["rows"]
    best = min(rows, key=lambda row: row["loss"])
    message = (
        f"Beside {best['learning_rate']:g} for the backbone the mixing learned best at "
        f"{best['mixing_learning_rate']:g} (one seed)"
    )
    figure, all_axes = plots.panels(message, 2, 2, 3.4, sharey=True)
    for axes, key in zip(all_axes, ("mixing_learning_rate", "multiple")):
        for rate in sorted({row["learning_rate"] for row in rows}):
            chosen = [row for row in rows if row["learning_rate"] == rate]
            axes.plot([row[key] for row in chosen], [row["loss"] for row in chosen], "o-", label=f"backbone {rate:g}")
        axes.set(xscale="log", ylabel="held-out loss, nats per token\n(lower is better)")
    all_axes[0].set(xlabel="learning rate of the mixing")
    all_axes[1].set(xlabel="the same / that of the backbone")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args, threads=None)
    make_rows(args.output)
    rows = [
        {
            "learning_rate": rate,
            "mixing_learning_rate": mixing_rate,
            "multiple": mixing_rate / rate,
            "loss": held_out_loss(rate, mixing_rate, args.steps, args.output),
        }
        for rate in RATES
        for mixing_rate in MIXING_RATES
    ]
    write(args, plot, trl=version("trl"), recipe=RECIPE, steps=args.steps, rows=rows)


if __name__ == "__main__":
    run_cli(main)
