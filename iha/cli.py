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


# From a command to its module and the function that parses its arguments. The module is imported when they are
# checked, because PyTorch takes seconds. Its function has the command's name. `serve` parses by Transformers' server.
COMMANDS: dict[str, tuple[str, Callable[[], dict] | None]] = {
    "convert": ("iha.conversion.convert_llama_to_iha", convert_arguments),
    "verify": ("iha.conversion.verify_conversion", verify_arguments),
    "push": ("iha.hub.push_to_hub", push_arguments),
    "pull": ("iha.hub.pull_from_hub", pull_arguments),
    "cost": ("iha.cost", cost_arguments),
    "serve": ("iha.serving.serve", None),
}


def run(name: str) -> None:
    """Run the command `name` with the arguments of the command line."""
    module, parse = COMMANDS[name]
    if parse is None:
        importlib.import_module(module).main()
        return
    arguments = parse()
    getattr(importlib.import_module(module), name)(**arguments)


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
