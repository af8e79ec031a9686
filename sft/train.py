"""Supervised fine-tuning of a causal language model with TRL's SFTTrainer: see `--help` and sft/recipes/README.md."""

import sys
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset
from trl import SFTConfig


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from command_io import UserError, one_line, run_cli
from sft.arguments import RunArguments
from sft.callbacks import SampleReplies
from sft.data import load_messages, tokenize
from sft.model import lora_config, prepare_model
from sft.run import run_recipe
from sft.trainer import MixingTrainer


USAGE = """accelerate launch sft/train.py --config sft/recipes/NAME/sft.yaml [--key value ...]

Fine-tune a model on OpenThoughts-format rows. Every key below can stand in the YAML file or on the command line, which
wins. A run that was stopped continues from its newest complete checkpoint when the same command is given again; with
another model, other data or another recipe it is refused.

example:
  accelerate launch --config_file sft/accelerate_configs/single.yaml sft/train.py --config sft/recipes/demo/sft.yaml \\
      --model_name_or_path checkpoints/smollm2-iha --dataset_name rows.jsonl --output_dir outputs/demo
"""


def split_rows(rows: Dataset, run: RunArguments, args: SFTConfig) -> tuple[Dataset, Dataset | None]:
    """Rows to train on and `run.eval_size` held-out rows, or None without. Raises `UserError` for an impossible
    size."""
    if run.eval_size == 0:
        if args.eval_strategy != "no" or args.eval_on_start:
            raise UserError("eval_strategy and eval_on_start need rows to evaluate on: set eval_size.")
        return rows, None
    size = run.eval_size if run.eval_size < 1 else int(run.eval_size)
    try:
        parts = rows.train_test_split(test_size=size, seed=args.seed)
    except ValueError as error:
        raise UserError(f"eval_size={run.eval_size:g} does not fit {len(rows)} rows: {one_line(error)}") from error
    return parts["train"], parts["test"]


def build_trainer(run: RunArguments, args: SFTConfig) -> MixingTrainer:
    """The trainer of a recipe with its model and rows loaded. Raises `UserError`."""
    model, tokenizer = prepare_model(run, args)
    # Rows that are packed by splitting are not cut.
    cuts = not args.packing or args.packing_strategy == "bfd"
    with args.main_process_first():
        rows = load_messages(run.dataset_name, run.dataset_split)
        rows = tokenize(rows, tokenizer, args.max_length if cuts else None, args.assistant_only_loss)
    train_rows, eval_rows = split_rows(rows, run, args)

    trainer = MixingTrainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=lora_config(run, model),
        mixing_learning_rate=run.mixing_rate(args.learning_rate),
    )
    if eval_rows is not None:
        trainer.add_callback(SampleReplies(eval_rows, run.sample_prompts, tokenizer, trainer.accelerator))
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe of supervised fine-tuning. Raises `UserError`."""
    run_recipe(SFTConfig, USAGE, build_trainer, argv)


if __name__ == "__main__":
    run_cli(main)
