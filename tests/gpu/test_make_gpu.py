"""Test that a visit to a GPU measures every form once, in the dry size, and is not lost to one that fails."""

import json
import shutil
from functools import partial
from math import inf

import pytest
import torch
from helpers import last_line

from modeling_iha import interleaving, triton_kernels
from research.benchmarks import gpu, report


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
        if row["part"] == "expand":
            assert row["error"].keys() == forms.keys() and max(row["error"].values()) < 2e-6  # in float32
    assert cli(gpu, "--dry", "--out", visit)[0] == 0
    assert table(visit)["rows"] == rows


def test_another_commit_and_another_try_are_measured(visit, cli, tmp_path):
    """Keep the forms of two commits apart, and what failed until it is tried again."""
    out = shutil.copytree(visit, tmp_path / "visit")
    arguments = ("--dry", "--parts", "layer", "--out", out)
    before = table(out)["rows"]
    assert cli(gpu, *arguments, "--commit", "another")[0] == 0
    *kept, added = table(out)["rows"]
    assert kept == before and added["commit"] == "another" and added["part"] == "layer"
    (path,) = out.glob("*/gpu.json")
    content = table(out)
    base, *others = content["rows"][-1]["seconds"]
    content["rows"][-1] |= {"failed": {base: "out of memory"}, "ratios": {}}
    del content["rows"][-1]["seconds"][base]
    path.write_text(json.dumps(content))
    assert any("(–)" in line for line in report.gpu_lines(content))  # without a base there are no ratios
    assert cli(gpu, *arguments, "--commit", "another", "--retry", "--seconds", "0")[0] == 0
    assert table(out)["rows"][-1]["failed"] == {base: "out of memory"}  # nothing was tried
    assert cli(gpu, *arguments, "--commit", "another", "--retry")[0] == 0
    row = table(out)["rows"][-1]
    assert not row["failed"] and row["ratios"][base] == 1
    (axes,) = report.gpu_plot({**table(out), "rows": [row]}).axes
    shown = [line.get_label() for line in axes.get_lines()] + [text.get_text() for text in axes.texts]
    assert report.short_form(base) not in shown


def test_a_step_that_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(triton_kernels, "collapse", lambda output, weight: 1.1 * gpu.collapse_heads(output, weight))
    (case,) = [case for case in gpu.cases("expand", True) if case["step"] == "collapse"]
    row = {**case, "failed": {}, "seconds": {}}
    gpu.run_case(row, {form: partial(gpu.mixing, case, form) for form in ("eager", "kernels")}, inf, lambda: None)
    assert row["seconds"].keys() == {"eager"} and "collapse is off by 1.0e-01" in row["failed"]["kernels"]


def test_what_runs_without_kernels(monkeypatch):
    """Ask for no kernel in the forms that are named so."""
    monkeypatch.setattr(interleaving, "kernels_take", lambda *_: pytest.fail("a kernel was asked for"))
    (case,) = gpu.cases("schedule", True)
    work = gpu.schedule_forms(case)["schedule, P = 2: sdpa, without kernels"]()
    work.run()


def test_predictions_stand_next_to_figures():
    """Show 15 passes over 42 MB at 75% of 4.8 TB/s, and the ratios of five layers."""
    case = {"part": "expand", "tokens": 8192, "heads": 20, "head_dim": 128, "pseudo_heads": [4], "backward": False}
    row = case | {"step": "expand", "seconds": {"kernels": 2e-4}, "ratios": {}, "peak_bytes": {}, "failed": {}}
    row |= gpu.predicted_mixing(row) | {"error": {"kernels": 0.0017}}
    result = {"device": "a GPU", "torch": "2", "transformers": "5", "rows": [row]}
    page = "\n".join(report.gpu_lines(result))
    cell = "0.200 (–); predicted 0.175 ms; at full bandwidth 0.131 ms; error 1.7e-03"
    assert f"| kernels | {cell} |" in page
    case |= {"part": "schedule", "pseudo_heads": [4, 20], "backward": True}
    wanted = {"schedule, P = 4: sdpa": 1.57, "schedule, P = 20: sdpa": 2.52}
    assert gpu.predicted_schedules(case) == {"predicted ratios": wanted}


def test_a_cpu_is_refused_before_any_work(cli, tmp_path):
    code, _, errors = cli(gpu, "--out", tmp_path / "out")
    assert code == 1 and "sees no CUDA device" in last_line(errors) and not list(tmp_path.iterdir())
