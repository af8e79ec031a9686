"""Declare the keys of a recipe, TRL's and our own. TRL reads them from a YAML file and the command line."""

import os
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers.utils import is_torch_bf16_gpu_available
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

from iha.errors import UserError, refusing, similar
from iha.presets import preset_names


# Keys of TRL and Transformers that a run does not take, and why: they would have no effect, or a silent one.
_PUSH_KEYS = (
    *("push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "hub_private_repo", "hub_revision"),
    "hub_token",
)
_OTHER_START = "the run loads model_name_or_path as it is"
NOT_TAKEN = {
    **dict.fromkeys(_PUSH_KEYS, "to publish the result, use iha push"),
    **dict.fromkeys(("model_revision", "model_init_kwargs"), _OTHER_START),
    "save_only_model": "such a checkpoint cannot be resumed",
    "ignore_data_skip": "a resumed run would repeat rows",
    "auto_find_batch_size": "each size that is tried would train the first steps again",
    "dataset_kwargs": "the run prepares its rows itself",
    "truncation_mode": "rows are cut on the right",
    "bnb_4bit_quant_storage": "weights of 4 bits are stored as bytes",
    "trust_remote_code": "no run executes the code of a checkpoint, but that of this package or of Transformers",
}
# Keys of a run that starts from random weights.
PRESET_KEYS = ("preset", "preset_fields", "tokenizer")


def key(help: str, default: Any = None) -> Any:
    """Declare a key of a recipe that may be left out."""
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class RunArguments(ScriptArguments, ModelConfig):
    """Hold TRL's arguments of scripts and models, and the other arguments of a run."""

    model_name_or_path: str | None = key("Checkpoint directory or id on the Hub to start from.")
    preset: str | None = key("Preset of configuration_iha to train from random weights, which seed determines.")
    preset_fields: list[str] | None = key(
        "FIELD=VALUE: fields to change in the preset. Fields that depend on them follow."
    )
    tokenizer: str | None = key("Tokenizer of a preset: a directory or an id on the Hub; single bytes by default.")
    dataset_name: str = field(
        metadata={"help": ".jsonl, .json, .parquet or .txt file (or gzipped), .yaml mixture, directory, or Hub id."}
    )
    dataset_config: str | None = key("Configuration of dataset_name, by default the dataset's own default.")
    dataset_train_split: str = key("Split of dataset_name to train on.", "train")
    dataset_test_split: str | None = key(
        "Split to evaluate on: of eval_dataset_name (train by default), or else of dataset_name (test by default)."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = key("Type of the trained weights.", "float32")
    eval_size: float = key("Rows held out for evaluation: a share below 1, or a number of rows.", 0.0)
    eval_dataset_name: str | None = key("Rows to evaluate on, in place of eval_size: a file or an id on the Hub.")
    num_pseudo_heads: int | None = key(
        "P, with which a plain base model is interleaved; null leaves it plain. Another number than a checkpoint's is "
        "an error on the command line, and is left out in a file."
    )
    interleaved_layers: list[str] | None = key("Layers to interleave: indices, or paper; all by default.")
    interleaved_window: str | None = key("Window of these layers in tokens, or paper; the base's own by default.")
    collapse: Literal["per_head", "all_heads"] | None = key(
        "Pseudo-heads over which a head sums: its own, or those of all heads."
    )
    mixing_scale: float | None = key(
        "Rate of the mixing over learning_rate: 40 by default if the run interleaves, else the checkpoint's."
    )
    recompute_virtual_tokens: bool | None = key(
        "`true` to make virtual tokens again in the backward pass and not keep them: less memory, more time."
    )
    max_position_embeddings: int | None = key("Positions, in tokens, that the trained checkpoint declares.")
    rope_theta: float | None = key("RoPE base to train with, which the trained checkpoint keeps.")
    sliding_window: str | None = key(
        "Window of the sliding layers, in tokens, which the trained checkpoint keeps. `scale` lets all windows grow "
        "with max_position_embeddings, if there are any."
    )
    peak_tflops: float | None = key(
        "Peak of one device in TFLOP/s, in the type it computes in (H100, bf16: 989): the run logs its utilization."
    )

    # `RecipeParser.parse` sets these two. (Without an annotation they are no keys themselves.)
    on_command_line = frozenset()  # the keys that the command line names
    chat_template = None  # the text of chat_template_path

    @property
    def is_quantized(self) -> bool:
        """Return whether the run trains adapters on a base in 4 or 8 bits."""
        return self.load_in_4bit or self.load_in_8bit

    def __post_init__(self) -> None:
        super().__post_init__()
        # No shell has read the values of a file, and a shell leaves the ~ of --key=~/name.
        for name in ("model_name_or_path", "tokenizer", "dataset_name", "eval_dataset_name"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, os.path.expanduser(value))
        self.eval_size = self.eval_size or 0.0
        # TRL does not convert the values of a file: 20 stays an integer, and one name does not become a list.
        for name in ("rope_theta", "mixing_scale", "peak_tflops"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, float(value))
        for name in ("interleaved_layers", "preset_fields", "lora_modules_to_save", "lora_target_parameters"):
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, [value])
        if self.interleaved_layers is not None:
            self.interleaved_layers = _layers(self.interleaved_layers)
        for name, word in (("interleaved_window", "paper"), ("sliding_window", "scale")):
            setattr(self, name, _tokens_or(word, name, getattr(self, name)))


def _layers(words: list) -> list[int] | str:
    """Return the indices of layers that words name, or "paper". Raise `UserError`."""
    if words == ["paper"]:
        return "paper"
    if not all(str(word).isdecimal() for word in words):
        raise UserError(f"interleaved_layers={' '.join(map(str, words))}: expected indices of layers, or paper.")
    return [int(word) for word in words]


def _tokens_or(word: str, name: str, value: Any) -> int | str | None:
    """Return the number of tokens that the key `name` holds, or the one word that it may hold. Raise `UserError`."""
    if value is None or value == word:
        return value
    if not str(value).isdecimal() or int(value) < 2:
        raise UserError(f"{name}={value}: expected a number of tokens, at least 2, or {word}.")
    return int(value)


class RecipeParser(TrlParser):
    """Parse `--config FILE [--key value ...]` as TRL does.

    `parse` is what a run calls. From there TRL calls `set_defaults_with_config` with the keys of the file, and then
    `parse_known_args` with those of the command line, which check them here.
    """

    def __init__(self, usage: str) -> None:
        super().__init__((RunArguments, SFTConfig), usage=usage.replace("%", "%%"), allow_abbrev=False)
        for action in self._actions:
            if action.dest in NOT_TAKEN:
                action.help = SUPPRESS  # `parse` rejects these
        self._declared_defaults = {action.dest: action.default for action in self._actions}
        self._show_first(list(RunArguments.__annotations__))

    def _show_first(self, names: list[str]) -> None:
        """Show these keys in a group at the top of the help. Transformers' parser puts all keys into one group."""
        actions = {action.dest: action for action in self._actions}
        group = self.add_argument_group("keys of this package")
        group._group_actions = [actions.pop(name) for name in names]
        self._optionals._group_actions = list(actions.values())
        self._optionals.title = "keys of TRL and Transformers"
        self._action_groups.sort(key=lambda each: each is not group)

    def parse(self, argv: Sequence[str] | None) -> tuple[RunArguments, SFTConfig]:
        """Return the keys of `argv`, or of the command line if it is None.

        Raise `UserError` for a key that is unknown, not taken or excluded by another.
        """
        words: list[str] = []
        for word in sys.argv[1:] if argv is None else argv:  # TRL looks for the word --config alone
            words += word.split("=", 1) if word.startswith("--config=") else [word]
        with refusing("the recipe", ValueError, TypeError, ImportError, yaml.YAMLError):
            run, args = self.parse_args_and_config(words)
        run.on_command_line = _keys_of(words)
        if args.chat_template_path is not None:
            args.chat_template_path = os.path.expanduser(args.chat_template_path)  # TRL reads it too
            run.chat_template = _read_template(args.chat_template_path)
        _choose_start(run)
        self._check_values(vars(args) | vars(run))
        _check_adapters(run)
        _check_resumable(args)
        if run.peak_tflops is not None and not args.max_length:
            raise UserError(
                "peak_tflops needs max_length, for which the cost model counts FLOPs: set max_length, or remove "
                "peak_tflops."
            )
        return run, args

    def _check_values(self, values: dict[str, Any]) -> None:
        """Reject keys that are not taken, and values of a file that the command line rejects. Raise `UserError`."""
        for action in self._actions:
            value = values.get(action.dest)
            if action.dest in NOT_TAKEN and value != self._declared_defaults[action.dest]:
                raise UserError(f"{action.dest} is not used here: {NOT_TAKEN[action.dest]}. Remove the key.")
            for each in value if isinstance(value, list) else [value]:
                if action.choices and each is not None and each not in action.choices:
                    raise UserError(f"{action.dest}={each}: expected one of {', '.join(map(str, action.choices))}.")

    def _check_key(self, name: str) -> None:
        """Raise `UserError` for a key that neither TRL nor this package declares."""
        if name in NOT_TAKEN:
            return  # `_check_values` accepts the default value alone, and says why
        known = [action.dest for action in self._actions if action.help != SUPPRESS]
        if name not in known:
            raise UserError(f"There is no key {name!r}{similar(name, known)}. --help lists all.")

    def set_defaults_with_config(self, **config) -> list[str]:
        """Check the keys of a YAML file, which TRL hands over here."""
        for name in config:
            self._check_key(name)
        return super().set_defaults_with_config(**config)

    def parse_known_args(self, args=None, namespace=None) -> tuple[Namespace, list[str]]:
        """Check the keys of the command line, and turn bf16 off where there is none. TRL calls this."""
        namespace, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("--"):
                self._check_key(word.removeprefix("--").partition("=")[0].replace("-", "_"))
        if not namespace.use_cpu and not is_torch_bf16_gpu_available():
            if namespace.bf16 is True and os.environ.get("RANK", "0") == "0":
                print("Note: no GPU here computes in bfloat16, so the run ignores bf16 and computes in float32.")
            namespace.bf16 = False  # TRL would reject it on such a machine, although it is its own default
        return namespace, unknown


def _keys_of(words: Sequence[str]) -> frozenset[str]:
    """Return the keys that a command line names. It may say `--dataset-name=FILE` for `--dataset_name FILE`."""
    options = [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]
    return frozenset(option.replace("-", "_") for option in options)


def _choose_start(run: RunArguments) -> None:
    """Keep one start, a checkpoint or a preset. A start on the command line replaces the recipe's.

    Raise `UserError` if there is no start, if there are two, if there is no such preset, and for keys of a preset next
    to a checkpoint.
    """
    if run.on_command_line & {"preset", "model_name_or_path"}:
        for name in ("model_name_or_path", *PRESET_KEYS):
            if name not in run.on_command_line:
                setattr(run, name, None)
    if run.preset and run.model_name_or_path:
        raise UserError("preset and model_name_or_path both say what to start from: give one.")
    if not run.preset and not run.model_name_or_path:
        raise UserError("model_name_or_path: give a checkpoint to start from, or a preset for random weights.")
    if run.preset and run.preset not in preset_names():
        near = similar(run.preset, preset_names())
        raise UserError(f"There is no preset {run.preset!r}{near}. configuration_iha/README.md lists all.")
    given = [name for name in PRESET_KEYS if getattr(run, name)]
    if given and not run.preset:
        raise UserError(f"{', '.join(given)}: for runs that start from a preset. Remove what is named here.")


def _check_adapters(run: RunArguments) -> None:
    """Reject keys of adapters and of their base for a run without adapters. Raise `UserError`."""
    if run.is_quantized and not run.use_peft:
        raise UserError(
            "load_in_4bit, load_in_8bit: rounded weights cannot be trained, but adapters next to them can: set "
            "use_peft to true."
        )
    if run.is_quantized and run.preset:
        raise UserError("load_in_4bit, load_in_8bit: for pretrained weights. Give model_name_or_path, and no preset.")
    if run.use_peft and run.peak_tflops is not None:
        raise UserError("peak_tflops: the utilization is that of a run that trains all weights; remove the key.")
    fields = RunArguments.__dataclass_fields__
    of_adapters = [name for name in fields if name.startswith(("lora_", "use_rslora", "use_dora"))]
    given = [name for name in of_adapters if getattr(run, name) != fields[name].default]
    if given and not run.use_peft:
        raise UserError(
            f"{', '.join(given)}: without effect, as there are no adapters: set use_peft to true, or remove what is "
            "named here."
        )


def _check_resumable(args: SFTConfig) -> None:
    """Reject settings with which a run would not end as it says. Raise `UserError`."""
    # It draws from the global random state, which is not that of the epoch's start when a run resumes.
    if args.train_sampling_strategy == "group_by_length":
        raise UserError(
            "train_sampling_strategy=group_by_length: a resumed run would train on other rows: set it to random, "
            "sequential or batch_rebalance."
        )
    by_steps = args.save_strategy == "steps" and args.eval_strategy == "steps"
    if args.load_best_model_at_end and by_steps and args.save_steps != args.eval_steps:
        raise UserError(
            f"load_best_model_at_end with save_steps={args.save_steps:g} and eval_steps={args.eval_steps:g}: the best "
            "evaluation may have no checkpoint: set save_steps to eval_steps, or save_strategy to best."
        )


def _read_template(path: str) -> str:
    """Return the text of a chat template, a .jinja file. Raise `UserError`."""
    if Path(path).suffix != ".jinja":  # TRL would take the name of a model
        raise UserError(f"chat_template_path: {path} is not a .jinja file.")
    return Path(path).read_text(encoding="utf-8")
