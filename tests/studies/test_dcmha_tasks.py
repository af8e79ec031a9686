"""Test that each of DCMHA's tasks has one right answer, and that the study runs in small."""

import random
from statistics import mean

import pytest

from research.experiments import dcmha_tasks
from research.experiments.dcmha_tasks import ANSWERS, NAMES, TASKS, TOKENS
from research.experiments.language_models import sized


TINY = sized(width=16, ffn=48, layers=1, heads=2, tokens=4, batch=2, steps=4, test=1)


@pytest.mark.parametrize("new", [False, True], ids=["seen", "new"])
def test_an_example_has_one_right_answer(new):
    generator = random.Random(0)
    for index, task in [*enumerate(TASKS)] * 10:
        answers = ANSWERS[task.transformation]
        (*facts, question), given = dcmha_tasks.draw(index, new, generator)
        assert {word for line in (*facts, question) for word in line} | {given} <= set(TOKENS)
        words = [next(word for word in fact if word in answers) for fact in facts]
        owners = [next((word for word in fact if word in NAMES), None) for fact in facts]
        asked = question[2:]
        right = {
            "same person": [answers[word] for word, owner in zip(words, owners) if owner in asked],
            "other person": [answers[word] for word, owner in zip(words, owners) if owner not in asked],
            "who": [owner for word, owner in zip(words, owners) if answers[word] in asked],
            "who not": [owner for word, owner in zip(words, owners) if answers[word] not in asked],
            "not the named": [answers[word] for word in words if word not in asked],
            "different": [answers[word] for word in words if words.count(word) == 1],
        }[task.pattern]
        assert right == [given], (facts, question)


def test_there_are_the_papers_74_tasks_and_new_words_are_those_of_other_tasks():
    assert len(TASKS) == len(set(TASKS)) == 74
    for index, task in enumerate(TASKS):
        seen, new = (set(dcmha_tasks.sources(index, held_out)) for held_out in (False, True))
        assert new and not seen & new and seen | new == set(ANSWERS[task.transformation])
        elsewhere = [i for i, other in enumerate(TASKS) if other.transformation == task.transformation and i != index]
        assert new <= {word for i in elsewhere for word in dcmha_tasks.sources(i, False)}


def test_the_tasks_in_small(run_protocol, monkeypatch):
    monkeypatch.setattr(dcmha_tasks, "FIRST_RATE", 4.096)
    monkeypatch.setattr(dcmha_tasks, "EVALUATIONS", 1)
    table, runs = run_protocol(dcmha_tasks, {"SMALL": TINY}, ["mha", "iha"], changed={"SMALL": {**TINY, "test": 2}})
    for row in table["rows"]:
        of_who = [i for i, task in enumerate(TASKS) if task.pattern == "who"]
        for group, tasks in {"all": range(74), "who": of_who}.items():
            right = [mean(run["right"]["new"][i] for i in tasks) for run in runs[row["kind"]]]
            assert row[group]["new"]["values"] == pytest.approx(right)
    assert "p_holm" not in table["rows"][0]["all"]["seen"] and "seen_minus_base" in table["rows"][1]["all"]
