"""Save checkpoints that are whole, find the one to resume from, and pass over incomplete ones."""

import shutil
from pathlib import Path

from accelerate import Accelerator, PartialState
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from iha.errors import UserError
from iha.files import whole_file


# The file that records what a run is made of. A copy is written last into a checkpoint, and marks it as complete.
RECORD = "run.json"


def check_holds_no_model(output: Path) -> None:
    """Reject the directory of a model that is not a run's: `push` would publish the run's files with the model.

    Raise `UserError`.
    """
    names = ("config.json", "adapter_config.json", "*.safetensors", "pytorch_model*.bin", "*.gguf")
    found = [path.name for name in names for path in sorted(output.glob(name))]
    if found and not (output / RECORD).exists():
        raise UserError(f"{output} holds a model ({found[0]}) and no run: choose another output_dir.")


def checkpoint_to_resume(given: str | bool | None, output: Path) -> Path | None:
    """Return the checkpoint that `resume_from_checkpoint` names, or else the newest whole one.

    Raise `UserError` for `false`, for `true` if there is none, and for one that does not exist.
    """
    name = str(given).lower()  # a value is true or false in a YAML file, and a word on the command line
    if name == "false":
        raise UserError(
            "resume_from_checkpoint=false: expected a checkpoint's directory. A run resumes from the newest "
            "checkpoint of its output_dir: to start anew, remove the key and choose another output_dir."
        )
    if name not in ("none", "true"):
        checkpoint = Path(str(given)).expanduser()
        if not checkpoint.is_dir():
            raise UserError(f"resume_from_checkpoint: there is no directory {checkpoint}.")
        return checkpoint
    newest = newest_whole_checkpoint(output)
    if newest is None and name == "true":
        raise UserError(
            f"resume_from_checkpoint=true: {output} holds no whole checkpoint: correct output_dir, or remove the key."
        )
    return newest


def newest_whole_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the last checkpoint in `output_dir` that is complete, or None. Print those that are skipped."""
    for path in sorted(checkpoints_after(0, output_dir), key=step_of, reverse=True):
        if (path / RECORD).exists():
            return path
        PartialState().print(f"Passing over {path}: {RECORD} is missing, which is written last.", flush=True)
    return None


def checkpoints_after(step: int, output_dir: str | Path) -> list[Path]:
    """Return the checkpoints in `output_dir` of later steps than `step`, incomplete ones included."""
    return [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(path) > step]


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by the name of its directory, or 0 if this has none."""
    step = checkpoint.name.rpartition("-")[2]
    return int(step) if step.isdigit() else 0


def clear_later_checkpoints(output: Path, checkpoint: Path | None) -> None:
    """Remove the incomplete checkpoints that are later than the one to resume from, which a stopped save left.

    The rotation of checkpoints would take the one with the most steps for the newest, and remove those of this run.
    So raise `UserError` for complete ones. Directories in that of a new run may be somebody else's and are left alone.
    """
    later = checkpoints_after(0 if checkpoint is None else step_of(checkpoint), output)
    whole = sorted(path.name for path in later if (path / RECORD).exists())
    if whole:
        raise UserError(f"{output} holds later checkpoints than {checkpoint}: move {', '.join(whole)} away.")
    is_of_run = checkpoint is not None and checkpoint.resolve().parent == output.resolve()
    if is_of_run or (output / RECORD).exists():
        for path in later:
            PartialState().print(f"Removing {path}, which a stopped run has not finished.", flush=True)
            shutil.rmtree(path)


class WholeCheckpoints(TrainerCallback):
    """Mark a checkpoint as complete once it is, and only then remove older ones. Check the one to resume from.

    Raise `UserError` for a checkpoint of another kind of launch.
    """

    def __init__(self, accelerator: Accelerator, limit: int | None) -> None:
        self.accelerator = accelerator
        self.limit = limit

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        # A checkpoint holds the steps of logs, saves and evaluations. Those of this run count.
        state.compute_steps(args, state.max_steps)
        if state.max_steps < state.logging_steps:
            state.logging_steps = 1  # else a short run would end without a curve
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            return  # It counts evaluations, and there may have been none.
        # Transformers silently ignores the files of a launch that shards in another way, and the schedule begins anew.
        is_resumed = state.global_step > 0
        has_loaded = lr_scheduler.last_epoch > 0
        if is_resumed and not has_loaded:
            raise UserError(
                f"{PREFIX_CHECKPOINT_DIR}-{state.global_step} holds no optimizer for this launch: resume with the "
                "accelerate config that began it."
            )

    def on_save(self, args, state, control, **kwargs):
        self.accelerator.wait_for_everyone()  # each process writes its random state, and its share of a model
        if not args.should_save:
            return
        output = Path(args.output_dir)
        with whole_file(output / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / RECORD) as file:
            shutil.copyfile(output / RECORD, file)
        rotate_checkpoints(args.output_dir, self.limit, state.best_model_checkpoint)
