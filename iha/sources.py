"""Find the checkpoint that a user names: a directory, a GGUF file or an id on the Hub."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from iha.errors import UserError, one_line
from iha.files import expanded


@dataclass(frozen=True)
class Source:
    """Hold where a checkpoint lies. `find_source` makes it where a name comes in, and what reads checkpoints takes it.

    Attributes:
        name: what the user gave.
        location: the first argument of `from_pretrained`: a directory or a Hub id.
        gguf_file: the name of a GGUF file in the directory, or `None`.
        revision: a revision of a Hub id, or `None` for its main branch.
    """

    name: str
    location: str
    gguf_file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path | None:
        """Return the directory or the GGUF file, or `None` for a Hub id."""
        path = Path(self.location, self.gguf_file or "")
        return path if path.exists() else None

    @property
    def arguments(self) -> dict[str, str]:
        """Return the keyword arguments of `from_pretrained`."""
        given = {"gguf_file": self.gguf_file, "revision": self.revision}
        return {name: value for name, value in given.items() if value is not None}


def find_source(name: str | os.PathLike, revision: str | None = None) -> Source:
    """Find a checkpoint. Raise `UserError` as `locate` and `check_on_hub` do."""
    found = replace(locate(name), revision=revision)
    check_on_hub(found.location)
    return found


def locate(source: str | os.PathLike) -> Source:
    """Return where `source` lies, without asking the Hub.

    Raise `UserError` for anything but a directory, GGUF file or Hub id, and for a name in a folder that exists, which
    is a mistyped path.
    """
    name = str(source)
    path = expanded(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{source} does not exist: expected a GGUF file.")
        return Source(name, str(path.parent), path.name)
    if path.is_dir():
        return Source(name, str(path))
    if path.is_file():
        raise UserError(f"{source} is a file: expected its directory, {path.parent}, or a GGUF file.")
    if path.parent != Path() and path.parent.is_dir():  # asking the Hub takes a minute without a network
        there = f"{path.parent} is one: expected a directory in it, or a Hub id such as org/name."
        raise UserError(f"{source} is not a directory, and {there}")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(f"{source} is neither a directory, nor a GGUF file, nor a Hub id such as org/name.") from None
    return Source(name, name)


def check_on_hub(source: str) -> None:
    """Reject a Hub id that the Hub does not have, or that is not in the cache where the Hub does not answer.

    It asks the Hub once. Transformers would ask for several files, and for each of them six times within 23 s.
    Raise `UserError`.
    """
    if os.path.isdir(source) or try_to_load_from_cache(source, "config.json") is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json"))
    except GatedRepoError:
        raise UserError(f"{source} is gated: ask for access on its page, and log in (hf auth login).") from None
    except RepositoryNotFoundError:
        hidden = "or shows it to nobody without a token (hf auth login)"
        raise UserError(f"{source} is not a directory, and the Hub has no such model, {hidden}.") from None
    except HfHubHTTPError:
        pass  # such as a server that is busy, which Transformers asks again, or a repository without that file
    except Exception as error:  # its type depends on the library that holds the connection
        wrong = f"{source} is not a directory, and the Hub does not answer: {one_line(error).rstrip('.')}"
        raise UserError(f"{wrong}. Give a directory, or a Hub id and a network.") from error
