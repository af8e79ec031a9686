"""Test that a visit to a GPU measures every form once, in the dry size, and is not lost to one that fails."""

import fcntl
import json
import signal
import sys
import time
from math import inf
from multiprocessing import get_context

import pytest
import torch
from helpers import last_line

from iha.errors import ROOT, UserError, run_cli
from modeling_iha import triton_kernels
from research.benchmarks import gpu, recipe_runs
from sft.arguments import RecipeParser
from sft.train import USAGE


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the dry sizes are for a CPU")


def cases_of(out) -> dict:
    (path,) = out.glob("*/gpu.json")
    return json.loads(path.read_text())["cases"]


@pytest.fixture
def table(tmp_path):
    setting = {"device": "a GPU", "torch": "2", "transformers": "5"}
    return gpu.Table.open(tmp_path, setting, retry=False)


@pytest.mark.parametrize("cases", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_every_form_of_every_case_is_measured_once(cases, tmp_path, cli, monkeypatch):
    """Take the first cases of layers, or slowly all."""
    layer_cases = gpu.layer_cases
    monkeypatch.setattr(gpu, "layer_cases", lambda dry: layer_cases(dry)[:cases])
    with torch.compiler.set_stance("force_eager"):  # test_compile.py compiles
        assert cli(gpu, "--dry", "--pieces", "layers", "decoding", "--out", tmp_path)[0] == 0
    found = cases_of(tmp_path)
    expected = {case.title: case.forms for case in (*gpu.layer_cases(True), *gpu.decoding_cases(True))}
    assert {title: list(forms) for title, forms in found.items()} == {
        title: list(forms) for title, forms in expected.items()
    }
    assert all(figures["ms"] > 0 for forms in found.values() for figures in forms.values())
    (page,) = tmp_path.glob("*/gpu.md")
    assert page.read_text().count("| mha | ") == (2 if cases else 5)
    # A second call measures no case again.
    assert cli(gpu, "--dry", "--pieces", "layers", "decoding", "--out", tmp_path)[0] == 0
    assert cases_of(tmp_path) == found


def test_what_fails_is_kept_until_it_is_tried_again(table):
    answers = [RuntimeError("out of memory"), lambda: None]

    def build():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    case = gpu.Case("a case", {"base": lambda: lambda: None, "form": build})
    gpu.run_case(case, table, inf)
    gpu.run_case(case, table, inf)
    assert len(answers) == 1 and "out of memory" in table.content["cases"]["a case"]["form"]["failed"]
    again = gpu.Table.open(table.directory, {"device": "a GPU"}, retry=True)
    gpu.run_case(case, again, time.monotonic() - 1)  # no time is left
    assert len(answers) == 1
    assert not again.needs("a case", "base")  # it has not failed
    gpu.run_case(case, again, inf)
    assert not answers and again.content["cases"]["a case"]["form"]["ms"] > 0
    with pytest.raises(UserError, match="was measured with device a GPU, not another: name another --out"):
        gpu.Table.open(table.directory, {"device": "another"}, retry=False)


def test_another_commit_is_measured_anew(table):
    table.keep("a case", "form", {"ms": 1.0})
    assert not table.needs("a case", "form")
    table.commit = "0123abc"
    assert table.needs("a case", "form")


def test_what_runs_without_kernels(table):
    seen = {}
    forms = {
        form: lambda form=form: seen.update({form: triton_kernels.WANTED}) or (lambda: None)
        for form in ("iha", "iha" + gpu.WITHOUT)
    }
    gpu.run_case(gpu.Case("a case", forms), table, inf)
    assert seen == {"iha": triton_kernels.WANTED, "iha" + gpu.WITHOUT: "0"}


def test_tests_are_collected_in_a_dry_run(table, tmp_path, monkeypatch):
    """Take a file that imports nothing, and find those of a visit."""
    assert all((ROOT / word).exists() for words in gpu.TESTS.values() for word in words if word.endswith(".py"))
    (tmp_path / "test_kernels.py").write_text("def test_that_fails():\n    assert False\n")
    monkeypatch.setattr(gpu, "TESTS", {"kernels": [str(tmp_path / "test_kernels.py")]})
    gpu.run_tests(table, True, time.monotonic() + 300)
    assert "1 test collected" in table.content["cases"]["tests"]["kernels"]["passed"]


@pytest.mark.parametrize("run", recipe_runs.RUNS, ids=lambda run: f"{run.case}, {run.form}")
def test_the_command_of_a_recipe_is_accepted_at_its_length(run, tmp_path):
    words = recipe_runs.training(run, tmp_path, dry=False)
    keys, args = RecipeParser(USAGE).parse(words[3:])
    assert args.max_length == run.tokens and args.packing == (run.tokens == 65_536)
    form = recipe_runs.FORMS[run.form]
    assert keys.interleaved_window == form.get("interleaved_window") and args.gradient_checkpointing


def test_a_recipe_that_fails_is_kept(table, monkeypatch):
    def measure(run, *arguments):
        if run.form == "plain":
            raise UserError("out of memory")
        return {"tokens per second": 5.0}

    monkeypatch.setattr(recipe_runs, "measure", measure)
    gpu.run_recipes(table, True, inf)
    for forms in table.content["cases"].values():
        (failed, trained) = forms.values()
        assert failed["failed"] == "out of memory" and trained["tokens per second"] == 5.0


HOLD = "import fcntl, time; fcntl.flock(file := open('held', 'w'), fcntl.LOCK_EX); open('ready', 'w'); time.sleep(60)"


def test_a_visit_that_is_stopped_ends_its_recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "OUTPUTS", tmp_path)
    hold = lambda run, work, dry, until: recipe_runs.output_of([sys.executable, "-c", HOLD], tmp_path, until)  # noqa: E731
    monkeypatch.setattr(recipe_runs, "measure", hold)
    visit = lambda: gpu.main(["--dry", "--pieces", "recipes", "--out", str(tmp_path / "out")])  # noqa: E731
    process = get_context("fork").Process(target=run_cli, args=(visit,))
    process.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.1)
    process.terminate()
    process.join(30)
    assert process.exitcode == 128 + signal.SIGTERM and not list(tmp_path.glob("out/*/gpu.json"))
    with open(tmp_path / "held") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it any more


@pytest.mark.parametrize(
    "code, seconds, told",
    [("raise ValueError('no')", 60, "ValueError: no"), ("while True: 1", 0, "not done after 1 s")],
)
def test_a_command_that_fails_is_told_by_its_last_line(code, seconds, told, tmp_path):
    with pytest.raises(UserError, match=told):
        recipe_runs.output_of([sys.executable, "-c", code], tmp_path, time.monotonic() + seconds)


def test_a_cpu_is_refused_before_any_work(cli, tmp_path):
    code, _, errors = cli(gpu, "--out", tmp_path / "out")
    assert code == 1 and "sees no CUDA device" in last_line(errors) and not list(tmp_path.iterdir())
