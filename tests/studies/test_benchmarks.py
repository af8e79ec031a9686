"""Run the cases for a CPU at tiny sizes, and test what their figures rest on."""

import json

import pytest
import torch

from iha.errors import UserError
from modeling_iha import sdpa_in_blocks
from research.benchmarks import cpu


SMALL = {
    "training": lambda: cpu.own_training(2, 128, False, cpu.ALL),
    "padded": lambda: cpu.own_training(2, 128, True, ("mha", "paired")),
    "attention": lambda: cpu.attention_forward(128),
    "forward in place": lambda: cpu.forward_in_place(128),
    "training in place": lambda: cpu.training_in_place(128),
    "decoding": lambda: cpu.decoding_in_place(128),
}


@pytest.mark.parametrize("build", SMALL.values(), ids=SMALL)
def test_every_form_of_a_case_runs(build, monkeypatch):
    """Run them in an eighth of the width."""
    own_model = cpu.own_model
    monkeypatch.setattr(cpu, "own_model", lambda tokens, fields, _, heads: own_model(tokens, fields, 64, heads))
    monkeypatch.setattr(cpu, "LLAMA", {**cpu.LLAMA, "hidden_size": 64, "intermediate_size": 192})
    seconds = cpu.medians(build(), 1)
    assert len(seconds) >= 2 and all(value > 0 for value in seconds.values())


@pytest.mark.slow
def test_compiled_steps_stand_next_to_uncompiled_ones(monkeypatch):
    """Check the forms alone; tests/modeling/test_compile.py compiles."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model, **how: compiled.append(model))
    assert list(cpu.compiled_training()) == ["mha", "mha, compiled", "iha, P = 4", "iha, P = 4, compiled"]
    assert len(compiled) == 2


@pytest.mark.parametrize("what", ["forward", "training", "decoding"])
def test_the_default_and_sdpa_compute_the_same(what, monkeypatch):
    found = []
    monkeypatch.setattr(cpu, "one_layer", lambda what, module, states: lambda: found.append(module(states)))
    for run in cpu.default_and_sdpa(what, 1, 128, 16).values():
        run()
    assert torch.allclose(*found, atol=1e-5)


def test_what_the_default_is_compared_with(monkeypatch):
    """Compare blocks with SDPA under a dense mask."""
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **kwargs):
        calls.append((len(query), query.shape[2], None if attn_mask is None else attn_mask.shape[-1]))
        return sdpa(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(sdpa_in_blocks, "scaled_dot_product_attention", spy)
    runs = cpu.default_and_sdpa("forward", 1, 128, 16)
    runs["SDPA"]()
    assert calls == [(1, 512, 512)]
    calls.clear()
    runs["default"]()
    assert len(calls) > 1 and all(keys is None or keys < 512 for _, _, keys in calls)


def test_the_rule_of_the_default_fails_after_the_page_is_written(tmp_path, monkeypatch):
    """A default that takes longer than it may is told after all figures are kept."""
    seconds = {"SDPA": 1.0, "default": 1.04}
    monkeypatch.setattr(cpu, "medians", lambda runs, repeats: dict(seconds))
    case = cpu.Case("default, a layer", dict, most=cpu.LIMIT)
    other = cpu.Case("another", dict)
    monkeypatch.setattr(cpu, "CASES", {"default": [case], "other": [other]})
    cpu.main(["--out", str(tmp_path), "--cases", "default", "other"])
    seconds["default"] = 1.06
    with pytest.raises(UserError, match="default, a layer: default takes 1.06 times as long"):
        cpu.main(["--out", str(tmp_path), "--cases", "default", "other"])
    record = json.loads((tmp_path / "cpu.json").read_text())
    assert record["cases"] == {"default, a layer": seconds, "another": seconds}
    page = (tmp_path / "README.md").read_text()
    assert "**Default, a layer**" in page and "| default | 1.06 | 1.06 |" in page
    assert record["command"] == "python -m research.benchmarks.cpu"
