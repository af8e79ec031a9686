"""Generated samples on disk, so that a killed run continues and more samples add to those that are there."""

import fcntl
import hashlib
import json
import os
from pathlib import Path

from common.command_io import UserError


def sample_key(task: str, document: str, prompt: str, settings: dict, index: int) -> tuple[str, str, int]:
    """(task, hash, index) of one sample: what was asked, with which settings, and the how manieth answer it is."""
    question = json.dumps([document, prompt, settings], sort_keys=True, ensure_ascii=False)
    return task, hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()[:16], index


class Records:
    """One JSON line a sample, appended and flushed as soon as it is generated, in one file per process.

    Reads what every process of this run or an earlier one has written to `directory`, so shards and other numbers of
    processes share their samples. The half-written last line of a killed process is dropped.

    Raises `UserError` when another process is writing the same file, and for a damaged line.
    """

    def __init__(self, directory: str | os.PathLike, rank: int = 0):
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank{rank}.jsonl"
        self._file = open(path, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another run is writing {path}: wait for it, or choose another --output.") from None
        self._file.seek(0)
        whole = self._file.read().rfind(b"\n") + 1
        self._file.truncate(whole)
        self._samples: dict[tuple[str, str, int], dict] = {}
        for other in sorted(directory.glob("rank*.jsonl")):
            self._read(other)

    def _read(self, path: Path) -> None:
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # the last one is empty or half a line
            try:
                row = json.loads(line)
                if not isinstance(row["text"], str):
                    raise TypeError
                self._samples[row["task"], row["hash"], row["sample"]] = row
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}, line {number}: not a recorded sample. Remove the line to go on.") from None

    def __len__(self) -> int:
        return len(self._samples)

    def get(self, key: tuple[str, str, int]) -> dict | None:
        return self._samples.get(key)

    def add(self, key: tuple[str, str, int], **fields) -> None:
        row = dict(zip(("task", "hash", "sample"), key)) | fields
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        self._samples[key] = row

    def of_task(self, task: str) -> list[dict]:
        return [row for row in self._samples.values() if row["task"] == task]

    def close(self) -> None:
        self._file.close()
