"""Fetch checkpoints from the stand-in for the Hub, whole or not at all, and list checkpoints as they are."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import last_line, plant, random_model, small_config
from huggingface_hub import constants
from loopback_hub import Fault, File, HubError, LoopbackHub
from tiny_sources import tiny_tokenizer

from common import foreign_code
from common.checkpoint_io import load_config, load_in_clean_process
from common.command_io import UserError
from conversion_scripts import (
    check_remote_code,
    list_checkpoints,
    pull_from_hub,
    verify_conversion,
)
from evaluation import run as evaluate


CARD = """---
license: mit
base_model: me/base
tags: [iha]
model-index:
- name: a model
  results:
  - task: {type: text-generation}
    dataset: {name: sums, type: sums}
    metrics:
    - {type: accuracy, value: 0.123456}
---
A model.
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "iha"
    random_model(small_config()).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "README.md").write_text(CARD)
    return path


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    """Return the stand-in with the model "me/iha", and take for granted that a directory loads alone."""
    loaded = {"model_class": "IHAForCausalLM", "parameters": 1234}
    monkeypatch.setattr(pull_from_hub, "load_in_clean_process", lambda directory: loaded)
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
    hub.repositories["me/iha"].commit("main", {**hub.head("me/iha"), "README.md": File(b"---\n---\nnewer\n", False)})
    out = pull("--revision", first)
    pulled = tmp_path / "pulled"
    assert {path.name for path in pulled.iterdir()} == {path.name for path in saved.iterdir()}
    assert all((pulled / path.name).read_bytes() == path.read_bytes() for path in saved.iterdir())
    assert not any(path.is_symlink() for path in pulled.iterdir())
    assert "IHAForCausalLM, 1,234 parameters" in out and f'"me/iha", revision="{first}"' in out
    shutil.rmtree(pulled)
    pull()
    assert (pulled / "README.md").read_text().endswith("newer\n")


def test_pull_does_not_believe_a_damaged_cache(pull, saved, tmp_path):
    pull()
    shutil.rmtree(tmp_path / "pulled")
    weights = next(Path(constants.HF_HUB_CACHE).rglob("model.safetensors")).resolve()
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    pull()
    assert (tmp_path / "pulled" / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


def damage(hub):
    file = hub.head("me/iha")["model.safetensors"]
    bad = SimpleNamespace(content=b"x" * len(file.content), lfs=True, etag=file.etag, oid=file.oid, sha256=file.sha256)
    hub.head("me/iha")["model.safetensors"] = bad


def resize(hub):
    config = json.loads(hub.head("me/iha")["config.json"].content)
    hub.head("me/iha")["config.json"] = File(json.dumps(config | {"vocab_size": 64}).encode(), False)


def fault(*arguments):
    return lambda hub: hub.faults.append(Fault(*arguments))


def put(name, content, lfs=False):
    return lambda hub: hub.head("me/iha").update({name: File(content, lfs)})


GATED = HubError(403, "This repository is gated")
REFUSED = {
    "private": (fault("GET", "/api/", 401), "log in with `hf auth login`"),
    "gated": (fault("GET", "", GATED), "a gated model asks for access on its page"),
    "dropped": (fault("GET", "/resolve/", "drop"), "run the command again"),
    "login page": (fault("GET", "/api/", "html"), "a login page of the network"),
    "no model": (lambda hub: hub.head("me/iha").pop("config.json"), "me/iha holds no config.json"),
    "a pickle": (put("pytorch_model.bin", b"x", True), "me/iha holds pytorch_model.bin: pickles are refused"),
    "a hidden name": (put("notes\u202efdp.py", b""), "me/iha holds notes\\u202efdp.py: expected names"),
    "git's own": (put("a/.GIT/config", b""), "me/iha holds a/.GIT/config: expected names"),
    "one name in two cases": (put("Config.json", b"{}"), "me/iha holds Config.json: expected names"),
    "other code": (put("modeling_iha.py", b"class IHAForCausalLM: pass\n"), "expects the class"),
    "other sizes": (resize, "me/iha does not hold the weights its config asks for: mismatched keys "),
    "other content": (damage, "cannot be fetched whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fetched_whole_is_not_there(name, hub, pull):
    change, message = REFUSED[name]
    change(hub)
    error = pull()
    assert message in error and ".tmp" not in error and "may write" not in error
    if hub.faults:
        hub.faults.clear()
        assert "Revision: " in pull()
    if name in ("a pickle", "no model", "a hidden name", "git's own", "one name in two cases"):
        assert not any("resolve" in path for _, path in hub.calls)


def test_pull_runs_known_code_only(hub, pull):
    code = hub.head("me/iha")["modeling_iha.py"].content + b"\nIHAForCausalLM.revision = 2\n"
    hub.head("me/iha")["modeling_iha.py"] = File(code, False)
    assert "modeling_iha.py of" in (error := pull()) and "--trust-code" in error
    assert "Revision: " in pull("--trust-code")


def test_pull_runs_nothing_before_it_may(hub, pull, saved, tmp_path, monkeypatch):
    """Refuse planted code, which a load with --trust-code runs."""
    monkeypatch.setattr(pull_from_hub, "load_in_clean_process", load_in_clean_process)
    planted, mark = shutil.copytree(saved, tmp_path / "planted"), tmp_path / "mark"
    names = plant(planted, mark)
    hub.add("me/iha", planted)
    error = pull()
    assert all(name in error for name in names) and "--trust-code" in error and not mark.exists()
    pull("--trust-code")
    assert set(mark.read_text().split()) == {"planted_tokenizer.py", "custom_generate/generate.py"}


FOREIGN = {
    "another repository": ("tokenizer_config.json", {"AutoTokenizer": ["you/code--tokenizer.T", None]}, "you/code--"),
    "a folder": ("tokenizer_config.json", {"AutoTokenizer": ["sub/evil.T", None]}, "sub/evil.py"),
    "an absolute path": ("preprocessor_config.json", {"AutoProcessor": "/tmp/evil.P"}, "/tmp/evil.py"),
    "no object": ("tokenizer_config.json", ["evil.T", None], "evil.py"),
    "ours": ("tokenizer_config.json", {"AutoTokenizer": ["modeling_iha.IHAModel", None]}, None),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_code_is_named(name, saved, tmp_path):
    file, auto_map, message = FOREIGN[name]
    directory = shutil.copytree(saved, tmp_path / "iha")
    (directory / "train.py").write_text("nothing imports this")
    (directory / "__init__.py").write_text("nor this")
    (directory / file).write_text(json.dumps({"a": [{"auto_map": auto_map}]}))
    if message is None:
        return foreign_code.refuse_foreign_code(directory, trust_code=False)
    with pytest.raises(UserError) as error:
        foreign_code.refuse_foreign_code(directory, trust_code=False)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("configuration_files", ["config.4.0.0.json"], "configuration_files"),
        ("attn_implementation", {"": "org/kernel"}, "attn_implementation {'': 'org/kernel'}"),
    ],
)
def test_a_config_that_leads_elsewhere_is_foreign(key, value, named, saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "iha")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, key: value}))
    assert foreign_code.foreign_code(directory) == [f"{named} in config.json"]
    with pytest.raises(UserError) as error:
        load_config(directory)
    assert f"{named} would load what is not in the checkpoint" in str(error.value)


def test_the_other_commands_run_no_code_of_a_checkpoint(saved, tmp_path, cli):
    """Load weights into this package's classes. test_serving.py has a server with such a checkpoint."""
    directory, mark = shutil.copytree(saved, tmp_path / "planted"), tmp_path / "mark"
    plant(directory, mark)
    smoke = ("--suite", "smoke", "--tasks", "gsm8k", "--samples", 1, "--max-new-tokens", 4)
    for module, arguments in (
        (list_checkpoints, [directory]),
        (check_remote_code, [directory]),
        (verify_conversion, [directory, directory, "--tokens", 20, "--max-new-tokens", 4]),
        (evaluate, [directory, *smoke, "--output", tmp_path / "results"]),
    ):
        code, out, err = cli(module, *arguments)
        assert code == 0, err
        assert ("planted_tokenizer.py" in err) == (module in (verify_conversion, evaluate)), err
    assert not mark.exists()


# Tables


def rows_of(text):
    return {line.split()[0]: line for line in text.splitlines()}


def test_list_shows_a_directory(saved, tmp_path, cli):
    shutil.copytree(saved, tmp_path / "a" / "final")
    layers = {"attention_kinds": ["iha", "mha"], "layer_types": ["sliding_attention", "full_attention"]}
    model = random_model(small_config(**layers, sliding_window=8))
    model.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    odd = {
        "\x1b[2Jc/config.json": "{",
        "e/config.json": None,  # a pipe
        "g/README.md": "---\n2024: x\n---\n",
        "h/.eval_results/y.yaml": "a: [",
        "i/model.safetensors": "damaged",
    }
    results = "- dataset: {id: openai/gsm8k, task_id: gsm8k}\n  value: 12.5\n"
    known = {"b/.eval_results/x.yaml": results, "d/config.json": '{"model_type": "llama"}'}
    for name, content in (odd | known).items():
        if name[0] in "ghi":
            shutil.copytree(saved, tmp_path / name[0])
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name) if content is None else (tmp_path / name).write_text(content)
    code, out, err = cli(list_checkpoints, tmp_path)
    rows = rows_of(out)
    assert code == 0 and set(rows) == {"checkpoint", "a/final", "b"}
    passed_over = [line.split(": ")[0].removeprefix(f"Passed over {tmp_path}/") for line in err.splitlines()]
    assert passed_over == ["\\x1b[2Jc", "e", "g", "h", "i"]
    parameters = random_model(small_config()).num_parameters()
    cells = ["a/final", "iha", "2", "2 full", f"{parameters:,}", "me/base", "sums accuracy 0.1235", "-"]
    assert rows["a/final"].split() == " ".join(cells).split()
    cells = ["b", "iha, mha", "2", "1 sliding of 8 + 1 full", f"{model.num_parameters():,}", "-", "gsm8k 12.5", "-"]
    assert rows["b"].split() == " ".join(cells).split()
    code, out, _ = cli(list_checkpoints, tmp_path / "a" / "final")
    assert code == 0 and set(rows_of(out)) == {"checkpoint", "final"}


def test_list_shows_an_account(hub, saved, cli):
    hub.add("other/iha", saved)
    for name, config in {"a": b"{", "b": b'{"num_hidden_layers": 1000000000, "model_type": "iha"}'}.items():
        hub.add(f"me/{name}", saved)
        hub.head(f"me/{name}")["config.json"] = File(config, False)
    code, out, err = cli(list_checkpoints, "me")
    assert err.count("\n") == 2 and all(f"Passed over me/{name}: " in err for name in "ab")
    cells = rows_of(out)["me/iha"]
    assert code == 0 and "other/iha" not in out and "me/base" in cells and "sums accuracy 0.1235" in cells
    assert f"{random_model(small_config()).num_parameters():,}" in cells
    assert cells.endswith(hub.repositories["me/iha"].references["main"][:12])
    assert not any("model.safetensors" in path for _, path in hub.calls)
    hub.add("me/gated", saved)
    hub.faults.append(Fault("GET", "/me/gated/", GATED))
    code, out, err = cli(list_checkpoints, "me")
    assert code == 0 and "Passed over me/gated: " in err and "me/iha" in rows_of(out), err
    hub.faults[:] = [Fault("GET", "/me/gated/", HubError(429, "Slow down"))]
    code, _, err = cli(list_checkpoints, "me")
    assert code == 1 and "wait some minutes" in last_line(err)
