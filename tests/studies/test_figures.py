"""Compare every figure of research/experiments/README.md, and of the claims of research/README.md, with its table.

A figure of a section must be a number of its tables, rounded to the digits that it has, and an interval one of theirs.
A line of a table in the document must be of the row that it names. What a section says beyond its tables is computed
here, and listed as given where it belongs to the set-up or to a paper.
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import pytest

from iha.errors import ROOT
from iha.files import read_json
from iha.model_cost import head
from iha.model_cost import model as cost_of
from modeling_iha import IHAConfig
from research.experiments.language_models import others_of
from research.experiments.protocol import BUDGETS, COUNTS
from research.experiments.study import differences


RESULTS = ROOT / "research" / "experiments" / "results"
PAPER, QUESTIONS = read_json(ROOT / "evaluation" / "paper.json"), {"GSM8K": 1319, "MATH-500": 500}
FIGURE = re.compile(
    r"(?<![\w.])(-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?)(?: ± (\d+(?:\.\d+)?))?(%|(?: percentage)? points?)?"
)
# What a table has of single seeds and steps, which no document shows.
SINGLE = {"values", "runs", "curve", "tried", "by_part", "rates", "seconds"}
Number = float | tuple[float, float]


@cache
def table(study: str) -> dict:
    return json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))


def rows(study: str, name: str) -> dict:
    return {row[name]: row for row in table(study)["rows"]}


def pair(value: dict) -> tuple[float, float]:
    return value["mean"], value["half_width"]


def numbers(part) -> Iterator[Number]:
    """Yield every number in a part of a table, and every interval."""
    if isinstance(part, dict):
        if part.get("half_width") is not None:
            yield pair(part)
        part = [value for key, value in part.items() if key not in SINGLE]
    if isinstance(part, (list, tuple)):
        for each in part:
            yield from numbers(each)
    elif isinstance(part, (int, float)):
        yield part


def rounds_to(number: float, text: str, percent: str, signed: bool) -> bool:
    """Return if a number has these digits, as a share or in percent. Prose may turn a sign into a word."""
    if not signed:
        number, text = abs(number), text.lstrip("-")
    if "e-" in text:
        digits = len(text.partition("e")[0].partition(".")[2])
        return float(f"{number:.{digits}e}") == float(text)
    digits = len(text.partition(".")[2])
    return text in [f"{scale * number:,.{digits}f}" for scale in ((100,) if percent else (1,))]


def is_of(known: list[Number], mean: str, half_width: str, *how) -> bool:
    if half_width:
        intervals = (each for each in known if isinstance(each, tuple))
        return any(rounds_to(m, mean, *how) and rounds_to(h, half_width, *how) for m, h in intervals)
    return any(rounds_to(each, mean, *how) for each in known if not isinstance(each, tuple))


def unknown(content: str, studies: tuple[str, ...], more: list[Number], given: tuple[str, ...]) -> list[str]:
    """Return the figures of a section that are neither in the tables of its studies, nor computed, nor given."""
    known, missing = [*more, *(each for study in studies for each in numbers(table(study)))], []
    all_rows = [row for study in studies for row in table(study).get("rows", [])]
    prose = " ".join(line for line in content.splitlines() if not line.startswith("|"))
    for line in (prose, *(line for line in content.splitlines() if line.startswith("|"))):
        names = re.findall(r"`(\w+)`", line.split("|")[1]) if line.startswith("|") else []
        named = [row for row in all_rows if names and names[0] in row.values()]
        here = [*more, *(each for row in named for each in numbers(row))] if named else known
        text = re.sub(r"\]\([^)]*\)|Sections? \S+(?: \S+\.\d\)?)?|Appendix \S+", "", line)
        for mean, half_width, percent in FIGURE.findall(text):
            shown = f"{mean}{' ± ' * bool(half_width)}{half_width}{percent}"
            is_checked = re.search(r"[.,%±e]", shown) and shown not in given
            if is_checked and not is_of(here, mean, half_width, percent, line.startswith("|")):
                missing.append(shown)
    return missing


# What sections of research/experiments/README.md say beyond their tables


def tasks_more() -> list[Number]:
    by_kind = rows("dcmha_tasks", "kind")
    compared = [row[group] for row in by_kind.values() for group in row if isinstance(row[group], dict)]
    differences = [each for group in compared for key, each in group.items() if key.endswith("minus_base")]
    assert len(differences) == 70
    seen = {kind: row["all"]["seen_minus_base"] for kind, row in by_kind.items() if kind != "mha"}
    assert {kind for kind, each in seen.items() if each["p_holm"] < 0.05} == {"dcmha", "multi_token"}
    ends = [
        each["mean"] + sign * each["half_width"] for each in seen.values() if each["p_holm"] > 0.05 for sign in (-1, 1)
    ]
    assert (round(min(ends), 2), round(max(ends), 2)) == (-0.06, 0.08)
    return [row["seconds"]["mean"] / by_kind["mha"]["seconds"]["mean"] for row in by_kind.values()]


def relation_more() -> list[Number]:
    """Return the times in that of "mha", the lead of "iha" in validation, and what it has right after one epoch."""
    times = []
    for name in ("relation_composition", "relation_composition_simplicial"):
        seconds = {kind: row["seconds"]["mean"] for kind, row in rows(name, "kind").items()}
        times += [each / seconds["mha"] for each in seconds.values()]
    curves = table("relation_composition")["runs"]
    ahead = [ours[3] - theirs[3] for ours, theirs in zip(curves["iha"][0], curves["mha"][0])]
    return [*times, ahead[0], ahead[-1], curves["iha"][0][0][3]]


PAIRED = (
    "paired_heads",
    "paired_heads_1600",
    "paired_heads_512_600",
    "paired_heads_512_128",
    "paired_heads_512_256_600",
    "paired_heads_1024_512_800_packages_cuda",
    "paired_heads_1024_512_cuda",
    "paired_heads_prose",
)


# The lead of paired heads over windows alone while they train: label -> the table, and the variant in it
LINES = {
    "width 64, code, P = 4": ("paired_heads", "paired_4"),
    "width 64, code, P = 4, 1,600 steps": ("paired_heads_1600", "paired_4"),
    "width 64, code, P = 4, rows of 512 bytes": ("paired_heads_512_600", "paired_4"),
    "width 64, prose, P = 4": ("paired_heads_prose", "paired_4"),
    "width 128, code, P = 4": ("paired_heads_512_128", "paired_4"),
    "width 128, code, P = 8": ("paired_heads_512_128", "paired_8"),
    "width 256, code, P = 8": ("paired_heads_512_256_600", "paired_8"),
    "width 512, code, P = 4": ("paired_heads_1024_512_cuda", "paired_4"),
    "width 512, code, P = 8": ("paired_heads_1024_512_cuda", "paired_8"),
    "width 512, more code, P = 4": ("paired_heads_1024_512_800_packages_cuda", "paired_4"),
}


def lead(table: dict, variant: str) -> list[tuple[int, dict]]:
    """Return each evaluated step, with the interval of a variant's loss minus that of windows alone."""
    ours, base = (zip(*table["runs"][name]) for name in (variant, "global_local"))
    return [
        (at[0][0], differences([loss for _, loss in at], [loss for _, loss in of_base[: len(at)]]))
        for at, of_base in zip(ours, base)
    ]


def paired_more() -> list[Number]:
    """Return the lead at each evaluation, and the millions of bytes that each table's models read."""
    leads = [pair(each) for name, variant in LINES.values() for _, each in lead(table(name), variant)]
    trained = [t["steps"] * t["tokens_per_step"] / 1e6 for t in map(table, PAIRED)]
    return [*leads, *trained]


def paper_gain(task: str, questions: int, other: str) -> tuple[float, float]:
    """Return by how many points the paper's IHA is above another model, and its standard error.

    The questions are taken as independent."""
    (scores,) = (column["paper"] for column in PAPER["table_1"]["columns"] if column["name"] == f"{task} Maj@16")
    both = [scores[PAPER["models"].index(model)] for model in ("IHA", other)]
    return both[0] - both[1], 100 * sum(each / 100 * (1 - each / 100) / questions for each in both) ** 0.5


def paper_more() -> list[Number]:
    gains = [paper_gain(*task, other) for other in ("global attention", "diff") for task in QUESTIONS.items()]
    return [
        *(each / 100 for each in numbers(PAPER["multi_key_retrieval"])),
        *((gain, 1.96 * error) for gain, error in gains),
    ]


SCARCE = ("scarce_data_longer", "scarce_data", "scarce_data_1000000_0.004_1_8", "scarce_data_2000000_512_cuda")


STACKING = ("stacking",)


def stacking_more() -> list[Number]:
    """Return the lead of plain paired heads that was known before."""
    return [pair(rows("paired_heads_1600", "variant")["paired_4"]["minus_base"]["steps"]["difference"])]


SHARES = (20, 60)  # of the steps, in percent
WARM_STARTS = ("warm_start_python", "warm_start_prose", "warm_start_lookup")
PREDICTED = ("0.012", "0.015", "0.05", "0.035", "0.103", "0.032", "0.08", "0.085", "0.03", "0.028")
# Heading -> tables, what is computed from them, and the figures of the set-up and of the papers.
SECTIONS = {
    "Warm start": (WARM_STARTS, list, ()),
    "Language models": (("language_models",), list, ()),
    "Paired heads": (PAIRED, paired_more, tuple(f"{share}%" for share in SHARES)),
    "Scarce data": (
        SCARCE,
        list,
        ("80%", "3.222", "3.214", "3.200", "-0.01", "-0.03", "-0.05", "0.07"),
    ),
    # Given are the predictions and the pilot, which came before the tables.
    "Stacking": (STACKING, stacking_more, PREDICTED),
    "HyperFeatureAttention": (("hyper_language",), list, ("27.97", "28.70")),
    "DCMHA's synthetic tasks": (("dcmha_tasks",), tasks_more, ("2,000",)),
    "Relation composition": (
        (
            *("relation_composition", "relation_composition_seeds", "relation_composition_simplicial"),
            *("relation_composition_binary", "relation_composition_binary_epoch"),
        ),
        relation_more,
        ("1e-4",),
    ),
    "Theorem 3: polynomial filters": (("polynomial_filters", "polynomial_filters_learned"), list, ()),
    "Theorems 2 and 4": (("theorems",), list, ()),
    "Interactions": (("interactions",), list, ("3.1", "4.9")),
    "Recall": (("recall", "recall_8"), list, ()),
    "The paper's own gains": ((), paper_more, ("1.96", "95%")),
}


def text(value: dict) -> str:
    """Return an interval as the documents write it."""
    return f"{value['mean']:.3f} ± {value['half_width']:.3f}"


def section(document: str, heading: str) -> str:
    content = (ROOT / document).read_text(encoding="utf-8")
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", content, re.DOTALL | re.MULTILINE)[1]


@pytest.mark.parametrize("heading", SECTIONS)
def test_figures_of_the_studies_are_those_of_their_tables(heading):
    studies, more, given = SECTIONS[heading]
    assert unknown(section("research/experiments/README.md", heading), studies, more(), given) == []


def difference_lines(name: str) -> Iterator[str]:
    """Yield the line of each comparison of language models: a difference for each budget, and the time of a step."""
    base = table(name)["rows"][0]["variant"]
    for row in table(name)["rows"]:
        for key, other in others_of(base, row["control"]).items():
            cells = []
            for budget in (budget for budget in BUDGETS if budget != COUNTS["paper"]):
                found = row.get(key, {}).get(budget, {}).get("difference")
                cells.append(f"{text(found)}{' ?' * (found['p_holm'] > 0.05)}" if found else "–")
            if key in row:
                cells.append(f"{row[key]['time']['cost']:.2f}" if "time" in row[key] else "–")
                yield " | ".join([f"| `{row['variant']}`, `{other}`", *cells]) + " |"


@pytest.mark.parametrize(
    ("heading", "tables"),
    [
        ("Language models", ("language_models",)),
        ("HyperFeatureAttention", ("hyper_language",)),
    ],
)
def test_differences_of_language_models_and_what_is_undecided(heading, tables):
    lines = section("research/experiments/README.md", heading).splitlines()
    expected = [line for name in tables for line in difference_lines(name)]
    assert [line for line in lines if line.startswith("| `")] == expected


CONTROL = "wide_4_64"


def shown(name: str, variant: str, other: str, budget: str) -> str:
    """Return the difference of a variant from another as a cell of the documents."""
    found = rows(name, "variant").get(variant, {}).get(other, {}).get(budget, {}).get("difference")
    return f"{text(found)}{' ?' * (found['p_holm'] > 0.05)}" if found else "–"


def paired_lines() -> Iterator[str]:
    """Yield the line of each size and text: paired heads, windows alone and the control, two by two."""
    for label, (name, variant) in LINES.items():
        assert rows(name, "variant")[variant]["control"] == CONTROL
        compared = [(variant, "minus_base"), (variant, "minus_control"), (CONTROL, "minus_base")]
        cells = [shown(name, *each, budget) for each in compared for budget in ("steps", "time")]
        yield " | ".join([f"| {label}", *cells]) + " |"


def test_differences_of_paired_heads_and_what_is_undecided():
    lines = section("research/experiments/README.md", "Paired heads").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| models | `paired_P`"))
    expected = list(paired_lines())
    assert lines[start + 2 : start + 3 + len(expected)] == [*expected, ""]


def test_which_other_forms_are_decided_against_windows_alone():
    smallest, read_three_times = PAIRED[0], "paired_heads_1024_512_cuda"
    others = ("wide_4_16", "paired_2", "paired_4_shared", "iha_4")
    ahead = [shown(smallest, name, "minus_base", "steps") for name in others]
    assert all(each.startswith("-") and "?" not in each for each in ahead)
    assert all("?" in shown(read_three_times, name, "minus_base", "steps") for name in ("wide_4_16", "iha_4"))


def test_paired_heads_and_windows_alone_differ_as_much_at_equal_flops():
    for name, variant in LINES.values():
        found = rows(name, "variant")[variant]["minus_base"]
        assert found["FLOPs"]["difference"]["mean"] == pytest.approx(found["steps"]["difference"]["mean"], abs=0.001)


def scarce_lines(study: str) -> Iterator[str]:
    """Yield the line of each form that learned a short text: its setting, its loss, and that minus windows alone."""
    for row in table(study)["rows"]:
        cells = [f"{row['rate']:g}, {row['decay']:g}, {row['judged_at']}", text(row["loss"])]
        if "minus_windows" in row:
            difference = row["minus_windows"]
            cells += [f"{text(difference)}{' ?' * (difference['p_holm'] > 0.05)}", f"{row['cost']:.2f}"]
        else:
            cells += ["–", "1.00"]
        yield " | ".join([f"| `{row['form']}`", *cells]) + " |"


def test_differences_where_data_is_scarce():
    lines = section("research/experiments/README.md", "Scarce data").splitlines()
    expected = [line for study in SCARCE for line in scarce_lines(study)]
    assert [line for line in lines if line.startswith("| `")] == expected


def stacking_lines() -> Iterator[str]:
    """Yield the line of each comparison of stacked additions: equal steps, equal time, and the time of a step."""
    for study in STACKING:
        for each in table(study)["comparisons"]:
            found = [each[budget]["difference"] for budget in ("steps", "time")]
            cells = [f"{text(difference)}{' ?' * (difference['p_holm'] > 0.05)}" for difference in found]
            names = f"`{each['first']}`, `{each['second']}`"
            yield f"| {table(study)['steps']:,} | {names} | {' | '.join(cells)} | {each['time']['cost']:.2f} |"


def test_differences_of_stacked_additions():
    lines = section("research/experiments/README.md", "Stacking").splitlines()
    assert [line for line in lines if re.match(r"\| [\d,]+ \| `", line)] == list(stacking_lines())


def lead_lines() -> Iterator[str]:
    """Yield the lines of the table of the lead over training."""
    yield f"| models | rates | {' | '.join(f'{share}%' for share in SHARES)} |"
    yield "|---" * (2 + len(SHARES)) + "|"
    for label, (name, variant) in LINES.items():
        rates = [rows(name, "variant")[each]["rate"] for each in (variant, "global_local")]
        leads, steps = dict(lead(table(name), variant)), table(name)["steps"]
        cells = [text(leads[steps * share // 100]) for share in SHARES]
        yield " | ".join([f"| {label}", ", ".join(f"{rate:g}" for rate in rates), *cells]) + " |"


def test_the_lead_over_training():
    lines = section("research/experiments/README.md", "Paired heads").splitlines()
    header, *expected = lead_lines()
    start = lines.index(header) + 1
    assert lines[start : start + len(expected)] == expected


# Columns of the table of docs/FORMS.md -> a study and a budget; its lines -> variants
FIRST_COLUMNS = {
    "width 64, equal steps": ("paired_heads", "steps"),
    "width 64, equal time": ("paired_heads", "time"),
    "width 128, equal time": ("paired_heads_512_128", "time"),
    "width 256, equal time": ("paired_heads_512_256_600", "time"),
    "width 512, equal time": ("paired_heads_1024_512_800_packages_cuda", "time"),
    "width 512, text read three times, equal steps": ("paired_heads_1024_512_cuda", "steps"),
}
FIRST_LINES = {
    "paired heads, P = 4": "paired_4",
    "paired heads, P = 8": "paired_8",
    "short windows, wide positions": "wide_4_64",
    "the paper's schedule, P = 4": "iha_4",
    "ordinary attention": "mha",
}


def test_the_gains_of_each_form():
    lines = section("docs/FORMS.md", "What each form gains").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| form |"))
    header, _, *table_lines = lines[start : start + 2 + len(FIRST_LINES)]
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["form", *FIRST_COLUMNS]
    for line, (form, variant) in zip(table_lines, FIRST_LINES.items(), strict=True):
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert re.sub(r"\[(.*)\]\(.*\)", r"\1", name) == form
        assert cells == [shown(study, variant, "minus_base", budget) for study, budget in FIRST_COLUMNS.values()]


@pytest.mark.parametrize(
    "document, heading",
    [
        ("README.md", "What to expect"),
        ("docs/FORMS.md", "What each form gains"),
        ("docs/FORMS.md", "When data is scarce"),
        ("docs/FORMS.md", "Gate, XSA and value residual"),
    ],
)
def test_intervals_of_the_guides_are_those_of_the_tables(document, heading):
    studies = (*PAIRED, *WARM_STARTS, *SCARCE, *STACKING)
    known = [*paired_more(), *(each for study in studies for each in numbers(table(study)))]
    found = [figure for figure in FIGURE.findall(section(document, heading)) if figure[1]]
    assert len(found) > 1
    assert [figure for figure in found if not is_of(known, *figure, False)] == []


# The claims of research/README.md

VERDICTS = re.compile(
    r"reproduced|reproduced with a correction|not reproduced|undecided|not run here"
    r"|needs [\d,]+ GPU-hours( and more)?"
)


def claims() -> list[dict[str, str]]:
    """Return the rows of the table, by its columns."""
    lines = (ROOT / "research" / "README.md").read_text(encoding="utf-8").splitlines()
    columns, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return [dict(zip(columns, row, strict=True)) for row in cells]


CLAIMS = claims()


def is_preset(name: str) -> bool:
    return (ROOT / "configuration_iha" / f"{name}.json").is_file()


def is_there(command: str) -> bool:
    """Return if a command's module can be imported, its test is written, and its recipe and preset exist."""
    words = command.split()
    named = dict(zip(words, words[1:]))
    if "--config" in named and not (ROOT / named["--config"]).is_file():
        return False
    if "--preset" in named and not is_preset(named["--preset"]):
        return False
    if words[:3] == ["python", "-m", "pytest"]:
        path, _, test = words[3].partition("::")
        return f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")
    if words[:2] == ["python", "-m"]:
        return find_spec(words[2]) is not None
    return is_preset(command)


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row["claim"])
def test_each_claim_has_a_verdict_and_a_command_that_exists(row):
    assert VERDICTS.fullmatch(row["verdict"])
    commands = re.findall("`([^`]+)`", row["command"])
    assert all(is_there(command) for command in commands)
    # A verdict needs a command, and a recipe alone bears none.
    bears = "reproduced" in row["verdict"] or row["verdict"] == "undecided"
    assert bool(commands) or not (bears or "GPU" in row["verdict"])
    assert (row["ours"] != "–") == bears


# The beginning of a claim -> for each figure of "ours", the part of its table: keys, or values of rows
PARTS = {
    "IHA, Theorem 1": ["exactness/mha"],
    "IHA, Theorem 2: every P": ["theorem_2/last", "theorem_2/least_nonlinearity_of_section"],
    "IHA, Theorem 2: 4 H^2 P": ["theorem_2/more_parameters"],
    "IHA, Theorem 3": ["exactness/iha", "counts/parameters"],
    "IHA, Theorem 4: ceil": ["theorem_4/iha, a token less"],
    "IHA, Theorem 4: the best": ["theorem_4/heads/mha, 2 heads"],
    "IHA, Theorem 4: with fewer": ["theorem_4/parameters"],
    "IHA, Section 5: the schedule beats global attention": ["rows/iha_4/minus_mha/FLOPs", "rows/iha_4/minus_mha/time"],
    "IHA, Section 5: the schedule beats global and": ["rows/iha_4/minus_base/FLOPs"],
    "IHA, Appendix C": ["rows/attention, forward/predicted", "rows/attention, forward/ratios"],
    "IHA, abstract": [
        "rows/iha_window/minus_base",
        "rows/iha/minus_base",
        "rows/iha_window/minus_base",
    ],
    "IHA, Figures 3a": ["rows/mha/right", "rows/iha/right", "rows/mha/right"],
    "IHA, Figures 3b": ["rows/iha/minus_base", "rows/iha/right", "rows/simplicial/right"],
    "DCMHA, Section 4.3: fixed": ["rows/dcmha/all/seen_minus_base"],
    "HA, Theorems 3.1": [
        "largest_error_of_constructions/self-attention",
        "largest_error_of_constructions/self-attention, sinusoidal",
    ],
    "HA, Theorems 4.4": [
        "learned/self-attention, one-hot/training",
        "learned/self-attention, one-hot/new rows",
        "learned/self-attention, one-hot/2 agents",
    ],
    "HA, Corollaries 4.9": ["learned/self-attention, one-hot/interaction"],
    "HA, Theorem E.2": ["full_rank/2 agents/12 rows", "full_rank/2 agents/48 rows", "full_rank/20 agents/12 rows"],
    "HA, Section 5": ["largest_error_of_constructions/HyperFeatureAttention, order 2"],
    "HA, Remark F.6": [
        "learned/two layers of self-attention/training",
        "learned/two layers of self-attention/new rows",
        "learned/HyperFeatureAttention, order 2/training",
        "learned/HyperFeatureAttention, order 2/new rows",
    ],
    "HA, Theorems G.4": [
        "largest_error_of_constructions/HyperAttention, order 3",
        "learned/HyperAttention, order 3/training",
    ],
    "Gate (": ["rows/gated/minus_base/steps"],
    "Gate, XSA": ["comparisons/windows+all/windows/steps", "comparisons/windows+all/windows/time"],
    "HA, Table 2: text with three layers": ["rows/hyper_feature_3/minus_base/steps"],
}


def under(part, name: str) -> Iterator:
    """Yield what a table has under a key of this name, and its rows of this name."""
    if isinstance(part, dict):
        if name in part:
            yield part[name]
        elif name in [value for value in part.values() if isinstance(value, str)]:
            yield part
        else:
            part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from under(each, name)


def parts_of(claim: str) -> list[str]:
    (parts,) = (parts for beginning, parts in PARTS.items() if claim.startswith(beginning))
    return parts


@pytest.mark.parametrize("row", [row for row in CLAIMS if "](" in row["ours"]], ids=lambda row: row["claim"])
def test_figures_of_the_claims_are_those_of_their_tables(row):
    links = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", row["ours"])
    for (shown, path), where in zip(links, parts_of(row["claim"]), strict=True):
        found = [read_json(ROOT / "research" / path)]
        for name in where.split("/"):
            found = [each for part in found for each in under(part, name)]
        figures = FIGURE.findall(shown)
        assert figures and all(is_of(list(numbers(found)), *figure, True) for figure in figures), shown


def test_parameters_of_dcmha_are_those_of_its_table_2():
    (row,) = (row for row in CLAIMS if row["claim"].startswith("DCMHA, Table 2: more parameters"))
    ratios, shares = [], []
    for preset in ("dcformer-1.4b", "dcformer-6.9b"):
        config = IHAConfig.from_preset(preset)
        whole = cost_of(config, 1).parameters
        plain = cost_of(IHAConfig.from_preset(preset, attention_kinds="mha"), 1).parameters
        embeddings = 2 * config.vocab_size * config.hidden_size  # untied
        ratios.append(f"{whole / plain:.3f}")
        shares.append(f"{(whole - plain) / (plain - embeddings):.1%}")
    expected = f"{', '.join(ratios)} times the whole model's; {', '.join(shares)} without embeddings"
    assert row["ours"] == expected


def test_flops_of_dcmha_in_its_table_2():
    (row,) = (row for row in CLAIMS if row["claim"].startswith("DCMHA, Table 2: more FLOPs"))
    shares = []
    for preset, tokens in (("dcformer-1.4b", 2048), ("dcformer-6.9b", 2048), ("dcformer-6.9b", 8192)):
        layers = IHAConfig.from_preset(preset).num_hidden_layers
        fields = {"layer_types": ["full_attention"] * layers, "max_position_embeddings": tokens}
        composed = cost_of(IHAConfig.from_preset(preset, **fields), tokens).prefill
        config = IHAConfig.from_preset(preset, attention_kinds="mha", **fields)
        plain = cost_of(config, tokens).prefill
        shares.append(f"{(composed - plain) / (plain - head(config, tokens).prefill):.1%}")
    assert row["ours"] == ", ".join(shares)


STUDIES = [
    path
    for path in sorted((ROOT / "research" / "experiments").glob("*.py"))
    if "\ndef main(" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_each_study_says_how_long_it_takes(path):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert re.search(r"\b(seconds?|minutes?|hours?)\b", text)


def test_the_rates_to_begin_with_are_those_of_the_studies():
    """Compare a figure of docs/FROM_SCRATCH.md with what windows alone and paired heads learned best at."""
    page = " ".join((ROOT / "docs" / "FROM_SCRATCH.md").read_text(encoding="utf-8").split())
    shown = page[page.index("Begin with the best rates") : page.index("The paper takes 8e-4")]
    studies = ("paired_heads", "paired_heads_512_128", "paired_heads_512_256_600")
    studies += ("paired_heads_1024_512_800_packages_cuda",)
    begun, per_step = [], []
    for study in studies:
        forms = [row for row in table(study)["rows"] if row["variant"] in ("global_local", "paired_4", "paired_8")]
        [(rate, parameters)] = {(row["rate"], row["parameters"]) for row in forms}
        begun.append((rate, round(parameters / 1e6, 1)))
        per_step.append(f"{table(study)['tokens_per_step']:,}")
    assert re.findall(r"(\de-\d) for ([\d.]+) million", shown) == [
        (f"{rate:.0e}".replace("-0", "-"), str(size)) for rate, size in begun
    ]
    assert re.findall(r"of ([\d,]+) tokens", shown) == [*dict.fromkeys(per_step)]
