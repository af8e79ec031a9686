"""Run `iha.hub.pull_from_hub` as a command of the checkout."""

from iha.errors import run_cli
from iha.hub.pull_from_hub import main


if __name__ == "__main__":
    run_cli(main)
