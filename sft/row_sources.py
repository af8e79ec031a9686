"""Find the rows of a run: which datasets, files and splits a recipe names, and what tells them from others."""

import hashlib
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, NamedTuple

from annotated_types import Gt, MinLen
from datasets import get_dataset_split_names, load_dataset_builder
from datasets.inspect import SplitsNotFoundError
from trl import SFTConfig
from typing_extensions import TypedDict

from iha.errors import UserError, refusing
from iha.files import file_sha256, read_yaml
from sft.arguments import RunArguments


# The suffix of a file before .gz -> its reader in the datasets library.
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
MIXTURES = (".yaml", ".yml")


class RowSource(NamedTuple):
    """Name rows: a file, or a split of a configuration of a directory or of a dataset on the Hub."""

    name: str
    split: str = "train"
    config: str | None = None

    def overlaps(self, other: "RowSource") -> bool:
        """Return whether one source holds rows of the other, as far as their names tell."""
        if not is_same_place(self.name, other.name):
            return False
        if names_file(self.name):
            return True
        is_slice = self.split.startswith(f"{other.split}[") or other.split.startswith(f"{self.split}[")
        return self.config == other.config and (self.split == other.split or is_slice)


class RunData(NamedTuple):
    """Hold where a run reads its rows."""

    parts: list[RowSource]  # to train on, several in a mixture
    shares: list[float]  # of the tokens, one for each part
    eval_source: RowSource | None  # None if `eval_size` holds out rows of `parts`, or if the run does not evaluate


def data_of(run: RunArguments, args: SFTConfig) -> RunData:
    """Return where a run reads its rows, before anything is loaded.

    Raise `UserError` for keys that exclude each other, and for missing files.
    """
    # With `bfd` and `bfd_split` TRL lets `position_ids` restart at every document. The masks of eager, SDPA and
    # FlexAttention and the lengths of FlashAttention follow from them.
    if args.packing and args.packing_strategy == "wrapped":
        raise UserError("packing_strategy 'wrapped' lets documents attend to one another: use 'bfd' or 'bfd_split'.")
    _check_evaluation(run, args)
    named = parts_of_mixture(run.dataset_name)
    parts = [RowSource(name, run.dataset_train_split, run.dataset_config) for name, _ in named]
    _check_parts(parts, run, args)
    return RunData(parts, [share for _, share in named], _eval_source(parts, run, args))


def _check_parts(parts: list[RowSource], run: RunArguments, args: SFTConfig) -> None:
    """Reject sources that a run cannot train on, as far as their names tell. Raise `UserError`."""
    if run.dataset_streaming and len(parts) > 1:
        raise UserError("dataset_streaming reads one source: give no mixture.")
    if run.dataset_streaming and args.max_steps < 1:
        raise UserError(f"max_steps={args.max_steps}: dataset_streaming has no last row, so give the number of steps.")
    for part in parts:
        check_file(part.name, part.split)
        if len(parts) > 1 and is_one_row(part.name):
            raise UserError(
                f"{run.dataset_name}: {part.name} is one row, and a mixture ends with the first part that is used up: "
                "join the .txt files, or write each as rows of a .jsonl file."
            )
        _check_not_cut(part.name, args, args.packing)


def _eval_source(parts: list[RowSource], run: RunArguments, args: SFTConfig) -> RowSource | None:
    """Return the source of the rows to evaluate on, or None for a run that reads none. Raise `UserError`."""
    if run.eval_dataset_name:
        config = run.dataset_config if is_same_place(run.eval_dataset_name, run.dataset_name) else None
        source = RowSource(run.eval_dataset_name, run.dataset_test_split or "train", config)
    elif evaluates(args) and not run.eval_size:
        source = RowSource(run.dataset_name, run.dataset_test_split or "test", run.dataset_config)
    else:
        return None
    if any(part.overlaps(source) for part in parts):
        raise UserError(
            f"the run would train and evaluate on the same rows of {source.name}: name other rows, or set eval_size."
        )
    check_file(source.name, source.split)
    _check_not_cut(source.name, args, args.packing if args.eval_packing is None else args.eval_packing)
    return source


def _check_evaluation(run: RunArguments, args: SFTConfig) -> None:
    """Reject keys that do not say what to evaluate on, or say it twice. Raise `UserError`."""
    others = [name for name in ("eval_dataset_name", "dataset_test_split") if getattr(run, name)]
    if run.eval_size and others:
        raise UserError(f"{others[0]} and eval_size both say what to evaluate on: give one.")
    if run.dataset_streaming and 0 < run.eval_size < 1:
        raise UserError(f"eval_size={run.eval_size:g}: the length of a stream is not known, so give a number of rows.")
    given = {"eval_size": run.eval_size, "load_best_model_at_end": args.load_best_model_at_end}
    for name in [*others, *(name for name, value in given.items() if value)]:
        if not evaluates(args):
            raise UserError(f"{name}: this run does not evaluate: set eval_strategy, or remove the key.")
    if evaluates(args) and names_file(run.dataset_name) and not run.eval_size and run.eval_dataset_name is None:
        raise UserError(
            "eval_strategy and eval_on_start need rows to evaluate on: set eval_size or eval_dataset_name."
        )


def evaluates(args: SFTConfig) -> bool:
    """Return whether a recipe asks for an evaluation during training."""
    return args.eval_strategy != "no" or args.eval_on_start


class Part(TypedDict):
    """Hold an entry of a mixture."""

    __pydantic_config__ = {"extra": "forbid"}  # type: ignore[misc]
    path: str
    share: Annotated[float, Gt(0)]


def parts_of_mixture(dataset_name: str) -> list[tuple[str, float]]:
    """Return the name of each dataset and its share of the tokens: those that a .yaml file lists, or this one alone.

    The file holds a list of `{path: NAME, share: NUMBER}`. Raise `UserError` if the shares do not add up to 1.
    """
    if suffix_of(dataset_name) not in MIXTURES:
        return [(dataset_name, 1.0)]
    entries = read_yaml(dataset_name, Annotated[list[Part], MinLen(1)])
    total = sum(entry["share"] for entry in entries)
    if abs(total - 1) > 1e-6:
        raise UserError(f"{dataset_name}: the shares add up to {total:g}: expected 1.")
    return [(os.path.expanduser(entry["path"]), entry["share"]) for entry in entries]


def suffix_of(name: str) -> str:
    return Path(name.removesuffix(".gz")).suffix


def names_file(name: str) -> bool:
    """Return whether a source is a file or a mixture, which has neither configurations nor splits."""
    return Path(name).is_file() or suffix_of(name) in (*READERS, *MIXTURES)


def is_same_place(name: str, other: str) -> bool:
    """Return whether two names are of one dataset. A path may be written in several ways."""
    both_exist = Path(name).exists() and Path(other).exists()
    return name == other or (both_exist and Path(name).samefile(other))


def is_one_row(name: str) -> bool:
    """Return whether a source is a text file, which is one document."""
    return Path(name).is_file() and READERS.get(suffix_of(name)) == "text"


def check_file(name: str, split: str) -> None:
    """Reject a file that is not there or is empty, and a split of a file, which has none. Raise `UserError`."""
    if suffix_of(name) in READERS and not Path(name).is_file():
        raise UserError(f"{name}: no such file; expected {', '.join(READERS)}, or the id of a dataset on the Hub.")
    if Path(name).is_file() and (suffix_of(name) not in READERS or split != "train"):
        raise UserError(f"{name}, split {split!r}: expected a file {', '.join(READERS)}, which has no split.")
    if Path(name).is_file() and Path(name).stat().st_size == 0:
        raise UserError(f"{name}: it holds no rows.")


def _check_not_cut(name: str, args: SFTConfig, packs: bool) -> None:
    """Reject a text file, which is one row, if it would be cut to its first `max_length` tokens. Raise `UserError`."""
    if args.max_length is None or splits_long_rows(args, packs) or not is_one_row(name):
        return
    # A token is at least one byte, and the last token ends the text. A compressed file may hold any length.
    is_short = not name.endswith(".gz") and Path(name).stat().st_size < args.max_length
    if not is_short:
        raise UserError(
            f"{name} is one row, of which only the first max_length={args.max_length} tokens would be read: set "
            "packing to true and packing_strategy to bfd_split."
        )


def splits_long_rows(args: SFTConfig, packs: bool) -> bool:
    """Return whether long rows are split at `max_length` and not cut."""
    return packs and args.packing_strategy == "bfd_split"


def check_splits(data: RunData) -> None:
    """Reject configurations and splits that the run's datasets do not have, before the model is loaded.

    Raise `UserError`, which lists what there is.
    """
    sources = [(part, "dataset_train_split") for part in data.parts]
    if data.eval_source is not None:
        sources.append((data.eval_source, "dataset_test_split"))
    for (name, split, config), key in sources:
        if names_file(name):
            continue
        with loading(name, config):
            try:
                known = get_dataset_split_names(name, config)
            except SplitsNotFoundError:  # for archives that cannot be streamed: `load_rows` will read them whole
                continue
        # A split may be a sum of slices, such as train[:10%]+test.
        parts = [part.strip().partition("[")[0] for part in split.split("+")]
        unknown = [part for part in parts if part not in (*known, "all")]
        if unknown:
            raise UserError(f"dataset {name!r} has no split {unknown[0]!r}: set {key} to one of {', '.join(known)}.")


def loading(name: str, config: str | None) -> AbstractContextManager[None]:
    """Raise `UserError` for a dataset that cannot be found in the block, or has no such configuration."""
    what = f"cannot load dataset {name!r} (dataset_config={config})"
    return refusing(what, FileNotFoundError, ValueError, ConnectionError)


def identify_data(name: str, config: str | None = None) -> dict[str, str | None]:
    """Return the hash of a local source or of a mixture with all its parts, or the commit of a dataset on the Hub.

    The datasets library needs `config` to find a dataset that has no default configuration. Raise `UserError` if it
    finds none.
    """
    path = Path(name)
    if suffix_of(name) in MIXTURES:
        identities = [(share, identify_data(part, config)) for part, share in parts_of_mixture(name)]
        return {"sha256": hashlib.sha256(json.dumps(identities).encode()).hexdigest()}
    if path.is_file():
        return {"sha256": file_sha256(path)}
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file())
        lines = sorted(f"{file_sha256(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
        return {"sha256": hashlib.sha256("".join(lines).encode()).hexdigest()}
    with loading(name, config):
        return {"revision": load_dataset_builder(name, config).hash}
