"""Draw the plots of studies again from their tables, without running anything.

example: python -m experiments.redraw polynomial_filters language_models
"""

import argparse
import re
from collections.abc import Sequence
from importlib import import_module

from common.command_io import path_from_root, read_json, run_cli
from experiments.options import RESULTS


STUDIES = sorted(path.stem for path in RESULTS.glob("*.json"))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", choices=STUDIES, metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--results", type=path_from_root, default=RESULTS, help="where the plots are written")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from benchmarks.harness import save_plot


def study_of(name: str) -> str:
    """Return the module of a table, whose name may end with a setting: a number, "full" or both."""
    return "experiments." + re.sub(r"(_\d+)?(_full)?$", "", name)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the plots and write them."""
    args = parse_arguments(argv)
    for name in args.studies:
        table = read_json(RESULTS / f"{name}.json")
        save_plot(import_module(study_of(name)).plot(table), args.results / f"{name}.png")
        print(f"Wrote {args.results / name}.png", flush=True)


if __name__ == "__main__":
    run_cli(main)
