"""Read the keys of a recipe, TRL's and our own, from a YAML file and the command line, and refuse impossible values.

`--help` must not wait for PyTorch, so what needs it is imported where it is used.
"""

import math
import sys
from argparse import SUPPRESS, ArgumentError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from difflib import get_close_matches
from inspect import formatannotation
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from huggingface_hub.dataclasses import type_validator
from trl import ModelConfig, ScriptArguments, TrlParser

from iha_io.command_io import UserError, read_text, read_yaml, refusing


if TYPE_CHECKING:
    from transformers import TrainingArguments


MAX_TEMPLATE = 2**20  # bytes
# Keys of TRL that nothing here reads: they would silently do nothing.
UNUSED_KEYS = (
    *("model_revision", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
    *("bnb_4bit_quant_storage", "lora_task_type", "dataset_config", "dataset_test_split", "ignore_bias_buffers"),
    *("model_init_kwargs", "hub_token"),
)
# Class of a trainer's arguments -> more such keys. Rows of sft/train.py are tokenized whole and cut on the right.
UNUSED_WITH = {
    "SFTConfig": ("completion_only_loss", "dataset_kwargs", "dataset_text_field", "truncation_mode"),
    **dict.fromkeys(("DPOConfig", "GRPOConfig"), ("dataset_streaming", "sample_prompts", "memory_gb")),
}


def option(help: str, default: Any = None, choices: tuple[str, ...] | None = None) -> Any:
    """Declare a key of a recipe."""
    return field(default=default, metadata={"help": help} | ({"choices": choices} if choices else {}))


@dataclass(kw_only=True)
class RunArguments(ScriptArguments, ModelConfig):
    """Hold TRL's arguments of scripts and models, and what a run needs beside them."""

    model_name_or_path: str = option("Required: checkpoint directory or id on the Hub to start from.", MISSING)
    dataset_name: str = option(
        "Required: directory of sft/prepare.py, .jsonl, .parquet or .txt file, .yaml mixture, or id on the Hub.",
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
    num_pseudo_heads: int | None = option(
        "P that is trained: a plain base model is interleaved with it; another P of the checkpoint is refused."
    )
    interleaved_layers: list[str] | None = option("Layers that are interleaved: indices, or paper; all by default.")
    interleaved_window: str | None = option("Window of these layers in tokens, or paper; the base's own by default.")
    collapse: str | None = option("Over which pseudo-heads a head sums.", choices=("per_head", "all_heads"))
    mixing_scale: float | None = option(
        "Rate of the mixing in units of learning_rate: 40 by default where the run interleaves, else the checkpoint's."
    )
    max_position_embeddings: int | None = option("Positions, in tokens, that the trained checkpoint declares.")
    rope_theta: float | None = option("RoPE base to train with, which the trained checkpoint keeps.")
    sliding_window: int | None = option("Window of the sliding layers, in tokens, which the trained checkpoint keeps.")
    memory_gb: float | None = option("Memory of a device in GB to plan for, instead of what this machine has.")
    push_repo_id: str | None = option("Repository on the Hub, such as me/model, to publish the final model in.")


def answer_help(usage: str) -> None:
    """Print `usage` and the keys of `RunArguments`, and exit, where the command line asks for help."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        parser = TrlParser(RunArguments, usage=usage)
        parser.add_argument("--help-all", action="help", help="show the keys of the trainer as well")
        parser.add_argument("--config", metavar="FILE", help="YAML file with keys and values")
        for action in parser._actions:
            action.help = SUPPRESS if action.dest in UNUSED_KEYS else action.help
        parser.print_help()
        sys.exit()


class RecipeParser(TrlParser):
    """Parse YAML and command line as TRL does, by one set of rules for both, and refuse an unknown key by its name."""

    def __init__(self, config_class: "type[TrainingArguments]", usage: str) -> None:
        super().__init__((RunArguments, config_class), usage=usage, allow_abbrev=False)
        self.add_argument("--help-all", action="help", help="show every key, and exit")

    def parse(self, argv: Sequence[str]) -> "tuple[RunArguments, TrainingArguments]":
        """Parse `--config FILE [--key value ...]`.

        Raise `UserError` for an unknown key or an impossible value.
        """
        # TRL knows the form with a space only.
        argv = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        if argv[-1:] == ["--config"] or argv.count("--config") > 1:
            self.error("--config: expected one YAML file")
        if "--config" in argv:
            read_yaml(argv[argv.index("--config") + 1], dict[str, Any])  # TRL would take the last of two equal keys
        with refusing("invalid configuration", ValueError, TypeError, ImportError):  # of keys that do not go together
            return self.parse_args_and_config(argv)

    def set_defaults_with_config(self, **config) -> list[str]:
        hints = {key: hint for kind in self.dataclass_types for key, hint in get_type_hints(kind).items()}
        # A key that is true by default has a second action, --no_KEY.
        actions = {action.dest: action for action in reversed(self._actions)}
        known = {key: self._read(actions[key], value, hints[key]) for key, value in config.items() if key in hints}
        self._refuse_unknown(super().set_defaults_with_config(**config | known))
        return []

    def _read(self, action, value: Any, hint: Any) -> Any:
        # By the rules of the command line, which has no words for null, and for a list or a dictionary of some keys.
        if value is None or isinstance(value, dict) or isinstance(value, list) and action.nargs != "+":
            try:
                type_validator(action.dest, value, hint)
            except TypeError:
                raise UserError(f"{action.dest} is {value!r:.80}: expected {formatannotation(hint)}.") from None
            return value
        if value is True and hint == str | None:
            return value  # Transformers documents fsdp as text and takes true for it as well
        try:
            return self._get_values(action, [str(word) for word in (value if isinstance(value, list) else [value])])
        except ArgumentError as error:
            self.error(str(error))

    def parse_known_args(self, args=None, namespace=None) -> tuple[Namespace, list[str]]:
        namespace, unknown = super().parse_known_args(args, namespace)
        self._refuse_unknown(unknown)
        for key, value in vars(namespace).items():
            if value == "":
                raise UserError(f"{key} is empty: give it a value, or leave it out.")
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{key} is {value}: expected a finite number.")
            for allows, expected, keys in LIMITS:
                if key in keys.split() and value is not None and not allows(value):
                    raise UserError(f"{key} is {value}: expected {expected}.")
        self.fit_to_device(namespace)
        return namespace, []

    def fit_to_device(self, values: Namespace) -> None:
        """Train in float32 where no accelerator computes in bf16, which recipes ask for and TRL takes by default."""
        from transformers.utils import is_torch_bf16_gpu_available  # with PyTorch

        if values.bf16 is not False and not values.use_cpu and not is_torch_bf16_gpu_available():
            values.bf16 = False

    def _refuse_unknown(self, arguments: list[str]) -> None:
        if arguments:
            name = arguments[0].removeprefix("--").replace("-", "_")
            keys = {action.dest for action in self._actions}.difference(UNUSED_KEYS)
            close = get_close_matches(name, keys, n=1)
            raise UserError(f"unknown key {name!r}: {f'did you mean {close[0]!r}?' if close else 'see --help.'}")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See --help.")


# What a key may hold: a test, its name, and the keys. A key without a value passes.
LIMITS: list[tuple[Callable[[float], bool], str, str]] = [
    (
        lambda value: value >= 1,
        "at least 1",
        "max_length per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps lora_r "
        "lora_alpha dataset_num_proc num_pseudo_heads max_position_embeddings sliding_window save_total_limit "
        "max_completion_length num_iterations steps_per_generation",
    ),
    (
        lambda value: value >= 0,
        "0 or more",
        "learning_rate weight_decay max_grad_norm warmup_steps eval_size eval_delay sample_prompts "
        "dataloader_num_workers beta neftune_noise_alpha",
    ),
    (
        lambda value: value > 0,
        "above 0",
        "num_train_epochs logging_steps eval_steps save_steps adam_epsilon rope_theta memory_gb mixing_scale "
        "temperature repetition_penalty",
    ),
    (lambda value: value < 1 or value % 1 == 0, "a share below 1, or a whole number of rows", "eval_size"),
    (lambda value: 0 <= value < 0.5, "at least 0 and below 0.5", "label_smoothing"),
    (
        lambda value: 0 <= value < 1,
        "at least 0 and below 1",
        "lora_dropout adam_beta1 adam_beta2 label_smoothing_factor",
    ),
    (lambda value: 0 <= value < 2**32, f"from 0 to {2**32 - 1}", "seed data_seed"),
    (lambda value: value == -1 or value >= 1, "at least 1, or -1 to train for num_train_epochs", "max_steps"),
]


def check_values(run: RunArguments, args: "TrainingArguments") -> None:
    """Raise `UserError` for keys that exclude each other or that nothing reads, before anything is loaded."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    from model_cards.render import source_base_model, source_license

    unused = UNUSED_KEYS + UNUSED_WITH[type(args).__name__]
    for key, declared in (RunArguments.__dataclass_fields__ | type(args).__dataclass_fields__).items():
        if key in unused and getattr(run, key, getattr(args, key, None)) != declared.default:
            raise UserError(f"{key} is not used here: remove the key.")
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
    # Of DPO and GRPO only.
    if getattr(args, "sync_ref_model", False) and args.save_strategy != "no":
        raise UserError(
            "sync_ref_model moves the reference model, which no checkpoint holds: a resumed run would go on with that "
            "of its start. Remove the key, or set save_strategy to no."
        )
    chat_template(args)


def chat_template(args: "TrainingArguments") -> str | None:
    """Return the text of the recipe's chat template, or None where it names none."""
    path = getattr(args, "chat_template_path", None)  # of SFTConfig only: other trainers keep the model's
    return None if path is None else read_chat_template(path)


def read_chat_template(path: str) -> str:
    """Return the chat template in the .jinja file `path`, and refuse one that cannot be read."""
    if Path(path).suffix != ".jinja":  # TRL would take the name of a model
        raise UserError(f"chat_template_path: {path} is not a .jinja file.")
    return read_text(path, MAX_TEMPLATE)
