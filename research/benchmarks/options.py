"""Declare the options of all benchmarks, before the imports that take seconds."""

import argparse
from pathlib import Path

from iha_io.command_io import ROOT


RESULTS = ROOT / "research" / "benchmarks" / "results"  # what git tracks
OUTPUTS = ROOT / "outputs" / "benchmarks"


def arguments(doc: str, tokens: list[int], repeats: int = 3) -> argparse.ArgumentParser:
    """Build a parser with the options of all benchmarks. `doc` ends with an example."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens, help=f"lengths in tokens ({tokens})")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"timed runs of each form ({repeats})")
    where = "directory of the results (outputs/benchmarks; git tracks those of research/benchmarks/results)"
    parser.add_argument("--out", type=Path, default=OUTPUTS, help=where)
    return parser
