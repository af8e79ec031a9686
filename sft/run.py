"""Run a recipe in its directory: lock it, find the checkpoint to resume from, train, save the final model."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from transformers import TrainingArguments

from iha.cards import FINAL
from iha.errors import UserError
from iha.files import new_directory, read_json, sole_writer
from iha.kinds import is_ours
from sft.arguments import RunArguments
from sft.checkpoints import (
    RECORD,
    check_holds_no_model,
    check_weights,
    checkpoint_to_resume,
    clear_later_checkpoints,
    newest_whole_checkpoint,
)
from sft.distributed import check_launch, whole_model
from sft.record import Record
from sft.results import card, write_curves
from sft.sources import RunData
from sft.trainer import NotFiniteError, SFTRecipeTrainer


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


def train(trainer: SFTRecipeTrainer, data: RunData, run: RunArguments, checkpoint: Path | None) -> None:
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
    save_final(trainer, data, run)
    # DDP's reducer must go before the process group. The last object to hold the group destroys it and joins its
    # threads. If that were the reducer, it would join them while it holds the GIL, and wait for ever for a thread that
    # needs the GIL to release a tensor.
    accelerator = trainer.accelerator
    trainer.model_wrapped = None
    accelerator.free_memory()
    accelerator.end_training()


def save_final(trainer: SFTRecipeTrainer, data: RunData, run: RunArguments) -> None:
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
            text = card(model.config, trainer, data.held_out, run, record)
            (directory / "README.md").write_text(text, encoding="utf-8")
    print(f"Final model: {output / FINAL}\nCurves:      loss.json and curves.png next to it")
