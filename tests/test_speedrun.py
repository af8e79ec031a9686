"""Run examples/speedrun.py as a user does."""

import json
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_training import hasten_runs

from examples import speedrun
from iha.errors import ROOT, UserError
from iha.kinds import virtual_tokens_per_token
from iha.step_memory import StepMemory
from sft.base_model import rope_reach


def run_here(words, stdout, stderr):
    """Stand in for `subprocess.run`: run `python -m` in this process, which spares the imports."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stdout):
        patch.setattr(sys, "argv", words[2:])
        with suppress(SystemExit):
            runpy.run_module(words[2], run_name="__main__")
            return subprocess.CompletedProcess(words, 0)
    return subprocess.CompletedProcess(words, 1)


@pytest.fixture
def few_steps_here(in_repository_root, monkeypatch):
    """Run the commands in this process, with few steps in short rows."""
    monkeypatch.setattr(speedrun, "subprocess", SimpleNamespace(run=run_here, STDOUT=subprocess.STDOUT))
    size = speedrun.SIZES["seconds"]
    stages = {name: replace(stage, steps=2, rows=2) for name, stage in size.stages.items()}
    stages["chat"] = replace(stages["chat"], tokens=512)
    monkeypatch.setitem(speedrun.SIZES, "seconds", replace(size, **stages, characters=100_000))
    hasten_runs(monkeypatch)


def assert_ends_in_a_table(words, out, run):
    """Run the smallest size twice, and look at what it leaves."""
    printed = run(words)
    assert "One seed: no ranking." in printed
    assert printed.rstrip().endswith(f"Wrote report.md, curves.png and table.json (every seed) in {out / 'seconds'}.")
    (figures,) = json.loads((out / "seconds" / "table.json").read_text())["seeds"]["paired-heads"]
    assert {
        "bits per byte, long",
        "loss of answers, sums-test",
        "loss of tokens 64 to 127",
        "seconds, long",
    } <= figures.keys()
    assert figures["bits per byte, pretrain"] < 8
    assert (out / "seconds" / "curves.png").stat().st_size > 1000
    again = run(words)
    assert again.count("(done before)") == again.count("\n$ ")


def test_all_stages_end_in_a_table(tmp_path, few_steps_here, capsys):
    def run(words):
        speedrun.main(words)
        return capsys.readouterr().out

    assert_ends_in_a_table(["--size", "seconds", "--forms", "paired-heads", "--out", str(tmp_path)], tmp_path, run)


@pytest.mark.slow
def test_the_smallest_size_ends_in_a_table(tmp_path):
    """Run it as a user does."""

    def run(words):
        command = [sys.executable, "examples/speedrun.py", *words]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert_ends_in_a_table(["--size", "seconds", "--forms", "paired-heads", "--out", str(tmp_path)], tmp_path, run)


@pytest.mark.parametrize(
    ("size", "forms"), [pytest.param("100m", ["paired-heads"], marks=pytest.mark.slow), ("2.4b", list(speedrun.FORMS))]
)
def test_a_dry_run_prints_commands_hours_and_memory(size, forms, tmp_path, capsys, monkeypatch):
    if len(forms) > 1:  # to count the memory of each takes seconds
        monkeypatch.setattr(speedrun, "of_training", lambda *_: StepMemory(1, 1, 1, 1))
    speedrun.main(["--size", size, "--forms", *forms, "--out", str(tmp_path / "new"), "--dry-run"])
    printed = capsys.readouterr().out
    assert printed.count("$ python -m sft.train") == 3 * len(forms)
    assert printed.count("| long |") == len(forms)
    assert printed.count("perplexity_by_position") == printed.count("--text ") == len(forms)
    assert "sft.make_tokenizer" not in printed
    assert printed.count("--eos_token '<|eot_id|>'") == (len(forms) if size == "2.4b" else 0)
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
