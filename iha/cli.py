"""Run a command of this package: `iha convert`, `verify`, `push`, `pull`, `cost` or `serve`.

example: iha convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-iha --num-pseudo-heads 2
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from importlib.metadata import version

from iha.arguments import (
    convert_arguments,
    cost_arguments,
    pull_arguments,
    push_arguments,
    verify_arguments,
)
from iha.errors import run_cli


# A module is imported when its arguments are checked, because PyTorch takes seconds. Its function has the command's
# name.
COMMANDS = {
    "convert": "iha.conversion_scripts.convert_llama_to_iha",
    "verify": "iha.conversion_scripts.verify_conversion",
    "push": "iha.conversion_scripts.push_to_hub",
    "pull": "iha.conversion_scripts.pull_from_hub",
    "cost": "iha.cost",
    "serve": "iha.conversion_scripts.serve",
}
ARGUMENTS: dict[str, Callable[[], dict]] = {
    "convert": convert_arguments,
    "verify": verify_arguments,
    "push": push_arguments,
    "pull": pull_arguments,
    "cost": cost_arguments,
}


def run(name: str) -> None:
    """Run the command `name` with the arguments of the command line."""
    if name not in ARGUMENTS:  # `serve` parses those of Transformers' server
        importlib.import_module(COMMANDS[name]).main()
        return
    arguments = ARGUMENTS[name]()
    getattr(importlib.import_module(COMMANDS[name]), name)(**arguments)


def main() -> None:
    """Run the command that the first argument names, with the other arguments."""
    parser = argparse.ArgumentParser("iha", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('modeling-iha')}")
    parser.add_argument("command", choices=COMMANDS, help="`iha COMMAND --help` describes it and its arguments")
    name = parser.parse_args(sys.argv[1:2]).command
    sys.argv = [f"iha {name}", *sys.argv[2:]]
    run_cli(lambda: run(name))


if __name__ == "__main__":
    main()
