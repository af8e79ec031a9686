"""Run examples/speedrun.py as a user does."""

import json
import subprocess
import sys

import pytest

from examples import speedrun
from iha.errors import ROOT, UserError
from iha.kinds import virtual_tokens_per_token
from sft.base_model import rope_reach


def run_script(words):
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_smallest_size_ends_in_a_table(tmp_path):
    words = ["examples/speedrun.py", "--size", "seconds", "--forms", "paired-heads", "--out", str(tmp_path)]
    printed = run_script(words)
    assert "One seed: no ranking." in printed
    assert printed.rstrip().endswith(
        f"Wrote report.md, curves.png and table.json (every seed) in {tmp_path / 'seconds'}."
    )
    (figures,) = json.loads((tmp_path / "seconds" / "table.json").read_text())["seeds"]["paired-heads"]
    assert {
        "bits per byte, long",
        "loss of answers, sums-test",
        "loss of tokens 64 to 127",
        "seconds, long",
    } <= figures.keys()
    assert figures["bits per byte, pretrain"] < 8
    assert (tmp_path / "seconds" / "curves.png").stat().st_size > 1000
    again = run_script(words)
    assert again.count("(done before)") == again.count("\n$ ")


@pytest.mark.parametrize("size", ["100m", "2.4b"])
def test_a_dry_run_prints_commands_hours_and_memory(size, tmp_path, capsys):
    speedrun.main(["--size", size, "--out", str(tmp_path / "new"), "--dry-run"])
    printed = capsys.readouterr().out
    assert printed.count("$ python -m sft.train") == 3 * len(speedrun.FORMS)
    assert printed.count("| long |") == len(speedrun.FORMS)
    assert printed.count("perplexity_by_position") == printed.count("--text ") == len(speedrun.FORMS)
    assert ("sft.make_tokenizer" in printed) == ("<|im_end|>" in printed) == (size == "2.4b")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("package", ["lm_eval", "reasoning_gym"])
def test_a_package_of_the_last_stages_is_missed_before_the_first(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    for words in ([], ["--dry-run"]):
        with pytest.raises(UserError, match=f"the package {package} is not installed: run pip install"):
            speedrun.main(["--size", "seconds", "--out", str(tmp_path / "new"), *words])
    assert not (tmp_path / "new").exists()


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
        speedrun.claim(speedrun.Run(speedrun.parse(["--text", "other.txt", "--out", str(tmp_path)])))


@pytest.mark.parametrize(("size", "devices"), [("minutes", 2), ("100m", 16), ("2.4b", 32)])
def test_rows_are_shared_by_devices(size, devices):
    run = speedrun.Run(speedrun.parse(["--size", size, "--devices", str(devices)]))
    for each, stage in zip(run.form_commands("iha", 0), run.size.stages.values()):
        options = dict(zip(each.words, each.words[1:]))
        rows = [int(options[f"--{name}"]) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
        assert rows[0] * rows[1] * devices == stage.rows and rows[0] <= stage.rows_at_once
    with pytest.raises(UserError, match="a step has .* rows; expected a divisor"):
        speedrun.parse(["--size", size, "--devices", "7"])


@pytest.mark.parametrize("size", speedrun.SIZES)
@pytest.mark.parametrize("form", speedrun.FORMS)
def test_longer_rows_stay_within_the_longest_wavelength(form, size):
    run = speedrun.Run(speedrun.parse(["--size", size]))
    config = run.config_of(form, "long")
    config.rope_parameters = {"rope_type": "default", "rope_theta": run.size.rope_theta}
    assert run.size.long.tokens * virtual_tokens_per_token(config) <= rope_reach(config)
