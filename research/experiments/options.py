"""Declare the command-line options that studies share."""

import argparse
import os
import sys
from collections.abc import Sequence
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
    """Keep the command line as `command`, to be recorded. `module` is that of the command."""

    def __init__(self, module: str, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.module = module

    def parse_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        words = sys.argv[1:] if args is None else map(str, args)
        parsed = super().parse_args(args, namespace)
        parsed.command = shown_command([self.module, *words])
        return parsed
