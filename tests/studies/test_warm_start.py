"""Test the study of the warm start: its task, its arms and its verdicts."""

import copy
import json
import math

import pytest
import torch

from iha.errors import UserError
from research.experiments import warm_start
from research.experiments.protocol import Rates
from research.experiments.study import interval


def test_lookup_asks_for_what_two_letters_mean():
    """Find the same answer to a pair of letters in every row, on the held-out rows too."""
    data, meaning = warm_start.Lookup(), {}
    batches = [data.train(8, torch.Generator().manual_seed(0)), warm_start.Lookup().held_out()]
    for rows, labels in batches:
        assert rows.shape == labels.shape == (len(rows), warm_start.TOKENS)
        counts = labels != -100
        assert counts[:, 6::2].all() and counts.sum() == len(rows) * (warm_start.TOKENS // 2 - 3)
        for row, place in counts.nonzero().tolist():
            pair = (rows[row, place].item(), rows[row, place - 6].item())
            answer = labels[row, place].item()
            assert meaning.setdefault(pair, answer) == answer
            assert place + 1 == warm_start.TOKENS or rows[row, place + 1] == answer
    assert len(meaning) > 700 and len(set(meaning.values())) == 28


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: value.detach() for name, value in warm_start.new_model().named_parameters()}


@pytest.mark.parametrize("arm", ["iha_1", "iha_2", "iha_4", "iha_2_rolled", "iha_2_shared"])
def test_arms_start_from_the_pretrained_function(arm, weights):
    """Expect the pretrained logits of all starts but that of "iha_2_shared"."""
    rows = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = warm_start.build("mha", weights, 0)(rows).logits
        actual = warm_start.build(arm, weights, 0)(rows).logits
    equal = torch.allclose(actual, expected, atol=1e-5)
    assert equal == (arm != "iha_2_shared")


def test_a_copy_with_one_query_leaves_out_the_others(weights):
    """At the exact start nothing is lost; with shares of one half the copy has half of each last pseudo-head."""
    rows = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(1))
    exact, shared = warm_start.build("iha_2", weights, 0), warm_start.build("iha_2_shared", weights, 0)
    with torch.no_grad():
        one, kept = warm_start.alone(exact)
        assert kept == 1 and torch.equal(one(rows).logits, exact(rows).logits)
        before = copy.deepcopy(shared)(rows).logits
        one, kept = warm_start.alone(shared)
        assert kept == pytest.approx(0.5) and not torch.allclose(one(rows).logits, before, atol=1e-3)
        assert torch.equal(shared(rows).logits, before)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([-0.020, -0.021, -0.019], "helps"),
        ([0.020, 0.021, 0.019], "hurts"),
        ([0.001, -0.001, 0.0005], "does not matter"),
        ([-0.020, 0.020, 0.001], "undecided"),
        ([-0.020], "undecided"),
    ],
)
def test_verdicts(values, expected):
    assert warm_start.verdict(interval(values), 0.005, better=-1) == expected


def test_rates_are_sought_until_neither_changes():
    """Find the best rate where a lower one is better as long as the mixing learns too fast beside it."""

    def run(arm, steps, seed, rate, mixing):
        return {"curve": [[steps, math.log2(rate / 2e-3) ** 2 + math.log2(32 * rate * mixing / 2e-3) ** 2]]}

    rate, mixing, tried = warm_start.tuned("prose", "iha_2", run)
    assert (rate, mixing) == (2e-3, 1 / 16) and min(loss for *_, loss in tried) == 1
    assert warm_start.tuned("prose", "mha", run).mixing == 1


def test_outcomes():
    """Judge a text by its loss at a step, and lookup by the area under the shares before it."""
    run = {"curve": [[0, 2.0, 0.0], [40, 1.0, 0.4], [80, 0.5, 0.6]]}
    assert warm_start.outcome("prose", run, 40) == 1.0
    assert warm_start.outcome("prose", run, 60) == pytest.approx(67 / 96)  # on the cubic, 3 / 4 on a line
    assert warm_start.outcome("lookup", run, 40) == pytest.approx(0.2)
    assert warm_start.outcome("lookup", run, 60) == pytest.approx((40 * 0.2 + 20 * 0.45) / 60)


def test_the_study_in_small(tmp_path, monkeypatch, capsys):
    """Write a table and a plot, and repeat no run."""
    small = {"TOKENS": 32, "WINDOW": 4, "STEPS": {"lookup": 2}, "EVERY": 1, "HELD_OUT_ROWS": 2}
    for name, value in {**small, "PRETRAINING": {**warm_start.PRETRAINING, "steps": 10, "rows": 1}}.items():
        monkeypatch.setattr(warm_start, name, value)
    monkeypatch.setattr(warm_start, "tune", lambda *_: Rates(1e-3, 1.0, []))  # tested with the protocol
    monkeypatch.setattr(warm_start, "walk", lambda loss_at, rate, factor: rate)
    words = ["--texts", "lookup", "--arms", "iha_2", "iha_2_rolled", "iha_2_scratch", "--seeds", "0", "1"]
    words += ["--output", str(tmp_path / "runs"), "--results", str(tmp_path)]
    warm_start.main(words)
    assert " done\n" in capsys.readouterr().out
    warm_start.main(words)
    assert " done\n" not in capsys.readouterr().out
    with pytest.raises(UserError, match="another setting"), monkeypatch.context() as patches:
        patches.setattr(warm_start, "file_sha256", lambda path: "that of other weights")
        warm_start.main(words)
    with pytest.raises(UserError, match="another setting"), monkeypatch.context() as patches:
        patches.setattr(warm_start, "read_text", lambda: torch.zeros(2000, dtype=torch.uint8))
        warm_start.main(words)
    table = json.loads((tmp_path / "warm_start_lookup.json").read_text())
    assert [row["arm"] for row in table["rows"]] == ["mha", "iha_2", "iha_2_rolled", "iha_2_scratch"]
    _, usual, rolled, scratch = table["rows"]
    assert len(usual["minus_mha"]["time"]["values"]) == 2 and "verdict" in rolled["minus_iha_2"]["steps"]
    ends = [curve[-1] for curve in table["pretraining"]["interleaved"].values()]
    assert len(ends) == 3 and min(ends)[1] != table["pretraining"]["curve"][-1][1]
    assert scratch["start"] != usual["start"] == rolled["start"]
    assert 0 < usual["kept_by_the_last"]["mean"] < 1
    longest = max(point[0] for point in table["runs"]["mha"][0]["curve"])
    assert usual["minus_mha"]["time"]["base_steps"] <= longest
    assert (tmp_path / "warm_start_lookup.png").read_bytes().startswith(b"\x89PNG")
