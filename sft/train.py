"""Supervised fine-tuning of a causal language model with TRL's SFTTrainer: see `--help` and sft/recipes/README.md."""

import sys
from collections.abc import Sequence
from pathlib import Path

from trl import SFTConfig


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from command_io import UserError, run_cli
from sft.arguments import RecipeParser
from sft.checkpoints import newest_complete_checkpoint, save_final, write_losses
from sft.model import lora_config, prepare_model
from sft.packing import check_packing
from sft.trainer import MixingTrainer
from sft.training_rows import check_rows, epoch_summary, training_rows


USAGE = """accelerate launch sft/train.py --config sft/recipes/NAME/sft.yaml [--key value ...]

Fine-tune a model on OpenThoughts-format rows. Every key below can stand in the YAML file or on the command line, which
wins. A run that was stopped continues from its newest complete checkpoint when the same command is given again.

example:
  accelerate launch --config_file sft/accelerate_configs/single.yaml sft/train.py --config sft/recipes/demo/sft.yaml \\
      --model_name_or_path checkpoints/smollm2-iha --dataset_name rows.jsonl --output_dir outputs/demo
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe from its rows to `output_dir`/final, resuming what was begun. Raises `UserError`."""
    run, args = RecipeParser(SFTConfig, USAGE).parse(sys.argv[1:] if argv is None else argv)
    final = Path(args.output_dir) / "final"
    if final.exists():
        raise UserError(f"{final} exists: this run has finished. Remove it or choose another output_dir.")
    check_rows(run, args)

    model, tokenizer = prepare_model(run, args)
    check_packing(model, args)
    train_rows, eval_rows = training_rows(run, args, tokenizer)

    trainer = MixingTrainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=lora_config(run, model),
        mixing_lr_multiplier=run.mixing_lr_multiplier,
    )
    trainer.accelerator.print(epoch_summary(trainer, train_rows))
    checkpoint = args.resume_from_checkpoint or newest_complete_checkpoint(args.output_dir)
    if checkpoint is not None:
        trainer.accelerator.print(f"Resuming from {checkpoint}.")
        args.eval_on_start = False  # the history of the checkpoint begins with that evaluation
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))

    if trainer.is_world_process_zero():
        write_losses(trainer.state.log_history, args.output_dir)
        save_final(trainer, run, final)
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
