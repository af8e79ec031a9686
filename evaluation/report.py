"""The report of an evaluation: a Markdown file with ours beside the paper's figures, and plots."""

import math
from pathlib import Path

from matplotlib.figure import Figure

from common.command_io import read_json, whole_file
from evaluation import ruler
from model_cards.render import figure_text, markdown_table


PAPER = read_json(Path(__file__).with_name("paper.json"))
_RULER_METRICS = ("string_match", "answer_first", "lm_eval")


def _mean(figures: list[dict]) -> dict:
    """Mean of independent figures {"value", "stderr"}."""
    errors = [figure["stderr"] for figure in figures]
    stderr = None if None in errors else math.sqrt(sum(error**2 for error in errors)) / len(figures)
    return {"value": sum(figure["value"] for figure in figures) / len(figures), "stderr": stderr}


def ruler_means(tasks: dict[str, dict]) -> dict:
    """Means of the RULER tasks that were run: {"by_length": {length: figures}, "all": figures, "tasks": names}, every
    task with the same weight; empty without any. (lm-eval's group counts length 4096 and no other.)"""
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


def _ours(results: dict, task: str, metric: str) -> dict | None:
    if task == "ruler":
        # The paper's average is over all tasks.
        is_whole = results["ruler"].get("tasks") == sorted(ruler.TASKS)
        return results["ruler"]["all"][metric] if is_whole else None
    return results["tasks"].get(task, {}).get("metrics", {}).get(metric)


def _paper_table(results: dict, table: dict) -> str:
    columns = table["columns"]
    rows = [["**ours**", *(figure_text(_ours(results, c["task"], c["metric"]), True) for c in columns)]]
    for index, model in enumerate(PAPER["models"]):
        rows.append([model, *("–" if c["paper"][index] is None else f"{c['paper'][index]:g}" for c in columns)])
    return markdown_table(["per cent", *(column["name"] for column in columns)], rows)


def _plot_paper(results: dict, path: Path) -> bool:
    columns = [
        column
        for table in ("table_1", "table_2", "ruler")
        for column in PAPER[table]["columns"]
        if _ours(results, column["task"], column["metric"])
    ]
    if not columns:
        return False
    figure = Figure(figsize=(2 + 1.6 * len(columns), 4))
    axes, width = figure.subplots(), 0.8 / (len(PAPER["models"]) + 1)
    ours = [_ours(results, column["task"], column["metric"]) for column in columns]
    series = {"ours": [100 * figure["value"] for figure in ours]}
    series |= {model: [c["paper"][i] or math.nan for c in columns] for i, model in enumerate(PAPER["models"])}
    for index, (name, values) in enumerate(series.items()):
        errors = [100 * (figure["stderr"] or 0) for figure in ours] if name == "ours" else None
        places = [place + index * width for place in range(len(columns))]
        axes.bar(places, values, width, label=name, yerr=errors, color="black" if name == "ours" else None)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(columns))], [c["name"] for c in columns])
    axes.set_ylabel("per cent")
    axes.legend(fontsize="small")
    figure.tight_layout()
    save_plot(figure, path)
    return True


def _plot_ruler(results: dict, path: Path) -> bool:
    if not results["ruler"]:
        return False
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for task in results["ruler"]["tasks"]:
        points = sorted(
            (int(name.partition("@")[2]), 100 * entry["metrics"]["string_match"]["value"])
            for name, entry in results["tasks"].items()
            if name.partition("@")[0] == task
        )
        axes.plot(*zip(*points), marker="o", label=task.removeprefix("ruler_"))
    axes.set(xscale="log", xlabel="nominal length, tokens", ylabel="string match, per cent", ylim=(-3, 103))
    axes.legend(fontsize="x-small", ncols=2)
    figure.tight_layout()
    save_plot(figure, path)
    return True


def _plot_loss(results: dict, path: Path) -> bool:
    entries = {name: t for name, t in results["tasks"].items() if name.startswith("perplexity_by_position")}
    if not entries:
        return False
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, entry in entries.items():
        points = [(int(metric.partition("@")[2]), figure["value"]) for metric, figure in entry["metrics"].items()]
        axes.plot(*zip(*points), marker="o", label=name)
    axes.set(xscale="log", xlabel="first position, tokens", ylabel="loss, nats per token")
    axes.legend(fontsize="small")
    figure.tight_layout()
    save_plot(figure, path)
    return True


def save_plot(figure: Figure, path: Path) -> None:
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=90, format="png")


def markdown(results: dict, plots: list[str]) -> str:
    """The report. Nothing that was cut, left out or is not comparable goes without a line."""
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
    for name, task in tasks.items():
        if task["truncated_prompts"]:
            warnings.append(f"{name}: {task['truncated_prompts']} prompts were cut to fit; their zeros say nothing.")
        if task["unfinished_replies"]:
            of = task["examples"] * task["samples_each"]
            warnings.append(f"{name}: {task['unfinished_replies']} of {of} replies were still going at the limit.")
    if any("lm_eval_same_string" in task["metrics"] for task in tasks.values()):
        warnings.append("MATH-500: lm-eval's own exact match needs antlr 4.11; lm_eval_same_string compares strings.")
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
        for table in (PAPER["table_1"], PAPER["table_2"], PAPER["ruler"])
        if any(_ours(results, column["task"], column["metric"]) for column in table["columns"])
    ]
    lines += [f"## Beside the paper\n\n{PAPER['source']}.\n", *beside] if beside else []
    lines += [f"![{plot}]({plot})" for plot in plots]
    return "\n".join(lines) + "\n"


def write(results: dict, directory: Path) -> None:
    """Writes report.md and its plots, each whole or not at all."""
    plots = {"paper.png": _plot_paper, "ruler.png": _plot_ruler, "loss_by_position.png": _plot_loss}
    drawn = [name for name, plot in plots.items() if plot(results, directory / name)]
    with whole_file(directory / "report.md") as path:
        path.write_text(markdown(results, drawn), encoding="utf-8")
