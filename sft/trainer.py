"""Train with TRL's SFTTrainer.

Incomplete checkpoints are skipped. A loss, a gradient or a weight that is NaN or infinite stops the run.
"""

import copy
import math
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerState
from trl import SFTTrainer

from iha.checkpoints import positions_of
from iha.errors import UserError, refusing
from modeling_iha.mixing_weights import trained_mixing
from sft.bits_per_byte import BitsPerByte
from sft.checkpoints import RECORD, WholeCheckpoints
from sft.distributed import whole_model
from sft.log_figures import CountTokens, LogMixing, mixes_heads
from sft.row_sources import splits_long_rows


class NotFiniteError(UserError):
    """Report a loss or gradient that is NaN or infinite."""


class StopAtNaN(TrainerCallback):
    """Raise `NotFiniteError` before the optimizer's step if a loss or gradient is NaN or infinite.

    Attributes:
        loss: the sum of the step's micro-batches. It is checked once a step, when the device is waited for anyway.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.loss: torch.Tensor | float = 0.0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.check(state, "loss", self.loss)
        self.loss = 0.0
        # In float16 a norm is sometimes infinite, and the scaler skips such a step by itself.
        if self.accelerator.scaler is None:
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            self.check(state, "gradient norm", torch.nn.utils.get_total_norm(gradients))

    def check(self, state: TrainerState, what: str, value: torch.Tensor | float) -> None:
        value = float(value.full_tensor() if isinstance(value, DTensor) else value)
        if not math.isfinite(value):
            raise NotFiniteError(f"step {state.global_step + 1}: the {what} is {value:g}.")


class SFTRecipeTrainer(SFTTrainer):
    """Train by supervised fine-tuning, and keep what a recipe promises.

    Matrices decay. Vectors do not decay, nor do the weights that mix heads, because their start from scratch is not
    zero. Raise `NotFiniteError` as `StopAtNaN` does, and `UserError` before a weight that is NaN or infinite is saved.

    Two private methods are overridden, and each says why nothing public does the same.
    """

    def __init__(self, *args, **kwargs) -> None:
        texts = _texts_of(kwargs.get("eval_dataset"))
        with refusing("the recipe", ValueError):  # a special token that the tokenizer lacks, keys that exclude others
            super().__init__(*args, **kwargs)
        check_length(self)
        self.bits_per_byte = None
        if texts and self._takes_bits_per_byte():
            self.bits_per_byte = BitsPerByte(self.eval_dataset, texts, self.processing_class)
        self.args.logging_nan_inf_filter = False  # the mean of an evaluation would leave out what is NaN
        self.finite = StopAtNaN(self.accelerator)
        self.add_callback(self.finite)
        self.add_callback(WholeCheckpoints(self.accelerator, self.args.save_total_limit))
        self.args.save_total_limit = None  # Trainer would remove a checkpoint before the next one is whole
        # These must be the first callbacks, so that the others print and report what they add.
        self.count_tokens = CountTokens()
        self.callback_handler.callbacks.insert(0, self.count_tokens)
        if mixes_heads(self.model):
            self.callback_handler.callbacks.insert(0, LogMixing())

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        # Transformers chooses by names, and would decay vectors such as those of differential attention's lambda.
        of_mixing = {id(value) for value in trained_mixing(model)}
        matrices = {name for name, value in model.named_parameters() if value.dim() > 1 and id(value) not in of_mixing}
        return [name for name in super().get_decay_parameter_names(model) if name in matrices]

    def create_model_card(self, *_, **__) -> None:
        """Write nothing: TRL's card knows neither the data nor the base model, and final/ has a card of the run."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if model.training:
            self.finite.loss = self.finite.loss + (result[0] if return_outputs else result).detach()
        return result

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        directory = output_dir or self.args.output_dir
        model = whole_model(self)
        if self.args.should_save:
            # Trainer begins a checkpoint by this call. One that it saves over is incomplete until it is marked again.
            Path(directory, RECORD).unlink(missing_ok=True)
            # Trainer resumes by the names of the model, and would silently leave out weights under other names.
            names = {} if isinstance(model, PeftModel) else {"save_original_format": False}
            model.save_pretrained(directory, **names)
            self.processing_class.save_pretrained(directory)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *others):
        begun = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *others)
        # Trainer asks only after a step whether to stop. A run that resumes at its last step would take one more, so
        # it begins behind its last epoch.
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else begun

    # Rows

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        # TRL cuts and drops rows silently. So it prepares them in two steps, and `check_cut` counts whole rows between
        # the two: first it only tokenizes. Rows that have `input_ids` it then only cuts and packs.
        cut_to = None if splits_long_rows(args, packing) else args.max_length
        whole = copy.copy(args)
        whole.dataset_text_field = "text"  # the column of the rows that `load_rows` returns
        whole.max_length = None
        whole.shuffle_dataset = False
        with refusing("a row: the chat template does not take it", TemplateError):
            tokenized = super()._prepare_dataset(
                dataset, processing_class, whole, False, formatting_func, dataset_name
            )
        if isinstance(tokenized, IterableDataset):
            tokenized = check_learned(tokenized, cut_to)
        elif cut_to is not None:
            with args.main_process_first():  # the other processes find its count in the cache
                check_cut(dataset_name, tokenized, cut_to, args.dataset_num_proc)
        return super()._prepare_dataset(tokenized, processing_class, args, packing, None, dataset_name)

    # The evaluation of plain text

    def _takes_bits_per_byte(self) -> bool:
        """Return whether texts are evaluated whole, by the plain loss of their tokens."""
        packs = self.args.packing if self.args.eval_packing is None else self.args.eval_packing
        is_whole = splits_long_rows(self.args, packs) or self.args.max_length is None
        is_plain = self.args.loss_type == "nll" and self.args.label_smoothing_factor == 0 and not self.aux_loss_enabled
        return is_whole and is_plain

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, *others = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self.bits_per_byte is not None:
            self.bits_per_byte.add(loss, inputs["labels"])
        return loss, *others

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if self.bits_per_byte is not None and "eval_loss" in logs:
            logs["eval_bits_per_byte"] = self.bits_per_byte.result(self.accelerator)
        super().log(logs, *args, **kwargs)


def _texts_of(rows: Dataset | None) -> list[str]:
    """Return the texts of rows of plain text, or none."""
    return rows["text"][:] if isinstance(rows, Dataset) and "text" in rows.column_names else []


# Tokenized rows


def check_cut(name: str, rows: Dataset, max_length: int, num_proc: int | None) -> None:
    """Print how much TRL cuts from tokenized rows. `name` is TRL's name of the dataset: "train" or "eval".

    The rows of a stream cannot be counted: see `check_learned`. Raise `UserError` for rows with nothing to learn
    within `max_length`: TRL drops them silently, and packed they learn nothing.
    """

    def count(row: dict) -> dict:
        return {"tokens": len(row["labels"]), "is_empty": (row["labels"][:max_length] == -100).all()}

    what = "rows to evaluate on" if name == "eval" else "rows"
    arrays = rows.select_columns("labels").with_format("numpy")
    counted = arrays.map(count, remove_columns="labels", num_proc=num_proc, desc="Counting tokens")
    empty = sum(counted["is_empty"])
    if empty:
        raise UserError(
            f"{empty} of {len(rows)} {what} have no token to learn within max_length={max_length}: raise "
            "max_length, or remove the rows."
        )
    lengths = np.array(counted["tokens"])
    is_cut = lengths > max_length
    if is_cut.any():
        lost = 1 - np.minimum(lengths, max_length).sum() / lengths.sum()
        PartialState().print(
            f"Note: {is_cut.sum():,} of {len(rows):,} {what} are cut to max_length={max_length}, which leaves out "
            f"{lost:.1%} of their tokens."
        )


def check_learned(rows: IterableDataset, max_length: int | None) -> IterableDataset:
    """Return a stream that raises `UserError` at a row without a token to learn within `max_length`."""

    def check(row: dict) -> dict:
        if all(label == -100 for label in row["labels"][:max_length]):
            raise UserError(
                f"a row of the stream has no token to learn within max_length={max_length}: raise max_length, or "
                "remove such rows."
            )
        return row

    return rows.map(check)


def check_length(trainer: SFTTrainer) -> None:
    """Reject rows that are longer than the model's context, where `max_length` cuts none. Raise `UserError`.

    The rows of a stream are not looked at.
    """
    positions = positions_of(trainer.model.config)
    if trainer.args.max_length is not None or positions is None:
        return
    for rows in (trainer.train_dataset, trainer.eval_dataset):
        if rows is None or isinstance(rows, IterableDataset):
            continue
        longest = max(map(len, rows["input_ids"]))
        if longest > positions:
            raise UserError(
                f"a row has {longest} tokens, and the model {positions} positions: set max_length, or "
                "max_position_embeddings with a rope_theta for that length."
            )
