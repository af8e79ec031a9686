"""Find in a directory of Python files what would break once they are remote code, as hub/remote_code.py does."""

import argparse
from pathlib import Path

from common.command_io import UserError, run_cli


def parse_arguments() -> argparse.Namespace:
    example = "example: python -m conversion_scripts.check_remote_code modeling_iha"
    parser = argparse.ArgumentParser(description=__doc__, epilog=example)
    parser.add_argument("dir", type=Path, help="directory of Python files, with or without a config.json")
    return parser.parse_args()


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from hub.remote_code import check_remote_code


def main() -> None:
    directory = parse_arguments().dir
    if not any(directory.glob("*.py")):
        raise UserError(f"{directory} holds no Python files: expected a saved model directory or a package.")
    problems = check_remote_code(directory)
    for problem in problems:
        print(problem)
    if problems:
        raise UserError(f"{directory} is not ready to be published: mistakes found: {len(problems)}.")
    print(f"{directory}: no mistakes found.")


if __name__ == "__main__":
    run_cli(main)
