"""Speak to the Hub with time-outs, one line for every refusal, and downloads that a load by id finds."""

import glob
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, set_client_factory
from huggingface_hub.utils import HFValidationError, validate_repo_id
from huggingface_hub.utils._http import default_client_factory

from common.command_io import UserError, one_line, refusing


TIMEOUT = 120  # seconds without a byte; by itself the client waits for ever
AGAIN = "run the command again, what was transferred is kept"
# What somebody can do about an answer of the Hub.
ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a valid token; a private repository needs one to be seen",
    403: "use a token that may do this; a gated model asks for access on its page, and an account may be full",
    404: "check the name and the revision; a private repository needs a token that may read it",
    409: "somebody made the same thing meanwhile: run the command again",
    412: "somebody committed meanwhile: see what is there now, then run the command again",
    429: f"too many requests: wait some minutes, then {AGAIN}",
}


def hub_api() -> HfApi:
    """Return the Hub's client, with time-outs."""
    set_client_factory(_client_with_timeouts)
    return HfApi()


def _client_with_timeouts():
    client = default_client_factory()
    client.timeout = TIMEOUT
    return client


@contextmanager
def hub_errors(doing: str) -> Iterator[None]:
    """Turn whatever the client raises while `doing` into a `UserError` that says what to do.

    Its errors have many types: of HTTP, of the network, of uploads in threads, and of answers that cannot be read.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{doing} failed: {_explanation(error)}") from error


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status behind an error of the client, or `None`."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _explanation(error: BaseException) -> str:
    """Return what happened and what to do, from an error and what it was raised from."""
    if isinstance(error, json.JSONDecodeError):
        return f"the answer is no JSON: a login page of the network, or not the Hub? Check the connection and {AGAIN}"
    text, status, cause = one_line(error), status_of(error), error.__cause__
    if isinstance(error, RuntimeError) and cause is not None:  # an upload in a thread says only which file
        return f"{text} {_explanation(cause)}"
    # The client takes any refusal for a lost connection.
    if status is None and cause is not None and status_of(cause) is not None:
        return _explanation(cause)
    # A refusal of this machine, such as a full disk or a cache of somebody else.
    is_local = isinstance(error, OSError) and error.errno and not isinstance(error, (ConnectionError, TimeoutError))
    if status is None and (is_local or isinstance(error, ValueError)):
        return text
    advice = AGAIN if status is None or status >= 500 else ADVICE.get(status)
    return f"{text.rstrip('.')}: {advice}" if advice else text


def check_repo_id(repo_id: str) -> None:
    """Raise `UserError` unless this could be a repository's id."""
    with refusing(f"{repo_id!r} is no repository id", HFValidationError):
        validate_repo_id(repo_id)


def commit_of(api: HfApi, repo_id: str, revision: str | None = None) -> str:
    """Return the id of the commit that a tag or branch names, by default the main branch."""
    return api.repo_info(repo_id, revision=revision).sha  # the Hub always names it


def download(api: HfApi, repo_id: str, revision: str, names: list[str] | None = None) -> Path:
    """Download the files of a repository at a commit, and return their folder in the Hub's cache.

    All files are downloaded, or those of these `names`, as far as the cache lacks them.
    """
    patterns = None if names is None else [glob.escape(name) for name in names]
    cache = constants.HF_HUB_CACHE
    return Path(api.snapshot_download(repo_id, revision=revision, allow_patterns=patterns, cache_dir=cache))


def snippet(repo_id: str, revision: str) -> str:
    """Return Python code that loads a checkpoint at a commit."""
    pinned = f'"{repo_id}", revision="{revision}", trust_remote_code=True'
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({pinned})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({pinned})"
    )
