"""Find the configuration of the model that `iha cost` counts, with another P or window where they are given.

The model is a preset, a checkpoint, or a plain decoder that is interleaved.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig

from iha import counted_attention
from iha.checkpoints import load_config
from iha.conversion.shared import new_config, preset_config
from iha.cost_arguments import CostArguments
from iha.errors import UserError
from iha.kinds import described, is_interleaved, virtual_tokens_per_token
from iha.sources import Source
from iha.without_data import counting, row_of_tokens, text_config, without_data
from modeling_iha import IHAConfig
from modeling_iha.in_place import declare_virtual_heads
from modeling_iha.modeling_interleaved import take_classes
from modeling_iha.probes import recording


def counted_config(asked: CostArguments) -> PreTrainedConfig:
    """Return the configuration of the model that the arguments name. Raise `UserError`."""
    if asked.source is None:
        return of_preset(asked.preset, asked.fields, asked.num_pseudo_heads, asked.window)
    return of_checkpoint(asked.source, asked.num_pseudo_heads, asked.window)


def of_preset(
    name: str, fields: dict[str, Any], num_pseudo_heads: int | None = None, window: int | None = None
) -> IHAConfig:
    """Return the configuration of a preset with other `fields`, P and window. Raise `UserError`."""
    config = preset_config(name, **fields, **fields_of_iha(num_pseudo_heads, window))
    check_has_effect(config, num_pseudo_heads, window)
    return config


def of_checkpoint(source: Source, num_pseudo_heads: int | None = None, window: int | None = None) -> PreTrainedConfig:
    """Return the configuration of a checkpoint's text decoder with another P and window.

    With a P a plain decoder is interleaved. Raise `UserError`.
    """
    config = text_config(load_config(source))
    text = config.get_text_config(decoder=True)
    if isinstance(config, IHAConfig):
        config = new_config(IHAConfig, **{**config.to_dict(), **fields_of_iha(num_pseudo_heads, window)})
    elif is_interleaved(config):
        text.num_pseudo_heads = num_pseudo_heads or text.num_pseudo_heads
        text.interleaved_window = window or text.interleaved_window
    elif num_pseudo_heads is not None:
        config = interleaved(config, num_pseudo_heads, window)
    elif window is not None and hasattr(text, "sliding_window"):
        text.sliding_window = window
    check_has_effect(config, num_pseudo_heads, window)
    return config


def fields_of_iha(num_pseudo_heads: int | None, window: int | None) -> dict[str, int]:
    """Return the fields of an `IHAConfig` that hold P and the window, where they are given."""
    fields = {"num_pseudo_heads": num_pseudo_heads, "sliding_window": window}
    return {name: value for name, value in fields.items() if value is not None}


def interleaved(base: PreTrainedConfig, num_pseudo_heads: int, window: int | None) -> PreTrainedConfig:
    """Return the configuration of a decoder of Transformers with interleaved heads. Raise `UserError`.

    They are in every layer, or with a window in four of every five, as `layers="paper"` of `interleave_heads`."""
    with counting(base):
        model = without_data(base, counted_attention.NAME)
        with recording(model) as calls, torch.no_grad():
            model(**row_of_tokens(model, 1, 2), use_cache=False)
        causal = {module: call for module, call in calls.items() if call.is_causal}
        if not causal:
            raise UserError(f"{base.model_type} has no attention whose heads could be interleaved.")
        declare_virtual_heads(model, causal, None if window is None else "paper", num_pseudo_heads, window)
        take_classes(model)
    return model.config


def check_has_effect(config: PreTrainedConfig, num_pseudo_heads: int | None, window: int | None) -> None:
    """Raise `UserError` for a P or a window that is given, and that no layer of the model has."""
    if num_pseudo_heads not in (None, 1) and virtual_tokens_per_token(config) == 1:
        raise UserError(f"--num-pseudo-heads {num_pseudo_heads}: no layer of this model has pseudo-heads.")
    if window is not None and all(layer_type == "full_attention" for layer_type in described(config).layer_types):
        raise UserError(f"--window {window}: no layer of this model has a window.")
