"""Hold what the converters share: the checks of a source, how a model is built, and how a checkpoint is written."""

import copy
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import load_state_dict

from iha.cards import markdown, render_card, source_license, source_name
from iha.checkpoints import (
    check_filled,
    check_no_adapter,
    lacks_tokenizer,
    load_config,
    load_model,
    load_tokenizer,
    weight_files,
)
from iha.errors import UserError, one_line
from iha.files import expanded, new_directory, typed
from iha.sources import find_source
from modeling_iha import IHAConfig


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Config fields that have the same name and meaning in IHA and in all architectures that are converted by them.
SHARED_FIELDS = (
    *SIZES,
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
)
# Fields that no forward pass reads: those of Transformers' base class, and others that published checkpoints have.
HARMLESS_FIELDS = {
    *PreTrainedConfig().to_dict(),
    "base_name_or_path",
    "head_dim",
    "is_llama_config",
    "model_max_length",
    "passes_cu_seq_lens",
    "passes_windows",
    "pretraining_tp",
    "transformers.js_config",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
}
# Attention cores count tokens in 32 bits.
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Config = TypeVar("Config", bound=PreTrainedConfig)
Model = TypeVar("Model", bound=PreTrainedModel)


def check_fields(config: PreTrainedConfig, fields: Iterable[str]) -> None:
    """Reject a source config that sets a field which is neither shared nor one of its architecture's `fields`.

    Such a field could change what the model computes. Raise a `UserError` that names it.
    """
    typed({name: getattr(config, name) for name in SIZES}, dict[str, Size], "The source config")
    check_known(config.to_dict(), {*SHARED_FIELDS, *fields, *HARMLESS_FIELDS})


def check_known(entries: dict, known: set[str]) -> None:
    """Raise a `UserError` that names the first field of a source config that is set and not `known`."""
    if entries.get("quantization_config"):
        raise UserError("The weights of the source are quantized: convert the checkpoint from which they were made.")
    for field, value in entries.items():
        # An extension that is switched off changes nothing, but is_causal=False takes the causal mask away.
        if field not in known and not field.startswith("_") and (value or (field, value) == ("is_causal", False)):
            advice = "If it does not change the model's output, remove it from config.json"
            raise UserError(f"The source config sets {field}={value!r}, which no conversion here knows. {advice}.")


def check_iha(source: str | os.PathLike, config: PreTrainedConfig) -> None:
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
    src: str | os.PathLike, check: Callable[[PreTrainedConfig], object], dtype: str = "auto"
) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """Return the model, of the class that its config names, and the tokenizer of the checkpoint `src`, if it has one.

    Loading takes long, so `check` first rejects what the config alone shows. Raise `UserError`.
    """
    src = find_source(src)
    check_no_adapter(src)
    config = load_config(src)
    check(config)
    source = load_model(src, dtype, config)
    if dtype == "auto":
        note_rounding(src, source.dtype)
    tokenizer = read_tokenizer(src, source.config.vocab_size)
    print(f"Converting {source.config.model_type}, {source.num_parameters():,} parameters, {source.dtype}", flush=True)
    return source, tokenizer


def note_rounding(source: str | os.PathLike, dtype: torch.dtype) -> None:
    """Print on stderr which weights of `source` were rounded, because it was loaded in `dtype`.

    A config may name another dtype than the files have, and a load takes the config's.
    """
    if find_source(source).gguf_file is not None:
        return
    rounded = [
        f"{name} first, in {tensor.dtype}"
        for file in weight_files(source)
        for name, tensor in load_state_dict(file, map_location="meta").items()
        if _is_rounded(tensor.dtype, dtype)
    ]
    if rounded:
        print(
            f"{dtype}, in which its config has them loaded, rounds {len(rounded)} tensors of {source} ({rounded[0]}): "
            "set dtype in its config.json, or --dtype where a command has it, to keep them.",
            file=sys.stderr,
        )


def _is_rounded(stored: torch.dtype, loaded: torch.dtype) -> bool:
    """Return whether the dtype `loaded` rounds floating-point weights of the dtype `stored`."""
    if not stored.is_floating_point:
        return False
    has_more_digits = torch.finfo(stored).eps < torch.finfo(loaded).eps
    has_larger_range = torch.finfo(stored).max > torch.finfo(loaded).max
    # float16 and bfloat16 round each other: one has more digits, the other the larger range.
    return has_more_digits or has_larger_range


def read_tokenizer(src: str | os.PathLike, vocab_size: int) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a source, or `None`, with a warning, for a directory without one. Raise `UserError`."""
    if lacks_tokenizer(src):
        print(f"{src} holds no tokenizer, so the converted checkpoint has none: add one to use it.", file=sys.stderr)
        return None
    return load_tokenizer(src, vocab_size)


def describe(src: str | os.PathLike, model_type: str, how: str = "", exact_length: int | None = None) -> str:
    """Return the section of a card that says what was converted and up to which length, in tokens, it is exact."""
    lengths = f"at most {exact_length} tokens; longer ones differ" if exact_length else "any length"
    return (
        f"## Conversion\n\nConverted from {markdown(source_name(str(src)))} ({model_type}){how}. Before any further "
        f"training the model computes what its source does, up to rounding, for sequences of {lengths}."
    )


def write_checkpoint(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    make: Callable[[], tuple[Any, PreTrainedTokenizerBase | None, str | None]],
) -> None:
    """Write what `make` reads from `src` and converts into the new directory `dst`.

    `make` returns the model, the tokenizer or `None`, and the section of the model card on the conversion. A stock
    model has `None` in its place and gets no card. Raise `UserError`.
    """
    with new_directory(dst) as directory:
        print(f"1 of 2: reading {src}", flush=True)
        model, tokenizer, section = make()
        print(f"2 of 2: writing {type(model).__name__}", flush=True)
        model.save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        if section is not None:
            place = expanded(src)
            is_local = place.exists()
            base_model = None if is_local else str(src)
            license: dict[str, Any] = source_license(str(place if is_local else src))
            card = render_card(model.config, Path(dst).name, base_model=base_model, details=section, **license)
            (directory / "README.md").write_text(card, encoding="utf-8")
    print(f"Wrote {dst}, {model.num_parameters():,} parameters.")
    if section is not None:
        print(section.splitlines()[-1])
