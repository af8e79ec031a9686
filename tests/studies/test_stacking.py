"""Test the study of what is stacked on attention: its variants, its value residual, and what it compares."""

import pytest
import torch

from iha.errors import UserError
from iha.model_cost import model as cost_of
from research.experiments import language_models, paired_heads, stacking
from research.experiments.language_models import config_of, losses_of, size_of
from research.experiments.paired_heads import STACKED, model_of
from research.experiments.value_residual import add_value_residual


TINY = language_models.sized(width=16, ffn=48, layers=5, heads=4, tokens_per_step=256, steps=4)
SIZE = size_of(TINY, 128)
TEXT = (torch.arange(3000) * 7 % 50).to(torch.uint8)
ROWS = torch.randint(256, (2, 129), generator=torch.Generator().manual_seed(0))
ARMS = ("windows", "paired", "schedule", "mha")


@pytest.mark.parametrize("width", [64, 256, 512])
@pytest.mark.parametrize("name", STACKED)
def test_variants_have_equal_parameters(name, width):
    """Allow half an FFN channel a layer. The value residual has one share more a layer, which are not counted."""
    size = size_of(paired_heads.SIZES[width], 256)
    counts = [cost_of(config_of(size, **STACKED[each]), 1).parameters for each in (name, "windows")]
    assert abs(counts[0] - counts[1]) <= 3 * width * 5 / 2


def test_variants_of_a_stack_start_from_the_same_weights_and_add_to_every_layer():
    for added in ("xsa", "gate", "residual", "all"):
        models = [dict(model_of(SIZE, f"{arm}+{added}", 3).named_parameters()) for arm in ("windows", "paired")]
        assert models[0].keys() == models[1].keys()
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    config = config_of(SIZE, **STACKED["schedule+all"])
    assert (config.output_gate, config.exclusive_attention) == ("elementwise", True)
    assert len([name for name in models[0] if "output_gate" in name]) == 5
    assert len([name for name in models[0] if "share_of_first" in name]) == 4


@torch.no_grad()
@pytest.mark.parametrize("arm", ARMS)
def test_a_value_residual_mixes_in_the_first_layers_values(arm):
    """With a share of 0 it is the plain model, and with 1 no later layer reads its projection of the values."""
    expected = losses_of(model_of(SIZE, arm, 0), ROWS)
    model = add_value_residual(model_of(SIZE, arm, 0))
    layers = [layer.self_attn for layer in model.model.layers[1:]]
    assert [layer.share_of_first.item() for layer in layers] == [0.5] * 4
    assert not torch.allclose(losses_of(model, ROWS), expected, atol=1e-4)
    for layer in layers:
        layer.share_of_first.zero_()
    torch.testing.assert_close(losses_of(model, ROWS), expected)
    for layer in layers:
        layer.share_of_first.fill_(1)
    of_first = losses_of(model, ROWS)
    for layer in layers:
        layer.v_proj.weight.zero_()
    torch.testing.assert_close(losses_of(model, ROWS), of_first)
    assert not torch.allclose(of_first, expected, atol=1e-4)


def test_a_value_residual_learns_and_survives_a_compiled_forward():
    model = add_value_residual(model_of(SIZE, "windows+xsa+gate", 0))
    expected = losses_of(model, ROWS).detach()
    losses_of(model, ROWS).mean().backward()
    assert all(layer.self_attn.share_of_first.grad.abs() > 0 for layer in model.model.layers[1:])
    torch._dynamo.reset()
    model.compile(backend="eager")
    torch.testing.assert_close(losses_of(model, ROWS).detach(), expected)


@torch.no_grad()
@pytest.mark.parametrize("arm", ARMS)
def test_no_variant_looks_ahead(arm):
    model = model_of(SIZE, f"{arm}+all", 0)
    other = ROWS.clone()
    other[:, 70:] = other[:, 70:].flip(1)
    seen = [model(rows[:, :-1], use_cache=False).logits[:, :70] for rows in (ROWS, other)]
    torch.testing.assert_close(*seen)


def test_what_is_compared():
    names = ["windows", "paired", "windows+all", "paired+all"]
    assert stacking.compared_pairs(names) == [
        ("paired", "windows"),
        ("windows+all", "windows"),
        ("paired+all", "windows+all"),
        ("paired+all", "paired"),
        ("windows+all", "paired"),
    ]
    assert stacking.compared_pairs(["mha", "mha+xsa"]) == [("mha+xsa", "mha")]


def test_the_change_of_a_lead_is_a_difference_of_differences():
    ends = {"windows": [3.0, 3.1], "paired": [2.8, 2.9], "windows+all": [2.5, 2.6], "paired+all": [2.45, 2.5]}
    runs = {name: [{"curve": [[4, end]]} for end in of_variant] for name, of_variant in ends.items()}
    change = stacking.change_of_lead(runs, "paired", "all")
    assert change["change"]["values"] == pytest.approx([0.15, 0.1])
    assert stacking.change_of_lead(runs, "windows", "all") is None
    assert stacking.change_of_lead(runs, "paired", "gate") is None


def test_the_study_in_small(run_protocol, monkeypatch):
    monkeypatch.setattr(paired_heads, "TIMED_STEPS", 1)
    monkeypatch.setattr(paired_heads, "TIMED_ROUNDS", 1)
    monkeypatch.setattr(stacking, "read_text", lambda *given: TEXT)
    monkeypatch.setattr(stacking, "EVALUATIONS", 1)
    monkeypatch.setattr(stacking, "FIRST_RATE", 4.096)
    names = ["windows", "paired", "windows+all", "paired+all"]
    sizes, changed = {64: TINY}, {"SIZES": {64: {**TINY, "heads": 1}}}
    words = ("--tokens", "128", "--steps", "4")
    table, runs = run_protocol(stacking, {"SIZES": sizes}, names, *words, changed=changed)
    assert [row["variant"] for row in table["rows"]] == names and runs.keys() >= {"windows", "paired"}
    pairs = [(each["first"], each["second"]) for each in table["comparisons"]]
    assert pairs == stacking.compared_pairs(names)
    of_all = table["comparisons"][2]
    expected = [
        a[-1][1] - b[-1][1] for a, b in zip(table["runs"]["paired+all"], table["runs"]["windows+all"], strict=True)
    ]
    assert of_all["steps"]["difference"]["values"] == pytest.approx(expected)
    seconds = table["step_seconds"]
    assert of_all["time"]["cost"] == pytest.approx(seconds["paired+all"] / seconds["windows+all"])
    assert {"verdict", "difference"} <= of_all["steps"].keys() and list(of_all["on_the_way"]) == ["25%", "50%", "75%"]
    assert [each["added"] for each in table["changes_of_lead"]] == ["all"]


def test_options_that_cannot_work(tmp_path):
    where = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path)]
    with pytest.raises(UserError, match="--steps 2: expected at least 10"):
        stacking.main(["--steps", "2", *where])
    with pytest.raises(UserError, match="--device cuda: PyTorch sees no CUDA device"):
        stacking.main(["--device", "cuda", *where])
    with pytest.raises(UserError, match="paired cannot be built at this size"):
        stacking.main(["--tokens", "32", "--kinds", "paired", "mha", *where])
