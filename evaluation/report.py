"""Write the report of an evaluation: a Markdown file with our figures next to the paper's."""

import math
from collections import defaultdict
from pathlib import Path

from evaluation import names
from iha.cards import figure_text, is_share, markdown_table
from iha.files import read_json, whole_file


PAPER = read_json(Path(__file__).with_name("paper.json"))


def _mean(tasks: list[dict]) -> dict:
    """Return the mean of RULER's metric over tasks, {"value", "stderr"}. The error assumes independent figures."""
    figures = [task["metrics"]["string_match"] for task in tasks]
    errors = [figure["stderr"] for figure in figures]
    stderr = None if None in errors else math.hypot(*errors) / len(figures)
    return {"value": sum(figure["value"] for figure in figures) / len(figures), "stderr": stderr}


def ruler_means(tasks: dict[str, dict]) -> dict:
    """Return the means of the RULER tasks that were run, each with the same weight, or {} if none was run.

    They are {"by_length": {length: figure}, "all": figure, "tasks": names}. (lm-eval's group counts only length 4096.)
    """
    by_length: dict[int, dict] = defaultdict(dict)
    for name, task in tasks.items():
        kind, _, length = name.partition("@")
        if kind in names.RULER:
            by_length[int(length)][kind] = task
    if not by_length:
        return {}
    return {
        "by_length": {str(length): _mean([*by_length[length].values()]) for length in sorted(by_length)},
        "all": _mean([task for of_length in by_length.values() for task in of_length.values()]),
        "tasks": sorted({kind for of_length in by_length.values() for kind in of_length}),
    }


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


def _changes(results: dict) -> list[str]:
    """Return the device and the versions with which a run began, if it ended with others."""
    first = results["first_versions"] | {"device": results["first_device"]}
    last = results["versions"] | {"device": results["device"]}
    return [f"{name} {value}" for name, value in first.items() if value != last.get(name)]


def _ours(results: dict, column: dict) -> dict | None:
    """Return our figure for a column of the paper's tables, or `None` if it was not measured as in the paper."""
    task = column["task"]
    metric = column["metric"]
    if results["suite"] == "smoke":  # hand-made examples
        return None
    if task == "ruler":
        # The paper's average is over all tasks and these lengths.
        lengths = [str(length) for length in names.DEFAULTS["lengths"]]
        has_lengths = list(results["ruler"].get("by_length", ())) == lengths
        is_whole = has_lengths and results["ruler"].get("tasks") == sorted(names.RULER)
        has_notes = any(
            "note" in entry for name, entry in results["tasks"].items() if name.partition("@")[0] in names.RULER
        )
        return results["ruler"]["all"] if is_whole and not has_notes else None
    found = results["tasks"].get(task, {})
    return None if "note" in found else found.get("metrics", {}).get(metric)


def short_fingerprint(checkpoint: str) -> str:
    """Return the beginning of a checkpoint's hash, or of the commit of one on the Hub, NAME@COMMIT."""
    return checkpoint.rpartition("@")[2][:12]


def _paper_table(results: dict, table: dict) -> str:
    columns = table["columns"]
    rows = [["**ours**", *(figure_text(_ours(results, c), True) for c in columns)]]
    for index, model in enumerate(PAPER["models"]):
        rows.append([model, *("–" if c["paper"][index] is None else f"{c['paper'][index]:g}" for c in columns)])
    return markdown_table(["per cent", *(column["name"] for column in columns)], rows)


def markdown(results: dict) -> str:
    """Return the report, which says in separate lines what was cut or left out."""
    tasks = results["tasks"]
    means = results["ruler"]
    lines = [
        f"# {results['model']}: {results['suite']}\n",
        f"{results['parameters']:,} parameters, {results['model_dtype']}, seed {results['seed']}, "
        f"commit {results['commit'][:12]}, checkpoint {short_fingerprint(results['checkpoint'])}, "
        f"{results['seconds']} s on {results['processes']} × {results['device']}. "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items())
        + ". What each figure means: evaluation/README.md.\n",
    ]
    first = results["first_commit"]
    if first != results["commit"]:
        lines.append(f"- The run began at commit {first}, and was scored at {results['commit']}.")
    if changes := _changes(results):
        lines.append(f"- The run began with {', '.join(changes)}.")
    for name, task in tasks.items():
        of = task["examples"] * task["samples_each"]
        unfinished = task["unfinished_replies"]
        if unfinished:
            lines.append(f"- {name}: {unfinished} of {of} replies were still going at the limit.")
        if "note" in task:
            lines.append(f"- {name} was {task['note']}, so it cannot be compared with published figures.")
    lines += ["", _tasks_table(tasks)]
    if means:
        rows = [
            [length, figure_text(figure, True)]
            for length, figure in [*means["by_length"].items(), ("all", means["all"])]
        ]
        lines += ["## RULER: mean of the tasks that were run\n", markdown_table(["length", "string_match"], rows)]
        missing = [task for task in names.RULER if task not in means["tasks"]]
        if missing:
            lines.append(f"Not run, and not in the means: {', '.join(missing)}.\n")
    beside = [
        f"### {table['title']}\n\n{_paper_table(results, table)}"
        for table in (PAPER[name] for name in ("table_1", "table_2", "ruler"))
        if any(_ours(results, column) for column in table["columns"])
    ]
    lines += [f"## Next to the paper\n\n{PAPER['source']}.\n", *beside] if beside else []
    return "\n".join(lines) + "\n"


def write(results: dict, directory: Path) -> str:
    """Write report.md, whole or not at all, and return the text."""
    text = markdown(results)
    with whole_file(directory / "report.md") as path:
        path.write_text(text, encoding="utf-8")
    return text
