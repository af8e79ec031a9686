"""Run the commands of this repository after an installation: `iha convert`, or `convert` in Python.

A wheel holds the rooms of the checkout in this folder: names such as `common` belong to nobody's site-packages. So
each command runs in a process of its own, where they are on the path.

example: iha convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-iha --num-pseudo-heads 2
"""

import argparse
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
ROOMS = HERE if (HERE / "common").is_dir() else HERE.parent  # of a wheel, or of a checkout
VERSION = runpy.run_path(str(HERE / "__init__.py"))["__version__"]  # by path too, as `_run` starts this file
COMMANDS = {
    "convert": "conversion_scripts.convert_llama_to_iha",
    "verify": "conversion_scripts.verify_conversion",
    "push": "conversion_scripts.push_to_hub",
    "pull": "conversion_scripts.pull_from_hub",
    "list": "conversion_scripts.list_checkpoints",
    "cost": "research.benchmarks.cost",
    "export": "conversion_scripts.export",
    "serve": "conversion_scripts.serve",
}


def main() -> None:
    """Run the command that the first argument names, with the other arguments."""
    parser = argparse.ArgumentParser("iha", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    parser.add_argument("command", choices=COMMANDS, help="`iha COMMAND --help` says what it does and takes")
    name = parser.parse_args(sys.argv[1:2]).command
    sys.argv = [f"iha {name}", *sys.argv[2:]]
    sys.path.insert(0, str(ROOMS))
    runpy.run_module(COMMANDS[name], run_name="__main__")


def convert(source: str | os.PathLike, destination: str | os.PathLike, **options: Any) -> None:
    """Convert a checkpoint without changing what it computes: `convert(source, destination, num_pseudo_heads=2)`.

    The options of this and of the other functions are those of the command, with underscores; `iha convert --help`
    lists them. Raise `RuntimeError` with the line that the command ends with when it fails.
    """
    _run("convert", source, destination, **options)


def verify(source: str | os.PathLike, converted: str | os.PathLike, **options: Any) -> None:
    """Check that a converted checkpoint computes what its source does. Raise `RuntimeError` if it does not."""
    _run("verify", source, converted, **options)


def push(directory: str | os.PathLike, repo_id: str, **options: Any) -> None:
    """Publish a saved model directory on the Hub. Raise `RuntimeError`."""
    _run("push", directory, repo_id, **options)


def pull(repo_id: str, directory: str | os.PathLike, **options: Any) -> None:
    """Fetch a checkpoint from the Hub into a new directory. Raise `RuntimeError`."""
    _run("pull", repo_id, directory, **options)


def _run(name: str, *arguments: str | os.PathLike, **options: Any) -> None:
    words = [sys.executable, __file__, name]
    for option, value in options.items():
        if value is not None and value is not False:  # 0 is a value
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{option.replace('_', '-')}" + ("" if value is True else f"={text}")]
    last = ""
    words += ["--", *map(str, arguments)]
    # A notebook shows what this process prints, and not what another one does.
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for last in process.stdout or ():
            print(last, end="", flush=True)
    if process.returncode != 0:
        raise RuntimeError(last.strip())


if __name__ == "__main__":
    main()
