"""Publish a saved model directory on the Hugging Face Hub: the files of the checkpoint and no others, in a commit.

Weights, code and card are checked before, and the model is loaded in a process without this package. Log in first: hf
auth login.
"""

import argparse
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.command_io import UserError, read_text, run_cli


def parse_arguments() -> argparse.Namespace:
    example = "example: %(prog)s smollm2-iha me/smollm2-iha --private --dry-run"
    parser = argparse.ArgumentParser(description=__doc__, epilog=example)
    parser.add_argument("directory", metavar="dir", type=Path, help="saved model directory")
    parser.add_argument("repo_id", help="repository on the Hub, such as me/smollm2-iha")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--tag", help="name the uploaded revision, such as v1")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--collection", help="add it to this collection, such as me/iha-0123456789abcdef01234567")
    parser.add_argument("--license", help="of the weights, if the model card does not state it, such as apache-2.0")
    parser.add_argument(
        "--base-model", help="Hub id of the model it was made from, if the card does not state it; none: from scratch"
    )
    parser.add_argument("--trust-code", action="store_true", help="run and publish code that is not this package's")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be uploaded, without network")
    args = parser.parse_args()
    if not args.directory.is_dir():
        raise UserError(f"{args.directory} is no directory: expected a saved model.")
    return args


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from transformers.utils import CHAT_TEMPLATE_DIR

from common.checkpoint_io import load_config, load_in_clean_process
from common.foreign_code import CUSTOM_GENERATE, refuse_foreign_code
from hub.checks import EVAL_RESULTS, LOADED_NAMES, check_checkpoint, check_links, check_secrets, checkpoint_files
from hub.client import check_repo_id, commit_of, download, hub_api, hub_errors, snippet
from kind_facts import is_ours
from model_cards.render import MAX_CARD, parse_card, render_card, with_name
from modeling_iha.package import PACKAGE


# Weights by the names under which Transformers looks for them, in one file or several, of any variant.
WEIGHTS = re.compile(r"(pytorch_)?model([.-][\w.-]+)?\.(safetensors|bin)(\.index(\.\w+)?\.json)?")
# A load takes an adapter's base in the place of the weights beside it.
ADAPTER = re.compile(r"adapter_(config\.json|model[\w.-]*\.(safetensors|bin))")
# What git refuses in the name of a tag (git check-ref-format).
NO_TAG = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|^[-./]|[./]$|^@?$")


def publish(
    directory: Path,
    repo_id: str,
    *,
    private: bool = False,
    tag: str | None = None,
    create_pr: bool = False,
    collection: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    trust_code: bool = False,
    dry_run: bool = False,
) -> str | None:
    """Check a saved model, commit it to the model repository `repo_id`, made if necessary, and load it back.

    Return the web address of the commit or pull request. Raise `UserError`, before anything is uploaded where that is
    possible. Whatever stops it, the repository holds the old checkpoint or the new one, and the same call goes on from
    there.
    """
    check_repo_id(repo_id)
    if "/" not in repo_id:  # the Hub would make it in the user's account, where no later request finds it
        raise UserError(f"{repo_id!r} names no account: expected the account too, such as me/{repo_id}.")
    if tag is not None and NO_TAG.search(tag):
        raise UserError(f"{tag!r} is no name that git allows for a tag: choose another, such as v1.")
    if tag is not None and create_pr:
        raise UserError("A tag names a revision of the repository: give --tag once the pull request is merged.")
    names, others = checkpoint_files(directory)
    check_links(directory, names)
    card = completed_card(directory, repo_id, license, base_model)
    with _staged(directory, names, card) as stage:
        names = sorted({*names, "README.md"})
        check_secrets(stage, names)
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
        with hub_errors(f"Publishing {repo_id}"):
            api = hub_api()
            if collection is not None:
                api.get_collection(collection)
            # With None the Hub applies the account's default, which may be private.
            api.create_repo(repo_id, private=private or None, exist_ok=True)
            if private and not api.repo_info(repo_id).private:
                raise UserError(
                    f"{repo_id} exists and is public: choose another, or make it private on the Hub first."
                )
            head = commit_of(api, repo_id)
            changed, superseded = _difference(api, stage, repo_id, head)
            is_there = not changed and not superseded
            tagged = tag is not None and _has_tag(api, repo_id, tag, head if is_there else None)
            if is_there:
                print(f"{repo_id} holds these files already", flush=True)
                url, revision = f"{api.endpoint}/{repo_id}/commit/{head}", head
            else:
                url, revision = _commit(api, stage, repo_id, head, changed, superseded, create_pr)
            if left := ", ".join(_difference(api, stage, repo_id, revision)[0]):
                raise UserError(f"{repo_id} at {revision} holds other content than was sent for {left}: push again.")
            # The cache may hold more of this revision than what was just downloaded.
            refuse_foreign_code(download(api, repo_id, revision, names), trust_code)
            print(f"Loading {repo_id} at {revision} in a clean process", flush=True)
            load_in_clean_process(repo_id, revision=revision, hub_cache=constants.HF_HUB_CACHE)
            if tag is not None and not tagged:
                api.create_tag(repo_id, tag=tag, revision=revision)
            if collection is not None:
                api.add_collection_item(collection, repo_id, "model", exists_ok=True)
        print(f"Published: {url}\nRevision: {revision}\n\n{snippet(repo_id, revision)}")
        return url


def completed_card(directory: Path, repo_id: str, license: str | None, base_model: str | None) -> str:
    """Return the model card in `directory`, or a new one, with the licence and base model that it lacks.

    A card of this package also gets the name `repo_id`. A `base_model` of "none" says that there is none. Raise
    `UserError` if the card cannot be read, states neither, or states something else.
    """
    path = directory / "README.md"
    config = load_config(directory)
    if not is_ours(config) and not path.is_file():
        raise UserError(f"{directory} holds no model card: write one, README.md, with license and base_model.")
    text = read_text(path, MAX_CARD).removeprefix("\ufeff") if path.is_file() else render_card(config, repo_id)
    card = parse_card(text, path)
    added = False
    for name, option, value in (("license", "--license", license), ("base_model", "--base-model", base_model)):
        stated = card.data.get(name) or None
        if stated is None and value is None:
            none = " (none: trained from scratch)" if name == "base_model" else ""
            raise UserError(f"The card of {directory} does not state its {name}: add it, or give {option}{none}.")
        if stated is not None and value is not None and stated != value:
            raise UserError(f"{path} states {name} {stated!r}, and {option} says {value!r}: correct one of them.")
        if stated is None and (name, value) != ("base_model", "none"):
            setattr(card.data, name, value)
            added = True
    return with_name(str(card) if added else text, repo_id)


@contextmanager
def _staged(directory: Path, names: list[str], card: str) -> Iterator[Path]:
    """Yield a directory of copies of the files `names` and of the model card.

    It holds just what is published, so that just that is checked. Links would publish what a file became meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="push-") as temporary:
        stage = Path(temporary)
        for name in names:
            (stage / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(directory / name, stage / name)
        (stage / "README.md").write_text(card, encoding="utf-8")
        try:
            yield stage
        except UserError as error:  # names the directory that the user knows
            raise UserError(str(error).replace(temporary, str(directory))) from error


def _difference(api: HfApi, stage: Path, repo_id: str, revision: str) -> tuple[list[str], list[str]]:
    """Return what a commit of the repository lacks of the directory `stage`, by checksums, and what is superseded."""
    found = api.verify_repo_checksums(repo_id, revision=revision, local_dir=stage)
    changed = [mismatch["path"] for mismatch in found.mismatches] + found.extra_paths
    new_weights = any(WEIGHTS.fullmatch(path) for path in changed)
    code = {path.name for path in PACKAGE.glob("*.py")}
    superseded = [
        path
        for path in found.missing_paths
        if path in LOADED_NAMES | code
        or WEIGHTS.fullmatch(path)
        or ADAPTER.fullmatch(path)
        or path.startswith((f"{CHAT_TEMPLATE_DIR}/", f"{Path(CUSTOM_GENERATE).parent}/"))
        or (new_weights and path.startswith(f"{EVAL_RESULTS}/"))  # of the weights that were there before
    ]
    return changed, superseded


def _commit(
    api: HfApi, stage: Path, repo_id: str, head: str, changed: list[str], superseded: list[str], create_pr: bool
) -> tuple[str, str]:
    """Commit the difference to `head`, all of it or nothing, and return the commit's web address and id."""
    for path in superseded:
        print(f"Removing what is superseded: {path}", flush=True)
    operations: list[Any] = [
        *(CommitOperationAdd(path, str(stage / path)) for path in changed),
        *(CommitOperationDelete(path, is_folder=False) for path in superseded),
    ]
    message = "Upload Interleaved Head Attention model"
    # A commit of somebody else meanwhile is an error of status 412, for which `hub_errors` has its advice.
    commit = api.create_commit(repo_id, operations, commit_message=message, create_pr=create_pr, parent_commit=head)
    return commit.pr_url or commit.commit_url, commit.oid


def _has_tag(api: HfApi, repo_id: str, tag: str, head: str | None) -> bool:
    """Tell if the commit `head` has the tag already.

    Raise `UserError` for a branch of this name and for a tag of another commit.
    """
    refs = api.list_repo_refs(repo_id)
    commits = [ref.target_commit for ref in refs.tags if ref.name == tag]
    if commits not in ([], [head]) or any(ref.name == tag for ref in refs.branches):
        raise UserError(f"{repo_id} already has a tag or branch {tag!r}: choose another, or delete it first.")
    return bool(commits)


def main() -> None:
    publish(**vars(parse_arguments()))


if __name__ == "__main__":
    run_cli(main)
