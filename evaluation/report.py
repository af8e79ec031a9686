"""Write the report of an evaluation as a Markdown file."""

import math
from collections import defaultdict
from pathlib import Path

from evaluation.options import RULER
from iha.cards import figure_text, is_share, markdown_table
from iha.files import whole_file


def ruler_means(tasks: dict[str, dict]) -> dict:
    """Return the means of the RULER tasks that were run, each with the same weight, or {} if none was run.

    They are {"by_length": {length: figure}, "all": figure, "tasks": names}. (lm-eval's group counts only length 4096.)
    """
    by_length: dict[int, dict] = defaultdict(dict)
    for name, task in tasks.items():
        kind, _, length = name.partition("@")
        if kind in RULER:
            by_length[int(length)][kind] = task
    if not by_length:
        return {}
    return {
        "by_length": {str(length): _mean([*by_length[length].values()]) for length in sorted(by_length)},
        "all": _mean([task for of_length in by_length.values() for task in of_length.values()]),
        "tasks": sorted({kind for of_length in by_length.values() for kind in of_length}),
    }


def _mean(tasks: list[dict]) -> dict:
    """Return the mean of RULER's metric over tasks, {"value", "stderr"}. The error assumes independent figures."""
    figures = [task["metrics"]["string_match"] for task in tasks]
    errors = [figure["stderr"] for figure in figures]
    stderr = None if None in errors else math.hypot(*errors) / len(figures)
    return {"value": sum(figure["value"] for figure in figures) / len(figures), "stderr": stderr}


def short_fingerprint(checkpoint: str) -> str:
    """Return the beginning of a checkpoint's hash, or of the commit of one on the Hub, NAME@COMMIT."""
    return checkpoint.rpartition("@")[2][:12]


def markdown(results: dict) -> str:
    """Return the report, which says in separate lines what was cut or left out."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        f"# {results['model']}: {results['suite']}\n",
        f"{results['parameters']:,} parameters, {results['model_dtype']}, seed {results['seed']}, "
        f"commit {results['commit'][:12]}, checkpoint {short_fingerprint(results['checkpoint'])}, "
        f"{results['seconds']} s on {results['processes']} × {results['device']}. {versions}. "
        "What each figure means: evaluation/README.md.\n",
        *_notes(results["tasks"]),
        "",
        _tasks_table(results["tasks"]),
    ]
    if means := results["ruler"]:
        rows = [[length, figure_text(figure, True)] for length, figure in means["by_length"].items()]
        rows.append(["all", figure_text(means["all"], True)])
        lines += ["## RULER: mean of the tasks that were run\n", markdown_table(["length", "string_match"], rows)]
        if missing := [task for task in RULER if task not in means["tasks"]]:
            lines.append(f"Not run, and not in the means: {', '.join(missing)}.\n")
    return "\n".join(lines) + "\n"


def _notes(tasks: dict[str, dict]) -> list[str]:
    """Return lines on replies that were cut, and on tasks that options changed."""
    lines = []
    for name, task in tasks.items():
        if task["unfinished_replies"]:
            replies = f"{task['unfinished_replies']} of {task['examples'] * task['samples_each']} replies"
            lines.append(f"- {name}: {replies} were still going at the limit.")
        if "note" in task:
            lines.append(f"- {name} was {task['note']}, so it cannot be compared with published figures.")
    return lines


def _tasks_table(tasks: dict[str, dict]) -> str:
    rows = []
    for name, task in tasks.items():
        tokens = task["prompt_tokens"]
        about = [str(task["examples"]), str(task["samples_each"]), f"{tokens['min']}–{tokens['max']}"]
        about.append(str(task["unfinished_replies"]))
        for metric, figure in task["metrics"].items():
            rows.append([name, metric, figure_text(figure, is_share(metric)), *about])
    header = ["task", "metric", "ours ± s.e.", "examples", "samples each", "prompt tokens", "unfinished replies"]
    return markdown_table(header, rows)


def write(results: dict, directory: Path) -> str:
    """Write report.md, whole or not at all, and return the text."""
    text = markdown(results)
    with whole_file(directory / "report.md") as path:
        path.write_text(text, encoding="utf-8")
    return text
