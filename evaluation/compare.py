"""Compare evaluations of several checkpoints, example by example.

Reads the output directories of evaluation.run. Writes a Markdown table and a plot beside it: the figures of each, the
difference from the first with its standard error over the same examples, and how many examples have another reply.

example: python -m evaluation.compare outputs/evaluation/smollm2 outputs/evaluation/smollm2-iha --output comparison.md
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NotRequired

from common.command_io import UserError, check_output_file, read_json, read_jsonl, run_cli, whole_file


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output directories of evaluation.run, the reference first")
    parser.add_argument("--output", type=Path, required=True, help="Markdown file to write; the plot goes beside it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from scipy.stats import sem
from typing_extensions import TypedDict

from common.plots import dot_panels, save_plot
from model_cards.render import Results, Task, figure_text, markdown_table


# What two evaluations must have in common in a task; its shots are a part of the hash.
SETTINGS = ("task_hash", "samples_each", "generation", "chat")


class ComparedTask(Task):
    """Name what decides whether two evaluations of a task can be compared."""

    task_hash: str
    generation: dict | None
    chat: NotRequired[bool]  # older results do not say whether the task was put as a chat


class ComparedResults(Results):
    model: str
    tasks: dict[str, ComparedTask]


class Sample(TypedDict):
    doc_id: int
    doc_hash: str
    replies: NotRequired[list[str]]


def read_run(directory: Path) -> dict:
    """Return results.json of an output directory, with "samples", {task: {document: row}}. Raise `UserError`."""
    results = read_json(directory / "results.json", ComparedResults)
    rows = {task: read_jsonl(directory / f"samples_{task}.jsonl", Sample) for task in results["tasks"]}
    samples = {task: {(row["doc_id"], row["doc_hash"]): row for row in found} for task, found in rows.items()}
    return results | {"samples": samples}


def check_alike(task: str, runs: dict[str, dict], first: str, name: str) -> None:
    """Raise `UserError` when examples or settings of a task differ between two of the `runs`."""
    mine, theirs = (runs[each]["tasks"][task] for each in (first, name))
    for what in SETTINGS:
        if mine.get(what, theirs.get(what)) != theirs.get(what, mine.get(what)):
            raise UserError(f"{task} has another {what} in {name} than in {first}: evaluate both alike.")
    if runs[first]["samples"][task].keys() != runs[name]["samples"][task].keys():
        raise UserError(
            f"{task} has other examples in {name} than in {first}: give both one --limit and one --data. "
            f"RULER's examples depend on --seed and on the tokenizer, too."
        )


def paired_difference(before: dict[tuple, dict], after: dict[tuple, dict], metric: str) -> dict | None:
    """Return the mean of after - before over the examples, {"value", "stderr"}.

    It is `None` unless the metric is a number for each example.
    """
    pairs = [(before[document].get(metric), after[document].get(metric)) for document in before]
    if not all(isinstance(value, (bool, int, float)) for pair in pairs for value in pair):
        return None
    differences = [float(then) - float(now) for now, then in pairs]
    return {"value": mean(differences), "stderr": float(sem(differences)) if len(differences) > 1 else None}


def compare(runs: dict[str, dict]) -> list[dict]:
    """Return one row for each task and metric that all runs have.

    It holds {"task", "metric", "examples", "figures", "differences", "other_replies"}: "figures" by run, "differences"
    and "other_replies", the number of examples with another reply than in the first run (`None` for a task without
    replies), by run but the first. Raise `UserError` without a common task, and for runs that are not alike.
    """
    (first, reference), *others = runs.items()
    rows = []
    for task in reference["tasks"]:
        if not all(task in run["tasks"] for run in runs.values()):
            continue
        samples, other_replies = reference["samples"][task], {}
        for name, other in others:
            check_alike(task, runs, first, name)
            has_replies = all("replies" in row for row in samples.values())
            differ = sum(
                row.get("replies") != samples[key].get("replies") for key, row in other["samples"][task].items()
            )
            other_replies[name] = differ if has_replies else None
        for metric in reference["tasks"][task]["metrics"]:
            figures = {name: run["tasks"][task]["metrics"].get(metric) for name, run in runs.items()}
            if all(figures.values()):
                differences = {n: paired_difference(samples, run["samples"][task], metric) for n, run in others}
                row = {"task": task, "metric": metric, "examples": len(samples), "figures": figures}
                rows.append({**row, "differences": differences, "other_replies": other_replies})
    if not rows:
        raise UserError(f"{', '.join(runs)} have no task in common.")
    return rows


def draw(rows: list[dict], runs: dict[str, dict], path: Path) -> None:
    """Draw the figures in per cent, under how many of each run are above those of the first run."""
    first, *others = runs
    parts = []
    for name in others:
        signs = [row["figures"][name]["value"] - row["figures"][first]["value"] for row in rows]
        above, below = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
        parts.append(f"{name} is above {first} in {above} of {len(rows)} figures and below in {below}")
    points = {
        name: [
            (100 * figure["value"], *[100 * (figure["stderr"] or 0)] * 2)
            for figure in (row["figures"][name] for row in rows)
        ]
        for name in runs
    }
    names = [f"{row['task']}, {row['metric']}" for row in rows]
    figure, _ = dot_panels("; ".join(parts), names, {"per cent ± standard error (higher is better)": points})
    save_plot(figure, path)


def markdown(runs: dict[str, dict], rows: list[dict], plot: str) -> str:
    first, *others = runs
    header = ["task", "metric", "examples", first]
    for name in others:
        header += [name, f"{name} − {first}", f"other replies in {name}"]
    cells = []
    for row in rows:
        text = partial(figure_text, percent="loss" not in row["metric"])
        line = [row["task"], row["metric"], str(row["examples"]), text(row["figures"][first])]
        for name in others:
            line += [text(row["figures"][name]), text(row["differences"][name])]
            line.append("–" if (count := row["other_replies"][name]) is None else str(count))
        cells.append(line)
    about = [
        f"- {name}: {run['model']}, {run['model_dtype']}, seed {run['seed']}, checkpoint {run['checkpoint'][:12]}, "
        f"commit {run['commit'][:12]}"
        for name, run in runs.items()
    ]
    note = "± is the standard error of the mean over examples; of a difference, over the same examples."
    return "\n".join(["# Comparison", *about, "", note, "", markdown_table(header, cells), f"![{plot}]({plot})", ""])


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and write. Raise `UserError`."""
    args = parse_arguments(argv)
    names = [run.resolve().name for run in args.runs]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{', '.join(names)}: expected two or more directories with different names.")
    if args.output.suffix != ".md":
        raise UserError(f"--output {args.output}: expected the name of a .md file.")
    check_output_file(args.output, replace=True)
    runs = {name: read_run(directory) for name, directory in zip(names, args.runs, strict=True)}
    rows = compare(runs)
    plot = args.output.with_suffix(".png")
    draw([row for row in rows if "loss" not in row["metric"]], runs, plot)  # losses are left to the table
    text = markdown(runs, rows, plot.name)
    with whole_file(args.output) as path:
        path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run_cli(main)
