"""Supervised fine-tuning of a causal language model with TRL's SFTTrainer: see `--help` and sft/recipes/README.md."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

import torch
import yaml
from datasets import Dataset
from matplotlib.figure import Figure
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import SFTConfig, SFTTrainer, TrlParser


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from command_io import UserError, new_directory, one_line, run_cli, whole_file
from conversion_scripts.checkpoint_io import load_model, load_tokenizer
from model_cards.render import render_card, source_license, source_name
from modeling_iha.attention_kinds import ATTENTION_CLASSES
from sft.data import load_messages, tokenize


USAGE = """accelerate launch sft/train.py --config sft/recipes/NAME/sft.yaml [--key value ...]

Fine-tune a model on OpenThoughts-format rows. Every key below can stand in the YAML file or on the command line, which
wins. A run that was stopped continues from its newest complete checkpoint when the same command is given again.

example:
  accelerate launch --config_file sft/accelerate_configs/single.yaml sft/train.py --config sft/recipes/demo/sft.yaml \\
      --model_name_or_path checkpoints/smollm2-iha --dataset_name rows.jsonl --output_dir outputs/demo
"""
# The modules that mix heads or collapse pseudo-heads, with entries of order 1.
MIXING_MODULES = {module for attention in ATTENTION_CLASSES.values() for module in attention.mixing_modules}
DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class RunArguments:
    """What a run needs beyond TRL's SFTConfig."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint directory or id on the Hub to start from."})
    dataset_name: str = field(metadata={"help": "Rows: a local .jsonl file or the id of a dataset on the Hub."})
    dataset_split: str = field(default="train", metadata={"help": "Split to read of a dataset on the Hub."})
    eval_size: float = field(
        default=0.0, metadata={"help": "Rows held out for evaluation: a share below 1, or a number of rows."}
    )
    dtype: str = field(default="float32", metadata={"help": "Type of the trained weights.", "choices": DTYPES})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention core: eager, sdpa, flex_attention, flash_attention_2, ..."}
    )
    mixing_lr_multiplier: float = field(
        default=40.0,
        metadata={"help": "Learning rate of the mixing and collapse weights, in units of learning_rate."},
    )
    use_peft: bool = field(
        default=False,
        metadata={"help": "Train LoRA adapters and, of the model, only the mixing and collapse weights."},
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapters, in units of 1 / lora_r."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout before the adapters."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Names of the linear layers that get an adapter; all but the head by default."}
    )
    use_dora: bool = field(default=False, metadata={"help": "DoRA: adapters with a magnitude of their own."})


class RecipeParser(TrlParser):
    """TRL's parser of YAML plus command line, which refuses an unknown key by its name before anything else."""

    def __init__(self) -> None:
        super().__init__((RunArguments, SFTConfig), usage=USAGE, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> tuple[RunArguments, SFTConfig]:
        """Parse `--config FILE [--key value ...]`. Raises `UserError` for an unknown key or an impossible value."""
        try:
            return self.parse_args_and_config(argv)
        except IndexError:
            self.error("--config needs a YAML file")
        except (ValueError, yaml.YAMLError) as error:
            raise UserError(f"invalid configuration: {one_line(error)}") from error

    def set_defaults_with_config(self, **config) -> list[str]:
        self._refuse_unknown(super().set_defaults_with_config(**config))
        return []

    def parse_known_args(self, args=None, namespace=None) -> tuple[Namespace, list[str]]:
        namespace, unknown = super().parse_known_args(args, namespace)
        self._refuse_unknown(unknown)
        return namespace, []

    def _refuse_unknown(self, arguments: list[str]) -> None:
        if arguments:
            name = arguments[0].removeprefix("--")
            close = get_close_matches(name, [action.dest for action in self._actions], n=1)
            raise UserError(f"unknown key {name!r}: {f'did you mean {close[0]!r}?' if close else 'see --help.'}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help.")


class MixingTrainer(SFTTrainer):
    """SFTTrainer with a parameter group of its own for the mixing and collapse weights.

    Their entries are of order 1, so Adam at a usual fine-tuning rate of 5e-5 moves them by less than 0.003 in 60
    steps: the group learns at `mixing_lr_multiplier` times the backbone's rate and without weight decay, which would
    pull the exact warm start towards zero. A model without such weights trains as usual.
    """

    def __init__(self, *args, mixing_lr_multiplier: float, **kwargs) -> None:
        self.mixing_lr_multiplier = mixing_lr_multiplier
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        parameters = (self.model if model is None else model).named_parameters()
        mixing = [value for name, value in parameters if value.requires_grad and MIXING_MODULES & set(name.split("."))]
        if mixing:
            moved = {id(value) for value in mixing}
            for group in optimizer.param_groups:
                group["params"] = [value for value in group["params"] if id(value) not in moved]
            rate = self.args.learning_rate * self.mixing_lr_multiplier
            optimizer.add_param_group({"params": mixing, "lr": rate, "weight_decay": 0.0, "is_mixing": True})
        return optimizer

    def _get_learning_rate(self) -> float:
        # Asked for at the one moment that both rates are still those of the step just taken.
        self.mixing_learning_rate = self.lr_scheduler.get_last_lr()[-1]
        return super()._get_learning_rate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "learning_rate" in logs and self.optimizer.param_groups[-1].get("is_mixing"):
            logs["mixing_learning_rate"] = self.mixing_learning_rate
        super().log(logs, start_time)


def prepare_model(run: RunArguments, args: SFTConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in `run.dtype` and its tokenizer with the recipe's chat template. Raises `UserError`."""
    if args.model_init_kwargs:
        raise UserError("model_init_kwargs is not used here: set dtype and attn_implementation themselves.")
    model = load_model(run.model_name_or_path, getattr(torch, run.dtype))
    if run.attn_implementation is not None:
        try:
            model.set_attn_implementation(run.attn_implementation)
        except (ValueError, ImportError) as error:
            raise UserError(f"attn_implementation {run.attn_implementation!r}: {one_line(error)}") from error
    tokenizer = load_tokenizer(run.model_name_or_path, model.config.vocab_size)
    if args.chat_template_path is not None:
        template = Path(args.chat_template_path)
        if template.suffix != ".jinja" or not template.is_file():
            raise UserError(f"chat_template_path: {template} is not a .jinja file.")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return model, tokenizer


def lora_config(run: RunArguments, model: PreTrainedModel) -> LoraConfig | None:
    """The adapters that `run` asks for, or None. The mixing and collapse weights are no linear layers, which adapters
    are for, and small: they are trained in full beside them. Raises `UserError` for a target that the model does not
    have."""
    if not run.use_peft:
        return None
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if unknown := set(run.lora_target_modules or ()) - names:
        raise UserError(f"lora_target_modules: the model has no module named {', '.join(sorted(unknown))}.")
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=run.lora_target_modules or "all-linear",
        modules_to_save=sorted(MIXING_MODULES & names) or None,
        use_dora=run.use_dora,
    )


def newest_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """The Trainer checkpoint with the highest step in `output_dir` that was written to its end, or None.

    The Trainer writes trainer_state.json last; the weights are opened too, which finds a file cut short by a crash.
    """

    def is_complete(checkpoint: Path) -> bool:
        weights = list(checkpoint.glob("*.safetensors"))
        try:
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            for file in weights:
                with safe_open(file, framework="pt"):
                    pass
        except (OSError, ValueError, SafetensorError):
            return False
        return bool(weights)

    numbered = ((path.name.rpartition("-")[2], path) for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    by_step = {int(number): path for number, path in numbered if number.isdigit()}
    return next((by_step[step] for step in sorted(by_step, reverse=True) if is_complete(by_step[step])), None)


def write_losses(history: list[dict], output_dir: str | Path) -> None:
    """Write loss.json ({"train": [[step, loss], ...], "eval": ...}, nats per token) and its plot loss.png."""
    losses = {
        "train": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "eval": [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
    }
    with whole_file(Path(output_dir) / "loss.json") as path:
        path.write_text(json.dumps(losses, indent=1), encoding="utf-8")
    figure = Figure()
    axes = figure.subplots()
    for name, points in losses.items():
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, marker=".", label=name)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    with whole_file(Path(output_dir) / "loss.png") as path:
        figure.savefig(path, format="png", dpi=120)


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


def save_final(trainer: MixingTrainer, run: RunArguments, directory: Path) -> None:
    """Write the trained model, its code, tokenizer, chat template, generation config and model card as `directory`."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapters = ""
    if run.use_peft:
        model = model.merge_and_unload()
        adapters = f", LoRA adapters of rank {run.lora_r}, merged"
    with new_directory(directory) as temporary:
        model.save_pretrained(temporary)
        trainer.processing_class.save_pretrained(temporary)
        if model.config.model_type == "iha":
            source = run.model_name_or_path
            card = render_card(
                model.config,
                Path(trainer.args.output_dir).name,
                base_model=None if Path(source).exists() else source,
                license=source_license(source),
                datasets=None if Path(run.dataset_name).exists() else [run.dataset_name],
                details=f"## Fine-tuning\n\nFine-tuned from {source_name(source)} on {source_name(run.dataset_name)} for "
                f"{trainer.state.global_step} steps with TRL's SFTTrainer: learning rate {trainer.args.learning_rate:g}, "
                f"mixing and collapse weights {run.mixing_lr_multiplier:g} times that{adapters}.",
            )
            (temporary / "README.md").write_text(card, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe from its rows to `output_dir`/final, resuming what was begun. Raises `UserError`."""
    run, args = RecipeParser().parse(sys.argv[1:] if argv is None else argv)
    final = Path(args.output_dir) / "final"
    if final.exists():
        raise UserError(f"{final} exists: this run has finished. Remove it or choose another output_dir.")

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
