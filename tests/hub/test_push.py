"""Test what is published, what is rejected, and what a repository holds whatever goes wrong.

The real client speaks, in this process, to a stand-in for the Hub.
"""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers import IHA_CODE, last_line, random_model, small_config
from huggingface_hub import constants
from loopback_hub import LFS_SUFFIXES, Fault, File, LoopbackHub
from tiny_sources import edit_weights, tiny_tokenizer

from iha import sources
from iha.cards import render_card
from iha.errors import UserError
from iha.hub import push_to_hub
from iha.hub.checkpoint_checks import checkpoint_files
from iha.processes import library_paths, run_in_clean_process
from iha.sources import locate


CHECKPOINT = IHA_CODE | {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
STRAY = {
    ".env",
    "notes.txt",
    "secret.py",
    "token",
    "train.log",
    "trainer_state.json",
    "wandb-key.json",
    "training_args.bin",
    "optimizer.pt",  # of a Trainer
}
SECRET = "hf_" + "a1B2" * 9


@pytest.fixture
def directory(saved, tmp_path):
    """Return a copy of the saved model among files that do not belong to it."""
    path = shutil.copytree(saved, tmp_path / "iha")
    for name in STRAY:
        (path / name).write_text(SECRET)
    (path / "checkpoint-5").mkdir()
    (path / "checkpoint-5" / "model.safetensors").write_text("")
    return path


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Return the stand-in, and take for granted that a directory and a repository load alone."""
    monkeypatch.setattr(push_to_hub, "load_in_clean_process", lambda source, **arguments: {})
    with LoopbackHub() as hub:
        hub.use(monkeypatch, tmp_path / "home")
        yield hub


@pytest.fixture
def push(directory, hub, cli):
    """Push the directory with more arguments, and return what the command prints, or the line of its error."""

    def push(*arguments):
        code, out, err = cli(push_to_hub, directory, "me/iha", *arguments)
        return out if code == 0 else last_line(err)

    return push


@pytest.fixture
def passed(monkeypatch):
    """Take the checks of a checkpoint for granted too, which take half of a push."""
    monkeypatch.setattr(push_to_hub, "check_checkpoint", lambda directory, trust_code: None)


def shard(directory):
    """Save the model again, in several files and with other weights."""
    (directory / "model.safetensors").unlink()
    random_model(small_config(), seed=1).save_pretrained(directory, max_shard_size="20KB")
    return set(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].values())


# Which files


def test_a_directory_is_resolved_once(push, directory, monkeypatch):
    """Count the resolutions of the directory and of the copy of it that is checked and published."""
    resolved = []
    monkeypatch.setattr(sources, "locate", lambda source: resolved.append(str(source)) or locate(source))
    assert "Would upload" in push("--dry-run")
    assert len(resolved) == len({*resolved}) == 2 and resolved[0] == str(directory)


def test_only_the_checkpoint_and_weights_that_are_loaded_are_listed(directory):
    (directory / ".eval_results").mkdir()
    (directory / ".eval_results" / "gsm8k.yaml").write_text("- value: 1\n")
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "tools"}
    tokenizer.save_pretrained(directory)
    names, others = checkpoint_files(directory)
    assert set(names) == CHECKPOINT | {".eval_results/gsm8k.yaml", "additional_chat_templates/tool_use.jinja"}
    assert set(others) == STRAY | {"checkpoint-5/"}

    for name in ("adapter_model.safetensors", "model[1].safetensors", "*.safetensors", "line\nbreak.safetensors"):
        shutil.copy(directory / "model.safetensors", directory / name)
    assert checkpoint_files(directory)[0] == names
    shards = shard(directory)
    assert len(shards) > 1
    expected = set(names) - {"model.safetensors"} | shards | {"model.safetensors.index.json"}
    assert set(checkpoint_files(directory)[0]) == expected


def test_what_a_load_reads_beside_the_model_is_listed(directory):
    """List processors, tokenizers of other libraries, and the code of a map with lists."""
    for name in ("processor_config.json", "preprocessor_config.json", "tekken.json", "spiece.model"):
        (directory / name).write_text("{}")
    private = {"vocab_customers.csv", "tokenizer_training_notes.md", "tokenizer.json.bak", "tokenizer old.json"}
    for name in private:
        (directory / name).write_text("{}")
    names, others = checkpoint_files(directory)
    assert {"processor_config.json", "preprocessor_config.json", "tekken.json", "spiece.model"} <= set(names)
    assert private <= set(others)
    entries = json.loads((directory / "config.json").read_text())
    entries["auto_map"] |= {"AutoTokenizer": ["modeling_iha.IHAModel", None], "AutoProcessor": "org/name--other.Class"}
    (directory / "config.json").write_text(json.dumps(entries))
    assert checkpoint_files(directory)[0] == names


def test_no_file_from_elsewhere_is_published(directory, tmp_path):
    (tmp_path / "id_rsa").write_text("secret")
    (directory / "LICENSE").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(UserError, match="LICENSE is a link to a file outside of"):
        checkpoint_files(directory)
    snapshot = tmp_path / "cache" / "snapshots" / "commit"  # as the Hub's cache has them
    blobs = tmp_path / "cache" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for file in directory.iterdir():
        if file.is_file() and file.name != "LICENSE":
            shutil.copy(file, blobs / file.name)
            (snapshot / file.name).symlink_to(blobs / file.name)
    assert "config.json" in checkpoint_files(snapshot)[0]


def test_dry_run_prints_the_upload_and_stays_off_the_network(hub, push):
    out = push("--tag", "v1", "--dry-run")
    assert hub.calls == []
    assert {line.split()[0] for line in out.splitlines() if line.startswith("  ")} == CHECKPOINT
    stay = out.splitlines()[-1]
    assert stay.startswith("Not part of a checkpoint") and all(name in stay for name in STRAY)


# Rejections before anything is uploaded


def fill_head(value):
    return lambda directory: edit_weights(directory, lambda weights: weights["lm_head.weight"].fill_(value))


def remove(name):
    return lambda directory: (directory / name).unlink()


def append(name, text):
    def change(directory):
        with open(directory / name, "a") as file:
            file.write(text)

    return change


FAULTS = {
    "an adapter": (lambda directory: (directory / "adapter_config.json").write_text("{}"), "holds a LoRA adapter"),
    "a pickle": (lambda directory: torch.save({}, directory / "state.PKL"), "pickles are rejected"),
    "no tokenizer": (remove("tokenizer.json"), "no usable tokenizer"),
    "no weights": (remove("model.safetensors"), "no file named model.safetensors"),
    "NaN": (fill_head(torch.nan), "holds NaN or infinity"),
    "other code": (append("modeling_iha.py", "\nprint('hello')\n"), "differs from this package's code"),
    "code that is not whole": (remove("virtual_tokens.py"), "code of"),
    "no license": (
        lambda directory: (directory / "README.md").write_text("---\nbase_model: me/base\n---\n"),
        "does not state its license: add it, or give --license",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_whole_checkpoint_is_refused(name, directory, hub, push):
    change, message = FAULTS[name]
    change(directory)
    assert message in push("--dry-run")  # ends as a push would
    error = push()
    assert message in error and SECRET not in error and "push-" not in error and hub.calls == []


def test_directory_that_does_not_load_alone_is_refused(directory, hub, push, monkeypatch):
    def refuse(stage):
        assert {path.name for path in stage.iterdir()} == CHECKPOINT  # just what would be published
        raise UserError(f"{stage} does not load in a clean process: reasons")

    monkeypatch.setattr(push_to_hub, "load_in_clean_process", refuse)
    assert f"{directory} does not load in a clean process: reasons" in push() and hub.calls == []


def test_a_clean_process_finds_the_users_own_libraries(monkeypatch, tmp_path):
    """Look where `pip install --user` installs, which an isolated process does not by itself."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "only_here.py").write_text("VALUE = 5")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert run_in_clean_process("import only_here\nresult = only_here.VALUE", {}) == 5


def test_a_clean_process_finds_libraries_in_any_folder(monkeypatch):
    """Find PyTorch where `pip install --target` put it."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "-packages" not in path])
    assert str(Path(torch.__file__).parents[1]) in library_paths()


def test_how_a_clean_process_ended_is_said():
    with pytest.raises(UserError, match="ended by SIGKILL: is there enough memory"):
        run_in_clean_process("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", {})
    with pytest.raises(UserError, match="did not answer in JSON"):
        run_in_clean_process("result = 1\njson.dumps = lambda content: 'a last word'", {})


def test_code_that_runs_sees_no_secrets(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, SECRET)
    program = "import os, pathlib; result = [dict(os.environ), str(pathlib.Path.home())]"
    environment, home = run_in_clean_process(program, {})
    assert SECRET not in environment.values() and home == environment["HF_HOME"]


# What is published


def test_what_a_push_stores(directory, hub, push, monkeypatch):
    loaded = []
    monkeypatch.setattr(push_to_hub, "load_in_clean_process", lambda *source, **arguments: loaded.append(arguments))
    # It may make several commits where its client for large files is on, as it is not here.
    monkeypatch.setattr(push_to_hub.HfApi, "upload_folder", lambda *_, **__: pytest.fail("not in one commit"))
    out = push("--private", "--tag", "v1")
    repository, files = hub.repositories["me/iha"], hub.head("me/iha")
    sha = repository.references["main"]
    assert repository.private and repository.references["v1"] == sha and len(repository.commits) == 2
    assert set(files) == CHECKPOINT | {".gitattributes"}
    assert all(files[name].content == (directory / name).read_bytes() for name in CHECKPOINT)
    assert {name for name, file in files.items() if file.lfs} == {"model.safetensors"}
    assert f"Published: {hub.endpoint}/me/iha/commit/{sha}" in out and f'"me/iha", revision="{sha}"' in out
    assert loaded == [{}, {"revision": sha, "hub_cache": constants.HF_HUB_CACHE}]

    assert f"revision={json.dumps(sha)}" in push("--private", "--tag", "v1")
    assert len(repository.commits) == 2
    remove("chat_template.jinja")(directory)
    assert "already has a tag 'v1'" in push("--tag", "v1") and len(repository.commits) == 2
    (directory / "chat_template.jinja").write_bytes(files["chat_template.jinja"].content)
    append("README.md", "More.\n")(directory)
    assert "already has a tag 'v1'" in push("--tag", "v1") and len(repository.commits) == 2


def test_what_was_checked_is_published(directory, hub, push, monkeypatch):
    checked = {name: (directory / name).read_bytes() for name in CHECKPOINT}

    def change(*source, **arguments):
        for name in CHECKPOINT:
            (directory / name).write_text(SECRET)

    monkeypatch.setattr(push_to_hub, "load_in_clean_process", change)  # the last of the checks
    push()
    assert {name: file.content for name, file in hub.head("me/iha").items() if name in CHECKPOINT} == checked


def test_what_is_superseded_goes_in_the_same_commit(directory, hub, push, passed):
    """Remove the old file, which would be served, and what a load would take in its place or run.

    Keep the new shards, and what somebody added.
    """
    (directory / "old").mkdir()
    push()
    repository = hub.repositories["me/iha"]
    added = (
        "LICENSE",
        ".eval_results/a.yaml",
        "vocab.json",
        "spiece.model",
        "attention_diff.py",
        "adapter_config.json",
        "custom_generate/generate.py",
        "additional_chat_templates/tool_use.jinja",
        "model.fp16.safetensors",
        "pytorch_model.bin",
        "other.safetensors",
        "adapter_model.safetensors",
        "adapter_model.bin",
    )
    # No load of the root reads these.
    strangers = (
        "model-4bit/model.safetensors",
        "tokenizer_training/corpus.md",
        "vocab-study/README.md",
        "sub/attention_diff.py",
        "tokenizer.png",
        "tokenizer_benchmark.json",
        "vocab_customers.txt",
    )
    added += strangers
    files = {name: File(b"x", name.endswith(LFS_SUFFIXES)) for name in added}
    repository.commit("main", {**hub.head("me/iha"), **files})
    (directory / "chat_template.jinja").unlink()
    out = push()
    removed = next(line for line in out.splitlines() if line.startswith("Removing what a load of me/iha would find"))
    assert "attention_diff.py" in removed and "custom_generate/generate.py" in removed
    kept = {"LICENSE", ".eval_results/a.yaml", "other.safetensors", ".gitattributes", *strangers}
    assert set(hub.head("me/iha")) == CHECKPOINT - {"chat_template.jinja"} | kept
    before = len(repository.commits)
    shards = shard(directory)
    push()
    assert len(repository.commits) == before + 1
    expected = CHECKPOINT - {"chat_template.jinja", "model.safetensors"} | shards | {"model.safetensors.index.json"}
    assert set(hub.head("me/iha")) == expected | kept - {".eval_results/a.yaml"}  # results of the weights before


def test_modules_of_a_stranger_stay():
    """Remove files with the names of our code only where there is a checkpoint of this package."""
    there = ["virtual_tokens.py", "options.py", "model.safetensors"]
    assert push_to_hub.superseded(there, ["config.json"], has_new_weights=True) == ["model.safetensors"]
    there.append("modeling_iha.py")
    gone = push_to_hub.superseded(there, ["config.json", "modeling_iha.py"], has_new_weights=True)
    assert gone == ["model.safetensors", "options.py", "virtual_tokens.py"]


def test_a_terminated_push_leaves_no_copy(directory, hub, push, passed, tmp_path, monkeypatch):
    """Remove the copies of the weights, which may be many gigabytes."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    copies = multiprocessing.get_context("fork").Value("i")

    def terminate(*source, **arguments):
        copies.value = len(list(temporary.iterdir()))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(push_to_hub, "load_in_clean_process", terminate)
    process = multiprocessing.get_context("fork").Process(target=push)
    process.start()
    process.join(300)
    assert copies.value == 1 and not list(temporary.iterdir())


def test_a_missing_card_is_rendered_and_an_incomplete_one_completed(directory, hub, push, passed):
    (directory / "README.md").unlink()
    assert "does not state its license" in push() and hub.calls == []
    push("--license", "mit", "--base-model", "none")
    card = hub.head("me/iha")["README.md"].content.decode()
    assert "license: mit" in card and "base_model" not in card and 'name = "me/iha"\n' in card
    assert not (directory / "README.md").exists()
    assert "license: none" in push_to_hub.completed_card(directory, "me/iha", "none", "none")  # the Hub rejects it
    # A card that a converter or trainer wrote has the directory's name.
    (directory / "README.md").write_text(render_card(small_config(), "a-directory", license="mit", base_model="me/b"))
    push()
    card = hub.head("me/iha")["README.md"].content.decode()
    assert 'name = "me/iha"\n' in card and "base_model: me/b" in card and "a-directory" not in card
    (directory / "README.md").write_text(render_card(small_config(), "a-directory", license="mit", from_scratch=True))
    push()
    assert "base_model" not in hub.head("me/iha")["README.md"].content.decode()
    (directory / "README.md").write_text("---\nlicense: mit\n---\nMine.\n", encoding="utf-8-sig")
    push("--base-model", "me/base")
    card = hub.head("me/iha")["README.md"].content.decode()
    assert "license: mit" in card and "base_model: me/base" in card and "Mine." in card
    assert "correct one of them" in push("--license", "apache-2.0", "--base-model", "me/base")


def test_a_strangers_card_gets_what_it_lacks(directory):
    (directory / "README.md").write_text("---\nlicense:\nbase_model: me/b\ntags:\n- mine\n---\nMine.\n")
    completed = push_to_hub.completed_card(directory, "me/iha", "no", "me/b")
    assert completed == "---\nlicense: 'no'\nbase_model: me/b\ntags:\n- mine\n---\nMine.\n"
    (directory / "README.md").write_text("Mine.\n")
    completed = push_to_hub.completed_card(directory, "me/iha", "no", "me/b")
    assert completed == "---\nbase_model: me/b\nlicense: 'no'\n---\nMine.\n"


def test_a_pull_request_leaves_the_branch_alone(directory, hub, push, passed):
    push()
    repository = hub.repositories["me/iha"]
    main = repository.references["main"]
    append("README.md", "More.\n")(directory)
    out = push("--create-pr")
    assert f"Published: {hub.endpoint}/me/iha/discussions/1" in out and repository.references["main"] == main
    proposed = repository.commits[repository.references["refs/pr/1"]]
    assert proposed["README.md"].content.endswith(b"More.\n")
    assert "exists and is public" in push("--private") and repository.references["main"] == main


def test_a_pull_request_without_a_change_is_not_opened(hub, push, passed):
    push()
    assert "me/iha has these files already: no pull request was opened." in push("--create-pr")
    assert hub.repositories["me/iha"].pull_requests == 0


@pytest.mark.parametrize("tag", ["a b", "v1..2", "v1.lock", "-x~", "v1/"])
def test_a_name_that_no_tag_can_have_is_refused_before_the_upload(hub, push, tag):
    assert f"--tag {tag!r} cannot be the name of a tag" in push(f"--tag={tag}")
    assert "me/iha" not in hub.repositories


# What goes wrong


def test_somebody_else_at_work(directory, hub, push, passed):
    """Overwrite nobody's work, and go on when the command is run again."""
    push()
    append("README.md", "More.\n")(directory)

    def commit(repository):
        files, hub.before_commit = repository.commits[repository.references["main"]], None
        repository.commit("main", {**files, "README.md": File(b"1", False), "note.txt": File(b"2", False)})

    hub.before_commit = commit
    assert "A commit has happened since" in push()
    assert hub.head("me/iha")["README.md"].content == b"1"
    assert "Published" in push()
    assert hub.head("me/iha")["README.md"].content == (directory / "README.md").read_bytes()
    assert hub.head("me/iha")["note.txt"].content == b"2"


DROPPED = {
    "upload dropped": Fault("PUT", "/lfs/", "drop"),
    "tag failed": Fault("POST", "/tag/", 409),
    "download dropped": Fault("GET", "/resolve/", "drop"),
}


@pytest.mark.parametrize("name", DROPPED)
def test_what_stops_a_push_is_one_line_and_the_next_finishes(name, directory, hub, push, passed):
    """Leave the old checkpoint or the new one, and transfer nothing twice."""
    push()
    old = hub.head("me/iha")
    fill_head(1.0)(directory)
    append("README.md", "More.\n")(directory)
    hub.faults.append(DROPPED[name])
    assert push("--tag", "v1").startswith("Error: ")
    new = {
        **old,
        "README.md": File((directory / "README.md").read_bytes(), False),
        "model.safetensors": File((directory / "model.safetensors").read_bytes(), True),
    }
    assert hub.head("me/iha") == (new if name in ("tag failed", "download dropped") else old)

    hub.faults.clear()
    hub.calls.clear()
    stored = set(hub.lfs)
    assert "Published: " in push("--tag", "v1")
    repository = hub.repositories["me/iha"]
    assert hub.head("me/iha") == new and repository.references["v1"] == repository.references["main"]
    assert len(repository.commits) == 3
    assert sum(call[0] == "PUT" for call in hub.calls) == len(set(hub.lfs) - stored) <= 1


def test_a_killed_push_leaves_nothing_and_the_next_finishes(directory, hub, push, passed, tmp_path, monkeypatch):
    """Kill the process in the middle of its upload; then have the network and somebody else interfere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where a process that is killed leaves its copy
    process = multiprocessing.get_context("fork").Process(target=push)
    hub.faults.append(Fault("PUT", "/lfs/", process.kill))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert set(hub.head("me/iha")) == {".gitattributes"} and hub.repositories["me/iha"].references.keys() == {"main"}
    hub.faults[:] = [Fault("PUT", "/lfs/", "drop", times=1), Fault("POST", "/commit/", 412, times=1)]
    assert "412" in push()
    assert "Published: " in push() and set(hub.head("me/iha")) == CHECKPOINT | {".gitattributes"}
