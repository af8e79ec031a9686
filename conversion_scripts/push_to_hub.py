"""Run `iha.api.push` as a command of the checkout."""

from functools import partial

from iha.api import push
from iha.cli import call
from iha.errors import run_cli


main = partial(call, push)

if __name__ == "__main__":
    run_cli(main)
