"""One run of a recipe, whatever its trainer: its checks, its lock and record, training, and what it leaves."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from transformers import Trainer, TrainingArguments

from common.command_io import UserError, sole_writer
from conversion_scripts.push_to_hub import publish
from sft.arguments import RecipeParser, RunArguments, check_values
from sft.checkpoints import checkpoint_to_resume, newest_complete_checkpoint, save_final, write_losses
from sft.distributed import check_launch, whole_model
from sft.run_record import check_record, keep_record, make_record, note_stop
from sft.trainer import NotFiniteError


BuildTrainer = Callable[[RunArguments, TrainingArguments], Trainer]


def run_recipe(
    config_class: type[TrainingArguments], usage: str, build: BuildTrainer, argv: Sequence[str] | None
) -> None:
    """Run a recipe, parsed from `argv` or the command line, with the trainer that `build` makes of it to
    `output_dir`/final, resuming what was begun. Raises `UserError`."""
    run, args = RecipeParser(config_class, usage).parse(sys.argv[1:] if argv is None else argv)
    check_values(run, args)
    check_launch(run, args)
    args.disable_tqdm |= not sys.stderr.isatty()  # a log would keep every state of a bar
    # The other processes of a run write beside the main one.
    with sole_writer(args.output_dir) if args.process_index == 0 else nullcontext():
        train(run, args, build)


def train(run: RunArguments, args: TrainingArguments, build: BuildTrainer) -> None:
    """Train, save and, where the recipe says so, publish. Raises `UserError`."""
    is_main = args.process_index == 0
    final = Path(args.output_dir) / "final"
    if final.exists():
        raise UserError(f"{final} exists: this run has finished. Remove it or choose another output_dir.")
    record = make_record(run, args) if is_main else None
    if is_main:
        keep_record(record, args.output_dir)
    checkpoint = checkpoint_to_resume(args)
    if is_main and checkpoint is not None:
        check_record(record, checkpoint.parent)

    trainer = build(run, args)
    if checkpoint is not None:
        trainer.accelerator.print(f"Resuming from {checkpoint}.")
        args.eval_on_start = False  # the history of the checkpoint begins with that evaluation
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    except NotFiniteError as error:
        if is_main:
            note_stop(record, str(error), args.output_dir)
        good = newest_complete_checkpoint(args.output_dir)
        raise UserError(
            f"Training stopped at {error} {f'The last good checkpoint is {good}' if good else 'There is no checkpoint'}. "
            "Lower the rates, or look for what is odd in the data, and start in another output_dir."
        ) from error

    model = whole_model(trainer)
    if is_main:
        write_losses(trainer.state.log_history, args.output_dir)
        save_final(trainer, model, run, record, final)
        print(f"Final model: {final}\nCurves:      loss.json, loss.png, curves.json and curves.png beside it")
        if run.push_repo_id is not None:
            publish(final, run.push_repo_id)
    # DDP's reducer must go before the process group. The last one to hold the group destroys it and joins its threads;
    # the reducer would do so with the GIL held, while such a thread may still need the GIL to release a tensor, for
    # ever.
    accelerator = trainer.accelerator
    del trainer
    accelerator.free_memory()
    accelerator.end_training()
