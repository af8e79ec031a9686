"""Read rows of several schemas as TRL's `messages`, `text` or `prompt` and `completion`, and reject bad ones by name.

TRL itself ignores OpenThoughts' `system` column and does not rename its roles. It tokenizes, cuts and packs the rows.
"""

import glob
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from accelerate import PartialState
from datasets import Dataset, Features, IterableDataset, List, Value, interleave_datasets, load_dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig
from trl.chat_template_utils import (
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_stop_token_trained,
)

from iha.errors import UserError, one_line, refusing
from iha.files import read_jsonl
from sft.arguments import RunArguments
from sft.row_sources import READERS, RowSource, RunData, check_file, is_one_row, splits_long_rows, suffix_of


ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
# A column of a row -> the names under which its turns hold the role and the text.
TURN_KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}
# Keys of a turn, and columns of a row, that hold what this run would not train on.
UNREAD_KEYS = ("tool_calls", "function_call", "reasoning", "reasoning_content", "thinking")
UNREAD_COLUMNS = ("tools", "chat_template_kwargs", "image", "images", "video", "videos", "audio", "audios")
# Keys by which other trainers leave a turn out of the loss.
WEIGHT_KEYS = ("weight", "train")
TURNS = List({"role": Value("string"), "content": Value("string")})
Rows = Dataset | IterableDataset


# One row


def to_messages(row: dict, where: str) -> list[dict[str, str]]:
    """Convert a row to `[{"role": system|user|assistant, "content": text}, ...]`, which ends with the assistant.

    The row may be of OpenThoughts-114k (`system` and `conversations` of {from: user|assistant, value}), of
    OpenThoughts3-1.2M (`conversations` of {from: human|gpt, value}), or already hold `messages`. `where` names the row
    in errors. Raise `UserError`, also for content that would be lost.
    """
    columns = [name for name in TURN_KEYS if row.get(name) is not None]
    if len(columns) != 1:
        held = sorted(name for name in row if row[name] is not None)
        raise UserError(f"{where}: expected one column of 'conversations' and 'messages'; the row has {held}.")
    messages = turns_of(row[columns[0]], *TURN_KEYS[columns[0]], f"{where}, column '{columns[0]}'")
    if messages[-1]["role"] != "assistant":
        raise UserError(f"{where}: the last turn must be the assistant's, got {messages[-1]['role']}.")
    if not row.get("system"):
        return messages
    if any(message["role"] == "system" for message in messages):
        raise UserError(f"{where}: column 'system' and a turn both hold a system prompt; remove one.")
    return [{"role": "system", "content": row["system"]}, *messages]


def turns_of(turns: list[dict], role_key: str, text_key: str, where: str) -> list[dict[str, str]]:
    """Return turns by TRL's names of their keys and roles. Raise `UserError`, also for content that would be lost."""
    messages = []
    for number, turn in enumerate(turns, 1):
        place = f"{where}, turn {number}"
        lost = [name for name in UNREAD_KEYS if turn.get(name)]
        lost += [name for name in WEIGHT_KEYS if turn.get(name) not in (1, None)]
        if lost:
            raise UserError(f"{place}: '{lost[0]}' would be lost; write it into the text, or drop the row.")
        role = ROLES.get(turn.get(role_key))
        text = turn.get(text_key)
        if role is None:
            raise UserError(
                f"{place}: '{role_key}' is {turn.get(role_key)!r:.80}: expected one of {', '.join(ROLES)}."
            )
        if not isinstance(text, str) or not (text.strip() or role == "system"):
            raise UserError(f"{place}: '{text_key}' is {text!r:.80}: expected a text.")
        messages.append({"role": role, "content": text})
    if not messages:
        raise UserError(f"{where}: there are no turns.")
    return messages


def _to_text(row: dict, where: str) -> dict:
    if not isinstance(row.get("text"), str) or not row["text"].strip():
        raise UserError(f"{where}, column 'text': expected a text, got {row.get('text')!r:.80}.")
    return {"text": row["text"]}


def _to_prompt(row: dict, where: str) -> dict:
    prompt, completion = row.get("prompt"), row.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, str) or not completion.strip():
        raise UserError(
            f"{where}: expected texts in 'prompt' and 'completion', got {prompt!r:.80}, {completion!r:.80}."
        )
    return {"prompt": prompt, "completion": completion}


def _to_prompt_turns(row: dict, where: str) -> dict:
    prompt, completion = row.get("prompt"), row.get("completion")
    if not isinstance(prompt, list) or not isinstance(completion, list) or not completion:
        raise UserError(
            f"{where}: expected turns in 'prompt' and 'completion', got {prompt!r:.80}, {completion!r:.80}."
        )
    messages = to_messages({**row, "messages": [*prompt, *completion]}, where)
    return {"prompt": messages[: -len(completion)], "completion": messages[-len(completion) :]}


def schema_of(first: dict) -> tuple[Callable[[dict, str], dict], Features]:
    """Return the function that converts the rows of a source with this first row, and the columns of its results.

    The second argument of the function names the row in errors. Raise `UserError` for a row without a column that is
    read.
    """
    held = {name for name, value in first.items() if value is not None}
    if held & TURN_KEYS.keys():
        return lambda row, where: {"messages": to_messages(row, where)}, Features({"messages": TURNS})
    if "text" in held:
        return _to_text, Features({"text": Value("string")})
    if "completion" in held:
        is_text = isinstance(first["completion"], str)
        columns = Features(dict.fromkeys(("prompt", "completion"), Value("string") if is_text else TURNS))
        return _to_prompt if is_text else _to_prompt_turns, columns
    raise UserError(
        f"expected rows with 'conversations' or 'messages', or plain text in 'text', or 'prompt' with 'completion'; "
        f"row 1 has {sorted(held)}. For plain text in another column set dataset_text_field."
    )


# All rows of a source


def holds_text_files(name: str) -> bool:
    """Return whether a source is a text file, or a directory with text files and no other rows."""
    if not Path(name).is_dir():
        return is_one_row(name)
    return {READERS.get(suffix_of(file.name)) for file in Path(name).rglob("*")} - {None} == {"text"}


def load_rows(
    name: str, split: str = "train", config: str | None = None, streaming: bool = False, text_column: str = "text"
) -> Rows:
    """Load and convert the rows of a source (see `RowSource`), which the datasets library caches.

    A stream is read as it is used. A .txt file, also one of a directory, is one document, and has no `text_column`.
    Raise `UserError` for a missing or empty source and for a bad row.
    """
    check_file(name, split)
    rows, first = open_rows(name, split, config, streaming)
    if text_column != "text" and not holds_text_files(name):
        if text_column not in first:
            raise UserError(f"{name} has no column {text_column!r}: its columns are {', '.join(first)}.")
        rows = rows.select_columns(text_column).rename_column(text_column, "text")
        first = {"text": first[text_column]}
    with refusing(name, UserError):
        convert, features = schema_of(first)
    note_unread_columns(name, first, features)

    def converted(row: dict, index: int) -> dict:
        where = f"{name}, row {index + 1}"
        lost = [column for column in UNREAD_COLUMNS if row.get(column)]
        if lost:
            raise UserError(
                f"{where}: column '{lost[0]}' would be lost; write it into the text, or remove the column."
            )
        return convert(row, where)

    return rows.map(
        converted,
        with_indices=True,
        remove_columns=list(first),
        features=features,
        **({} if streaming else {"desc": "Converting rows"}),
    )


def open_rows(name: str, split: str, config: str | None, streaming: bool) -> tuple[Rows, dict]:
    """Return the rows of a source as the datasets library reads them, and the first. Raise `UserError`."""
    source = {"path": name, "name": config, "split": split}
    if Path(name).is_file():
        # `data_files` takes patterns, and rows[1].jsonl would be one for rows1.jsonl.
        source = {"path": READERS[suffix_of(name)], "data_files": glob.escape(name), "split": "train"}
    if holds_text_files(name):
        source["sample_by"] = "document"
    try:
        rows = load_dataset(**source, streaming=streaming)
        first = next(iter(rows), None)
    except StopIteration:  # raised by the reader of an empty file
        first = None
    except Exception as error:  # each reader raises its own exceptions, and its cause says what is wrong
        if name.endswith(".jsonl") and Path(name).is_file():
            for _ in read_jsonl(name):  # names the line, which the reader counts from 0, and in each block anew
                pass
        raise UserError(f"{name}, split {split!r}, cannot be read: {one_line(error.__cause__ or error)}") from error
    if first is None:
        raise UserError(f"{name}: it holds no rows.")
    return rows, first


def note_unread_columns(name: str, first: dict, features: Features) -> None:
    """Print which columns of a source a run does not read.

    `first` is a row of the source, and `features` are the columns that are made of it.
    """
    read = {*features, *(("system", *TURN_KEYS) if are_chats(features) else ())}
    unread = [column for column in first if column not in read]
    if unread:
        PartialState().print(f"Note: the run does not read these columns of {name}: {', '.join(unread)}.")


# Chat templates


def rendering(what: str) -> AbstractContextManager[None]:
    """Raise `UserError` for any exception of a chat template in the block."""
    # A template is a program, which may divide by zero or fail in other ways than Jinja's own.
    return refusing(f"{what}: the chat template does not take it", Exception)


def check_template(features: Features, tokenizer: PreTrainedTokenizerBase, args: SFTConfig) -> None:
    """Reject a tokenizer that cannot encode rows with these columns so that the end of an answer is learned.

    If the loss is on the assistant's text only, its chat template must mark this text together with its end-of-turn
    token. Raise `UserError`.
    """
    if not are_chats(features):
        if args.assistant_only_loss:
            raise UserError("assistant_only_loss is for chats, and these rows are plain text: set it to false.")
        if tokenizer.eos_token is None and args.eos_token is None:
            raise UserError("the tokenizer has no end token, with which each text ends: set eos_token.")
        return
    if tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template: set chat_template_path (see sft/chat_templates).")
    with rendering("a question and its answer"):
        learns_to_stop = not args.assistant_only_loss or _learns_to_stop(tokenizer)
    if not learns_to_stop:
        raise UserError(
            "assistant_only_loss needs a chat template whose {% generation %} block holds the assistant's text and an "
            "end-of-turn token that the tokenizer knows as one token: set chat_template_path to the template of this "
            "tokenizer's family (see sft/chat_templates)."
        )


def _learns_to_stop(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the loss on the assistant's text alone includes the end of its turn.

    In place of a template without markers TRL trains by one of its own, for the families that it knows.
    """
    template = None
    if not has_generation_markers(tokenizer.chat_template):
        try:
            template = get_training_chat_template(tokenizer)
        except ValueError:  # not such a family
            return False
    return is_chat_template_stop_token_trained(tokenizer, template)


# The rows of a run


def are_chats(features: Features) -> bool:
    """Return whether rows with these columns are chats, and not plain text."""
    return TURNS in features.values()


def training_rows(
    data: RunData, run: RunArguments, args: SFTConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Rows, Dataset | None]:
    """Return rows for TRL to train on, and those to evaluate on or None. Raise `UserError`.

    The rows to evaluate on are those of `data.eval_source`, or `run.eval_size` rows that are held out. From a stream,
    the first rows are held out. This happens before packing, so packing does not change which rows are held out.
    """
    text_column = args.dataset_text_field
    with args.main_process_first():
        how = {"streaming": run.dataset_streaming, "text_column": text_column}
        parts = [load_rows(*part, **how) for part in data.parts]
        check_template(parts[0].features, tokenizer, args)
        max_length = None if splits_long_rows(args, args.packing) else args.max_length  # TRL cuts rows to this length
        rows = parts[0] if len(parts) == 1 else mix(parts, data.shares, tokenizer, max_length, args.seed)
        if data.eval_source is not None:
            # A streamed dataset must not be downloaded, and to load one split as a whole would download all splits.
            is_streamed = run.dataset_streaming and data.eval_source.name == run.dataset_name
            return rows, rows_to_evaluate_on(data.eval_source, is_streamed, text_column, rows.features)
    if run.eval_size == 0:
        return rows, None
    if isinstance(rows, IterableDataset):
        return hold_out_first(rows, int(run.eval_size))
    return split_rows(rows, run, args)


def rows_to_evaluate_on(source: RowSource, is_streamed: bool, text_column: str, features: Features) -> Dataset:
    """Return the rows of a source, with the columns of those to train on. Raise `UserError` for other columns."""
    rows = load_rows(*source, streaming=is_streamed, text_column=text_column)
    if rows.features != features:
        raise UserError(
            f"the rows of {source.name} to evaluate on have the columns {', '.join(rows.features)}, and those to "
            f"train on {', '.join(features)}, so their losses would not compare."
        )
    return Dataset.from_list(list(rows), features=features) if is_streamed else rows


def hold_out_first(rows: IterableDataset, size: int) -> tuple[IterableDataset, Dataset]:
    """Return a stream without its first `size` rows and those that ask the same, and the first rows.

    Raise `UserError` if no other row is left.
    """
    first = list(rows.take(size + 1))
    if len(first) <= size:
        raise UserError(
            f"eval_size={size} leaves no row of {len(first)} to train on: lower it, or name other rows as "
            "eval_dataset_name. A .txt file is one row."
        )
    held_out = first[:size]
    asked = {question_of(row) for row in held_out}
    # This leaves out the held-out rows too. `skip` would leave out as many of each file where several processes read.
    others = rows.filter(lambda row: question_of(row) not in asked)
    return others, Dataset.from_list(held_out, features=rows.features)


def split_rows(rows: Dataset, run: RunArguments, args: SFTConfig) -> tuple[Dataset, Dataset]:
    """Return rows to train on, and `run.eval_size` held-out rows.

    A row that asks the same as a held-out row (`question_of`) is left out of training. Raise `UserError` if none is
    left.
    """
    size = run.eval_size if run.eval_size < 1 else int(run.eval_size)
    advice = "lower it, or name other rows as eval_dataset_name"
    with refusing(f"eval_size={run.eval_size:g} is too large for {len(rows)} rows: {advice}", ValueError):
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


# Mixtures by shares of the tokens, such as ProLong's mixture of long and short documents


def mix(
    parts: list[Dataset], shares: list[float], tokenizer: PreTrainedTokenizerBase, max_length: int | None, seed: int
) -> Dataset:
    """Return rows of all parts in a random order, until the first is used up, each part with its share of the tokens.

    A row is drawn from a part with a probability proportional to share / mean length of its rows, in tokens. Rows are
    later cut to `max_length`, if it is given. Raise `UserError` for parts of several schemas.
    """
    if any(part.features != parts[0].features for part in parts):
        raise UserError("a mixture needs rows of one schema: all messages, all text or all prompts with completions.")

    def count(row: dict) -> dict[str, int]:
        first, *others = row.values()  # a prompt and its completion, two texts or two lists of turns, are joined
        content = first + others[0] if others else first
        as_text = isinstance(content, str)
        ids = tokenizer(content) if as_text else tokenizer.apply_chat_template(content, return_dict=True)
        return {"tokens": min(len(ids["input_ids"]), max_length or np.inf)}

    means = [np.mean(part.map(count, remove_columns=part.column_names)["tokens"][:]) for part in parts]
    rates = np.divide(shares, means)
    return interleave_datasets(parts, list(rates / rates.sum()), seed=seed)
