"""Draw the plots of studies again from their tables, beside them, without running anything.

"first_screen" is the README's plot, of two tables, in docs/figures.

example: python -m research.experiments.redraw polynomial_filters language_models first_screen
"""

import argparse
import re
from collections.abc import Sequence
from importlib import import_module

from iha_io.command_io import ROOT, read_json, run_cli
from research.benchmarks.options import RESULTS as BENCHMARKS
from research.experiments.options import RESULTS


FROM_HISTORY = ["mixing_rate"]  # git keeps the command
# Name -> path of every table that has a plot beside it.
TABLES = {
    path.stem: path
    for path in sorted(RESULTS.glob("*.json"))
    if path.with_suffix(".png").exists() and path.stem not in FROM_HISTORY
}
# Figure of docs/figures -> the tables that it is drawn from.
FIGURES = {"first_screen": [RESULTS / "language_models.json", BENCHMARKS / "prefill.json"]}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*TABLES, *FIGURES]
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from iha_io.plots import save_plot


def study_of(name: str) -> str:
    """Return the module of a table, whose name may end with a number."""
    return "research.experiments." + re.sub(r"_\d+$", "", name)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the plots and write them."""
    args = parse_arguments(argv)
    for name in args.names:
        tables = FIGURES.get(name) or [TABLES[name]]
        path = (ROOT / "docs" / "figures" if name in FIGURES else RESULTS) / f"{name}.png"
        save_plot(import_module(study_of(name)).plot(*map(read_json, tables)), path)
        print(f"Wrote {path}", flush=True)


if __name__ == "__main__":
    run_cli(main)
