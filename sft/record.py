"""Record what a run is made of, and do not resume a run that was made of something else."""

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl import SFTConfig
from typing_extensions import TypedDict

from iha.errors import UserError
from iha.files import current_commit, read_json
from sft.arguments import NOT_TAKEN, RunArguments
from sft.base_model import INTERLEAVING_KEYS, Start, identify_start
from sft.checkpoints import RECORD
from sft.distributed import processes_of_a_row
from sft.row_sources import RunData, identify_data


Section = dict[str, Any]


class Record(TypedDict):
    """Hold what a run is made of."""

    base_model: Section
    data: Section
    held_out: Section
    recipe: Section
    processes: int  # that read rows of their own
    commit: str
    versions: dict[str, str]


LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
# Keys that a record leaves out: those that other sections record, and what differs between machines.
_SOURCE_KEYS = ("model_name_or_path", "tokenizer", "dataset_name", "eval_dataset_name", "chat_template_path")
_PATH_KEYS = ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint")
_MACHINE_KEYS = ("disable_tqdm", "dataloader_pin_memory")  # `sft.train` sets them by where it runs
_UNRECORDED = {*_SOURCE_KEYS, *_PATH_KEYS, *_MACHINE_KEYS, *NOT_TAKEN}
# Keys of a recipe that a resumed run may not change. A checkpoint holds the weights of this model, and the optimizer
# with the rates and betas that the run began with, which silently replace others. Other rows, or the same ones in
# another order, would be repeated or skipped.
_MODEL_KEYS = ("num_pseudo_heads", *INTERLEAVING_KEYS, "mixing_scale", "dtype")
_LORA_KEYS = ("lora_r", "lora_alpha", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
_BITS_KEYS = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
_ADAPTER_KEYS = ("use_peft", "use_rslora", "use_dora", *_LORA_KEYS, *_BITS_KEYS)
_LENGTH_KEYS = ("rope_theta", "max_position_embeddings", "sliding_window", "max_length")
_OPTIMIZER_KEYS = ("learning_rate", "weight_decay", "optim", "adam_beta1", "adam_beta2", "adam_epsilon")
_ROW_KEYS = ("dataset_config", "dataset_train_split", "dataset_streaming", "eval_size", "shuffle_dataset")
_TEXT_KEYS = ("dataset_text_field", "packing", "packing_strategy", "chat_template")
_RUN_KEYS = (*_OPTIMIZER_KEYS, *_ROW_KEYS, *_TEXT_KEYS)
FIXED_KEYS = ("seed", "data_seed", *_MODEL_KEYS, *_ADAPTER_KEYS, *_LENGTH_KEYS, *_RUN_KEYS)


def make_record(data: RunData, start: Start, run: RunArguments, args: SFTConfig) -> Record:
    """Return what the run is made of, as JSON values.

    Raise `UserError` for a model or data that do not exist.
    """
    held_out = {}
    if run.eval_dataset_name and data.eval_source is not None:
        held_out = identify_data(data.eval_source.name, data.eval_source.config)
    # `to_dict` masks what may be a password, and takes the names of special tokens for one.
    keys = asdict(run) | args.to_dict() | {"eos_token": args.eos_token, "pad_token": args.pad_token}
    recipe = {name: value for name, value in keys.items() if name not in _UNRECORDED}
    template = run.chat_template
    recipe["chat_template"] = None if template is None else hashlib.sha256(template.encode()).hexdigest()
    record = {
        "data": {"name": run.dataset_name, **identify_data(run.dataset_name, run.dataset_config)},
        "held_out": held_out,
        "base_model": identify_start(start, args.seed),
        "recipe": recipe,
        "processes": args.world_size // processes_of_a_row(args),
        "commit": current_commit(),
        "versions": {name: version(name) for name in LIBRARIES},
    }
    return json.loads(json.dumps(record, default=str))


def check_goes_on(record: Record, checkpoint: Path) -> None:
    """Check that a run can go on from a checkpoint, and print what differs from the run that wrote it.

    Raise `UserError` if it is the model, the data or one of the `FIXED_KEYS`, and for an incomplete checkpoint.
    """
    if not (checkpoint / RECORD).exists():
        raise UserError(
            f"resume_from_checkpoint: {checkpoint} has no {RECORD}: the save was interrupted, or another tool wrote "
            "it."
        )
    before = read_json(checkpoint / RECORD, Record)
    changes = changed_keys(before, record)
    # The keys come first, because the seed is a part of the identity of random weights too.
    for name in FIXED_KEYS:
        if name in changes:
            then, now = changes[name]
            raise UserError(
                f"{name}: the run began with {then} and cannot go on with {now}. Set it back, or start another run "
                "from its final model."
            )
    for section in ("base_model", "data"):
        if _without_name(before[section]) != _without_name(record[section]):
            raise UserError(
                f"{checkpoint} belongs to a run with another {section}, {before[section]['name']}: choose another "
                "output_dir, or give this run what it began with."
            )
    if rows_of_a_step(before) != rows_of_a_step(record):
        raise UserError(
            f"a step has {rows_of_a_step(record)} rows, and one of {checkpoint} had {rows_of_a_step(before)}, so rows "
            "would be skipped or repeated: set gradient_accumulation_steps so that a step has as many rows as before."
        )
    if before["held_out"] != record["held_out"]:
        print("Note: the rows to evaluate on differ from those of before.", flush=True)
    if before["processes"] != record["processes"]:
        print(f"Note: this run began with {before['processes']} processes and continues with {record['processes']}.")
    for name, (then, now) in changes.items():
        print(f"Note: this run began with {name} {then} and continues with {now}.", flush=True)


def _without_name(section: Section) -> Section:
    return {key: value for key, value in section.items() if key != "name"}


def changed_keys(before: Record, record: Record) -> dict[str, tuple[Any, Any]]:
    """Return the keys of a recipe and the versions of libraries that differ, with both values."""
    then = {**before["recipe"], **before["versions"]}
    now = {**record["recipe"], **record["versions"]}
    changes = {name: (then.get(name), value) for name, value in now.items() if then.get(name) != value}
    # The same value may be a number in a YAML file, and a word on the command line.
    return {name: pair for name, pair in changes.items() if str(pair[0]) != str(pair[1])}


def rows_of_a_step(record: Record) -> int:
    """Return how many rows all processes of a run take in a step."""
    recipe = record["recipe"]
    return recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] * record["processes"]
