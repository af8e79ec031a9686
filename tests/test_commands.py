"""Start every command as a module from the checkout, and find an example in its help.

Launchers also start some by path. Imports between folders go downwards. Tests share modules of helpers only.
"""

import ast
import os
import re
import runpy
import subprocess
import sys
from contextlib import suppress
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest
from helpers import DOCUMENTS

from iha import cli
from iha.errors import ROOT, UserError
from iha.processes import run_in_clean_process
from iha.sources import find_source, locate


# Started by path, Python looks next to the script only. This line adds its checkout.
LINE = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md\n"
# From the lowest to the highest; CONTRIBUTING.md says what each is for.
FOLDERS = (
    "modeling_iha",
    "vllm_iha",  # also serves checkpoints with their own code where nothing of these is installed
    "configuration_iha",
    "iha",
    "conversion_scripts",
    "sft",
    "evaluation",
    "research/benchmarks",
    "research/experiments",
    "research",
    "vllm_iha/tests",
)
BY_PATH = ("sft/train.py", "evaluation/run.py")
# TRL's parser shows their keys, and needs PyTorch for it.
COMMANDS = sorted(
    path
    for name in FOLDERS
    for path in (ROOT / name).glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


def documented_options(command: str) -> set[str]:
    """Return the options that documents give to a command, in blocks or in the text."""
    options = set()
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
        for block, span in re.findall(r"^```(.*?)^```|(?<!`)`([^`]+)`", text, re.DOTALL | re.MULTILINE):
            for line in block.splitlines() or [span.replace("\n", " ")]:
                given = re.search(rf"\b{re.escape(command)}(?:\.py)?( [^;|&]*)", line.replace("/", "."))
                options |= set(re.findall(r" (--[\w-]+)", given[1])) if given else set()
    return options


def test_a_command_by_path_finds_its_own_checkout(tmp_path):
    """Run the beginning of each in a checkout that holds one module, from another directory."""
    (tmp_path / "iha").mkdir()
    (tmp_path / "iha" / "__init__.py").touch()
    (tmp_path / "iha" / "of_this_checkout.py").write_text("print('found')")
    (tmp_path / "elsewhere").mkdir()
    names = {folder.partition("/")[0] for folder in FOLDERS}
    for path in BY_PATH:
        before, line, _ = (ROOT / path).read_text(encoding="utf-8").partition(LINE)
        assert line and not any(f"\n{word} {name}" in before for word in ("from", "import") for name in names), path
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(f"{before}{line}import iha.of_this_checkout\n", encoding="utf-8")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, tmp_path / path, "--help"]
        process = subprocess.run(command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True)
        assert process.stdout == "found\n", process.stderr


def modules() -> dict[str, Path]:
    """Return the file of each module in `FOLDERS` by its dotted name; a package has the name of its folder."""
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    names = {path: path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in files}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(module: str, path: Path) -> set[str]:
    """Return the dotted names of what a module imports anywhere in it; `from a import b` may import a.b or a's b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            source = resolve_name("." * node.level + (node.module or ""), package)
            names |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return names


def rank(module: str) -> int:
    """Return the place in `FOLDERS` of the innermost folder that holds a module."""
    folders = [folder for folder in FOLDERS if f"{module}.".startswith(folder.replace("/", ".") + ".")]
    return FOLDERS.index(max(folders, key=len))


def test_imports_go_downwards_and_in_iha_not_in_circles():
    files = modules()
    graph = {name: imported(name, path) & files.keys() for name, path in files.items()}
    upward = [(name, other) for name, others in graph.items() for other in others if rank(other) > rank(name)]
    assert not upward
    # In modeling_iha and vllm_iha a function imports, when it is called, a module that imports its own.
    of_iha = {name: others for name, others in graph.items() if name.partition(".")[0] == "iha"}
    TopologicalSorter(of_iha).prepare()  # raises an error that names the modules of a circle


@pytest.mark.parametrize("path", [*COMMANDS, ROOT / "demo.py"], ids=lambda path: path.stem)
def test_a_command_answers_help_with_an_example(path, monkeypatch, capsys):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with suppress(SystemExit):
        runpy.run_module(name, run_name="__main__")
    out = " ".join(capsys.readouterr().out.lower().split())
    assert "usage:" in out
    if name != "demo":
        shown = re.split("examples?: ", out)[1:]
        assert any(("iha convert" if name == "iha.cli" else path.stem) in text for text in shown)
        assert documented_options(name) <= {*re.findall(r"--[\w-]+", out)}


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("sft.train", "trl", "scripts"),
        ("sft.make_reasoning_data", "reasoning_gym", "scripts"),
        ("sft.score_reasoning", "reasoning_gym", "scripts"),
        ("research.compare", "matplotlib", "scripts"),
        ("evaluation.run", "lm_eval", "scripts,evaluation"),
    ],
)
def test_a_missing_extra_is_one_line(command, package, extra, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    words = {"sft.make_reasoning_data": ["x.jsonl", "--rows", "1"], "sft.score_reasoning": ["model", __file__]}
    monkeypatch.setattr(sys, "argv", [command, *words.get(command, [])])
    with pytest.raises(SystemExit):
        runpy.run_module(command, run_name="__main__")
    how = f'run pip install -e ".[{extra}]" in the checkout.'
    # Python may warn before it that the module was imported already.
    assert capsys.readouterr().err.endswith(f"Error: the package {package} is not installed: {how}\n")


def test_a_path_of_the_command_line_may_begin_with_the_home_directory():
    """Parse paths by `expanded` or a function that calls it: no shell replaces the "~" of --output=~/x."""
    files = [path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert not [path.name for path in files if "type=Path" in path.read_text(encoding="utf-8")]


def test_a_wheel_brings_its_commands(tmp_path):
    """Run one of them in a process whose only copy of the package is that of the wheel."""
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    missing = [path for path in (ROOT / "iha").rglob("*.py") if not (tmp_path / path.relative_to(ROOT)).exists()]
    assert not missing
    data = ("iha/card_template.md", "iha/conversion/verify_text.txt", "configuration_iha/tiny.json")
    assert all((tmp_path / name).exists() for name in data)
    wheel = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.py")}
    assert not [path for path in wheel if not (ROOT / path).exists()]  # a checkout imports what an installation does
    assert {path.name for path in tmp_path.iterdir()} == {"configuration_iha", "iha", "modeling_iha"}
    program = """
sys.meta_path = [finder for finder in sys.meta_path if type(finder).__name__ != "Blocker"]
sys.path.insert(0, request["wheel"])
before = list(sys.path)
from iha import api, cli
from iha.conversion import convert_llama_to_iha
assert sys.path == before
assert not any(module.__file__.startswith(request["root"]) for module in (api, convert_llama_to_iha))
sys.argv[:] = ["iha", "convert", "me/model", "new", "--num-pseudo-heads", "0"]
cli.main()
"""
    with pytest.raises(UserError, match=r"^Error: num_pseudo_heads=0: expected at least 1\.$"):
        run_in_clean_process(program, {"wheel": str(tmp_path), "root": str(ROOT)})


def test_a_mistyped_path_is_no_question_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    with pytest.raises(UserError, match="outputs/final is not a directory, and outputs is one: expected"):
        find_source("outputs/final")
    (tmp_path / "outputs" / "model.safetensors").touch()
    with pytest.raises(UserError, match="model.safetensors is a file: expected its directory, outputs, or a GGUF"):
        find_source("outputs/model.safetensors")
    for name in ("gpt2", "me/outputs"):
        source = locate(name)
        assert (str(source), source.location, source.path, source.arguments) == (name, name, None, {})


@pytest.mark.parametrize("command", cli.FUNCTIONS.values(), ids=cli.FUNCTIONS)
def test_h_is_short_for_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.call(command, ["-h"])
    assert not stop.value.code and "Usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert", "--nosuch"], "Usage: iha convert"),
        (
            ["convert", "nosuch", "out", "--num-pseudo-heads", "2"],
            "Error: nosuch is not a directory, and the Hub does",
        ),
        (["convert", "nosuch", "out"], "Error: kind 'iha' needs a number of pseudo-heads"),
        (["convert", "nosuch", "out", "--kind", "paired_heads"], "Error: kind='paired_heads' has no exact start from"),
        (["verify", "nosuch", "out", "--tokens", "1"], "Error: tokens=1: expected more than max_new_tokens=64"),
        (["push", "nosuch", "me/iha"], "Error: nosuch is not a saved model: expected a directory"),
        (
            ["push", "model", "me/iha"],
            "Error: The card of model does not state its license: add it, or give --license.",
        ),
        (["push", ".", "/me/iha", "--dry-run"], "Error: '/me/iha' is not a valid repository name"),
        (["pull", "me/iha", "model"], "exists and is not an empty directory"),
        (["cost", "--preset", "nosuch", "--tokens", "2"], "Error: --preset nosuch: expected one of"),
        (["cost", "--config", "tiny", "--tokens", "2"], "Error: --config tiny: this is the name of a preset: give it"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_wrong_arguments_are_refused_before_pytorch_is_imported(words, said, tmp_path):
    program = f"""
import atexit, os, sys
sys.path.insert(0, {str(ROOT)!r})
from iha import cli
sys.argv[1:] = {words!r}
atexit.register(lambda: os._exit(3) if "torch" in sys.modules or "transformers" in sys.modules else None)
cli.main()
"""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode in (1, 2) and said in process.stderr, process.stderr
