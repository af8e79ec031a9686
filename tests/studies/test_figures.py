"""Compare the figures of pages with the tables that their comments name, and test that every figure has one."""

import ast
import re
from importlib.util import find_spec

import pytest

from iha.errors import ROOT, UserError
from iha.model_cost import head
from iha.model_cost import model as cost_of
from modeling_iha import IHAConfig
from research.experiments import figures
from research.experiments.figures import FIGURE, MARKED, PAGES, TABLE, table
from research.experiments.language_models import others_of


EXPERIMENTS = "research/experiments/README.md"
# Figures of the set-up, of the papers and of other repositories
GIVEN = {
    *("-0.01", "-0.03", "-0.05", "0.005", "0.008", "0.01", "0.017", "0.018", "0.05", "0.07", "1,024", "1,600", "1.96"),
    *("112%", "1e-3", "1e-4", "2,000", "20%", "27.97", "28.70", "3.200", "3.214", "3.222", "80%", "95%"),
}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def without_sources(text: str) -> str:
    """Return a page without the figures that have a source."""

    def other_cells(match: re.Match) -> str:
        columns = ["", *(column.strip() for column in match[1].split("|"))]
        lines = [line.strip("|").split("|") for line in match[2].splitlines()]
        return "\n".join(" ".join(cell for cell, column in zip(line, columns) if not column) for line in lines)

    return MARKED.sub("", TABLE.sub(other_cells, text))


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_tables(page):
    assert figures.filled(read(page)) == read(page)


def test_every_figure_of_the_studies_has_a_source():
    text = re.sub(r"^\*\*Predicted.*?\n\n", "", without_sources(read(EXPERIMENTS)), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|Sections? \S+|(?:Appendix|Corollary|Theorem) \S+", "", text)
    shown = {match[0] for match in FIGURE.finditer(text) if re.search(r"[.,%±e]", match[0])}
    assert shown == GIVEN


@pytest.mark.parametrize("page", PAGES)
def test_every_interval_has_a_source(page):
    assert [match[0] for match in FIGURE.finditer(without_sources(read(page))) if match[3]] == []


def test_figures_are_filled_in():
    """Fill figures and cells that are wrong, in their digits and units, and mark what is undecided."""
    source = "<!-- -paired_heads/paired_4/minus_mha/steps -->"
    assert figures.filled(f"0.1 ± 0.1{source}, 9e-9{source}") == f"0.2 ± 0.0{source}, 1.9e-1{source}".replace(
        "1.9", "2"
    )
    source = "](x.json)<!-- relation_composition_seeds/iha/minus_base -->"
    assert figures.filled(f"[0.0 ±\n  0.0 points{source}") == f"[2.0 ±\n  1.1 points{source}"
    # A form that was ahead and is behind has a sign that its words lack.
    source = "<!-- -paired_heads/iha_4/minus_base/time -->"
    assert figures.filled(f"0.623{source} below") == f"-0.623{source} below"
    head = (
        "<!-- | recall/{0}/wrong | recall/{0}/minus_base ? | -->\n\n| variant | wrong | difference |\n|---|---|---|\n"
    )
    rows = "| `mha` | 0.4 | – |\n| `wide_window` | 9.9 | 0.00 ± 0.00 |\n| `iha` <!-- iha_window --> | – | – |\n"
    filled = "| `mha` | 0.5 | – |\n| `wide_window` | 0.5 | 0.01 ± 0.04 ? |\n"
    filled += "| `iha` <!-- iha_window --> | 0.2 | -0.24 ± 0.06 |\n"
    assert figures.filled(head + rows) == head + filled


@pytest.mark.parametrize(
    "text",
    [
        "0.1<!-- recall/mhb/wrong -->",
        "0.1<!-- recal/mha/wrong -->",
        "0.1<!-- recall/mha -->",
        "0.1 ± 0.1<!-- recall/steps -->",
        "<!-- | recall/{0}/wrong | -->\n\n| a | b |\n|---|---|\n| `mhb` | 0.1 |\n",
        "<!-- | recall/{0}/wrong | -->\n\n| a | b |\n|---|---|\n| `mha` | 0.1 or 0.2 |\n",
    ],
)
def test_a_source_without_a_value_is_an_error(text):
    with pytest.raises(UserError, match="expected"):
        figures.filled(text)


@pytest.mark.parametrize("study", ["language_models", "hyper_language"])
def test_every_comparison_of_language_models_is_shown(study):
    rows = table(study)["rows"]
    expected = {
        (row["variant"], other, f"{row['variant']}/{key}")
        for row in rows
        for key, other in others_of(rows[0]["variant"], row["control"]).items()
        if key in row
    }
    shown = set(re.findall(r"^\| `(\w+)`, `(\w+)` <!-- (\S+) -->", read(EXPERIMENTS), re.MULTILINE))
    assert expected <= shown


@pytest.mark.parametrize(
    "study",
    [
        *("dcmha_tasks", "recall", "recall_8", "scarce_data", "scarce_data_longer"),
        *("scarce_data_1000000_0.004_1_8", "scarce_data_2000000_512_cuda"),
    ],
)
def test_every_form_of_a_study_is_shown(study):
    (body,) = [match[2] for match in TABLE.finditer(read(EXPERIMENTS)) if f" {study}/{{0}}/" in match[1]]
    rows = table(study)["rows"]
    name = next(key for key in ("variant", "kind", "form") if key in rows[0])
    assert sorted(re.findall(r"^\| `(\w+)`", body, re.MULTILINE)) == sorted(row[name] for row in rows)


def is_undecided(study: str, variant: str) -> bool:
    return figures.is_undecided(f"{study}/{variant}/minus_base/steps")


def test_which_other_forms_are_decided_against_windows_alone():
    smallest, read_three_times = "paired_heads", "paired_heads_1024_512_cuda"
    for variant in ("wide_4_16", "paired_2", "paired_4_shared", "iha_4"):
        assert not is_undecided(smallest, variant)
    assert all(is_undecided(read_three_times, variant) for variant in ("wide_4_16", "iha_4"))


def test_paired_heads_and_windows_alone_differ_as_much_at_equal_flops():
    """Read the tables of the page whose rows name a study and a variant."""
    found = set(re.findall(r"<!-- (paired_heads\w*/paired_\d) --> \|", read(EXPERIMENTS)))
    assert len(found) == 10
    for variant in found:
        steps, flops = (figures.evaluate(f"{variant}/minus_base/{budget}") for budget in ("steps", "FLOPs"))
        assert flops[0] == pytest.approx(steps[0], abs=0.001)


def test_which_kinds_answer_more_of_dcmhas_tasks():
    rows = {row["kind"]: row for row in table("dcmha_tasks")["rows"] if row["kind"] != "mha"}
    decided = {kind for kind, row in rows.items() if row["all"]["seen_minus_base"]["p_holm"] < 0.05}
    assert decided == {"dcmha", "multi_token"}


# The claims of research/README.md

VERDICTS = re.compile(
    r"reproduced|reproduced with a correction|not reproduced|undecided|not run here"
    r"|needs [\d,]+ GPU-hours( and more)?"
)


def claims() -> list[dict[str, str]]:
    """Return the rows of the table, by its columns."""
    lines = read("research/README.md").partition("\n## ")[0].splitlines()
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


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row["claim"])
def test_figures_of_the_claims_have_sources_in_the_tables_that_they_link(row):
    links = re.findall(r"\]\((?:\S*/)?(\w+)\.json\)(?:<!-- (?:max )?(\w+)/)?", row["ours"])
    assert all(name == source for name, source in links), links


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


def test_the_rates_to_begin_with_are_those_of_windows_alone_too():
    for study, rate in re.findall(r"<!--\s(\w+)/(paired_\d/rate)\s-->", read("docs/FROM_SCRATCH.md")):
        assert figures.evaluate(f"{study}/{rate}") == figures.evaluate(f"{study}/global_local/rate")
