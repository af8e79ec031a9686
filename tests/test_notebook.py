"""Run the notebook as Jupyter does, in a kernel of its own, with a second of training instead of two minutes."""

import re
import time

import pytest
from helpers import ROOT


nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (make test installs it)")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (make test installs it)")

NOTEBOOK = ROOT / "examples" / "interleaved_heads.ipynb"
SECONDS = "SECONDS = 110"


def printed(notebook) -> str:
    """Return what all cells printed."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def pictures(notebook) -> int:
    """Return how many pictures all cells drew."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("seconds", [1, pytest.param(110, marks=pytest.mark.slow)])
def test_the_notebook_runs(seconds, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [training] = [cell for cell in notebook.cells if SECONDS in cell.source]
    training.source = training.source.replace(SECONDS, f"SECONDS = {seconds}")
    begun = time.monotonic()
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert time.monotonic() - begun < 180
    said = printed(notebook)
    assert float(re.search(r"largest difference of a logit: (\S+),", said)[1]) < 1e-5
    assert "same logits: True" in said and "    def __init__(self" in said and pictures(notebook) == 2
    losses = [float(loss) for loss in re.findall(r"loss on held-out text: ([\d.]+)", said)]
    assert len(losses) == 2 and max(losses) < (2.8 if seconds > 1 else 5.7)  # 5.55 is that of a guess
    assert (tmp_path / "paired-heads" / "model.safetensors").exists()


def test_the_notebook_shows_its_results_and_links_to_pages():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 24 and pictures(notebook) == 2 and "same logits: True" in printed(notebook)
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    linked = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert linked and not [name for name in linked if not (NOTEBOOK.parent / name).exists()]
