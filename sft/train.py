"""Supervised fine-tuning of a causal language model with TRL's SFTTrainer: see `--help` and sft/recipes/README.md."""

import sys
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset
from trl import SFTConfig


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from command_io import UserError, one_line, run_cli
from sft.arguments import RecipeParser, RunArguments
from sft.checkpoints import newest_complete_checkpoint, save_final, write_losses
from sft.data import load_messages, tokenize
from sft.distributed import check_launch, whole_model
from sft.model import lora_config, prepare_model
from sft.trainer import MixingTrainer


USAGE = """accelerate launch sft/train.py --config sft/recipes/NAME/sft.yaml [--key value ...]

Fine-tune a model on OpenThoughts-format rows. Every key below can stand in the YAML file or on the command line, which
wins. A run that was stopped continues from its newest complete checkpoint when the same command is given again.

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


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe from its rows to `output_dir`/final, resuming what was begun. Raises `UserError`."""
    run, args = RecipeParser(SFTConfig, USAGE).parse(sys.argv[1:] if argv is None else argv)
    final = Path(args.output_dir) / "final"
    if final.exists():
        raise UserError(f"{final} exists: this run has finished. Remove it or choose another output_dir.")

    check_launch(run, args)

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
        mixing_lr_multiplier=run.mixing_lr_multiplier,
    )
    checkpoint = args.resume_from_checkpoint or newest_complete_checkpoint(args.output_dir)
    if checkpoint is not None:
        trainer.accelerator.print(f"Resuming from {checkpoint}.")
        args.eval_on_start = False  # the history of the checkpoint begins with that evaluation
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))

    model = whole_model(trainer)
    if trainer.is_world_process_zero():
        write_losses(trainer.state.log_history, args.output_dir)
        save_final(trainer, model, run, final)
        print(f"Final model: {final}\nLosses:      {Path(args.output_dir) / 'loss.json'} and loss.png")
    # DDP's reducer must go before the process group. The last one to hold the group destroys it and joins its threads;
    # the reducer would do so with the GIL held, while such a thread may still need the GIL to release a tensor, for
    # ever.
    accelerator = trainer.accelerator
    del trainer
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    run_cli(main)
