"""Test that a visit to a GPU measures nothing twice, and is not lost to one form or slice that fails."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import command, last_line

from benchmarks import gpu, gpu_slices, harness
from benchmarks.gpu_slices import BENCHMARKS
from modeling_iha import interleaving
from modeling_iha.attention_iha import InterleavedHeadAttention


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the dry sizes are for a CPU")
README = harness.RESULTS / "gpu" / "README.md"


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    """Run the three commands of the README, and return the directory of their results.

    The measurements run in this process, where they need no imports; the tests of a GPU run in a process.
    """
    lines = [shlex.split(line) for line in README.read_text().splitlines() if "-m benchmarks.gpu" in line]
    out, run_until, begun = tmp_path_factory.mktemp("visit"), gpu.run_until, []

    def here(seconds, words):
        _, _, module, *arguments = words
        begun.append(module)
        if module == "pytest":
            return run_until(seconds, words)
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        return gpu_slices.main() or 0

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gpu, "run_until", here)
        for line in lines:
            arguments = line[line.index("benchmarks.gpu") + 1 :]
            monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--dry", "--out", str(out)])
            gpu.main()
    assert len(lines) == 3
    assert sorted(begun) == ["benchmarks.gpu_slices"] * 3 + ["pytest"]  # nothing is measured twice
    (device,) = out.iterdir()
    return device


def table(directory, name):
    return json.loads((directory / f"{name}.json").read_text())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_visit_measures_every_form_of_every_case(visit, name):
    (cases, forms), result = BENCHMARKS[name], table(visit, name)
    assert {"device", "python", "torch", "triton", "transformers", "dtype"} <= result.keys() and result["dry"]
    assert result["complete"] == "COMMIT" and len(result["rows"]) == len(cases(True))
    for row in result["rows"]:
        names = forms(row).keys()
        assert row["seconds"].keys() == row["ratios"].keys() == row["peak_bytes"].keys() == names and not row["failed"]
        assert len(names) >= 3 and all(value > 0 for value in row["seconds"].values())
        assert min(row["ratios"][form] for form in names if form.partition(":")[0] == row["base"]) == 1
        assert all(row["TFLOP per second" if name != "paper_decode" else "GB per second"][form] > 0 for form in names)
        assert set(row["commit"].values()) == {"COMMIT"}


def test_the_tests_of_a_gpu_are_found(visit):
    result = table(visit, "tests")
    assert result["tests"] == sum(result["skipped"].values()) > 10 and not result["failed"]
    assert "needs a CUDA device" in result["skipped"]
    assert all((gpu.ROOT / name).exists() for name in gpu.TESTS if name.endswith(".py"))


@pytest.fixture
def toy(monkeypatch, cli, tmp_path):
    """Put in a benchmark of two cases that changes with its `forms`.

    `built` lists which form was built when, and `run` runs the slice and returns its exit code, errors and rows.
    """
    built = []

    def sound(name):
        def prepare():
            built.append(name)
            return gpu_slices.Work(lambda: time.sleep(1e-4), {"GB": 1})

        return prepare

    def run_at(commit="one"):
        arguments = ("paper_layer", "--dry", "--out", tmp_path, "--commit", commit)
        code, _, errors = cli(gpu_slices, *arguments)
        return code, errors, table(tmp_path, "paper_layer")["rows"]

    forms = {name: sound(name) for name in ("base", "fast")}
    cases = [{"tokens": n, "base": "base"} for n in (1, 2)]
    monkeypatch.setitem(BENCHMARKS, "paper_layer", (lambda dry: cases, lambda row: forms))
    return SimpleNamespace(forms=forms, built=built, run=run_at)


def broken():
    raise torch.OutOfMemoryError("out of\nmemory")


@pytest.mark.parametrize("when", ["built", "run"])
def test_a_form_that_fails_is_recorded_and_tried_again_at_another_commit(toy, when):
    sound = toy.forms["fast"]
    toy.forms["fast"] = broken if when == "built" else lambda: gpu_slices.Work(broken, {})
    for _ in range(2):
        code, _, rows = toy.run()
        assert code == 0 and [row["failed"] for row in rows] == [{"fast": "out of memory"}] * 2
        assert [list(row["seconds"]) for row in rows] == [["base"]] * 2
    toy.forms["fast"] = sound
    assert [row["failed"] for row in toy.run()[2]] == [{"fast": "out of memory"}] * 2
    *_, rows = toy.run("two")
    assert all(row["failed"] == {} and row["ratios"].keys() == {"base", "fast"} for row in rows)
    assert all(row["commit"] == {"base": "one", "fast": "two"} for row in rows)
    assert toy.built == ["base"] * 2 + ["fast"] * 2


def hang(*_, **__):
    """Sleep in C, and hear no signal there but the last."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    time.sleep(30)


@pytest.mark.parametrize("end, code", [(lambda: os._exit(9), 9), (hang, 1)], ids=["ends", "hangs"])
def test_a_form_that_ends_the_process_is_left_out_afterwards(toy, monkeypatch, tmp_path, end, code):
    monkeypatch.setattr(gpu_slices, "FORM_SECONDS", 1)
    sound = toy.forms["fast"]
    toy.forms["fast"] = end
    if os.fork() == 0:
        toy.run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == code
    assert table(tmp_path, "paper_layer")["rows"][0]["failed"] == {"fast": gpu_slices.ENDED}
    # The second case has not met it.
    toy.forms["fast"] = sound
    *_, rows = toy.run()
    assert [list(row["seconds"]) for row in rows] == [["base"], ["base", "fast"]]


def test_a_form_that_came_to_its_end_ends_no_process(toy, monkeypatch):
    monkeypatch.setattr(gpu_slices, "FORM_SECONDS", 1)
    if os.fork() == 0:
        toy.run()
        time.sleep(1.5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0


def test_a_form_that_was_stopped_is_tried_again(toy):
    sound = toy.forms["fast"]

    def stopped():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    toy.forms["fast"] = stopped
    heard = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the module does when it is run
    try:
        code, _, rows = toy.run()
    finally:
        signal.signal(signal.SIGTERM, heard)
    assert code == 130 and rows[0]["failed"] == {}
    toy.forms["fast"] = sound
    *_, rows = toy.run()
    assert all(row["seconds"].keys() == {"base", "fast"} and not row["failed"] for row in rows)


def test_an_error_that_breaks_the_gpu_ends_the_process(toy, monkeypatch, tmp_path):
    def illegal():
        raise RuntimeError("CUDA error: an illegal memory access")

    toy.forms["fast"] = illegal
    with monkeypatch.context() as patches:
        # After the base's run, and after the form that fails.
        patches.setattr(gpu_slices, "synchronize", lambda calls=[]: calls.append(0) or len(calls) > 2 and illegal())
        code, err, _ = toy.run()
    assert code == 1 and "illegal memory access" in last_line(err)
    assert table(tmp_path, "paper_layer")["rows"][0]["failed"] == {"fast": "CUDA error: an illegal memory access"}
    assert [list(row["seconds"]) for row in toy.run()[2]] == [["base"]] * 2


def test_results_of_another_version_stay_apart(toy, monkeypatch, tmp_path):
    toy.run()
    before = (tmp_path / "paper_layer.json").read_text()
    monkeypatch.setattr(torch, "__version__", "another")
    code, err, _ = toy.run()
    assert code == 1 and "and this is another: remove the file" in last_line(err)
    assert (tmp_path / "paper_layer.json").read_text() == before


def test_the_next_slice_begins_whatever_became_of_one(monkeypatch, cli, tmp_path):
    """Let one slice fail, and another run out of time.

    A slice that fails is started anew while it leaves more than before.
    """
    started = []

    def run_until(seconds, command):
        name, out = command[3], Path(command[command.index("--out") + 1])
        started.append(name)
        if name == "paper_train":
            raise subprocess.TimeoutExpired(command, seconds)
        (out / f"{name}.json").write_text(str(min(2, started.count(name))))
        return 1 if name == "paper_layer" else 0

    monkeypatch.setattr(gpu, "run_until", run_until)
    monkeypatch.setattr(gpu, "read_json", lambda path: {})
    code, out, err = cli(gpu, "--dry", "--out", tmp_path, *BENCHMARKS)
    assert code == 1 and "paper_layer, paper_train failed or ran out of time" in last_line(err)
    assert started == ["paper_layer"] * 3 + ["paper_train", "paper_decode"] and "200 seconds are up" in out
    left = {path.name: path.read_text() for path in tmp_path.glob("*/*")}
    assert left == {"paper_layer.json": "2", "paper_decode.json": "1"}


def test_refusals_come_before_any_work(cli, tmp_path):
    for arguments, message in (
        ([], "sees no CUDA device"),
        (["--dry", "speed"], "no slice speed: choose among paper_layer"),
    ):
        code, _, err = cli(gpu, "--out", tmp_path / "out", *arguments)
        assert code == 1 and message.replace("among paper_layer", "among tests, paper_layer") in last_line(err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backward", [False, True])
def test_masks_and_rotary_tables_are_not_timed(monkeypatch, backward):
    case = {"tokens": 64, "heads": 4, "head_dim": 8, "backward": backward}
    work = gpu_slices.layers(case, num_pseudo_heads=2, **gpu_slices.sliding(16))
    monkeypatch.setattr(gpu_slices.IHAModel, "create_masks", lambda *_: pytest.fail("made in a run"))
    work.run()


def test_a_layer_that_is_wrong_is_left_out(monkeypatch):
    arguments = ("wrong", 4, 8, 2, True)
    gpu_slices.check_layer.__wrapped__(*arguments)
    attend = InterleavedHeadAttention.attend

    def wrong(self, *states, **kwargs):
        output, weights = attend(self, *states, **kwargs)
        return output * (1.1 if self.config._attn_implementation == "sdpa" else 1), weights

    monkeypatch.setattr(InterleavedHeadAttention, "attend", wrong)
    with pytest.raises(RuntimeError, match="wrong is off a float32 computation by"):
        gpu_slices.check_layer.__wrapped__(*arguments)


def test_kernels_that_are_wrong_are_not_compared_with_themselves(monkeypatch):
    expand, collapse = interleaving.expand, interleaving.collapse
    wrong = partial(gpu_slices.mixing_by, expand, lambda *inputs: 1.1 * collapse(*inputs))
    monkeypatch.setattr(gpu_slices, "by_mix_heads", wrong)
    gpu_slices.check_layer.cache_clear()
    for case in gpu_slices.layer_cases(True):
        forms = gpu_slices.layer_forms({**case, "seconds": {}})
        kernels = [name for name in forms if name.endswith("mix_heads")]
        assert len(kernels) >= 1
        for name in kernels:
            with pytest.raises(RuntimeError, match="mix_heads is off a float32 computation by"):
                forms[name]()


def test_a_decoding_form_that_is_wrong_is_left_out(monkeypatch):
    (*_, case) = gpu_slices.decode_cases(True)
    forms, absorbed = gpu_slices.decode_forms(case), gpu_slices.absorbed_attention
    forms["absorbed"]()
    wrong = lambda *inputs, **where: absorbed(*inputs, **where) * 1.1  # noqa: E731
    monkeypatch.setattr(gpu_slices.attention_iha, "absorbed_attention", wrong)
    forms["rebuilt"]()
    with pytest.raises(RuntimeError, match="base is off a float32 computation by"):
        forms["absorbed"]()


def test_outcomes_of_a_run_of_tests(tmp_path):
    cases = {
        "right": "",
        "wrong": '<failure message="assert 1 ==\n2"/>',
        "skipped": '<skipped message="no such core"/>',
        "error": '<error message="fixture missing"/>',
    }
    lines = [f'<testcase classname="any" name="{name}">{inner}</testcase>' for name, inner in cases.items()]
    lines += ['<testcase time="0.000" />']  # pytest was interrupted in this test
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    assert gpu.outcomes(tmp_path / "report.xml") == {
        "tests": 5,
        "passed": 1,
        "unfinished": 1,
        "failed": {"any::wrong": "assert 1 == 2", "any::error": "fixture missing"},
        "skipped": {"no such core": 1},
    }


def test_a_study_is_left_out_where_a_package_is_missing(monkeypatch, cli, tmp_path):
    monkeypatch.setitem(gpu.STUDIES, "warm_start", (["warm_start_variants"], ["no_such_package"]))
    code, out, _ = cli(gpu, "--dry", "--out", tmp_path, "warm_start")
    assert code == 0 and "warm_start: left out, it needs no_such_package" in out


@pytest.mark.parametrize(
    "table, is_done", [(None, False), ({"complete": False}, False), ({"complete": True}, True), ({}, True)]
)
def test_a_study_goes_on_until_its_table_is_complete(monkeypatch, cli, tmp_path, table, is_done):
    commands = []
    monkeypatch.setattr(gpu, "run_until", lambda seconds, command: commands.append(command) or 0)
    if table is not None:
        device = tmp_path / "gpu"
        monkeypatch.setattr(gpu, "device_name", lambda: "GPU")
        device.mkdir()
        (device / "relation_composition_full.json").write_text(json.dumps(table))
    code, out, _ = cli(gpu, "--dry", "--out", tmp_path, "relation")
    assert code == 0 and ("done before" in out) == is_done == (not commands)


@pytest.mark.parametrize("stopped_by", [subprocess.TimeoutExpired, KeyboardInterrupt])
def test_a_command_that_is_stopped_may_write_what_it_has(tmp_path, stopped_by):
    code = (
        "import pathlib, sys, time\n"
        "try: time.sleep(60)\n"
        "except KeyboardInterrupt: pathlib.Path(sys.argv[1]).write_text('stopped')"
    )
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # stands for SIGTERM, as the module hears it
    try:
        signal.alarm(2 if stopped_by is KeyboardInterrupt else 0)
        with pytest.raises(stopped_by):
            seconds = 60 if stopped_by is KeyboardInterrupt else 2
            gpu.run_until(seconds, [sys.executable, "-c", code, str(tmp_path / "file")])
    finally:
        signal.signal(signal.SIGINT, heard)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert (tmp_path / "file").read_text() == "stopped"


def test_nothing_that_a_command_started_outlasts_it(tmp_path):
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = (
        "import os, subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"while not os.path.exists({str(pid)!r}) or not os.path.getsize({str(pid)!r}): time.sleep(0.05)"
    )
    assert gpu.run_until(60, [sys.executable, "-c", parent]) == 0
    state = Path("/proc") / pid.read_text() / "stat"
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        gpu.run_until(1, [sys.executable, "-c", "import time; time.sleep(60)"])


def test_studies_are_found(monkeypatch, capfd, tmp_path):
    """Start a process for each, which reads its arguments and prints its help."""
    code, out, errors = command(monkeypatch, capfd, gpu, "--dry", "--out", tmp_path, "warm_start", "relation")
    assert code == 0, errors
    assert re.findall(r"^usage: (?:.* -m experiments\.)?(\w+)", out, re.MULTILINE) == [
        "warm_start_variants",
        "relation_composition",
    ]
