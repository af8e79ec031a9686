"""Run `iha.api.convert` as a command of the checkout."""

from functools import partial

from iha.api import convert
from iha.cli import call
from iha.errors import run_cli


main = partial(call, convert)

if __name__ == "__main__":
    run_cli(main)
