"""Fine-tune a causal language model on answers with TRL's SFTTrainer: see `--help` and sft/recipes/README.md.

examples/sft.py is the same pipeline on one page, without checks, records and resume.
"""

import sys
from collections.abc import Sequence
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from iha.errors import check_packages, run_cli


if __name__ == "__main__":
    run_cli(lambda: check_packages("datasets", "peft", "trl"))

from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from iha.model_cost import flops_of_a_token
from sft.arguments import RecipeParser, RunArguments
from sft.base_model import find_start, lora_config, prepare_model, run_config, stop_at_end_of_turn
from sft.data import Rows, are_texts, training_rows
from sft.record import write_record
from sft.run import begun, train
from sft.sources import data_of
from sft.trainer import SFTRecipeTrainer


USAGE = """python -m sft.train --config sft/recipes/NAME/sft.yaml [--key value ...]

Fine-tune a model on OpenThoughts-format rows, or train a preset from random weights on text. Every key below can be in
the YAML file or on the command line, which overrides the file. After a stop, the same command resumes from the newest
complete checkpoint. Another model or other data raises an error.

example:
  python -m sft.train --config sft/recipes/demo/sft.yaml \\
      --model_name_or_path checkpoints/smollm2-iha --dataset_name rows.jsonl --output_dir outputs/sft
  python -m sft.train --config sft/recipes/pretrain/sft.yaml --preset small-10m-paired-heads \\
      --tokenizer outputs/tokenizer --dataset_name train.txt --max_length 1024 --output_dir outputs/run
"""


def build_trainer(
    run: RunArguments,
    args: SFTConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapters: LoraConfig | None,
    rows: tuple[Rows, Dataset | None],
) -> SFTRecipeTrainer:
    """Build the trainer of a recipe from its model, its adapters, and the rows to train and to evaluate on.

    Raise `UserError`.
    """
    train_rows, eval_rows = rows
    if not are_texts(train_rows.features):
        stop_at_end_of_turn(model, tokenizer, args.distributed_state.print)
    trainer = SFTRecipeTrainer(
        model=model,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=adapters,
    )
    if isinstance(trainer.train_dataset, IterableDataset):
        # Repeat the stream without end, so that a resume can skip the batches that were seen, however many passes they
        # took. TRL has packed the stream before: of a short stream that repeats, it would pack 1,000 rows at a time.
        trainer.train_dataset = trainer.train_dataset.repeat(None)
    if run.peak_tflops is not None:
        peak = run.peak_tflops * 1e12 * args.world_size
        trainer.count_tokens.peak_tokens_per_second = peak / flops_of_a_token(model.config, args.max_length)
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe of supervised fine-tuning. Raise `UserError`."""
    run, args = RecipeParser(USAGE).parse(argv)
    data = data_of(run, args)
    with begun(run, args) as checkpoint:
        start = find_start(run)
        config = run_config(start, run, args)
        write_record(data, start, run, args, checkpoint)
        model, tokenizer = prepare_model(start, config, run, args)
        adapters = lora_config(run, model)
        rows = training_rows(data, run, args, tokenizer)
        train(build_trainer(run, args, model, tokenizer, adapters, rows), data, run, checkpoint)


if __name__ == "__main__":
    run_cli(main)
