"""Train a tokenizer on a text file: byte-level BPE, which encodes any text, with the special tokens of chats.

example: python -m sft.make_tokenizer train.txt outputs/tokenizer --vocab-size 1024
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from iha.errors import UserError, refusing, run_cli
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


def train_tokenizer(text: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens on a text file, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=BYTES)
    # Python reads "\r\n" as "\n", as the datasets library does when a run reads the text.
    with open(text, encoding="utf-8") as lines:
        tokenizer.train_from_iterator(lines, trainer)
    return wrapped(tokenizer)


def main(argv: Sequence[str] | None = None) -> None:
    """Write a tokenizer. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=expanded, help="file to train on")
    parser.add_argument("dst", type=expanded, help="new directory")
    parser.add_argument("--vocab-size", type=int, default=8192, help="number of tokens (default 8192)")
    args = parser.parse_args(argv)
    least = len(SPECIAL) + len(BYTES)
    if args.vocab_size < least:
        raise UserError(f"--vocab-size {args.vocab_size}: expected at least {least}, the bytes and special tokens.")
    if not args.text.is_file():
        raise UserError(f"{args.text}: no such file.")
    check_new_directory(args.dst)  # before the minutes of training
    with refusing(f"{args.text} is not text in UTF-8", Exception):  # the library's own type has no other base
        tokenizer = train_tokenizer(args.text, args.vocab_size)
    with new_directory(args.dst) as directory:
        tokenizer.save_pretrained(directory)
    print(f"Wrote {args.dst}, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    run_cli(main)
