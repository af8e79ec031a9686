"""`python -m benchmarks.gpu`: every slice in its dry size, and that a visit to a GPU is never spent twice on the same
measurement, nor lost to one form that fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import command, last_line

from benchmarks import gpu, gpu_resources, gpu_slices, harness
from gpu_kernels.ahead_of_time import Compiled


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the dry sizes are for a CPU")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """The directory that a dry run of the tests and benchmarks wrote to."""
    directory = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gpu, "TIMED_SECONDS", 0)
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry", "--out", str(directory), "tests", *gpu.BENCHMARKS])
        gpu.main()
    return directory


@pytest.mark.slow
def test_studies_are_found(monkeypatch, capsys, tmp_path):
    """A process for each, which imports TRL."""
    code, out, errors = run(monkeypatch, capsys, "--dry", "--out", tmp_path, "warm_start", "relation")
    assert code == 0 and out.count("$ python -m experiments.") == 2, errors


def table(directory, name):
    return json.loads((directory / f"{name}.json").read_text())


@pytest.mark.parametrize("name", gpu.BENCHMARKS)
def test_a_benchmark_measures_every_form_of_every_case(dry_run, name):
    benchmark, result = gpu.BENCHMARKS[name], table(dry_run, name)
    assert {"device", "python", "torch", "triton", "transformers", "dtype"} <= result.keys() and result["dry"]
    assert len(result["rows"]) == len(benchmark.cases(True))
    for row in result["rows"]:
        forms = benchmark.forms(row).keys()
        assert row["seconds"].keys() == forms and len(forms) >= 3 and not row["failed"]
        assert row["ratios"] and all(value > 0 for value in row["seconds"].values())
        assert not benchmark.peaks or row["extra_bytes"].keys() == forms
        assert row["commit"] == gpu.current_commit()
    assert (dry_run / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_tests_of_a_gpu_are_found(dry_run):
    (row,) = table(dry_run, "tests")["rows"]
    assert row["tests"] == sum(row["skipped"].values()) > 10 and not row["failed"]
    assert list(row["skipped"]) == ["needs a CUDA device"]
    assert not list(dry_run.glob(".*"))


def run(monkeypatch, capsys, *arguments):
    return command(monkeypatch, capsys, gpu, *arguments)


def test_what_was_measured_is_not_measured_again(dry_run, monkeypatch, capsys):
    def measured(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(gpu, "measure_case", measured)
    monkeypatch.setattr(gpu, "run_until", measured)
    assert run(monkeypatch, capsys, "--dry", "--out", dry_run, "tests", *gpu.BENCHMARKS)[0] == 0


@pytest.fixture
def benchmark(monkeypatch):
    """A benchmark of two cases that changes with its `forms`, and how often each form was built."""
    built = []

    def sound(name):
        def prepare():
            built.append(name)
            return lambda: time.sleep(1e-4)

        return prepare

    forms = {name: sound(name) for name in ("base", "fast")}
    toy = gpu_slices.Benchmark(
        lambda dry: [{"tokens": n, "pseudo_heads": 2} for n in (1, 2)], lambda case: forms, ("base",), "tokens", ()
    )
    monkeypatch.setattr(gpu, "TIMED_SECONDS", 0)
    monkeypatch.setitem(gpu.BENCHMARKS, "kernels", toy)
    return forms, built


def run_toy(monkeypatch, capsys, tmp_path, *arguments):
    code, out, err = run(monkeypatch, capsys, "--dry", "--out", tmp_path, "kernels", *arguments)
    return code, out, err, table(tmp_path, "kernels")["rows"] if (tmp_path / "kernels.json").exists() else None


def test_a_form_that_fails_is_recorded_and_the_others_go_on(benchmark, monkeypatch, capsys, tmp_path):
    def broken():
        raise torch.OutOfMemoryError("out of\nmemory")

    forms, built = benchmark
    forms["broken"] = broken
    code, out, _, rows = run_toy(monkeypatch, capsys, tmp_path)
    assert code == 0 and "left out: broken: out of memory" in out
    assert [row["failed"] for row in rows] == [{"broken": "out of memory"}] * 2
    assert [list(row["seconds"]) for row in rows] == [["base", "fast"]] * 2
    run_toy(monkeypatch, capsys, tmp_path)
    assert len(built) == 4


def test_a_form_that_finds_no_room_beside_the_others_is_left_out(benchmark, monkeypatch, capsys, tmp_path):
    forms, _ = benchmark
    calls = []

    def crowded():
        calls.append(0)
        if len(calls) % 2 == 0:
            raise torch.OutOfMemoryError("out of memory")

    forms["fast"] = lambda: crowded
    *_, rows = run_toy(monkeypatch, capsys, tmp_path)
    assert [(list(row["seconds"]), row["failed"]) for row in rows] == [(["base"], {"fast": "out of memory"})] * 2


def test_a_core_that_came_later_has_its_cases_measured_anew(benchmark, monkeypatch, capsys, tmp_path):
    forms, built = benchmark
    late = forms.pop("fast")
    run_toy(monkeypatch, capsys, tmp_path)
    forms["fast"] = late
    *_, rows = run_toy(monkeypatch, capsys, tmp_path)
    assert built == ["base"] * 2 + ["base", "fast"] * 2
    assert len(rows) == 2 and all("fast / base" in row["ratios"] for row in rows)


def test_a_form_that_ends_the_process_is_left_out_afterwards(benchmark, monkeypatch, capsys, tmp_path):
    forms, built = benchmark
    monkeypatch.setitem(forms, "fast", lambda: os._exit(9))
    if os.fork() == 0:
        run_toy(monkeypatch, capsys, tmp_path)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 9
    assert table(tmp_path, "kernels")["rows"][0]["failed"] == {"fast": gpu.ENDED}
    # The second case has not met it.
    forms["fast"] = lambda: lambda: None
    *_, rows = run_toy(monkeypatch, capsys, tmp_path)
    assert [list(row["seconds"]) for row in rows] == [["base"], ["base", "fast"]]


def test_a_form_that_was_interrupted_is_tried_again(benchmark, monkeypatch, capsys, tmp_path):
    forms, _ = benchmark

    def interrupted():
        raise KeyboardInterrupt

    sound = forms["fast"]
    forms["fast"] = interrupted
    assert run_toy(monkeypatch, capsys, tmp_path)[0] == 130
    forms["fast"] = sound
    *_, rows = run_toy(monkeypatch, capsys, tmp_path)
    assert all(row["seconds"].keys() == {"base", "fast"} and not row["failed"] for row in rows)


def test_an_error_that_breaks_the_gpu_ends_the_run(benchmark, monkeypatch, capsys, tmp_path):
    forms, _ = benchmark

    def broken(*_):
        raise RuntimeError("CUDA error: an illegal memory access")

    forms["fast"] = broken
    with monkeypatch.context() as patches:
        patches.setattr(gpu_slices, "synchronize", lambda calls=[]: calls.append(0) or len(calls) > 1 and broken())
        code, _, err, rows = run_toy(monkeypatch, capsys, tmp_path)
    assert code == 1 and "fast left the GPU unusable" in last_line(err)
    assert rows[0]["failed"] == {"fast": "CUDA error: an illegal memory access"}
    assert [list(row["seconds"]) for row in run_toy(monkeypatch, capsys, tmp_path)[3]] == [["base"]] * 2


def test_the_time_is_up_before_a_case_and_the_next_run_goes_on(benchmark, monkeypatch, capsys, tmp_path):
    code, out, _, rows = run_toy(monkeypatch, capsys, tmp_path, "--minutes", "0")
    assert code == 0 and "the time is up, 2 cases are left" in out and rows is None
    assert len(run_toy(monkeypatch, capsys, tmp_path)[3]) == 2


def test_results_of_another_device_stay_apart(benchmark, monkeypatch, capsys, tmp_path):
    run_toy(monkeypatch, capsys, tmp_path)
    before = (tmp_path / "kernels.json").read_text()
    monkeypatch.setattr(harness, "processor", lambda: "another")
    code, _, err, _ = run_toy(monkeypatch, capsys, tmp_path)
    assert code == 1 and "and this is another: choose another --out" in last_line(err)
    assert (tmp_path / "kernels.json").read_text() == before


def test_refusals_come_before_any_work(monkeypatch, capsys, tmp_path):
    code, _, err = run(monkeypatch, capsys, "--out", tmp_path / "out")
    assert code == 1 and "sees no CUDA device" in last_line(err)
    code, _, err = run(monkeypatch, capsys, "--dry", "--out", tmp_path / "out", "speed")
    assert code == 1 and "no slice speed: choose among tests, kernels" in last_line(err)
    assert not list(tmp_path.iterdir())


def test_memory_is_what_a_form_takes_beside_what_is_held(monkeypatch):
    """A form that has the GPU for itself counts with what it holds, another one without. The allocator is made up: a
    process that has freed memory before shows no peak on a CPU."""
    allocator = SimpleNamespace(held=100, peak=150)

    def held_bytes():
        allocator.peak = allocator.held
        return allocator.held

    def prepare():
        allocator.held += 10  # weights and inputs

        def function():
            allocator.peak = max(allocator.peak, allocator.held + 2)

        return function

    monkeypatch.setattr(gpu_slices, "held_bytes", held_bytes)
    monkeypatch.setattr(gpu_slices, "peak_bytes", lambda: allocator.peak)
    for together, expected in ((True, 2), (False, 12)):
        benchmark = gpu_slices.Benchmark(
            lambda dry: [], lambda case: {"only": prepare}, (), "tokens", (), peaks=True, together=together
        )
        row = {"failed": {}}
        gpu.measure_case(benchmark, "", row, lambda: None)
        assert row["extra_bytes"] == {"only": expected}


def test_kernels_that_are_wrong_are_left_out(monkeypatch):
    case = gpu_slices.kernel_cases(True)[0]
    wrong = lambda *arguments: gpu_slices.collapse_first_attention(*arguments) * 1.1  # noqa: E731
    gpu_slices.kernel(case, 32, gpu_slices.collapse_first_attention)
    with pytest.raises(RuntimeError, match="off by .* of a float32 computation"):
        gpu_slices.kernel(case, 32, wrong)


def test_outcomes_of_a_run_of_tests(tmp_path):
    (tmp_path / "test_any.py").write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_skipped(): pytest.skip('no such core')\n"
        "def test_error(missing): pass\n"
    )
    report = tmp_path / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", "test_any.py"],
        cwd=tmp_path,
        capture_output=True,
    )
    row = gpu.outcomes(report)
    assert row["tests"] == 4 and row["passed"] == 1 and row["skipped"] == {"no such core": 1}
    assert row["failed"].keys() == {"test_any::test_wrong", "test_any::test_error"}
    assert "assert 1 == 2" in row["failed"]["test_any::test_wrong"]


def test_a_study_is_left_out_where_a_package_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(gpu.STUDIES, "warm_start_variants", ([], ["no_such_package"]))
    code, out, _ = run(monkeypatch, capsys, "--dry", "--out", tmp_path, "warm_start")
    assert code == 0 and "warm_start_variants: left out, it needs no_such_package" in out


@pytest.mark.parametrize(
    "table, is_done", [(None, False), ({"complete": False}, False), ({"complete": True}, True), ({}, True)]
)
def test_a_study_goes_on_until_its_table_is_complete(monkeypatch, capsys, tmp_path, table, is_done):
    commands = []
    monkeypatch.setattr(gpu, "run_until", lambda seconds, command: commands.append(command) or 0)
    if table is not None:
        (tmp_path / "relation_composition_full.json").write_text(json.dumps(table))
    code, out, _ = run(monkeypatch, capsys, "--dry", "--out", tmp_path, "relation")
    assert code == 0 and ("done before" in out) == is_done == (not commands)


def test_a_command_that_runs_out_of_time_may_write_what_it_has(tmp_path):
    code = (
        "import pathlib, sys, time\n"
        "try: time.sleep(60)\n"
        "except KeyboardInterrupt: pathlib.Path(sys.argv[1]).write_text('stopped')"
    )
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            gpu.run_until(2, [sys.executable, "-c", code, str(tmp_path / "file")])
    finally:
        signal.signal(signal.SIGINT, heard)
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


def test_resources_are_compiled_once_for_the_same_kernels(monkeypatch, capsys, tmp_path):
    pytest.importorskip("triton")
    compiled = []

    def compile_kernels(shape, capability):
        compiled.append((shape.pseudo_heads, shape.head_dim, capability))
        return {"_decode_forward": Compiled("", 1, 2, 3)}

    monkeypatch.setattr(gpu_resources, "compile_kernels", compile_kernels)
    arguments = ("--out", tmp_path, "--head-dims", 64, "--capabilities", 90, "--pseudo-heads")
    for pseudo_heads in ([2], [2, 20]):
        assert command(monkeypatch, capsys, gpu_resources, *arguments, *pseudo_heads)[0] == 0
    assert compiled == [(2, 64, 90), (20, 64, 90)]
    rows = table(tmp_path, "resources")["rows"]
    assert rows[0]["kernels"] == {"_decode_forward": {"registers": 1, "shared_bytes": 2, "spilled_bytes": 3}}
    # The padding of few pseudo-heads costs, and no form of mixing is free.
    assert rows[0]["forward / flash, by arithmetic"] > rows[1]["forward / flash, by arithmetic"] > 1

    monkeypatch.setattr(gpu_resources, "file_sha256", lambda path: "changed")
    code, _, err = command(monkeypatch, capsys, gpu_resources, *arguments, 2)
    assert code == 1 and "another version of fused_triton.py, decode_triton.py: remove it" in last_line(err)
