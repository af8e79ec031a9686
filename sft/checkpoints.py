"""What a run finds in its output directory, and what it leaves there."""

import json
from pathlib import Path

from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from command_io import new_directory, whole_file
from model_cards.render import render_card, source_license, source_name
from sft.arguments import RunArguments
from sft.trainer import MixingTrainer


def newest_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """The Trainer checkpoint with the highest step in `output_dir` that was written to its end, or None.

    The Trainer writes trainer_state.json last; the weights are opened too, which finds a file cut short by a crash.
    """

    def is_complete(checkpoint: Path) -> bool:
        weights = list(checkpoint.glob("*.safetensors"))
        try:
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            for file in weights:
                with safe_open(file, framework="pt"):
                    pass
        except (OSError, ValueError, SafetensorError):
            return False
        return bool(weights)

    numbered = ((path.name.rpartition("-")[2], path) for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    by_step = {int(number): path for number, path in numbered if number.isdigit()}
    return next((by_step[step] for step in sorted(by_step, reverse=True) if is_complete(by_step[step])), None)


def write_losses(history: list[dict], output_dir: str | Path) -> None:
    """Write loss.json ({"train": [[step, loss], ...], "eval": ...}, nats per token) and its plot loss.png."""
    losses = {
        "train": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "eval": [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
    }
    with whole_file(Path(output_dir) / "loss.json") as path:
        path.write_text(json.dumps(losses, indent=1), encoding="utf-8")
    figure = Figure()
    axes = figure.subplots()
    for name, points in losses.items():
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, marker=".", label=name)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    with whole_file(Path(output_dir) / "loss.png") as path:
        figure.savefig(path, format="png", dpi=120)


def save_final(trainer: MixingTrainer, model: PreTrainedModel, run: RunArguments, directory: Path) -> None:
    """Write the trained `model` (see `whole_model`), its code, tokenizer, chat template, generation config and model
    card as `directory`."""
    adapters = ""
    if run.use_peft:
        model = model.merge_and_unload()
        adapters = f", LoRA adapters of rank {run.lora_r}, merged"
    with new_directory(directory) as temporary:
        model.save_pretrained(temporary)
        trainer.processing_class.save_pretrained(temporary)
        if model.config.model_type == "iha":
            source = run.model_name_or_path
            card = render_card(
                model.config,
                Path(trainer.args.output_dir).name,
                base_model=None if Path(source).exists() else source,
                license=source_license(source),
                datasets=None if Path(run.dataset_name).exists() else [run.dataset_name],
                details=f"## Fine-tuning\n\nFine-tuned from {source_name(source)} on {source_name(run.dataset_name)} for "
                f"{trainer.state.global_step} steps with TRL's SFTTrainer: learning rate {trainer.args.learning_rate:g}, "
                f"mixing and collapse weights {run.mixing_lr_multiplier:g} times that{adapters}.",
            )
            (temporary / "README.md").write_text(card, encoding="utf-8")
