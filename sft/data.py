"""Rows for supervised fine-tuning: OpenThoughts' two formats become `messages`, `messages` become tokens and labels.

TRL ignores OpenThoughts' `system` column and does not rename its roles, and it drops a row whose answer was cut away
without a word, so both steps are done here, where a bad row can be named.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import is_chat_template_stop_token_trained

from command_io import UserError, read_jsonl


ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
# column of a row -> the names under which its turns hold the role and the text
TURN_KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}
IGNORED_LABEL = -100


def to_messages(row: dict, where: str) -> list[dict[str, str]]:
    """One row as `[{"role": system|user|assistant, "content": text}, ...]`, ending with the assistant.

    Understands OpenThoughts-114k (`system` and `conversations` of {from: user|assistant, value}), OpenThoughts3-1.2M
    (`conversations` of {from: human|gpt, value}) and rows that already hold `messages`. `where` names the row in
    errors. Raises `UserError` naming the row and the column.
    """
    column = next((name for name in TURN_KEYS if row.get(name) is not None), None)
    if column is None:
        raise UserError(
            f"{where}: column 'conversations' (or 'messages') is missing; the row has {sorted(row)}. "
            "Expected OpenThoughts rows or rows with 'messages'."
        )
    turns = row[column]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}, column '{column}': expected a list with at least one turn, got {turns!r:.80}.")
    role_key, text_key = TURN_KEYS[column]
    messages = []
    if row.get("system") is not None:
        messages.append({"role": "system", "content": _text(row["system"], f"{where}, column 'system'")})
    for number, turn in enumerate(turns, 1):
        place = f"{where}, column '{column}', turn {number}"
        if not isinstance(turn, dict) or turn.get(role_key) is None or text_key not in turn:
            raise UserError(f"{place}: expected an object with '{role_key}' and '{text_key}', got {turn!r:.80}.")
        if turn[role_key] not in ROLES:
            raise UserError(f"{place}: unknown role {turn[role_key]!r}; known are {', '.join(ROLES)}.")
        messages.append({"role": ROLES[turn[role_key]], "content": _text(turn[text_key], f"{place}, '{text_key}'")})
    if messages[-1]["role"] != "assistant":
        raise UserError(
            f"{where}, column '{column}': the last turn must be the assistant's, got {messages[-1]['role']}."
        )
    return messages


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: expected text, got {type(value).__name__} {value!r:.80}.")
    return value


def _local_messages(path: str, version: tuple[int, int]) -> Iterator[dict]:
    # `version` is not read: it makes the cached conversion of a file that has changed invalid.
    for number, row in enumerate(read_jsonl(path), 1):
        yield {"messages": to_messages(row, f"{path}, row {number}")}


def load_messages(name: str, split: str = "train") -> Dataset:
    """A dataset with the single column `messages`, from a local .jsonl file or a split of a dataset on the Hub.

    Local rows are converted once into a memory-mapped cache, so a file may be larger than memory.
    Raises `UserError` for a missing or empty file or dataset and for a bad row (see `to_messages`).
    """
    if name.endswith((".jsonl", ".json")) or os.path.exists(name):
        path = Path(name).resolve()
        if not path.is_file():
            raise UserError(f"{name}: no such file; expected a JSON-lines file or the id of a dataset on the Hub.")
        status = path.stat()
        version = (status.st_mtime_ns, status.st_size)
        if next(read_jsonl(path), None) is None:
            raise UserError(f"{name}: the file holds no rows.")
        try:
            return Dataset.from_generator(_local_messages, gen_kwargs={"path": str(path), "version": version})
        except DatasetGenerationError as error:
            raise error.__cause__ from None
    try:
        dataset = load_dataset(name, split=split)
    except (DatasetNotFoundError, ValueError, ConnectionError) as error:
        raise UserError(f"cannot load dataset {name!r}, split {split!r}: {error}") from None
    return dataset.map(
        lambda row, index: {"messages": to_messages(row, f"{name}, row {index + 1}")},
        with_indices=True,
        remove_columns=[column for column in dataset.column_names if column != "messages"],
        desc="Converting to messages",
    )


def tokenize(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None, assistant_only: bool
) -> Dataset:
    """Add `input_ids` and `labels` (lists of int, cut on the right at `max_length` tokens) to rows of `messages`.

    With `assistant_only` the labels outside the template's generation blocks are -100, so the loss covers the
    assistant's text and its end-of-turn token. Prints how many rows were cut. Raises `UserError` for a template that
    does not mark the assistant's text with its end-of-turn token, and for a row that `max_length` leaves no label.
    """
    if tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template: set chat_template_path (see sft/chat_templates).")
    if assistant_only and not is_chat_template_stop_token_trained(tokenizer):
        raise UserError(
            "assistant_only_loss needs a chat template whose {% generation %} block holds the assistant's text and an "
            "end-of-turn token that the tokenizer knows as one token: set chat_template_path to the template of this "
            "tokenizer's family (see sft/chat_templates)."
        )

    def encode(row: dict) -> dict:
        encoded = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=assistant_only
        )
        ids = encoded["input_ids"]
        mask = encoded["assistant_masks"] if assistant_only else [1] * len(ids)
        labels = [token if kept else IGNORED_LABEL for token, kept in zip(ids, mask, strict=True)]
        return {
            "input_ids": ids[:max_length],
            "labels": labels[:max_length],
            "was_cut": len(ids) > len(ids[:max_length]),
            "is_learnable": any(mask[:max_length]),
        }

    dataset = dataset.map(encode, desc="Tokenizing")
    if max_length is not None:
        cut = sum(dataset["was_cut"])
        PartialState().print(
            f"{cut} of {len(dataset)} rows are longer than max_length={max_length} tokens and were cut on the right."
        )
    unlearnable = [number for number, learnable in enumerate(dataset["is_learnable"], 1) if not learnable]
    if unlearnable:
        raise UserError(
            f"{len(unlearnable)} rows have no assistant token left within max_length={max_length}, the first is row "
            f"{unlearnable[0]}: raise max_length or remove these rows."
        )
    return dataset.remove_columns(["was_cut", "is_learnable"])
