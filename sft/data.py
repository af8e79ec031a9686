"""Read rows of several schemas as `messages` or `text`, and make tokens and labels of them.

TRL ignores OpenThoughts' `system` column and does not rename its roles. It silently drops a row whose answer was cut
away. So both steps are done here, where a bad row can be named.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Gt, MinLen
from datasets import Dataset, Features, IterableDataset, List, Value, interleave_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from pyarrow.parquet import ParquetFile
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import is_chat_template_stop_token_trained
from typing_extensions import TypedDict

from iha_io.command_io import (
    UserError,
    file_sha256,
    one_line,
    open_plain_or_gzip,
    read_jsonl,
    read_yaml,
    refusing,
    time_limit,
    typed,
)


ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
# column of a row -> the names under which its turns hold the role and the text
TURN_KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}
Text = Annotated[str, MinLen(0)]  # with a bound pydantic looks into the text, and refuses half of a surrogate pair
Role = Literal["system", "user", "human", "assistant", "gpt"]
Messages = Annotated[list[TypedDict("Message", {"role": Role, "content": Text})], MinLen(1)]
Conversation = Annotated[list[TypedDict("Turn", {"from": Role, "value": Text})], MinLen(1)]
# Of a turn, what a chat template may render and `to_messages` does not read.
UNREAD_KEYS = ("tool_calls", "function_call", "reasoning", "reasoning_content", "thinking")
# Of a turn, what other trainers read as "do not learn this turn".
WEIGHT_KEYS = ("weight", "train")
# Of a row, what TRL would give to the template or the processor.
UNREAD_COLUMNS = ("tools", "chat_template_kwargs", "image", "images", "video", "videos", "audio", "audios")
IGNORED_LABEL = -100
RENDER_SECONDS = 30  # for a row
# Kind of a dataset's rows, the column that holds them -> its type.
KINDS = {"messages": List({"role": Value("string"), "content": Value("string")}), "text": Value("string")}
TOKEN_COLUMNS = {
    "input_ids": List(Value("int32")),
    "labels": List(Value("int32")),
    "num_tokens": Value("int64"),
    "first_label": Value("int64"),
}
# The turns, or characters, that the prompt of a row of `prompt` and `completion` has; it is not learned. 0 in others.
PROMPT = {"prompt_size": Value("int64")}
Rows = Dataset | IterableDataset
# What converts a row, given with what names it in errors, to the columns kept.
Convert = Callable[[dict, str], dict]


# One row


def to_messages(row: dict, where: str) -> list[dict[str, str]]:
    """Convert a row to `[{"role": system|user|assistant, "content": text}, ...]`, which ends with the assistant.

    Understands OpenThoughts-114k (`system` and `conversations` of {from: user|assistant, value}), OpenThoughts3-1.2M
    (`conversations` of {from: human|gpt, value}) and rows that already hold `messages`. `where` names the row in
    errors. Raise `UserError` naming the row and the column.
    """
    columns = [name for name in TURN_KEYS if row.get(name) is not None]
    if not columns:
        raise UserError(
            f"{where}: column 'conversations' (or 'messages') is missing; the row has {sorted(row)}. "
            "Expected OpenThoughts rows or rows with 'messages'; sft/train.py also takes plain text in 'text', and "
            "'prompt' with 'completion'."
        )
    if len(columns) > 1:
        raise UserError(f"{where}: columns 'messages' and 'conversations' both hold turns; remove one of them.")
    if lost := [name for name in UNREAD_COLUMNS if row.get(name)]:
        raise UserError(f"{where}: column '{lost[0]}' would be lost; write it into the turns, or remove the column.")
    column = columns[0]
    turns = typed(row[column], Messages if column == "messages" else Conversation, f"{where}, column '{column}'")
    role_key, text_key = TURN_KEYS[column]
    messages = []
    if row.get("system") not in (None, ""):
        messages.append({"role": "system", "content": _text(row["system"], f"{where}, column 'system'")})
    for number, turn in enumerate(turns, 1):
        place = f"{where}, column '{column}', turn {number}"
        if lost := [name for name in UNREAD_KEYS if turn.get(name)]:
            raise UserError(f"{place}: '{lost[0]}' would be lost; write it into '{text_key}' or drop the row.")
        if ignored := [name for name in WEIGHT_KEYS if turn.get(name, 1) not in (1, None)]:
            raise UserError(
                f"{place}: '{ignored[0]}' is {turn[ignored[0]]!r:.80}, and the turn would be learned like any other: "
                "expected 1, true or no such key; drop the turn or the row."
            )
        role = ROLES[turn[role_key]]
        content = _text(turn[text_key], f"{place}, '{text_key}'", may_be_empty=role == "system")
        messages.append({"role": role, "content": content})
    if row.get("system") and any(message["role"] == "system" for message in messages[1:]):
        raise UserError(
            f"{where}: column 'system' and a turn of '{column}' both hold a system prompt; remove one of them."
        )
    if messages[-1]["role"] != "assistant":
        raise UserError(
            f"{where}, column '{column}': the last turn must be the assistant's, got {messages[-1]['role']}."
        )
    return messages


def row_kind(row: dict) -> str:
    """Return `"text"` for a row of plain text, else `"messages"`."""
    if any(row.get(name) is not None for name in TURN_KEYS):
        return "messages"
    return "text" if row.get("text") is not None or isinstance(row.get("completion"), str) else "messages"


def to_row(row: dict, where: str, kind: str) -> dict:
    """Convert a row of any schema to the columns `kind` (see `KINDS`) and `PROMPT`.

    `prompt` and `completion`, texts or turns as TRL takes them, are joined. Raise `UserError` naming row and column.
    """
    size = 0
    if row.get("completion") is not None and all(row.get(name) is None for name in (*TURN_KEYS, "text")):
        shape = Text if kind == "text" else Messages
        parts = [typed(row.get(name), shape, f"{where}, column '{name}'") for name in ("prompt", "completion")]
        if kind == "text":
            _text(parts[1], f"{where}, column 'completion'")
        row, size = {**row, kind: parts[0] + parts[1]}, len(parts[0])
    if kind == "messages":
        return {"messages": to_messages(row, where), "prompt_size": size + bool(size and row.get("system"))}
    return {"text": _text(row.get("text"), f"{where}, column 'text'"), "prompt_size": size}


def _text(value: str, place: str, may_be_empty: bool = False) -> str:
    if not (typed(value, Text, place).strip() or may_be_empty):
        raise UserError(f"{place}: the text is empty.")
    return value


# All rows of a source


def _read_parquet(file: Path) -> Iterator[dict]:
    for batch in ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def _read_text(file: Path) -> Iterator[dict]:
    with open_plain_or_gzip(file) as content, refusing(f"{file}: not UTF-8 text", UnicodeDecodeError):
        yield {"text": content.read().decode("utf-8-sig")}  # an editor may have put a byte order mark first


# What the name of a file ends with, without .gz -> what yields its rows; all but Parquet may be compressed.
READERS = {".jsonl": read_jsonl, ".json": read_jsonl, ".parquet": _read_parquet, ".txt": _read_text}


def local_files(name: str) -> list[Path]:
    """Return the files of a local source, sorted by name, or none for the id of a dataset on the Hub.

    A local source is a file or a folder of files of one type.
    """
    path = Path(name)
    if not path.exists():
        if _suffix(path) in READERS:
            raise UserError(f"{name}: no such file; expected {', '.join(READERS)}, or the id of a dataset on the Hub.")
        return []
    path = path.resolve()
    files = sorted(file for file in path.iterdir() if not file.name.startswith(".")) if path.is_dir() else [path]
    if not files or len({_suffix(file) for file in files}) > 1 or _suffix(files[0]) not in READERS:
        raise UserError(f"{name}: expected a file or a folder of files of one type among {', '.join(READERS)}.")
    if special := [file for file in files if not file.is_file()]:
        raise UserError(
            f"{special[0]} is no regular file; rows are read more than once, so write them into one first."
        )
    return files


def check_split(name: str, split: str) -> None:
    """Refuse a split of a local source, which has none."""
    if split != "train" and Path(name).exists():
        raise UserError(
            f"{name} is local and has no split {split!r}: leave the split out, or give the id of a dataset on the Hub."
        )


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def _read_rows(files: Sequence[Path]) -> Iterator[tuple[dict, str]]:
    """Yield the rows of files, each with what names it in errors."""
    for file in files:
        for number, row in enumerate(READERS[_suffix(file)](file), 1):
            yield row, f"{file}, row {number}"


def _code() -> dict[str, str]:
    """Hash the source of this folder, as an argument that makes what another version has cached invalid.

    datasets knows a function that can be imported by its name alone.
    """
    return {file.name: file_sha256(file) for file in sorted(Path(__file__).parent.glob("*.py"))}


def _converted(
    files: tuple[Path, ...], hashes: tuple[str, ...], code: dict[str, str], convert: Convert
) -> Iterator[dict]:
    # `hashes` and `code` are not read: they make the cached conversion invalid when a file or the code has changed.
    for row, where in _read_rows(files):
        yield convert(row, where)


def messages_or_text(first: dict) -> tuple[Convert, Features]:
    """Return how to convert the rows of a source to the kind of its first row, and what they hold then."""
    kind = row_kind(first)
    return partial(to_row, kind=kind), Features({kind: KINDS[kind], **PROMPT})


def load_rows(
    name: str,
    split: str = "train",
    streaming: bool = False,
    schema: Callable[[dict], tuple[Convert, Features]] = messages_or_text,
) -> Rows:
    """Load and convert the rows of a source.

    Args:
        name: a .jsonl, .parquet or .txt file (one document), the first and last also compressed by gzip, a folder of
            such files, or the id of a dataset on the Hub.
        split: of a dataset on the Hub.
        streaming: read the rows as they are used. Else they are converted once into a memory-mapped cache, so a source
            may be larger than memory.
        schema: from the first row, what converts a row and the features of the converted rows.

    Raise `UserError` for a missing or empty source and for a bad row.
    """
    files = local_files(name)
    try:
        if files:
            first, _ = next(_read_rows(files), (None, name))
        else:
            source = load_dataset(name, split=split, streaming=streaming)
            first = next(iter(source), None)
        if first is None:
            raise UserError(f"{name}: it holds no rows.")
        convert, features = schema(first)
        if files:
            make = IterableDataset.from_generator if streaming else Dataset.from_generator
            hashes = ["" if streaming else file_sha256(file) for file in files]  # a stream is not cached
            # datasets takes a list for shards, and would give each worker other files.
            arguments = {"files": tuple(files), "hashes": tuple(hashes), "code": _code(), "convert": convert}
            return make(_converted, features=features, gen_kwargs=arguments)
        progress = {} if streaming else {"desc": "Converting rows"}
        return source.map(
            lambda row, index, code: convert(row, f"{name}, row {index + 1}"),
            with_indices=True,
            fn_kwargs={"code": _code()},
            remove_columns=list(first),
            features=features,
            **progress,
        )
    except DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        raise UserError(f"{name} cannot be read: {one_line(cause or error)}") from error
    except (DatasetNotFoundError, ValueError, ConnectionError) as error:
        raise UserError(f"cannot load dataset {name!r}, split {split!r}: {one_line(error)}") from None


# Tokens


@contextmanager
def rendering(what: str) -> Iterator[None]:
    """Raise `UserError` for whatever a chat template fails with in the block, and for one that does not end."""
    # A template is a program: it divides by zero, loops and fails in other ways than Jinja's own.
    with refusing(f"{what}: the chat template does not take it", Exception), time_limit(RENDER_SECONDS):
        yield


def check_chat_template(tokenizer: PreTrainedTokenizerBase, assistant_only: bool) -> None:
    """Refuse a tokenizer without a chat template.

    For a loss on the assistant's text only, refuse one that does not mark this text with its end-of-turn token.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template: set chat_template_path, or --chat-template of sft.prepare (see "
            "sft/chat_templates)."
        )
    with rendering("a question and its answer"):
        learns_to_stop = not assistant_only or is_chat_template_stop_token_trained(tokenizer)
    if not learns_to_stop:
        raise UserError(
            "assistant_only_loss needs a chat template whose {% generation %} block holds the assistant's text and an "
            "end-of-turn token that the tokenizer knows as one token: set chat_template_path, or --chat-template of "
            "sft.prepare, to the template of this tokenizer's family (see sft/chat_templates)."
        )


def tokenize(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, assistant_only: bool, num_proc: int | None = None
) -> Rows:
    """Add the token columns to rows of `messages` or `text`.

    `input_ids` and `labels` are lists of int, whole rows: TRL cuts or packs them. `num_tokens` is their length and
    `first_label` the index of the first token that is learned, 1 or more, -1 without one. With `assistant_only` the
    labels outside the template's generation blocks are -100, so the loss covers the assistant's text and its
    end-of-turn token. Plain text is learned whole, with an end-of-sequence token. Of a row with a prompt the tokens
    with which the prompt alone begins too have no label.

    Raise `UserError` for a template that `check_chat_template` refuses or that fails on a row or renders nothing, and
    for plain text with `assistant_only` or without an end-of-sequence token.
    """
    if kind_of(rows) == "messages":
        check_chat_template(tokenizer, assistant_only)
        encode = partial(_encode_messages, tokenizer=tokenizer, assistant_only=assistant_only)
    elif assistant_only:
        raise UserError("assistant_only_loss is for conversations; the rows are plain text: set it to false.")
    elif tokenizer.eos_token_id is None:
        raise UserError("plain text needs a tokenizer with an end-of-sequence token (eos_token).")
    else:
        encode = partial(_encode_text, tokenizer=tokenizer)

    def token_columns(row: dict, index: int, code: dict[str, str]) -> dict:
        with rendering(f"row {index + 1}"):
            ids, mask, prompt = encode(row)
        if not ids:
            raise UserError(f"row {index + 1}: the chat template renders nothing; expected the text of its messages.")
        unlearned = len(commonprefix([ids, prompt]))
        mask = [0] * unlearned + mask[unlearned:]
        labels = [token if kept else IGNORED_LABEL for token, kept in zip(ids, mask, strict=True)]
        first_label = mask.index(1, 1) if 1 in mask[1:] else -1  # nothing predicts the first token
        return {"input_ids": ids, "labels": labels, "num_tokens": len(ids), "first_label": first_label}

    progress = {} if isinstance(rows, IterableDataset) else {"desc": "Tokenizing", "num_proc": num_proc}
    kept = {name: kind for name, kind in rows.features.items() if name not in PROMPT}
    features = Features({**kept, **TOKEN_COLUMNS})
    others = [name for name in PROMPT if name in rows.features]
    arguments = {"with_indices": True, "fn_kwargs": {"code": _code()}, "remove_columns": others, "features": features}
    return rows.map(token_columns, **arguments, **progress)


def _encode_messages(
    row: dict, tokenizer: PreTrainedTokenizerBase, assistant_only: bool
) -> tuple[list[int], list[int], list[int]]:
    """Return token ids, 1 for each of them that is learned, and the token ids of the prompt alone."""
    render = partial(tokenizer.apply_chat_template, return_dict=True)
    encoded = render(row["messages"], return_assistant_tokens_mask=assistant_only)
    prompt = row["messages"][: row.get("prompt_size", 0)]
    asked = render(prompt, add_generation_prompt=True)["input_ids"] if prompt else []
    ids = encoded["input_ids"]
    return ids, encoded["assistant_masks"] if assistant_only else [1] * len(ids), asked


def _encode_text(row: dict, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int], list[int]]:
    ids = tokenizer(row["text"])["input_ids"]
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    prompt = row["text"][: row.get("prompt_size", 0)]
    return ids, [1] * len(ids), tokenizer(prompt)["input_ids"] if prompt else []


def kind_of(rows: Rows) -> str:
    """Return the kind of the rows of a dataset (see `KINDS`)."""
    return next(kind for kind in KINDS if kind in rows.features)


def column(rows: Dataset, name: str) -> np.ndarray:
    """Return a column of numbers, [rows]."""
    return np.asarray(rows.with_format("numpy")[name][:])


def cut_summary(num_tokens: np.ndarray, max_length: int) -> str:
    """Say in one line which share of the rows and of the tokens `max_length` cuts away on the right."""
    cut, lost = num_tokens > max_length, np.maximum(num_tokens - max_length, 0).sum()
    return (
        f"{cut.sum()} of {len(cut)} rows are longer than max_length={max_length} tokens ({cut.mean():.1%}) and are "
        f"cut on the right: {lost:,} of {num_tokens.sum():,} tokens are lost ({lost / max(num_tokens.sum(), 1):.1%})."
    )


def check_labels(rows: Dataset, max_length: int | None) -> None:
    """Refuse rows that hold no label within `max_length` tokens."""
    first = column(rows, "first_label")
    unlearnable = np.flatnonzero((first < 0) | (first >= (np.inf if max_length is None else max_length)))
    if len(unlearnable):
        raise UserError(
            f"{len(unlearnable)} rows have no assistant token left within max_length={max_length}, the first is row "
            f"{unlearnable[0] + 1}: raise max_length or remove these rows."
        )


# Mixtures by shares of the tokens, such as ProLong's of long and short documents


class Part(TypedDict):
    """Hold an entry of a mixture."""

    __pydantic_config__ = {"extra": "forbid"}  # type: ignore[misc]
    path: str
    share: Annotated[float, Gt(0)]


def sources(dataset_name: str) -> list[tuple[str, float]]:
    """Return the name of each dataset and its share of the tokens: those that a .yaml file lists, or this one alone.

    The file holds a list of `{path: NAME, share: NUMBER}`. Raise `UserError`; shares must add up to 1.
    """
    file = Path(dataset_name)
    if file.suffix not in (".yaml", ".yml"):
        return [(dataset_name, 1.0)]
    entries = read_yaml(file, Annotated[list[Part], MinLen(1)])
    total = sum(entry["share"] for entry in entries)
    if abs(total - 1) > 1e-6:
        raise UserError(f"{dataset_name}: the shares add up to {total:g}: expected 1.")
    return [(entry["path"], entry["share"]) for entry in entries]


def mix(parts: list[Rows], shares: list[float], max_length: int | None, seed: int) -> Rows:
    """Return rows of all parts in a random order, until the first is used up, each part with its share of the tokens.

    Args:
        parts: as `tokenize` returns them; of several, the columns that all have are kept. TRL takes rows without
            `messages` for no conversations, and refuses assistant_only_loss.
        shares: of the tokens, adding up to 1. A row is drawn with the probability share / mean length of its part.
        max_length: tokens to which a row is cut later; `None` for all.
        seed: of the order.
    """
    if len(parts) == 1:
        return parts[0]
    limit = np.inf if max_length is None else max_length
    rates = [share / np.minimum(column(part, "num_tokens"), limit).mean() for share, part in zip(shares, parts)]
    names = [name for name in (*KINDS, *TOKEN_COLUMNS) if all(name in part.features for part in parts)]
    parts = [part.select_columns(names) for part in parts]
    return interleave_datasets(parts, [rate / sum(rates) for rate in rates], seed=seed)
