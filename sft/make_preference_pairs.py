"""Make preference pairs from rows of make_reasoning_data.py: the row's own answer against a wrong one."""

import argparse
import random
import string
from collections.abc import Sequence
from pathlib import Path

from iha_io.command_io import UserError, check_output_file, open_regular, read_json, run_cli, write_jsonl


EXAMPLE = """examples:
  python -m sft.make_preference_pairs train.jsonl pairs.jsonl

  python -m sft.score_reasoning outputs/demo/sft/final train.jsonl --json replies.json
  python -m sft.make_preference_pairs train.jsonl harder.jsonl --replies replies.json
"""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="rows made by make_reasoning_data.py")
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    parser.add_argument(
        "--replies",
        type=Path,
        help="a model's replies to the rows, as score_reasoning.py --json writes them: the wrong ones are the "
        "rejected answers (default: the row's own answer with one digit or letter of its solution replaced)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the replaced digits and letters (default 0)")
    args = parser.parse_args(argv)
    check_output_file(args.out)
    open_regular(args.rows).close()
    return args


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds


from typing_extensions import TypedDict

from sft.data import to_messages
from sft.make_reasoning_data import extract_solution
from sft.score_reasoning import check_rows, is_right, read_rows


class Scored(TypedDict):
    """Hold what is read here of what score_reasoning.py writes."""

    replies: list[str]


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
        raise UserError(f"{where}: no digit or letter of the solution {solution!r:.80} makes it wrong; use --replies.")
    return wrong


def make_pairs(rows: list[dict], replies: list[str] | None, seed: int) -> list[dict]:
    """Make rows of `prompt`, `chosen` and `rejected`, each a list of {role, content}, in the order of `rows`.

    The rejected answer is the reply of the same place where that is wrong: a right or an empty reply gives no pair.
    Without `replies` it is the row's own answer `with_slip`. Raise `UserError` for a bad row (see `check_rows`).
    """
    source = random.Random(seed)
    pairs = []
    for number, (prompt, row) in enumerate(zip(check_rows(rows), rows, strict=True), 1):
        answer = to_messages(row, f"row {number}")[-1]["content"]
        wrong = with_slip(answer, row, f"row {number}", source) if replies is None else replies[number - 1]
        if wrong.strip() and not is_right(wrong, row["generator"], row["entry"]):
            turns = {"chosen": answer, "rejected": wrong}
            pairs.append(
                {"prompt": prompt} | {name: [{"role": "assistant", "content": turns[name]}] for name in turns}
            )
    return pairs


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file the command line asks for, whole or not at all. Raise `UserError`."""
    args = parse_arguments(argv)
    rows = read_rows(args.rows)
    replies = None
    if args.replies is not None:
        replies = read_json(args.replies, Scored)["replies"]
        if len(replies) != len(rows):
            raise UserError(f"{args.replies} holds {len(replies)} replies to {len(rows)} rows: they must be to these.")
    pairs = make_pairs(rows, replies, args.seed)
    if not pairs:
        raise UserError(f"{args.replies}: every reply is right or empty, so there is nothing to prefer.")
    write_jsonl(args.out, pairs)
    print(f"{len(pairs)} pairs from {len(rows)} rows: {args.out}")


if __name__ == "__main__":
    run_cli(main)
