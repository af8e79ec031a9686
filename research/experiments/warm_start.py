"""Compare the fine-tuning of a pretrained model with that of its conversion to interleaved heads.

SmolLM2-135M-Instruct as it is ("mha") and converted to IHA ("iha_2": P = 2), which computes the same function at step
0, are fine-tuned on the same rows in the same order for the same number of steps. A seed draws which rows are held
out, and the order of the others. The rows are sums, greatest common divisors and words spelled backward, with their
steps, from reasoning-gym; its verifiers score greedy answers to new questions, the same ones for every seed. 6 runs
take about three hours on one core with bfloat16 instructions.

example: python -m research.experiments.warm_start --seeds 0 1 2
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from iha_io.command_io import read_json, run_cli, run_module, sole_writer, whole_file
from research.experiments.options import study_parser


PSEUDO_HEADS = {"mha": None, "iha_2": 2, "iha_4": 4}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_parser(__doc__, "warm_start", seeds=3)
    parser.add_argument("--variants", nargs="+", choices=PSEUDO_HEADS, default=["mha", "iha_2"])
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure

from iha_io import plots
from iha_io.checkpoint_io import smollm2_gguf
from research.experiments.study import begin, differences, interval, points, run_once, write


RECIPE = "sft/recipes/warm_start/sft.yaml"
# generator -> training rows, options of its difficulty
TASKS = {
    "chain_sum": (370, ["min_terms=3", "max_terms=5", "min_digits=2", "max_digits=3"]),
    "gcd": (240, ["max_value=200"]),
    "spell_backward": (240, []),
}
TEST_ROWS = 50


def make_rows(output: Path) -> Path:
    """Write the training rows of all tasks to one file, and test rows to one file for each task."""
    output.mkdir(parents=True, exist_ok=True)
    parts = []
    for task, (rows, options) in TASKS.items():
        train, test = output / f"train-{task}.jsonl", output / f"test-{task}.jsonl"
        drawn = ["--generator", task, *(["--options", *options] if options else [])]
        run_module(train, "sft.make_reasoning_data", train, "--rows", str(rows), *drawn)
        held_out = ["--rows", str(TEST_ROWS), "--seed", "1", "--exclude", train]
        run_module(test, "sft.make_reasoning_data", test, *held_out, *drawn)
        parts.append(train.read_text(encoding="utf-8"))
    with whole_file(output / "train.jsonl") as path:
        path.write_text("".join(parts), encoding="utf-8")
    return output / "train.jsonl"


def base_model(variant: str, output: Path) -> Path | str:
    """Return SmolLM2-135M-Instruct, as it is or converted to the IHA of `variant`."""
    source = smollm2_gguf()
    if PSEUDO_HEADS[variant] is None:
        return source
    converted = output / variant
    command = ("conversion_scripts.convert_llama_to_iha", source, converted)
    run_module(converted, *command, "--num-pseudo-heads", str(PSEUDO_HEADS[variant]))
    return converted


def train(directory: Path, **settings) -> None:
    """Fine-tune by the recipe, with these keys in place of its own, to directory/final."""
    settings.setdefault("use_cpu", not torch.cuda.is_available())
    arguments = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    run_module(directory / "final", "sft.train", "--config", RECIPE, "--output_dir", directory, *arguments)


def answers(model: Path | str, scores: Path, output: Path) -> dict[str, int]:
    """Return the right answers of `model` to the TEST_ROWS questions of each task."""
    for task in TASKS:
        result = scores / f"{task}.json"
        settings = ("--batch-size", str(TEST_ROWS), "--max-new-tokens", "128", "--json", result)
        run_module(result, "sft.score_reasoning", model, output / f"test-{task}.jsonl", *settings)
    return {task: read_json(scores / f"{task}.json")["correct"] for task in TASKS}


def fine_tune(variant: str, seed: int, output: Path) -> dict:
    """Train and score a variant; return its curves, the seconds of training and the right answers by task."""
    directory = output / "runs" / f"{variant}-{seed}"
    base, start = base_model(variant, output), time.monotonic()
    train(directory, model_name_or_path=base, dataset_name=output / "train.jsonl", seed=seed)
    seconds = time.monotonic() - start
    correct = answers(directory / "final", directory, output)
    curves = read_json(directory / "loss.json")
    return {"variant": variant, "seed": seed, "seconds": round(seconds), "correct": correct, **curves}


def summary(variant: str, runs: list[dict]) -> dict:
    """Return a row of the table.

    It has the held-out loss, the accuracy of all answers and that of each task, with intervals over the seeds. The
    answers of one seed depend on one another, so they are no sample by themselves.
    """
    losses = [[run["eval"][place][1] for run in runs] for place in (0, -1)]
    row = {"variant": variant, "seeds": [run["seed"] for run in runs]}
    row |= dict(zip(("start_loss", "loss"), map(interval, losses), strict=True))
    for task in TASKS:
        row[task] = interval([run["correct"][task] / TEST_ROWS for run in runs])
    return {**row, "accuracy": interval([sum(run["correct"].values()) / (TEST_ROWS * len(TASKS)) for run in runs])}


def summaries(runs: list[dict]) -> list[dict]:
    """Return the rows of the table; those after the first have their differences from it on the same seeds."""
    names = dict.fromkeys(run["variant"] for run in runs)
    first, *others = rows = [summary(name, [run for run in runs if run["variant"] == name]) for name in names]
    for row in others:
        for name in ("loss", "accuracy"):
            row[f"{name}_minus_{first['variant']}"] = differences(row[name]["values"], first[name]["values"])
    return rows


def plot(table: dict) -> Figure:
    """Plot the held-out loss by step, and the accuracy at the end."""
    runs, rows = table["runs"], table["rows"]
    ends = ", ".join(f"{row['variant']} {row['loss']['mean']:.3f}" for row in rows)
    message = f"Held-out loss after {runs[0]['eval'][-1][0]} steps, mean of the seeds: {ends}"
    figure, (loss, accuracy) = plots.panels(message, 2, 2, 3.4)
    for index, row in enumerate(rows):
        for run in (run for run in runs if run["variant"] == row["variant"]):
            label = row["variant"] if run["seed"] == runs[0]["seed"] else None
            loss.plot(*zip(*run["eval"], strict=True), f"C{index}", marker=".", label=label)
    loss.set(xlabel="step", ylabel="held-out loss, nats per token\n(lower is better)", yscale="log")
    tasks = {task: task for task in TASKS} | {"accuracy": "all"}
    plots.dots(accuracy, list(tasks.values()), {row["variant"]: points([row[name] for name in tasks]) for row in rows})
    accuracy.set(xlabel="right answers, 95% interval\n(higher is better)", xlim=(0, None))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args, threads=None)
    with sole_writer(args.output):
        make_rows(args.output)
        before = answers(smollm2_gguf(), args.output / "before", args.output)
        runs = [
            run_once(
                args.output / "runs" / f"{name}-{seed}" / "result.json", partial(fine_tune, name, seed, args.output)
            )
            for seed in args.seeds
            for name in args.variants
        ]
    setting = {"trl": version("trl"), "recipe": RECIPE, "test_rows_per_task": TEST_ROWS, "correct_before": before}
    write(args, plot, **setting, rows=summaries(runs), runs=runs)


if __name__ == "__main__":
    run_cli(main)
