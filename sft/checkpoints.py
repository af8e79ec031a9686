"""What a run finds in its output directory, and what it leaves there."""

import shutil
from fnmatch import filter as filter_names
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import PartialState
from matplotlib.figure import Figure
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from common.command_io import UserError, file_sha256, new_directory, one_line, read_json, whole_file, write_json
from model_cards.render import markdown, render_card, source_base_model, source_license, source_name
from sft.arguments import RunArguments
from sft.distributed import OPTIMIZER_STATES


if TYPE_CHECKING:
    from sft.trainer import RecipeTrainer


# Of a Trainer checkpoint: file -> its size and SHA-256.
CHECKSUMS = "checksums.json"
# A panel of curves.png -> the logged figures it shows.
PANELS = {
    "loss": ("loss", "eval_loss"),
    "token accuracy": ("mean_token_accuracy", "eval_mean_token_accuracy"),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate", "mixing_learning_rate"),
    "mixing's distance from its start": ("mixing_distance",),
    "tokens per second": ("tokens_per_second",),
    "peak memory (GiB)": ("peak_memory_gib",),
}
# Keys of a recipe that a model card names in any case; others when they are not the default.
CARD_KEYS = (
    "learning_rate",
    "lr_scheduler_type",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "seed",
)


# Resuming


def write_checksums(checkpoint: Path) -> None:
    """Write the size and SHA-256 of every file of a Trainer checkpoint beside them. It is then complete."""
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file() and file != checkpoint / CHECKSUMS)
    write_json(
        checkpoint / CHECKSUMS,
        {
            file.relative_to(checkpoint).as_posix(): {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
            for file in files
        },
    )


def file_fault(checkpoint: Path) -> str | None:
    """Return the first file of a Trainer checkpoint that is not what `write_checksums` found, and why; None without
    one. Reads every file whole."""
    if not (checkpoint / CHECKSUMS).exists():
        return f"{CHECKSUMS} is missing, which is written last"
    try:
        for name, written in read_json(checkpoint / CHECKSUMS).items():
            file = checkpoint / name
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != written["bytes"]:
                return f"{name} is damaged: it holds {size} bytes, and {written['bytes']} were written"
            if file_sha256(file) != written["sha256"]:
                return f"{name} is damaged: its SHA-256 is not that of what was written"
    except (UserError, OSError, KeyError, TypeError) as error:
        return f"{CHECKSUMS} is damaged: {one_line(error)}"
    return None


def checkpoint_fault(checkpoint: Path, processes: int = 1) -> str | None:
    """Return why a run of so many `processes` cannot continue from a Trainer checkpoint: the file that is missing or
    damaged; None when it can."""
    if fault := file_fault(checkpoint):
        return fault
    names = {name.partition("/")[0] for name in read_json(checkpoint / CHECKSUMS)}
    in_deepspeed = ["global_step*"]  # one folder for weights, optimiser and schedule
    random_states = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]
    for alternatives in (
        [TRAINER_STATE_NAME],
        ["*.safetensors", "pytorch_model_fsdp*", *in_deepspeed],
        [*OPTIMIZER_STATES],
        ["scheduler.pt", *in_deepspeed],
        *([name] for name in random_states),
    ):
        if not any(filter_names(names, pattern) for pattern in alternatives):
            return f"{alternatives[0]} is missing"
    return None


def newest_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """The Trainer checkpoint with the highest step in `output_dir` that this run can continue from, or None. Says in
    one line what is wrong with each that it passes over."""
    numbered = ((path.name.rpartition("-")[2], path) for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    by_step = {int(number): path for number, path in numbered if number.isdigit()}
    state = PartialState()
    for step in sorted(by_step, reverse=True):
        fault = checkpoint_fault(by_step[step], state.num_processes)
        if fault is None:
            return by_step[step]
        state.print(f"Passing over {by_step[step]}: {fault}.", flush=True)
    return None


def checkpoint_to_resume(args: TrainingArguments) -> Path | None:
    """The checkpoint that the recipe names, or else the newest complete one of `output_dir`, or None. Raises
    `UserError` for a named one that cannot be continued from."""
    if args.resume_from_checkpoint in (None, True):
        return newest_complete_checkpoint(args.output_dir)
    checkpoint = Path(args.resume_from_checkpoint)
    if not checkpoint.is_dir():
        raise UserError(
            f"resume_from_checkpoint: {checkpoint} is no directory. Without that key a run continues from the newest "
            "complete checkpoint of its output_dir."
        )
    if fault := checkpoint_fault(checkpoint, args.world_size):
        whole = newest_complete_checkpoint(checkpoint.parent)
        older = f"Continue from {whole}, which is whole" if whole else "No checkpoint beside it is whole"
        raise UserError(f"resume_from_checkpoint: {checkpoint} cannot be continued from: {fault}. {older}.")
    return checkpoint


# Results


def write_losses(history: list[dict], output_dir: str | Path) -> None:
    """Write loss.json ({"train": [[step, loss], ...], "eval": ...}, nats per token of SFT) and its plot loss.png; and
    curves.json ({name: [[step, value], ...]}) and curves.png with everything that was logged, see `PANELS`."""
    output_dir = Path(output_dir)
    names = [name for panel in PANELS.values() for name in panel]
    curves = {name: [[entry["step"], entry[name]] for entry in history if name in entry] for name in names}
    losses = {"train": curves["loss"], "eval": curves["eval_loss"]}
    write_json(output_dir / "loss.json", losses)
    write_json(output_dir / "curves.json", curves)

    figure = Figure()
    _plot(figure.subplots(), "loss", losses)
    _write_figure(figure, output_dir / "loss.png")
    figure = Figure(figsize=(10, 12), layout="constrained")
    for axes, (title, panel) in zip(figure.subplots(4, 2).flat, PANELS.items()):
        _plot(axes, title, {name: curves[name] for name in panel})
    figure.axes[-1].set_visible(False)  # seven panels in eight places
    _write_figure(figure, output_dir / "curves.png")


def _plot(axes, title: str, curves: dict[str, list]) -> None:
    for name, points in curves.items():
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, marker=".", label=name)
    axes.set(xlabel="step", ylabel=title)
    axes.legend()


def _write_figure(figure: Figure, path: Path) -> None:
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def save_final(
    trainer: "RecipeTrainer", model: PreTrainedModel, run: RunArguments, record: dict[str, dict], directory: Path
) -> None:
    """Write the trained `model` (see `whole_model`), its code, tokenizer, chat template, generation config and model
    card as `directory`.

    The card is filled from `record`, what the run is made of, and from what `trainer` logged; the curves in its
    output_dir come along. Raises `UserError` for a weight that is not a number.
    """
    trainer.check_weights()
    if run.use_peft:
        model = model.merge_and_unload()
    with new_directory(directory) as temporary:
        model.save_pretrained(temporary)
        trainer.processing_class.save_pretrained(temporary)
        if model.config.model_type == "iha":
            source = run.model_name_or_path
            card = render_card(
                model.config,
                Path(trainer.args.output_dir).name,
                base_model=source_base_model(source),
                license=source_license(source),
                datasets=None if Path(run.dataset_name).exists() else [run.dataset_name],
                details=_card_details(trainer, run, record),
            )
            (temporary / "README.md").write_text(card, encoding="utf-8")
            shutil.copy(Path(trainer.args.output_dir) / "curves.png", temporary)


def _card_details(trainer: "RecipeTrainer", run: RunArguments, record: dict[str, dict]) -> str:
    """The card's section on the run, in Markdown."""
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
    rate = run.mixing_rate(args.learning_rate)
    return "\n".join(
        [
            "## Fine-tuning",
            "",
            f"Fine-tuned from {markdown(source)} on {markdown(data)} for "
            f"{trainer.state.global_step} steps with TRL's {trainer._name}Trainer: learning rate {args.learning_rate:g}, mixing and "
            f"collapse weights {rate:g}{f', LoRA adapters of rank {run.lora_r}, merged' if run.use_peft else ''}.",
            "",
            "![Curves of the run](curves.png)",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {markdown(value)} |" for name, value in facts.items()),
        ]
    )


def _identity(section: dict[str, str | None]) -> str:
    """The hash or commit in a section of the record."""
    kind = next(name for name in ("sha256", "commit", "revision") if name in section)
    return f"{'SHA-256' if kind == 'sha256' else kind} {section[kind]}"
