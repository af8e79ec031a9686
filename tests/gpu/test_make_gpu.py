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
        with torch.compiler.set_stance("force_eager"):  # test_compile.py compiles
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


def test_a_cpu_is_refused_before_any_work(cli, tmp_path):
    code, _, errors = cli(gpu, "--out", tmp_path / "out")
    assert code == 1 and "sees no CUDA device" in last_line(errors) and not list(tmp_path.iterdir())
