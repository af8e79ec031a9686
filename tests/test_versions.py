"""Refuse an unsupported Transformers by name, before the package imports anything that it might lack."""

import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
# The check reads the version of the installed distribution; everything else stays what it is.
IMPORT_WITH_VERSION = """
import importlib.metadata, sys
real = importlib.metadata.version
importlib.metadata.version = lambda name: sys.argv[1] if name == "transformers" else real(name)
sys.path.insert(0, sys.argv[2])
import modeling_iha
print(modeling_iha.IHAConfig.model_type)
"""


def import_with(version):
    command = [sys.executable, "-c", IMPORT_WITH_VERSION, version, str(ROOT)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("version", ["5.16.4", "6.0.0"])
def test_an_unsupported_version_is_refused(version):
    process = import_with(version)
    assert process.returncode != 0
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("ImportError")]
    assert "transformers>=5.17" in line and "<6" in line and version in line


def test_a_supported_version_is_taken():
    process = import_with("5.99.0")
    assert process.stdout.strip() == "iha", process.stderr
