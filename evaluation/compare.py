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

from evaluation.report import draw_figures
from model_cards.render import Results, Task, figure_text, markdown_table


# What two evaluations must have in common in a task.
SETTINGS = ("task_hash", "samples_each", "shots", "generation", "chat")


class ComparedTask(Task):
    """Name what decides whether two evaluations of a task can be compared."""

    task_hash: str
    shots: int
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


def check_comparable(runs: dict[str, dict]) -> list[str]:
    """Return the tasks that all `runs` have.

    Raise `UserError` without one, and for a task whose examples or settings differ between the runs.
    """
    (first_name, first), *others = runs.items()
    tasks = [task for task in first["tasks"] if all(task in run["tasks"] for run in runs.values())]
    if not tasks:
        raise UserError(f"{', '.join(runs)} have no task in common.")
    for task in tasks:
        for name, other in others:
            mine, theirs = first["tasks"][task], other["tasks"][task]
            for what in SETTINGS:
                if mine.get(what, theirs.get(what)) != theirs.get(what, mine.get(what)):
                    raise UserError(f"{task} has another {what} in {name} than in {first_name}: evaluate both alike.")
            if first["samples"][task].keys() != other["samples"][task].keys():
                raise UserError(
                    f"{task} has other examples in {name} than in {first_name}: give both one --limit and one --data. "
                    f"RULER's examples depend on --seed and on the tokenizer, too."
                )
    return tasks


def paired_difference(before: dict[tuple, dict], after: dict[tuple, dict], metric: str) -> dict | None:
    """Return the mean of after - before over the examples, {"value", "stderr"}.

    It is `None` unless the metric is a number for each example.
    """
    pairs = [(before[document].get(metric), after[document].get(metric)) for document in before]
    if not all(isinstance(value, (bool, int, float)) for pair in pairs for value in pair):
        return None
    differences = [float(then) - float(now) for now, then in pairs]
    return {"value": mean(differences), "stderr": float(sem(differences)) if len(differences) > 1 else None}


def compare(runs: dict[str, dict], tasks: list[str]) -> list[dict]:
    """Return one row per task and metric: {"task", "metric", "examples", "figures", "differences", "other_replies"}.

    The metrics are those that all runs have. "figures" are by run. "differences" and "other_replies", the number of
    examples with another reply than in the first run (`None` for a task without replies), are by run but the first.
    """
    first, *others = runs
    rows = []
    for task in tasks:
        samples = {name: run["samples"][task] for name, run in runs.items()}
        reference = samples[first]
        other_replies = {
            name: sum(samples[name][key].get("replies") != row["replies"] for key, row in reference.items())
            if all("replies" in row for row in reference.values())
            else None
            for name in others
        }
        metrics = {name: run["tasks"][task]["metrics"] for name, run in runs.items()}
        for metric in metrics[first]:
            if not all(metric in each for each in metrics.values()):
                continue
            figures = {name: each[metric] for name, each in metrics.items()}
            differences = {name: paired_difference(reference, samples[name], metric) for name in others}
            row = {"task": task, "metric": metric, "examples": len(reference), "figures": figures}
            rows.append({**row, "differences": differences, "other_replies": other_replies})
    return rows


def headline(rows: list[dict]) -> str:
    """Return how many figures of each run are above those of the first run, and how many below."""
    parts = []
    for name in rows[0]["differences"] if rows else ():
        first, *_ = rows[0]["figures"]
        signs = [row["figures"][name]["value"] - row["figures"][first]["value"] for row in rows]
        above, below = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
        parts.append(f"{name} is above {first} in {above} of {len(rows)} figures and below in {below}")
    return "; ".join(parts)


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
    rows = compare(runs, check_comparable(runs))
    plot = args.output.with_suffix(".png")
    drawn = [row for row in rows if "loss" not in row["metric"]]  # losses are left to the table
    series = {name: [row["figures"][name] for row in drawn] for name in runs}
    draw_figures(plot, headline(drawn), [f"{row['task']}, {row['metric']}" for row in drawn], series)
    text = markdown(runs, rows, plot.name)
    with whole_file(args.output) as path:
        path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run_cli(main)
