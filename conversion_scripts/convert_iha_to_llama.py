"""Run `iha.conversion.convert_iha_to_llama` as a command of the checkout."""

from iha.conversion.convert_iha_to_llama import main
from iha.errors import run_cli


if __name__ == "__main__":
    run_cli(main)
