"""Run the cells of the notebook with a second of training instead of two minutes, and slowly as Jupyter does."""

import re
import time

import matplotlib.pyplot as plt
import pytest
from helpers import ROOT


inputs = pytest.importorskip("IPython.core.inputtransformer2", reason="IPython is not installed (make test does)")
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


def notebook_of(seconds: int):
    """Return the notebook with another time of training."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [training] = [cell for cell in notebook.cells if SECONDS in cell.source]
    training.source = training.source.replace(SECONDS, f"SECONDS = {seconds}")
    return notebook


def assert_ran(said: str, drawn: int, place, worst: float) -> None:
    """Look at what the cells printed, drew and saved, and at the losses."""
    assert float(re.search(r"largest difference of a logit: (\S+),", said)[1]) < 1e-5
    assert "same logits: True" in said and "    def __init__(self" in said and drawn == 2
    losses = [float(loss) for loss in re.findall(r"loss on held-out text: ([\d.]+)", said)]
    assert len(losses) == 2 and max(losses) < worst
    assert (place / "paired-heads" / "model.safetensors").exists()


def test_the_cells_run(tmp_path, monkeypatch, capsys):
    """Run them in this process, which spares the imports of a kernel."""
    monkeypatch.chdir(tmp_path)
    plt.close("all")
    names, transform = {}, inputs.TransformerManager().transform_cell
    for cell in notebook_of(seconds=1).cells:
        if cell.cell_type == "code":
            exec(compile(transform(cell.source), NOTEBOOK.name, "exec"), names)
    assert_ran(capsys.readouterr().out, len(plt.get_fignums()), tmp_path, worst=5.7)  # 5.55 is that of a guess
    plt.close("all")


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = notebook_of(seconds=110)
    begun = time.monotonic()
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert time.monotonic() - begun < 180
    assert_ran(printed(notebook), pictures(notebook), tmp_path, worst=2.8)


def test_the_notebook_shows_its_results_and_links_to_pages():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 24 and pictures(notebook) == 2 and "same logits: True" in printed(notebook)
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    linked = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert linked and not [name for name in linked if not (NOTEBOOK.parent / name).exists()]
