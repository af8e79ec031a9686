"""Run examples/speedrun.py as a user does."""

import json
import subprocess
import sys

import pytest

from examples import speedrun
from iha.errors import ROOT, UserError


def run_script(words):
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_smallest_size_ends_in_a_table(tmp_path):
    words = ["examples/speedrun.py", "--size", "seconds", "--forms", "paired-heads", "--out", str(tmp_path)]
    printed = run_script(words)
    assert "One seed: no ranking." in printed
    (figures,) = json.loads((tmp_path / "seconds" / "table.json").read_text())["seeds"]["paired-heads"]
    assert {"bits per byte, long", "loss of answers, sums-test", "loss@64", "seconds, long"} <= figures.keys()
    assert figures["bits per byte, pretrain"] < 8
    assert (tmp_path / "seconds" / "table.png").stat().st_size > 1000
    again = run_script(words)
    assert again.count("(done before)") == again.count("\n$ ")


@pytest.mark.parametrize("size", ["100m", "2.4b"])
def test_a_dry_run_prints_commands_hours_and_memory(size, tmp_path, capsys):
    speedrun.main(["--size", size, "--out", str(tmp_path / "new"), "--dry-run"])
    printed = capsys.readouterr().out
    assert printed.count("$ python -m sft.train") == 3 * len(speedrun.FORMS)
    assert printed.count("| long |") == len(speedrun.FORMS)
    assert not (tmp_path / "new").exists()


def test_equal_time_takes_fewer_steps_of_a_slower_form():
    run = speedrun.Run(speedrun.parse(["--size", "minutes"]))
    words = run.form_commands("iha", 0, share=0.5)[0].words
    assert words[words.index("--max_steps") + 1] == str(run.size.pretrain.steps // 2)


def test_what_would_give_other_figures_silently_is_rejected(tmp_path):
    with pytest.raises(UserError, match="--size 100m reads HuggingFaceFW/fineweb-edu: leave out --text"):
        speedrun.parse(["--size", "100m", "--text", "my.txt"])
    short = tmp_path / "short.txt"
    short.write_text("a" * 20_000)
    run = speedrun.Run(speedrun.parse(["--text", str(short), "--out", str(tmp_path)]))
    speedrun.claim(run)
    with pytest.raises(UserError, match="20000 characters: expected more"):
        run.write_texts()
    speedrun.claim(run)
    with pytest.raises(UserError, match="holds runs with other options"):
        speedrun.claim(speedrun.Run(speedrun.parse(["--equal-time", "--out", str(tmp_path)])))


def test_rows_are_shared_by_devices():
    words = speedrun.Run(speedrun.parse(["--size", "minutes", "--devices", "8"])).form_commands("iha", 0)[0].words
    assert words[words.index("--per_device_train_batch_size") + 1] == "1"
