"""Declare the command-line options that studies share, without PyTorch, for which `--help` must not wait."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from common.command_io import attention_kinds


RESULTS = Path(__file__).resolve().parent / "results"


def study_parser(doc: str, seeds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all studies. `doc` ends with an example."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(seeds)), help=f"(0 to {seeds - 1})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where table and plot are written")
    return parser


def comparison_parser(
    doc: str, study: str, kinds: Iterable[str] | None, seeds: list[int], choices: Iterable[str] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options of studies that compare. `kinds` of the `choices` are compared by default; both
    are all attention kinds where they are None."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the large size, for a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kinds", nargs="+", choices=list(choices or attention_kinds()), default=kinds)
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    parser.add_argument(
        "--output", type=Path, help=f"where runs are kept (default: outputs/{study}, outputs/{study}_full)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the table and the plot are written")
    return parser


def add_text_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, help="a file to learn (default: Python's language reference)")
