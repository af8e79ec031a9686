"""Fetch a checkpoint from the Hugging Face Hub into a new directory, and check it as if it were to be published.

Every file is compared with the Hub's checksum, and the model is loaded in a process without this package.
"""

import glob
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi
from transformers.utils import CONFIG_NAME

from iha.arguments import check_pull, pull_arguments
from iha.errors import UserError
from iha.files import checked, new_directory
from iha.processes import load_in_clean_process
from iha.sources import check_hub_answers, find_source

from .checkpoint_checks import READ_FOLDERS, check_checkpoint, checkpoint_files, loading_code, refuse_pickles


@checked
def pull(repo_id: str, directory: str | os.PathLike, revision: str = "main", trust_code: bool = False) -> str:
    """Fetch the repository `repo_id` at a commit, tag or branch into the new `directory`, and return the commit.

    With `trust_code`, code that is not this package's is run. Downloaded files stay in the Hub's cache, so a call
    that was stopped goes on from there. Raise `UserError` if a file differs from the Hub's checksum or the checkpoint
    does not pass `check_checkpoint`, and the client's errors where the Hub rejects the request.
    """
    check_pull(repo_id, directory)
    check_hub_answers(repo_id)
    api = HfApi()
    with new_directory(directory) as temporary:
        info = api.model_info(repo_id, revision=revision)
        names = [file.rfilename for file in info.siblings]
        wanted, others = in_checkpoint(names)
        refuse_pickles(repo_id, wanted)
        if CONFIG_NAME not in wanted:
            raise UserError(f"{repo_id} holds no {CONFIG_NAME}: expected the repository of a saved model.")
        print(f"Fetching {repo_id} at {info.sha}", flush=True)
        if others:
            print(f"Not part of a checkpoint, not fetched: {', '.join(others)}", flush=True)
        # From the cache, and not into the directory itself: what was transferred outlives a call that is stopped.
        patterns = [glob.escape(name) for name in wanted]
        cached = api.snapshot_download(repo_id, revision=info.sha, allow_patterns=patterns)
        _copy(wanted, Path(cached), temporary)
        found = api.verify_repo_checksums(repo_id, revision=info.sha, local_dir=temporary)
        advice = f"remove it from the cache (hf cache rm model/{repo_id}) and pull again"
        lost = [name for name in found.missing_paths if name in wanted]
        if damaged := [mismatch["path"] for mismatch in found.mismatches] + lost:
            raise UserError(f"{', '.join(damaged)} of {repo_id} differs from the Hub's checksum: {advice}.")
        try:
            source = find_source(temporary)
            checkpoint_files(source)
            check_checkpoint(source, trust_code)
            print(f"Loading {repo_id} at {info.sha} in a clean process", flush=True)
            loaded = load_in_clean_process(temporary)
        except UserError as error:  # the directory goes with it
            raise UserError(str(error).replace(str(temporary), repo_id)) from error
    what = f"{loaded['model_class']}, {loaded['parameters']:,} parameters"
    print(f"{directory}: {what}; every file that was fetched is as the Hub has it")
    print(f"Revision: {info.sha}\n\n{loading_code(repo_id, info.sha)}")
    return info.sha


def _copy(wanted: list[str], cached: Path, directory: Path) -> None:
    """Copy the `wanted` files of the Hub's cache, which may also hold other folders and what somebody put there."""
    # The names come from the Hub. Only files that are found inside the cache are copied, so a name with ".." is none.
    for file in cached.rglob("*"):
        name = file.relative_to(cached).as_posix()
        if name in wanted:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, directory / name)


def in_checkpoint(names: list[str]) -> tuple[list[str], list[str]]:
    """Return the file names that a load of a repository's root may read, and the other folders, which end in "/"."""
    folders = {name: name.partition("/")[0] for name in names if "/" in name}
    unread = {folder for folder in folders.values() if folder not in READ_FOLDERS}
    wanted = [name for name in names if folders.get(name) not in unread]
    return wanted, sorted(f"{folder}/" for folder in unread)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    pull(**pull_arguments(argv))
