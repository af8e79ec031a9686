"""Run a recipe in its directory: lock it, find the checkpoint to resume from, train, save the final model."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from transformers import TrainingArguments

from iha.cards import FINAL
from iha.errors import UserError
from iha.files import new_directory, read_json, sole_writer, write_json
from iha.kinds import is_ours
from sft.arguments import RunArguments
from sft.distributed import check_launch, whole_model
from sft.record import Record, compare_records, make_record
from sft.results import card, write_curves
from sft.trainer import (
    RECORD,
    NotFiniteError,
    SFTRecipeTrainer,
    check_weights,
    checkpoints_after,
    newest_whole_checkpoint,
    step_of,
)


@contextmanager
def begun(run: RunArguments, args: TrainingArguments) -> Iterator[Path | None]:
    """Lock a run's `output_dir`, and yield the checkpoint to resume from, or None for a new run.

    Raise `UserError` for a launch that would train something else, for a directory that holds a model, for a run that
    has finished, and while another run writes there.
    """
    check_launch(args)
    args.disable_tqdm |= not sys.stderr.isatty()  # a log would keep every state of a bar
    args.dataloader_pin_memory &= args.device.type != "cpu"  # PyTorch warns at every epoch that it cannot
    output = Path(args.output_dir)
    check_holds_no_model(output)
    # The main process holds the lock. The other processes of the run write next to it.
    with sole_writer(output) if args.process_index == 0 else nullcontext():
        if (output / FINAL).exists():
            raise UserError(
                f"{output / FINAL} exists: this run has finished. Choose another output_dir; to go on from the last "
                f"checkpoint with more max_steps or num_train_epochs, move {FINAL} away."
            )
        checkpoint = checkpoint_to_resume(args.resume_from_checkpoint, output)
        if args.process_index == 0:
            clear_later_checkpoints(output, checkpoint)
        try:
            yield checkpoint
        except KeyboardInterrupt as interrupt:
            if args.resume_from_checkpoint is None:
                last = newest_whole_checkpoint(output)
                start = "starts again: there is no checkpoint yet" if last is None else f"goes on from {last}"
                interrupt.add_note(f"The same command {start}.")
            raise
        except NotFiniteError as error:
            last = newest_whole_checkpoint(output)
            where = "There is no checkpoint yet." if last is None else f"The last good checkpoint is {last}."
            raise UserError(
                f"Training stopped at {error} {where} Lower learning_rate, or check the data, and start in another "
                "output_dir."
            ) from error


def write_record(run: RunArguments, args: TrainingArguments, checkpoint: Path | None) -> None:
    """Record in a run's `output_dir` what it is made of.

    Raise `UserError` if it would go on from a checkpoint of a run on another model or other data.
    """
    if args.process_index != 0:
        return
    record = make_record(run, args)
    if checkpoint is not None:
        compare_records(record, checkpoint)
    write_json(Path(args.output_dir) / RECORD, record)


def check_holds_no_model(output: Path) -> None:
    """Reject the directory of a model that is not a run's: `push` would publish the run's files with the model.

    Raise `UserError`.
    """
    names = ("config.json", "adapter_config.json", "*.safetensors", "pytorch_model*.bin", "*.gguf")
    found = [path.name for name in names for path in sorted(output.glob(name))]
    if found and not (output / RECORD).exists():
        raise UserError(f"{output} holds a model ({found[0]}) and no run: choose another output_dir.")


def checkpoint_to_resume(given: str | bool | None, output: Path) -> Path | None:
    """Return the checkpoint that `resume_from_checkpoint` names, or else the newest whole one. Raise `UserError`."""
    if str(given).lower() == "false":
        raise UserError("resume_from_checkpoint: a run always resumes in its output_dir. Remove the key.")
    return newest_whole_checkpoint(output) if str(given).lower() in ("none", "true") else Path(given).expanduser()


def clear_later_checkpoints(output: Path, checkpoint: Path | None) -> None:
    """Reject complete checkpoints later than the one to resume from. Raise `UserError`.

    The rotation of checkpoints would take the one with the most steps for the newest, and remove those of this run. If
    the run resumes in this directory, later checkpoints that a stopped save left incomplete are removed. Directories
    in that of a new run may be somebody else's and are left alone.
    """
    later = checkpoints_after(0 if checkpoint is None else step_of(checkpoint), output)
    whole = sorted(path.name for path in later if (path / RECORD).exists())
    if whole:
        raise UserError(f"{output} holds later checkpoints than {checkpoint}: move {', '.join(whole)} away.")
    if checkpoint is not None and checkpoint.resolve().parent == output.resolve():
        for path in later:
            shutil.rmtree(path)


def train(trainer: SFTRecipeTrainer, run: RunArguments, checkpoint: Path | None) -> None:
    """Train from the start or from `checkpoint`, and save the final model."""
    args = trainer.args
    if checkpoint is not None:
        trainer.accelerator.print(f"Resuming from {checkpoint}.")
        args.eval_on_start = False  # the history of the checkpoint begins with that evaluation
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    steps = trainer.state.global_step
    if steps < trainer.state.max_steps or steps == 0:
        reason = "Give the same command again to continue."
        if steps == 0:
            reason = "Lower per_device_train_batch_size if the rows do not fill one batch, or raise max_steps."
        raise UserError(
            f"Training ended after {steps} of {trainer.state.max_steps} steps, so there is no final model. {reason}"
        )
    check_weights(trainer.model, steps)
    if args.load_best_model_at_end and trainer.state.best_model_checkpoint is None:
        trainer.accelerator.print(
            f"Warning: no evaluation gave a number for {args.metric_for_best_model}, so final/ has the last weights "
            "and not the best ones."
        )
    save_final(trainer, run)
    # DDP's reducer must go before the process group. The last object to hold the group destroys it and joins its
    # threads. If that were the reducer, it would join them while it holds the GIL, and wait for ever for a thread that
    # needs the GIL to release a tensor.
    accelerator = trainer.accelerator
    trainer.model_wrapped = None
    accelerator.free_memory()
    accelerator.end_training()


def save_final(trainer: SFTRecipeTrainer, run: RunArguments) -> None:
    """Write the curves and the final model with its card. Every process must call this, and the main one writes."""
    output = Path(trainer.args.output_dir)
    model = whole_model(trainer)
    if trainer.args.process_index != 0:
        return
    record = read_json(output / RECORD, Record)  # raises an error if the directory was removed
    write_curves(trainer.state.log_history, output)
    with new_directory(output / FINAL) as directory:
        model = model.merge_and_unload() if run.use_peft else model
        model.save_pretrained(directory)
        trainer.processing_class.save_pretrained(directory)
        if is_ours(model.config):
            shutil.copy(output / "curves.png", directory)
            (directory / "README.md").write_text(card(model.config, trainer, run, record), encoding="utf-8")
    print(f"Final model: {output / FINAL}\nCurves:      loss.json and curves.png next to it")
