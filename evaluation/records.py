"""Keep generated samples on disk, so that a killed run continues and more samples add to those that are there."""

import hashlib
import json
import os
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from common.command_io import open_regular, parse_row


def sample_key(task: str, document: str, prompt: str, settings: dict, index: int) -> tuple[str, str, int]:
    """Return the key of one sample: its task, a hash of what was asked with which settings, and its number."""
    question = json.dumps([document, prompt, settings], sort_keys=True, ensure_ascii=False)
    return task, hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()[:16], index


class Sample(TypedDict):
    """Name the fields of a recorded sample that are read again."""

    task: str
    hash: str
    sample: int
    text: str
    unfinished: bool
    commit: NotRequired[str]


class Records(dict):
    """Keep samples by key, and one JSON line of each, flushed as soon as it is generated, in one file per process.

    Every file of `directory` is read, so processes and runs share their samples. The half-written last line of a
    killed process is dropped. A new line holds `commit`, that of the code that makes the sample. The caller sees to it
    that no other run writes here. Raise `UserError` for a damaged line.
    """

    def __init__(self, directory: str | os.PathLike, rank: int = 0, commit: str = "unknown"):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._commit = commit
        self._file = open(directory / f"rank{rank}.jsonl", "a+b")
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)
        for path in sorted(directory.glob("rank*.jsonl")):
            with open_regular(path) as file:
                lines = file.read().split(b"\n")[:-1]  # the last one is empty or half a line
            for number, line in enumerate(lines, 1):
                row = parse_row(line, f"{path}, line {number}, which to go on remove", Sample)
                self[row["task"], row["hash"], row["sample"]] = row

    def add(self, key: tuple[str, str, int], **fields) -> None:
        self[key] = dict(zip(("task", "hash", "sample"), key)) | {"commit": self._commit} | fields
        self._file.write(json.dumps(self[key]).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
