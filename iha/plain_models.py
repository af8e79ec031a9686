"""Name the plain models that a model is compared with."""

import copy

from transformers import PreTrainedConfig

from iha.kinds import is_interleaved
from iha.without_data import text_config
from modeling_iha import IHAConfig
from modeling_iha.in_place import FACTS_OF_BASE, FIELDS
from modeling_iha.modeling_interleaved import base_class


def with_mha(config: IHAConfig, everywhere: str | None = None) -> IHAConfig:
    """Return the config with "mha" in every layer, and with the layer type `everywhere` if it is given."""
    fields = {**config.to_dict(), "attention_kinds": "mha", "attention_options": None}
    if everywhere is not None:
        rope = config.rope_of(everywhere)  # only the one of these layers, if each layer type has its own
        fields |= {"layer_types": everywhere, "sliding_window": None, "rope_parameters": rope}
    return IHAConfig(**fields)


def base_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the decoder of Transformers whose heads were interleaved or paired."""
    config = copy.deepcopy(text_config(config))
    text = config.get_text_config(decoder=True)
    for field in (*FIELDS, *FACTS_OF_BASE, "auto_map", "base_model_type"):
        vars(text).pop(field, None)
    config.__class__ = base_class(type(config))
    return config


def compared_with(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Return the models that a model is compared with, by their titles.

    The last one has ordinary attention over all tokens in every layer, or is the base. Training is compared with it.
    """
    if isinstance(config, IHAConfig):
        return {"mha": with_mha(config), "global mha": with_mha(config, "full_attention")}
    return {"plain model": base_of(config)} if is_interleaved(config) else {}
