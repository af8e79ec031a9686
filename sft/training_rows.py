"""Make the rows that a run trains and evaluates on from its recipe: prepared, whole, streamed or packed."""

import math
from collections.abc import Iterable
from itertools import islice

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.generic import is_flash_attention_requested
from trl import SFTConfig

from iha_io.command_io import UserError, refusing
from modeling_iha.modeling_interleaved import core_of
from sft.arguments import RunArguments
from sft.data import (
    Rows,
    check_labels,
    check_split,
    column,
    cut_summary,
    load_rows,
    local_files,
    mix,
    sources,
    tokenize,
)
from sft.prepare import is_prepared, load_prepared
from sft.trainer import MixingTrainer


# Besides the flash cores.
ISOLATING_CORES = ("eager", "sdpa", "flex_attention")


def check_rows(run: RunArguments, args: SFTConfig) -> None:
    """Refuse, before anything is loaded, keys that exclude each other, and an absent source."""
    if args.eval_packing and not args.packing:
        raise UserError(
            "eval_packing without packing: TRL would join the held-out rows and not tell them apart; set both or "
            "neither."
        )
    if args.packing and args.packing_strategy == "wrapped":
        raise UserError("packing_strategy 'wrapped' lets documents attend to one another: use 'bfd' or 'bfd_split'.")
    if args.padding_free and not args.packing and args.max_length is not None:
        raise UserError("padding_free without packing leaves rows uncut: set packing to true, or max_length to null.")
    parts = sources(run.dataset_name)
    if len(parts) == 1:
        check_split(run.dataset_name, run.dataset_train_split)
    if run.dataset_streaming and len(parts) > 1:
        raise UserError("streaming reads one source: a mixture needs the lengths of all its rows.")
    for name, _ in parts:
        if not is_prepared(name):
            local_files(name)
        elif run.dataset_streaming:
            raise UserError("streaming is for rows that are not prepared; these are read from disk as they are used.")
    if run.dataset_streaming and run.eval_size % 1:
        raise UserError(f"eval_size={run.eval_size:g} with streaming: give a number of rows, not a share of them.")


def training_rows(
    run: RunArguments, args: SFTConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Rows, Dataset | None]:
    """Return tokenized rows to train on and `run.eval_size` held-out rows or None, and say what max_length cuts.

    Rows are held out one by one, before any packing: packing changes neither which they are nor what they are next to.
    """
    if args.eos_token is not None:
        tokenizer.eos_token = args.eos_token  # as TRL does later: plain text ends with it
    names, shares = zip(*sources(run.dataset_name))
    say, max_length = PartialState().print, cut_length(args)
    with args.main_process_first():
        parts = [_load(name, run, args, tokenizer) for name in names]
        rows = mix(parts, shares, max_length, args.seed)
    if isinstance(rows, IterableDataset):
        if args.dataloader_num_workers > 0 and args.dataloader_multiprocessing_context is None:
            # Python 3.14 would pickle the stream for a worker, and its steps, TRL's too, are local functions.
            args.dataloader_multiprocessing_context = "fork"
        limit = math.inf if max_length is None else max_length
        rows = rows.filter(lambda row: 0 <= row["first_label"] < limit)
        if next(iter(rows), None) is None:
            raise UserError(f"no streamed row has a token to learn within max_length={max_length}: raise max_length.")
        say(
            f"Rows are streamed: how many are longer than max_length={args.max_length} is not known. Those without a "
            "token to learn are passed over."
        )
    else:
        if max_length is not None:
            say(cut_summary(column(rows, "num_tokens"), max_length))
        check_labels(rows, max_length)
    return split_rows(rows, run, args)


def _load(name: str, run: RunArguments, args: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> Rows:
    if is_prepared(name):
        return load_prepared(name, tokenizer, args.assistant_only_loss)
    rows = load_rows(name, run.dataset_train_split, run.dataset_streaming)
    return tokenize(rows, tokenizer, args.assistant_only_loss, args.dataset_num_proc)


def cut_length(args: SFTConfig) -> int | None:
    """Return the tokens to which TRL cuts a row, or None where it cuts none or packs by splitting."""
    splits = args.packing and args.packing_strategy != "bfd"
    return None if splits else args.max_length


def split_rows(rows: Rows, run: RunArguments, args: SFTConfig) -> tuple[Rows, Dataset | None]:
    """Return rows to train on and `run.eval_size` held-out rows or None; of a stream, the first are held out.

    A row to train on with the tokens or the prompt of a held-out one is left out.
    """
    if run.eval_size == 0:
        if args.eval_strategy != "no" or args.eval_on_start:
            raise UserError("eval_strategy and eval_on_start need rows to evaluate on: set eval_size.")
        return rows, None
    if isinstance(rows, IterableDataset):
        if rows.num_shards > 1 and (args.world_size > 1 or args.dataloader_num_workers > 1):
            # Each would pass over rows of its own shards, and not over those that are held out.
            raise UserError(
                f"eval_size={run.eval_size:g} of a stream in {rows.num_shards} shards needs one process that reads "
                "it: set dataloader_num_workers to 0 and train in one process, set eval_size to 0, or do not stream."
            )
        size = int(run.eval_size)
        first = list(islice(rows, size + 1))
        if len(first) <= size:
            raise UserError(f"eval_size={size} leaves no row of the {len(first)} that the stream holds.")
        return _without(held := first[:size], rows.skip(size)), Dataset.from_list(held, features=rows.features)
    size = run.eval_size if run.eval_size < 1 else int(run.eval_size)
    with refusing(f"eval_size={run.eval_size:g} does not fit {len(rows)} rows", ValueError):
        parts = rows.train_test_split(test_size=size, seed=args.seed)
    with args.main_process_first():
        kept = _without(parts["test"], parts["train"])
    if dropped := len(parts["train"]) - len(kept):
        PartialState().print(f"{dropped:,} rows to train on are also held out, and are left out of training.")
    return kept, parts["test"]


def _without(held_out: Iterable[dict], rows: Rows) -> Rows:
    """Return the rows whose content is not that of a held-out row."""
    seen = {_content(row) for row in held_out}
    return rows.filter(lambda row: _content(row) not in seen)


def _content(row: dict) -> str:
    return str(row.get("input_ids", row.get("prompt")))


def epoch_summary(trainer: MixingTrainer, rows: Rows) -> str:
    """Say in one line the tokens, sequences and steps of an epoch over `rows`, which the trainer cut or packed."""
    args = trainer.args
    batch_size = trainer.get_total_train_batch_size(args)
    if isinstance(rows, IterableDataset):
        return (
            f"Training for {args.max_steps:,} steps of {batch_size} streamed sequences of at most {args.max_length} "
            "tokens."
        )
    num_tokens, sequences = column(rows, "num_tokens"), len(trainer.train_dataset)
    limit = cut_length(args)
    tokens = num_tokens.sum() if limit is None else np.minimum(num_tokens, limit).sum()
    dropped = sequences % (batch_size // args.gradient_accumulation_steps) if args.dataloader_drop_last else 0
    per_epoch = math.ceil((sequences - dropped) / batch_size)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    packed = f" packed into {sequences:,} sequences" if args.packing else ""
    return (
        f"Training on {len(rows):,} rows of {tokens:,} tokens{packed}: {per_epoch:,} steps an epoch of {batch_size} "
        f"sequences a step, {steps:,} steps in all."
    )


# Packing: only what keeps documents apart. TRL packs `bfd` (best fit decreasing) and `bfd_split` without padding:
# `position_ids` restart at every document, and from them come the masks of eager, SDPA and FlexAttention and the
# lengths of FlashAttention. `wrapped` packing has nothing that tells documents apart.


def check_packing(model: PreTrainedModel, args: SFTConfig) -> None:
    """Refuse an attention core that is not known to keep packed documents apart."""
    core = core_of(model.config._attn_implementation)
    if not (args.packing or args.padding_free):
        return
    if core not in ISOLATING_CORES and not is_flash_attention_requested(requested_attention_implementation=core):
        raise UserError(
            f"packing with attn_implementation={core!r} is not known to keep documents apart: use one of "
            f"{', '.join(ISOLATING_CORES)} or a flash core, or set packing to false."
        )
