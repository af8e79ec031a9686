"""Publish a saved model directory on the Hugging Face Hub: the files of the checkpoint and no others."""

import argparse
import json
import sys
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError  # of the HTTP client of this version of the library
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers.dynamic_module_utils import get_relative_import_files


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from command_io import UserError, one_line, run_cli
from conversion_scripts.check_remote_code import check_remote_code
from conversion_scripts.checkpoint_io import load_in_clean_process


# `files_to_upload` finds weights and code by itself; every other file must be on this list.
ALLOWED_NAMES = {
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "README.md",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "curves.png",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
}
PICKLE_SUFFIXES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}


def files_to_upload(directory: Path) -> tuple[list[str], list[str]]:
    """The names in `directory` that make up the checkpoint, and the names that are not uploaded (folders end in "/").

    The checkpoint consists of its safetensors, the Python files that the config's `auto_map` leads to, and
    `ALLOWED_NAMES`. Raises `UserError` if `directory` is not a saved model, or holds a pickle, which could run any
    code when it is loaded.
    """
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} holds no config.json: expected a saved model directory.")
    entries = sorted(directory.iterdir())
    pickles = [path.name for path in entries if path.suffix.lower() in PICKLE_SUFFIXES]
    if pickles:
        raise UserError(
            f"{directory} holds {', '.join(pickles)}: pickles are not published, only safetensors. Remove or convert them."
        )
    code = _code_files(directory)
    upload, stay = [], []
    for path in entries:
        allowed = path.is_file() and (path.name in ALLOWED_NAMES | code or path.suffix == ".safetensors")
        (upload if allowed else stay).append(path.name + "/" * path.is_dir())
    return upload, stay


def _code_files(directory: Path) -> set[str]:
    """Names of the modules in the config's `auto_map` and of all modules of the directory that they import. Raises
    `UserError` for code that would not work from the Hub."""
    if problems := check_remote_code(directory):
        raise UserError(f"{directory} holds code that breaks once it is published: {' '.join(problems)}")
    auto_map = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("auto_map", {})
    modules = {directory / f"{reference.split('.')[0]}.py" for reference in auto_map.values()}
    helpers = {Path(helper) for module in modules for helper in get_relative_import_files(module)}
    return {path.name for path in modules | helpers}


def push(
    directory: Path,
    names: list[str],
    repo_id: str,
    private: bool = False,
    tag: str | None = None,
    create_pr: bool = False,
) -> str:
    """Uploads the files `names` of `directory` to the model repository `repo_id`, creates it if necessary, and returns
    the web address of the commit or pull request. Raises `UserError` if the Hub refuses or cannot be reached, if
    somebody else commits during the upload, and, before the upload, if `tag` exists."""
    api = HfApi()
    try:
        # With None the Hub applies the account's default, which may be private.
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if tag is not None and any(ref.name == tag for ref in api.list_repo_refs(repo_id).tags):
            raise UserError(f"{repo_id} already has a tag {tag!r}: choose another, or delete it first.")
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=directory,
            allow_patterns=names,
            parent_commit=api.repo_info(repo_id).sha,
            create_pr=create_pr,
            commit_message="Upload Interleaved Head Attention model",
        )
        if tag is not None:
            api.create_tag(repo_id, tag=tag, revision=commit.oid)
    except HTTPError as error:
        raise UserError(f"Publishing {repo_id} failed: {one_line(error)}") from error
    return commit.pr_url or commit.commit_url


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Publish a saved model directory on the Hugging Face Hub after a check that it loads in a process without this "
        "package. Log in first: hf auth login.",
        epilog="example: python -m conversion_scripts.push_to_hub smollm2-iha me/smollm2-iha --private --dry-run",
    )
    parser.add_argument("dir", type=Path, help="saved model directory")
    parser.add_argument("repo_id", help="repository on the Hub, such as me/smollm2-iha")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--tag", help="name the uploaded revision, such as v1")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be uploaded, without network")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    try:
        validate_repo_id(args.repo_id)
    except HFValidationError as error:
        raise UserError(f"{args.repo_id!r} is no repository id: {one_line(error)}") from error
    upload, stay = files_to_upload(args.dir)

    print(f"Loading {args.dir} in a clean process", flush=True)
    load_in_clean_process(args.dir)

    print(f"{'Would upload' if args.dry_run else 'Uploading'} to {args.repo_id}:")
    for name in upload:
        print(f"  {name}  {(args.dir / name).stat().st_size:,} bytes")
    if stay:
        print(f"Not part of a checkpoint, not uploaded: {', '.join(stay)}")
    if not args.dry_run:
        print(f"Published: {push(args.dir, upload, args.repo_id, args.private, args.tag, args.create_pr)}")


if __name__ == "__main__":
    run_cli(main)
