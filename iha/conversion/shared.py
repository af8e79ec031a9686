"""Hold what the converters share: how a source is read, how a model is built, and how a checkpoint is written."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from iha.cards import markdown, render_card, source_license, source_name
from iha.checkpoints import check_filled, load_config, load_model, note_rounding, read_tokenizer
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


def read_source(
    source: Source, check: Callable[[PreTrainedConfig], object], dtype: str
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Return the model, of the class that its config names, and the tokenizer of a checkpoint, if it has one.

    Loading takes long, so `check` first rejects what the config alone shows. Raise `UserError`.
    """
    config = load_config(source)
    check(config)
    model = load_model(source, dtype, config)
    if dtype == "auto":
        note_rounding(source, model.dtype)
    tokenizer = read_tokenizer(source, model.config.vocab_size)
    print(f"Converting {model.config.model_type}, {model.num_parameters():,} parameters, {model.dtype}", flush=True)
    return model, tokenizer


class Converted(NamedTuple):
    """Hold what a converter has made.

    Attributes:
        model: the converted model.
        tokenizer: that of the source, if it has one.
        how: the source's type and what became of it, for the model card. A stock model has `None`, and gets no card.
        exact_length: the longest sequence, in tokens, for which the conversion is exact, or `None` for any length.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase | None
    how: str | None = None
    exact_length: int | None = None


def write_checkpoint(source: Source, destination: str, make: Callable[[], Converted]) -> None:
    """Write what `make` reads from `source` and converts into the new directory `destination`. Raise `UserError`."""
    with new_directory(destination) as directory:
        print(f"1 of 2: reading {source}", flush=True)
        model, tokenizer, how, exact_length = make()
        print(f"2 of 2: writing {type(model).__name__}", flush=True)
        model.save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        lengths = f"at most {exact_length} tokens; longer ones differ" if exact_length else "any length"
        section = (
            f"## Conversion\n\nConverted from {markdown(source_name(source.name))} {how}. Before any further training "
            f"the model computes what its source does, up to rounding, for sequences of {lengths}."
        )
        if how is not None:
            base_model = source.name if source.path is None else None
            license: dict[str, Any] = source_license(str(source.path or source))
            name = Path(destination).name
            card = render_card(model.config, name, base_model=base_model, details=section, **license)
            (directory / "README.md").write_text(card, encoding="utf-8")
    print(f"Wrote {destination}, {model.num_parameters():,} parameters.")
    if how is not None:
        print(section.splitlines()[-1])
