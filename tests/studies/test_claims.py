"""Test that each claim of research/README.md has a verdict, and a command that exists, here or at its commit."""

import re
import subprocess
from importlib.util import find_spec

import pytest

from iha.errors import ROOT
from iha.model_cost import parameters_of, passes_of_model
from modeling_iha import IHAConfig


PAGE = (ROOT / "research" / "README.md").read_text(encoding="utf-8")
VERDICTS = re.compile(
    r"reproduced|reproduced with a correction|not reproduced|undecided|not run here"
    r"|needs [\d,]+ GPU-hours( and more)?"
)
# A commit, which holds for all commands after it in its cell.
AT = re.compile(r"^([0-9a-f]{7,40})\b")


def claims() -> list[dict[str, str]]:
    """Return the rows of the table, by its columns."""
    lines = PAGE.partition("\n## ")[0].splitlines()
    columns, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return [dict(zip(columns, row, strict=True)) for row in cells]


CLAIMS = claims()


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


def has_history() -> bool:
    try:
        return git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    except OSError:  # there is no git
        return False


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


def is_at(commit: str, command: str) -> bool:
    """Return if a commit, which a fresh clone has, holds the module of a command."""
    path = command.split()[2].replace(".", "/") + ".py"
    in_this_branch = git("merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
    return in_this_branch and git("cat-file", "-e", f"{commit}:{path}").returncode == 0


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row["claim"])
def test_each_claim_has_a_verdict_and_a_command_that_exists(row):
    assert VERDICTS.fullmatch(row["verdict"])
    commands = re.findall("`([^`]+)`", row["command"])
    commit = AT.match(row["command"])
    if not commit:
        assert all(is_there(command) for command in commands)
    elif has_history():
        assert all(is_at(commit[1], command) for command in commands)
    # A verdict needs a command, and a recipe alone bears none.
    bears = "reproduced" in row["verdict"] or row["verdict"] == "undecided"
    assert bool(commands) or not (bears or "GPU" in row["verdict"])
    assert (row["ours"] != "–") == bears


@pytest.mark.skipif(not has_history(), reason="this copy has no git history")
def test_every_commit_that_a_page_names_is_in_the_history():
    pages = [path for path in git("ls-files", "*.md").stdout.split() if (ROOT / path).is_file()]
    text = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in pages)
    named = set(re.findall(r"\bcommits? ([0-9a-f]{7,40})\b", text)) | {
        commit for row in CLAIMS for commit in AT.findall(row["command"])
    }
    assert named
    assert [commit for commit in named if git("merge-base", "--is-ancestor", commit, "HEAD").returncode] == []


def test_parameters_of_dcmha_are_those_of_its_table_2():
    (row,) = (row for row in CLAIMS if row["claim"].startswith("DCMHA, Table 2: more parameters"))
    ratios, shares = [], []
    for preset in ("dcformer-1.4b", "dcformer-6.9b"):
        config = IHAConfig.from_preset(preset)
        whole = parameters_of(config)
        plain = parameters_of(IHAConfig.from_preset(preset, attention_kinds="mha"))
        embeddings = 2 * config.vocab_size * config.hidden_size  # untied
        ratios.append(f"{whole / plain:.3f}")
        shares.append(f"{(whole - plain) / (plain - embeddings):.1%}")
    expected = f"{', '.join(ratios)} times the whole model's; {', '.join(shares)} without embeddings"
    assert row["ours"] == expected


@pytest.mark.slow  # the figure of one claim, from counts that test_cost.py compares
def test_flops_of_dcmha_in_its_table_2():
    (row,) = (row for row in CLAIMS if row["claim"].startswith("DCMHA, Table 2: more FLOPs"))
    shares = []
    for preset, tokens in (("dcformer-1.4b", 2048), ("dcformer-6.9b", 2048), ("dcformer-6.9b", 8192)):
        layers = IHAConfig.from_preset(preset).num_hidden_layers
        fields = {"layer_types": ["full_attention"] * layers, "max_position_embeddings": tokens}
        composed = passes_of_model(IHAConfig.from_preset(preset, **fields), tokens).prefill
        config = IHAConfig.from_preset(preset, attention_kinds="mha", **fields)
        plain = passes_of_model(config, tokens).prefill
        head = tokens * config.vocab_size * config.hidden_size
        shares.append(f"{(composed - plain) / (plain - head):.1%}")
    assert row["ours"] == ", ".join(shares)
