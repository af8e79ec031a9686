"""Answer reasoning rows greedily with a model, and score the replies by reasoning-gym's own verifiers.

The file of --json also has the loss of the rows' own answers: it tells models apart that are too small to answer.

example:
  python -m sft.score_reasoning outputs/demo/sft/final test.jsonl --limit 50
"""

import argparse
import inspect
import json
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import stdev

from iha.errors import UserError, check_packages, run_cli
from iha.files import check_output_file, expanded, read_jsonl, write_json


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model directory, GGUF file or id on the Hub")
    parser.add_argument("data", nargs="+", help="files of rows made by make_reasoning_data.py, each scored apart")
    parser.add_argument("--limit", type=int, help="use the first LIMIT rows of each file only")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument(
        "--trust-rows", action="store_true", help="take verifiers that run fields of the rows, or a reply, as code"
    )
    parser.add_argument("--json", type=expanded, help="also write the result, replies included, to this file")
    args = parser.parse_args(argv)
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: expected at least 1.")
    if args.json is not None:
        check_output_file(args.json)
    for file in args.data:
        open(file, "rb").close()
    return args


if __name__ == "__main__":
    ARGS = run_cli(parse_arguments)  # before the imports below, which take seconds
    run_cli(lambda: check_packages("reasoning_gym"))

import reasoning_gym
import torch
from reasoning_gym.factory import DATASETS
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from iha.checkpoints import end_tokens_alone, load_model, load_tokenizer, note_slow_dtype, positions_of, vocabulary_of
from iha.sources import find_source
from iha.thoughts import opened_thought, skipped_tokens
from sft.data import rendering, to_messages
from sft.make_reasoning_data import extract_solution


# Replies that no verifier may accept: "complex_arithmetic" accepts "nan", and "game_of_life_halting" any word.
NONSENSE = ("", "nonsense", "nan")
VERIFIER_SECONDS = 5
verifier = cache(reasoning_gym.get_score_answer_fn)


@cache
def runs_rows(generator: str) -> bool:
    """Return whether the code of a generator, and so perhaps its verifier, evaluates text as Python."""
    source = inspect.getsource(sys.modules[DATASETS[generator][0].__module__])
    return re.search(r"\b(eval|exec|parse_expr|sympify)\(", source) is not None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in a block that takes longer. It works in the main thread only."""

    def stop(number, frame):
        raise TimeoutError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_right(reply: str, generator: str, entry: dict) -> bool:
    """Return whether the verifier gives the solution of a reply (see `extract_solution`) the full score.

    A part of the score does not count, because many verifiers give it to nonsense. A reply is also wrong if the
    verifier raises an exception or does not finish: some evaluate the reply, and would never finish "9**9**9".
    """
    try:
        with time_limit(VERIFIER_SECONDS):
            return verifier(generator)(extract_solution(reply), entry) == 1.0
    # Each verifier raises its own exceptions.
    except Exception:
        return False


def correctness(completions: list[list[dict]], generator: list[str], entry: list[str], **_) -> list[float]:
    """Return 1 for each reply that `is_right`, else 0: the reward of sft/recipes/grpo/trl.yaml.

    `generator` and `entry` are columns of `python -m sft.make_reasoning_data --prompts`. Raise `UserError` for a
    verifier that may run a reply or fields of the row as code, and for one that accepts nonsense.
    """
    entries = [json.loads(text) for text in entry]
    for name, example in dict(zip(generator, entries, strict=True)).items():
        if runs_rows(name):
            raise UserError(f"the verifier of {name!r} may run a reply as code: choose another generator.")
        if any(is_right(text, name, example) for text in NONSENSE):
            raise UserError(f"the verifier of {name!r} accepts nonsense: choose another generator.")
    replies = (reply["content"] for (reply,) in completions)
    return [float(is_right(*each)) for each in zip(replies, generator, entries, strict=True)]


@torch.inference_mode()
def generate_replies(model, tokenizer, prompts: list[list[dict]], batch_size: int, max_new_tokens: int) -> list[str]:
    """Return the model's greedy replies to chat prompts, in batches padded on the left.

    A reply begins with the thought that its prompt opens, and keeps the markers of thoughts.

    Raise `UserError` for prompts that leave no room for `max_new_tokens` more tokens in the model's positions.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = []
    for number, prompt in enumerate(prompts, 1):
        with rendering(f"row {number}"):
            texts.append(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))
    longest = max(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
    positions = positions_of(model.config)
    if positions is not None and longest + max_new_tokens > positions:
        raise UserError(
            f"the longest prompt has {longest} tokens and its reply may have {max_new_tokens} more, but the model has "
            f"only {positions} positions: generate fewer tokens or leave long prompts out."
        )
    # `generate` takes from the model's settings what its arguments leave open, and with a penalty for repetition it
    # would not be greedy.
    model.generation_config = end_tokens_alone(model, tokenizer)
    skipped = skipped_tokens(tokenizer)
    replies: list[str] = []
    bar = tqdm(total=len(texts), desc="Answering", unit="row")
    for start in range(0, len(texts), batch_size):
        inputs = tokenizer(
            texts[start : start + batch_size],
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(model.device)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            replies.append(tokenizer.decode([token for token in row if token not in skipped]))
        bar.update(len(output))
    bar.close()
    return [opened_thought(text) + reply for text, reply in zip(texts, replies)]


@torch.inference_mode()
def answer_losses(model, tokenizer, prompts: list[list[dict]], answers: list[str]) -> list[float]:
    """Return the loss in nats of each whole answer after its chat prompt."""
    texts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    losses = []
    for text, answer in zip(texts, answers, strict=True):
        before, own = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, answer))
        ids = torch.tensor([before + own], device=model.device)
        logits = model(ids).logits[0, len(before) - 1 : -1].float()
        losses.append(cross_entropy(logits, ids[0, len(before) :], reduction="sum").item())
    return losses


def read_rows(path: str | Path, limit: int | None = None) -> list[dict]:
    """Return the first `limit` rows of a file, or all, and reject an empty one."""
    rows = list(islice(read_jsonl(path), limit))
    if not rows:
        raise UserError(f"{path}: no rows.")
    return rows


def check_rows(rows: list[dict], trust_rows: bool = False) -> list[list[dict]]:
    """Return the chat prompts of rows of make_reasoning_data.py.

    Raise `UserError` for a row of another format, where the verifier rejects the row's own answer or accepts nonsense,
    and without `trust_rows` for a verifier that may run fields of the row as code.
    """
    prompts = []
    for number, row in enumerate(rows, 1):
        *prompt, answer = to_messages(row, f"row {number}")
        generator = row.get("generator")
        entry = row.get("entry")
        if generator not in list(DATASETS) or not isinstance(entry, dict):
            raise UserError(
                f"row {number}: expected the columns 'generator' and 'entry', as `python -m sft.make_reasoning_data` "
                "writes them."
            )
        if runs_rows(generator) and not trust_rows:
            raise UserError(
                f"row {number}: the verifier of {generator!r} may run fields of the row as code. If you made the rows "
                "or trust those who did, give --trust-rows."
            )
        if not is_right(answer["content"], generator, entry):
            raise UserError(f"row {number}: the verifier of {generator!r} does not accept the row's own answer.")
        if any(is_right(text, generator, entry) for text in NONSENSE):
            raise UserError(f"row {number}: the verifier of {generator!r} accepts nonsense; choose another generator.")
        prompts.append(prompt)
    return prompts


def summary(right: Sequence[bool], losses: Sequence[float]) -> dict[str, float | None]:
    """Return the accuracy, by `is_right`, and the mean loss in nats of the rows' own answers, with standard errors."""
    rows = len(right)
    accuracy = sum(right) / rows
    return {
        "accuracy": accuracy,
        "accuracy_stderr": (accuracy * (1 - accuracy) / rows) ** 0.5,
        "correct": sum(right),
        "rows": rows,
        "loss": sum(losses) / rows,
        "loss_stderr": stdev(losses) / rows**0.5 if rows > 1 else None,
    }


def main(argv: Sequence[str] | None = None) -> dict:
    """Run the command with the words of a command line."""
    return score_model(parse_arguments(argv))


def score_model(args: argparse.Namespace) -> dict:
    """Score the model on the rows of the command line, and print the accuracy of each part.

    A part is a file, or the rows of a generator if there is one file. Return what --json writes: the `summary` of all
    rows, the "replies", and the summaries of the "parts".
    """
    files = {file: read_rows(file, args.limit) for file in args.data}
    rows = [row for of_file in files.values() for row in of_file]
    prompts = check_rows(rows, args.trust_rows)
    source = find_source(args.model)
    model = load_model(source).to("cuda" if torch.cuda.is_available() else "cpu")
    if model.device.type == "cpu":
        note_slow_dtype(model.dtype)
    tokenizer = load_tokenizer(source, vocabulary_of(model.config))
    replies = generate_replies(model, tokenizer, prompts, args.batch_size, args.max_new_tokens)
    right = [is_right(reply, row["generator"], row["entry"]) for reply, row in zip(replies, rows, strict=True)]
    losses = answer_losses(model, tokenizer, prompts, [row["conversations"][-1]["value"] for row in rows])
    parts = [row["generator"] for row in rows]
    if len(files) > 1:
        parts = [file for file, of_file in files.items() for _ in of_file]
    of_parts: dict[str, list] = {}
    for part, *answer in zip(parts, right, losses, strict=True):
        of_parts.setdefault(part, []).append(answer)
    summaries = {part: summary(*zip(*answers)) for part, answers in of_parts.items()}
    result = summary(right, losses) | {"replies": replies, "parts": summaries}
    if args.json is not None:
        write_json(args.json, result)
    shown = summaries if len(summaries) > 1 else {}
    for name, each in {**shown, "all": result}.items():
        title = f"{name}: " if shown else ""
        print(f"{title}{each['correct']} of {each['rows']}: {each['accuracy']:.1%}")
    return result


if __name__ == "__main__":
    run_cli(lambda: score_model(ARGS))
