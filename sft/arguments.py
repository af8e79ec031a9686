"""The keys of a recipe, `RunArguments` and TRL's own, from a YAML file and the command line, and the values they may
have."""

from argparse import ArgumentError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import Trainer, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import TrlParser

from command_io import UserError, one_line, read_yaml
from model_cards.render import source_base_model, source_license
from sft.data import read_chat_template


DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_MIXING_LR_MULTIPLIER = 40.0
# Two names of one rate: one on the command line wins over either in the file.
RATES_OF_MIXING = {"mixing_lr_multiplier", "mixing_learning_rate"}
ATTENTION_FORMS = ("virtual", "base")


@dataclass
class RunArguments:
    """What a run needs beyond TRL's SFTConfig."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint directory or id on the Hub to start from."})
    dataset_name: str = field(
        metadata={
            "help": "Rows: a directory of sft/prepare.py, a .jsonl, .parquet or .txt file, an id on the Hub, or a .yaml "
            "mixture of them."
        }
    )
    dataset_split: str = field(default="train", metadata={"help": "Split to read of a dataset on the Hub."})
    streaming: bool = field(
        default=False, metadata={"help": "Read and tokenize the rows as they are used; needs max_steps."}
    )
    eval_size: float = field(
        default=0.0, metadata={"help": "Rows held out for evaluation: a share below 1, or a number of rows."}
    )
    sample_prompts: int = field(
        default=2, metadata={"help": "Held-out prompts that the model answers, greedily, at each evaluation."}
    )
    dtype: str = field(default="float32", metadata={"help": "Type of the trained weights.", "choices": DTYPES})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention core: eager, sdpa, flex_attention, flash_attention_2, ..."}
    )
    attention_form: str | None = field(
        default=None,
        metadata={"help": 'How "iha" layers compute: see IHAModel.attention_form.', "choices": ATTENTION_FORMS},
    )
    num_pseudo_heads: int | None = field(
        default=None, metadata={"help": "P that the recipe is for; another P of the checkpoint is refused."}
    )
    max_position_embeddings: int | None = field(
        default=None, metadata={"help": "Positions, in tokens, that the trained checkpoint declares."}
    )
    rope_theta: float | None = field(
        default=None, metadata={"help": "RoPE base to train with, which the trained checkpoint keeps."}
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "Window of the sliding layers, in tokens, which the trained checkpoint keeps."}
    )
    memory_gb: float | None = field(
        default=None, metadata={"help": "Memory of a device in GB to plan for, instead of what this machine has."}
    )
    mixing_lr_multiplier: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of the mixing and collapse weights, in units of learning_rate: 40 by default."
        },
    )
    mixing_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of the mixing and collapse weights by itself, in place of the multiplier."},
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
    push_repo_id: str | None = field(
        default=None, metadata={"help": "Repository on the Hub, such as me/model, to publish the final model in."}
    )

    def mixing_rate(self, learning_rate: float) -> float:
        """The peak learning rate of the mixing and collapse weights beside the backbone's."""
        if self.mixing_learning_rate is not None:
            return self.mixing_learning_rate
        multiplier = self.mixing_lr_multiplier
        return learning_rate * (DEFAULT_MIXING_LR_MULTIPLIER if multiplier is None else multiplier)


class RecipeParser(TrlParser):
    """TRL's parser of YAML plus command line, which refuses an unknown key by its name before anything else, and reads
    a value of the file as it reads one of the command line."""

    def __init__(self, config_class: type[TrainingArguments], usage: str) -> None:
        super().__init__((RunArguments, config_class), usage=usage, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> tuple[RunArguments, TrainingArguments]:
        """Parse `--config FILE [--key value ...]`. Raises `UserError` for an unknown key or an impossible value."""
        self._given = argv
        try:
            if "--config" in argv:
                read_yaml(argv[argv.index("--config") + 1])  # TRL would take the last of two equal keys
            return self.parse_args_and_config(argv)
        except IndexError:
            self.error("--config needs a YAML file")
        except (ValueError, TypeError, ImportError, yaml.YAMLError) as error:
            raise UserError(f"invalid configuration: {one_line(error)}") from error

    def set_defaults_with_config(self, **config) -> list[str]:
        if RATES_OF_MIXING & {word.partition("=")[0].removeprefix("--") for word in self._given}:
            config = {key: value for key, value in config.items() if key not in RATES_OF_MIXING}
        hints = {key: hint for kind in self.dataclass_types for key, hint in get_type_hints(kind).items()}
        # A key that is true by default has a second action, --no_KEY.
        actions = {action.dest: action for action in reversed(self._actions)}
        known = {key: self._read(actions[key], value, hints[key]) for key, value in config.items() if key in hints}
        self._refuse_unknown(super().set_defaults_with_config(**config | known))
        return []

    def _read(self, action, value: Any, hint: Any) -> Any:
        """The value of a key in the file, by the rules of the command line, which takes no null for a number."""
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kinds = {get_origin(kind) or kind for kind in kinds}
        # Transformers documents fsdp as text and takes true for it as well.
        if type(value) in kinds & {type(None), bool, list, dict} or (value is True and kinds == {str, type(None)}):
            return value
        if value is None or isinstance(value, (list, dict)):
            names = " or ".join(sorted(kind.__name__ for kind in kinds))
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
            close = get_close_matches(name, [action.dest for action in self._actions], n=1)
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
            *("max_completion_length", "num_iterations"),
        ),
    ),
    (
        lambda value: 0 <= value < inf,
        "a finite number, 0 or more",
        (
            *("learning_rate", "mixing_lr_multiplier", "mixing_learning_rate", "weight_decay", "max_grad_norm"),
            *("warmup_steps", "eval_size", "eval_delay", "sample_prompts", "dataloader_num_workers", "beta"),
        ),
    ),
    (
        lambda value: 0 < value < inf,
        "a finite number above 0",
        (
            *("num_train_epochs", "logging_steps", "eval_steps", "save_steps", "adam_epsilon", "rope_theta"),
            *("memory_gb", "temperature"),
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


def check_values(run: RunArguments, args: TrainingArguments) -> None:
    """Raises `UserError` for what no run can have, before anything is loaded: values out of range, keys that exclude
    each other, packages that are not installed, a chat template that cannot be read."""
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
        try:
            validate_repo_id(run.push_repo_id)
        except HFValidationError as error:
            raise UserError(f"push_repo_id {run.push_repo_id!r} is no repository id: {one_line(error)}") from error
        source = run.model_name_or_path
        if source_license(source) is None or source_base_model(source) is None:
            raise UserError(
                f"push_repo_id publishes a model card with license and base_model, which that of {source} does not state: "
                "add them to its README.md, or publish final/ by push_to_hub."
            )
    if args.push_to_hub:
        raise UserError("push_to_hub would publish pickles and checkpoints: set push_repo_id to publish final/ alone.")
    _check_packages(args)
    chat_template(args)


def _check_packages(args: TrainingArguments) -> None:
    """Raises `UserError` for a reporter or an optimiser that is unknown or not installed."""
    for name in args.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UserError(
                f"report_to {name!r} is unknown: expected none, all or {', '.join(INTEGRATION_TO_CALLBACK)}."
            )
        if name not in get_available_reporting_integrations():
            raise UserError(f"report_to {name!r} needs its package: pip install {name}, or set report_to to none.")
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
    except (ImportError, ValueError, TypeError) as error:
        if "a model" not in one_line(error).replace("`", ""):  # some are made for one, which is not there yet
            raise UserError(f"optim {args.optim.value!r}: {one_line(error)}") from error


def chat_template(args: TrainingArguments) -> str | None:
    """The text of the recipe's chat template, or None where it names none. Raises `UserError`."""
    path = getattr(args, "chat_template_path", None)  # of SFTConfig only: other trainers keep the model's
    return None if path is None else read_chat_template(path)
