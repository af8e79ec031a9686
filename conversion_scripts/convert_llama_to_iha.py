"""Run `iha.conversion.convert_llama_to_iha` as a command of the checkout."""

from iha.conversion.convert_llama_to_iha import main
from iha.errors import run_cli


if __name__ == "__main__":
    run_cli(main)
