"""Train a tokenizer on the rows of a run: byte-level BPE, which encodes any text, with the special tokens of chats.

examples:
  python -m sft.make_tokenizer train.txt outputs/tokenizer --vocab-size 1024
  python -m sft.make_tokenizer HuggingFaceFW/fineweb-edu outputs/tokenizer --dataset_config sample-10BT \\
      --max-bytes 1000000000 --vocab-size 49152
  python -m sft.make_tokenizer --from meta-llama/Llama-3.1-8B outputs/tokenizer \\
      --rename '<|reserved_special_token_0|>=<|im_start|>' '<|reserved_special_token_1|>=<|im_end|>'
"""

import argparse
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from iha.checkpoints import load_tokenizer
from iha.errors import UserError, run_cli
from iha.files import check_new_directory, expanded, new_directory
from iha.sources import find_source


# The special tokens of sft/chat_templates: the first one pads, and the last one ends a text.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def wrapped(tokenizer: Tokenizer, special: Sequence[str] = SPECIAL) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer in Transformers' class, with special tokens."""
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[-1])


def byte_tokenizer(special: Sequence[str] = SPECIAL) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes and special tokens: the first one pads, and the last one ends a text."""
    vocabulary = {piece: index for index, piece in enumerate([*special, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return wrapped(tokenizer, special)


def lines_of(rows: Iterable[dict]) -> Iterator[str]:
    """Yield the lines of all texts in rows that `sft.data.load_rows` returned."""
    for row in rows:
        for value in row.values():
            for text in [value] if isinstance(value, str) else [turn["content"] for turn in value]:
                yield from io.StringIO(text)


def train_tokenizer(lines: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens on lines of text, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=BYTES)
    tokenizer.train_from_iterator(lines, trainer)
    return wrapped(tokenizer)


def limited(lines: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    """Yield lines until they have `max_bytes`, or all of them."""
    read = 0
    for line in lines:
        yield line
        read += len(line.encode())
        if max_bytes is not None and read >= max_bytes:
            return


def renamed(source: str, names: Sequence[tuple[str, str]]) -> PreTrainedTokenizerBase:
    """Return a tokenizer with other names of special tokens, which keep their ids.

    Raise `UserError` for a token that it does not have, and for a name that it has already.
    """
    tokenizer = load_tokenizer(find_source(source), sys.maxsize)
    known = tokenizer.get_vocab()
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    for old, new in names:
        if old not in added or new in known:
            raise UserError(f"--rename {old}={new}: {source} needs a special token {old} and no token {new}.")
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        for file in Path(directory).glob("*.json"):
            text = file.read_text(encoding="utf-8")
            for old, new in names:
                for is_ascii in (True, False):
                    text = text.replace(*(json.dumps(name, ensure_ascii=is_ascii) for name in (old, new)))
            file.write_text(text, encoding="utf-8")
        tokenizer = load_tokenizer(find_source(directory), sys.maxsize)
    if any(tokenizer.convert_tokens_to_ids(new) != known[old] for old, new in names):
        raise UserError(f"--rename: the class of the tokenizer of {source} names its tokens itself.")
    return tokenizer


def pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, got {text!r}")
    return old, new


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("text", nargs="?", type=os.path.expanduser, help="rows to train on, as for dataset_name of sft.train")
    add("dst", type=expanded, help="new directory")
    add("--vocab-size", type=int, default=8192, help="number of tokens (default 8192)")
    add("--dataset_text_field", default="text", help="column of plain text (default text)")
    add("--dataset_config", help="configuration of the dataset (default: its own default)")
    add("--max-bytes", type=int, help="stream the rows, and stop at so many bytes of text")
    add("--from", dest="source", help="train none: take the tokenizer of a directory or an id on the Hub")
    where = "other names of special tokens of --from: '<|reserved_special_token_0|>=<|im_start|>'"
    add("--rename", type=pair, nargs="+", default=[], metavar="OLD=NEW", help=where)
    args = parser.parse_args(argv)
    if args.text is None and args.source is None:
        raise UserError(f"{args.dst} is the only name: give rows to train on and a new directory, or use --from.")
    if args.text is not None and args.source is not None:
        raise UserError("give rows to train on, or a tokenizer with --from, and not both.")
    if args.rename and args.source is None:
        raise UserError("--rename: the tokens of a tokenizer of --from, which is not given.")
    least = len(SPECIAL) + len(BYTES)
    if args.vocab_size < least:
        raise UserError(f"--vocab-size {args.vocab_size}: expected at least {least}, the bytes and special tokens.")
    check_new_directory(args.dst)  # before the minutes of training
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Write a tokenizer. Raise `UserError`."""
    args = parse_arguments(argv)
    if args.source is not None:
        tokenizer = renamed(args.source, args.rename)
    else:
        from sft.data import load_rows  # it needs packages that `byte_tokenizer` does without
        from sft.row_sources import parts_of_mixture

        how = {"config": args.dataset_config, "text_column": args.dataset_text_field}
        is_streamed = args.max_bytes is not None
        parts = [load_rows(name, streaming=is_streamed, **how) for name, _ in parts_of_mixture(args.text)]
        tokenizer = train_tokenizer(limited(lines_of(chain(*parts)), args.max_bytes), args.vocab_size)
    with new_directory(args.dst) as directory:
        tokenizer.save_pretrained(directory)
    print(f"Wrote {args.dst}, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    run_cli(main)
