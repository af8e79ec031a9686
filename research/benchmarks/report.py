"""Write research/benchmarks/results/README.md from the JSON files beside it.

It holds targets, measurements and the predictions of the cost model. A JSON file holds rows. A row holds its setting
and, by name, "seconds", "extra_bytes" if they were measured, "ratios", and the same ratios as "predicted" by the cost
model, if it predicts them.

example: python -m research.benchmarks.report
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from common.command_io import read_json, run_cli, whole_file
from research.benchmarks.options import RESULTS


PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (research/benchmarks/results)")
if __name__ == "__main__":
    run_cli(PARSER.parse_args)  # before the import below, which takes seconds

from research.benchmarks import default_form


@dataclass(frozen=True)
class Target:
    """Limit the ratio `ratio` to at most `limit` in the row of {file}.json that has all of `setting`.

    `why` says why it is missed, and is shown only if it is.
    """

    title: str
    file: str
    ratio: str
    limit: float
    setting: dict
    why: str = ""


WINDOWS = (
    "SDPA takes 1.25 times the time a pair in blocks of 128 queries that it takes in a long causal row, computes a "
    "quarter more pairs, and mixing, rotation and collapse come on top"
)


def schedule_target(part: str, tokens: int, limit: float) -> Target:
    setting = {"tokens": tokens, "part": f"attention, {part}"}
    title = f"schedule of attention modules, P = 4, {part}, N = {tokens}"
    return Target(title, "schedule", "4 iha + 1 mha / 5 mha", limit, setting, why=WINDOWS)


TARGETS = [
    schedule_target("forward", 4096, 1.10),
    schedule_target("forward", 8192, 0.95),
    schedule_target("forward + backward", 4096, 1.20),
    schedule_target("forward + backward", 8192, 1.10),
    Target("decoding, converted SmolLM2, P = 2, N = 512", "decode_model", "iha / llama", 1.3, {"tokens": 512}),
]


def find(results: dict[str, dict], target: Target) -> dict:
    """Return the row that a target is about, or raise a KeyError where nothing or more than one row fits."""
    rows = [row for row in results[target.file]["rows"] if target.setting.items() <= row.items()]
    if len(rows) != 1 or target.ratio not in rows[0]["ratios"]:
        raise KeyError(
            f"{target.file}.json has {len(rows)} rows with {target.setting} for {target.ratio!r}; one is expected."
        )
    return rows[0]


def line(results: dict[str, dict], target: Target) -> str:
    row = find(results, target)
    measured, predicted = row["ratios"][target.ratio], row["predicted"].get(target.ratio)
    figures = (f"≤ {target.limit:.3g}", f"{measured:.3f}")
    model = "" if predicted is None else f"{predicted:.3f}"
    verdict = ("yes", "") if measured <= target.limit else ("**no**", target.why)
    cells = (target.title, f"`{target.ratio}`", *figures, model, *verdict)
    return f"| {' | '.join(cells)} |"


def default_lines(results: list[dict]) -> list[str]:
    """Return the default of an "iha" layer over SDPA on each CPU, as lines of Markdown.

    A row is a setting, and a column is a number of threads and of busy processes."""
    lines = ["## default_form", *(default_form.__doc__.split("example:")[0].strip().splitlines())]
    for result in results:
        columns = sorted({(row["threads"], row["busy"]) for row in result["rows"]})
        rows = {}
        for row in result["rows"]:
            setting = (row["pass"], row["pseudo_heads"], row["tokens"], row["window"] or 0, row["dtype"])
            rows.setdefault(setting, {})[row["threads"], row["busy"]] = row["ratios"][default_form.RATIO]
        titles = [f"{threads} thread{'s' * (threads > 1)}, {busy} busy" for threads, busy in columns]
        lines += ["", f"### {result['machine']}", f"| pass | P | tokens | window | dtype | {' | '.join(titles)} |"]
        lines.append(f"|---|---|---|---|---|{'---|' * len(columns)}")
        for setting, ratios in sorted(rows.items()):
            figures = (f"{ratios[column]:.3f}" if column in ratios else "" for column in columns)
            lines.append(f"| {' | '.join(str(value or 'none') for value in setting)} | {' | '.join(figures)} |")
    return lines


def render(results: dict[str, dict], defaults: list[dict], plots: set[str]) -> str:
    """Return the README as Markdown, from the results by name, those of default_form on each CPU, and the plots."""
    lines = [
        "# Benchmarks: targets and results",
        "`python -m research.benchmarks.report` writes this file from the JSON files beside it; `make bench` measures "
        "anew. A time is",
        "a ratio of medians of interleaved runs in one process, and a memory is a ratio of peaks, each of a "
        "process of its own.",
        "`research/benchmarks/cost.py` makes the predictions.",
        "",
        *default_lines(defaults),
        "",
        "## Targets",
        "| | ratio | target | measured | predicted | met | why not |",
        "|---|---|---|---|---|---|---|",
        *(line(results, target) for target in TARGETS),
        "",
        "## Where and how",
        "| table | plot | command | machine | threads | versions | predicted by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        versions = ", ".join(f"{package} {result[package]}" for package in ("python", "torch", "transformers"))
        links = f"[{name}.json]({name}.json) | " + f"[{name}.png]({name}.png)" * (name in plots)
        cells = (
            links,
            f"`{result['command']}`",
            result["machine"],
            ", ".join(map(str, result["threads"])) if isinstance(result["threads"], list) else str(result["threads"]),
            versions,
            result["predicted_by"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    for name, result in results.items():
        lines += ["", f"## {name}"]
        for row in result["rows"]:
            setting = ", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, dict))
            ratios = (f"{key} {value:.3f}" for key, value in row["ratios"].items())
            lines.append(f"- {setting}: {'; '.join(ratios)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = PARSER.parse_args()
    names = (
        "layer",
        "schedule",
        "decode_model",
        "prefill",
        "mechanisms",
        "training_plan",
        "any_decoder",
        "any_decoder_rows",
    )
    results = {name: read_json(args.out / f"{name}.json") for name in names}
    defaults = [read_json(path) for path in sorted(args.out.glob("default_form/*.json"))]
    with whole_file(args.out / "README.md") as path:
        path.write_text(render(results, defaults, {path.stem for path in args.out.glob("*.png")}), encoding="utf-8")
    print(f"Wrote {args.out / 'README.md'}")


if __name__ == "__main__":
    run_cli(main)
