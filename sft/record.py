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
from iha.files import current_commit, read_json, write_json
from sft.arguments import UNUSED_KEYS, RunArguments
from sft.base_model import INTERLEAVING_KEYS, Start, identify_start
from sft.checkpoints import RECORD
from sft.distributed import processes_of_a_row
from sft.sources import MIXTURES, RunData, check_splits, identify_data


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
# Keys that a record leaves out: those that other sections record, paths on this machine, and keys that nothing reads.
_SOURCE_KEYS = ("model_name_or_path", "tokenizer", "dataset_name", "eval_dataset_name", "chat_template_path")
_PATH_KEYS = ("output_dir", "logging_dir", "run_name", "resume_from_checkpoint")
_UNRECORDED = {*_SOURCE_KEYS, *_PATH_KEYS, *UNUSED_KEYS}
# Keys of a recipe that a resumed run may not change. The checkpoint holds the optimizer with the rates that the run
# began with, and the weights of this model and these adapters. Other rows, or the same ones in another order, would be
# repeated or skipped.
_OPTIMIZER_KEYS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args")
_MODEL_KEYS = ("num_pseudo_heads", *INTERLEAVING_KEYS, "mixing_scale", "dtype")
_LENGTH_KEYS = ("rope_theta", "max_position_embeddings", "sliding_window")
_ADAPTER_KEYS = ("use_peft", "lora_r", "lora_alpha", "use_rslora", "use_dora")
_ADAPTED_KEYS = ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
_SPLIT_KEYS = ("dataset_config", "dataset_train_split", "dataset_streaming", "eval_size", "seed", "data_seed")
_ORDER_KEYS = ("shuffle_dataset", "train_sampling_strategy", "accelerator_config", "dataloader_drop_last")
_TEXT_KEYS = ("packing", "packing_strategy", "chat_template", "eos_token", "pad_token")
FIXED_KEYS = (
    *_OPTIMIZER_KEYS,
    *_MODEL_KEYS,
    *_LENGTH_KEYS,
    *_ADAPTER_KEYS,
    *_ADAPTED_KEYS,
    *_SPLIT_KEYS,
    *_ORDER_KEYS,
    *_TEXT_KEYS,
)


def write_record(data: RunData, start: Start, run: RunArguments, args: SFTConfig, checkpoint: Path | None) -> None:
    """Record in a run's `output_dir` what it is made of.

    Raise `UserError` if it would go on from a checkpoint of a run on another model or other data.
    """
    if args.process_index != 0:
        return
    record = make_record(data, start, run, args)
    if checkpoint is not None:
        compare_records(record, checkpoint)
    write_json(Path(args.output_dir) / RECORD, record)


def make_record(data: RunData, start: Start, run: RunArguments, args: SFTConfig) -> Record:
    """Return what the run is made of, as JSON values.

    Raise `UserError` for a model or data that do not exist.
    """
    check_splits(data, run)
    held_out = identify_data(run.eval_dataset_name) if run.eval_dataset_name else {}
    # `to_dict` masks what may be a password, and takes the names of special tokens for one.
    tokens = {name: getattr(args, name) for name in ("eos_token", "pad_token") if hasattr(args, name)}
    keys = asdict(run) | args.to_dict() | tokens
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


def compare_records(record: Record, checkpoint: Path) -> None:
    """Print which keys and library versions differ from those that `checkpoint` records.

    Raise `UserError` if the model, the data or one of the `fixed_keys` differs, and for an incomplete checkpoint.
    """
    if not (checkpoint / RECORD).exists():
        raise UserError(
            f"resume_from_checkpoint: {checkpoint} has no {RECORD}: the save was interrupted, or another tool wrote "
            "it."
        )
    kept = read_json(checkpoint / RECORD, Record)
    _refuse_changes(kept, record, checkpoint)
    if kept["held_out"] != record["held_out"]:
        print("Note: the rows to evaluate on differ from those of before.", flush=True)
    if kept["processes"] != record["processes"]:
        print(f"Note: this run began with {kept['processes']} processes and continues with {record['processes']}.")
    for section in ("recipe", "versions"):
        for name, now in record[section].items():
            then = kept[section].get(name)
            if _as_words(then) != _as_words(now):
                print(f"Note: this run began with {name} {then} and continues with {now}.", flush=True)


def _refuse_changes(kept: Record, record: Record, checkpoint: Path) -> None:
    """Raise `UserError` if a run that went on from `checkpoint`, with the record `kept`, would be another one."""
    # The keys come first, because the seed is a part of the identity of random weights too.
    for name in fixed_keys(record):
        then, now = (each["recipe"].get(name) for each in (kept, record))
        if _as_words(then) != _as_words(now):
            raise UserError(
                f"{name}: the run began with {then} and cannot go on with {now}. Set it back, or start another run "
                "from its final model."
            )
    for section in ("base_model", "data"):
        if kept[section] | {"name": None} != record[section] | {"name": None}:
            raise UserError(
                f"{checkpoint} belongs to a run with another {section}, {kept[section]['name']}: choose another "
                "output_dir, or give this run what it began with."
            )
    if rows_of_a_step(kept) != rows_of_a_step(record):
        raise UserError(
            f"a step has {rows_of_a_step(record)} rows, and one of {checkpoint} had {rows_of_a_step(kept)}, so rows "
            "would be skipped or repeated: set gradient_accumulation_steps so that a step has as many rows as before."
        )
    is_stream = record["recipe"].get("dataset_streaming")
    if is_stream and kept["processes"] != record["processes"]:
        raise UserError(
            f"the run began with {kept['processes']} processes and cannot go on with {record['processes']}, because "
            "each of them reads separate files of the stream: start as many."
        )


def fixed_keys(record: Record) -> list[str]:
    """Return the keys of a recipe that a resumed run may not change."""
    recipe = record["recipe"]
    names = list(FIXED_KEYS)
    if recipe.get("packing") or Path(record["data"]["name"]).suffix in MIXTURES:
        names.append("max_length")  # packed rows and the shares of a mixture depend on it
    if recipe.get("packing"):
        names.append("dataset_num_proc")  # each process packs its share of the rows by itself
    if recipe.get("dataset_streaming"):
        names.append("dataloader_num_workers")  # each reads files of the stream of its own
    return names


def _as_words(value: Any) -> list[str]:
    """Return a value as the command line gives it: a number of a YAML file is a word there."""
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def rows_of_a_step(record: Record) -> int:
    """Return how many rows all processes of a run take in a step."""
    recipe = record["recipe"]
    return recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] * record["processes"]
