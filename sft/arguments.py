"""The keys of a recipe, `RunArguments` and TRL's own, from a YAML file and the command line."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import NoReturn

import yaml
from transformers import TrainingArguments
from trl import TrlParser

from command_io import UserError, one_line


DTYPES = ("float32", "bfloat16", "float16")
ATTENTION_FORMS = ("virtual", "base")


@dataclass
class RunArguments:
    """What a run needs beyond TRL's SFTConfig."""

    model_name_or_path: str = field(metadata={"help": "Checkpoint directory or id on the Hub to start from."})
    dataset_name: str = field(
        metadata={"help": "Rows: a local .jsonl file, the id of a dataset on the Hub, or a .yaml mixture of them."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split to read of a dataset on the Hub."})
    eval_size: float = field(
        default=0.0, metadata={"help": "Rows held out for evaluation: a share below 1, or a number of rows."}
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

    def __init__(self, config_class: type[TrainingArguments], usage: str) -> None:
        super().__init__((RunArguments, config_class), usage=usage, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> tuple[RunArguments, TrainingArguments]:
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
