"""Optimise preferences with TRL's DPOTrainer: see `--help` and sft/recipes/README.md."""

import sys
from collections.abc import Sequence
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from accelerate import PartialState
from datasets import Dataset, Features
from transformers import PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer
from typing_extensions import TypedDict

from iha.errors import UserError, run_cli
from iha.files import typed
from sft.arguments import RecipeParser, RunArguments
from sft.base_model import load_base_model, lora_config, prepare_model, run_config
from sft.data import TURNS, UNREAD_COLUMNS, Messages, RowSource, load_rows, rendering, to_messages
from sft.run import begun, train
from sft.trainer import RecipeTrainer
from sft.training_rows import evaluation_source, split_rows


USAGE = """python -m sft.train_dpo --config sft/recipes/dpo/dpo.yaml [--key value ...]

Train a model to prefer the chosen answer of each row to the rejected one. A row holds `prompt`, `chosen` and
`rejected`, each a list of {role, content}. Every key below can be in the YAML file or on the command line, which
overrides the file. After a stop, the same command resumes from the newest complete checkpoint.

example:
  python -m sft.train_dpo \\
      --config sft/recipes/dpo/dpo.yaml --model_name_or_path outputs/demo/sft/final --dataset_name pairs.jsonl \\
      --output_dir outputs/dpo
"""
COLUMNS = ("prompt", "chosen", "rejected")


Pair = TypedDict("Pair", dict.fromkeys(COLUMNS, Messages))


class DPORecipeTrainer(RecipeTrainer, DPOTrainer):
    """Train by preference optimisation."""


def to_pair(row: dict, where: str) -> dict[str, list[dict[str, str]]]:
    """Return `prompt`, `chosen` and `rejected` of a row, each a list of {"role", "content"}.

    The prompt ends with the user, and both answers are the assistant's and differ. `where` names the row in errors.
    Raise `UserError` naming the row and the column.
    """
    typed(dict(row), Pair, where)  # a row of the datasets library is no dictionary
    pair = {}
    for column in ("chosen", "rejected"):
        turns = {name: row.get(name) for name in ("system", *UNREAD_COLUMNS)}
        turns["messages"] = [*row["prompt"], *row[column]]
        messages = to_messages(turns, f"{where}, 'prompt' and '{column}'")
        length = len(messages) - len(row[column])
        pair |= {"prompt": messages[:length], column: messages[length:]}
    if pair["prompt"][-1]["role"] != "user":
        raise UserError(f"{where}, column 'prompt': the last turn must be the user's.")
    for column in ("chosen", "rejected"):
        if pair[column][0]["role"] != "assistant":
            raise UserError(f"{where}, column '{column}': the first turn must be the assistant's.")
    chosen, rejected = (
        [(turn["role"], turn["content"].split()) for turn in pair[column]] for column in ("chosen", "rejected")
    )
    if chosen == rejected:
        raise UserError(f"{where}: 'chosen' and 'rejected' are the same but for white space; remove the row.")
    return pair


def load_pairs(source: RowSource) -> Dataset:
    """Load the columns of `to_pair` from any source of `load_rows`."""
    return load_rows(*source, schema=lambda _: (to_pair, Features(dict.fromkeys(COLUMNS, TURNS))))


def check_lengths(pairs: Dataset, tokenizer: PreTrainedTokenizerBase, args: DPOConfig, which: str = "") -> None:
    """Print how many pairs `max_length` cuts. `which` says in the messages which pairs these are.

    Raise `UserError` for a pair whose answers no longer differ after the cut: TRL drops some of these silently and
    learns nothing from the others.
    """
    length = args.max_length or sys.maxsize
    kept = slice(length) if args.truncation_mode == "keep_start" else slice(-length, None)
    cut = 0
    for number, pair in enumerate(pairs, 1):
        with rendering(f"{which}row {number}"):
            chosen, rejected = tokenizer.apply_chat_template(
                [pair["prompt"] + pair[column] for column in ("chosen", "rejected")], return_dict=True
            )["input_ids"]
        if chosen[kept] == rejected[kept]:
            raise UserError(
                f"{which}row {number}: its answers do not differ within max_length={args.max_length} tokens; raise "
                "max_length or remove the row."
            )
        cut += max(len(chosen), len(rejected)) > length
    if args.max_length is not None:
        PartialState().print(
            f"{cut} of {len(pairs)} {which}pairs are longer than max_length={args.max_length} tokens and are cut."
        )


def build_trainer(run: RunArguments, args: DPOConfig) -> DPORecipeTrainer:
    """Load the model and rows of a recipe and build its trainer. Raise `UserError`."""
    if args.beta == 0:
        raise UserError("beta=0: expected a number above 0, because with 0 no answer is preferred.")
    pairs = load_pairs(RowSource(run.dataset_name, run.dataset_train_split, run.dataset_config))
    source = evaluation_source(run, args)
    test_pairs = None if source is None else load_pairs(source)
    config = run_config(run, args)
    model, tokenizer = prepare_model(run, args, config)
    check_lengths(pairs, tokenizer, args)
    if test_pairs is not None:
        check_lengths(test_pairs, tokenizer, args, "held-out ")
    # TRL itself would load the reference model without the recipe's changes of the configuration. With adapters, the
    # model without them is the reference.
    reference = None if run.use_peft else load_base_model(run, config)
    train_rows, eval_rows = split_rows(pairs, run, args) if test_pairs is None else (pairs, test_pairs)
    trainer = DPORecipeTrainer(
        model=model,
        ref_model=reference,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=lora_config(run, model),
    )
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe of preference optimisation. Raise `UserError`."""
    run, args = RecipeParser(DPOConfig, USAGE).parse(argv)
    with begun(run, args) as checkpoint:
        train(build_trainer(run, args), run, checkpoint)


if __name__ == "__main__":
    run_cli(main)
