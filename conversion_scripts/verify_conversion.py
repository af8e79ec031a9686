"""Run `iha.api.verify` as a command of the checkout."""

from functools import partial

from iha.api import verify
from iha.cli import call
from iha.errors import run_cli


main = partial(call, verify)

if __name__ == "__main__":
    run_cli(main)
