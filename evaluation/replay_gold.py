"""Give every scorer its benchmark's own answers, which must score 1, and broken ones, which must score 0.

A broken answer to mathematics has another number, and a broken program raises or returns None. The command writes one
JSON file with the counts, the rows that are not as expected, and the versions.

example: python -m evaluation.replay_gold --data DIR --output gold.json --confirm-run-unsafe-code
"""

import argparse
import json
import platform
import re
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from evaluation import data, run_code, scores
from iha.errors import UserError, run_cli
from iha.files import check_output_file, expanded, write_json


# Each of these functions returns a gold reply and a broken reply to a row.


def _gsm8k(row: dict) -> tuple[str, str]:
    worked, _, answer = row["answer"].rpartition("####")
    return row["answer"], f"{worked}#### {int(answer.replace(',', '')) + 1}"


def _math500(row: dict) -> tuple[str, str]:
    return row["solution"], "The answer is $\\boxed{-987654321.5}$."


def _mbpp(row: dict) -> tuple[str, str]:
    name = re.search(r"(\w+)\s*\(", row["test_list"][0].removeprefix("assert")).group(1)
    broken = f"{row['code']}\ndef {name}(*arguments): raise NotImplementedError"
    return f"Some thoughts.\n```python\n{row['code']}\n```\nDone.", f"```python\n{broken}\n```"


def _humaneval(row: dict) -> tuple[str, str]:
    whole = f"{row['prompt']}{row['canonical_solution']}"
    return f"```python\n{whole}\n```", f"```python\n{row['prompt']}    return None\n```"


# A benchmark -> its file of rows, its scorer, and the function that makes replies.
REPLAYS: dict[str, tuple[str, Callable, Callable]] = {
    "gsm8k": ("gsm8k/test.jsonl", scores.gsm8k, _gsm8k),
    "math500": ("math500/test.jsonl", scores.math500, _math500),
    "mbpp": ("mbpp/test.jsonl", scores.mbpp, _mbpp),
    "humaneval": ("humaneval/HumanEval.jsonl", scores.humaneval, _humaneval),
}


def replay(name: str, directory: Path | None, limit: int | None = None) -> dict:
    """Count right replies: {"rows", "gold_right", "broken_right", "gold_wrong_rows", "broken_right_rows"}."""
    file, scorer, replies = REPLAYS[name]
    rows = data.rows(file, directory)[:limit]
    right: tuple[list[int], list[int]] = [], []
    for index, row in enumerate(tqdm(rows, desc=name)):
        for reply, found in zip(replies(row), right):
            (figure,) = scorer(row, [reply]).values()
            found.extend([index] * (figure == 1))
    gold, broken = right
    return {
        "rows": len(rows),
        "gold_right": len(gold),
        "broken_right": len(broken),
        "gold_wrong_rows": sorted(set(range(len(rows))) - set(gold)),
        "broken_right_rows": broken,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=expanded, help="directory of data files (default: the Hub)")
    parser.add_argument("--limit", type=int, help="only the first LIMIT rows of each")
    parser.add_argument("--output", type=expanded, required=True, help="JSON file to write")
    parser.add_argument(run_code.FLAG, action="store_true", help="run the programs of MBPP and HumanEval")
    args = parser.parse_args(argv)
    check_output_file(args.output, replace=True)
    if not args.confirm_run_unsafe_code:
        raise UserError(f"MBPP and HumanEval hold programs, which would run: give {run_code.FLAG}.")
    results = {}
    started = time.monotonic()
    for name in REPLAYS:
        results[name] = replay(name, args.data, args.limit)
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    packages = ("lm_eval", "math-verify", "latex2sympy2_extended", "sympy", "antlr4-python3-runtime")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    record = {"benchmarks": results, "versions": versions, "seconds": round(time.monotonic() - started)}
    write_json(args.output, record)


if __name__ == "__main__":
    run_cli(main)
