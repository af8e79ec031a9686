"""Compare evaluations of several checkpoints, example by example: the figures of each, the difference from the first
with its standard error over the same examples, and how many examples have another reply.

Reads the output directories of evaluation.run and writes a Markdown table and a plot beside it.

example: python -m evaluation.compare outputs/evaluation/smollm2 outputs/evaluation/smollm2-iha --output comparison.md
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from common.command_io import UserError, check_output_file, read_json, read_jsonl, run_cli, whole_file


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output directories of evaluation.run, the reference first")
    parser.add_argument("--output", type=Path, required=True, help="Markdown file to write; the plot goes beside it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from matplotlib.figure import Figure

from evaluation.report import figure_text, markdown_table, save_plot


NEEDED = ("metrics", "task_hash", "samples_each", "shots", "generation")  # of each task in a results.json


def read_run(directory: Path) -> dict:
    """{"results": results.json, "samples": {task: {document: row}}} of an output directory. Raises `UserError`."""
    if not (directory / "results.json").is_file():
        raise UserError(
            f"{directory} holds no results.json: expected the output directory of a finished evaluation.run."
        )
    results = read_json(directory / "results.json")
    tasks = results.get("tasks")
    if not isinstance(tasks, dict) or not all(
        isinstance(task, dict) and task.keys() >= set(NEEDED) for task in tasks.values()
    ):
        raise UserError(
            f"{directory / 'results.json'} holds no tasks with {', '.join(NEEDED)}: expected what evaluation.run writes."
        )
    samples = {
        task: {(row["doc_id"], row["doc_hash"]): row for row in read_jsonl(directory / f"samples_{task}.jsonl")}
        for task in tasks
    }
    return {"results": results, "samples": samples}


def check_comparable(runs: dict[str, dict]) -> list[str]:
    """The tasks that all `runs` have. Raises `UserError` without one, and for a task whose examples or settings differ
    between the runs."""
    (first_name, first), *others = runs.items()
    tasks = [
        task for task in first["results"]["tasks"] if all(task in other["results"]["tasks"] for _, other in others)
    ]
    if not tasks:
        raise UserError(f"{', '.join(runs)} have no task in common.")
    for task in tasks:
        for name, other in others:
            for what in ("task_hash", "samples_each", "shots", "generation"):
                then, now = (run["results"]["tasks"][task][what] for run in (first, other))
                if then != now:
                    raise UserError(f"{task} has another {what} in {name} than in {first_name}: evaluate both alike.")
            if first["samples"][task].keys() != other["samples"][task].keys():
                raise UserError(f"{task} has other examples in {name} than in {first_name}: give both one --limit.")
    return tasks


def paired_difference(before: dict[tuple, dict], after: dict[tuple, dict], metric: str) -> dict | None:
    """Mean of after - before over the examples, {"value", "stderr"}; None unless it is a number for each example."""
    pairs = [(before[document].get(metric), after[document].get(metric)) for document in before]
    if not all(isinstance(value, (bool, int, float)) for pair in pairs for value in pair):
        return None
    differences = [float(then) - float(now) for now, then in pairs]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return {"value": mean(differences), "stderr": error}


def compare(runs: dict[str, dict], tasks: list[str]) -> list[dict]:
    """One row a task and metric: {"task", "metric", "examples"}, "figures" by run, and by run but the first
    "differences" and "other_replies", the number of examples with another reply than in the first."""
    first, *others = runs
    rows = []
    for task in tasks:
        samples = {name: run["samples"][task] for name, run in runs.items()}
        reference = samples[first]
        for metric in runs[first]["results"]["tasks"][task]["metrics"]:
            row = {"task": task, "metric": metric, "examples": len(reference)}
            row["figures"] = {name: run["results"]["tasks"][task]["metrics"][metric] for name, run in runs.items()}
            row["differences"] = {name: paired_difference(reference, samples[name], metric) for name in others}
            row["other_replies"] = {
                name: sum(samples[name][key].get("replies") != kept.get("replies") for key, kept in reference.items())
                for name in others
            }
            rows.append(row)
    return rows


def markdown(runs: dict[str, dict], rows: list[dict], plot: str) -> str:
    first, *others = runs
    header = ["task", "metric", "examples", first]
    for name in others:
        header += [name, f"{name} − {first}", f"other replies in {name}"]
    cells = []
    for row in rows:
        percent = "loss" not in row["metric"]
        line = [row["task"], row["metric"], str(row["examples"]), figure_text(row["figures"][first], percent)]
        for name in others:
            line += [
                figure_text(row["figures"][name], percent),
                figure_text(row["differences"][name], percent),
                str(row["other_replies"][name]),
            ]
        cells.append(line)
    about = [
        f"- {name}: {run['results']['model']}, {run['results']['model_dtype']}, checkpoint "
        f"{run['results']['checkpoint'][:12]}, commit {run['results']['commit'][:12]}"
        for name, run in runs.items()
    ]
    note = "± is the standard error of the mean over examples; of a difference, over the same examples."
    return "\n".join(["# Comparison", *about, "", note, "", markdown_table(header, cells), f"![{plot}]({plot})", ""])


def draw(rows: list[dict], path: Path) -> None:
    """Bars with standard errors, a group for each task and metric; losses are left to the table."""
    rows = [row for row in rows if "loss" not in row["metric"]]
    figure = Figure(figsize=(3 + 0.9 * len(rows), 4.5))
    axes = figure.subplots()
    for index, name in enumerate(rows[0]["figures"] if rows else ()):
        figures = [row["figures"][name] for row in rows]
        width = 0.8 / len(rows[0]["figures"])
        places = [place + index * width for place in range(len(rows))]
        errors = [100 * (figure["stderr"] or 0) for figure in figures]
        axes.bar(places, [100 * figure["value"] for figure in figures], width, yerr=errors, label=name)
    axes.set_xticks(range(len(rows)), [f"{row['task']}\n{row['metric']}" for row in rows], rotation=45, ha="right")
    axes.set_ylabel("per cent")
    axes.legend(fontsize="small")
    figure.tight_layout()
    save_plot(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and write. Raises `UserError`."""
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
    draw(rows, plot)
    text = markdown(runs, rows, plot.name)
    with whole_file(args.output) as path:
        path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run_cli(main)
