"""Train with TRL's SFTTrainer.

Incomplete checkpoints are skipped. A loss, a gradient or a weight that is NaN or infinite stops the run.
"""

import copy
import math
import resource
import shutil
import sys
import time
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from datasets import IterableDataset
from jinja2 import TemplateError
from peft import PeftModel
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import SFTTrainer

from iha.checkpoints import check_finite
from iha.errors import UserError, refusing
from iha.files import whole_file
from modeling_iha.mixing_weights import trained_mixing
from sft.distributed import whole_model
from sft.training_rows import bytes_of_token, check_cut, check_learned, first_tokens, splits


# The file that records what a run is made of. A copy is written last into a checkpoint, and marks it as complete.
RECORD = "run.json"


class NotFiniteError(UserError):
    """Report a loss or gradient that is NaN or infinite."""


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint by the name of its directory, or 0 if this has none."""
    step = checkpoint.name.rpartition("-")[2]
    return int(step) if step.isdigit() else 0


def checkpoints_after(step: int, output_dir: str | Path) -> list[Path]:
    """Return the checkpoints in `output_dir` of later steps than `step`, incomplete ones included."""
    return [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(path) > step]


def newest_whole_checkpoint(output_dir: str | Path) -> Path | None:
    """Return the last checkpoint in `output_dir` that is complete, or None. Print those that are skipped."""
    for path in sorted(checkpoints_after(0, output_dir), key=step_of, reverse=True):
        if (path / RECORD).exists():
            return path
        PartialState().print(f"Passing over {path}: {RECORD} is missing, which is written last.", flush=True)
    return None


def check_weights(model: torch.nn.Module, step: int) -> None:
    """Raise `UserError` if a weight of the model holds NaN or infinity."""
    local = (
        (name, value.to_local() if isinstance(value, DTensor) else value) for name, value in model.named_parameters()
    )
    check_finite(local, f"the model at step {step}")


def find_best_checkpoint(args: TrainingArguments, state: TrainerState) -> None:
    """Find the best checkpoint of a resumed run, whose path is not there any more if its directory was moved.

    Raise `UserError` if it is lost: the run would silently end with the last weights in its place.
    """
    if not (args.load_best_model_at_end and state.best_global_step) or state.best_model_checkpoint is not None:
        return
    best = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if not best.is_dir():
        raise UserError(f"load_best_model_at_end: {best}, the best checkpoint so far, is lost: put it back.")
    state.best_model_checkpoint = str(best)


class WholeCheckpoints(TrainerCallback):
    """Mark a checkpoint as complete once it is, and only then remove older ones. Check the one to resume from.

    Raise `UserError` for a checkpoint of another kind of launch and for a lost best checkpoint.
    """

    def __init__(self, accelerator: Accelerator, limit: int | None) -> None:
        self.accelerator = accelerator
        self.limit = limit

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        # A checkpoint holds the steps of logs, saves and evaluations. Those of this run count.
        state.compute_steps(args, state.max_steps)
        find_best_checkpoint(args, state)
        if isinstance(lr_scheduler, ReduceLROnPlateau):
            return  # It counts evaluations, and there may have been none.
        # Transformers silently ignores the files of a launch that shards in another way.
        if state.global_step and lr_scheduler.last_epoch == 0:
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

    def on_train_end(self, args, state, control, **kwargs):
        best = state.best_model_checkpoint
        if args.should_save and self.limit == 1 and best is not None:
            # The last checkpoint was there to resume from. Trainer removes it too, but does not know the limit.
            for path in checkpoints_after(0, args.output_dir):
                if not path.samefile(best):
                    shutil.rmtree(path)


class StopAtNaN(TrainerCallback):
    """Raise `NotFiniteError` before the optimizer's step if a loss or gradient is NaN or infinite.

    Attributes:
        loss: the sum of the step's micro-batches. It is checked once a step, when the device is waited for anyway.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.loss: torch.Tensor | float = 0.0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        loss, self.loss = self.loss, 0.0
        self.check(state, "loss", loss)
        # In float16 a norm is sometimes infinite, and the scaler skips such a step by itself.
        if self.accelerator.scaler is None:
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            self.check(state, "gradient norm", torch.nn.utils.get_total_norm(gradients))

    def check(self, state: TrainerState, what: str, value: torch.Tensor | float) -> None:
        value = float(value.full_tensor() if isinstance(value, DTensor) else value)
        if not math.isfinite(value):
            raise NotFiniteError(f"step {state.global_step + 1}: the {what} is {value:g}.")


def peak_memory(device: torch.device) -> int:
    """Return the most bytes so far of the tensors on a GPU, or elsewhere of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class CountTokens(TrainerCallback):
    """Log `tokens_per_second` since the last log, and continue the count of a resumed run, which TRL starts anew.

    Log `minutes_left` too, by the steps since the last log and without evaluations.

    If `peak_tokens_per_second`, the rate of all devices at their peak, is given, log `model_flops_utilization` too.
    `peak_memory_gb` is the most memory so far (`peak_memory`).
    """

    peak_tokens_per_second: float | None = None
    time = 0.0  # of the last log; an evaluation may come before training

    def on_train_begin(self, args, state, control, **kwargs):
        counts = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
        self.before = counts[-1] if counts else 0
        self.last = self.before
        self.step = state.global_step
        self.time = time.monotonic()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.time += metrics["eval_runtime"]

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "num_tokens" not in logs:
            return
        logs["num_tokens"] += self.before
        now = time.monotonic()
        rate = (logs["num_tokens"] - self.last) / (now - self.time)
        logs["tokens_per_second"] = rate
        steps = state.global_step - self.step
        if steps > 0:
            logs["minutes_left"] = round((now - self.time) / steps * (state.max_steps - state.global_step) / 60, 1)
        if self.peak_tokens_per_second is not None:
            logs["model_flops_utilization"] = rate / self.peak_tokens_per_second
        logs["peak_memory_gb"] = peak_memory(args.device) / 1e9
        self.last = logs["num_tokens"]
        self.step = state.global_step
        self.time = now
        state.log_history[-1].update(logs)


class SFTRecipeTrainer(SFTTrainer):
    """Train by supervised fine-tuning, and keep what a recipe promises.

    Matrices decay. Vectors do not decay, nor do the weights that mix heads, because their start from scratch is not
    zero. Raise `NotFiniteError` as `StopAtNaN` does, and `UserError` before a weight that is NaN or infinite is saved.

    Each override of a private method says why nothing public does the same.
    """

    eval_bytes: int | None = None  # the length of the text to evaluate on
    eval_sums: torch.Tensor | int = 0  # over the batches of an evaluation: the loss of all tokens, and their number

    def __init__(self, *args, **kwargs) -> None:
        with refusing("the recipe", ValueError):  # a special token that the tokenizer lacks, keys that exclude others
            super().__init__(*args, **kwargs)
        self.args.logging_nan_inf_filter = False  # the mean of an evaluation would leave out what is NaN
        self.finite = StopAtNaN(self.accelerator)
        self.add_callback(self.finite)
        self.add_callback(WholeCheckpoints(self.accelerator, self.args.save_total_limit))
        self.args.save_total_limit = None  # Trainer would remove a checkpoint before the next one is whole
        # It must be the first callback, so that the others print and report what it adds.
        self.count_tokens = CountTokens()
        self.callback_handler.callbacks.insert(0, self.count_tokens)

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        # Transformers chooses by names, and would decay vectors such as those of differential attention's lambda.
        of_mixing = {id(value) for value in trained_mixing(model)}
        vectors = {name for name, value in model.named_parameters() if value.dim() < 2}
        mixing = {name for name, value in model.named_parameters() if id(value) in of_mixing}
        return [name for name in super().get_decay_parameter_names(model) if name not in vectors | mixing]

    def create_model_card(self, *_, **__) -> None:
        """Write nothing: TRL's card knows neither the data nor the base model, and final/ has a card of the run."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if model.training:
            self.finite.loss = self.finite.loss + (result[0] if return_outputs else result).detach()
        return result

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Trainer begins a checkpoint by this call. One that it saves over is incomplete until it is marked again.
        check_weights(self.model, self.state.global_step)
        directory = output_dir or self.args.output_dir
        if self.args.should_save:
            Path(directory, RECORD).unlink(missing_ok=True)
        model = whole_model(self)
        if self.args.should_save:
            # Trainer resumes by the names of the model, and would silently leave out weights under other names.
            names = {} if isinstance(model, PeftModel) else {"save_original_format": False}
            model.save_pretrained(directory, **names)
            self.processing_class.save_pretrained(directory)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *others):
        begun = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *others)
        # Trainer asks whether to stop only after a step, callbacks or not, and a run that ended inside an epoch would
        # take one more.
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else begun

    # Rows, and the evaluation of plain text

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        # TRL cuts and drops rows silently, and takes tokenized rows as they are. So it prepares them in two steps, and
        # `check_cut` counts whole rows between the two. TRL has no public function that tokenizes rows.
        whole = copy.copy(args)
        whole.max_length = None
        whole.shuffle_dataset = False
        with refusing("a row: the chat template does not take it", TemplateError):
            dataset = super()._prepare_dataset(dataset, processing_class, whole, False, formatting_func, dataset_name)
        cut_to = None if splits(args, packing) else args.max_length
        if isinstance(dataset, IterableDataset):
            dataset = check_learned(dataset, cut_to)
        with args.main_process_first():  # the other processes find its count in the cache
            check_cut(dataset_name, dataset, cut_to, args.dataset_num_proc)
        return super()._prepare_dataset(dataset, processing_class, args, packing, None, dataset_name)

    @cached_property
    def eval_predicted(self) -> tuple[int, int]:
        """Count the tokens of the evaluation rows that are predicted, and their bytes.

        The first token of each packed document, and of each piece of a long one, is not predicted.
        """
        first = first_tokens(self.eval_dataset)
        unpredicted = sum(bytes_of_token(self.processing_class, token) for token in first)
        return sum(map(len, self.eval_dataset["labels"])) - len(first), self.eval_bytes - unpredicted

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        self.eval_sums = 0
        return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Log, with the loss of an evaluation, that of plain text in bits per byte, which tokenizers do not change."""
        if self.eval_bytes and "eval_loss" in logs:
            # `eval_loss` is a mean over rows of the means over the tokens of their batches.
            loss, tokens = self.accelerator.reduce(self.eval_sums).tolist()
            predicted_tokens, predicted_bytes = self.eval_predicted
            bits = loss / tokens * predicted_tokens / predicted_bytes / math.log(2)
            logs["eval_bits_per_byte"] = bits
            self.accelerator.print(f"Held-out text: {bits:.4f} bits per byte.")
        super().log(logs, *args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, *others = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self.eval_bytes and loss is not None:
            tokens = (inputs["labels"][..., 1:] != -100).sum().to(loss.device)
            self.eval_sums = self.eval_sums + torch.stack((loss.double() * tokens, tokens.double()))
        return loss, *others
