"""Publish a saved model directory on the Hugging Face Hub: the files of the checkpoint and no others."""

import tempfile
from pathlib import Path

from huggingface_hub import HfApi

from iha.cards import FROM_SCRATCH, MAX_CARD, parse_card, render_card, with_name
from iha.checkpoints import load_config
from iha.errors import UserError
from iha.files import read_text
from iha.foreign_code import CUSTOM_GENERATE
from iha.kinds import is_ours
from iha.sources import Source

from .checkpoint_checks import READ_BY_LOADS, check_checkpoint, checkpoint_files, loading_code


# A load of the repository would find these next to the published files or in their place. In these patterns "*" also
# stands for "/", so none of them begins like a folder that somebody may have, such as model-4bit.
SUPERSEDED = [
    *READ_BY_LOADS,
    "adapter_config.json",
    "adapter_model*",
    "model.*safetensors*",
    "model-?????-of-?????.safetensors",
    "pytorch_model*.bin*",
    CUSTOM_GENERATE,
]


def publish(
    source: Source,
    repo_id: str,
    private: bool,
    tag: str | None,
    create_pr: bool,
    license: str | None,
    base_model: str | None,
    trust_code: bool,
    dry_run: bool,
) -> str | None:
    """Check a saved model and commit it to the model repository `repo_id`, which is made if necessary.

    Return the web address of the commit or pull request. Raise `UserError`, before anything is uploaded, and the
    client's errors where the Hub rejects it.
    """
    names, others = checkpoint_files(source)
    card = completed_card(source, repo_id, license, base_model)
    # The directory that is checked and uploaded holds nothing else. Links suffice: the weights may be many gigabytes.
    with tempfile.TemporaryDirectory(prefix="push-") as temporary:
        stage = Path(temporary)
        for name in {*names} - {"README.md"}:
            (stage / name).parent.mkdir(exist_ok=True)
            (stage / name).symlink_to(Path(source.location, name).resolve())
        (stage / "README.md").write_text(card, encoding="utf-8")
        check_checkpoint(stage, source.name, trust_code)
        print(f"{'Would upload' if dry_run else 'Publishing'} to {repo_id}:")
        for name in sorted({*names, "README.md"}):
            print(f"  {name}  {(stage / name).stat().st_size:,} bytes")
        if others:
            print(f"Not part of a checkpoint, not uploaded: {', '.join(others)}", flush=True)
        return None if dry_run else upload(stage, repo_id, private, tag, create_pr)


def upload(stage: Path, repo_id: str, private: bool, tag: str | None, create_pr: bool) -> str:
    """Commit the files of a directory in the place of those of a repository, and return the commit's web address.

    Raise `UserError` for a repository that is public in the place of a private one, and for a tag that exists.
    """
    api = HfApi()
    # With None the Hub applies the account's default, which may be private.
    repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
    info = api.model_info(repo_id)
    if private and not info.private:
        raise UserError(f"{repo_id} exists and is public: choose another, or make it private on the Hub first.")
    if tag is not None and tag in {ref.name for ref in api.list_repo_refs(repo_id).tags}:
        raise UserError(f"{repo_id} already has a tag {tag!r}: choose another, or delete it first.")
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=stage,
        delete_patterns=SUPERSEDED,
        commit_message="Upload Interleaved Head Attention model",
        create_pr=create_pr,
        parent_commit=info.sha,  # the Hub rejects it if somebody committed meanwhile
    )
    if tag is not None:
        api.create_tag(repo_id, tag=tag, revision=commit.oid)
    url = commit.pr_url or commit.commit_url
    print(f"Published: {url}\nRevision: {commit.oid}\n\n{loading_code(repo_id, commit.oid)}")
    return url


def completed_card(source: Source, repo_id: str, license: str | None, base_model: str | None) -> str:
    """Return the model card in a directory, or a new one, with the license and base model that it lacks.

    A card of this package also gets the name `repo_id`. A `base_model` of "none" says that there is none, and so does
    the tag of a card from scratch. Raise `UserError` if the card cannot be read, lacks one of them that no option
    gives, or states something else.
    """
    path = Path(source.location, "README.md")
    config = load_config(source)
    if not is_ours(config) and not path.is_file():
        raise UserError(f"{source} holds no model card: write one, README.md, with license and base_model.")
    text = read_text(path, MAX_CARD).removeprefix("\ufeff") if path.is_file() else render_card(config, repo_id)
    card = parse_card(text, path)
    if FROM_SCRATCH in (card.data.get("tags") or []) and not card.data.get("base_model"):
        base_model = base_model or "none"
    for name, option, value in (("license", "--license", license), ("base_model", "--base-model", base_model)):
        stated = card.data.get(name) or None
        if stated is None and value is None:
            none = " (none: trained from scratch)" if name == "base_model" else ""
            raise UserError(f"The card of {source} does not state its {name}: add it, or give {option}{none}.")
        if stated is not None and value is not None and stated not in (value, [value]):
            raise UserError(f"{path} states {name} {stated!r}, and {option} says {value!r}: correct one of them.")
        if stated is None and (name, value) != ("base_model", "none"):
            card.data[name] = value
            text = str(card)
    return with_name(text, repo_id)
