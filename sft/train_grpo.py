"""Train with TRL's GRPOTrainer and reasoning-gym's verifiers as reward: see `--help` and sft/recipes/README.md."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from datasets import Dataset
from torch.utils.data import Sampler
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import GRPOConfig, GRPOTrainer

from iha.errors import UserError, refusing, run_cli
from sft.arguments import RecipeParser, RunArguments
from sft.base_model import CONFIG_KEYS, lora_config, prepare_model, run_config
from sft.run import begun, train
from sft.score_reasoning import check_positions, check_rows, is_right, read_rows
from sft.trainer import RecipeTrainer
from sft.training_rows import split_rows


USAGE = """python -m sft.train_grpo --config sft/recipes/grpo/grpo.yaml [--key value ...]

Train a model on its own answers to reasoning rows (see sft/make_reasoning_data.py): a right answer earns 1. Start from
a model that is sometimes right, after sft/train.py, because a group of answers that earn the same teaches nothing.
Every key below can be in the YAML file or on the command line, which overrides the file. After a stop, the same
command resumes from the newest complete checkpoint.

example:
  python -m sft.train_grpo \\
      --config sft/recipes/grpo/grpo.yaml --model_name_or_path outputs/demo/sft/final --dataset_name train.jsonl \\
      --output_dir outputs/grpo
"""


class GRPORecipeTrainer(RecipeTrainer, GRPOTrainer):
    """Train by reinforcement learning."""

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler

    def _init_training_state(self, *args) -> tuple[int, int]:
        epochs, batches = super()._init_training_state(*args)
        if batches % batches_of_replies(self.args) != 0:
            raise UserError(
                f"step {self.state.global_step} lies between two steps that learn from the same replies, which no "
                "checkpoint holds: resume from another checkpoint, or start again in another output_dir."
            )
        for _ in range(epochs):
            # TRL's sampler draws the order of each epoch from one generator, which a resumed run starts anew.
            next(iter(self._train_sampler), None)
        return epochs, batches


def batches_of_replies(args: GRPOConfig) -> int:
    """Return how many batches of a process learn from the same replies."""
    return args.num_iterations * args.steps_per_generation


def check_saves(args: GRPOConfig) -> None:
    """Refuse checkpoints between two steps that learn from the same replies, which they do not hold.

    Raise `UserError`.
    """
    replies = batches_of_replies(args)
    accumulated = args.gradient_accumulation_steps
    if accumulated % replies == 0:
        return
    if args.save_strategy == SaveStrategy.STEPS:
        key = "save_steps"
    elif args.save_strategy == SaveStrategy.BEST and args.eval_strategy == IntervalStrategy.STEPS:
        key = "eval_steps"
    else:
        return  # an epoch ends with the last step that learns from its replies
    if replies % accumulated != 0:
        raise UserError(
            f"gradient_accumulation_steps={accumulated}: {replies} batches learn from the same replies "
            "(num_iterations, steps_per_generation), and a checkpoint could lie between them, where no run could "
            f"resume: set it to a number that divides {replies}, or save_strategy to epoch."
        )
    cycle = replies // accumulated
    steps = getattr(args, key)
    if steps < 1 or steps % cycle != 0:  # below 1 it is a share of all steps
        raise UserError(
            f"{key}={steps:g}: {cycle} steps learn from the same replies (num_iterations, "
            f"steps_per_generation), and no run could resume between them: set {key} to a multiple of {cycle}."
        )


def correctness(completions: list[list[dict]], generator: list[str], entry: list[str], **_) -> list[float]:
    """Return 1 for each reply that `is_right`, else 0. `entry` holds the rows' entries as JSON."""
    return [
        float(is_right(reply["content"], name, json.loads(text)))
        for (reply,), name, text in zip(completions, generator, entry, strict=True)
    ]


def load_prompts(path: str, trust_rows: bool = False) -> Dataset:
    """Load `prompt`, `generator` and `entry` from a file of make_reasoning_data.py.

    Entries stay JSON, because as columns the rows of two generators would get each other's keys. Raise `UserError`
    for a missing or empty file and for a bad row (see `check_rows`).
    """
    rows = read_rows(path)
    return Dataset.from_list(
        [
            {"prompt": prompt, "generator": row["generator"], "entry": json.dumps(row["entry"])}
            for prompt, row in zip(check_rows(rows, trust_rows), rows, strict=True)
        ]
    )


def build_trainer(run: RunArguments, args: GRPOConfig) -> GRPORecipeTrainer:
    """Load the model and rows of a recipe and build its trainer. Raise `UserError`."""
    if args.max_completion_length is None:
        raise UserError("max_completion_length: give the longest reply in tokens.")
    if args.use_transformers_continuous_batching and (args.bf16 or args.fp16):
        raise UserError(
            "use_transformers_continuous_batching with bf16 or fp16: TRL would round the weights that are trained to "
            "half precision for the answers, and keep them so. Train in float32, or remove the key."
        )
    changed = [key for key in (*CONFIG_KEYS, "interleaved_window") if getattr(run, key) is not None]
    if changed and args.beta and not run.use_peft:
        raise UserError(
            f"{', '.join(changed)} with beta={args.beta:g}: TRL loads the reference model, without what the recipe "
            "changes. Train with sft/train.py and these keys before, or set beta to 0 or use_peft to true."
        )
    check_saves(args)
    rows = load_prompts(run.dataset_name, run.trust_rows)
    model, tokenizer = prepare_model(run, args, run_config(run, args))
    if args.use_transformers_continuous_batching:
        with refusing("use_transformers_continuous_batching", NotImplementedError):
            model.init_continuous_batching()
    check_positions(model, tokenizer, list(rows["prompt"]), args.max_completion_length)
    train_rows, eval_rows = split_rows(rows, run, args)
    trainer = GRPORecipeTrainer(
        model=model,
        reward_funcs=correctness,
        args=args,
        train_dataset=train_rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer,
        peft_config=lora_config(run, model),
    )
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe of reinforcement learning. Raise `UserError`."""
    run, args = RecipeParser(GRPOConfig, USAGE).parse(argv)
    with begun(run, args) as checkpoint:
        train(build_trainer(run, args), run, checkpoint)


if __name__ == "__main__":
    run_cli(main)
