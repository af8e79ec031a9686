"""Name the directory to which benchmarks write unless told otherwise."""

from iha.errors import ROOT


OUTPUTS = ROOT / "outputs" / "benchmarks"
