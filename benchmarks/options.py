"""Declare the options of all benchmarks, before the imports that take seconds."""

import argparse
from pathlib import Path


RESULTS = Path(__file__).resolve().parent / "results"


def arguments(doc: str, tokens: list[int], repeats: int = 3) -> argparse.ArgumentParser:
    """Build a parser with the options of all benchmarks. `doc` ends with an example."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens, help=f"lengths in tokens ({tokens})")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"timed runs of each form ({repeats})")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results (benchmarks/results)")
    return parser
