"""Write a text to pre-train on without a network: the modules of Python's standard library, one to a row.

example: python -m sft.make_text train.jsonl held_out.jsonl
"""

import argparse
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from iha.errors import UserError, run_cli
from iha.files import check_output_file, expanded, write_jsonl


HELD_OUT = 20  # one module in so many


def modules() -> list[str]:
    """Return the source of the standard library's modules, in a random order that is always the same."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


def main(argv: Sequence[str] | None = None) -> None:
    """Write rows to train on and to evaluate on. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=expanded, help="the .jsonl file of rows to train on")
    parser.add_argument("held_out", type=expanded, help="the .jsonl file of rows to evaluate on")
    args = parser.parse_args(argv)
    for file in (args.train, args.held_out):
        if file.suffix != ".jsonl":
            raise UserError(f"{file}: expected the name of a .jsonl file.")
        check_output_file(file)
    texts = modules()
    count = len(texts) // HELD_OUT
    for file, part in ((args.held_out, texts[:count]), (args.train, texts[count:])):
        write_jsonl(file, [{"text": text} for text in part])
        print(f"Wrote {file}, {len(part)} modules, {sum(len(text.encode()) for text in part):,} bytes")


if __name__ == "__main__":
    run_cli(main)
