"""Run a recipe with the trainer that a command builds: lock, record, training, and what is left in output_dir."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired

from datasets import load_dataset_builder
from datasets.exceptions import DatasetNotFoundError
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.hub import extract_commit_hash
from typing_extensions import TypedDict

from conversion_scripts.push_to_hub import push
from iha_io import plots
from iha_io.checkpoint_io import load_config_dict
from iha_io.command_io import (
    ROOT,
    UserError,
    current_commit,
    file_sha256,
    new_directory,
    read_json,
    refusing,
    sole_writer,
    write_json,
)
from kind_facts import is_ours
from model_cards.render import markdown, render_card, source_base_model, source_license, source_name
from sft.arguments import UNUSED_KEYS, RecipeParser, RunArguments, chat_template, check_values
from sft.data import local_files, sources
from sft.distributed import check_launch, sharding, whole_model
from sft.prepare import is_prepared, prepared_files
from sft.trainer import (
    CHECKSUMS,
    RECORD,
    NotFiniteError,
    RecipeTrainer,
    State,
    checkpoint_to_resume,
    newest_complete_checkpoint,
)


BuildTrainer = Callable[[RunArguments, TrainingArguments], RecipeTrainer]
Section = dict[str, Any]


class Record(TypedDict):
    """Hold what a run is made of, and why it stopped."""

    base_model: Section
    data: Section
    recipe: Section
    processes: Section
    code: Section
    versions: dict[str, str]
    stopped: NotRequired[str]


LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
# Of a checkpoint, what decides on the model and its tokens: a card or a log beside it does not.
_MODEL_FILES = ("*.safetensors", "pytorch_model*.bin", "*.json", "*.jinja", "*.model", "*.txt")
# Of Transformers' keys, those that decide on what is learned and which weights are kept.
_TRAINER_KEYS = {
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm", "weight_decay"),
    *("optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("auto_find_batch_size", "average_tokens_across_devices", "label_smoothing_factor", "neftune_noise_alpha"),
    *("seed", "data_seed", "full_determinism", "train_sampling_strategy", "length_column_name", "ignore_data_skip"),
    *("dataloader_drop_last", "dataloader_in_order", "remove_unused_columns", "label_names"),
    *("bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval", "use_cpu", "use_liger_kernel"),
    *("liger_kernel_config", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
}
# Of TRL's keys and ours, those that decide on neither. Files that keys name are recorded by their content.
_FREE_KEYS = {
    *("model_name_or_path", "dataset_name", "chat_template_path", "dataset_num_proc", "activation_offloading"),
    *("eval_packing", "sample_prompts", "memory_gb", "push_repo_id", *UNUSED_KEYS),
}
# Recorded for the reader: the hash beside them is what is compared.
_INFORMATION = {("base_model", "name"), ("data", "name"), ("code", "commit")}
_LENGTHS = ("max_steps", "num_train_epochs")
FINAL = "final"  # the directory of the final model
# A panel of curves.png -> the figures it shows, those that are logged.
PANELS = {
    "loss": ("loss", "eval_loss"),
    "token accuracy": ("mean_token_accuracy", "eval_mean_token_accuracy"),
    # DPO
    "reward's margin": ("rewards/margins", "eval_rewards/margins"),
    "share of margins above 0": ("rewards/accuracies", "eval_rewards/accuracies"),
    # GRPO
    "reward": ("reward", "eval_reward"),
    "KL from the reference": ("kl", "eval_kl"),
    "groups of equal rewards": ("frac_reward_zero_std",),
    "tokens of an answer": ("completions/mean_length", "eval_completions/mean_length"),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate",),
    "mixing's distance from its start": ("mixing_distance",),
    "tokens per second": ("tokens_per_second",),
    "peak memory (GiB)": ("peak_memory_gib",),
}
# Keys of a recipe that a model card names in any case; others when they are not the default.
CARD_KEYS = (
    *("learning_rate", "lr_scheduler_type", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("max_length", "seed"),
)


def run_recipe(
    config_class: type[TrainingArguments], usage: str, build: BuildTrainer, argv: Sequence[str] | None
) -> None:
    """Run the recipe of `argv`, or of the command line, to `output_dir`/final, and resume what was begun.

    `build` makes the trainer of the recipe. Raise `UserError`.
    """
    run, args = RecipeParser(config_class, usage).parse(sys.argv[1:] if argv is None else argv)
    check_values(run, args)
    check_launch(run, args)
    args.disable_tqdm |= not sys.stderr.isatty()  # a log would keep every state of a bar
    args.dataloader_pin_memory &= args.device.type != "cpu"  # PyTorch warns at every epoch that it cannot
    # The other processes of a run write beside the main one.
    with sole_writer(args.output_dir) if args.process_index == 0 else nullcontext():
        try:
            train(run, args, build)
        except KeyboardInterrupt as interrupt:
            written = Path(args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{CHECKSUMS}")
            last = max((int(file.parent.name.rpartition("-")[2]) for file in written), default=0)
            kept = f"Steps up to {last} are kept" if last else "There is no checkpoint yet"
            interrupt.add_note(f"{kept}: the same command goes on from there.")
            raise


def train(run: RunArguments, args: TrainingArguments, build: BuildTrainer) -> None:
    """Train, save and, where the recipe says so, publish."""
    is_main = args.process_index == 0
    record = make_record(run, args) if is_main else None
    checkpoint = checkpoint_to_resume(args)
    if is_main:
        keep_record(record, args.output_dir, checkpoint)
        if checkpoint is not None:
            check_record(record, checkpoint, checkpoint)

    # TRL, Transformers and PEFT refuse keys that do not go together when they get them.
    with refusing("the recipe cannot be trained", ImportError, ValueError):
        trainer = build(run, args)
    if checkpoint is not None:
        trainer.accelerator.print(f"Resuming from {checkpoint}.")
        args.eval_on_start = False  # the history of the checkpoint begins with that evaluation
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    except NotFiniteError as error:
        if is_main:
            # For whoever starts it again.
            write_json(Path(args.output_dir) / RECORD, record | {"stopped": str(error)})
        good = newest_complete_checkpoint(args.output_dir)
        last = f"The last good checkpoint is {good}" if good else "There is no checkpoint"
        raise UserError(
            f"Training stopped at {error} {last}. Lower the rates, or look for what is odd in the data, and start in "
            "another output_dir."
        ) from error

    if (steps := trainer.state.global_step) < trainer.state.max_steps:
        raise UserError(
            f"Training ended after {steps} of {trainer.state.max_steps} steps, so there is no final model. "
            + ("Give the same command again to continue." if steps else "The rows do not fill one batch: lower it.")
        )
    model = whole_model(trainer)
    if is_main:
        check_record(record, Path(args.output_dir))  # another run may be in a directory that was removed
        write_losses(trainer.state.log_history, Path(args.output_dir))
        final = Path(args.output_dir) / FINAL
        save_final(trainer, model, run, record, final)
        print(f"Final model: {final}\nCurves:      loss.json, loss.png, curves.json and curves.png beside it")
        if run.push_repo_id is not None:
            push(final, run.push_repo_id)
    # DDP's reducer must go before the process group. The last one to hold the group destroys it and joins its threads;
    # the reducer would do so with the GIL held, while such a thread may still need the GIL to release a tensor, for
    # ever.
    accelerator = trainer.accelerator
    del trainer
    accelerator.free_memory()
    accelerator.end_training()


# The record of a run


def make_record(run: RunArguments, args: TrainingArguments) -> Record:
    """Return what the run is made of, as sections of JSON values.

    Raise `UserError` for a model or data that are not there.
    """
    template = chat_template(args)
    # Of a token, `to_dict` hides the value.
    values = args.to_dict() | {key: value for key, value in vars(args).items() if key in ("eos_token", "pad_token")}
    others = TrainingArguments.__dataclass_fields__.keys() - _TRAINER_KEYS | _FREE_KEYS
    recipe = {key: value for key, value in (asdict(run) | values).items() if key not in others}
    if run.dataset_streaming:
        recipe["dataloader_num_workers"] = args.dataloader_num_workers  # each reads shards of its own
    recipe["chat_template"] = template and hashlib.sha256(template.encode()).hexdigest()
    record = {
        "data": {"name": run.dataset_name, **_identify_data(run.dataset_name)},
        "base_model": {"name": run.model_name_or_path, **_identify_model(run.model_name_or_path)},
        "recipe": recipe,
        "processes": {
            "number": args.world_size,
            "kind": args.distributed_state.distributed_type,
            "sharding": sharding(args),
        },
        "code": _identify_code(),
        "versions": {name: version(name) for name in LIBRARIES},
    }
    return json.loads(json.dumps(record, default=str))


def keep_record(record: Record, output_dir: str | Path, checkpoint: Path | None = None) -> None:
    """Write `record` to `output_dir`/run.json, unless the checkpoints there belong to such a run already.

    A record without checkpoints is replaced, since nothing was learned yet. So is that of a run that a longer one goes
    on from at its last `checkpoint`; its final model is renamed. Prints what stopped the earlier run, and which
    libraries have changed. Raise `UserError` for checkpoints of another run or without a record, and for a run that
    has finished.
    """
    directory = Path(output_dir)
    final = directory / FINAL
    if final.exists() and checkpoint is None:
        raise UserError(
            f"{final} exists: this run has finished, and has no checkpoint to go on from. Choose another output_dir; "
            f"with model_name_or_path {final} a run goes on from this model, with a new optimizer."
        )
    if any(directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        kept = check_record(record, directory, checkpoint)
        if kept["recipe"] != record["recipe"]:
            shape, step = record["recipe"]["lr_scheduler_type"], checkpoint.name.rpartition("-")[2]
            print(f"Going on after step {step}, the last of the run so far.", flush=True)
            if not shape.startswith("constant"):
                print(f"The learning rate is that of a {shape} schedule over all steps from here on: it rises again.")
            if final.exists():
                print(f"The final model of the run so far is {final.rename(f'{final}-{step}')}.", flush=True)
            write_json(directory / RECORD, record)
        elif final.exists():
            raise UserError(
                f"{final} exists: this run has finished. Raise max_steps or num_train_epochs to go on from its last "
                "checkpoint, or choose another output_dir."
            )
        for name, then in kept["versions"].items():
            if (now := record["versions"].get(name)) != then:
                print(f"Warning: this run began with {name} {then} and continues with {now}.", flush=True)
        if stopped := kept.get("stopped"):
            print(f"This run stopped before at {stopped}", flush=True)
    else:
        write_json(directory / RECORD, record)


def check_record(record: Record, directory: Path, checkpoint: Path | None = None) -> Record:
    """Return the record kept in `directory`, of a run or of its checkpoint.

    Raise `UserError` when there is none, or `record` differs from it in what decides on what is learned. It may have
    more steps where `checkpoint` is the last of its run.
    """
    kept = read_json(directory / RECORD, Record)
    state = read_json(checkpoint / TRAINER_STATE_NAME, State) if checkpoint else None
    may_be_raised = _LENGTHS if state and state["global_step"] >= state["max_steps"] else ()
    differences = []
    for section in ("base_model", "data", "recipe", "processes", "code"):
        then, now = kept[section], record[section]
        for key in sorted(then.keys() | now.keys()):
            is_raised = section == "recipe" and key in may_be_raised and 0 < then[key] < now[key]
            if (section, key) not in _INFORMATION and then.get(key) != now.get(key) and not is_raised:
                name = key if section == "recipe" else f"{section} {then.get('name', '')}".strip() + f" ({key})"
                differences.append(f"{name} was {_short(then.get(key))} and is {_short(now.get(key))}")
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"{directory} belongs to another run: {'; '.join(differences[:3])}{more}. Choose another output_dir, or "
            "give this run what it began with."
        )
    return kept


def _short(value: object) -> str:
    # Of a hash, enough to tell two apart.
    return value[:12] if isinstance(value, str) and len(value) >= 40 else repr(value)


def _identify_model(source: str) -> dict[str, str | None]:
    """Return the hash of a local checkpoint's files, or the commit of one on the Hub."""
    path = Path(source).expanduser()
    if path.is_file():
        return {"sha256": file_sha256(path)}
    load_config_dict(source)
    if path.is_dir():
        return {"sha256": hash_files({file for pattern in _MODEL_FILES for file in path.glob(pattern)})}
    return {"commit": extract_commit_hash(cached_file(source, CONFIG_NAME), None)}


def _identify_data(name: str) -> dict[str, str | None]:
    """Return the hash of a local source or of a mixture with all its parts, or the commit of a dataset on the Hub."""
    if (parts := sources(name)) != [(name, 1.0)]:
        identities = [(share, _identify_data(part)) for part, share in parts]
        return {"sha256": hashlib.sha256(json.dumps(identities).encode()).hexdigest()}
    path = Path(name).expanduser()
    if path.is_file():
        return {"sha256": file_sha256(path)}
    if path.is_dir():
        return {"sha256": hash_files(prepared_files(path) if is_prepared(name) else local_files(name))}
    local_files(name)  # refuses the name of a file that is not there
    with refusing(f"cannot load dataset {name!r}", DatasetNotFoundError, ValueError, ConnectionError):
        return {"revision": load_dataset_builder(name).hash}


def _identify_code() -> dict[str, str]:
    files = [*ROOT.glob("sft/*.py"), *ROOT.glob("modeling_iha/*.py")]
    return {"sha256": hash_files(files), "commit": current_commit()}


def hash_files(files: Iterable[Path]) -> str:
    """Return a SHA-256 over the names and contents of files, whatever directory they lie in."""
    lines = sorted(f"{file_sha256(file)}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# Results


def write_losses(history: list[dict], output_dir: Path) -> None:
    """Write the losses of `history` as loss.json and loss.png, and the figures of `PANELS` as curves.json and .png.

    A curve is [[step, value], ...]; losses are nats per token of SFT.
    """
    points = {
        name: [[entry["step"], entry[name]] for entry in history if name in entry]
        for panel in PANELS.values()
        for name in panel
    }
    losses = {"train": points["loss"], "eval": points["eval_loss"]}
    curves = {name: values for name, values in points.items() if values}
    write_json(output_dir / "loss.json", losses)
    write_json(output_dir / "curves.json", curves)
    draw(losses, curves, output_dir)


def draw(losses: dict[str, list], curves: dict[str, list], output_dir: Path) -> None:
    """Draw loss.png and curves.png of `write_losses`."""
    ends = ", ".join(f"{name} {points[-1][1]:.3f}" for name, points in losses.items() if points) or "none was logged"
    shown = {title: [name for name in panel if name in curves] for title, panel in PANELS.items()}
    shown = {title: names for title, names in shown.items() if names}
    figure, all_axes = plots.panels(f"Curves of the run; loss at the end: {ends}", len(shown), 2)
    for axes, (title, names) in zip(all_axes, shown.items()):
        _plot(axes, title, {name: curves[name] for name in names})
        if title == "learning rate":
            axes.set_yscale("log", nonpositive="mask")  # a warm-up begins at zero
    plots.save_plot(figure, output_dir / "curves.png")
    figure, (axes,) = plots.panels(f"Loss at the end: {ends}")
    _plot(axes, "loss (SFT: nats per token)\nlower is better", losses)
    plots.save_plot(figure, output_dir / "loss.png")


def _plot(axes, title: str, curves: dict[str, list]) -> None:
    for name, points in curves.items():
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, marker=".", label=name)
    axes.set(xlabel="step", ylabel=title)
    axes.legend(fontsize="small")


def save_final(
    trainer: RecipeTrainer, model: PreTrainedModel, run: RunArguments, record: Record, directory: Path
) -> None:
    """Write the trained `model` (see `whole_model`) with its code, tokenizer and card as `directory`.

    The card is filled from `record` and from what `trainer` logged; the curves in its output_dir come along. Raise
    `UserError` for a weight that is not a number.
    """
    trainer.check_weights()
    if run.use_peft:
        model = model.merge_and_unload()
    with new_directory(directory) as temporary:
        model.save_pretrained(temporary)
        trainer.processing_class.save_pretrained(temporary)
        if is_ours(model.config):
            source = run.model_name_or_path
            card = render_card(
                model.config,
                # From beside output_dir. Where it is missing, a name of the Hub would run a stranger's code.
                f"./{directory.parent.name}/{directory.name}",
                base_model=source_base_model(source),
                license=source_license(source),
                datasets=None if Path(run.dataset_name).exists() else [run.dataset_name],
                details=_card_details(trainer, run, record),
            )
            (temporary / "README.md").write_text(card, encoding="utf-8")
            shutil.copy(Path(trainer.args.output_dir) / "curves.png", temporary)


def _card_details(trainer: RecipeTrainer, run: RunArguments, record: Record) -> str:
    """Return the card's section on the run, in Markdown."""
    history, args = trainer.state.log_history, trainer.args
    code, recipe = record["code"], record["recipe"]
    source, data = source_name(run.model_name_or_path), source_name(run.dataset_name)
    defaults = {
        key: declared.default for kind in (run, args) for key, declared in type(kind).__dataclass_fields__.items()
    }
    facts = {
        "Base model": f"{source}, {_identity(record['base_model'])}",
        "Data": f"{data}, {_identity(record['data'])}",
        "Steps": trainer.state.global_step,
    }
    for title, name in (("Training loss", "loss"), ("Held-out loss", "eval_loss")):
        if values := [entry[name] for entry in history if name in entry]:
            facts[f"{title}, first and last logged"] = f"{values[0]:.4f}, {values[-1]:.4f}"
    facts["Processes"] = record["processes"]["number"]
    facts["Code"] = f"commit {code['commit']}, SHA-256 {code['sha256']}"
    facts["Versions"] = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    facts |= {
        f"`{key}`": value
        for key, value in recipe.items()
        if not isinstance(value, dict | None) and (key in CARD_KEYS or value != defaults.get(key))
    }
    scale = getattr(trainer.model.config, "mixing_scale", 1)
    mixing = f", {scale:g} times as much for the mixing" if scale != 1 else ""
    adapters = f", LoRA adapters of rank {run.lora_r}, merged" if run.use_peft else ""
    table = "\n".join(f"| {name} | {markdown(value)} |" for name, value in facts.items())
    return f"""## Fine-tuning

Fine-tuned from {markdown(source)} on {markdown(data)} for {trainer.state.global_step} steps with TRL's \
{trainer._name}Trainer: learning rate {args.learning_rate:g}{mixing}{adapters}.

![Curves of the run](curves.png)

| | |
|---|---|
{table}"""


def _identity(section: dict[str, str | None]) -> str:
    kind = next(name for name in ("sha256", "commit", "revision") if name in section)
    return f"{'SHA-256' if kind == 'sha256' else kind} {section[kind]}"
