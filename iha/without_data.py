"""Build a model without data, with one layer of each kind, so that what it costs can be counted in seconds.

Layers of a kind cost the same. The first of each kind is kept, and counts as often as the model has such layers.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from iha.errors import UserError, one_line
from modeling_iha import IHAConfig
from modeling_iha.modeling_interleaved import backbone_of, interleaved_config_class, register_models
from modeling_iha.score_matrix import ScoreMatrixAttention
from modeling_iha.virtual_tokens import View


class Kept(NamedTuple):
    """Hold the layers that are left of a model, and for each layer of the whole model which of them it is like."""

    layers: nn.ModuleList
    like: list[int]


@contextmanager
def counting(config: PreTrainedConfig) -> Iterator[None]:
    """Raise a `UserError` for code of a model that needs the values of tensors, or that we do not know."""
    try:
        yield
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{config.model_type} cannot be counted without data: {one_line(error)}") from error


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a model's text decoder alone, where Transformers can build it without the rest."""
    text = config.get_text_config(decoder=True)
    if text is config or type(text) not in AutoModelForCausalLM._model_mapping:
        return config
    if not hasattr(text, "interleaved_layers"):
        return text
    # Only the class of the whole configuration is an interleaved one.
    base: Any = type(text)
    register_models(base)
    fields = text.to_dict()
    names = fields["interleaved_layers"]
    fields["interleaved_layers"] = {name.removeprefix("language_model."): names[name] for name in names}
    config_class: Any = interleaved_config_class(base)
    return config_class.from_dict(fields)


def without_data(
    config: PreTrainedConfig, core: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Build the text part of a model on the meta device, with an attention function of Transformers.

    Raise `UserError` for a model that is not a decoder of Transformers."""
    config = text_config(copy.deepcopy(config))
    constant_rope(config.get_text_config(decoder=True))
    auto_classes = [auto for auto in (AutoModelForCausalLM, AutoModelForImageTextToText) if has_model(auto, config)]
    if not auto_classes:
        raise UserError(f"{config.model_type} is not a decoder of Transformers: its costs cannot be counted.")
    config._attn_implementation = core  # `None` is the model's default
    with torch.device("meta"):
        model = auto_classes[0].from_config(config, dtype=dtype)
    model.tie_weights()
    remove_towers(model)
    for module in model.modules():
        if isinstance(module, ScoreMatrixAttention):  # it computes scores itself, and takes no name that it lacks
            module.config = View(module.config, _attn_implementation="sdpa")
    return model.eval()


def check_can_share_rows(model: PreTrainedModel) -> None:
    """Raise `UserError` for a model with layers that attend by no function of Transformers: over scores or tuples."""
    if any(isinstance(module, ScoreMatrixAttention) for module in model.modules()):
        raise UserError(
            "Layers that change scores or attend to pairs cannot share rows: leave out cp_size or --share-rows."
        )


def has_model(auto_class: Any, config: PreTrainedConfig) -> bool:
    return type(config) in auto_class._model_mapping  # no public name tells


def constant_rope(config: PreTrainedConfig) -> None:
    """Replace a RoPE whose frequencies depend on the longest position, which a tensor without data cannot tell."""
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and each.get("rope_type") in ("dynamic", "longrope"):
            each["rope_type"] = "default"


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the text decoder of a model."""
    decoder = model.get_decoder()
    return backbone_of(model) if decoder is model else decoder


def remove_towers(model: PreTrainedModel) -> None:
    """Remove the towers of images and sound."""
    backbone, decoder = backbone_of(model), text_decoder(model)
    if any(module is decoder for module in backbone.modules()) and decoder is not backbone:
        for name, child in list(backbone.named_children()):
            if all(module is not decoder for module in child.modules()):
                setattr(backbone, name, None)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model's text decoder. Raise `UserError` where they are not in one list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [each for each in text_decoder(model).modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    if not lists:
        raise UserError(f"{model.config.model_type} has no list of {count} layers: its costs cannot be counted.")
    return lists[0]


def keep_one_of_each(model: PreTrainedModel) -> Kept:
    """Remove the layers of a model that are like an earlier one."""
    layers = layers_of(model)
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds = [(layer_type, kind_of(layer)) for layer_type, layer in zip(types, layers)]
    firsts = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    like = [firsts.index(kinds.index(kind)) for kind in kinds]
    return Kept(choose_layers(model, firsts), like)


def choose_layers(model: PreTrainedModel, indices: list[int]) -> nn.ModuleList:
    """Replace the layers of a model by those of these indices, and return them. A repeated one is copied.

    The configuration and the modules tell the new number and type of each layer, by which a model calls it."""
    layers = layers_of(model)
    config = model.config.get_text_config(decoder=True)
    chosen: list[nn.Module] = []
    for i in indices:
        layer = layers[i]
        # A copy reads the same configuration.
        chosen.append(copy.deepcopy(layer, {id(config): config}) if layer in chosen else layer)
    config.num_hidden_layers = len(chosen)
    types = vars(config).get("layer_types")  # of some models it is a property, which follows from the number
    if types:
        config.layer_types = [types[i] for i in indices]
    for number, layer in enumerate(chosen):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number
    del layers[:]
    layers.extend(chosen)
    return layers


def kind_of(layer: nn.Module) -> list[tuple]:
    """Return what equal layers have in common: the modules' classes, shapes and plain attributes, but the number."""
    plain = bool | int | str | tuple | list | None
    found = []
    for name, module in layer.named_modules():
        attributes = vars(module)
        values = {each: attributes[each] for each in attributes if isinstance(attributes[each], plain)}
        values.pop("layer_idx", None)
        shapes = {each: weight.shape for each, weight in module.named_parameters(recurse=False)}
        found.append((name, type(module), sorted(attributes), values, shapes))
    return found


def row_of_tokens(model: PreTrainedModel, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return the arguments of a call with rows of tokens.

    Without a mask Transformers would look for documents in the positions, which have no data."""
    ids = torch.zeros(batch, tokens, dtype=torch.long, device=model.device)
    if isinstance(model.config, IHAConfig):
        return {"input_ids": ids}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
