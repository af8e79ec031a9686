"""Fine-tune a causal language model on answers with TRL's SFTTrainer: see `--help` and sft/recipes/README.md."""

import sys
from collections.abc import Sequence
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from iha_io.command_io import run_cli
from sft.arguments import RunArguments, answer_help


USAGE = """python -m sft.train --config sft/recipes/NAME/sft.yaml [--key value ...]

Fine-tune a model on OpenThoughts-format rows. Every key below can stand in the YAML file or on the command line, which
wins. A run that was stopped continues from its newest complete checkpoint when the same command is given again; with
another model, other data or another recipe it is refused.

example:
  python -m sft.train --config sft/recipes/demo/sft.yaml \\
      --model_name_or_path checkpoints/smollm2-iha --dataset_name rows.jsonl --output_dir outputs/sft
"""

if __name__ == "__main__":
    run_cli(lambda: answer_help(USAGE))  # before the imports below, which take seconds

from trl import SFTConfig

from sft.base_model import prepare_model, run_config, stop_at_end_of_turn
from sft.memory_plan import check_memory
from sft.run import run_recipe
from sft.trainer import MixingTrainer, SampleReplies
from sft.training_rows import check_packing, check_rows, epoch_summary, training_rows


def build_trainer(run: RunArguments, args: SFTConfig) -> MixingTrainer:
    """Load the model and rows of a recipe and build its trainer."""
    check_rows(run, args)
    config = run_config(run, args)
    check_memory(config, run, args)
    model, tokenizer = prepare_model(run, args, config)
    check_packing(model, args)
    train_rows, eval_rows = training_rows(run, args, tokenizer)
    trainer = MixingTrainer.of_recipe(run, args, model, tokenizer, (train_rows, eval_rows))
    if run.dataset_streaming:
        # A resume skips the batches that were seen; a stream that ends would end the skipping with its first pass.
        trainer.train_dataset = trainer.train_dataset.repeat(None)
    if eval_rows is not None:
        trainer.add_callback(SampleReplies(eval_rows, run.sample_prompts, tokenizer, trainer.accelerator))
    if args.assistant_only_loss and (token := stop_at_end_of_turn(model, tokenizer)):
        trainer.accelerator.print(f"The final model also stops at {token!r}, with which the rows end a turn.")
    trainer.accelerator.print(epoch_summary(trainer, train_rows))
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe of supervised fine-tuning. Raise `UserError`."""
    run_recipe(SFTConfig, USAGE, build_trainer, argv)


if __name__ == "__main__":
    run_cli(main)
