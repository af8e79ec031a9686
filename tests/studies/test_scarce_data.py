"""Test the study of scarce data: its three texts, its choices, and what it reports."""

import json
import math

import pytest
import torch

from iha.errors import UserError
from research.experiments import language_models, scarce_data
from research.experiments.language_models import losses_of, size_of, sized
from research.experiments.scarce_data import Setting


TINY = size_of(sized(width=16, ffn=48, layers=5, heads=4, tokens_per_step=256), 64)
SETTING = Setting(1e-2, 0.5, 2)


def test_the_three_texts_have_no_module_in_common(tmp_path, monkeypatch):
    """Give each module another byte. A text ends where it is long enough, within a module."""
    for byte in range(200):
        (tmp_path / f"{byte}.py").write_bytes(bytes([byte]) * 30)
    monkeypatch.setattr(scarce_data.sysconfig, "get_path", lambda name: tmp_path)
    monkeypatch.setattr(scarce_data, "HELD_OUT", 100)
    texts = scarce_data.texts_of(1000)
    assert {name: len(text) for name, text in texts.items()} == {"training": 1000, "choice": 100, "third": 100}
    found = [set(text.tolist()) for text in texts.values()]
    assert len(set.union(*found)) == sum(map(len, found))
    with pytest.raises(UserError, match="--bytes 6,000: the installed modules are too short"):
        scarce_data.texts_of(6000)


@pytest.mark.parametrize(("evaluated", "byte"), [("choice", 1), ("third", 2)])
def test_a_run_learns_from_one_text_and_is_judged_on_another(evaluated, byte, monkeypatch):
    texts = {
        name: torch.full((1000,), value, dtype=torch.uint8)
        for value, name in enumerate(("training", "choice", "third"))
    }
    seen = {True: set(), False: set()}

    def watch(model, rows):
        seen[torch.is_grad_enabled()].update(rows.unique().tolist())
        return losses_of(model, rows)

    monkeypatch.setattr(scarce_data, "losses_of", watch)
    run = scarce_data.train(TINY, texts, "cpu", "windows", 0, SETTING, evaluated)
    assert seen == {True: {0}, False: {byte}}
    assert [number for number, *_ in run["curve"]] == [1, 2]


def test_every_epoch_reads_the_text_once_and_cuts_it_anew():
    text = torch.arange(250, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    first, second = (scarce_data.epoch_of(text, 16, generator) for _ in range(2))
    for rows in (first, second):
        assert rows[:, :-1].unique().numel() == rows[:, :-1].numel() >= 250 - 3 * 16
    assert first[:, 0].sort()[0][0] != second[:, 0].sort()[0][0]


def test_two_models_are_judged_by_the_mean_of_their_probabilities():
    learners = [scarce_data.Learner(TINY, "two_models", seed, SETTING, 4, "cpu") for seed in (0, 500)]
    rows = torch.randint(256, (3, 65), generator=torch.Generator().manual_seed(0))
    for learner in learners:
        learner.step(rows)
    with torch.no_grad():
        each = [(-losses_of(learner.average.module, rows)).exp() for learner in learners]
    expected = -torch.stack(each).mean(0).log().mean()
    assert not torch.allclose(each[0], each[1])
    assert scarce_data.loss_of_mean(learners, rows, 2) == pytest.approx(expected.item())


@pytest.mark.parametrize(("form", "is_decayed"), [("windows", True), ("no_decay", False)])
def test_what_decays(form, is_decayed):
    model = scarce_data.Learner(TINY, form, 0, SETTING, 4, "cpu").model
    decayed, *others = scarce_data.optimizer_of(form, model, SETTING).param_groups
    found = {id(weight) for weight in decayed["params"]}
    names = {name for name, weight in model.named_parameters() if id(weight) in found}
    assert any("q_proj" in name for name in names) == is_decayed
    assert any("o_proj" in name for name in names) and not any("norm" in name for name in names)
    assert decayed["weight_decay"] == SETTING.decay and {group["weight_decay"] for group in others} == {0.0}
    assert sum(len(group["params"]) for group in (decayed, *others)) == len(list(model.parameters()))


def test_the_mixing_does_not_decay_and_learns_faster():
    model = scarce_data.Learner(TINY, "schedule", 0, SETTING, 4, "cpu").model
    decayed, _, mixes = scarce_data.optimizer_of("schedule", model, SETTING).param_groups
    assert len(mixes["params"]) == 16 and mixes["lr"] > decayed["lr"]


def test_the_best_setting_is_chosen_with_its_best_epoch():
    curves = {
        Setting(1.0, 0.1, 3): [3.0, 2.0, 2.5],
        Setting(2.0, 0.1, 3): [math.nan],
        Setting(3.0, 0.1, 3): [3.0, 1.9, 1.8],
    }
    bests = []

    def run_of(setting: Setting, best: float) -> dict:
        bests.append(best)
        return {"curve": [[number, 0.0, loss] for number, loss in enumerate(curves[setting], start=1)]}

    choice = scarce_data.tune(run_of, list(curves))
    assert choice[:2] == (Setting(3.0, 0.1, 3), 3) and bests == [math.inf, 2.0, 2.0]
    assert [each[3:] for each in choice.tried] == [[2, 2.0, 3], [1, math.inf, 1], [3, 1.8, 3]]


@pytest.mark.parametrize(
    ("losses", "best", "expected"),
    [
        ([3.0, 2.0], 1.0, False),
        ([3.0, 2.0, 1.5], 1.0, True),
        ([3.0, 2.0, 1.05], 1.0, False),
        ([2.0, 2.1], 1.0, True),
        ([math.nan], math.inf, True),
    ],
)
def test_a_run_of_the_tuning_ends_where_it_cannot_win(losses, best, expected):
    curve = [[number, 0.0, loss] for number, loss in enumerate(losses, start=1)]
    assert scarce_data.is_hopeless(curve, Setting(1.0, 0.1, 4), best) == expected


def test_the_study_in_small(run_study, tmp_path, monkeypatch):
    """Tune two forms, then add a seed: only its runs are made. The seed of the tuning is never reported."""
    judged = set()

    def watch(size, texts, device, form, seed, setting, evaluated, *best):
        judged.add((seed, evaluated))
        return train(size, texts, device, form, seed, setting, evaluated, *best)

    train = scarce_data.train
    monkeypatch.setattr(scarce_data, "train", watch)
    sizes = {
        "SIZES": {64: sized(width=16, ffn=48, layers=5, heads=4, tokens_per_step=256)},
        "TOKENS": {64: 64},
        "GRIDS": {64: [(1e-2, 0.5, 2), (1e-3, 0.5, 1)]},
        "ROWS": {"choice": 2, "third": 2},
        "HELD_OUT": 400,
    }
    words = ["--bytes", "1500", "--kinds", "windows", "schedule", "no_decay", "two_models", "--control-seeds", "1"]
    one, two = ([*words, "--seeds", *seeds] for seeds in (("0",), ("0", "1")))
    table, made = run_study(scarce_data, one, sizes, {"HELD_OUT": 500}, two)
    assert made == [2 * 2 + 4, 2]
    assert judged == {(1000, "choice"), (0, "third"), (1, "third")}
    files = {path.stem for path in (tmp_path / "runs").glob("*.json")}
    tuned = {name for name in files if name.endswith("-1000")}
    assert len(tuned) == 4 and len(files - tuned) == 6
    windows, schedule, no_decay, two_models = table["rows"]
    assert {row["form"]: len(table["runs"][row["form"]]) for row in table["rows"]} == {
        **{"windows": 2, "schedule": 2},
        **{"no_decay": 1, "two_models": 1},
    }
    place = schedule["judged_at"] - 1
    ends = [curve[place][2] for curve in table["runs"]["schedule"]]
    assert schedule["loss"]["values"] == ends
    setting = f"{schedule['rate']:g}-{schedule['decay']:g}-{schedule['epochs']}"
    of_tuning = json.loads((tmp_path / f"runs/schedule-{setting}-1000.json").read_text())
    assert of_tuning["curve"][place][2] not in ends
    assert len(schedule["minus_windows"]["values"]) == 2 and "minus_windows" not in windows
    assert two_models["parameters"] == 2 * windows["parameters"] and no_decay["tried"] == []
    assert "verdict" in schedule and "verdict" not in two_models  # one seed has no interval
    (against,) = two_models["minus_schedule"]["values"]
    assert against == two_models["loss"]["values"][0] - ends[0]


def test_given_settings_are_not_tuned(tmp_path, monkeypatch):
    monkeypatch.setattr(scarce_data, "train", lambda *given: {"curve": [[1, 2.0, 3.0]], "seconds": 1.0})
    words = ["--given", "0.001", "2", "1", "--kinds", "windows", "--seeds", "7"]
    scarce_data.main([*words, "--output", str(tmp_path / "runs"), "--results", str(tmp_path)])
    assert [path.name for path in (tmp_path / "runs").glob("*.json")] == ["windows-0.001-2-1-7.json"]
    table = json.loads((tmp_path / "scarce_data_0.001_2_1.json").read_text())
    assert table["rows"][0]["loss"]["values"] == [3.0]


def test_options_that_would_spoil_the_results(tmp_path):
    where = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path)]
    with pytest.raises(UserError, match="--seeds 1000: this seed chooses the settings"):
        scarce_data.main(["--seeds", "0", "1000", *where])
    with pytest.raises(UserError, match="--kinds wider: this control takes the setting of windows"):
        scarce_data.main(["--kinds", "schedule", "wider", *where])
    with pytest.raises(UserError, match="--bytes 5: expected at least"):
        scarce_data.main(["--bytes", "5", *where])


@pytest.mark.parametrize("width", scarce_data.SIZES)
@pytest.mark.parametrize("form", [form for form in scarce_data.FORMS if form != "wider"])
def test_forms_have_equal_parameters(form, width):
    size = size_of(scarce_data.SIZES[width], scarce_data.TOKENS[width])
    counts = [language_models.cost_of(scarce_data.config_of(size, each), 1).parameters for each in (form, "windows")]
    assert abs(counts[0] - counts[1]) <= 3 * width * 5 / 2
