"""Read the benchmarks' rows and texts, and return them as lm-eval's {split: rows}.

They come from a data directory, whose files are checked against the manifest, or from the Hub. The YAML of a task
names `files`, `dcformer_synthetic` or `text_windows` under `custom_dataset`. lm-eval calls that function with the
task's `metadata` and `dataset_kwargs`.
"""

import os
import re
from functools import cache
from pathlib import Path

from datasets import Dataset, load_dataset

from evaluation.options import SMOKE
from iha import files
from iha.errors import UserError, refusing
from iha.files import read_json, read_jsonl


MANIFEST = read_json(Path(__file__).with_name("data_manifest.json"))


file_sha256 = cache(files.file_sha256)  # because every task asks for texts of many megabytes


def locate(name: str, directory: str | os.PathLike) -> Path:
    """Return the path of the file `name` of the manifest inside the data directory.

    Raise `UserError` if it is missing or is not the file of the manifest.
    """
    path = Path(directory) / name
    if not path.is_file():
        raise UserError(
            f"{path} is missing ({MANIFEST[name]['source']}): put it there, choose another --data, or leave out the "
            f"tasks that need it with --tasks."
        )
    expected = MANIFEST[name]["sha256"]
    is_smoke = Path(directory).resolve() == SMOKE
    found = expected if is_smoke else file_sha256(path)
    if found != expected:
        raise UserError(
            f"{path} has SHA-256 {found[:12]}..., expected {expected[:12]}... as in evaluation/data_manifest.json: "
            f"get it again from {MANIFEST[name]['source']}."
        )
    return path


def rows(name: str, directory: str | os.PathLike | None) -> list[dict]:
    """Return the rows of the JSON-lines file `name` of the manifest, or without a `directory` of its copy on the Hub.

    Raise `UserError` if they cannot be read, and if the Hub's copy has another number of rows.
    """
    if directory is not None:
        return list(read_jsonl(locate(name, directory)))
    entry = MANIFEST[name]
    if "hub" not in entry:
        raise UserError(f"{name} is not on the Hub in this form ({entry['source']}): give a directory with --data.")
    with refusing(f"{entry['hub']['path']} cannot be read from the Hub", Exception):  # its clients raise many types
        loaded = load_dataset(**entry["hub"]).to_list()
    if len(loaded) != entry["rows"]:
        raise UserError(f"{entry['hub']['path']} on the Hub has {len(loaded)} rows, expected {entry['rows']}.")
    return loaded


def text(name: str, directory: str | os.PathLike | None) -> str:
    """Return the text of the file `name` of the manifest. Raise `UserError`."""
    if directory is None:
        raise UserError(f"{name} is not on the Hub in this form ({MANIFEST[name]['source']}): use --data.")
    return locate(name, directory).read_text(encoding="utf-8", errors="replace")


def checksums(directory: Path | None, text_file: Path | None) -> dict[str, str]:
    """Return the SHA-256 of the text `--text` and of each data file in the directory `--data`."""
    found = {} if text_file is None else {text_file.name: file_sha256(text_file)}
    if directory is not None:
        found |= {name: file_sha256(directory / name) for name in MANIFEST if (directory / name).is_file()}
    return found


# Functions that a task names under `custom_dataset`


def files(files: dict[str, str], data_directory=None, **_) -> dict[str, Dataset]:
    """Return the rows of `files`, {split: name in the manifest}."""
    return {split: Dataset.from_list(rows(name, data_directory)) for split, name in files.items()}


def dcformer_synthetic(data_directory=None, **_) -> dict[str, Dataset]:
    """Return each bracketed word of DCFormer's synthetic texts as a target, with the lines before it as its shots.

    There are 888 texts of eight lines. The last six lines of each have a target, which gives 5,328 rows {"context",
    "target", "shots"} with 2 to 7 shots (Xiao et al., "Improving Transformers with Dynamically Composable Multi-Head
    Attention", section 4.3). lm-eval's standard error takes the rows as independent. It is too small, because six rows
    share a text.
    """
    targets = []
    for entry in rows("dcformer/synthetic_dataset.jsonl", data_directory):
        before = ""
        for shots, line in enumerate(entry["texts"].strip().split("\n")):
            if found := re.search(r"\[ (.+?) \]", line):
                context = before + line[: found.start()]
                targets.append({"context": context.rstrip(), "target": f" {found.group(1)}", "shots": shots})
            before += re.sub(r"\[ (.+?) \]", r"\1", line) + "\n"
    return {"test": Dataset.from_list(targets)}


def text_windows(
    data_directory, length, windows=20, tokenizer=None, text_file=None, limit=None, **_
) -> dict[str, Dataset]:
    """Return disjoint stretches of long text, of about `length` tokens of `tokenizer` each: {"text", "mean_bytes"}.

    The tokenizer must say where its tokens lie in a text, as fast tokenizers do. There are at most `windows` stretches
    and at most `limit`. A `text_file` is read to its end, but for a last stretch that is shorter. "mean_bytes" is the
    mean over all stretches of the bytes that are predicted: those after the first token, or all of them behind a token
    that the tokenizer puts first. Raise `UserError` for a text that is shorter than a stretch.
    """
    if text_file is None:
        whole = text("text/state_union.txt", data_directory)
    else:
        whole = text_file.read_text(encoding="utf-8", errors="replace")
        windows = len(whole)
    windows = min(windows, limit or windows)
    begins = tokenizer("a")["input_ids"][0] != tokenizer("a", add_special_tokens=False)["input_ids"][0]
    found: list[str] = []
    predicted = 0
    start = 0
    while len(found) < windows:
        # 16 characters for each token are enough: most texts have one token for four bytes.
        piece = whole[start : start + 16 * length]
        offsets = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][:length]
        if len(offsets) < length:
            break  # the text ends
        first, last = 0 if begins else offsets[0][1], offsets[-1][1]
        found.append(piece[:last])
        predicted += len(piece[first:last].encode())
        start += last
    if not found:
        raise UserError(f"{text_file or 'The text'} has {len(offsets)} tokens: lower --lengths from {length}.")
    return {"test": Dataset.from_dict({"text": found, "mean_bytes": [predicted / len(found)] * len(found)})}
