"""Test that relations are composed as the paper says, that all entries are seen, and that the study runs in small."""

import json

import pytest
import torch

from research.experiments import relation_composition
from research.experiments.relation_composition import KINDS, SIZE, TASKS


TINY = {"examples": 24, "held_out": 40, "width": 16, "heads": 2, "batch": 5, "patience": 1}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_is_a_path_of_as_many_steps(task):
    steps, smallest, largest, _ = TASKS[task]
    groups = relation_composition.draw(task, 40, generator())
    assert [len(entries[0]) for entries, _ in groups] == [m * m for m in range(smallest, largest + 1)]
    assert sum(len(entries) for entries, _ in groups) == 40
    for m, (entries, targets) in zip(range(smallest, largest + 1), groups):
        for relation, answers in zip(entries.unflatten(1, (m, m)).tolist(), targets.unflatten(1, (m, m)).tolist()):
            for i in range(m):
                reached = {i}
                for _ in range(steps):
                    reached = {k for j in reached for k in range(m) if relation[j][k]}
                assert [j for j in range(m) if answers[i][j]] == sorted(reached)


def test_answers_from_counts_alone(monkeypatch):
    """One step is the entry itself, which counts do not tell; where all entries are 1, they tell every answer."""
    for steps, probability, low, high in ((1, 0.5, 0.5, 0.8), (3, 0.264, 0.8, 0.83), (3, 1.0, 1.0, 1.0)):
        monkeypatch.setitem(TASKS, "ternary", (steps, 5, 8, probability))
        assert low <= relation_composition.from_degrees("ternary") <= high


def test_an_epoch_has_each_example_once_and_no_row_is_padded(monkeypatch):
    monkeypatch.setattr(relation_composition, "SIZE", TINY)
    groups = relation_composition.draw("ternary", 24, generator())
    batches = relation_composition.batches(groups, generator())
    assert {len(entries[0]) for entries, _ in batches} <= {25, 36, 49, 64}
    assert max(len(entries) for entries, _ in batches) <= 5
    pairs = [[[*zip(e.tolist(), t.tolist())] for e, t in part] for part in (groups, batches)]
    assert sorted(sum(pairs[0], [])) == sorted(sum(pairs[1], []))


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_sees_every_entry(kind, monkeypatch):
    """Change the order of entries that have no place, more than a block has: the answers change with them."""
    monkeypatch.setattr(relation_composition, "SIZE", TINY)
    model = relation_composition.new_model(kind, seed=0).double()
    entries, order = torch.randint(2, (3, 100), generator=generator()), torch.randperm(100, generator=generator())
    with torch.no_grad():
        model.row.weight.zero_()
        model.column.weight.zero_()
        answers = model(entries)
        # "talking_heads" and "simplicial" take their softmax in float32
        torch.testing.assert_close(model(entries[:, order]), answers[:, order], rtol=0, atol=1e-6)
    assert answers.std() > 0.01


def test_every_pseudo_head_sees_every_pseudo_head_of_its_own_token(monkeypatch):
    monkeypatch.setattr(relation_composition, "SIZE", TINY)
    model = relation_composition.new_model("iha", seed=0).double()
    entries = torch.randint(2, (3, 25), generator=generator())
    with torch.no_grad():
        answers = model(entries)
        for name, weight in model.named_parameters():
            if "_mix" in name or "collapse" in name:
                weight.copy_(weight.flip(-1))
        torch.testing.assert_close(model(entries), answers, rtol=0, atol=1e-12)


def test_kinds_start_from_the_weights_that_they_share():
    base = dict(relation_composition.new_model("mha", seed=1).named_parameters())
    for kind in KINDS:
        for name, weight in relation_composition.new_model(kind, seed=1).named_parameters():
            if name in base:
                assert torch.equal(weight[: len(base[name])], base[name])


def test_relation_composition_in_small(run_study, tmp_path):
    words = ["--kinds", "mha", "iha", "--epochs", "4", "--rate", "0.3", "--seeds", "0"]
    table, made = run_study(relation_composition, words, {"SIZE": TINY}, {"SIZE": {**TINY, "batch": 4}}, [*words, "1"])
    assert made == [2, 2] and table["seeds"] == [0, 1]
    mha, iha = table["rows"]
    assert "minus_base" not in mha and iha["parameters"] > mha["parameters"]
    differences = [ours - theirs for ours, theirs in zip(iha["right"]["values"], mha["right"]["values"])]
    assert iha["minus_base"]["values"] == pytest.approx(differences)
    for path in (tmp_path / "runs").glob("*.json"):
        run = json.loads(path.read_text())
        assert run["best"] == min(run["curve"], key=lambda point: point[2])
        assert len(run["curve"]) == min(4, run["best"][0] + TINY["patience"])
        best = run["best"][0]
        kind, rate, seed = path.stem.split("-")[1:]
        assert relation_composition.train("ternary", float(rate), kind, int(seed), epochs=best)["test"] == run["test"]


def test_the_size_is_the_papers():
    assert [SIZE[name] for name in ("examples", "held_out", "heads", "patience")] == [40_000, 5_000, 8, 10]
