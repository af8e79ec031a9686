"""Test what a release needs: metadata, workflows, the citation, and commands without a checkout.

`make release-check` builds the wheel and tries it in a new environment, which takes minutes."""

import re
import shutil
import subprocess
import sys

import check_release
import pytest
import yaml

from iha import errors
from iha.errors import ROOT


GITHUB = ROOT / ".github"
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def read_yaml(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_a_package_index_shows_absolute_links_to_files_that_exist():
    command = [sys.executable, "setup.py", "--quiet", "--long-description"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", shown)
    linked = re.findall(r"\]\(https://github\.com/[^/]+/[^/]+/(?:blob|raw)/v[\d.]+/([^)#]*)", shown)
    assert len(linked) > 20 and not [name for name in linked if not (ROOT / name).exists()]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Make a checkout of four files, of version 1.2.3 and with a placeholder for the address."""
    (tmp_path / "modeling_iha").mkdir()
    (tmp_path / "modeling_iha" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "interleaved_heads.ipynb", tmp_path / "examples")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(check_release, "CHECKOUT", tmp_path)
    monkeypatch.delenv("PLACEHOLDER", raising=False)
    return tmp_path


def test_a_placeholder_is_not_released(checkout, monkeypatch):
    setup = re.sub(
        "^REPOSITORY = .*",
        'REPOSITORY = "https://github.com/OWNER/x"',
        (checkout / "setup.py").read_text(),
        flags=re.M,
    )
    (checkout / "setup.py").write_text(setup)
    notebook, readme = checkout / "examples" / "interleaved_heads.ipynb", checkout / "README.md"
    for page in (notebook, readme):
        page.write_text(page.read_text(encoding="utf-8").replace("/OWNER/modeling-iha", "/OWNER/x"), encoding="utf-8")
    with pytest.raises(
        SystemExit, match="^Error: REPOSITORY in setup.py is the placeholder https://github.com/OWNER/x"
    ):
        check_release.check_address("")
    monkeypatch.setenv("PLACEHOLDER", "allowed")
    check_release.check_address("")
    monkeypatch.delenv("PLACEHOLDER")
    (checkout / "setup.py").write_text(setup.replace("OWNER", "me"))
    with pytest.raises(
        SystemExit, match="interleaved_heads.ipynb does not install from https://github.com/me/x: write"
    ):
        check_release.check_address("")
    notebook.write_text(notebook.read_text(encoding="utf-8").replace("/OWNER/", "/me/"), encoding="utf-8")
    with pytest.raises(SystemExit, match="README.md does not clone https://github.com/me/x, the REPOSITORY in"):
        check_release.check_address("")
    readme.write_text(readme.read_text(encoding="utf-8").replace("/OWNER/", "/me/"), encoding="utf-8")
    check_release.check_address("")


def test_a_tag_is_that_of_the_version(checkout, monkeypatch):
    monkeypatch.setenv("PLACEHOLDER", "allowed")
    check_release.check_address("v1.2.3")
    with pytest.raises(SystemExit, match="^Error: the tag is v1.2, and __version__ in modeling_iha is 1.2.3: make"):
        check_release.check_address("v1.2")


def test_a_wheel_is_not_told_to_install_a_checkout(monkeypatch):
    assert errors.missing("trl").endswith('run pip install -e ".[scripts]" in the checkout.')
    monkeypatch.setattr(errors, "IS_CHECKOUT", False)
    assert errors.missing("trl") == 'the package trl is not installed: run pip install "modeling-iha[scripts]".'


def test_workflows_run_targets_of_the_makefile_alone():
    ran = []
    for path in (GITHUB / "workflows").glob("*.yml"):
        for job in read_yaml(path)["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            for command in filter(None, (step.get("run") for step in job["steps"])):
                named = re.fullmatch(r"make (?:([\w-]+)|\$\{\{ matrix\.(\w+) \}\})", command)
                assert named, f"{path.name}: {command}"
                ran += [named[1]] if named[1] else matrix[named[2]]
    assert {"test", "test-oldest", "test-newest", "test-vllm", "release-check", "gpu"} == {*ran} and {*ran} <= {
        *TARGETS
    }


def test_workflows_take_the_supported_pythons():
    tested = read_yaml(GITHUB / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert tested == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup)


def test_the_citation_is_that_of_the_readme():
    citation = read_yaml(ROOT / "CITATION.cff")
    assert "version" not in citation  # modeling_iha/__init__.py has it
    paper = citation["preferred-citation"]
    entry = (ROOT / "README.md").read_text(encoding="utf-8").partition("```bibtex")[2]
    names = " ".join(re.search(r"author = \{(.*?)\}", entry, re.DOTALL)[1].split()).split(" and ")
    assert names == [f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]]
    assert f"title  = {{{paper['title']}}}" in entry and paper["url"].rpartition("/")[2] in entry
