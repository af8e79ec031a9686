"""What the documents tell a new user to type, open or rely on is there, and the quickstart runs."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from tiny_sources import save_tiny_source


ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/LOG.md", "sft/recipes/README.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_named_files_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    linked = [(ROOT / document).parent / path for path in re.findall(r"\]\((?!http)([^)#]+)\)", text)]
    named = [ROOT / path for path in re.findall(r"\b(?:conversion_scripts|sft|tests|benchmarks|docs)/[\w/.]*\w", text)]
    missing = [str(path) for path in linked + named if "NAME" not in path.parts and not path.exists()]
    assert not missing


def test_the_tests_of_the_tables_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for file, test in re.findall(r"(test_\w+\.py)::(test_\w+)", text):
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_the_quickstart_runs(tmp_path, monkeypatch, capsys):
    block = re.search(
        r"## Quickstart\n```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    command = re.search(r"python (conversion_scripts/\S+) (\S+) (.*)", block[1])
    save_tiny_source(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [command[1], str(tmp_path / "source"), *command[3].split()])
    runpy.run_path(str(ROOT / command[1]), run_name="__main__")
    capsys.readouterr()
    exec(compile(block[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
