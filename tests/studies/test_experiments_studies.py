"""Test the studies that train from scratch: their data, their tables, and that they go on where they stopped."""

import math
import random
from statistics import mean

import pytest

from research.experiments import dcmha_tasks, language_models, study
from research.experiments.dcmha_tasks import ANSWERS, NAMES, SET_PATTERNS, TASKS, TOKENS


TINY_TEXT = language_models.sized(width=16, ffn=48, layers=1, heads=2, tokens=32, batch=2, steps=4)
TINY_TASKS = {**TINY_TEXT, "tokens": 4, "test": 1}


def test_intervals_over_seeds():
    """Expect Student's t for the mean of 1, 2, 3, 4, 5: 3 ± 2.776 * sqrt(2.5 / 5)."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    half_width = pytest.approx(1.96324, abs=1e-4)
    assert study.interval(values) == {"mean": 3.0, "half_width": half_width, "values": values}
    assert study.interval([7.0]) == {"mean": 7.0, "half_width": None, "values": [7.0]}
    # (4.3027 + 1.0607) standard errors for three seeds
    assert study.detectable(study.interval([-1.0, 0.0, 1.0])) == pytest.approx(5.3633 / 3**0.5, abs=1e-4)
    wide = {"mean": 0.25, "half_width": 0.5, "values": []}
    assert study.points([wide, study.spread([0.0, 1.0, 0.5]), None]) == [(0.25, 0.5, 0.5), (0.5, 0.5, 0.5), None]


def test_p_values_are_corrected_for_their_number():
    """Take t of 2.0 standard errors with one degree of freedom, p = 0.2952, and of 20, p = 0.0318."""
    compared = [study.interval([centre - 1, centre + 1]) for centre in (2.0, 20.0, 2.0)]
    compared += [study.interval([1.0]), study.interval([math.nan, 1.0])]  # the last with a run that diverged
    study.correct_by_holm(compared)
    assert [each.get("p_holm") for each in compared] == pytest.approx([0.5903, 0.0954, 0.5903, None, None], abs=1e-4)
    study.correct_by_holm(equal := [study.interval([-1.0, 1.0]) for _ in range(2)])
    assert [each["p_holm"] for each in equal] == [1.0, 1.0]


# The tasks


@pytest.mark.parametrize("new", [False, True], ids=["seen", "new"])
def test_an_example_has_one_right_answer(new):
    generator = random.Random(0)
    for index, task in [*enumerate(TASKS)] * 5:
        answers = ANSWERS[task.transformation]
        lines, given = dcmha_tasks.draw(index, new, generator)
        assert {*" ".join(lines).split(), given} <= set(TOKENS)
        *facts, question = lines
        words = [next(word for word in fact.split() if word in answers) for fact in facts]
        owners = [next((word for word in fact.split() if word in NAMES), None) for fact in facts]
        asked = [word for word in question.split() if word in {*NAMES, *answers, *answers.values()}]
        right = {
            "same person": [answers[word] for word, owner in zip(words, owners) if owner in asked],
            "other person": [answers[word] for word, owner in zip(words, owners) if owner not in asked],
            "who": [owner for word, owner in zip(words, owners) if answers[word] in asked],
            "who not": [owner for word, owner in zip(words, owners) if answers[word] not in asked],
            "not the named": [answers[word] for word in words if word not in asked],
            "different": [answers[word] for word in words if words.count(word) == 1],
        }[task.pattern]
        assert right == [given], lines
        alike = task.pattern in ("who not", *SET_PATTERNS)
        assert len({answers[word] for word in words}) == (2 if alike else 3), lines


def test_the_tasks_compare_on_equal_seeds_and_go_on_where_they_stopped(run_protocol, monkeypatch):
    shares = random.Random(0)
    monkeypatch.setattr(dcmha_tasks, "right_by_task", lambda model, batches: [shares.random() for _ in batches])
    table, runs = run_protocol(dcmha_tasks, {"SMALL": TINY_TASKS}, ["mha", "iha"])
    mha, iha = table["rows"]
    assert abs(mha["parameters"] - iha["parameters"]) <= 3 * 16 / 2
    for group, indices in {
        "all": range(74),
        "who": [i for i, task in enumerate(TASKS) if task.pattern == "who"],
        "tool": [64, 65],
    }.items():
        right = {kind: mean(run["right"]["new"][i] for run in runs[kind] for i in indices) for kind in runs}
        assert mha["groups"][group]["new"]["mean"] == pytest.approx(right["mha"])
        more = iha["groups"][group]["new_more_than_mha"]["mean"]
        assert more == pytest.approx(right["iha"] - right["mha"])
