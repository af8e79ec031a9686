"""Publish a saved model directory on the Hugging Face Hub: the files of the checkpoint and no others, in a commit.

Weights, code and card are checked before, and the model is loaded in a process without this package. Log in first: hf
auth login.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

from iha.arguments import check_push, push_arguments
from iha.cards import FROM_SCRATCH, MAX_CARD, parse_card, render_card, with_name
from iha.checkpoints import load_config
from iha.errors import UserError
from iha.files import checked, expanded, read_text, signals_as_interrupts
from iha.kinds import is_ours
from iha.processes import load_in_clean_process
from iha.sources import check_hub_answers, find_source
from modeling_iha.package import PACKAGE

from .checkpoint_checks import (
    EVAL_RESULTS,
    LOADED_NAMES,
    READ_FOLDERS,
    TOKENIZER_PATTERNS,
    check_checkpoint,
    checkpoint_files,
    loading_code,
)


# Names of weights, in one file or several, of any variant, as Transformers looks for them.
WEIGHTS = ["model.safetensors*", "model[.-]*.safetensors*", "pytorch_model*.bin*"]
# A load would find these at the root of a repository next to the published files, or in their place.
SUPERSEDED = [
    *WEIGHTS,
    *sorted(LOADED_NAMES),
    *TOKENIZER_PATTERNS,
    "adapter_config.json",
    "adapter_model*",
]


@checked
def push(
    directory: str | os.PathLike,
    repo_id: str,
    private: bool = False,
    tag: str | None = None,
    create_pr: bool = False,
    license: str | None = None,
    base_model: str | None = None,
    trust_code: bool = False,
    dry_run: bool = False,
) -> str | None:
    """Check a saved model, commit it to the model repository `repo_id`, made if necessary, and load it back.

    The options are those of the command. Return the web address of the commit or pull request. Raise `UserError`,
    before anything is uploaded where that is possible, and the client's errors where the Hub rejects it. If it is
    stopped, the repository holds the old checkpoint or the new one, and the same call goes on from there.
    """
    directory = expanded(directory)
    check_push(directory, repo_id, tag, create_pr)
    source = find_source(directory)
    names, others = checkpoint_files(source)
    card = completed_card(source, repo_id, license, base_model)
    with _staged(directory, names, card) as stage:
        names = sorted({*names, "README.md"})
        check_checkpoint(stage, trust_code)
        print(f"Loading {directory} in a clean process", flush=True)
        load_in_clean_process(stage)
        print(f"{'Would upload' if dry_run else 'Publishing'} to {repo_id}:")
        for name in names:
            print(f"  {name}  {(stage / name).stat().st_size:,} bytes")
        if others:
            print(f"Not part of a checkpoint, not uploaded: {', '.join(others)}", flush=True)
        if dry_run:
            return None
        check_hub_answers(repo_id)
        api = HfApi()
        # With None the Hub applies the account's default, which may be private.
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        info = api.model_info(repo_id)
        if private and not info.private:
            raise UserError(f"{repo_id} exists and is public: choose another, or make it private on the Hub first.")
        changed = _changed(api, stage, repo_id, info.sha)
        has_new_weights = any(_matches(name, WEIGHTS) for name in changed)
        gone = superseded(api.list_repo_files(repo_id, revision=info.sha), names, has_new_weights)
        if gone:
            print(f"Removing what a load of {repo_id} would find next to these or in their place: {', '.join(gone)}")
        tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id).tags}
        is_elsewhere = tag in tags and tags[tag] != info.sha
        would_move = tag in tags and (changed or gone)
        if is_elsewhere or would_move:
            raise UserError(f"{repo_id} already has a tag {tag!r}: choose another, or delete it first.")
        # `upload_folder` of huggingface_hub 2.4 may make several commits, and a stop between them leave new code
        # without its weights.
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationDelete(name) for name in gone),
                *(CommitOperationAdd(name, stage / name) for name in names),
            ],
            commit_message="Upload Interleaved Head Attention model",
            create_pr=create_pr,
            parent_commit=info.sha,  # the Hub rejects it if somebody committed meanwhile
        )
        api.snapshot_download(repo_id, revision=commit.oid, allow_patterns=names)
        print(f"Loading {repo_id} at {commit.oid} in a clean process", flush=True)
        load_in_clean_process(repo_id, revision=commit.oid, hub_cache=constants.HF_HUB_CACHE)
        if tag is not None and tag not in tags:
            api.create_tag(repo_id, tag=tag, revision=commit.oid)
        url = commit.pr_url or commit.commit_url
        if create_pr and commit.pr_url is None:
            print(f"{repo_id} has these files already: no pull request was opened.")
        else:
            print(f"Published: {url}")
        print(f"Revision: {commit.oid}\n\n{loading_code(repo_id, commit.oid)}")
        return url


def superseded(there: list[str], published: list[str], has_new_weights: bool) -> list[str]:
    """Return the files of a repository, other than the published ones, that the new commit has to remove.

    A load would find them next to the published files or in their place, or they are results of former weights.
    """
    folders = READ_FOLDERS if has_new_weights else READ_FOLDERS - {EVAL_RESULTS}
    # Somebody's own masks.py stays: only a checkpoint of this package has one of these.
    ours = {path.name for path in PACKAGE.glob("*.py")}
    has_our_code = not {"modeling_iha.py", "modeling_interleaved.py"}.isdisjoint(there)
    gone = []
    for name in set(there) - set(published):
        folder, _, file = name.rpartition("/")
        at_root = not folder and (_matches(file, SUPERSEDED) or (has_our_code and file in ours))
        if at_root or folder.partition("/")[0] in folders:
            gone.append(name)
    return sorted(gone)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _changed(api: HfApi, stage: Path, repo_id: str, revision: str) -> list[str]:
    """Return the names of the files in `stage` that a commit lacks, or holds with another checksum."""
    found = api.verify_repo_checksums(repo_id, revision=revision, local_dir=stage)
    return [mismatch["path"] for mismatch in found.mismatches] + found.extra_paths


def completed_card(source: str | os.PathLike, repo_id: str, license: str | None, base_model: str | None) -> str:
    """Return the model card in the directory `source`, or a new one, with the license and base model that it lacks.

    A card of this package also gets the name `repo_id`. A `base_model` of "none" says that there is none, and so does
    the tag of a card from scratch. Raise `UserError` if the card cannot be read, states neither, or states something
    else.
    """
    source = find_source(source)
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


@contextmanager
def _staged(directory: Path, names: list[str], card: str) -> Iterator[Path]:
    """Yield a directory of copies of the files `names` and of the model card.

    It holds just what is published, so that just that is checked. Links would publish what a file became meanwhile.
    """
    with signals_as_interrupts(), tempfile.TemporaryDirectory(prefix="push-") as temporary:
        stage = Path(temporary)
        for name in names:
            (stage / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(directory / name, stage / name)
        (stage / "README.md").write_text(card, encoding="utf-8")
        try:
            yield stage
        except UserError as error:  # names the directory that the user knows
            raise UserError(str(error).replace(temporary, str(directory))) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    push(**push_arguments(argv))
