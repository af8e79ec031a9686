"""Write the page of the benchmarks from their tables."""

import os
import subprocess

from iha import plots
from research.benchmarks import report


def test_a_table_of_earlier_code_is_marked(tmp_path, monkeypatch):
    """Commit a model, a document and another model: the first two commits measured the same code."""

    def commit(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.read_text() + "more" if path.exists() else "some")
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        for arguments in (("add", "."), (*identity, "commit", "-qm", name)):
            subprocess.run(["git", "-C", tmp_path, *arguments], check=True)
        return subprocess.run(
            ["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()

    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)  # the user's may sign commits or run hooks
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    first, second, third = [commit(name) for name in ("modeling_iha/a.py", "README.md", "modeling_iha/a.py")]
    marked = " (`modeling_iha` has changed since: a.py)"
    assert report.commit_of({"commit": first}) == f"commit {first[:7]}{marked}"
    assert report.commit_of({"commit": f"{second}-dirty"}) == f"commit {second[:7]} with local changes{marked}"
    assert report.commit_of({"commit": third}) == f"commit {third[:7]}"
    row = {"part": "decoding", "tokens": 8, "seconds": {"mha": 1.0}, "ratios": {}, "peak_bytes": {"mha": 1}}
    rows = [{**row, "failed": {}, "commit": each[:7]} for each in (first, third)]
    page = report.gpu_lines({"device": "a GPU", "torch": "2", "transformers": "5", "rows": rows})
    assert [line for line in page if line.startswith("Commit")] == [
        f"Commit {first[:7]}{marked}.",
        f"Commit {third[:7]}.",
    ]
    assert report.commit_of({"commit": "unknown"}) == report.commit_of({}) == "commit not recorded"
    with monkeypatch.context() as patches:
        patches.setattr(report, "FEW", 0)
        counted = report.commit_of({"commit": first})
    assert counted == f"commit {first[:7]} (`modeling_iha` has changed since in 1 files)"
    lacking = f"commit {'f' * 7} (which this copy lacks: not compared)"
    assert report.commit_of({"commit": "f" * 40}) == lacking
    monkeypatch.setenv("PATH", "")
    assert report.commit_of({"commit": third}) == f"commit {third[:7]} (which this copy lacks: not compared)"


def test_a_directory_without_tables_keeps_its_page(tmp_path, cli):
    (tmp_path / "README.md").write_text("# my project\n")
    status, _, err = cli(report, "--out", tmp_path)
    assert status == 1 and "holds no table of a benchmark" in err
    (tmp_path / "package.json").write_text('{"name": "app"}')
    status, _, err = cli(report, "--out", tmp_path)
    assert status == 1 and "package.json is no table of a benchmark" in err
    assert (tmp_path / "README.md").read_text() == "# my project\n"


def test_a_diverged_arm_is_not_drawn_as_better():
    figure, (axes,) = plots.panels("message")
    plots.dots(axes, ["a", "b"], {"loss": [(float("nan"), 0.0, 0.0), (-1.0, 0.0, 0.0)]}, (-0.3, 0.3), mark=0)
    assert [text.get_text() for text in axes.texts] == ["diverged", "← -1.00"]
