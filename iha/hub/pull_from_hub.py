"""Fetch a checkpoint from the Hugging Face Hub into a new directory, and check it as if it were to be published."""

import shutil
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi
from transformers.utils import CHAT_TEMPLATE_DIR, CONFIG_NAME

from iha.errors import UserError
from iha.files import new_directory
from iha.foreign_code import CUSTOM_GENERATE

from .checkpoint_checks import check_checkpoint, loading_code


# A load of the root reads no other folder. `custom_generate` is fetched to be rejected, or to be run if trusted.
FOLDERS = (".", ".eval_results", CHAT_TEMPLATE_DIR, str(PurePosixPath(CUSTOM_GENERATE).parent))
PICKLES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}


def fetch(repo_id: str, directory: str, revision: str, trust_code: bool) -> str:
    """Fetch the repository `repo_id` at a commit, tag or branch into the new `directory`, and return the commit.

    Downloaded files stay in the Hub's cache, so a call that was stopped goes on from there. Raise `UserError` if a
    file differs from the Hub's checksum or the checkpoint does not pass `check_checkpoint`, and the client's errors
    where the Hub rejects the request.
    """
    api = HfApi()
    with new_directory(directory) as temporary:
        info = api.model_info(repo_id, revision=revision, timeout=10)  # the other calls would wait for ever
        names = [PurePosixPath(file.rfilename) for file in info.siblings]
        wanted = {str(name) for name in names if str(name.parent) in FOLDERS and name.suffix.lower() not in PICKLES}
        if CONFIG_NAME not in wanted:
            raise UserError(f"{repo_id} holds no {CONFIG_NAME}: expected the repository of a saved model.")
        print(f"Fetching {repo_id} at {info.sha}", flush=True)
        if others := sorted({str(name) for name in names} - wanted):
            print(f"Not part of a checkpoint, not fetched: {', '.join(others)}", flush=True)
        cached = api.snapshot_download(repo_id, revision=info.sha, allow_patterns=sorted(wanted))
        for name in wanted:
            (temporary / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(cached, name), temporary / name)
        found = api.verify_repo_checksums(repo_id, revision=info.sha, local_dir=temporary)
        if damaged := [mismatch["path"] for mismatch in found.mismatches]:
            advice = f"remove it from the cache (hf cache rm model/{repo_id}) and pull again"
            raise UserError(f"{', '.join(damaged)} of {repo_id} differs from the Hub's checksum: {advice}.")
        loaded = check_checkpoint(temporary, repo_id, trust_code)
    what = f"{loaded['model_class']}, {loaded['parameters']:,} parameters"
    print(f"{directory}: {what}; every file that was fetched is as the Hub has it")
    print(f"Revision: {info.sha}\n\n{loading_code(repo_id, info.sha)}")
    return info.sha
