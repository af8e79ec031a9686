"""Count what a checkpoint ships: README promises it to whoever reads that code before trusting it."""

import pytest
from helpers import decoder, small_config

from iha.errors import ROOT
from modeling_iha import IHAForCausalLM, interleave_heads


MOST_LINES = 1500
MOST_FILES = 10


def model_of(kind):
    if kind == "interleaved":
        return interleave_heads(decoder("llama"), num_pseudo_heads=2)
    return IHAForCausalLM(small_config(attention_kinds=kind.split("+")))


@pytest.mark.parametrize("kind", ["iha", "iha+mha", "paired_heads+mha", "interleaved"])
def test_a_checkpoint_ships_what_one_can_read(kind, tmp_path):
    model_of(kind).save_pretrained(tmp_path)
    files = list(tmp_path.glob("**/*.py"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert 5 <= len(files) <= MOST_FILES and 1000 <= lines <= MOST_LINES, (len(files), lines)


def test_readme_promises_what_is_counted():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"at most {MOST_LINES:,} lines of code in at most {MOST_FILES} files" in text
