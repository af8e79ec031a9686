"""Publish a saved model directory on the Hugging Face Hub: the files of the checkpoint and no others."""

import tempfile
from pathlib import Path

from huggingface_hub import HfApi

from iha.card_template import render_card
from iha.cards import Origin, with_name, with_origin
from iha.checkpoints import check_no_adapter, load_config
from iha.errors import UserError
from iha.files import read_text
from iha.foreign_code import CUSTOM_GENERATE
from iha.kinds import is_ours
from iha.sources import Source

from .checkpoint_checks import READ_BY_LOADS, check_checkpoint, checkpoint_files, loading_code


# A load of the repository would find these next to the published files or in their place. In these patterns "*" also
# matches "/", so they are narrow: "model*" would also delete the files of a folder "model-4bit".
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
    origin: Origin,
    private: bool,
    tag: str | None,
    create_pr: bool,
    trust_code: bool,
    dry_run: bool,
) -> str | None:
    """Check a saved model and commit it to the model repository `repo_id`, which is made if necessary.

    Its card also gets what it lacks of the `origin`. Return the web address of the commit or pull request. Raise
    `UserError`, before anything is uploaded, and the client's errors where the Hub rejects it.
    """
    check_no_adapter(source)  # its files would be left out
    names, others = checkpoint_files(source)
    # The directory that is checked and uploaded holds nothing else. Links suffice: the weights may be many gigabytes.
    with tempfile.TemporaryDirectory(prefix="push-") as temporary:
        stage = Path(temporary)
        for name in names:
            (stage / name).parent.mkdir(exist_ok=True)
            (stage / name).symlink_to(Path(source.location, name).resolve())
        card = card_of(source, repo_id, origin)
        (stage / "README.md").unlink(missing_ok=True)  # the link: the directory keeps its card
        (stage / "README.md").write_text(card, encoding="utf-8")
        check_checkpoint(stage, source.name, trust_code)
        print(f"{'Would upload' if dry_run else 'Publishing'} to {repo_id}:")
        for name in sorted({*names, "README.md"}):
            print(f"  {name}  {(stage / name).stat().st_size:,} bytes")
        if others:
            print(f"Not part of a checkpoint, not uploaded: {', '.join(others)}", flush=True)
        return None if dry_run else upload(stage, repo_id, private, tag, create_pr)


def card_of(source: Source, repo_id: str, origin: Origin) -> str:
    """Return the model card in a directory, or a new one, with the name `repo_id` and what it lacks of the `origin`.

    A stranger's card keeps its text. Raise `UserError`.
    """
    path = Path(source.location, "README.md")
    if path.is_file():
        return with_name(with_origin(read_text(path), origin), repo_id)
    config = load_config(source)
    if not is_ours(config):
        raise UserError(f"{source} holds no model card: write one, README.md, with license and base_model.")
    return render_card(config, repo_id, from_scratch=origin.from_scratch, **origin.metadata)


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
        commit_message="Upload a model and its card",
        create_pr=create_pr,
        parent_commit=info.sha,  # the Hub rejects it if somebody committed meanwhile
    )
    if tag is not None:
        api.create_tag(repo_id, tag=tag, revision=commit.oid)
    url = commit.pr_url or commit.commit_url
    print(f"Published: {url}\nRevision: {commit.oid}\n\n{loading_code(repo_id, commit.oid)}")
    return url
