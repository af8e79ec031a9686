"""Start every command as a module from the checkout, and find an example in its help.

Launchers also start some by path. Imports between rooms go downwards. Tests share modules of helpers only.
"""

import gc
import json
import os
import re
import subprocess
import sys

import pytest
from helpers import DOCUMENTS

import modeling_iha
from common.command_io import ROOT, UserError, locate_checkpoint, new_directory, run_cli
from iha_commands.run import COMMANDS as COMMANDS_OF_IHA
from modeling_iha import convert


# Started by path, Python looks beside the script only. This line adds its checkout.
LINE = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md\n"
# From the lowest to the highest; CONTRIBUTING.md says what each is for.
ROOMS = (
    *("iha_commands", "modeling_iha", "configuration_iha", "common", "kinds", "model_cards", "hub"),
    *("conversion_scripts", "sft", "evaluation", "benchmarks", "experiments", "checkpoints"),
    "vllm_iha",
)
BY_PATH = ("sft/train.py", "sft/train_dpo.py", "sft/train_grpo.py", "evaluation/run.py")
# TRL's parser shows their keys, and needs PyTorch for it.
TRAINERS = ("sft.train", "sft.train_dpo", "sft.train_grpo", "sft.memory_plan")
COMMANDS = sorted(
    path
    for name in ROOMS
    for path in (ROOT / name).glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    and path.name != "run_program.py"  # run_code.py starts it; it runs without this repository on the path
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
    for path in BY_PATH:
        before, line, _ = (ROOT / path).read_text(encoding="utf-8").partition(LINE)
        assert line and not any(f"\n{word} {name}" in before for word in ("from", "import") for name in ROOMS), path
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, ROOT / "sft/train.py", "--help"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0 and "usage:" in process.stdout, process.stderr


def test_imports_go_downwards():
    upward = []
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        rank = ROOMS.index(path.relative_to(ROOT).parts[0])
        modules = re.findall(r"^ *(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        upward += [(path.name, room) for room in modules if room in ROOMS and ROOMS.index(room) > rank]
    assert not upward


# Starts each command of the request for its help, in one process. None but the trainers, which come last, may have
# imported PyTorch or Plotly after it.
HELP = f"""
TRAINERS = {TRAINERS}
import contextlib, io, json, os, runpy, sys

helps = {{}}
for name in json.load(sys.stdin):
    sys.argv = [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        runpy.run_module(name, run_name="__main__")
    helps[name] = out.getvalue()
    assert name in TRAINERS or not {{"torch", "plotly"}} & sys.modules.keys(), name
json.dump(helps, sys.stdout)
"""


def test_a_command_answers_help_without_pytorch():
    names = [f"{path.parent.name}.{path.stem}" for path in COMMANDS]
    names.sort(key=lambda name: (name in TRAINERS, name))
    process = subprocess.run(
        [sys.executable, "-c", HELP], input=json.dumps(["demo", *names]), cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    for name, out in json.loads(process.stdout).items():
        out = " ".join(out.lower().split())
        assert "usage:" in out, name
        if name != "demo":
            assert "example" in out and name.rpartition(".")[2] in out, name
            assert documented_options(name) <= {*re.findall(r"--[\w-]+", out)}, name


def test_a_wheel_brings_its_commands(tmp_path):
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    missing = [name for name in COMMANDS_OF_IHA.values() if not list(tmp_path.glob(f"*/{name.replace('.', '/')}.py"))]
    assert not missing and {path.name for path in tmp_path.iterdir()} == {
        "configuration_iha",
        "iha_commands",
        "modeling_iha",
    }
    command = [sys.executable, "-I", tmp_path / "iha_commands/run.py", "convert", "me/model", tmp_path / "new"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 1 and re.fullmatch(r"Error: .*such as --num-pseudo-heads 2.*\n", process.stderr)


def test_python_runs_a_command(tmp_path, capfd):
    with pytest.raises(RuntimeError, match=r"^Error: num_pseudo_heads=0: expected at least 1") as failed:
        convert("me/model", tmp_path / "new", num_pseudo_heads=0, kind=None, options={"a": 1})
    assert capfd.readouterr().out.strip() == str(failed.value)


def test_a_package_that_is_missing_is_one_line():
    program = "from common.command_io import run_cli; import absent.part"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1
    assert re.fullmatch(r"Error: the package absent is not installed: pip install .*\n", process.stderr)


def test_an_interrupt_during_imports_is_one_line():
    program = "from common.command_io import run_cli; raise KeyboardInterrupt"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode not in (0, 1) and process.stderr == "Interrupted.\n"


def test_a_mistyped_path_is_no_question_to_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "smollm2-iha").mkdir(parents=True)
    with pytest.raises(UserError, match=r"outputs/smolm2-iha is no directory: did you mean outputs/smollm2-iha\?$"):
        locate_checkpoint("outputs/smolm2-iha")
    with pytest.raises(UserError, match="outputs/final is no directory, and outputs is one: expected"):
        locate_checkpoint("outputs/final")
    with pytest.raises(UserError, match=r"output is no directory: did you mean outputs\?$"):
        locate_checkpoint("output")
    assert locate_checkpoint("gpt2") == ("gpt2", {}) and locate_checkpoint("me/outputs") == ("me/outputs", {})


def test_a_hint_names_an_extra_that_exists():
    program = "import common.command_io as c; c.find_spec = lambda _: None; raise ModuleNotFoundError(name='uvicorn')"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "modeling-iha[serve]" in process.stderr
    extras = re.findall(r'^        "(\w+)": \[', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    for path in (*(ROOT / document for document in DOCUMENTS), *ROOT.glob("*/*.py")):
        named = re.findall(r'"(?:modeling-iha|\.)\[([\w,]+)\]', path.read_text(encoding="utf-8"))
        assert {extra for each in named for extra in each.split(",")} <= {*extras}, path


def test_the_version_is_said_once():
    command = [sys.executable, ROOT / "iha_commands" / "run.py", "--version"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout == f"iha {modeling_iha.__version__}\n"


def test_an_option_is_taken_with_hyphens_and_underscores(monkeypatch):
    given = []
    monkeypatch.setattr(sys, "argv", ["command", "--max_length=a_b", "--seed", "c_d", "--options", "e_f=1"])
    run_cli(lambda: given.extend(sys.argv[1:]))
    assert given == ["--max-length=a_b", "--seed", "c_d", "--options", "e_f=1"]


def test_an_interrupted_command_says_how_to_go_on(tmp_path, capsys):
    def interrupted():
        with new_directory(tmp_path / "new"):
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        run_cli(interrupted)
    expected = f"Interrupted. {tmp_path / 'new'} was not made: the same command starts again.\n"
    assert stop.value.code == 130 and capsys.readouterr().err == expected


def test_a_command_imports_without_the_garbage_collector_and_runs_with_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")  # as before its imports
    run_cli(lambda: None)
    assert not gc.isenabled()
    monkeypatch.undo()
    states = []
    run_cli(lambda: states.append(gc.isenabled()))
    assert states == [True] and gc.isenabled()


def test_no_test_module_is_imported():
    # An imported test would run twice.
    for path in ROOT.glob("tests/**/*.py"):
        assert not re.findall(r"^\s*(?:from|import) test_\w+", path.read_text(encoding="utf-8"), re.MULTILINE), path
