"""Write the results of a run: the curves of what it logged, and the card of its final model."""

from pathlib import Path

from iha import plots
from iha.card_template import render_card
from iha.cards import FINAL, Origin, markdown, name_of_place, origin_of, source_name
from iha.files import write_json
from sft.arguments import RunArguments
from sft.checkpoints import step_of
from sft.record import Record, Section
from sft.row_sources import RowSource
from sft.trainer import SFTRecipeTrainer


MIXING = "mixing: distance from start"
# The panels of curves.png, and the figures that Trainer logs of which each has lines.
PANELS = {
    "loss, nats per token": {"loss": "training", "eval_loss": "held-out rows"},
    "bits per byte of text": {"eval_bits_per_byte": "held-out rows"},
    "tokens per second": {"tokens_per_second": "training"},
    "share of the peak FLOP/s": {"model_flops_utilization": "training"},
    MIXING: {f"mixing_change_{part}": part for part in ("queries", "keys", "values", "collapse")},
}
COLORS = {"training": "C0", "held-out rows": "C1", "queries": "C2", "keys": "C3", "values": "C4", "collapse": "C5"}
# Keys of a recipe that every card names. It names other keys if they differ from their defaults.
CARD_KEYS = (
    "learning_rate",
    "lr_scheduler_type",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_length",
    "seed",
)


def write_curves(history: list[dict], output_dir: Path) -> None:
    """Write the figures of the `PANELS` that were logged as curves.png and, with the memory, as loss.json.

    The file holds [[step, value], ...] of each figure. The losses are called "train" and "eval" there.
    """
    names = [*(name for lines in PANELS.values() for name in lines), "peak_memory_gb"]
    points = {name: [[entry["step"], entry[name]] for entry in history if name in entry] for name in names}
    draw({name: values for name, values in points.items() if values}, output_dir / "curves.png")
    losses = {"train": points.pop("loss"), "eval": points.pop("eval_loss")}
    write_json(output_dir / "loss.json", losses | {name: values for name, values in points.items() if values})


def draw(points: dict[str, list], path: Path) -> None:
    """Draw the panels of the figures that were logged."""
    shown = [label for label, lines in PANELS.items() if points.keys() & lines.keys()]
    figure, all_axes = plots.panels("Curves of the run", max(1, len(shown)), 2)
    last = max((step for values in points.values() for step, _ in values), default=1)
    for axes, label in zip(all_axes, shown):
        for name, line in PANELS[label].items():
            if name in points:
                axes.plot(*zip(*points[name]), marker=".", label=line, color=COLORS[line])
        axes.set(xlabel="step", ylabel=label, xlim=(0, 1.03 * last))
        if label == MIXING:
            axes.set_ylim(bottom=0)
            axes.legend()
    plots.save_plot(figure, path)


def card(config, trainer: SFTRecipeTrainer, eval_source: RowSource | None, run: RunArguments, record: Record) -> str:
    """Return the model card of a final model, which says what it was made of and shows the curves of the run.

    `eval_source` is that of the rows to evaluate on.
    """
    output = Path(trainer.args.output_dir)
    args = trainer.args
    data = source_name(run.dataset_name)
    if run.preset:
        origin = Origin({}, from_scratch=True)
        start = f"random weights of the preset {run.preset}"
        made = "Trained from scratch"
    else:
        origin = origin_of(run.model_name_or_path)
        start = source_name(run.model_name_or_path)
        made = f"{'Trained from scratch, here' if origin.from_scratch else 'Fine-tuned'} from {markdown(start)}"
    title, first = ("Training", "Start") if origin.from_scratch else ("Fine-tuning", "Base model")
    facts = {
        first: f"{start}, {_identity(record['base_model'])}",
        "Data": f"{data}, {_identity(record['data'])}",
        **_facts_of_the_run(trainer, eval_source, run, record),
    }
    scale = getattr(config.get_text_config(decoder=True), "mixing_scale", 1)
    mixing = f", {scale:g} times as much for the mixing" if scale != 1 else ""
    adapters = f", LoRA adapters of rank {run.lora_r}, merged" if run.use_peft else ""
    table = "\n".join(f"| {name} | {markdown(value)} |" for name, value in facts.items())
    steps = trainer.state.global_step
    details = f"""## {title}

{made} on {markdown(data)} for \
{steps} step{"" if steps == 1 else "s"} with TRL's \
SFTTrainer: learning rate {args.learning_rate:g}{mixing}{adapters}.

![Curves of the run](curves.png)

| | |
|---|---|
{table}"""
    return render_card(
        config,
        name_of_place(output / FINAL),
        from_scratch=origin.from_scratch,
        details=details,
        datasets=None if Path(run.dataset_name).exists() else [run.dataset_name],
        **origin.metadata,
    )


def _facts_of_the_run(
    trainer: SFTRecipeTrainer, eval_source: RowSource | None, run: RunArguments, record: Record
) -> dict[str, object]:
    args = trainer.args
    facts = {}
    if eval_source is not None:
        split = "" if eval_source.split == "train" else f", split {eval_source.split}"
        facts["Held-out data"] = source_name(eval_source.name) + split
    facts["Steps"] = trainer.state.global_step
    best = trainer.state.best_model_checkpoint
    if args.load_best_model_at_end and best is not None:
        step = step_of(Path(best))
        metric = args.metric_for_best_model.removeprefix("eval_")
        value = trainer.state.best_metric
        facts["Weights"] = f"those of step {step}, with a held-out {metric} of {value:.4f}, the best that was saved"
    for title, name in (("Training loss", "loss"), ("Held-out loss", "eval_loss")):
        values = [entry[name] for entry in trainer.state.log_history if name in entry]
        if values:
            facts[f"{title}, first and last logged"] = f"{values[0]:.4f}, {values[-1]:.4f}"
    facts["Processes"] = record["processes"]
    facts["Commit"] = record["commit"]
    facts["Versions"] = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    declared = type(run).__dataclass_fields__ | type(args).__dataclass_fields__
    for name, value in record["recipe"].items():
        is_chosen = name in declared and value not in (declared[name].default, [])
        if (name in CARD_KEYS or is_chosen) and not isinstance(value, dict | None):
            facts[f"`{name}`"] = value
    return facts


def _identity(section: Section) -> str:
    kind = next(name for name in ("fingerprint", "sha256", "revision") if name in section)
    return f"{'SHA-256' if kind == 'sha256' else kind} {section[kind]}"
