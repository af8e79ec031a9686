"""Draw the plots of studies and benchmarks again from their tables, beside them, without running anything.

"first_screen" is the README's plot, of two tables, in docs/figures.

example: python -m research.experiments.redraw polynomial_filters language_models schedule first_screen
"""

import argparse
import re
from collections.abc import Sequence
from importlib import import_module

from common.command_io import ROOT, read_json, run_cli
from research.experiments.options import RESULTS


BENCHMARKS = ROOT / "research" / "benchmarks" / "results"
PATHS = [*sorted(RESULTS.glob("*.json")), *sorted(BENCHMARKS.rglob("*.json"))]
FROM_HISTORY = ["mixing_rate"]  # git keeps the command
# Name -> path of every table that has a plot.
TABLES = {path.stem: path for path in PATHS if path.with_suffix(".png").exists() and path.stem not in FROM_HISTORY}
# Figure of docs/figures -> the tables that it is drawn from.
FIGURES = {"first_screen": ("language_models", "prefill")}
STUDIES = [name for name, path in TABLES.items() if path.parent == RESULTS]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*TABLES, *FIGURES]
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from common.plots import save_plot


def study_of(name: str) -> str:
    """Return the module of a table, whose name may end with a number.

    The tables of a benchmark for several CPUs lie in a directory of its name."""
    folder = TABLES[name].parent
    if folder == RESULTS:
        return "research.experiments." + re.sub(r"_\d+$", "", name)
    return f"research.benchmarks.{name if folder == BENCHMARKS else folder.name}"


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the plots and write them."""
    args = parse_arguments(argv)
    for name in args.names:
        module, folder = f"research.experiments.{name}", ROOT / "docs" / "figures"
        if name not in FIGURES:
            module, folder = study_of(name), TABLES[name].parent
        tables = [read_json(TABLES[table]) for table in FIGURES.get(name, (name,))]
        path = folder / f"{name}.png"
        save_plot(import_module(module).plot(*tables), path)
        print(f"Wrote {path}", flush=True)


if __name__ == "__main__":
    run_cli(main)
