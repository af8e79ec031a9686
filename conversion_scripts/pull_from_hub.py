"""Run `iha.api.pull` as a command of the checkout."""

from functools import partial

from iha.api import pull
from iha.cli import call
from iha.errors import run_cli


main = partial(call, pull)

if __name__ == "__main__":
    run_cli(main)
