"""Draw the plots of studies and benchmarks again from their tables, without running anything.

example: python -m experiments.redraw polynomial_filters language_models schedule
"""

import argparse
import re
from collections.abc import Sequence
from importlib import import_module

from common.command_io import ROOT, path_from_root, read_json, run_cli
from experiments.options import RESULTS


BENCHMARKS = ROOT / "benchmarks" / "results"
# Name -> path of every table that has a plot.
PATHS = [*sorted(RESULTS.glob("*.json")), *sorted(BENCHMARKS.rglob("*.json"))]
TABLES = {path.stem: path for path in PATHS if path.with_suffix(".png").exists()}
STUDIES = [name for name, path in TABLES.items() if path.parent == RESULTS]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=TABLES, metavar="NAME", help=", ".join(TABLES))
    parser.add_argument("--results", type=path_from_root, help="where the plots are written (beside the tables)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from common.plots import save_plot


def study_of(name: str) -> str:
    """Return the module of a table, whose name may end with a setting: a number, "full" or both.

    The tables of a benchmark for several CPUs lie in a directory of its name."""
    folder = TABLES[name].parent
    if folder == RESULTS:
        return "experiments." + re.sub(r"(_\d+)?(_full)?$", "", name)
    return f"benchmarks.{name if folder == BENCHMARKS else folder.name}"


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the plots and write them."""
    args = parse_arguments(argv)
    for name in args.names:
        path = (args.results or TABLES[name].parent) / f"{name}.png"
        save_plot(import_module(study_of(name)).plot(read_json(TABLES[name])), path)
        print(f"Wrote {path}", flush=True)


if __name__ == "__main__":
    run_cli(main)
