"""Test that the runs of recipes on a GPU are commands that `sft.train` takes, and that a failed one is kept."""

import json
import sys
import time

import pytest

from iha.errors import UserError
from research.benchmarks import recipes
from sft.arguments import RecipeParser
from sft.train import USAGE


@pytest.mark.parametrize("run", recipes.RUNS, ids=lambda run: run.name)
def test_the_command_of_a_run_is_accepted_at_its_length(run, tmp_path):
    words = recipes.training(run, tmp_path, steps=4, dry=False)
    keys, args = RecipeParser(USAGE).parse(words[3:])
    form = recipes.FORMS[run.form]
    assert args.max_length == run.tokens and args.packing == (run.tokens == 65_536 or "packing" in run.keys)
    assert keys.interleaved_window == form.get("interleaved_window") and args.gradient_checkpointing
    earlier = [other.name for other in recipes.RUNS[: recipes.RUNS.index(run)]]
    assert run.start in (*recipes.BASES, *earlier)


def test_a_run_that_fails_is_kept_until_it_is_tried_again(tmp_path, monkeypatch, capsys):
    answers = [UserError("out of memory"), {"tokens_per_second": 5.0}]

    def measure(*args):
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return answer

    monkeypatch.setattr(recipes, "measure", measure)
    words = ["--dry", "--work", str(tmp_path / "work"), "--out", str(tmp_path), "--runs", "lora-sft-qwen-plain"]
    for more, found in (([], {"failed": "out of memory"}),) * 2 + ((["--retry"], {"tokens_per_second": 5.0}),):
        recipes.main([*words, *more])
        ((name, row),) = json.loads((tmp_path / "recipes.json").read_text())["rows"].items()
        assert name == "lora-sft-qwen-plain" and found.items() <= row.items()
    assert not answers
    with pytest.raises(UserError, match="recipes.json was measured with steps 3, not 2: give another --out"):
        recipes.main([*words, "--steps", "2"])


@pytest.mark.parametrize(
    "code, seconds, told",
    [("raise ValueError('no')", 60, "ValueError: no"), ("while True: 1", 0, "not done after 1 s")],
)
def test_a_command_that_fails_is_told_by_its_last_line(code, seconds, told, tmp_path):
    with pytest.raises(UserError, match=told):
        recipes.output_of([sys.executable, "-c", code], tmp_path, time.monotonic() + seconds)
