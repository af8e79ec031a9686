"""Make preference pairs from rows of make_reasoning_data.py: the row's own answer against a wrong one."""

import argparse
import random
import string
from collections.abc import Sequence
from pathlib import Path

from iha_io.command_io import UserError, check_output_file, open_regular, run_cli, write_jsonl


EXAMPLE = """example:
  python -m sft.make_preference_pairs train.jsonl pairs.jsonl
"""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="rows made by make_reasoning_data.py")
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    parser.add_argument("--seed", type=int, default=0, help="of the replaced digits and letters (default 0)")
    args = parser.parse_args(argv)
    check_output_file(args.out)
    open_regular(args.rows).close()
    return args


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds


from sft.data import to_messages
from sft.make_reasoning_data import extract_solution
from sft.score_reasoning import check_rows, is_right, read_rows


def with_slip(answer: str, row: dict, where: str, source: random.Random) -> str:
    """Return the worked answer with one digit or letter of its solution replaced, so that it is wrong.

    Its steps stay. Raise `UserError` when the verifier rejects no such replacement.
    """
    solution = extract_solution(answer)
    steps, marker, end = answer.rpartition("<|begin_of_solution|>")
    before, _, after = end.partition(solution)
    slips = [
        steps + marker + before + solution[:place] + other + solution[place + 1 :] + after
        for place, character in enumerate(solution)
        for alphabet in (string.digits, string.ascii_lowercase, string.ascii_uppercase)
        for other in alphabet
        if character in alphabet and other != character
    ]
    source.shuffle(slips)
    wrong = next((slip for slip in slips if not is_right(slip, row["generator"], row["entry"])), None)
    if wrong is None:
        raise UserError(f"{where}: no digit or letter of the solution {solution!r:.80} makes it wrong.")
    return wrong


def make_pairs(rows: list[dict], seed: int) -> list[dict]:
    """Make rows of `prompt`, `chosen` and `rejected`, each a list of {role, content}, in the order of `rows`.

    The rejected answer is the row's own `with_slip`. Raise `UserError` for a bad row (see `check_rows`).
    """
    source, pairs = random.Random(seed), []
    for number, (prompt, row) in enumerate(zip(check_rows(rows), rows, strict=True), 1):
        answer = to_messages(row, f"row {number}")[-1]["content"]
        turns = {"chosen": answer, "rejected": with_slip(answer, row, f"row {number}", source)}
        pairs.append({"prompt": prompt} | {name: [{"role": "assistant", "content": turns[name]}] for name in turns})
    return pairs


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file the command line asks for, whole or not at all. Raise `UserError`."""
    args = parse_arguments(argv)
    rows = read_rows(args.rows)
    write_jsonl(args.out, make_pairs(rows, args.seed))
    print(f"{len(rows)} pairs: {args.out}")


if __name__ == "__main__":
    run_cli(main)
