"""Test that a visit to a GPU measures every form once, in the dry size, and is not lost to one that fails."""

import json

import pytest
import torch
from helpers import last_line

from research.benchmarks import gpu


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the dry sizes are for a CPU")


def table(out):
    (path,) = out.glob("*/gpu.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def visit(tmp_path_factory):
    out = tmp_path_factory.mktemp("visit")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("sys.argv", ["gpu", "--dry", "--out", str(out)])
        gpu.main()
    return out


def test_every_form_of_every_case_is_measured_once(visit, cli):
    rows = table(visit)["rows"]
    assert [row["part"] for row in rows] == [part for part in gpu.PARTS for _ in gpu.cases(part, True)]
    for row in rows:
        forms = gpu.FORMS[row["part"]](row)
        assert row["seconds"].keys() == row["ratios"].keys() == row["peak_bytes"].keys() == forms.keys()
        assert row["ratios"][next(iter(forms))] == 1 and len(forms) >= 2 and not row["failed"]
    assert cli(gpu, "--dry", "--out", visit)[0] == 0
    assert table(visit)["rows"] == rows


@pytest.fixture
def run(monkeypatch, cli, tmp_path):
    """Return a function that measures the given forms and returns exit code, errors and rows."""

    def measured(forms, *options):
        monkeypatch.setitem(gpu.FORMS, "layer", lambda case: forms)
        code, _, errors = cli(gpu, "--dry", "--parts", "layer", "--out", tmp_path, *options)
        return code, errors, table(tmp_path)["rows"]

    return measured


def sound():
    return gpu.Work(lambda: None, {})


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of\nmemory"), RuntimeError("out of memory")])
def test_a_form_that_fails_is_left_out_until_it_is_retried(run, error):
    def broken():
        raise error

    for _ in range(2):
        code, _, rows = run({"base": sound, "fast": broken})
        assert code == 0 and all(row["seconds"].keys() == {"base"} for row in rows)
        assert [row["failed"] for row in rows] == [{"fast": "out of memory"}] * 2
    assert run({"base": sound, "fast": sound})[2] == rows
    *_, rows = run({"base": sound, "fast": sound}, "--retry")
    assert all(row["failed"] == {} and row["ratios"].keys() == {"base", "fast"} for row in rows)


def test_a_cpu_is_refused_before_any_work(cli, tmp_path):
    code, _, errors = cli(gpu, "--out", tmp_path / "out")
    assert code == 1 and "sees no CUDA device" in last_line(errors) and not list(tmp_path.iterdir())
