"""Run a command of this package: `iha convert`, `verify`, `push`, `pull`, `cost` or `serve`.

In a checkout also `iha train` (`python -m sft.train`), `evaluate` (`evaluation.run`) and `compare`
(`research.compare`).

example: iha convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-iha --num-pseudo-heads 2
"""

import argparse
import importlib
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, metadata, version

from iha.arguments import (
    convert_arguments,
    cost_arguments,
    pull_arguments,
    push_arguments,
    verify_arguments,
)
from iha.errors import IS_CHECKOUT, ROOT, UserError, run_cli


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
# Commands of a checkout, which read recipes, tasks and studies that no wheel holds, and the module of each.
COMMANDS_OF_A_CHECKOUT = {"train": "sft.train", "evaluate": "evaluation.run", "compare": "research.compare"}


def own_version() -> str:
    """Return the version of this package, if it is installed."""
    try:
        return version("modeling-iha")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"


def run_in_checkout(name: str) -> None:
    """Run a command of a checkout. Raise `UserError` if only the package is installed."""
    module = COMMANDS_OF_A_CHECKOUT[name]
    if not IS_CHECKOUT:
        addresses = dict(entry.split(", ") for entry in metadata("modeling-iha").get_all("Project-URL"))
        clone = f'run git clone {addresses["Repository"]} and, in the new directory, pip install -e ".[scripts]"'
        raise UserError(f"iha {name} needs a checkout, because it is `python -m {module}`: {clone}.")
    sys.path.insert(0, str(ROOT))
    runpy.run_module(module, run_name="__main__")


def run(name: str) -> None:
    """Run the command `name` with the arguments of the command line."""
    if name in COMMANDS_OF_A_CHECKOUT:
        run_in_checkout(name)
        return
    module, parse = COMMANDS[name]
    if parse is None:
        importlib.import_module(module).main()
        return
    arguments = parse()
    getattr(importlib.import_module(module), name)(**arguments)


def main() -> None:
    """Run the command that the first argument names, with the other arguments."""
    parser = argparse.ArgumentParser("iha", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    names = [*COMMANDS, *COMMANDS_OF_A_CHECKOUT]
    parser.add_argument("command", choices=names, help="`iha COMMAND --help` describes it and its arguments")
    name = parser.parse_args(sys.argv[1:2]).command
    sys.argv = [f"iha {name}", *sys.argv[2:]]
    run_cli(lambda: run(name))


if __name__ == "__main__":
    main()
