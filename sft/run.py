"""Run a recipe in a directory of its own: lock, record, checkpoint to go on from, and the final model."""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import load_dataset_builder
from transformers import TrainingArguments
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.hub import extract_commit_hash
from typing_extensions import TypedDict

from iha import plots
from iha.cards import markdown, render_card, source_base_model, source_license, source_name
from iha.checkpoints import load_config_dict
from iha.errors import UserError
from iha.files import current_commit, file_sha256, new_directory, read_json, sole_writer, write_json
from iha.kinds import is_ours
from sft import make_model
from sft.arguments import UNUSED_KEYS, RunArguments, chat_template
from sft.base_model import start_config
from sft.data import loading, sources
from sft.distributed import check_launch, whole_model
from sft.make_model import start_tokenizer
from sft.trainer import RECORD, NotFiniteError, RecipeTrainer, newest_whole_checkpoint
from sft.training_rows import check_splits, evaluation_source


Section = dict[str, Any]


class Record(TypedDict):
    """Hold what a run is made of."""

    base_model: Section
    data: Section
    recipe: Section
    processes: int
    commit: str
    versions: dict[str, str]


LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
# Of a checkpoint, what decides on the model and its tokens: a card or a log beside it does not.
_MODEL_FILES = ("*.safetensors", "pytorch_model*.bin", "*.json", "*.jinja", "*.model", "*.txt")
# Keys that a record leaves out: places on this machine, what stands in other sections, and what nothing reads.
_UNRECORDED = {
    *("model_name_or_path", "tokenizer", "dataset_name", "eval_dataset_name", "output_dir", "logging_dir"),
    *("run_name", "resume_from_checkpoint", "chat_template_path", *UNUSED_KEYS),
}
# Keys of a recipe that a resumed run may not change.
FIXED_KEYS = ("mixing_scale", "dataset_config", "dataset_train_split")
# Keys of a recipe that a model card names in any case; others when they are not the default.
CARD_KEYS = (
    *("learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("max_length", "seed"),
)
FINAL = "final"  # the directory of the final model
# Figures of which curves.png has a panel where they are logged, with those of evaluation.
CURVES = ("loss", "bits_per_byte", "tokens_per_second", "model_flops_utilization", "rewards/margins", "reward", "kl")


@contextmanager
def begun(run: RunArguments, args: TrainingArguments) -> Iterator[Path | None]:
    """Lock and record a run in its `output_dir`, and yield the checkpoint to go on from, or None to begin.

    Raise `UserError` for a launch that would train something else, for a run that has finished, for a directory or a
    checkpoint of a run on another model or other data, and while another run writes there.
    """
    check_launch(run, args)
    args.disable_tqdm |= not sys.stderr.isatty()  # a log would keep every state of a bar
    args.dataloader_pin_memory &= args.device.type != "cpu"  # PyTorch warns at every epoch that it cannot
    output = Path(args.output_dir)
    # The other processes of a run write beside the main one.
    with sole_writer(output) if args.process_index == 0 else nullcontext():
        if (output / FINAL).exists():
            raise UserError(
                f"{output / FINAL} exists: this run has finished. Choose another output_dir; to go on from the last "
                f"checkpoint with more max_steps or num_train_epochs, move {FINAL} away."
            )
        given = args.resume_from_checkpoint
        checkpoint = newest_whole_checkpoint(output) if given in (None, True) else Path(given)
        if args.process_index == 0:
            record = make_record(run, args)
            if checkpoint is not None:
                compare_records(record, checkpoint)
            write_json(output / RECORD, record)
        try:
            yield checkpoint
        except KeyboardInterrupt as interrupt:
            interrupt.add_note("The same command goes on from the newest whole checkpoint.")
            raise
        except NotFiniteError as error:
            raise UserError(
                f"Training stopped at {error} The last good checkpoint is {newest_whole_checkpoint(output)}. Lower "
                "the rates, or look for what is odd in the data, and start in another output_dir."
            ) from error


def train(trainer: RecipeTrainer, run: RunArguments, checkpoint: Path | None) -> None:
    """Train, on from `checkpoint` if there is one, and save the final model."""
    args, output = trainer.args, Path(trainer.args.output_dir)
    if checkpoint is not None:
        trainer.accelerator.print(f"Resuming from {checkpoint}.")
        args.eval_on_start = False  # the history of the checkpoint begins with that evaluation
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    if (steps := trainer.state.global_step) < trainer.state.max_steps:
        raise UserError(
            f"Training ended after {steps} of {trainer.state.max_steps} steps, so there is no final model. "
            + ("Give the same command again to continue." if steps else "The rows do not fill one batch: lower it.")
        )
    trainer.check_weights()
    model = whole_model(trainer)
    if args.process_index == 0:
        record = read_json(output / RECORD, Record)  # fails where the directory was removed
        write_curves(trainer.state.log_history, output)
        with new_directory(output / FINAL) as directory:
            model = model.merge_and_unload() if run.use_peft else model
            model.save_pretrained(directory)
            trainer.processing_class.save_pretrained(directory)
            if is_ours(model.config):
                shutil.copy(output / "curves.png", directory)
                (directory / "README.md").write_text(card(model.config, trainer, run, record), encoding="utf-8")
        print(f"Final model: {output / FINAL}\nCurves:      loss.json and curves.png beside it")
    # DDP's reducer must go before the process group. The last one to hold the group destroys it and joins its threads;
    # the reducer would do so with the GIL held, while such a thread may still need the GIL to release a tensor, for
    # ever.
    accelerator = trainer.accelerator
    trainer.model_wrapped = None
    accelerator.free_memory()
    accelerator.end_training()


# The record of a run


def make_record(run: RunArguments, args: TrainingArguments) -> Record:
    """Return what the run is made of, as JSON values. Raise `UserError` for a model or data that are not there."""
    template = chat_template(args)
    check_splits(run, args)
    recipe = {name: value for name, value in (asdict(run) | args.to_dict()).items() if name not in _UNRECORDED}
    recipe["chat_template"] = template and hashlib.sha256(template.encode()).hexdigest()
    record = {
        "data": {"name": run.dataset_name, **identify_data(run.dataset_name, run.dataset_config)},
        "base_model": identify_start(run, args),
        "recipe": recipe,
        "processes": args.world_size,
        "commit": current_commit(),
        "versions": {name: version(name) for name in LIBRARIES},
    }
    return json.loads(json.dumps(record, default=str))


def compare_records(record: Record, checkpoint: Path) -> None:
    """Print which keys and libraries differ from those of a run's `checkpoint`.

    Raise `UserError` where the model or the data do, and for a checkpoint that is not whole.
    """
    if not (checkpoint / RECORD).exists():
        raise UserError(
            f"resume_from_checkpoint: {checkpoint} has no {RECORD}: it was cut off, or is of another tool."
        )
    kept = read_json(checkpoint / RECORD, Record)
    for section in ("base_model", "data"):
        then, now = ({**each[section], "name": ""} for each in (kept, record))
        if then != now:
            raise UserError(
                f"{checkpoint} belongs to a run with another {section}, {kept[section]['name']}: choose another "
                "output_dir, or give this run what it began with."
            )
    for name in FIXED_KEYS:
        then, now = (each["recipe"].get(name) for each in (kept, record))
        if then != now:
            raise UserError(
                f"{name}: the run began with {then} and cannot go on with {now}. Give it what it began with, or "
                "start another run from its final model."
            )
    for section in ("recipe", "versions"):
        for name, now in record[section].items():
            if (then := kept[section].get(name)) != now:
                print(f"Note: this run began with {name} {then} and continues with {now}.", flush=True)


def identify_start(run: RunArguments, args: TrainingArguments) -> dict[str, str | None]:
    """Return the name and the hash or commit of the checkpoint or random weights that a run starts from."""
    if not run.preset:
        return {"name": run.model_name_or_path, **identify_model(run.model_name_or_path)}
    start = [start_config(run).to_dict(), start_tokenizer(run.tokenizer).get_vocab(), args.seed]
    content = json.dumps(start, sort_keys=True, default=str)
    return {"name": f"preset {run.preset}", "sha256": hashlib.sha256(content.encode()).hexdigest()}


def identify_model(source: str) -> dict[str, str | None]:
    """Return the hash of a local checkpoint's files, or the commit of one on the Hub."""
    path = Path(source).expanduser()
    if path.is_file():
        return {"sha256": file_sha256(path)}
    load_config_dict(source)
    if path.is_dir():
        return {"sha256": _hash_files({file for pattern in _MODEL_FILES for file in path.glob(pattern)})}
    return {"commit": extract_commit_hash(cached_file(source, CONFIG_NAME), None)}


def identify_data(name: str, config: str | None = None) -> dict[str, str | None]:
    """Return the hash of a local source or of a mixture with all its parts, or the commit of a dataset on the Hub.

    A dataset without a default configuration is only found with one, `config`. Raise `UserError` if it is not found.
    """
    if (parts := sources(name)) != [(name, 1.0)]:
        identities = [(share, identify_data(part)) for part, share in parts]
        return {"sha256": hashlib.sha256(json.dumps(identities).encode()).hexdigest()}
    path = Path(name)
    if path.exists():
        return {
            "sha256": file_sha256(path) if path.is_file() else _hash_files(f for f in path.rglob("*") if f.is_file())
        }
    with loading(name, config):
        return {"revision": load_dataset_builder(name, config).hash}


def _hash_files(files: Iterable[Path]) -> str:
    lines = sorted(f"{file_sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# Results


def write_curves(history: list[dict], output_dir: Path) -> None:
    """Write the losses of `history` as loss.json, [[step, value], ...] each, and the `CURVES` as curves.png."""
    points = {
        name: [[entry["step"], entry[name]] for entry in history if name in entry]
        for panel in CURVES
        for name in (panel, f"eval_{panel}")
    }
    write_json(output_dir / "loss.json", {"train": points["loss"], "eval": points["eval_loss"]})
    draw(points, output_dir / "curves.png")


def draw(points: dict[str, list], path: Path) -> None:
    """Draw a panel of each of the `CURVES` that was logged."""
    shown = [name for name in CURVES if points[name] or points[f"eval_{name}"] or name == "loss"]
    figure, all_axes = plots.panels("Curves of the run", len(shown), 2)
    for axes, panel in zip(all_axes, shown):
        for name in (panel, f"eval_{panel}"):
            axes.plot(*zip(*points[name]), marker=".", label=name) if points[name] else None
        axes.set(xlabel="step", ylabel=panel)
        axes.legend(fontsize="small")
    plots.save_plot(figure, path)


def card(config, trainer: RecipeTrainer, run: RunArguments, record: Record) -> str:
    """Return the model card of a final model, with what it was made of and the curves of the run."""
    output, history, args = Path(trainer.args.output_dir), trainer.state.log_history, trainer.args
    start, data = run.model_name_or_path, source_name(run.dataset_name)
    from_scratch = run.preset is not None or is_untrained(start)
    source = f"random weights of the preset {run.preset}" if run.preset else source_name(start)
    defaults = {
        name: declared.default for kind in (run, args) for name, declared in type(kind).__dataclass_fields__.items()
    }
    facts = {
        "Start" if from_scratch else "Base model": f"{source}, {_identity(record['base_model'])}",
        "Data": f"{data}, {_identity(record['data'])}",
    }
    held_out = evaluation_source(run, args)
    if held_out is not None:
        split = "" if held_out.split == "train" else f", split {held_out.split}"
        facts["Held-out data"] = source_name(held_out.name) + split
    facts["Steps"] = trainer.state.global_step
    for title, name in (("Training loss", "loss"), ("Held-out loss", "eval_loss")):
        if values := [entry[name] for entry in history if name in entry]:
            facts[f"{title}, first and last logged"] = f"{values[0]:.4f}, {values[-1]:.4f}"
    facts |= {"Processes": record["processes"], "Commit": record["commit"]}
    facts["Versions"] = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    facts |= {
        f"`{name}`": value
        for name, value in record["recipe"].items()
        if not isinstance(value, dict | None) and (name in CARD_KEYS or value != defaults.get(name, value))
    }
    scale = getattr(config, "mixing_scale", 1)
    mixing = f", {scale:g} times as much for the mixing" if scale != 1 else ""
    adapters = f", LoRA adapters of rank {run.lora_r}, merged" if run.use_peft else ""
    table = "\n".join(f"| {name} | {markdown(value)} |" for name, value in facts.items())
    origin = "Trained from scratch" if from_scratch else f"Fine-tuned from {markdown(source)}"
    details = f"""## {"Training" if from_scratch else "Fine-tuning"}

{origin} on {markdown(data)} for \
{trainer.state.global_step} steps with TRL's \
{trainer._name}Trainer: learning rate {args.learning_rate:g}{mixing}{adapters}.

![Curves of the run](curves.png)

| | |
|---|---|
{table}"""
    return render_card(
        config,
        # From beside output_dir. Where it is missing, a name of the Hub would run a stranger's code.
        f"./{output.name}/{FINAL}",
        base_model=None if run.preset else source_base_model(start),
        license=None if run.preset else source_license(start),
        datasets=None if Path(run.dataset_name).exists() else [run.dataset_name],
        from_scratch=from_scratch,
        details=details,
    )


def is_untrained(source: str) -> bool:
    """Return whether a directory is what `sft.make_model` wrote."""
    file = Path(source) / "README.md"
    return file.is_file() and make_model.DETAILS in file.read_text(encoding="utf-8", errors="replace")


def _identity(section: Section) -> str:
    kind = next(name for name in ("sha256", "commit", "revision") if name in section)
    return f"{'SHA-256' if kind == 'sha256' else kind} {section[kind]}"
