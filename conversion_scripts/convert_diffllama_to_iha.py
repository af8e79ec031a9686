"""Run `iha.api.convert_diffllama` as a command of the checkout."""

from functools import partial

from iha.api import convert_diffllama
from iha.cli import call
from iha.errors import run_cli


main = partial(call, convert_diffllama)

if __name__ == "__main__":
    run_cli(main)
