"""Test the reward of `trl grpo`, and the rows that reasoning-gym's verifiers score."""

import json
import signal
from pathlib import Path

import pytest

from iha.errors import UserError
from sft import make_reasoning_data, score_reasoning
from sft.score_reasoning import check_rows, correctness, is_right, read_rows


def made(directory: Path, *words: str) -> list[dict]:
    file = directory / f"{len(list(directory.iterdir()))}.jsonl"
    make_reasoning_data.main([str(file), *words])
    return read_rows(file)


def test_a_reply_is_scored_with_the_whole_entry_of_its_row(tmp_path):
    rows = made(tmp_path, "--rows", "10", "--options", "max_terms=2")
    rows += made(tmp_path, "--rows", "10", "--generator", "spell_backward")
    prompts = [make_reasoning_data.as_prompt(row) for row in rows]
    assert [json.loads(prompt["entry"]) for prompt in prompts] == [row["entry"] for row in rows]
    answers = [row["conversations"][1]["value"] for row in rows]
    columns = {name: [prompt[name] for prompt in prompts] for name in ("generator", "entry")}

    def rewards(texts):
        return correctness([[{"role": "assistant", "content": text}] for text in texts], **columns)

    assert rewards(answers) == rewards([row["entry"]["answer"] for row in rows]) == [1] * 20
    assert rewards(answers[1:] + answers[:1]) == [0] * 20
    # Right, with the answer first among other words: many verifiers give parts of the score to those.
    assert rewards([f"{text.removesuffix('<|end_of_solution|>')} x" for text in answers]) == [0] * 20
    assert rewards(["", "<|begin_of_solution|>", "nan", "9**9**9", "\ud83d"] * 4) == [0] * 20


def test_prompts_are_what_trl_takes(tmp_path):
    (row,) = made(tmp_path, "--rows", "1", "--prompts")
    assert row.keys() == {"prompt", "generator", "entry"} and json.loads(row["entry"])["question"]
    assert [turn["role"] for turn in row["prompt"]] == ["system", "user"]


def test_a_verifier_that_never_ends_or_fails_makes_a_reply_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(score_reasoning, "VERIFIER_SECONDS", 0.2)
    for generator, reply in (("countdown", "9**9**9"), ("prime_factorization", "two")):
        (row,) = made(tmp_path, "--rows", "1", "--generator", generator)
        assert is_right(row["conversations"][1]["value"], generator, row["entry"])
        assert not is_right(f"<|begin_of_solution|>{reply}", generator, row["entry"])
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


@pytest.mark.parametrize(
    ("generator", "named"), [("countdown", "may run a reply as code"), ("complex_arithmetic", "accepts nonsense")]
)
def test_a_reward_that_is_not_fair_or_not_safe_is_refused(generator, named, tmp_path):
    (row,) = made(tmp_path, "--rows", "1", "--generator", generator, "--prompts")
    with pytest.raises(UserError, match=f"the verifier of '{generator}' {named}"):
        correctness([[{"role": "assistant", "content": "1"}]], [row["generator"]], [row["entry"]])


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda row: row.pop("entry"), "row 2: expected the columns 'generator' and 'entry'"),
        (
            lambda row: row.update(make_reasoning_data.make_rows(1, 0, "complex_arithmetic", {}, set())[0]),
            "row 2: the verifier of 'complex_arithmetic' accepts nonsense",
        ),
    ],
)
def test_a_row_without_a_fair_verifier_is_refused(change, named, tmp_path):
    rows = made(tmp_path, "--rows", "2")
    change(rows[1])
    with pytest.raises(UserError, match=named):
        check_rows(rows)
