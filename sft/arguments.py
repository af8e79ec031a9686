"""The keys of a recipe, `RunArguments` and TRL's own, from a YAML file and the command line, and the values they may
have."""

from argparse import ArgumentError, Namespace
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from math import inf
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import torch
import yaml
from accelerate.utils import DynamoBackend
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from trl import TrlParser

from common.command_io import UserError, one_line, read_yaml
from model_cards.render import source_base_model, source_license
from sft.data import read_chat_template
from sft.run_arguments import RunArguments


# Two names of one rate: one on the command line wins over either in the file.
RATES_OF_MIXING = {"mixing_lr_multiplier", "mixing_learning_rate"}
# Class of a trainer's arguments -> what its evaluations always give and a checkpoint can be the best by.
BEST_BY = {
    "SFTConfig": ("loss", "mean_token_accuracy"),
    "DPOConfig": ("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"),
    "GRPOConfig": ("loss", "reward", "rewards/correctness/mean", "rewards/solution_format/mean"),
}


class RecipeParser(TrlParser):
    """TRL's parser of YAML plus command line, which refuses an unknown key by its name before anything else, and reads
    a value of the file as it reads one of the command line."""

    def __init__(self, config_class: type[TrainingArguments], usage: str) -> None:
        super().__init__((RunArguments, config_class), usage=usage, allow_abbrev=False)
        self.add_argument("--help_all", action="help", help="show every key, and exit")

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
            "neftune_noise_alpha",
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
    for key, value in {**vars(args), **vars(run)}.items():
        if value == "":
            raise UserError(f"{key} is empty: give it a value, or leave it out.")
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
    # Of SFT and DPO only.
    if getattr(args, "activation_offloading", False) and args.device.type == "cpu":
        raise UserError("activation_offloading would move activations to the CPU, on a CPU: remove the key.")
    _check_packages(args)
    _check_names(args)
    chat_template(args)


def _check_names(args: TrainingArguments) -> None:
    """Raises `UserError` for a figure to find the best checkpoint by that no evaluation gives, a compiler or mode of
    it that is unknown, and options that the learning rate's schedule does not have."""
    allowed = {"metric_for_best_model": BEST_BY[type(args).__name__]}
    if args.torch_compile_backend is not None:
        names = (name.lower() for name in DynamoBackend.__members__)
        allowed["torch_compile_backend"] = [name for name in names if name in torch._dynamo.list_backends(())]
    if args.torch_compile_mode is not None:
        allowed["torch_compile_mode"] = list(torch._inductor.list_mode_options())
    for key, names in allowed.items():
        value = getattr(args, key)
        if value is not None and value.removeprefix("eval_") not in names:
            raise UserError(f"{key} is {value!r}: expected one of {', '.join(names)}.")
    try:
        optimizer = torch.optim.SGD([torch.zeros(1)])
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 2, args.lr_scheduler_kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f"lr_scheduler_kwargs {args.lr_scheduler_kwargs}: {one_line(error)}") from error


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
