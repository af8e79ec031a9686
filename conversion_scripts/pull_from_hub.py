"""Fetch a checkpoint from the Hugging Face Hub into a new directory, and check it as if it were to be published.

Every file is compared with the Hub's checksum, and the model is loaded in a process without this package.
"""

import argparse
import shutil
from pathlib import Path

from common.command_io import UserError, new_directory, new_path, run_cli


def parse_arguments() -> argparse.Namespace:
    example = "example: %(prog)s me/smollm2-iha smollm2-iha --revision v1"
    parser = argparse.ArgumentParser(description=__doc__, epilog=example)
    parser.add_argument("repo_id", help="repository on the Hub, such as me/smollm2-iha")
    parser.add_argument("directory", metavar="dir", type=new_path, help="new directory")
    parser.add_argument("--revision", default="main", help="commit, tag or branch, main by default")
    parser.add_argument("--trust-code", action="store_true", help="run code that is not this package's")
    return parser.parse_args()


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from huggingface_hub import HfApi, constants
from transformers.utils import CONFIG_NAME

from common.checkpoint_io import load_in_clean_process
from hub.checks import check_checkpoint, checkpoint_files, refuse_names, refuse_pickles
from hub.client import check_repo_id, commit_of, download, hub_api, hub_errors, snippet


def pull(repo_id: str, directory: Path, revision: str = "main", trust_code: bool = False) -> str:
    """Fetch the repository `repo_id` at a commit, tag or branch into the new `directory` and return the commit.

    What was downloaded stays in the Hub's cache, so a call that was stopped goes on from there. Raise `UserError` if
    the Hub refuses, a file differs from the Hub's checksum, or the checkpoint does not pass `check_checkpoint`.
    """
    check_repo_id(repo_id)
    with new_directory(directory) as temporary:
        with hub_errors(f"Fetching {repo_id}"):
            api = hub_api()
            commit = commit_of(api, repo_id, revision)
            names = api.list_repo_files(repo_id, revision=commit)
            refuse_pickles(repo_id, names)
            refuse_names(repo_id, names)
            if CONFIG_NAME not in names:
                raise UserError(f"{repo_id} holds no {CONFIG_NAME}: expected the repository of a saved model.")
            print(f"Fetching {repo_id} at {commit}", flush=True)
            _copy_whole(api, repo_id, commit, temporary)
        try:
            checkpoint_files(temporary)
            check_checkpoint(temporary, trust_code)
            print(f"Loading {repo_id} at {commit} in a clean process", flush=True)
            loaded = load_in_clean_process(temporary)
        except UserError as error:  # the directory goes with it
            raise UserError(str(error).replace(str(temporary), repo_id)) from error
    what = f"{loaded['model_class']}, {loaded['parameters']:,} parameters"
    print(f"{directory}: {what}; every file is as the Hub has it")
    print(f"Revision: {commit}\n\n{snippet(repo_id, commit)}")
    return commit


def _copy_whole(api: HfApi, repo_id: str, commit: str, directory: Path) -> None:
    """Download the files of a commit to the Hub's cache, copy them and compare them with the Hub's checksums.

    Download files that were damaged in the cache once more. Raise `UserError`.
    """
    cache = constants.HF_HUB_CACHE
    damaged: list[str] = []
    for _ in range(2):
        for path in damaged:
            api.hf_hub_download(repo_id, path, revision=commit, cache_dir=cache, force_download=True)
        shutil.copytree(download(api, repo_id, commit), directory, dirs_exist_ok=True)
        found = api.verify_repo_checksums(repo_id, revision=commit, local_dir=directory)
        damaged = [mismatch["path"] for mismatch in found.mismatches] + found.missing_paths
        if not damaged:
            return
    raise UserError(f"{', '.join(damaged)} of {repo_id} at {commit} cannot be fetched whole: try again later.")


def main() -> None:
    pull(**vars(parse_arguments()))


if __name__ == "__main__":
    run_cli(main)
