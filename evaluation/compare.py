"""Compare the evaluations of checkpoints with that of the first one, example by example.

Read output directories of evaluation.run, and write a Markdown table and a plot next to it: the figures of all, their
differences from the first with standard errors over the same examples, and how many examples have another reply.

example: python -m evaluation.compare outputs/evaluation/smollm2 outputs/evaluation/smollm2-iha --output comparison.md
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NotRequired

from scipy.stats import sem
from typing_extensions import TypedDict

from evaluation.report import short_fingerprint
from iha import plots
from iha.cards import Results, Task, figure_text, is_share, markdown_table
from iha.errors import UserError, run_cli
from iha.files import check_output_file, expanded, read_json, read_jsonl, whole_file


# Settings of a task that evaluations must have in common. The hash covers its shots.
SETTINGS = ("task_hash", "samples_each", "generation", "chat")
# Facts of a run that may change its figures a little: a comparison names those that differ. The first ones are those
# of the oldest replies.
FACTS = ("first_commit", "first_device", "first_versions", "device", "versions", "batch_size")


class ComparedTask(Task):
    """Hold a task with the settings that evaluations must have in common."""

    task_hash: str
    generation: dict | None
    chat: bool


class ComparedResults(Results):
    model: str
    tasks: dict[str, ComparedTask]


class Sample(TypedDict):
    doc_id: int
    doc_hash: str
    prompt_hash: NotRequired[str]
    replies: NotRequired[list[str]]


def names_of(directories: Sequence[Path]) -> list[str]:
    """Return the name of each directory, with as many folders above it as tell all apart. Raise `UserError`."""
    paths = [directory.resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        raise UserError(f"{', '.join(map(str, directories))}: expected different directories.")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def read_run(directory: Path, name: str) -> dict:
    """Return results.json of an output directory, with its "name" and "samples", {task: {document: row}}.

    Raise `UserError`.
    """
    results = read_json(directory / "results.json", ComparedResults)
    rows = {task: read_jsonl(directory / f"samples_{task}.jsonl", Sample) for task in results["tasks"]}
    samples = {task: {(row["doc_id"], row["doc_hash"]): row for row in found} for task, found in rows.items()}
    return results | {"name": name, "samples": samples}


def check_alike(task: str, reference: dict, other: dict) -> None:
    """Raise `UserError` if the examples or settings of a task differ between two runs."""
    names = f"{other['name']} than in {reference['name']}"
    for what in SETTINGS:
        if reference["tasks"][task][what] != other["tasks"][task][what]:
            raise UserError(f"{task} has another {what} in {names}: evaluate both alike.")
    if reference["samples"][task].keys() != other["samples"][task].keys():
        raise UserError(
            f"{task} has other examples in {names}: give both one --limit and one --data. RULER's examples depend on "
            f"--seed and on the tokenizer, too."
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


def other_replies(before: dict[tuple, dict], after: dict[tuple, dict]) -> int | None:
    """Return how many examples have another reply, or `None` for a task without replies."""
    if not all("replies" in row for row in before.values()):
        return None
    return sum(row.get("replies") != before[key]["replies"] for key, row in after.items())


def compare(runs: Sequence[dict]) -> list[dict]:
    """Return one row for each task and metric that all runs have.

    It holds {"task", "metric", "examples", "figures", "differences", "other_replies", "other_prompts"}: the figures of
    all runs, and for each run but the first its difference from the first, its number of examples with another reply
    (`None` for a task without replies), and whether its prompts differ. Raise `UserError` if the runs have no task in
    common, or if their settings or examples differ.
    """
    reference, *others = runs
    rows = []
    for task in reference["tasks"]:
        if not all(task in run["tasks"] for run in others):
            continue
        for run in others:
            check_alike(task, reference, run)
        before, *after = (run["samples"][task] for run in runs)
        metrics = [run["tasks"][task]["metrics"] for run in runs]
        rows += [
            {
                "task": task,
                "metric": metric,
                "examples": len(before),
                "figures": [of_run[metric] for of_run in metrics],
                "differences": [paired_difference(before, each, metric) for each in after],
                "other_replies": [other_replies(before, each) for each in after],
                "other_prompts": [
                    any(row.get("prompt_hash") != before[key].get("prompt_hash") for key, row in each.items())
                    for each in after
                ],
            }
            for metric in metrics[0]
            if all(metric in of_run for of_run in metrics)
        ]
    if not rows:
        raise UserError(f"{', '.join(run['name'] for run in runs)} have no task in common.")
    return rows


def draw(rows: list[dict], names: list[str], path: Path) -> None:
    """Draw the figures in per cent. The title says how many of each run are above those of the first."""
    counts = []
    for number, name in enumerate(names[1:], 1):
        signs = [row["figures"][number]["value"] - row["figures"][0]["value"] for row in rows]
        above = sum(sign > 0 for sign in signs)
        below = sum(sign < 0 for sign in signs)
        counts.append(f"{name} is above {names[0]} in {above} of {len(rows)} figures and below in {below}")
    points: dict[str, list] = {
        name: [(100 * figure["value"], *[100 * (figure["stderr"] or 0)] * 2) for figure in figures]
        for name, figures in zip(names, zip(*(row["figures"] for row in rows)))
    }
    labels = [f"{row['task']}, {row['metric']}" for row in rows]
    figure, (axes,) = plots.panels("\n".join(counts), height=1 + 0.19 * len(labels) * len(names))
    plots.dots(axes, labels, points)
    axes.set(xlabel="per cent ± standard error (higher is better)")
    plots.save_plot(figure, path)


def markdown(rows: list[dict], runs: Sequence[dict], plot: str | None) -> str:
    first, *others = (run["name"] for run in runs)
    header = ["task", "metric", "examples", first, *others]
    for name in others:
        header += [f"{name} − {first}", "other replies"]
    cells = []
    for row in rows:
        text = partial(figure_text, percent=is_share(row["metric"]))
        line = [row["task"], row["metric"], str(row["examples"]), *map(text, row["figures"])]
        for difference, changed in zip(row["differences"], row["other_replies"]):
            line += [text(difference), "–" if changed is None else str(changed)]
        cells.append(line)
    about = [
        f"- {run['name']}: {run['model']}, {run['model_dtype']}, seed {run['seed']}, "
        f"checkpoint {short_fingerprint(run['checkpoint'])}, commit {run['commit'][:12]}"
        for run in runs
    ]
    note = "± is the standard error of the mean over examples; of a difference, over the same examples."
    # Chat templates and tokenizers write one example in several ways.
    prompts = []
    for number, name in enumerate(others):
        rewritten = dict.fromkeys(row["task"] for row in rows if row["other_prompts"][number])
        if rewritten:
            prompts += [f"{name} had other prompts than {first} in {', '.join(rewritten)}.", ""]
    facts = []
    for run in runs[1:]:
        if differing := [name for name in FACTS if run.get(name) != runs[0].get(name)]:
            facts += [f"{run['name']} had another {', '.join(differing)} than {first}.", ""]
    image = [f"![{plot}]({plot})", ""] if plot else []
    return "\n".join(["# Comparison", *about, "", note, "", *prompts, *facts, markdown_table(header, cells), *image])


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and write. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=expanded, help="output directory of evaluation.run")
    parser.add_argument("others", type=expanded, nargs="+", help="output directories of other runs")
    parser.add_argument(
        "--output",
        type=expanded,
        required=True,
        help="Markdown file to write or replace, with the plot next to it, a .png",
    )
    args = parser.parse_args(argv)
    if args.output.suffix != ".md":
        raise UserError(f"--output {args.output}: expected the name of a .md file.")
    plot = args.output.with_suffix(".png")
    for file in (args.output, plot):
        check_output_file(file, replace=True)
    directories = [args.reference, *args.others]
    names = names_of(directories)
    runs = [read_run(directory, name) for directory, name in zip(directories, names)]
    rows = compare(runs)
    drawn = [row for row in rows if is_share(row["metric"])]  # losses are in the table only
    if drawn:
        draw(drawn, names, plot)
    text = markdown(rows, runs, plot.name if drawn else None)
    with whole_file(args.output) as path:
        path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run_cli(main)
