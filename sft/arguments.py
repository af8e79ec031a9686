"""Read the keys of a recipe, TRL's and our own, from a YAML file and the command line, and refuse impossible values.

`--help` must not wait for PyTorch, so what needs it is imported where it is used.
"""

import sys
from argparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from math import inf
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from trl import ModelConfig, ScriptArguments, TrlParser

from common.command_io import UserError, one_line, read_yaml, refusing


if TYPE_CHECKING:
    from transformers import TrainingArguments


# The two keys set the same rate: one on the command line wins over either in the file.
RATES_OF_MIXING = {"mixing_lr_multiplier", "mixing_learning_rate"}
DEFAULT_MIXING_LR_MULTIPLIER = 40.0
# Keys of TRL that nothing here reads: they would silently do nothing.
UNUSED_KEYS = (
    *("model_revision", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
    *("bnb_4bit_quant_storage", "lora_task_type", "dataset_config", "dataset_test_split", "ignore_bias_buffers"),
)
# What sft/train.py alone reads.
KEYS_OF_SFT = ("dataset_streaming", "sample_prompts", "memory_gb")
# Class of a trainer's arguments -> the figures of every evaluation, by which a checkpoint can be the best.
BEST_BY = {
    "SFTConfig": ("loss", "mean_token_accuracy"),
    "DPOConfig": ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"),
    "GRPOConfig": ("loss", "reward", "rewards/correctness/mean", "rewards/solution_format/mean"),
}


def option(help: str, default: Any = None, choices: tuple[str, ...] | None = None) -> Any:
    """Declare a key of a recipe."""
    return field(default=default, metadata={"help": help} | ({"choices": choices} if choices else {}))


@dataclass(kw_only=True)
class RunArguments(ScriptArguments, ModelConfig):
    """Hold TRL's arguments of scripts and models, and what a run needs beside them."""

    model_name_or_path: str = option("Checkpoint directory or id on the Hub to start from.", MISSING)
    dataset_name: str = option(
        "Rows: a directory of sft/prepare.py, a .jsonl, .parquet or .txt file, a .yaml mixture, an id on the Hub.",
        MISSING,
    )
    dataset_train_split: str = option("Split to read of a dataset on the Hub.", "train")
    dataset_streaming: bool = option("Read and tokenize the rows as they are used; needs max_steps.", False)
    dtype: str = option("Type of the trained weights.", "float32", ("float32", "bfloat16", "float16"))
    eval_size: float = option("Rows held out for evaluation: a share below 1, or a number of rows.", 0.0)
    sample_prompts: int = option("Held-out prompts that the model answers, greedily, at each evaluation.", 2)
    attention_form: str | None = option(
        'How "iha" layers compute: see IHAModel.attention_form.', choices=("virtual", "base")
    )
    num_pseudo_heads: int | None = option("P that the recipe is for; another P of the checkpoint is refused.")
    max_position_embeddings: int | None = option("Positions, in tokens, that the trained checkpoint declares.")
    rope_theta: float | None = option("RoPE base to train with, which the trained checkpoint keeps.")
    sliding_window: int | None = option("Window of the sliding layers, in tokens, which the trained checkpoint keeps.")
    memory_gb: float | None = option("Memory of a device in GB to plan for, instead of what this machine has.")
    mixing_lr_multiplier: float | None = option(
        "Learning rate of the mixing and collapse weights, in units of learning_rate: 40 by default."
    )
    mixing_learning_rate: float | None = option(
        "Learning rate of the mixing and collapse weights by itself, in place of the multiplier."
    )
    push_repo_id: str | None = option("Repository on the Hub, such as me/model, to publish the final model in.")

    def mixing_rate(self, learning_rate: float) -> float:
        """Return the peak learning rate of the mixing and collapse weights beside the backbone's."""
        if self.mixing_learning_rate is not None:
            return self.mixing_learning_rate
        multiplier = self.mixing_lr_multiplier
        return learning_rate * (DEFAULT_MIXING_LR_MULTIPLIER if multiplier is None else multiplier)


def answer_help(usage: str) -> None:
    """Print `usage` and the keys of `RunArguments`, and exit, where the command line asks for help."""
    if not {"-h", "--help"} & set(sys.argv[1:]):
        return
    parser = ArgumentParser(usage=usage, allow_abbrev=False, argument_default=SUPPRESS)
    parser.add_argument("--help_all", action="store_true", help="show the keys of the trainer as well")
    parser.add_argument("--config", metavar="FILE", help="YAML file with keys and values")
    for key in fields(RunArguments):
        if key.name not in UNUSED_KEYS:
            default = "required" if key.default is MISSING else f"default: {key.default}"
            text = f"{key.metadata['help']} ({default})".replace("%", "%%")
            parser.add_argument(f"--{key.name}", metavar="VALUE", help=text)
    parser.print_help()
    sys.exit()


class RecipeParser(TrlParser):
    """Parse YAML and command line as TRL does, by one set of rules for both, and refuse an unknown key by its name."""

    def __init__(self, config_class: "type[TrainingArguments]", usage: str) -> None:
        super().__init__((RunArguments, config_class), usage=usage, allow_abbrev=False)
        self.add_argument("--help_all", action="help", help="show every key, and exit")

    def parse(self, argv: Sequence[str]) -> "tuple[RunArguments, TrainingArguments]":
        """Parse `--config FILE [--key value ...]`.

        Raise `UserError` for an unknown key or an impossible value.
        """
        self._given = argv
        # TRL knows the form with a space only.
        argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        if argv[-1:] == ["--config"]:
            self.error("--config needs a YAML file")
        if argv.count("--config") > 1:
            self.error("--config is given twice: expected one YAML file")
        with refusing("invalid configuration", ValueError, TypeError, ImportError, yaml.YAMLError):
            if "--config" in argv:
                read_yaml(argv[argv.index("--config") + 1])  # TRL would take the last of two equal keys
            return self.parse_args_and_config(argv)

    def set_defaults_with_config(self, **config) -> list[str]:
        if RATES_OF_MIXING & {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in self._given}:
            config = {key: value for key, value in config.items() if key not in RATES_OF_MIXING}
        hints = {key: hint for kind in self.dataclass_types for key, hint in get_type_hints(kind).items()}
        # A key that is true by default has a second action, --no_KEY.
        actions = {action.dest: action for action in reversed(self._actions)}
        known = {key: self._read(actions[key], value, hints[key]) for key, value in config.items() if key in hints}
        self._refuse_unknown(super().set_defaults_with_config(**config | known))
        return []

    def _read(self, action, value: Any, hint: Any) -> Any:
        # By the rules of the command line, which takes no null for a number.
        types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        types = {get_origin(each) or each for each in types}
        # Transformers documents fsdp as text and takes true for it as well.
        if type(value) in types & {type(None), bool, list, dict} or (value is True and types == {str, type(None)}):
            return value
        if value is None or isinstance(value, (list, dict)):
            names = " or ".join(sorted(each.__name__ for each in types))
            raise UserError(f"invalid configuration: {action.dest} is {value!r:.80}: expected {names}.")
        try:
            value = self._get_value(action, str(value))
            self._check_value(action, value)
        except ArgumentError as error:
            self.error(str(error))
        return [value] if action.nargs == "+" else value

    def parse_known_args(self, args=None, namespace=None) -> tuple[Namespace, list[str]]:
        namespace, unknown = super().parse_known_args(args, namespace)
        self._refuse_unknown(unknown)
        return namespace, []

    def _refuse_unknown(self, arguments: list[str]) -> None:
        if arguments:
            name = arguments[0].removeprefix("--")
            keys = {action.dest for action in self._actions}.difference(UNUSED_KEYS)
            close = get_close_matches(name, keys, n=1)
            raise UserError(f"unknown key {name!r}: {f'did you mean {close[0]!r}?' if close else 'see --help.'}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help.")


# What a key may hold: a test that NaN fails, its name, and the keys. A key without a value passes.
LIMITS: list[tuple[Callable[[float], bool], str, tuple[str, ...]]] = [
    (
        lambda value: 1 <= value < inf,
        "at least 1",
        (
            *("max_length", "per_device_train_batch_size", "per_device_eval_batch_size"),
            *("gradient_accumulation_steps", "lora_r", "lora_alpha", "dataset_num_proc"),
            *("num_pseudo_heads", "max_position_embeddings", "sliding_window", "save_total_limit"),
            *("max_completion_length", "num_iterations", "steps_per_generation"),
            "pad_to_multiple_of",
        ),
    ),
    (
        lambda value: 0 <= value < inf,
        "a finite number, 0 or more",
        (
            *("learning_rate", "mixing_lr_multiplier", "mixing_learning_rate", "weight_decay", "max_grad_norm"),
            *("warmup_steps", "eval_size", "eval_delay", "sample_prompts", "dataloader_num_workers", "beta"),
            "neftune_noise_alpha",
        ),
    ),
    (
        lambda value: 0 < value < inf,
        "a finite number above 0",
        (
            *("num_train_epochs", "logging_steps", "eval_steps", "save_steps", "adam_epsilon", "rope_theta"),
            *("memory_gb", "temperature", "repetition_penalty"),
        ),
    ),
    (lambda value: value < 1 or value % 1 == 0, "a share below 1, or a whole number of rows", ("eval_size",)),
    (lambda value: 0 <= value < 0.5, "at least 0 and below 0.5", ("label_smoothing",)),
    (
        lambda value: 0 <= value < 1,
        "at least 0 and below 1",
        ("lora_dropout", "adam_beta1", "adam_beta2", "label_smoothing_factor"),
    ),
    (lambda value: 0 <= value < 2**32, f"from 0 to {2**32 - 1}", ("seed", "data_seed")),
    (lambda value: value == -1 or value >= 1, "at least 1, or -1 to train for num_train_epochs", ("max_steps",)),
]


def check_values(run: RunArguments, args: "TrainingArguments") -> None:
    """Refuse what no run can have, before anything is loaded.

    Raise `UserError` for values out of range, keys that exclude each other or that nothing reads, packages that are
    not installed, and a chat template that cannot be read.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    from model_cards.render import source_base_model, source_license

    for key, value in {**vars(args), **vars(run)}.items():
        if value == "":
            raise UserError(f"{key} is empty: give it a value, or leave it out.")
    for key in UNUSED_KEYS if type(args).__name__ == "SFTConfig" else UNUSED_KEYS + KEYS_OF_SFT:
        if getattr(run, key) != RunArguments.__dataclass_fields__[key].default:
            raise UserError(f"{key} is not used here: remove the key.")
    for allows, expected, keys in LIMITS:
        for key in keys:
            value = getattr(run, key, getattr(args, key, None))
            if value is not None and not allows(value):
                raise UserError(f"{key} is {value}: expected {expected}.")
    if run.mixing_lr_multiplier is not None and run.mixing_learning_rate is not None:
        raise UserError(
            f"mixing_lr_multiplier={run.mixing_lr_multiplier:g} and mixing_learning_rate="
            f"{run.mixing_learning_rate:g} both set the rate of the mixing weights: give one of them."
        )
    if run.push_repo_id is not None:
        with refusing(f"push_repo_id {run.push_repo_id!r} is no repository id", HFValidationError):
            validate_repo_id(run.push_repo_id)
        source = run.model_name_or_path
        if source_license(source) is None or source_base_model(source) is None:
            raise UserError(
                "push_repo_id publishes a model card with license and base_model, which that of "
                f"{source} does not state: add them to its README.md, or publish final/ by push_to_hub."
            )
    if args.push_to_hub:
        raise UserError("push_to_hub would publish pickles and checkpoints: set push_repo_id to publish final/ alone.")
    # Of SFT and DPO only.
    if getattr(args, "activation_offloading", False) and args.device.type == "cpu":
        raise UserError("activation_offloading would move activations to the CPU, on a CPU: remove the key.")
    # Of DPO and GRPO only.
    if getattr(args, "sync_ref_model", False) and args.save_strategy != "no":
        raise UserError(
            "sync_ref_model moves the reference model, which no checkpoint holds: a resumed run would go on with that "
            "of its start. Remove the key, or set save_strategy to no."
        )
    _check_early(args)
    chat_template(args)


def _check_early(args: "TrainingArguments") -> None:
    """Refuse what the libraries refuse too, but only where it is used, hours later for the evaluation's metric."""
    import torch
    from accelerate.utils import DynamoBackend
    from transformers import Trainer, get_scheduler
    from transformers.integrations import get_reporting_integration_callbacks
    from transformers.utils import is_liger_kernel_available

    known = {"metric_for_best_model": BEST_BY[type(args).__name__]}
    if args.torch_compile:
        usable = torch.compiler.list_backends(())
        known["torch_compile_backend"] = [name for each in DynamoBackend if (name := each.value.lower()) in usable]
        known["torch_compile_mode"] = list(torch._inductor.list_mode_options())
    for key, names in known.items():
        value = getattr(args, key)
        if value is not None and value.removeprefix("eval_") not in names:
            raise UserError(f"{key} is {value!r}: expected one of {', '.join(names)}.")
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise UserError("save_strategy 'best' needs metric_for_best_model: set it, or save by steps.")
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise UserError("use_liger_kernel needs the package liger-kernel: pip install liger-kernel")
    with refusing(f"lr_scheduler_kwargs {args.lr_scheduler_kwargs}", TypeError, ValueError):
        optimizer = torch.optim.SGD([torch.zeros(1)])
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 2, args.lr_scheduler_kwargs)
    with refusing(f"report_to {', '.join(args.report_to)}", ImportError, RuntimeError, ValueError):
        for callback in get_reporting_integration_callbacks(args.report_to):
            callback()
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError, TypeError) as error:
        if "a model" not in one_line(error).replace("`", ""):  # some are made for one, which is not there yet
            raise UserError(f"optim {args.optim.value!r}: {one_line(error)}") from error


def chat_template(args: "TrainingArguments") -> str | None:
    """Return the text of the recipe's chat template, or None where it names none."""
    path = getattr(args, "chat_template_path", None)  # of SFTConfig only: other trainers keep the model's
    return None if path is None else read_chat_template(path)


def read_chat_template(path: str) -> str:
    """Return the chat template in the .jinja file `path`, and refuse one that cannot be read."""
    template = Path(path)
    if template.suffix != ".jinja" or not template.is_file():
        raise UserError(f"chat_template_path: {template} is not a .jinja file.")
    with refusing(f"chat_template_path: {template} is not UTF-8 text", UnicodeDecodeError):
        return template.read_text(encoding="utf-8")
