"""Train a tokenizer on the rows of a run: byte-level BPE, which encodes any text, with the special tokens of chats.

examples:
  python -m sft.make_tokenizer train.txt outputs/tokenizer --vocab-size 1024
  python -m sft.make_tokenizer HuggingFaceFW/fineweb-edu outputs/tokenizer --dataset_config sample-10BT \\
      --max-bytes 1000000000 --vocab-size 49152
"""

import argparse
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from iha.errors import UserError, run_cli
from iha.files import check_new_directory, expanded, new_directory


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


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("text", type=os.path.expanduser, help="rows to train on, as for dataset_name of sft.train")
    add("dst", type=expanded, help="new directory")
    add("--vocab-size", type=int, default=8192, help="number of tokens (default 8192)")
    add("--dataset_text_field", default="text", help="column of plain text (default text)")
    add("--dataset_config", help="configuration of the dataset (default: its own default)")
    add("--max-bytes", type=int, help="stream the rows, and stop at so many bytes of text")
    args = parser.parse_args(argv)
    least = len(SPECIAL) + len(BYTES)
    if args.vocab_size < least:
        raise UserError(f"--vocab-size {args.vocab_size}: expected at least {least}, the bytes and special tokens.")
    check_new_directory(args.dst)  # before the minutes of training
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Write a tokenizer. Raise `UserError`."""
    args = parse_arguments(argv)
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
