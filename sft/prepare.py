"""Prepare rows for training once: convert, filter, deduplicate and tokenize them."""

import argparse
import hashlib
import json
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from iha_io.command_io import UserError, file_sha256, new_directory, one_line, read_json, run_cli, write_json


EXAMPLE = """
OUT_DIR is what sft/train.py takes as dataset_name. It holds the rows and manifest.json, which says what they were made
from and what was dropped. Rows are stored whole: a run cuts or packs them at its own max_length. A command that was
stopped continues from the last finished step when it is given again; the steps are kept in the cache of the datasets
library.

example:
  python -m sft.prepare open-thoughts/OpenThoughts3-1.2M data/openthoughts3 --tokenizer checkpoints/qwen2.5-7b-iha \\
      --chat-template sft/chat_templates/chatml.jinja --max-length 16384 --where domain=math domain=code
"""


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected COLUMN=VALUE, got {text!r}")
    return name, value


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", help="a .jsonl, .parquet or .txt file or a folder of such, or the id of a dataset on the Hub")
    add("out", type=Path, metavar="OUT_DIR", help="the directory to make")
    add("--tokenizer", required=True, metavar="MODEL", help="the model to train: its tokenizer and chat template")
    add(
        "--chat-template",
        metavar="FILE",
        help="a .jinja file in place of the tokenizer's own (see sft/chat_templates)",
    )
    add("--split", default="train", help="split to read of a dataset on the Hub (default train)")
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens at which the run will cut, for the report; rows without a token to learn within them are dropped",
    )
    add(
        "--where",
        type=_pair,
        nargs="+",
        default=[],
        metavar="COLUMN=VALUE",
        help="keep rows with this value in this "
        "column, such as source or domain; several values of one column are alternatives",
    )
    add("--min-tokens", type=int, default=1, metavar="N", help="drop shorter rows (default 1)")
    add("--max-tokens", type=int, metavar="N", help="drop longer rows")
    add(
        "--drop-bad-rows",
        action="store_true",
        help="drop and count rows that are no conversation or text, instead of refusing them",
    )
    add("--learn-all", action="store_true", help="learn prompts too, for runs with assistant_only_loss: false")
    add("--num-proc", type=int, metavar="N", help="processes that tokenize (default one)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import numpy as np
from datasets import Dataset, Features, Value, load_from_disk
from datasets import config as datasets_config
from transformers import PreTrainedTokenizerBase

from iha_io.checkpoint_io import load_tokenizer
from sft.arguments import read_chat_template
from sft.data import (
    KINDS,
    PROMPT,
    Convert,
    check_split,
    column,
    cut_summary,
    kind_of,
    load_rows,
    local_files,
    row_kind,
    to_row,
    tokenize,
)


MANIFEST, ROWS = "manifest.json", "rows"
PERCENTILES = (1, 5, 25, 50, 75, 95, 99, 100)


# What was prepared


def is_prepared(name: str) -> bool:
    """Return whether `name` is a directory that this command made."""
    return (Path(name) / MANIFEST).is_file()


def prepared_files(directory: Path) -> list[Path]:
    """Return the files that hold what was prepared. Nothing else in the directory is read."""
    return [directory / MANIFEST, *(directory / ROWS).glob("*.json"), *(directory / ROWS).glob("data-*.arrow")]


def fingerprints(tokenizer: PreTrainedTokenizerBase, kind: str, assistant_only: bool) -> dict:
    """Return the entries of the manifest that say what token columns depend on besides the rows."""
    template = str(tokenizer.chat_template) if kind == "messages" else None
    return {
        "kind": kind,
        "assistant_only_loss": assistant_only,
        "tokenizer": _tokenizer_hash(tokenizer, template or "eos_token"),
        "chat_template": template and _hash(template),
    }


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase, names: str) -> str:
    """Hash the tokenizer, and its special tokens such as eos_token that are in `names`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    for state in ("truncation", "padding"):  # of the last call, not of the tokenizer
        content.pop(state, None)
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if name in names}
    return _hash(json.dumps([content, special], sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def load_prepared(directory: str, tokenizer: PreTrainedTokenizerBase, assistant_only: bool) -> Dataset:
    """Return the tokenized rows of a prepared directory.

    Raise `UserError` when they were made for another tokenizer, chat template or loss, or are not whole.
    """
    manifest = read_json(Path(directory) / MANIFEST)
    made_for = fingerprints(tokenizer, manifest.get("kind"), assistant_only)
    different = [name for name, value in made_for.items() if manifest.get(name) != value]
    if different:
        raise UserError(f"{directory} was prepared with another {' and '.join(different)}: prepare the rows again.")
    linked = _linked(Path(directory))
    try:
        rows = load_from_disk(str(linked))
    except Exception as error:  # as many types as there are ways to damage a file
        raise UserError(f"{directory} cannot be read: {one_line(error)}. Prepare the rows again.") from error
    if len(rows) != manifest.get("rows"):
        raise UserError(f"{directory} holds {len(rows)} rows, its manifest {manifest.get('rows')}: prepare it again.")
    return rows


def _linked(directory: Path) -> Path:
    """Link the rows of a prepared directory into the cache of the datasets library, and return where.

    datasets writes what a run makes of rows (cut, packed, held out) beside their files: into a directory that may be
    read-only, and that other runs know by its content.
    """
    cache = Path(datasets_config.HF_DATASETS_CACHE) / "prepared" / _hash(str(directory.resolve()))
    cache.mkdir(parents=True, exist_ok=True)
    for file in prepared_files(directory):
        with suppress(FileExistsError):
            (cache / file.name).symlink_to(file.resolve())
    return cache


# Preparing


def digest(row: dict) -> str:
    """Hash what a row asks and answers, whatever its system prompt, white space and Unicode form."""
    if "text" in row:
        parts = [row["text"]]
    else:
        parts = [part for turn in row["messages"] if turn["role"] != "system" for part in turn.values()]
    return _hash("\0".join(" ".join(unicodedata.normalize("NFC", part).split()) for part in parts))


def _convert(row: dict, where: str, kind: str, columns: tuple[str, ...], drops_bad_rows: bool) -> dict:
    if missing := [name for name in columns if name not in row]:
        raise UserError(f"{where}: --where names the column {missing[0]!r}; the row has {sorted(row)}.")
    values = {f"where {name}": str(row[name]).encode(errors="replace").decode() for name in columns}
    try:
        converted = to_row(row, where, kind)
    except UserError as error:
        if not drops_bad_rows:
            raise
        nothing = {kind: [] if kind == "messages" else "", "prompt_size": 0, "digest": ""}
        return {**nothing, **values, "problem": str(error)}
    return {**converted, **values, "problem": "", "digest": digest(converted)}


def _keep(rows: Dataset, why_dropped: Callable[[dict], str | None], columns: list[str], dropped: Counter) -> Dataset:
    """Return the rows for which `why_dropped` gives no reason, and count the others in `dropped`."""
    kept = []
    for index, row in enumerate(rows.select_columns(columns)):
        if reason := why_dropped(row):
            dropped[reason] += 1
        else:
            kept.append(index)
    if not kept:
        raise UserError(f"no row is left; dropped were {_listed(dropped)}.")
    return rows.select(kept)


def _listed(counts: Counter) -> str:
    return ", ".join(f"{count:,} ({reason})" for reason, count in sorted(counts.items())) or "none"


def prepare(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Counter]:
    """Return the tokenized rows of `args.source` that are kept, and how many were dropped for which reason."""
    wanted = {name: {value for other, value in args.where if other == name} for name, _ in args.where}
    columns = [*(f"where {name}" for name in wanted), "problem", "digest"]

    def schema(first: dict) -> tuple[Convert, Features]:
        kind = row_kind(first)
        convert = partial(_convert, kind=kind, columns=tuple(wanted), drops_bad_rows=args.drop_bad_rows)
        return convert, Features({kind: KINDS[kind], **PROMPT, **dict.fromkeys(columns, Value("string"))})

    rows = load_rows(args.source, args.split, schema=schema)
    dropped, seen = Counter(), set()

    def why_dropped(row: dict) -> str | None:
        if row["problem"]:
            return "bad rows"
        for name, values in wanted.items():
            if row[f"where {name}"] not in values:
                return f"another {name}"
        if row["digest"] in seen:
            return "duplicates"
        seen.add(row["digest"])

    rows = _keep(rows, why_dropped, columns, dropped).remove_columns(columns)
    rows = tokenize(rows, tokenizer, kind_of(rows) == "messages" and not args.learn_all, args.num_proc)

    def why_dropped_by_tokens(row: dict) -> str | None:
        if row["num_tokens"] < args.min_tokens:
            return "fewer than min_tokens"
        if args.max_tokens is not None and row["num_tokens"] > args.max_tokens:
            return "more than max_tokens"
        if row["first_label"] < 0 or (args.max_length is not None and row["first_label"] >= args.max_length):
            return "no token to learn within max_length"

    return _keep(rows, why_dropped_by_tokens, ["num_tokens", "first_label"], dropped), dropped


def make_manifest(
    rows: Dataset, dropped: Counter, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> dict:
    """Return what the rows were made from and for, and what was dropped.

    It holds no path and no time: the same input gives the same manifest.
    """
    files, kind = local_files(args.source), kind_of(rows)
    options = ("where", "min_tokens", "max_tokens", "max_length", "drop_bad_rows")
    return {
        **fingerprints(tokenizer, kind, kind == "messages" and not args.learn_all),
        "source": Path(args.source).name if files else args.source,
        "split": None if files else args.split,
        "files": {file.name: file_sha256(file) for file in files},
        "options": {name: getattr(args, name) for name in options},
        "rows": len(rows),
        "tokens": int(column(rows, "num_tokens").sum()),
        "dropped": dropped,
    }


# The command


def main(argv: Sequence[str] | None = None) -> None:
    """Write the directory the command line asks for, whole or not at all. Raise `UserError`."""
    args = parse_arguments(argv)
    with new_directory(args.out) as directory:
        local_files(args.source)
        check_split(args.source, args.split)
        tokenizer = load_tokenizer(args.tokenizer, sys.maxsize)
        if args.chat_template is not None:
            tokenizer.chat_template = read_chat_template(args.chat_template)
        rows, dropped = prepare(args, tokenizer)
        rows.save_to_disk(str(directory / ROWS))
        manifest = make_manifest(rows, dropped, args, tokenizer)
        write_json(directory / MANIFEST, manifest)
    num_tokens = column(rows, "num_tokens")
    print(f"Dropped: {_listed(dropped)}.\n{manifest['rows']:,} rows of {manifest['tokens']:,} tokens: {args.out}")
    percentiles = np.percentile(num_tokens, PERCENTILES, method="inverted_cdf")
    print("Percentiles of the length: " + ", ".join(f"{p}%: {n:,}" for p, n in zip(PERCENTILES, percentiles)) + ".")
    if args.max_length is not None:
        print(cut_summary(num_tokens, args.max_length))


if __name__ == "__main__":
    run_cli(main)
