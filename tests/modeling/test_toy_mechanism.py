"""Add a mechanism, which then holds all that test_mechanisms.py asks of a kind.

It consists of its class and options (here), its reference (references/toy.py), and its lines in the tables of kinds
(the fixture)."""

from dataclasses import dataclass

import mechanism_checks as checks
import pytest
import torch
from helpers import CORES, HALVES
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import initialization as init

from modeling_iha.attention_kinds import ATTENTION_CLASSES
from modeling_iha.kind_options import OPTIONS_CLASSES
from modeling_iha.option_fields import option
from modeling_iha.options import KindOptions
from modeling_iha.score_matrix import ScoreMatrixAttention


@strict
@dataclass
class ToyOptions(KindOptions):
    """Hold the options of kind "toy": the temperature at which training starts."""

    example = {"start": 0.5}

    start: int | float = option(1.0, "a number above 0", lambda value: type(value) in (int, float) and value > 0)


class Temperature(nn.Module):
    """Multiply the scores [batch, H, rows, columns] by one factor for each head."""

    def __init__(self, num_heads):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def init_mechanism(self, config):
        init.constant_(self.weight, config.options_of("toy").start)

    def forward(self, scores):
        return scores * self.weight[:, None, None]


class ToyAttention(ScoreMatrixAttention):
    mixing_modules = ("temperature",)

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.temperature = Temperature(config.num_attention_heads)

    def compose_scores(self, scores, rows, columns, **kwargs):
        return self.temperature(scores)


TOYS = [checks.Mechanism("toy"), checks.Mechanism("toy", ToyOptions.example)]


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(ATTENTION_CLASSES, "toy", ToyAttention)
    monkeypatch.setitem(OPTIONS_CLASSES, "toy", ToyOptions)


@pytest.fixture(params=TOYS, ids=str)
def toy(request):
    return request.param


def test_the_suite_finds_it():
    assert list(checks.all_mechanisms())[-2:] == TOYS


@pytest.mark.parametrize(("window", "length"), checks.LENGTHS)
def test_layer(toy, window, length):
    checks.check_layer(toy, window, length)


@pytest.mark.parametrize("inputs", checks.INPUTS)
@pytest.mark.parametrize("core", CORES)
def test_core(cpu_cores, toy, core, inputs):
    checks.check_core(toy, core, inputs)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("chunks", checks.CHUNKS, ids=str)
def test_cache(toy, window, chunks):
    checks.check_cache(toy, window, chunks)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_precision_training_and_checkpoints(toy, dtype, tmp_path):
    checks.check_half_precision(toy, dtype, "loaded")
    checks.check_half_precision(toy, dtype, "autocast")
    checks.check_round_trip(toy, tmp_path / "model")
    checks.check_adapters(toy, tmp_path / "adapter")
    checks.check_learning(toy)


def test_options():
    checks.check_options("toy")


def test_a_wrong_mechanism_is_found(monkeypatch):
    """Fail where the layer leaves its temperature out, and where training leaves it out."""
    monkeypatch.setattr(Temperature, "forward", lambda self, scores: scores * self.weight.sum() / self.weight.sum())
    with pytest.raises(AssertionError):
        checks.check_layer(TOYS[0], None, 7)
    monkeypatch.setattr(Temperature, "forward", lambda self, scores: scores * self.weight.detach()[:, None, None])
    with pytest.raises(AssertionError):
        checks.check_layer(TOYS[0], None, 7)
