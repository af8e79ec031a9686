"""Test what is published, what is rejected, and what a repository then holds.

The real client speaks, in this process, to a stand-in for the Hub.
"""

import json
import shutil
from copy import deepcopy

import pytest
import torch
from helpers import IHA_CODE, decoder, last_line, random_model, small_config
from huggingface_hub import HfApi
from loopback_hub import LoopbackHub
from tiny_sources import edit_config, edit_weights, tiny_tokenizer
from transformers import AutoModelForCausalLM

from conversion_scripts import push_to_hub
from iha.card_template import render_card
from iha.cards import Origin, origin_to_add
from iha.errors import UserError
from iha.hub import checkpoint_checks
from iha.hub.checkpoint_checks import checkpoint_files
from iha.hub.push_to_hub import card_of
from iha.processes import load_in_clean_process, run_in_clean_process
from iha.sources import find_source
from modeling_iha import interleave_heads


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
    "interleaving.json",  # of an adapter: earlier versions recorded the path of a local base
    "notes.txt",
    "secret.py",
    "token",
    "train.log",
    "trainer_state.json",
    "wandb-key.json",
    "training_args.bin",  # a pickle
    "tokenizer_training_notes.md",
    "vocab_customers.csv",
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
    """Return the stand-in, and take for granted that a directory loads alone."""
    monkeypatch.setattr(checkpoint_checks, "load_in_clean_process", lambda directory: {})
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


def shard(directory):
    """Save the model again, in several files and with other weights."""
    (directory / "model.safetensors").unlink()
    random_model(small_config(), seed=1).save_pretrained(directory, max_shard_size="20KB")
    return set(json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"].values())


# Which files


def test_only_the_checkpoint_and_weights_that_are_loaded_are_listed(directory):
    (directory / ".eval_results").mkdir()
    (directory / ".eval_results" / "gsm8k.yaml").write_text("- value: 1\n")
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "tools"}
    tokenizer.save_pretrained(directory)
    read = {"processor_config.json", "preprocessor_config.json", "tekken.json", "spiece.model"}
    for name in read:
        (directory / name).write_text("{}")
    names, others = checkpoint_files(find_source(directory))
    inner = {".eval_results/gsm8k.yaml", "additional_chat_templates/tool_use.jinja"}
    assert set(names) == CHECKPOINT | inner | read
    assert set(others) == STRAY | {"checkpoint-5/"}

    for name in ("adapter_model.safetensors", "other.safetensors"):
        shutil.copy(directory / "model.safetensors", directory / name)
    assert checkpoint_files(find_source(directory))[0] == names
    shards = shard(directory)
    assert len(shards) > 1
    expected = set(names) - {"model.safetensors"} | shards | {"model.safetensors.index.json"}
    assert set(checkpoint_files(find_source(directory))[0]) == expected


def test_the_code_of_a_map_with_lists_is_listed(directory):
    names, _ = checkpoint_files(find_source(directory))
    entries = json.loads((directory / "config.json").read_text())
    entries["auto_map"] |= {"AutoTokenizer": ["modeling_iha.IHAModel", None], "AutoProcessor": "org/name--other.Class"}
    (directory / "config.json").write_text(json.dumps(entries))
    assert checkpoint_files(find_source(directory))[0] == names
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["own_tokenizer.Tokenizer", None]}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (directory / "own_tokenizer.py").write_text("from .own_pieces import PIECES")
    (directory / "own_pieces.py").write_text("PIECES = ()")
    code = {"own_tokenizer.py", "own_pieces.py"}
    assert set(checkpoint_files(find_source(directory))[0]) == {*names} | code


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
    "an adapter alone": (
        lambda path: (path / "config.json").rename(path / "adapter_config.json"),
        "holds a LoRA adapter",
    ),
    "a pickle": (
        lambda directory: (directory / "model.safetensors").rename(directory / "pytorch_model.bin"),
        "holds no model.safetensors: expected weights in safetensors",
    ),
    "no tokenizer": (remove("tokenizer.json"), "no usable tokenizer"),
    "no weights": (remove("model.safetensors"), "holds no model.safetensors"),
    "NaN": (fill_head(torch.nan), "lm_head.weight holds NaN or infinity"),
    "other sizes": (lambda directory: edit_config(directory, intermediate_size=20), "mismatched_keys: "),
    "other code": (append("modeling_iha.py", "\nprint('hello')\n"), "differs from this package's code"),
    "code that is not whole": (remove("virtual_tokens.py"), "code of"),
}


def test_a_tag_that_the_hub_would_reject_after_the_upload_is_refused(directory, hub, push):
    assert "tag='v1 final'" in push("--tag", "v1 final") and not hub.repositories


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_whole_checkpoint_is_refused(name, directory, hub, push, monkeypatch):
    monkeypatch.setattr(checkpoint_checks, "load_in_clean_process", load_in_clean_process)
    change, message = FAULTS[name]
    change(directory)
    if name == "NaN":
        assert message in push("--dry-run")  # ends as a push would
    error = push()
    assert message in error and SECRET not in error and "push-" not in error and hub.calls == []


def test_directory_that_does_not_load_alone_is_refused(directory, hub, push, monkeypatch):
    def refuse(stage):
        assert {path.name for path in stage.iterdir()} == CHECKPOINT  # just what would be published
        raise UserError(f"{stage} does not load in a clean process: reasons")

    monkeypatch.setattr(checkpoint_checks, "load_in_clean_process", refuse)
    assert f"{directory} does not load in a clean process: reasons" in push() and hub.calls == []


def test_a_clean_process_finds_the_users_own_libraries(monkeypatch, tmp_path):
    """Look where `pip install --user` installs, which an isolated process does not by itself."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "only_here.py").write_text("VALUE = 5")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert run_in_clean_process("import only_here\nresult = only_here.VALUE", {}) == 5


def test_how_a_clean_process_ended_is_said():
    with pytest.raises(UserError, match="ended by SIGKILL: is there enough memory"):
        run_in_clean_process("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", {})


def test_code_that_runs_sees_no_secrets(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, SECRET)
    program = "import os, pathlib; result = [dict(os.environ), str(pathlib.Path.home())]"
    environment, home = run_in_clean_process(program, {})
    assert SECRET not in environment.values() and home == environment["HF_HOME"]


# What is published


def test_what_a_push_stores(directory, hub, push):
    out = push("--private", "--tag", "v1")
    repository, files = hub.repositories["me/iha"], hub.head("me/iha")
    sha = repository.references["main"]
    assert repository.private and repository.references["v1"] == sha and len(repository.commits) == 2
    assert set(files) == CHECKPOINT | {".gitattributes"}
    assert all(files[name] == (directory / name).read_bytes() for name in CHECKPOINT)
    assert f"Published: {hub.endpoint}/me/iha/commit/{sha}" in out and f'"me/iha", revision="{sha}"' in out
    append("README.md", "More.\n")(directory)
    assert "already has a tag 'v1'" in push("--tag", "v1") and len(repository.commits) == 2


def test_what_is_superseded_goes_in_the_same_commit(directory, hub, push):
    """Remove what a load would take in the place of the new files, or run. Keep what somebody added."""
    push()
    repository = hub.repositories["me/iha"]
    superseded = (
        "vocab.json",
        "spiece.model",
        "adapter_config.json",
        "custom_generate/generate.py",
        "additional_chat_templates/tool_use.jinja",
        "model.fp16.safetensors",
        "pytorch_model.bin",
        "adapter_model.safetensors",
        "adapter_model.bin",
    )
    # No load of the root reads these.
    kept = (
        ".gitattributes",
        "LICENSE",
        ".eval_results/a.yaml",
        "attention_diff.py",
        "other.safetensors",
        "model-4bit/model.safetensors",
        "tokenizer_training/corpus.md",
        "vocab-study/README.md",
        "sub/config.json",
        "tokenizer.png",
    )
    repository.commit("main", {**dict.fromkeys((*superseded, *kept), b"x"), **hub.head("me/iha")})
    (directory / "chat_template.jinja").unlink()
    before = len(repository.commits)
    push()
    assert set(hub.head("me/iha")) == {*CHECKPOINT, *kept} - {"chat_template.jinja"}
    shards = shard(directory)
    push()
    assert len(repository.commits) == before + 2
    expected = CHECKPOINT - {"chat_template.jinja", "model.safetensors"} | shards | {"model.safetensors.index.json"}
    assert set(hub.head("me/iha")) == {*expected, *kept}
    (directory / "model.safetensors.index.json").unlink()
    for name in shards:
        (directory / name).unlink()
    random_model(small_config()).save_pretrained(directory)
    push()
    assert set(hub.head("me/iha")) == {*CHECKPOINT, *kept} - {"chat_template.jinja"}


def test_no_path_of_this_machine_is_published(hub, tmp_path, cli):
    directory = tmp_path / "interleaved"
    decoder("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    interleave_heads(model, 2).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    code, _, err = cli(push_to_hub, directory, "me/iha", "--license", "mit", "--base-model", "me/base")
    assert code == 0, err
    assert not any(str(tmp_path).encode() in content for content in hub.head("me/iha").values())


def test_a_missing_card_is_rendered_and_an_incomplete_one_completed(directory, hub, push):
    (directory / "README.md").unlink()
    assert "does not state its license" in push() and hub.calls == []
    push("--license", "mit", "--base-model", "none")
    card = hub.head("me/iha")["README.md"].decode()
    assert "license: mit" in card and "base_model" not in card and 'name = "me/iha"\n' in card
    assert "The weights are under mit." in card and "trained-from-scratch" in card and "base model" not in card
    assert not (directory / "README.md").exists()
    # A card that a converter or trainer wrote has the directory's name.
    made = render_card(small_config(), "./a/directory", license="mit", from_scratch=True)
    (directory / "README.md").write_text(made)
    push()
    card = hub.head("me/iha")["README.md"].decode()
    assert (
        'name = "me/iha"\n' in card and "\n# me/iha\n" in card and "directory" not in card.partition("## Use")[2][:99]
    )
    assert "base_model" not in card
    # A converter or trainer that did not know the license says so.
    (directory / "README.md").write_text(render_card(small_config(), "./a/directory", base_model="me/base"))
    push("--license", "apache-2.0")
    card = hub.head("me/iha")["README.md"].decode()
    assert "license: apache-2.0" in card and "The weights are under apache-2.0." in card and "is known" not in card
    # The card had a base model's limits until the push said that there is none. A second push changes no text.
    (directory / "README.md").write_text(render_card(small_config(), "./a/directory", license="mit"))
    for _ in range(2):
        push("--base-model", "none")
        card = hub.head("me/iha")["README.md"].decode()
        assert "- trained-from-scratch\n" in card and "limits of the base model" not in card
    # A card that somebody else wrote gets the tag too.
    (directory / "README.md").write_text("---\nlicense: mit\n---\nMy model.\n")
    push("--base-model", "none")
    assert "- trained-from-scratch\n" in hub.head("me/iha")["README.md"].decode()


@pytest.mark.parametrize(
    ("stated", "given", "facts", "wrong"),
    [
        ("license: mit\nbase_model: me/b", (None, None), {}, None),
        ("license: mit\nbase_model:\n- me/b", ("mit", "me/b"), {}, None),
        ("license:\nbase_model: me/b", ("none", None), {"license": "none"}, None),
        ("license: mit", (None, None), None, "does not state its base_model: add it, or give --base-model \\(none"),
        (
            "license: mit\nbase_model: me/b",
            (None, "none"),
            None,
            "states base_model 'me/b', and --base-model says 'none'",
        ),
        ("license: mit", ("apache-2.0", None), None, "states license 'mit', and --license says 'apache-2.0'"),
        ("license: [", (None, None), None, "The metadata of .* cannot be read"),
    ],
)
def test_a_card_states_license_and_base_model(stated, given, facts, wrong, directory):
    """Keep the rest of a stranger's card as it is."""
    (directory / "README.md").write_text(f"---\n{stated}\ntags:\n- mine\n---\nMine.\n", encoding="utf-8-sig")
    if wrong:
        with pytest.raises(UserError, match=wrong):
            origin_to_add(directory, *given)
        return
    assert origin_to_add(directory, *given) == Origin(facts)
    card = card_of(find_source(directory), "me/iha", Origin(facts))
    assert card.endswith("tags:\n- mine\n---\nMine.\n") and ("license: none" in card) == bool(facts)


def test_a_pull_request_leaves_the_branch_alone(directory, hub, push):
    push()
    repository = hub.repositories["me/iha"]
    main = repository.references["main"]
    append("README.md", "More.\n")(directory)
    out = push("--create-pr")
    assert f"Published: {hub.endpoint}/me/iha/discussions/1" in out and repository.references["main"] == main
    proposed = repository.commits[repository.references["refs/pr/1"]]
    assert proposed["README.md"].endswith(b"More.\n")


def test_nobody_sees_what_was_to_be_private(hub, push):
    push()
    assert "exists and is public" in push("--private") and len(hub.repositories["me/iha"].commits) == 2


def test_nobodys_work_is_overwritten(directory, hub, push, monkeypatch):
    """Stop where somebody else commits meanwhile, and go on when the command is run again."""
    push()
    append("README.md", "More.\n")(directory)
    upload = HfApi.upload_folder

    def upload_later(*arguments, **options):
        hub.repositories["me/iha"].commit("main", {**hub.head("me/iha"), "README.md": b"1", "note.txt": b"2"})
        return upload(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "upload_folder", upload_later)
        assert "A commit has happened since" in push()
    assert hub.head("me/iha")["README.md"] == b"1"
    assert "Published" in push()
    assert hub.head("me/iha")["README.md"] == (directory / "README.md").read_bytes()
    assert hub.head("me/iha")["note.txt"] == b"2"
