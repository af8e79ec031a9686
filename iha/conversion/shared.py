"""Hold what the converters share: how a source is read, how a model is built, and how a checkpoint is written."""

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from iha.card_template import render_card
from iha.cards import markdown, name_of_place, origin_of, source_name
from iha.checkpoints import check_filled, load_model, note_rounding, tokenizer_if_any
from iha.errors import UserError, one_line
from iha.files import new_directory
from iha.sources import Source
from modeling_iha import IHAConfig


Config = TypeVar("Config", bound=PreTrainedConfig)
Model = TypeVar("Model", bound=PreTrainedModel)


def check_iha(source: Source, config: PreTrainedConfig) -> None:
    """Raise `UserError` unless `config`, that of the checkpoint `source`, belongs to an unquantized IHA model."""
    if (model_type := config.to_dict()["model_type"]) != "iha":  # with interleaved heads the object has the base's
        raise UserError(f"{source} is a checkpoint of type {model_type!r}; expected 'iha'.")
    if getattr(config, "quantization_config", None):
        raise UserError(f"The weights of {source} are quantized: take the checkpoint from which they were made.")


def new_config(config_class: type[Config], **fields) -> Config:
    """Return `config_class(**fields)`, or raise `UserError` if the class rejects the fields."""
    try:
        return config_class(**fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UserError(f"No {config_class.__name__} can be built: {one_line(error.__cause__ or error)}") from error


def preset_config(name: str, **fields) -> IHAConfig:
    """Return a preset with `fields` replaced, or raise `UserError` if there is none or they do not fit."""
    try:
        return IHAConfig.from_preset(name, **fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UserError(one_line(error.__cause__ or error)) from error


def build(
    model_class: type[Model],
    config: PreTrainedConfig,
    state: dict[str, torch.Tensor],
    dtype: torch.dtype,
    generation_config: GenerationConfig | None,
) -> Model:
    """Build a model that uses the tensors of `state` without a copy, with the generation config of its source, if any.

    Raise a `UserError` that names a tensor if `state` does not fit `config`.
    """
    loaded: Any = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    model, info = loaded
    check_filled(info, "The source")
    # Otherwise adapters would record the base model "None".
    model.name_or_path = ""
    model.config._name_or_path = ""
    if generation_config is not None:
        model.generation_config = copy.deepcopy(generation_config)
    return model


def read_source(source: Source, config: PreTrainedConfig, dtype: str) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Return the model of a checkpoint, of the class that its `config` names, and its tokenizer if it has one.

    Raise `UserError`.
    """
    model = load_model(source, dtype, config)
    if dtype == "auto":
        note_rounding(source, model.dtype)
    tokenizer = tokenizer_if_any(source, model.config.vocab_size)
    print(f"Converting {model.config.model_type}, {model.num_parameters():,} parameters, {model.dtype}", flush=True)
    return model, tokenizer


@dataclass(frozen=True)
class Converted:
    """Hold what a converter has made.

    Attributes:
        model: the converted model.
        tokenizer: that of the source, if it has one.
        how: what the source was and what became of it, in a sentence for people. A stock model has `None`, and gets
            no card.
        source: the checkpoint that was converted.
        exact_length: the longest sequence, in tokens, for which the conversion is exact, or `None` for any length.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase | None
    source: Source
    how: str | None = None
    exact_length: int | None = None

    @property
    def text(self) -> str:
        """Return what the model is, for people."""
        lengths = f"at most {self.exact_length} tokens; longer ones differ" if self.exact_length else "any length"
        return (
            f"Converted from {source_name(self.source.name)} {self.how}. Before any further training the model "
            f"computes what its source does, up to rounding, for sequences of {lengths}."
        )

    def write(self, destination: str) -> None:
        """Write the checkpoint into a new directory, with a card unless it is a stock one."""
        print(f"2 of 2: writing {type(self.model).__name__}", flush=True)
        with new_directory(destination) as directory:
            self.model.save_pretrained(directory)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(directory)
            if self.how is not None:
                (directory / "README.md").write_text(self.card(destination), encoding="utf-8")
        print(f"Wrote {destination}, {self.model.num_parameters():,} parameters.")
        if self.how is not None:
            print(self.text)

    def card(self, destination: str) -> str:
        """Return the model card, whose examples load `destination`."""
        origin = origin_of(str(self.source.path or self.source))
        return render_card(
            self.model.config,
            name_of_place(destination),
            from_scratch=origin.from_scratch,
            details=f"## Conversion\n\n{markdown(self.text)}",
            **origin.metadata,
        )
