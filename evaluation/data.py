"""The benchmarks' rows and texts: from a directory, every file checked against the manifest, or from the Hub."""

import os
from functools import cache
from pathlib import Path

from common import command_io
from common.command_io import UserError, one_line, read_json, read_jsonl


MANIFEST = read_json(Path(__file__).with_name("data_manifest.json"))
# A few hand-made rows of each benchmark in the layout of a data directory. They travel with the repository.
SMOKE = Path(__file__).with_name("smoke_data")


file_sha256 = cache(command_io.file_sha256)  # text of many megabytes is asked for by every task


def locate(name: str, directory: str | os.PathLike) -> Path:
    """The file `name` of the manifest inside the data directory.

    Raises `UserError` when it is missing or is not the file of the manifest. A file whose SHA-256 the manifest does
    not know, because nobody had it when the manifest was written, is taken as it is; the results record its hash.
    """
    path = Path(directory).expanduser() / name
    if not path.is_file():
        raise UserError(
            f"{path} is missing ({MANIFEST[name]['source']}): put it there, choose another --data, or leave out the "
            f"tasks that need it with --tasks."
        )
    expected = MANIFEST[name]["sha256"]
    if expected and Path(directory).resolve() != SMOKE and (found := file_sha256(path)) != expected:
        raise UserError(
            f"{path} has SHA-256 {found[:12]}..., expected {expected[:12]}... as in evaluation/data_manifest.json: "
            f"get it again from {MANIFEST[name]['source']}."
        )
    return path


def rows(name: str, directory: str | os.PathLike | None) -> list[dict]:
    """The rows of the JSON-lines file `name` of the manifest; without a `directory`, of its copy on the Hub.

    Raises `UserError` when they cannot be had, and when the Hub's copy has another number of rows.
    """
    if directory is not None:
        return list(read_jsonl(locate(name, directory)))
    if "hub" not in (entry := MANIFEST[name]):
        raise UserError(f"{name} is not on the Hub in this form ({entry['source']}): give a directory with --data.")
    from datasets import load_dataset

    try:
        loaded = load_dataset(**entry["hub"]).to_list()
    # Without a network, an account or the repository the errors are of many types.
    except Exception as error:
        raise UserError(f"{entry['hub']['path']} cannot be read from the Hub: {one_line(error)}") from error
    if len(loaded) != entry["rows"]:
        raise UserError(f"{entry['hub']['path']} on the Hub has {len(loaded)} rows, expected {entry['rows']}.")
    return loaded


def text(name: str, directory: str | os.PathLike | None) -> str:
    """The text of the file `name` of the manifest. Raises `UserError`."""
    if directory is None:
        raise UserError(f"{name} is not on the Hub in this form ({MANIFEST[name]['source']}): use --data.")
    return locate(name, directory).read_text(encoding="utf-8", errors="replace")
