"""Run `iha.conversion.verify_conversion` as a command of the checkout."""

from iha.conversion.verify_conversion import main
from iha.errors import run_cli


if __name__ == "__main__":
    run_cli(main)
