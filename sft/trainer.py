"""Train with TRL's trainers.

They get checkpoints that are whole or passed over, a log of how far the mixing moves, and a stop at anything that is
not a number.
"""

import math
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Self

import torch
from accelerate import Accelerator, PartialState
from datasets import Dataset
from peft import PeftModel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, ProgressCallback, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import SFTTrainer
from typing_extensions import TypedDict

from iha_io.checkpoint_io import check_finite, load_model
from iha_io.command_io import UserError, file_sha256, one_line, read_json, write_json
from modeling_iha.interleaving import Mixing
from modeling_iha.mixing import mixing_parameters
from sft.arguments import RunArguments
from sft.base_model import lora_config
from sft.data import IGNORED_LABEL
from sft.distributed import DistributedTrainer


# The file that says what a run is made of, in its directory and in each of its checkpoints.
RECORD = "run.json"
# The file of a Trainer checkpoint that holds the SHA-256 of all others.
CHECKSUMS = "checksums.json"
# The optimiser in a Trainer checkpoint of one process or DDP, of FSDP, whole or in shards, and of DeepSpeed.
OPTIMIZERS = {"optimizer.pt", "optimizer.bin", "optimizer_0", "latest"}
SAMPLE_TOKENS = 64


class NotFiniteError(UserError):
    """Name a loss or gradient that is not a number."""


# Checkpoints that a run can continue from


class State(TypedDict):
    """Hold what is read here of a Trainer's state."""

    global_step: int
    max_steps: int


def write_checksums(checkpoint: Path) -> None:
    """Write the SHA-256 of every file of a Trainer checkpoint beside them, which makes it complete."""
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file() and file != checkpoint / CHECKSUMS)
    sums = {file.relative_to(checkpoint).as_posix(): file_sha256(file) for file in files}
    write_json(checkpoint / CHECKSUMS, sums)


def file_fault(checkpoint: Path) -> str | None:
    """Return the first file of a Trainer checkpoint that is not what `write_checksums` found, and why, or None."""
    if not (checkpoint / CHECKSUMS).exists():
        return f"{CHECKSUMS} is missing, which is written last"
    try:
        for name, written in read_json(checkpoint / CHECKSUMS, dict[str, str]).items():
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if file_sha256(checkpoint / name) != written:
                return f"{name} is damaged: its SHA-256 is not that of what was written"
    except UserError as error:
        return f"{CHECKSUMS} is damaged: {error}"
    return None


def checkpoint_fault(checkpoint: Path) -> str | None:
    """Return why a run cannot continue from a Trainer checkpoint, or None when it can."""
    if fault := file_fault(checkpoint):
        return fault
    written = {name.partition("/")[0] for name in read_json(checkpoint / CHECKSUMS)}
    # Without its state Transformers would silently begin with a new optimiser.
    if not written & OPTIMIZERS:
        return "optimizer.pt is missing"
    try:
        step = read_json(checkpoint / TRAINER_STATE_NAME, State)["global_step"]
    except UserError as error:
        return str(error)
    return None if checkpoint.name == f"{PREFIX_CHECKPOINT_DIR}-{step}" else f"{TRAINER_STATE_NAME} is of step {step}"


def newest_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the last Trainer checkpoint in `output_dir` that this run can continue from, or None.

    Prints one line on each that it passes over.
    """
    numbered = ((path.name.rpartition("-")[2], path) for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    by_step = {int(number): path for number, path in numbered if number.isdigit()}
    state = PartialState()
    for step in sorted(by_step, reverse=True):
        fault = checkpoint_fault(by_step[step])
        if fault is None:
            return by_step[step]
        state.print(f"Passing over {by_step[step]}: {fault}.", flush=True)
    return None


def checkpoint_to_resume(args: TrainingArguments) -> Path | None:
    """Return the checkpoint that the recipe names, or else the newest complete one of `output_dir`, or None.

    Raise `UserError` for a named one that cannot be continued from.
    """
    if args.resume_from_checkpoint in (None, True):
        return newest_complete_checkpoint(args.output_dir)
    checkpoint = Path(args.resume_from_checkpoint)
    if fault := checkpoint_fault(checkpoint):
        raise UserError(
            f"resume_from_checkpoint: {checkpoint} cannot be continued from: {fault}. Without that key a run "
            "continues from the newest complete checkpoint of its output_dir."
        )
    return checkpoint


# The trainer


class RecipeTrainer(DistributedTrainer):
    """Give a trainer, as the first of its bases, what a recipe promises.

    Matrices decay. Vectors do not, nor the weights that mix heads, whose start from scratch is not zero.

    The log has beside TRL's figures `mixing_distance`, the mean distance of the values that mix heads from their start
    in this run, over their mean size there; `tokens_per_second` of training, for all processes; and `peak_memory_gib`
    of this process, on its GPU where it has one.

    Raise `NotFiniteError` at the first loss or gradient norm that is NaN or infinite, before the optimiser's step.
    Raise `UserError` before such weights are saved, and for a checkpoint that cannot be written.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.clock = TrainingClock()
        self.add_callback(self.clock)
        self._logged_tokens = self._logged_seconds = 0
        self._losses: torch.Tensor | int = 0  # of a step's micro-batches, summed
        self._start = [weight.detach().clone() for weight in mixing_parameters(self.model)]
        self._start_size = mixing_size(self.model)

    @classmethod
    def of_recipe(cls, run: RunArguments, args: TrainingArguments, model, tokenizer, rows, **others) -> Self:
        """Build the trainer of a recipe; `rows` are those to train on, and those to evaluate on or None."""
        return cls(
            model=model,
            args=args,
            train_dataset=rows[0],
            eval_dataset=rows[1],
            processing_class=tokenizer,
            peft_config=lora_config(run, model),
            **others,
        )

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        # Transformers goes by names, and would decay vectors such as those of differential attention's lambda.
        # ZeRO-3 leaves an empty vector of each parameter, beside its shape.
        shapes = {name: getattr(value, "ds_shape", value.shape) for name, value in model.named_parameters()}
        mixing = {id(value) for value in mixing_parameters(model)}
        spared = {name for name, value in model.named_parameters() if len(shapes[name]) < 2 or id(value) in mixing}
        return [name for name in super().get_decay_parameter_names(model) if name not in spared]

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *others):
        begun = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *others)
        # Where the last step lies inside an epoch, Transformers would go on with the epoch.
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else begun

    def get_eval_dataloader(self, *args, **kwargs) -> DataLoader:
        kept, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False  # no held-out row is left out
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.args.dataloader_drop_last = kept

    def train(self, *args, **kwargs):
        try:
            return super().train(*args, **kwargs)
        except UserError as error:
            if "in DataLoader worker" in str(error):  # PyTorch puts the traceback of its process into the message
                raise UserError(str(error).rpartition(f"{UserError.__name__}: ")[2].strip()) from error
            raise
        finally:
            # An open bar would take the line that says why a run has stopped.
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                    callback.training_bar.close()

    # What is not a number

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if model.training:
            # Looked at once a step, where the norm of the gradients waits for a GPU anyway.
            self._losses = self._losses + (result[0] if return_outputs else result).detach()
        return result

    def _get_grad_norm(self, model, grad_norm=None):
        # The last call before the optimiser's step that knows the norm.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        losses, self._losses = self._losses, 0
        self._refuse_not_finite("loss", losses)
        # In float16 a norm is infinite now and then: the scaler passes over such a step by itself.
        if self.accelerator.scaler is None and grad_norm is not None:
            self._refuse_not_finite("gradient norm", grad_norm)
        return grad_norm

    def _refuse_not_finite(self, what: str, value: torch.Tensor | float) -> None:
        if isinstance(value, torch.Tensor):
            value = (value.full_tensor() if isinstance(value, DTensor) else value).detach().item()
        if not math.isfinite(value):
            raise NotFiniteError(f"step {self.state.global_step + 1}: the {what} is {value:g}.")

    def check_weights(self) -> None:
        """Refuse a weight of the model that holds NaN or infinity."""
        local = (
            (name, value.to_local() if isinstance(value, DTensor) else value)
            for name, value in self.model.named_parameters()
        )
        check_finite(local, f"the model at step {self.state.global_step}")

    # Checkpoints

    def _save_checkpoint(self, model, trial) -> None:
        self.check_weights()
        checkpoint = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        kept, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            if self.args.should_save:
                # They make a checkpoint complete and are written last: those that a killed run left must not before.
                (checkpoint / CHECKSUMS).unlink(missing_ok=True)
                checkpoint.mkdir(exist_ok=True)  # in a directory that is still there
                shutil.copy(checkpoint.with_name(RECORD), checkpoint)
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # each process writes its random state, and its share of a model
            if self.args.should_save:
                write_checksums(checkpoint)
                # Not by the Trainer: it would remove the last complete checkpoint before this one is.
                rotate_checkpoints(self.args.output_dir, kept, self.state.best_model_checkpoint)
        except Exception as error:  # safetensors, tokenizers and PyTorch wrap the system's in types of their own
            shutil.rmtree(checkpoint, ignore_errors=True)
            raise UserError(
                f"{checkpoint} cannot be written: {one_line(error)[:200]}. Make room, or leave output_dir where it "
                "is, and give the same command again: it continues from the checkpoint before."
            ) from error
        finally:
            self.args.save_total_limit = kept

    def _load_weights(self, checkpoint: str) -> bool:
        """Load a whole model's weights, and return False for what FSDP, DeepSpeed or PEFT loads in its own way."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or isinstance(self.model, PeftModel):
            return False
        # The Trainer takes the names in the files for the model's, and would leave experts as they were.
        self.model.load_state_dict(load_model(checkpoint, self.model.dtype).state_dict())
        return True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if not self._load_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if fault := file_fault(best := Path(self.state.best_model_checkpoint)):
            raise UserError(
                f"load_best_model_at_end: {best} cannot be loaded: {fault}. Remove it and the checkpoints after it, "
                "and give the same command again: it trains them anew."
            )
        if not self._load_weights(str(best)):
            super()._load_best_model()

    def create_model_card(self, *_, **__) -> None:
        """Write nothing: TRL's card knows neither the data nor the base model, and final/ has the run's own."""

    # What is logged

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "learning_rate" in logs:
            if self._start:
                logs["mixing_distance"] = self._mixing_distance()
            tokens, seconds = self._tokens_of_this_call(), self.clock.seconds
            logs["tokens_per_second"] = (tokens - self._logged_tokens) / (seconds - self._logged_seconds)
            self._logged_tokens, self._logged_seconds = tokens, seconds
            logs["peak_memory_gib"] = peak_memory() / 2**30
        super().log(logs, start_time)

    def _tokens_of_this_call(self) -> int:
        # GRPO counts the tokens of prompts and answers in the state, which a resumed run takes over; SFT and DPO count
        # the tokens of their batches since the call began.
        in_state = self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
        return max(self._total_train_tokens, in_state)

    @torch.no_grad()
    def _mixing_distance(self) -> float:
        moved, scale = 0.0, getattr(self.model.config, "mixing_scale", 1)
        for start, weight in zip(self._start, mixing_parameters(self.model), strict=True):
            now = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if not self.is_world_process_zero():
                continue  # under FSDP only the main process may have loaded the weights of the start
            moved += scale * (now.float() - start.to(now.device).float()).abs().sum().item()
        return moved / self._start_size if self._start_size else math.inf


class MixingTrainer(RecipeTrainer, SFTTrainer):
    """Train by supervised fine-tuning."""


@torch.no_grad()
def mixing_size(model: torch.nn.Module) -> float:
    """Return the sum of the absolute values that mix heads, of those that train."""
    return sum(
        module.value(name).float().abs().sum().item()
        for module in model.modules()
        if isinstance(module, Mixing)
        for name, weight in module.named_parameters(recurse=False)
        if weight.requires_grad and weight.numel()  # ZeRO-3 leaves nothing of it
    )


def peak_memory() -> int:
    """Return the most bytes that tensors took on this process's GPU, or else that the process took in RAM."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # macOS counts bytes, Linux KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# What a person sees of a run


class TrainingClock(TrainerCallback):
    """Count the seconds of training, with data loading, without evaluation and saving."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def on_step_begin(self, *_, **__) -> None:
        self._since = self._since or time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        now = time.perf_counter()
        self.seconds += now - self._since
        self._since = now

    def _pause(self, *_, **__) -> None:
        self._since = None

    on_evaluate = on_save = _pause


class SampleReplies(TrainerCallback):
    """Print, at each evaluation, the model's greedy replies to the first `count` prompts of the held-out rows.

    A prompt is what comes before the first label of a row of `sft.data.tokenize`; a row that is all labels has none.
    Every process generates, because a sharded model answers only when all take part; the main one prints.
    """

    def __init__(
        self, rows: Dataset, count: int, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator
    ) -> None:
        self.tokenizer, self.accelerator = tokenizer, accelerator
        prompts = (_prompt(row) for row in rows.select(range(min(count, len(rows)))))
        self.prompts = [prompt for prompt in prompts if prompt]

    @torch.no_grad()
    def on_evaluate(self, args, state, control, model=None, **_) -> None:
        for prompt in self.prompts:
            with self.accelerator.autocast():
                output = model.generate(
                    input_ids=torch.tensor([prompt], device=model.device),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
                    max_new_tokens=SAMPLE_TOKENS,
                    do_sample=False,
                    pad_token_id=self.tokenizer.pad_token_id,
                )
            if state.is_world_process_zero:
                asked, reply = (self.tokenizer.decode(ids) for ids in (prompt, output[0, len(prompt) :]))
                tqdm.write(f"Step {state.global_step}, sample: {asked!r} -> {reply!r}")


def _prompt(row: dict) -> list[int]:
    learned = (index for index, label in enumerate(row["labels"]) if label != IGNORED_LABEL)
    return row["input_ids"][: next(learned, 0)]
