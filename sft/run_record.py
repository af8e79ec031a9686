"""What a run is made of: recorded in its output directory before it trains, and compared when it is started again."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from datasets import load_dataset_builder
from datasets.exceptions import DatasetNotFoundError
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.hub import extract_commit_hash

from common.checkpoint_io import load_config_dict
from common.command_io import ROOT, UserError, current_commit, file_sha256, one_line, read_json, write_json
from sft.arguments import RunArguments, chat_template
from sft.data import local_files
from sft.mixture import sources


RECORD = "run.json"
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")

# Of a checkpoint, what decides on the model and its tokens: a card or a log beside it does not.
_MODEL_FILES = ("*.safetensors", "pytorch_model*.bin", "*.json", "*.jinja", "*.model", "*.txt")

# Keys that change nothing of what is learned: where things lie, what is logged, saved and evaluated, and what only
# trades memory or time. What they name is recorded by its content.
_FREE_KEYS = {
    *("model_name_or_path", "dataset_name", "chat_template_path", "output_dir", "resume_from_checkpoint"),
    *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_on_each_node"),
    *("log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "debug"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *("include_num_input_tokens_seen", "include_for_metrics", "batch_eval_metrics", "prediction_loss_only"),
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node"),
    *("enable_jit_checkpoint", "skip_memory_metrics"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps", "eval_packing"),
    *("eval_do_concat_batches", "eval_use_gather_object", "per_device_eval_batch_size", "sample_prompts"),
    *("do_train", "do_eval", "do_predict", "local_rank", "ddp_timeout", "ddp_backend", "torch_empty_cache_steps"),
    *("activation_checkpointing", "activation_checkpointing_kwargs", "activation_offloading"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_cache"),
    *("dataset_num_proc", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    *("push_repo_id", "memory_gb", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
    *("hub_always_push", "hub_revision"),
}
# Recorded for the reader: the hash beside them is what is compared.
_INFORMATION = {("base_model", "name"), ("data", "name"), ("code", "commit")}


def make_record(run: RunArguments, args: TrainingArguments) -> dict[str, dict]:
    """What the run is made of, as sections of JSON values: "base_model", "data", "recipe", "processes", "code",
    "versions". Raises `UserError` for a model or data that are not there."""
    template = chat_template(args)
    # Of a token, `to_dict` hides the value.
    values = args.to_dict() | {key: value for key, value in vars(args).items() if key in ("eos_token", "pad_token")}
    recipe = {key: value for key, value in (asdict(run) | values).items() if key not in _FREE_KEYS}
    recipe["chat_template"] = template and hashlib.sha256(template.encode()).hexdigest()
    record = {
        "data": {"name": run.dataset_name, **_identify_data(run.dataset_name)},
        "base_model": {"name": run.model_name_or_path, **_identify_model(run.model_name_or_path)},
        "recipe": recipe,
        "processes": {"number": args.world_size, "kind": args.distributed_state.distributed_type},
        "code": _identify_code(),
        "versions": {name: version(name) for name in LIBRARIES},
    }
    return json.loads(json.dumps(record, default=str))


def keep_record(record: dict[str, dict], output_dir: str | Path) -> None:
    """Write `record` to `output_dir`/run.json, unless the checkpoints there belong to such a run already.

    Raises `UserError` when they belong to another one, or when no record says what they belong to. A record without
    checkpoints is replaced: nothing was learned yet. Says what the earlier run stopped at, and which libraries have
    another version than they had.
    """
    directory = Path(output_dir)
    if any(directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        kept = check_record(record, directory)
        for name, then in kept.get("versions", {}).items():
            if (now := record["versions"].get(name)) != then:
                print(f"Warning: this run began with {name} {then} and continues with {now}.", flush=True)
        if stopped := kept.get("stopped"):
            print(f"This run stopped before at {stopped}", flush=True)
    else:
        _write(record, directory)


def check_record(record: dict[str, dict], directory: Path) -> dict[str, dict]:
    """The record kept in `directory`. Raises `UserError` when there is none, or `record` differs from it in what
    decides on what is learned."""
    if not (directory / RECORD).exists():
        raise UserError(
            f"{directory} holds checkpoints and no {RECORD}, so nothing says which run they belong to: choose another "
            "output_dir, or remove them."
        )
    kept = read_json(directory / RECORD)
    differences = []
    for section in ("base_model", "data", "recipe", "processes", "code"):
        then, now = kept.get(section), record[section]
        if not isinstance(then, dict):
            raise UserError(f"{directory / RECORD} holds no section {section!r}: choose another output_dir.")
        for key in sorted(then.keys() | now.keys()):
            if (section, key) not in _INFORMATION and then.get(key) != now.get(key):
                name = key if section == "recipe" else f"{section} {then.get('name', '')}".strip() + f" ({key})"
                differences.append(f"{name} was {_short(then.get(key))} and is {_short(now.get(key))}")
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"{directory} belongs to another run: {'; '.join(differences[:3])}{more}. Choose another output_dir, or "
            "give this run what it began with."
        )
    return kept


def note_stop(record: dict[str, dict], reason: str, output_dir: str | Path) -> None:
    """Add to the record kept in `output_dir` why the run stopped, for whoever starts it again."""
    _write(record | {"stopped": reason}, Path(output_dir))


def _write(record: dict[str, dict], directory: Path) -> None:
    write_json(directory / RECORD, record)


def _short(value: object) -> str:
    """A value for an error message; of a hash, enough to tell two apart."""
    return value[:12] if isinstance(value, str) and len(value) >= 40 else repr(value)


def _identify_model(source: str) -> dict[str, str | None]:
    """The hash of a local checkpoint's files, or the commit of one on the Hub. Raises `UserError` for neither."""
    path = Path(source).expanduser()
    if path.is_file():
        return {"sha256": file_sha256(path)}
    load_config_dict(source)
    if path.is_dir():
        return {"sha256": hash_files({file for pattern in _MODEL_FILES for file in path.glob(pattern)})}
    return {"commit": extract_commit_hash(cached_file(source, CONFIG_NAME), None)}


def _identify_data(name: str) -> dict[str, str | None]:
    """The hash of a local source or of a mixture with all its parts, or the commit of a dataset on the Hub. Raises
    `UserError` for neither."""
    if (parts := sources(name)) != [(name, 1.0)]:
        identities = [(share, _identify_data(part)) for part, share in parts]
        return {"sha256": hashlib.sha256(json.dumps(identities).encode()).hexdigest()}
    path = Path(name).expanduser()
    if path.is_file():
        return {"sha256": file_sha256(path)}
    if path.is_dir():
        return {"sha256": hash_files(file for file in path.rglob("*") if file.is_file())}
    local_files(name)  # refuses the name of a file that is not there
    try:
        return {"revision": load_dataset_builder(name).hash}
    except (DatasetNotFoundError, ValueError, ConnectionError) as error:
        raise UserError(f"cannot load dataset {name!r}: {one_line(error)}") from None


def _identify_code() -> dict[str, str]:
    """The hash of the code that trains, and its commit."""
    files = [*ROOT.glob("sft/*.py"), *ROOT.glob("modeling_iha/*.py")]
    return {"sha256": hash_files(files), "commit": current_commit()}


def hash_files(files: Iterable[Path]) -> str:
    """A SHA-256 over the names and contents of files, whatever directory they lie in. Raises `OSError`."""
    lines = sorted(f"{file_sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
