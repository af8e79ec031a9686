# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Register Interleaved Head Attention with the Auto classes of Transformers.

A checkpoint ships its own code and does not need this package."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .adapters import load_adapter, save_adapter
from .attention_maps import token_attentions
from .configuration_iha import IHAConfig
from .in_place import interleave_heads, remove_interleaving
from .mixing_weights import mixing_change, mixing_parameters, set_mixing_scale
from .modeling_iha import (
    IHAForCausalLM,
    IHAForQuestionAnswering,
    IHAForSequenceClassification,
    IHAForTokenClassification,
    IHAModel,
    IHAPreTrainedModel,
)
from .package import LocalInterleavedConfig, from_preset, save_pretrained
from .paired_decoders import pair_heads


__version__ = "0.1.0"  # setup.py reads it

IHAConfig.from_preset = classmethod(from_preset)
IHAConfig.save_pretrained = save_pretrained
# configuration_iha.py registers the class so that the copy in a checkpoint ships its code. Here our `save_pretrained`
# ships it, for the kinds in use alone, and Transformers must not copy that of every kind first.
IHAConfig._auto_class = None

AutoConfig.register(IHAConfig.model_type, IHAConfig)
AutoConfig.register(LocalInterleavedConfig.model_type, LocalInterleavedConfig)
AutoModel.register(IHAConfig, IHAModel)
AutoModelForCausalLM.register(IHAConfig, IHAForCausalLM)
AutoModelForSequenceClassification.register(IHAConfig, IHAForSequenceClassification)
AutoModelForTokenClassification.register(IHAConfig, IHAForTokenClassification)
AutoModelForQuestionAnswering.register(IHAConfig, IHAForQuestionAnswering)


__all__ = [
    "IHAConfig",
    "IHAForCausalLM",
    "IHAForQuestionAnswering",
    "IHAForSequenceClassification",
    "IHAForTokenClassification",
    "IHAModel",
    "IHAPreTrainedModel",
    "interleave_heads",
    "load_adapter",
    "mixing_change",
    "mixing_parameters",
    "pair_heads",
    "remove_interleaving",
    "save_adapter",
    "set_mixing_scale",
    "token_attentions",
]
