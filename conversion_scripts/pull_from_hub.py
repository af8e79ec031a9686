"""Fetch a checkpoint from the Hugging Face Hub into a new directory, and check it as if it were to be published.

Every file is compared with the Hub's checksum, and the model is loaded in a process without this package.
"""

import os
import shutil
from collections.abc import Sequence

from huggingface_hub import HfApi
from transformers.utils import CONFIG_NAME

from iha.arguments import check_pull, pull_arguments
from iha.errors import UserError, run_cli
from iha.files import checked, new_directory
from iha.processes import load_in_clean_process

from .checkpoint_checks import check_checkpoint, checkpoint_files, loading_code, refuse_pickles


@checked
def pull(repo_id: str, directory: str | os.PathLike, revision: str = "main", trust_code: bool = False) -> str:
    """Fetch the repository `repo_id` at a commit, tag or branch into the new `directory`, and return the commit.

    With `trust_code`, code that is not this package's is run. Downloaded files stay in the Hub's cache, so a call
    that was stopped goes on from there. Raise `UserError` if a file differs from the Hub's checksum or the checkpoint
    does not pass `check_checkpoint`, and the client's errors where the Hub refuses.
    """
    check_pull(repo_id, directory)
    api = HfApi()
    with new_directory(directory) as temporary:
        info = api.model_info(repo_id, revision=revision)
        names = [file.rfilename for file in info.siblings]
        refuse_pickles(repo_id, names)
        if CONFIG_NAME not in names:
            raise UserError(f"{repo_id} holds no {CONFIG_NAME}: expected the repository of a saved model.")
        print(f"Fetching {repo_id} at {info.sha}", flush=True)
        # From the cache, and not into the directory itself: what was transferred outlives a call that is stopped.
        shutil.copytree(api.snapshot_download(repo_id, revision=info.sha), temporary, dirs_exist_ok=True)
        found = api.verify_repo_checksums(repo_id, revision=info.sha, local_dir=temporary)
        advice = f"remove it from the cache (hf cache rm model/{repo_id}) and pull again"
        if found.extra_paths:
            raise UserError(
                f"{', '.join(found.extra_paths)} is in the cache of {repo_id} and not on the Hub: {advice}."
            )
        if damaged := [mismatch["path"] for mismatch in found.mismatches] + found.missing_paths:
            raise UserError(f"{', '.join(damaged)} of {repo_id} differs from the Hub's checksum: {advice}.")
        try:
            checkpoint_files(temporary)
            check_checkpoint(temporary, trust_code)
            print(f"Loading {repo_id} at {info.sha} in a clean process", flush=True)
            loaded = load_in_clean_process(temporary)
        except UserError as error:  # the directory goes with it
            raise UserError(str(error).replace(str(temporary), repo_id)) from error
    what = f"{loaded['model_class']}, {loaded['parameters']:,} parameters"
    print(f"{directory}: {what}; every file is as the Hub has it")
    print(f"Revision: {info.sha}\n\n{loading_code(repo_id, info.sha)}")
    return info.sha


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    pull(**pull_arguments(argv))


if __name__ == "__main__":
    run_cli(main)
