"""Fetch checkpoints from the stand-in for the Hub, whole or not at all, and run no code that is not this package's."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import last_line, plant
from huggingface_hub import constants, snapshot_download
from loopback_hub import LoopbackHub

from conversion_scripts import pull_from_hub, verify_conversion
from evaluation import run as evaluate
from iha import foreign_code
from iha.checkpoints import fingerprint, load_config
from iha.errors import UserError
from iha.hub import checkpoint_checks
from iha.processes import load_in_clean_process
from iha.sources import find_source


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    """Return the stand-in with the model "me/iha", and take for granted that a directory loads alone."""
    loaded = {"model_class": "IHAForCausalLM", "parameters": 1234}
    monkeypatch.setattr(checkpoint_checks, "load_in_clean_process", lambda directory: loaded)
    with LoopbackHub() as hub:
        hub.use(monkeypatch, tmp_path / "home")
        hub.add("me/iha", saved)
        yield hub


@pytest.fixture
def pull(hub, tmp_path, cli):
    """Pull "me/iha" to a new directory, and return what the command prints, or the line of its error."""

    def pull(*arguments):
        code, out, err = cli(pull_from_hub, "me/iha", tmp_path / "pulled", *arguments)
        assert code == 0 or not (tmp_path / "pulled").exists()
        return out if code == 0 else last_line(err)

    return pull


def test_pull_fetches_every_file(hub, pull, saved, tmp_path):
    first = hub.repositories["me/iha"].references["main"]
    hub.repositories["me/iha"].commit("main", {**hub.head("me/iha"), "README.md": b"---\n---\nnewer\n"})
    out = pull("--revision", first)
    pulled = tmp_path / "pulled"
    assert {path.name for path in pulled.iterdir()} == {path.name for path in saved.iterdir()}
    assert all((pulled / path.name).read_bytes() == path.read_bytes() for path in saved.iterdir())
    assert not any(path.is_symlink() for path in pulled.iterdir())
    assert "IHAForCausalLM, 1,234 parameters" in out and f'"me/iha", revision="{first}"' in out
    shutil.rmtree(pulled)
    pull()
    assert (pulled / "README.md").read_text().endswith("newer\n")


def test_pull_fetches_what_a_load_may_read(hub, pull, tmp_path):
    """Leave out pickles and other folders, such as a Trainer's last checkpoint. Keep the directory's mode."""
    left_out = ("last-checkpoint/optimizer.pt", "original/model.safetensors", "pytorch_model.bin", "training_args.bin")
    hub.head("me/iha").update(dict.fromkeys((*left_out, ".eval_results/a.yaml"), b"x"))
    (tmp_path / "pulled").mkdir(mode=0o700)
    cached = Path(snapshot_download("me/iha"))  # somebody has fetched the whole repository
    (cached / "planted.py").write_text("not on the Hub")
    assert f"not fetched: {', '.join(left_out)}" in pull()
    fetched = {path.relative_to(tmp_path / "pulled").as_posix() for path in (tmp_path / "pulled").rglob("*.*")}
    assert fetched == hub.head("me/iha").keys() - {*left_out} | {".eval_results"}
    assert (tmp_path / "pulled").stat().st_mode & 0o777 == 0o700


def test_pull_does_not_believe_a_damaged_cache(pull, tmp_path):
    pull()
    shutil.rmtree(tmp_path / "pulled")
    weights = next(Path(constants.HF_HUB_CACHE).rglob("model.safetensors")).resolve()
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert "model.safetensors of me/iha differs from the Hub's checksum: remove it from the cache" in pull()
    shutil.rmtree(Path(constants.HF_HUB_CACHE) / "models--me--iha")
    assert "Revision: " in pull()


def fail(method, path, status):
    return lambda hub: setattr(hub, "fault", (method, path, status))


REFUSED = {
    "private": (fail("GET", "/api/", 401), "401"),
    "a file that fails": (fail("GET", "/resolve/", 403), "403"),
    "no model": (lambda hub: hub.head("me/iha").pop("config.json"), "me/iha holds no config.json"),
    "no weights": (lambda hub: hub.head("me/iha").pop("model.safetensors"), "no file named model.safetensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fetched_whole_is_not_there(name, hub, pull, monkeypatch):
    monkeypatch.setattr(checkpoint_checks, "load_in_clean_process", load_in_clean_process)
    change, message = REFUSED[name]
    change(hub)
    error = pull()
    assert message in error and "unfinished" not in error
    if name == "no model":
        assert not any("resolve" in path for _, path in hub.calls)
    if hub.fault:
        hub.fault = None
        assert "Revision: " in pull()


def test_a_name_that_the_hub_does_not_have_is_asked_for_once(hub):
    with pytest.raises(UserError, match="me/nothing is not a directory, and the Hub has no such model"):
        load_config(find_source("me/nothing"))
    assert [method for method, path in hub.calls if "me/nothing" in path] == ["HEAD"]


def test_a_repository_with_a_tokenizer_alone_is_told_by_its_commit(hub, saved, tmp_path, monkeypatch):
    """Find the commit of a --tokenizer of the evaluation, also without a network."""
    (tmp_path / "words").mkdir()
    for path in saved.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "words")
    hub.add("me/words", tmp_path / "words")
    expected = {name: f"{name}@{hub.repositories[name].references['main']}" for name in ("me/words", "me/iha")}
    assert {name: fingerprint(find_source(name)) for name in expected} == expected
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.calls.clear()
    assert {name: fingerprint(find_source(name)) for name in expected} == expected and not hub.calls


def test_pull_runs_nothing_before_it_may(hub, pull, saved, tmp_path, monkeypatch):
    """Reject planted code, which a load with --trust-code runs."""
    monkeypatch.setattr(checkpoint_checks, "load_in_clean_process", load_in_clean_process)
    planted, mark = shutil.copytree(saved, tmp_path / "planted"), tmp_path / "mark"
    names = plant(planted, mark)
    hub.add("me/iha", planted)
    error = pull()
    assert all(name in error for name in names) and "--trust-code" in error and not mark.exists()
    pull("--trust-code")
    assert set(mark.read_text().split()) == {"planted_tokenizer.py", "custom_generate/generate.py"}


FOREIGN = {
    "another repository": ("tokenizer_config.json", {"AutoTokenizer": ["you/code--tokenizer.T", None]}, "you/code--"),
    "another file": ("preprocessor_config.json", {"AutoProcessor": "evil.P"}, "evil.py"),
    "ours": ("tokenizer_config.json", {"AutoTokenizer": ["modeling_iha.IHAModel", None]}, None),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_code_is_named(name, saved, tmp_path):
    file, auto_map, message = FOREIGN[name]
    directory = shutil.copytree(saved, tmp_path / "iha")
    (directory / "train.py").write_text("nothing imports this")
    (directory / file).write_text(json.dumps({"a": [{"auto_map": auto_map}]}))
    if message is None:
        return foreign_code.refuse_foreign_code(directory, trust_code=False)
    with pytest.raises(UserError) as error:
        foreign_code.refuse_foreign_code(directory, trust_code=False)
    assert str(error.value).startswith(message)


def test_the_other_commands_run_no_code_of_a_checkpoint(saved, tmp_path, cli):
    """Load weights into this package's classes. test_serving.py has a server with such a checkpoint."""
    directory, mark = shutil.copytree(saved, tmp_path / "planted"), tmp_path / "mark"
    plant(directory, mark)
    smoke = ("--suite", "smoke", "--tasks", "gsm8k", "--samples", 1, "--max-new-tokens", 4)
    for module, arguments in (
        (verify_conversion, [directory, directory, "--tokens", 20, "--max-new-tokens", 4]),
        (evaluate, [directory, *smoke, "--output", tmp_path / "results"]),
    ):
        code, out, err = cli(module, *arguments)
        assert code == 0, err
        assert "planted_tokenizer.py" in err, err
    assert not mark.exists()
