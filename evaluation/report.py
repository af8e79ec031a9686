"""Write the report of an evaluation: a Markdown file with ours beside the paper's figures, and plots."""

import math
from collections.abc import Sequence
from pathlib import Path

from common.command_io import read_json, whole_file
from common.plots import dot_panels, line_style, panels, save_plot, ticks
from evaluation import ruler
from model_cards.render import figure_text, markdown_table


PAPER = read_json(Path(__file__).with_name("paper.json"))
_TABLES = [PAPER[name] for name in ("table_1", "table_2", "ruler")]
_RULER_METRICS = ("string_match", "answer_first", "lm_eval")


def _mean(figures: list[dict]) -> dict:
    """Return the mean of independent figures {"value", "stderr"}."""
    errors = [figure["stderr"] for figure in figures]
    stderr = None if None in errors else math.sqrt(sum(error**2 for error in errors)) / len(figures)
    return {"value": sum(figure["value"] for figure in figures) / len(figures), "stderr": stderr}


def ruler_means(tasks: dict[str, dict]) -> dict:
    """Return the means of the RULER tasks that were run, each with the same weight; {} without any.

    They are {"by_length": {length: figures}, "all": figures, "tasks": names}. (lm-eval's group counts length 4096 and
    no other.)
    """
    names = [name for name in tasks if name.partition("@")[0] in ruler.TASKS]
    if not names:
        return {}

    def figures(chosen: list[str]) -> dict:
        return {metric: _mean([tasks[name]["metrics"][metric] for name in chosen]) for metric in _RULER_METRICS}

    lengths = sorted({int(name.partition("@")[2]) for name in names})
    by_length = {str(length): figures([n for n in names if n.endswith(f"@{length}")]) for length in lengths}
    return {"by_length": by_length, "all": figures(names), "tasks": sorted({n.partition("@")[0] for n in names})}


def _tasks_table(tasks: dict[str, dict]) -> str:
    rows = []
    for name, task in tasks.items():
        tokens = task["prompt_tokens"]
        about = [str(task["examples"]), str(task["samples_each"]), f"{tokens['min']}–{tokens['max']}"]
        about += [str(task["truncated_prompts"]), str(task["unfinished_replies"])]
        for metric, figure in task["metrics"].items():
            rows.append([name, metric, figure_text(figure, "loss" not in metric), *about])
    header = ["task", "metric", "ours ± s.e.", "examples", "samples each", "prompt tokens", "cut prompts"]
    return markdown_table([*header, "unfinished replies"], rows)


def _ours(results: dict, column: dict) -> dict | None:
    """Return our figure for a column of the paper's tables, or `None` when it was not measured as the paper does."""
    task, metric = column["task"], column["metric"]
    if results["suite"] == "smoke":  # hand-made examples
        return None
    if task == "ruler":
        # The paper's average is over all tasks, with needles in essays.
        is_whole = results["ruler"].get("tasks") == sorted(ruler.TASKS)
        is_comparable = not any("note" in entry for entry in results["tasks"].values())
        return results["ruler"]["all"][metric] if is_whole and is_comparable else None
    return results["tasks"].get(task, {}).get("metrics", {}).get(metric)


def _paper_table(results: dict, table: dict) -> str:
    columns = table["columns"]
    rows = [["**ours**", *(figure_text(_ours(results, c), True) for c in columns)]]
    for index, model in enumerate(PAPER["models"]):
        rows.append([model, *("–" if c["paper"][index] is None else f"{c['paper'][index]:g}" for c in columns)])
    return markdown_table(["per cent", *(column["name"] for column in columns)], rows)


def draw_figures(path: Path, message: str, names: Sequence[str], series: dict[str, Sequence[dict | None]]) -> None:
    """Draw a line for each of the names, with a figure {"value", "stderr"} of each of the series."""
    points = {
        label: [figure and (100 * figure["value"], *[100 * (figure["stderr"] or 0)] * 2) for figure in figures]
        for label, figures in series.items()
    }
    figure, _ = dot_panels(message, names, {"per cent ± standard error (higher is better)": points})
    save_plot(figure, path)


def _draw_lines(path: Path, message: str, series: dict[str, list[tuple[int, float]]], **settings) -> None:
    figure, (axes,) = panels(message)
    for index, (label, points) in enumerate(series.items()):
        axes.plot(*zip(*sorted(points)), line_style(index), marker="o", label=label)
    axes.set(**settings)
    ticks(axes, "x", [length for points in series.values() for length, _ in points])
    save_plot(figure, path)


def _draw(results: dict, directory: Path) -> list[str]:
    """Draw what was measured, and return the names of the plots."""
    drawn = []
    columns = [column for table in _TABLES for column in table["columns"] if _ours(results, column)]
    if columns:
        series = {"ours": [_ours(results, column) for column in columns]}
        for index, model in enumerate(PAPER["models"]):
            values = [column["paper"][index] for column in columns]
            series[model] = [None if value is None else {"value": value / 100, "stderr": None} for value in values]
        drawn.append("paper.png")
        message = f"{results['model']} beside the paper's models"
        draw_figures(directory / drawn[-1], message, [column["name"] for column in columns], series)
    by_length, losses = {}, {}
    for name, entry in results["tasks"].items():
        task, _, length = name.partition("@")
        if task in ruler.TASKS:
            point = int(length), 100 * entry["metrics"]["string_match"]["value"]
            by_length.setdefault(task.removeprefix("ruler_"), []).append(point)
        elif task == "perplexity_by_position":
            losses[name] = [
                (int(metric.partition("@")[2]), each["value"]) for metric, each in entry["metrics"].items()
            ]
    if by_length:
        drawn.append("ruler.png")
        means = (
            f"{100 * figures['string_match']['value']:.0f}% at {int(length):,}"
            for length, figures in results["ruler"]["by_length"].items()
        )
        message = f"RULER: {results['model']} finds {', '.join(means)} tokens"
        labels = {"xlabel": "nominal length, tokens", "ylabel": "string match, per cent\n(higher is better)"}
        _draw_lines(directory / drawn[-1], message, by_length, **labels, xscale="log", ylim=(-3, 103))
    if losses:
        drawn.append("loss_by_position.png")
        message = f"{results['model']}: the loss within a text, by position"
        labels = {"xlabel": "first position, tokens", "ylabel": "loss, nats per token\n(lower is better)"}
        _draw_lines(directory / drawn[-1], message, losses, **labels, xscale="log")
    return drawn


def markdown(results: dict, plots: list[str]) -> str:
    """Return the report, with a line for all that was cut, left out or is not comparable."""
    tasks = results["tasks"]
    lines = [
        f"# {results['model']}: {results['suite']}\n",
        f"{results['parameters']:,} parameters, {results['model_dtype']}, seed {results['seed']}, "
        f"commit {results['commit'][:12]}, checkpoint {results['checkpoint'][:12]}, {results['seconds']} s on "
        f"{results['processes']} × {results['device']}. "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items())
        + ". What each figure means: evaluation/README.md.\n",
    ]
    warnings = [f"{name}: {task['note']}." for name, task in tasks.items() if "note" in task]
    if {*results["sample_commits"]} - {results["commit"]}:
        commits = ", ".join(results["sample_commits"])
        warnings.append(f"The replies were made at commit {commits} and scored at {results['commit']}.")
    for name, task in tasks.items():
        if task["truncated_prompts"]:
            warnings.append(f"{name}: {task['truncated_prompts']} prompts were cut to fit; their zeros say nothing.")
        if task["unfinished_replies"]:
            of = task["examples"] * task["samples_each"]
            warnings.append(f"{name}: {task['unfinished_replies']} of {of} replies were still going at the limit.")
    lines += [f"- {warning}" for warning in warnings]
    lines += ["", _tasks_table(tasks)]
    if results["ruler"]:
        rows = [
            [length, *(figure_text(figures[metric], True) for metric in _RULER_METRICS)]
            for length, figures in [*results["ruler"]["by_length"].items(), ("all", results["ruler"]["all"])]
        ]
        missing = [task for task in ruler.TASKS if task not in results["ruler"]["tasks"]]
        lines += ["## RULER: mean of the tasks that were run\n", markdown_table(["length", *_RULER_METRICS], rows)]
        if "ruler_cwe" in results["ruler"]["tasks"]:
            lines.append("ruler_cwe begins with its worked example, as RULER's prompt does and lm-eval's does not.\n")
        lines += [f"Not run, and not in the means: {', '.join(missing)}.\n"] if missing else []
    beside = [
        f"### {table['title']}\n\n{_paper_table(results, table)}"
        for table in _TABLES
        if any(_ours(results, column) for column in table["columns"])
    ]
    lines += [f"## Beside the paper\n\n{PAPER['source']}.\n", *beside] if beside else []
    lines += [f"![{plot}]({plot})" for plot in plots]
    return "\n".join(lines) + "\n"


def write(results: dict, directory: Path) -> None:
    """Write report.md and its plots, each whole or not at all."""
    text = markdown(results, _draw(results, directory))
    with whole_file(directory / "report.md") as path:
        path.write_text(text, encoding="utf-8")
