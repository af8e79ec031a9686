"""Declare the options of all benchmarks."""

import argparse

from iha.errors import ROOT
from iha.files import expanded


RESULTS = ROOT / "research" / "benchmarks" / "results"  # what git tracks
OUTPUTS = ROOT / "outputs" / "benchmarks"


def arguments(doc: str, tokens: list[int] | None, repeats: int = 3) -> argparse.ArgumentParser:
    """Build a parser with the options of all benchmarks. `doc` ends with an example; `None` leaves out --tokens."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if tokens:
        parser.add_argument("--tokens", type=int, nargs="+", default=tokens, help=f"lengths in tokens ({tokens})")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"timed runs of each form ({repeats})")
    where = "directory of the results (outputs/benchmarks; git tracks those of research/benchmarks/results)"
    parser.add_argument("--out", type=expanded, default=OUTPUTS, help=where)
    return parser
