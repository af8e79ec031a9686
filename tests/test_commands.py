"""Every command of the repository starts as a module from the checkout, and by path from anywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
DIRECTORIES = ("conversion_scripts", "sft", "benchmarks", "experiments")
COMMANDS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.py"), *(path for name in DIRECTORIES for path in (ROOT / name).glob("*.py")))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)

# One process imports what all commands need of other projects, seconds of work, and becomes each command in a fork that has
# imported nothing of this repository: `python` puts the script's directory first on the path, `python -m` the working directory.
FORKS = """
import os, runpy, sys
from pathlib import Path

import datasets, gguf, matplotlib.figure, reasoning_gym, torch, transformers, trl, typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel
from transformers.cli.serve import Serve
from trl import SFTTrainer

form, root, *commands = sys.argv[1:]
failed = []
for command in commands:
    if os.fork():
        _, status = os.wait()
        failed += [command] * (status != 0)
        continue
    output = os.open(command.replace("/", "."), os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    script = Path(root, command)
    sys.argv = [str(script), "--help"]
    if form == "path":
        sys.path[0] = str(script.parent)
        runpy.run_path(str(script), run_name="__main__")
    else:
        sys.path[0] = root
        runpy.run_module(command.removesuffix(".py").replace("/", "."), run_name="__main__", alter_sys=True)
    raise SystemExit("no --help")
raise SystemExit(" ".join(failed))
"""


def run(arguments: list, directory: Path) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("form", ["path", "module"])
def test_every_command_answers_help(form, tmp_path):
    process = run(["-c", FORKS, form, str(ROOT), *COMMANDS], tmp_path)
    assert process.returncode == 0, process.stderr
    texts = {command: (tmp_path / command.replace("/", ".")).read_text(encoding="utf-8") for command in COMMANDS}
    assert len(texts) > 20 and all("usage:" in text.lower() for text in texts.values()), texts


@pytest.mark.parametrize(
    ("arguments", "in_checkout"),
    [([str(ROOT / "benchmarks/cost.py")], False), (["-m", "benchmarks.cost"], True)],
    ids=["path", "module"],
)
def test_a_command_runs(arguments, in_checkout, tmp_path):
    """As a user starts it, with nothing prepared."""
    process = run([*arguments, "--preset", "tiny", "--tokens", "64"], ROOT if in_checkout else tmp_path)
    assert process.returncode == 0 and "whole model" in process.stdout, process.stderr
