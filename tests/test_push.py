"""What is published, what is refused, and which calls the Hub gets."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import IHA_CODE, command, last_line, random_model, small_config
from huggingface_hub.errors import HTTPError
from tiny_sources import tiny_tokenizer

from command_io import UserError
from conversion_scripts import push_to_hub
from conversion_scripts.push_to_hub import files_to_upload


CHECKPOINT = IHA_CODE | {
    *("README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
}
STRAY = {".env", "notes.txt", "secret.py", "token", "train.log", "trainer_state.json", "wandb-key.json"}


@pytest.fixture
def directory(tmp_path):
    """A saved model among files that do not belong to it."""
    path = tmp_path / "iha"
    random_model(small_config()).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    (path / "README.md").write_text("A model.")
    for name in STRAY:
        (path / name).write_text("hf_secret")
    (path / "checkpoint-5").mkdir()
    (path / "checkpoint-5" / "model.safetensors").write_text("")
    return path


class FakeHub:
    """Records the calls of `HfApi`."""

    def __init__(self):
        self.calls = []

    def create_repo(self, repo_id, **kwargs):
        self.calls.append(("create_repo", repo_id, kwargs))

    def list_repo_refs(self, repo_id):
        return SimpleNamespace(tags=[SimpleNamespace(name="v0")])

    def repo_info(self, repo_id):
        return SimpleNamespace(sha="parent0")

    def upload_folder(self, **kwargs):
        self.calls.append(("upload_folder", kwargs))
        pr_url = "https://hub/discussions/1" if kwargs["create_pr"] else None
        return SimpleNamespace(oid="abc123", pr_url=pr_url, commit_url="https://hub/commit/abc123")

    def create_tag(self, repo_id, **kwargs):
        self.calls.append(("create_tag", repo_id, kwargs))


@pytest.fixture
def hub(monkeypatch):
    """A hub that records, and a clean process that is taken for granted."""
    hub = FakeHub()
    monkeypatch.setattr(push_to_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(push_to_hub, "load_in_clean_process", lambda directory: {})
    return hub


def test_only_the_checkpoint_is_listed(directory):
    upload, stay = files_to_upload(directory)
    assert set(upload) == CHECKPOINT
    assert set(stay) == STRAY | {"checkpoint-5/"}


def test_sharded_weights_and_their_index_are_listed(tmp_path):
    random_model(small_config()).save_pretrained(tmp_path, max_shard_size="20KB")
    upload, _ = files_to_upload(tmp_path)
    shards = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(shards.values())) > 1 and {*shards.values(), "model.safetensors.index.json"} <= set(upload)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "training_args.bin", "optimizer.pt", "state.PKL"])
def test_pickles_are_refused(directory, name, hub, monkeypatch, capsys):
    torch.save({}, directory / name)
    code, _, err = command(monkeypatch, capsys, push_to_hub, directory, "me/iha")
    assert code == 1 and name in last_line(err) and "pickles" in last_line(err) and hub.calls == []


@pytest.mark.parametrize("repo_id", ["me/iha/x", "me/../iha", "-"])
def test_bad_repository_id_is_refused(directory, repo_id, hub, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, push_to_hub, "--dry-run", directory, "--", repo_id)
    assert code == 1 and "is no repository id" in last_line(err) and hub.calls == []


def test_no_model_directory_is_refused(tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        files_to_upload(tmp_path)


def test_dry_run_prints_the_upload_and_stays_off_the_network(directory, hub, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, push_to_hub, directory, "me/iha", "--tag", "v1", "--dry-run")
    assert code == 0 and hub.calls == []
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("  ")}
    assert listed == CHECKPOINT
    stay = out.splitlines()[-1]
    assert stay.startswith("Not part of a checkpoint") and all(name in stay for name in STRAY)


def test_push_makes_the_hubs_own_calls(directory, hub, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, push_to_hub, directory, "me/iha", "--private", "--tag", "v1")
    assert code == 0 and "https://hub/commit/abc123" in out
    create, upload, tag = hub.calls
    assert create == ("create_repo", "me/iha", {"private": True, "exist_ok": True})
    assert (upload[1]["repo_id"], upload[1]["folder_path"], upload[1]["create_pr"]) == ("me/iha", directory, False)
    assert set(upload[1]["allow_patterns"]) == CHECKPOINT and upload[1]["parent_commit"] == "parent0"
    assert tag == ("create_tag", "me/iha", {"tag": "v1", "revision": "abc123"})


def test_push_as_pull_request(directory, hub, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, push_to_hub, directory, "me/iha", "--create-pr")
    assert code == 0 and "https://hub/discussions/1" in out
    assert [call[0] for call in hub.calls] == ["create_repo", "upload_folder"]
    assert hub.calls[0][2]["private"] is None and hub.calls[1][1]["create_pr"] is True


def test_a_taken_tag_is_refused_before_the_upload(directory, hub, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, push_to_hub, directory, "me/iha", "--tag", "v0")
    assert code == 1 and "already has a tag 'v0'" in last_line(err)
    assert [call[0] for call in hub.calls] == ["create_repo"]


def test_code_that_would_break_is_refused(directory, hub, monkeypatch, capsys):
    with open(directory / "virtual_sequence.py", "a") as file:
        file.write("import triton\n")
    code, _, err = command(monkeypatch, capsys, push_to_hub, directory, "me/iha")
    assert code == 1 and "triton may not be installed" in last_line(err) and hub.calls == []


def test_a_hub_that_fails_is_one_line(directory, hub, monkeypatch, capsys):
    def unreachable(*args, **kwargs):
        raise HTTPError("[Errno 111] Connection refused")

    hub.upload_folder = unreachable
    code, _, err = command(monkeypatch, capsys, push_to_hub, directory, "me/iha")
    assert code == 1 and "Publishing me/iha failed: [Errno 111] Connection refused" in last_line(err)


def test_directory_that_does_not_load_alone_is_refused(directory, monkeypatch, capsys):
    hub = FakeHub()
    monkeypatch.setattr(push_to_hub, "HfApi", lambda: hub)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "attention_kinds": "iha"}))
    code, _, err = command(monkeypatch, capsys, push_to_hub, directory, "me/iha")
    assert code == 1 and "does not load in a clean process" in last_line(err) and hub.calls == []
