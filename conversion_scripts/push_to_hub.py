"""Run `iha.hub.push_to_hub` as a command of the checkout."""

from iha.errors import run_cli
from iha.hub.push_to_hub import main


if __name__ == "__main__":
    run_cli(main)
