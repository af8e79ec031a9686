"""Declare the command-line options that studies share."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from iha.errors import ROOT
from research.benchmarks.harness import shown_command


RESULTS = ROOT / "research" / "experiments" / "results"  # the tables and plots that git tracks


def path_from_root(text: str) -> Path:
    """Return a path that the user gave, as a command that runs in the root of the checkout needs it.

    A path inside the checkout becomes relative, so that a record of the command names no place of this machine.
    """
    path = Path(os.path.abspath(os.path.expanduser(text)))
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


class StudyParser(argparse.ArgumentParser):
    """Keep the command line as `command`, to be recorded, and name no seed or variant twice.

    `module` is that of the command."""

    def __init__(self, module: str, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.module = module

    def parse_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        words = sys.argv[1:] if args is None else map(str, args)
        parsed = super().parse_args(args, namespace)
        parsed.command = shown_command([self.module, *words])
        for name in ("seeds", "kinds"):
            if isinstance(values := getattr(parsed, name, None), list):
                setattr(parsed, name, list(dict.fromkeys(values)))
        return parsed


def study_parser(doc: str, study: str, seeds: int = 0) -> argparse.ArgumentParser:
    """Return a parser with the options of all studies.

    Args:
        doc: the description, which ends with an example; what a study writes and keeps is added here.
        study: the name of the module.
        seeds: how many there are by default; a study without any has no option for them.
    """
    writes = f"Writes {study}.json and {study}.png. A finished run is not repeated."
    parser = StudyParser(f"research.experiments.{study}", description=doc, epilog=writes)
    parser.set_defaults(study=study)
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(range(seeds)), help=f"(0 to {seeds - 1})")
    parser.add_argument("--output", type=path_from_root, help=f"where runs are kept (outputs/{study})")
    where = (
        f"where the table and the plot are written (outputs/{study}; git tracks those of research/experiments/results)"
    )
    parser.add_argument("--results", type=path_from_root, help=where)
    return parser


def protocol_parser(doc: str, study: str, effect: float, variants: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options of studies that keep to the protocol of protocol.py.

    `effect` is the smallest one worth having, in the unit of the loss; the first of the `variants` is the base.
    """
    variants = list(variants)
    parser = study_parser(doc, study)
    parser.add_argument("--kinds", nargs="+", choices=variants, default=variants, metavar="VARIANT")
    parser.add_argument("--most-seeds", type=int, default=12, help=f"where intervals are wider than ± {effect} (12)")
    return parser
