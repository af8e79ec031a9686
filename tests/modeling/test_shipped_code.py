"""Count the files that a checkpoint ships: README promises it to whoever reads that code before trusting it."""

import importlib.util
import sys

import pytest
import torch
from helpers import decoder, small_config
from transformers.dynamic_module_utils import get_imports

from iha.errors import ROOT
from modeling_iha import IHAForCausalLM, interleave_heads
from modeling_iha.package import PACKAGE


MOST_FILES = 10
KERNELS = "triton_kernels.py"  # one more file: only GPUs need it


def model_of(kind):
    if kind == "interleaved":
        return interleave_heads(decoder("llama"), num_pseudo_heads=2)
    return IHAForCausalLM(small_config(attention_kinds=kind.split("+")))


@pytest.mark.parametrize("kind", ["iha", "iha+mha", "paired_heads+mha", "interleaved"])
def test_a_checkpoint_ships_what_one_can_read(kind, tmp_path):
    model_of(kind).save_pretrained(tmp_path)
    names = {file.name for file in tmp_path.glob("**/*.py")}
    assert KERNELS in names and 5 <= len(names - {KERNELS}) <= MOST_FILES


def test_readme_promises_what_is_counted():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"contains the code: at most {MOST_FILES} files, and one more with GPU kernels." in text


def test_the_kernels_ship_to_machines_without_triton(monkeypatch):
    """Import them where `import triton` fails. Transformers' loader asks for no package that it finds in a `try`."""
    assert "triton" not in get_imports(PACKAGE / KERNELS)
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("kernels_without_triton", PACKAGE / KERNELS)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    assert kernels.triton is None and not kernels.kernels_take(torch.empty(1, 2, 3, 4), torch.empty(2, 2, 2))
