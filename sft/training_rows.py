"""Make the rows that a run trains and evaluates on from its recipe."""

import re
from pathlib import Path

import numpy as np
from accelerate import PartialState
from datasets import Dataset, Features, IterableDataset, Value
from transformers import PreTrainedTokenizerBase, TrainingArguments
from trl import SFTConfig, SFTTrainer

from iha.checkpoints import positions_of
from iha.errors import UserError, refusing
from sft.arguments import RunArguments, evaluates
from sft.data import (
    Rows,
    RowSource,
    check_chat_template,
    check_source,
    check_split,
    is_one_row,
    load_rows,
    mix,
    sources,
)


def check_rows(run: RunArguments, args: SFTConfig) -> None:
    """Reject, before anything is loaded, keys that exclude each other and missing files. Raise `UserError`.

    With TRL's strategies `bfd` and `bfd_split`, `position_ids` restart at every document. The masks of eager, SDPA and
    FlexAttention and the lengths of FlashAttention follow from them. With `wrapped`, documents cannot be told apart.
    """
    if args.eval_packing and not args.packing:
        raise UserError("eval_packing without packing would join the held-out rows: set both or neither.")
    if args.packing and args.packing_strategy == "wrapped":
        raise UserError("packing_strategy 'wrapped' lets documents attend to one another: use 'bfd' or 'bfd_split'.")
    if args.padding_free and not args.packing and args.max_length is not None:
        raise UserError("padding_free without packing leaves rows uncut: set packing to true, or max_length to null.")
    parts = sources(run.dataset_name)
    if run.dataset_streaming and len(parts) > 1:
        raise UserError("dataset_streaming reads one source: give no mixture.")
    if run.dataset_streaming and 0 < run.eval_size < 1:
        raise UserError(f"eval_size={run.eval_size:g}: the length of a stream is not known, so give a number of rows.")
    if run.eval_dataset_name and run.eval_size:
        raise UserError("eval_dataset_name and eval_size both say what to evaluate on: give one.")
    if run.dataset_streaming and args.max_steps < 1:
        raise UserError(f"max_steps={args.max_steps}: dataset_streaming has no last row, so give the number of steps.")
    if args.packing_strategy != "bfd" and not args.packing:
        raise UserError(
            f"packing_strategy={args.packing_strategy} has no effect without packing: set packing to true, or remove "
            "the key."
        )
    for name, _ in parts:
        check_source(name, run.dataset_train_split)
        if len(parts) > 1 and is_one_row(name):
            raise UserError(
                f"{run.dataset_name}: {name} is one row, and a mixture ends with the first part that is used up: join "
                "the .txt files, or write each as rows of a .jsonl file."
            )
        _check_whole(name, args, args.packing)
        _note_short_file(name, args)
    held_out = evaluation_source(run, args)
    if held_out is not None:
        check_source(held_out.name, held_out.split)
        _check_whole(held_out.name, args, packs_eval(args))


def _check_whole(name: str, args: SFTConfig, packs: bool) -> None:
    """Reject a text file, which is one row, if it would be cut to its first `max_length` tokens. Raise `UserError`."""
    if args.max_length is None or splits(args, packs) or not is_one_row(name):
        return
    # A token is at least one byte, and the last token ends the text. A compressed file may hold any length.
    is_short = not name.endswith(".gz") and Path(name).stat().st_size < args.max_length
    if not is_short:
        raise UserError(
            f"{name} is one row, of which only the first max_length={args.max_length} tokens would be read: set "
            "packing to true and packing_strategy to bfd_split."
        )


def _note_short_file(name: str, args: SFTConfig) -> None:
    """Print a note on a file that is packed into one row and does not fill it."""
    if not args.packing or args.max_length is None or not name.endswith((".txt", ".json", ".jsonl")):
        return
    size = Path(name).stat().st_size
    if size < args.max_length:  # a token is at least one byte
        args.distributed_state.print(
            f"Note: {name} has {size} bytes and does not fill one row of max_length={args.max_length} tokens, so "
            "every step trains on all of it."
        )


def packs_eval(args: SFTConfig) -> bool:
    """Return whether the rows to evaluate on are packed."""
    return args.packing if args.eval_packing is None else args.eval_packing


def splits(args: SFTConfig, packs: bool) -> bool:
    """Return whether long rows are split at `max_length` and not cut."""
    return packs and args.packing_strategy == "bfd_split"


def evaluation_source(run: RunArguments, args: TrainingArguments) -> RowSource | None:
    """Return where the rows to evaluate on are read from, or None if a run holds out rows or does not evaluate."""
    if run.eval_dataset_name:
        return RowSource(run.eval_dataset_name, run.dataset_test_split or "train")
    if run.eval_size or not evaluates(args):
        return None
    return RowSource(run.dataset_name, run.dataset_test_split or "test", run.dataset_config)


def _share_rows(one: RowSource, other: RowSource) -> bool:
    """Return whether two sources are known to have rows in common.

    Two different slices of a split are not compared, and neither is the default configuration with its name.
    """
    if (_place(one), one.config) != (_place(other), other.config):
        return False
    for part in one.split.split("+"):  # a split may be a sum of slices, such as train[:10%]+test
        for other_part in other.split.split("+"):
            slices = (part.strip(), other_part.strip())
            names = {split.partition("[")[0] for split in slices}
            has_whole = any("[" not in split for split in slices)
            if (len(names) == 1 or "all" in names) and (has_whole or slices[0] == slices[1]):
                return True
    return False


def _place(source: RowSource) -> str | Path:
    """Return where a dataset is, in one way for all names of a file."""
    path = Path(source.name)
    return path.resolve() if path.exists() else source.name


def check_splits(run: RunArguments, args: TrainingArguments) -> None:
    """Reject configurations and splits that the run's datasets do not have, and an evaluation on the training rows.

    Raise `UserError`.
    """
    for name, _ in sources(run.dataset_name):
        check_split(RowSource(name, run.dataset_train_split, run.dataset_config), "dataset_train_split")
    held_out = evaluation_source(run, args)
    if held_out is not None:
        check_held_out(held_out, run)
        or_else = "" if run.eval_dataset_name else ", or eval_size to a number of rows"
        check_split(held_out, "dataset_test_split", or_else)


def check_held_out(held_out: RowSource, run: RunArguments) -> None:
    """Do not evaluate on rows that the run trains on. Raise `UserError`."""
    learned = [RowSource(name, run.dataset_train_split, run.dataset_config) for name, _ in sources(run.dataset_name)]
    if any(_share_rows(held_out, source) for source in learned):
        raise UserError(
            f"the run would train and evaluate on the same rows of {held_out.name}: name other rows, or set eval_size."
        )


def training_rows(
    run: RunArguments, args: SFTConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Rows, Dataset | None]:
    """Return rows for TRL to train on, and those to evaluate on or None. Raise `UserError`.

    The rows to evaluate on are those of `evaluation_source`, or `run.eval_size` rows that are held out. From a stream,
    the first rows are held out. This happens before packing, so packing does not change which rows are held out.
    """
    names, shares = zip(*sources(run.dataset_name))
    column = {"text_column": args.dataset_text_field}
    args.dataset_text_field = "text"  # the column of the rows that `load_rows` returns, which TRL reads
    with args.main_process_first():
        parts = [
            load_rows(name, run.dataset_train_split, run.dataset_config, run.dataset_streaming, **column)
            for name in names
        ]
        check_template(parts[0].features, tokenizer, args)
        max_length = None if splits(args, args.packing) else args.max_length  # TRL cuts rows to this length
        rows = parts[0] if len(parts) == 1 else mix(parts, shares, tokenizer, max_length, args.seed)
        held_out = evaluation_source(run, args)
        if held_out is not None:
            # A streamed dataset must not be downloaded, and to load one split as a whole would download all splits.
            is_streamed = run.dataset_streaming and held_out.name == run.dataset_name
            eval_rows = read_all(load_rows(*held_out, streaming=is_streamed, **column))
            if eval_rows.features != parts[0].features:
                raise UserError(
                    f"the rows of {held_out.name} to evaluate on have the columns {', '.join(eval_rows.features)}, "
                    f"and those to train on {', '.join(parts[0].features)}, so their losses would not compare."
                )
            return rows, eval_rows
    if isinstance(rows, IterableDataset):
        return hold_out_first(rows, int(run.eval_size))
    return split_rows(rows, run, args)


def are_texts(features: Features) -> bool:
    """Return whether rows with these columns are plain text, and not chats."""
    return "text" in features or features.get("prompt") == Value("string")


def check_template(features: Features, tokenizer: PreTrainedTokenizerBase, args: SFTConfig) -> None:
    """Reject a tokenizer whose chat template does not take these rows. Raise `UserError`."""
    if not are_texts(features):
        check_chat_template(tokenizer, args.assistant_only_loss)
    elif args.assistant_only_loss:
        raise UserError("assistant_only_loss is for chats, and these rows are plain text: set it to false.")
    elif tokenizer.eos_token is None and args.eos_token is None:
        raise UserError("the tokenizer has no end token, with which each text ends: set eos_token.")


def read_all(rows: Rows) -> Dataset:
    """Read a stream to its end, and return a dataset as it is."""
    if isinstance(rows, IterableDataset):
        return Dataset.from_list(list(rows), features=rows.features)
    return rows


def hold_out_first(rows: IterableDataset, size: int) -> tuple[IterableDataset, Dataset | None]:
    """Return a stream without its first `size` rows and those that ask the same, and the first rows.

    Raise `UserError` if no other row is left.
    """
    if size == 0:
        return rows, None
    held_out = list(rows.take(size + 1))
    if len(held_out) <= size:
        raise UserError(
            f"eval_size={size} leaves no row of {len(held_out)} to train on: lower it, or name other rows as "
            "eval_dataset_name. A .txt file is one row."
        )
    asked = {question_of(row) for row in held_out[:-1]}
    # This leaves out the held-out rows too. `skip` would leave out as many of each file where several processes read.
    others = rows.filter(lambda row: question_of(row) not in asked)
    return others, Dataset.from_list(held_out[:-1], features=rows.features)


def check_cut(name: str, rows: Rows, max_length: int | None, num_proc: int | None = None) -> None:
    """Print how much TRL cuts from tokenized rows. `name` is TRL's name of the dataset: "train" or "eval".

    The rows of a stream cannot be counted: see `check_learned`. Raise `UserError` for rows with nothing to learn
    within `max_length`: TRL drops them silently, and packed they learn nothing.
    """
    if max_length is None or isinstance(rows, IterableDataset):
        return

    def count(row: dict) -> dict:
        return {"tokens": len(row["labels"]), "is_empty": (row["labels"][:max_length] == -100).all()}

    what = "rows to evaluate on" if name == "eval" else "rows"
    arrays = rows.select_columns("labels").with_format("numpy")
    counted = arrays.map(count, remove_columns="labels", num_proc=num_proc, desc="Counting tokens")
    empty = counted["is_empty"][:].sum()
    lengths = counted["tokens"][:]
    if empty:
        raise UserError(
            f"{empty} of {len(rows)} {what} have no token to learn within max_length={max_length}: raise "
            "max_length, or remove the rows."
        )
    is_cut = lengths > max_length
    if is_cut.any():
        lost = 1 - np.minimum(lengths, max_length).sum() / lengths.sum()
        PartialState().print(
            f"Note: {is_cut.sum():,} of {len(rows):,} {what} are cut to max_length={max_length}, which leaves out "
            f"{lost:.1%} of their tokens."
        )


def check_learned(rows: IterableDataset, max_length: int | None) -> IterableDataset:
    """Return a stream that raises `UserError` at a row without a token to learn within `max_length`."""

    def check(row: dict) -> dict:
        if all(label == -100 for label in row["labels"][:max_length]):
            wrong = "a row of the stream has no token to learn"
            if max_length is None:
                raise UserError(f"{wrong}: remove such rows.")
            raise UserError(f"{wrong} within max_length={max_length}: raise max_length, or remove such rows.")
        return row

    return rows.map(check)


def check_length(trainer: SFTTrainer) -> None:
    """Reject rows that are longer than the model's context, where `max_length` cuts none. Raise `UserError`.

    The rows of a stream are not looked at.
    """
    positions = positions_of(trainer.model.config)
    if trainer.args.max_length is not None or positions is None:
        return
    for rows in (trainer.train_dataset, trainer.eval_dataset):
        if rows is None or isinstance(rows, IterableDataset):
            continue
        longest = max(map(len, rows["input_ids"]))
        if longest > positions:
            raise UserError(
                f"a row has {longest} tokens, and the model {positions} positions: set max_length, or "
                "max_position_embeddings with a rope_theta for that length."
            )


def whole_text_bytes(rows: Dataset | None, args: SFTConfig) -> int | None:
    """Count the bytes of the text to evaluate on, or return None for other rows and for text that TRL cuts.

    TRL cuts no text without `max_length`, or if packing splits long texts.
    """
    is_whole = args.max_length is None or splits(args, packs_eval(args))
    if rows is None or "text" not in rows.column_names or not is_whole:
        return None
    return sum(len(text.encode()) for text in rows["text"])


def first_tokens(rows: Dataset) -> list[int]:
    """Return the first token of each document in tokenized rows, which may be packed."""
    if "seq_lengths" not in rows.column_names:
        return [tokens[0] for tokens in rows["input_ids"]]
    first = []
    for row in rows.select_columns(["input_ids", "seq_lengths"]):
        starts = np.cumsum([0, *row["seq_lengths"][:-1]])
        first += [row["input_ids"][start] for start in starts]
    return first


def bytes_of_token(tokenizer: PreTrainedTokenizerBase, token: int) -> int:
    """Return how many bytes of a text a token stands for. A special token stands for none."""
    if token in tokenizer.all_special_ids:
        return 0
    piece = tokenizer.convert_ids_to_tokens(token)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and "ByteLevel" in repr(backend.decoder):  # it may be one of a sequence
        return len(piece)  # each character stands for a byte
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return 1
    return len(piece.replace("\u2581", " ").encode())  # SentencePiece's mark of a space


def split_rows(rows: Dataset, run: RunArguments, args: SFTConfig) -> tuple[Dataset, Dataset | None]:
    """Return rows to train on and `run.eval_size` held-out rows or None.

    A row that asks the same as a held-out row (`question_of`) is left out of training. Raise `UserError` if none is
    left.
    """
    if run.eval_size == 0:
        return rows, None
    size = run.eval_size if run.eval_size < 1 else int(run.eval_size)
    with refusing(f"eval_size={run.eval_size:g} is too large for {len(rows)} rows: lower it", ValueError):
        parts = rows.train_test_split(test_size=size, seed=args.seed)
    asked = {question_of(row) for row in parts["test"]}
    with args.main_process_first():
        kept = parts["train"].filter(lambda row: question_of(row) not in asked)
    dropped = len(parts["train"]) - len(kept)
    if dropped:
        PartialState().print(f"{dropped:,} rows ask the same as a held-out row, and are left out of training.")
    if not len(kept):
        raise UserError("every row to train on asks the same as a held-out row: lower eval_size, or set it to 0.")
    return kept, parts["test"]


def question_of(row: dict) -> str:
    """Return what a row asks: its prompt, its turns before the last one, or the whole row if it has neither."""
    question = row["messages"][:-1] if "messages" in row else row.get("prompt")
    return str(question or row)
