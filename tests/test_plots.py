"""Test pictures that commands draw."""

import pytest
from matplotlib.axes import Axes

from iha import plots
from iha.errors import UserError
from iha.files import write_json


def test_runs_are_drawn_against_each_other(tmp_path, monkeypatch, capsys):
    for name in ("windows", "paired"):
        (tmp_path / name).mkdir()
    write_json(tmp_path / "windows" / "loss.json", {"train": [[10, 5.0], [20, 4.0]], "eval": [[20, 4.5]]})
    write_json(tmp_path / "paired" / "loss.json", {"train": [[10, 5.0], [20, 3.0]], "eval": [], "peak_memory_gb": []})
    drawn, plot = {}, Axes.plot

    def watch(axes, steps, values, label, **others):
        drawn.setdefault(label.rpartition("/")[2], []).append((steps, values))
        return plot(axes, steps, values, label=label, **others)

    monkeypatch.setattr(Axes, "plot", watch)
    runs = [str(tmp_path / "windows"), str(tmp_path / "paired")]
    plots.main([*runs, "--output", str(tmp_path / "both.png")])
    assert drawn == {"windows": [((20,), (4.5,)), ((10, 20), (5.0, 4.0))], "paired": [((10, 20), (5.0, 3.0))]}
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG") and "both.png" in capsys.readouterr().out
    write_json(tmp_path / "paired" / "loss.json", {"train": []})
    with pytest.raises(UserError, match="nothing was logged"):
        plots.main([runs[1], "--output", str(tmp_path / "none.png")])
