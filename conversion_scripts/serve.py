"""Run `iha.serving.serve` as a command of the checkout."""

from iha.errors import run_cli
from iha.serving.serve import main


if __name__ == "__main__":
    run_cli(main)
