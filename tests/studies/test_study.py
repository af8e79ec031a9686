"""Test what studies share: intervals over seeds, their p-values, and runs that are not repeated."""

import json
import math

import pytest

from iha import plots
from iha.errors import UserError
from research.benchmarks import harness
from research.experiments import byte_models, model_types, study
from research.experiments.options import path_from_root


def test_intervals_over_seeds():
    """Expect Student's t for the mean of 1, 2, 3, 4, 5: 3 ± 2.776 * sqrt(2.5 / 5)."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    half_width = pytest.approx(1.96324, abs=1e-4)
    assert study.interval(values) == {"mean": 3.0, "half_width": half_width, "values": values}
    assert study.interval([7.0]) == {"mean": 7.0, "half_width": None, "values": [7.0]}
    wide = {"mean": 0.25, "half_width": 0.5, "values": []}
    assert study.points([wide, study.interval([7.0])]) == [(0.25, 0.5, 0.5), (7.0, 0.0, 0.0)]


def test_p_values_are_corrected_for_their_number():
    """Take t of 2.0 standard errors with one degree of freedom, p = 0.2952, and of 20, p = 0.0318."""
    compared = [study.interval([centre - 1, centre + 1]) for centre in (2.0, 20.0, 2.0)]
    compared += [study.interval([1.0]), study.interval([math.nan, 1.0])]  # the last with a run that diverged
    study.correct_by_holm(compared)
    assert [each.get("p_holm") for each in compared] == pytest.approx([0.5903, 0.0954, 0.5903, None, None], abs=1e-4)
    study.correct_by_holm(equal := [study.interval([-1.0, 1.0]) for _ in range(2)])
    assert [each["p_holm"] for each in equal] == [1.0, 1.0]


def test_a_run_that_is_damaged_is_refused(tmp_path):
    for content, expected in (("", "Remove the file: its run is then made again."), ("{}", "another setting")):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(UserError, match=expected):
            study.run_once(tmp_path / "run.json", dict)


def test_a_table_has_the_origin_of_every_run(tmp_path, monkeypatch, capsys):
    """Make a run here, and read it and one of another commit and machine for one table."""
    path = tmp_path / "run.json"
    given = study.Study("table", "table", tmp_path, tmp_path)
    given.start()
    assert study.run_once(path, lambda: {"loss": 1.0}) == {"loss": 1.0}
    assert study.run_once(path, dict) == {"loss": 1.0} and "Note" not in capsys.readouterr().out
    here, there = study.own_origin(), {"commit": "0123abc", "machine": "another"}
    monkeypatch.setattr(study, "own_origin", lambda: there)
    assert study.run_once(path, dict) == {"loss": 1.0}
    assert capsys.readouterr().out == f"Note: run.json was made at commit {here['commit']} on {here['machine']}.\n"
    study.run_once(tmp_path / "other.json", dict)
    study.write(given, lambda table: plots.panels("A table")[0])
    assert json.loads(given.table.read_text())["origins"] == [here, there]


def test_a_recorded_command_names_no_place_of_this_machine(tmp_path):
    words = [
        "study",
        "--text",
        "a b.txt",
        "--output",
        tmp_path / "runs",
        f"--results={tmp_path}/tables",
        "--rate=1e-3",
        tmp_path / "a=b" / "c",
        "--resume",
    ]
    shown = "study --text 'a b.txt' --output runs --results=tables --rate=1e-3 c --resume"
    assert harness.shown_command(map(str, words)) == shown


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        (model_types, ["--types", "llama", "lama"], "--types lama: expected names that docs/MODEL_TYPES.md lists"),
    ],
)
def test_an_option_that_no_study_can_take_is_refused_before_the_work(module, words, expected):
    with pytest.raises(UserError, match=expected):
        module.main(words)


def test_a_path_of_a_study_is_that_of_the_users_directory(tmp_path, monkeypatch):
    """A study runs in the root of the checkout: paths are made absolute, and a text "./python" is a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert path_from_root("runs") == tmp_path / "runs" and path_from_root("~/runs") == tmp_path / "home" / "runs"
    assert byte_models.given_text("./python") == str(tmp_path / "python")
    assert byte_models.given_text("python") == "python"


def test_a_diverged_arm_is_not_drawn_as_better():
    _, (axes,) = plots.panels("message")
    plots.dots(axes, ["a", "b"], {"loss": [(float("nan"), 0.0, 0.0), (-1.0, 0.0, 0.0)]}, (-0.3, 0.3), mark=0)
    assert [text.get_text() for text in axes.texts] == ["diverged", "← -1.00"]
