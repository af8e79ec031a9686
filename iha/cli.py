"""Run a command of this package: `iha convert`, `verify`, `push`, `pull`, `cost` or `serve`.

example: iha convert HuggingFaceTB/SmolLM2-135M-Instruct smollm2-iha --num-pseudo-heads 2
"""

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from iha import api
from iha.cost_arguments import cost_arguments
from iha.errors import run_cli


FUNCTIONS = {"convert": api.convert, "verify": api.verify, "push": api.push, "pull": api.pull}


def call(command: Callable, words: Sequence[str] | None = None) -> None:
    """Call a function of `iha.api` with the arguments in the words of a command line.

    Typer parses them and does not call the function, because it would turn Ctrl-C into an error of its own.
    """
    command(**parse(command, words))


def parse(command: Callable, words: Sequence[str] | None) -> dict[str, Any]:
    """Return the arguments of a function of `iha.api` in words. Exit after help, and after words that are wrong.

    Typer reads the options from the signature of `command`, which `take` has too, and calls `take` with their values.
    """
    arguments: dict[str, Any] = {}

    @wraps(command)
    def take(**given):
        arguments.update(given)

    description = inspect.getdoc(command).replace(f"iha {command.__name__}", sys.argv[0])  # as it was started
    description = description.replace("\nexample: ", "\n\b\nexample: ")  # which no line break shall cut
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=description, context_settings={"help_option_names": ["-h", "--help"]})(take)
    try:
        app(words, prog_name=sys.argv[0])
    except SystemExit:  # Typer always exits
        if not arguments:  # it has printed help, or what is wrong
            raise
    return arguments


def own_version() -> str:
    """Return the version of this package, if it is installed."""
    try:
        return version("modeling-iha")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"


def run(name: str) -> None:
    """Run the command `name` with the arguments of the command line."""
    if name in FUNCTIONS:
        call(FUNCTIONS[name])
    elif name == "cost":
        arguments = cost_arguments()  # wrong ones stop it before PyTorch is imported
        importlib.import_module("iha.cost").cost(arguments)
    else:  # "serve", whose arguments Transformers' server parses
        importlib.import_module("iha.serving.serve").main()


def main() -> None:
    """Run the command that the first argument names, with the other arguments."""
    parser = argparse.ArgumentParser("iha", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    parser.add_argument(
        "command", choices=[*FUNCTIONS, "cost", "serve"], help="`iha COMMAND --help` describes it and its arguments"
    )
    name = parser.parse_args(sys.argv[1:2]).command
    sys.argv = [f"iha {name}", *sys.argv[2:]]
    run_cli(lambda: run(name))


if __name__ == "__main__":
    main()
