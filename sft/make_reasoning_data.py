"""Make OpenThoughts-format reasoning rows whose answers are checked by reasoning-gym's own verifier.

examples:
  python -m sft.make_reasoning_data train.jsonl --rows 400 --generator chain_sum --options min_terms=3 max_terms=4
  python -m sft.make_reasoning_data test.jsonl --rows 50 --seed 1 --exclude train.jsonl \\
      --generator chain_sum --options min_terms=3 max_terms=4
"""

import argparse
import json
import re
from collections.abc import Sequence

from typing_extensions import TypedDict

from iha.errors import UserError, check_packages, refusing, run_cli
from iha.files import check_output_file, expanded, read_jsonl, write_jsonl
from iha.presets import fields_of
from iha.thoughts import after_thoughts


SYSTEM = "Think step by step, then give the solution."
# reasoning-gym draws entry i of seed s from the seed s + i: neighbouring seeds would give nearly the same entries.
SEED_STRIDE = 10_000_000
# More draws than this for each known question mean that the generator has no more questions at this difficulty.
DRAWS_PER_ROW = 100


def chain_sum_trace(metadata: dict) -> str:
    """Return the running sums of `a + b - c ...`, one a line: "4 - 1 = 3\\n3 - 7 = -4"."""
    total, *rest = metadata["expression"].split()
    lines = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = int(total) + int(term) if sign == "+" else int(total) - int(term)
        lines.append(f"{total} {sign} {term} = {result}")
        total = str(result)
    return "\n".join(lines)


def gcd_trace(metadata: dict) -> str:
    """Return the steps of Euclid's algorithm, one division a line: "780 mod 461 = 319"."""
    divisor, *rest = metadata["numbers"]
    lines = []
    for number in rest:
        while number:
            lines.append(f"{divisor} mod {number} = {divisor % number}")
            divisor, number = number, divisor % number
    return "\n".join(lines)


def spell_backward_trace(metadata: dict) -> str:
    """Return the letters of the word, then the letters in reverse order."""
    return f"{' '.join(metadata['word'])}\n{' '.join(reversed(metadata['word']))}"


# The metadata of other generators do not hold the steps: their rows have a solution only.
TRACES = {"chain_sum": chain_sum_trace, "gcd": gcd_trace, "spell_backward": spell_backward_trace}


def assistant_text(entry: dict, generator: str) -> str:
    """Return the worked answer to a reasoning-gym entry in OpenThoughts' markers."""
    thought = ""
    if generator in TRACES:
        thought = f"<|begin_of_thought|>\n{TRACES[generator](entry['metadata'])}\n<|end_of_thought|>\n"
    return f"{thought}<|begin_of_solution|>\n{entry['answer']}\n<|end_of_solution|>"


def extract_solution(reply: str) -> str:
    """Return the solution in a reply after its thoughts: the last block, else the last number, else all of it.

    The last two give credit for a right answer to a model that was never shown the markers of a block.
    """
    said = after_thoughts(reply).replace("\N{MINUS SIGN}", "-")
    _, marker, solution = said.rpartition("<|begin_of_solution|>")
    if marker:
        return solution.partition("<|end_of_solution|>")[0].strip()
    numbers = re.findall(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?", said)
    return numbers[-1] if numbers else said.strip()


class Made(TypedDict):
    """Hold the part of a row of --exclude that is read here."""

    entry: TypedDict("Entry", {"question": str})


def make_rows(rows: int, seed: int, generator: str, options: dict, excluded: set[str]) -> list[dict]:
    """Make `rows` rows with different questions, none of them in `excluded`.

    Each row holds `system` and `conversations` as in OpenThoughts-114k, and `generator` and `entry`, which the
    verifier needs. Raise `UserError` for options that the generator cannot draw with, for a generator whose verifier
    rejects its own answer, and if there are fewer different questions.
    """
    import reasoning_gym  # here, because it takes seconds

    draws = rows * DRAWS_PER_ROW
    what = f"generator {generator!r} with seed {seed} and options {options}"
    # Generators do not check all of their options, and each raises its own exceptions.
    with refusing(what, Exception):
        dataset = reasoning_gym.create_dataset(generator, seed=seed * SEED_STRIDE, size=draws, **options)
    seen = set(excluded)
    made = []
    for index in range(draws):
        if len(made) == rows:
            return made
        if index > DRAWS_PER_ROW * (len(seen) + 1):
            break
        with refusing(what, Exception):
            entry = json.loads(json.dumps(dataset[index], default=str))
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        text = assistant_text(entry, generator)
        with refusing(what, Exception):
            score = dataset.score_answer(extract_solution(text), entry)
        if score != 1.0:
            raise UserError(
                f"generator {generator!r}: its verifier does not accept {entry['answer']!r}; choose another."
            )
        turns = [{"from": "user", "value": entry["question"]}, {"from": "assistant", "value": text}]
        made.append({"system": SYSTEM, "conversations": turns, "generator": generator, "entry": entry})
    raise UserError(f"generator {generator!r} with options {options} has only {len(made)} more questions, not {rows}.")


def as_prompt(row: dict) -> dict:
    """Return a row of `make_rows` as TRL's GRPOTrainer takes it: `prompt`, and what the verifier needs.

    `entry` is JSON, because as a column it would have the keys of all generators in each row.
    """
    system = {"role": "system", "content": row["system"]}
    question = {"role": "user", "content": row["conversations"][0]["value"]}
    return {"prompt": [system, question], "generator": row["generator"], "entry": json.dumps(row["entry"])}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file that a command line asks for, whole or not at all. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=expanded, help="the .jsonl file to write")
    parser.add_argument("--rows", type=int, required=True, help="number of rows")
    parser.add_argument("--seed", type=int, default=0, help="different seeds draw different entries (default 0)")
    parser.add_argument("--generator", default="chain_sum", help="reasoning-gym generator (default chain_sum)")
    parser.add_argument(
        "--options",
        nargs="*",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="the generator's difficulty options",
    )
    parser.add_argument(
        "--exclude", type=expanded, help="a file that this command wrote: its questions are not used again"
    )
    parser.add_argument("--prompts", action="store_true", help="write rows without answers, for `trl grpo`")
    args = parser.parse_args(argv)
    options = fields_of(args.options)
    check_packages("reasoning_gym")
    check_output_file(args.out)
    excluded = {row["entry"]["question"] for row in read_jsonl(args.exclude, Made)} if args.exclude else set()
    rows = make_rows(args.rows, args.seed, args.generator, options, excluded)
    write_jsonl(args.out, [as_prompt(row) for row in rows] if args.prompts else rows)
    print(f"{len(rows)} rows of {args.generator}: {args.out}")


if __name__ == "__main__":
    run_cli(main)
