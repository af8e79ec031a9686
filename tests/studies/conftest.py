"""Run studies in small, from their command line to their table and plot."""

import json

import pytest
from matplotlib.figure import Figure

from iha.errors import UserError
from iha.files import sole_writer
from research.experiments import protocol


@pytest.fixture(autouse=True, scope="module")
def unpainted():
    """Leave figures unpainted, which takes longer than what they show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, path, **options: path.write_bytes(b"\x89PNG"))
        yield


@pytest.fixture
def run_study(tmp_path, monkeypatch, capsys):
    """Return a function that runs a study twice, and returns its table and how many runs it made each time.

    Constants of its module are those of `sizes`. It does not write next to another run, and with each constant of
    `changed` replaced to go on.
    """

    def run(module, words: list, sizes: dict, changed: dict, again: list | None = None) -> tuple[dict, list[int]]:
        where, made = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path)], []
        for name, value in sizes.items():
            monkeypatch.setattr(module, name, value)
        capsys.readouterr()
        for command in ([*words, *where], last := [*(again or words), *where]):
            module.main(command)
            made.append(capsys.readouterr().out.count(" done\n"))
        with sole_writer(tmp_path / "runs"), pytest.raises(UserError, match="Another run is writing"):
            module.main(last)
        for name, value in changed.items():
            with monkeypatch.context() as patches, pytest.raises(UserError, match="another setting: remove it"):
                patches.setattr(module, name, value)
                module.main(last)
        (path,) = tmp_path.glob("*.json")
        assert path.stem.startswith(module.__name__.split(".")[-1])
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        return json.loads(path.read_text()), made

    return run


@pytest.fixture
def run_protocol(run_study, tmp_path, monkeypatch):
    """Return a function that runs a study under the protocol with one seed and then with two.

    Rates are tuned in the first run only. It returns the table, and the runs of the seeds by kind. `sizes` replace
    constants of the module, and `changed` are other values of them.
    """

    def run(module, sizes: dict, kinds: list[str], *words: str, changed: dict) -> tuple[dict, dict[str, list[dict]]]:
        monkeypatch.setattr(protocol, "FEWEST_SEEDS", 1)
        monkeypatch.setattr(protocol, "LEAST_SEEDS", 1)
        one, two = ([*words, "--kinds", *kinds, "--most-seeds", number] for number in "12")
        table, (tuned, added) = run_study(module, one, sizes, changed, two)
        assert tuned >= 4 * len(kinds) and added == len(kinds)
        files = {kind: sorted((tmp_path / "runs").glob(f"*{kind}-*-[01].json")) for kind in kinds}
        return table, {kind: [json.loads(path.read_text()) for path in paths] for kind, paths in files.items()}

    return run
