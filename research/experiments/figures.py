"""Write figures into the pages that quote studies, from the tables of their results.

A comment after a figure says where it comes from: 0.193 ± 0.020<!-- -paired_heads/paired_4/minus_mha/steps -->. It
names a table and the keys of a value in it. A row goes by its name, and "*" stands for all. "-" changes the sign,
"max" and "min" take one of all, "A over B" divides, and "lead" and "gain" compute what no table holds. Digits and unit
stay those of the page. So do words: read them again after a change.

A comment above a table says this for each column. {0} and {1} stand for the names in the first cell of a row: those of
its comment, between "/", or else those in backticks. With "?" at its end, what is undecided is marked.

It takes some seconds.

example: python -m research.experiments.figures
"""

import argparse
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from iha.errors import ROOT, UserError, run_cli
from iha.files import read_json, whole_file
from research.experiments.study import differences


PAGES = ["README.md", "docs/FORMS.md", "docs/FROM_SCRATCH.md", "research/README.md", "research/experiments/README.md"]
RESULTS = [ROOT / "research" / folder / "results" for folder in ("experiments", "benchmarks")]
QUESTIONS = {"GSM8K": 1319, "MATH-500": 500}

UNITS = {None: 1, "%": 100, "points": 100, "million": 1e-6}
NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?"
FIGURE = re.compile(rf"(?<![\w.])({NUMBER})(?:(\s+±\s+)({NUMBER}))?(%|\s+(?:points|million))?")
# The figure may be the text of a link.
MARKED = re.compile(rf"({FIGURE.pattern})((?:\]\([^)]*\))?<!--\s([^|>]+)\s-->)")
TABLE = re.compile(r"<!-- \|([^>]+)\| -->\n+\|.+\n\|[-|]+\n((?:\|.+\n)+)")
KEPT = ("", "–", "1.00")  # where a row has no value; the base takes 1.00 times its own time

Value = float | tuple[float, float]  # or the mean and the half width of an interval


@cache
def table(name: str) -> dict:
    (path,) = (path for folder in RESULTS if (path := folder / f"{name}.json").is_file())
    return read_json(path)


def under(part: Any, keys: list[str]) -> Iterator[Any]:
    """Yield what a part of a table has under some keys. Raise a `KeyError`."""
    if not keys:
        yield part
    elif keys[0] == "*":
        for each in part.values() if isinstance(part, dict) else part:
            yield from under(each, keys[1:])
    elif isinstance(part, dict):
        here = keys[0] in part or "rows" not in part
        yield from under(part[keys[0]], keys[1:]) if here else under(part["rows"], keys)
    elif isinstance(part[0], dict) and "mean" not in part[0]:
        # A row names its control too, which is another row.
        named = [row for row in part if keys[0] in [str(row[key]) for key in row if key != "control"]]
        if not named:
            raise KeyError(keys[0])
        yield from under(named if len(named) > 1 else named[0], keys[1:])
    else:
        yield from under(part[int(keys[0])], keys[1:])


def value_of(part: Any) -> Value:
    """Return a number, or the interval that a part of a table holds."""
    if not isinstance(part, dict):
        return part
    if "mean" in part:
        return part["mean"] if part.get("half_width") is None else (part["mean"], part["half_width"])
    (only,) = [part["difference"]] if "difference" in part else part.values()
    return value_of(only)


def lead(study: str, variant: str, percent: str) -> Value:
    """Return the loss of a variant minus that of windows alone, after a share of the steps."""
    step = table(study)["steps"] * int(percent) // 100
    losses = [
        [dict(map(tuple, run))[step] for run in table(study)["runs"][name]] for name in (variant, "global_local")
    ]
    return value_of(differences(*losses))


def gain(task: str, other: str) -> Value:
    """Return by how many points the paper's IHA is above another model, with 1.96 standard errors.

    The questions are taken as independent."""
    paper = read_json(ROOT / "evaluation" / "paper.json")
    (scores,) = (column["paper"] for column in paper["table_1"]["columns"] if column["name"] == f"{task} Maj@16")
    both = [scores[paper["models"].index(model)] for model in ("IHA", other)]
    return both[0] - both[1], 196 * sum(each / 100 * (1 - each / 100) / QUESTIONS[task] for each in both) ** 0.5


def evaluate(source: str) -> Value:
    """Return the value that a comment names. Raise a `KeyError`."""
    source = " ".join(source.split())
    if " over " in source:
        above, below = map(evaluate, source.split(" over "))
        return above / below
    if source.startswith("-"):
        value = evaluate(source[1:])
        return (-value[0], value[1]) if isinstance(value, tuple) else -value
    first, _, rest = source.partition(" ")
    study, *keys = (rest if first in ("max", "min", "lead", "gain") else source).split("/")
    if first == "lead":
        return lead(study, *keys)
    if first == "gain":
        return gain(study, *keys)
    values = [value_of(part) for part in under(table(study), keys)]
    if first in ("max", "min"):
        return {"max": max, "min": min}[first](values)
    (value,) = values
    return value


def written(number: float, like: str) -> str:
    """Return a number with the digits of another one."""
    if "e" in like:
        digits = len(like.partition("e")[0].partition(".")[2])
        return f"{number:.{digits}e}".replace("e-0", "e-")
    digits = len(like.partition(".")[2])
    return f"{number:,.{digits}f}"


def figure(source: str, like: str) -> str:
    """Return the figure that a comment names, with the digits and the unit of another one. Raise `UserError`."""
    mean, sign, half_width, unit = FIGURE.fullmatch(like).groups()
    try:
        value = evaluate(source)
        if source.endswith(("rate", "decay")) and "e" not in mean:
            return f"{value:g}"  # the digits of another rate would round it
        scale = UNITS[unit and unit.strip()]
        if half_width:
            return written(scale * value[0], mean) + sign + written(scale * value[1], half_width) + (unit or "")
        return written(scale * (value[0] if isinstance(value, tuple) else value), mean) + (unit or "")
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{' '.join(source.split())}: expected the keys of a value like {like} ({error!r})."
        ) from error


def is_undecided(source: str) -> bool:
    (part,) = under(table(source.split("/")[0]), source.split("/")[1:])
    return part.get("difference", part).get("p_holm", 1) > 0.05


def has_values(sources: list[str]) -> bool:
    try:
        return bool([evaluate(source) for source in sources])
    except LookupError:
        return False


def filled_cell(column: str, cell: str, shape: str) -> str:
    """Return a cell of a table: one figure for each source, which ";" separates. `shape` is that of an empty cell."""
    sources = column.removesuffix(" ?").split("; ")
    if cell in KEPT:
        if not has_values(sources):
            return cell
        cell = shape
    if len(FIGURE.findall(cell)) != len(sources):
        raise UserError(f"{column}: expected {len(sources)} figures in the cell {cell!r}.")
    left = iter(sources)
    cell = FIGURE.sub(lambda like: figure(next(left), like[0]), cell).removesuffix(" ?")
    return cell + " ?" * (column.endswith(" ?") and is_undecided(sources[0]))


def filled_table(match: re.Match) -> str:
    """Return a table, with the cells that its comment names."""
    columns = [column.strip() for column in match[1].split("|")]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in match[2].splitlines()]
    for place, column in enumerate(columns, 1):
        shape = next((line[place] for line in lines if column and line[place] not in KEPT), "")
        for line in lines:
            names = re.findall(r"<!-- (.+) -->", line[0])
            names = names[0].split("/") if names else re.findall(r"`(\w+)`", line[0])
            if column:
                line[place] = filled_cell(column.format(*names), line[place], shape)
    body = "".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|\n" for line in lines)
    return match[0].removesuffix(match[2]) + body


def filled(text: str) -> str:
    """Return the text of a page with the figures of the tables. Raise `UserError` for a source without a value."""
    text = MARKED.sub(lambda match: figure(match.groups()[-1], match[1]) + match.groups()[-2], text)
    return TABLE.sub(filled_table, text)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in PAGES:
        text = filled((ROOT / page).read_text(encoding="utf-8"))
        with whole_file(ROOT / page) as path:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_cli(main)
