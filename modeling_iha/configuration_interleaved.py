# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Configure a decoder of Transformers whose heads are interleaved: its own configuration and a few more fields."""

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from .tested_versions import check_transformers


# This comes before the other imports, so that an unsupported Transformers gives this error and not an ImportError.
check_transformers()

import transformers
from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, PreTrainedConfig

from .mixing_scale import check_scale


if TYPE_CHECKING:
    # Transformers copies every file that an import names, also here. A configuration that is saved without a model, as
    # mergekit does, then brings the model's code too.
    from .mixing import HeadMixing  # noqa: F401  # old versions copy only what this block names
    from .modeling_interleaved import InterleavedModel  # noqa: F401


TASKS = (
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForImageTextToText",
    "ForMultimodalLM",
)
MIXING_MODULES = ("q_mix", "k_mix", "v_mix", "collapse")
# Attention modules and masks read these fields from the configurations of their own models.
FIELDS = ("num_pseudo_heads", "pseudo_collapse", "interleaved_window", "virtual_heads")
AUTO_MAP = {
    "AutoConfig": "configuration_interleaved.InterleavedConfig",
    "AutoModel": "modeling_interleaved.InterleavedModel",
    **{f"AutoModel{task}": f"modeling_interleaved.Interleaved{task}" for task in TASKS},
}


class InterleavedConfig(PreTrainedConfig):
    """Read a saved configuration; the result is an instance of a subclass of the base model's own configuration.

    Fields in addition to the base model's:
        base_model_type (`str`): the model type of the base, such as "olmo2".
        num_pseudo_heads (`int`): P of the paper.
        pseudo_collapse (`str`): "per_head" (Algorithm 1) or "all_heads" (Definition 3).
        interleaved_layers (`dict`): query heads, key heads and value heads of each interleaved attention module, by
            its name in the base model.
        mixing_scale (`float`): how many times the optimizer's rate the mixing learns at.
        interleaved_window (`int`, *optional*): window of these modules in tokens, where it is not the base's.
        virtual_heads (`str`, *optional*): "paired" where the heads are paired (`pair_heads`), and not mixed."""

    # This is in config.json and on the class, so that no program takes a checkpoint for the plain base model.
    # Instances have the base's type (see `ModelType`).
    model_type = "interleaved"

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        return config_class(saved_base_type(config_dict)).from_dict(config_dict, **kwargs)


def saved_base_type(config_dict: dict) -> str:
    """Return the base's model type of a saved configuration. Raise a ValueError if Transformers does not know it."""
    base = config_dict.get("base_model_type")
    if base not in CONFIG_MAPPING:
        raise ValueError(
            f"base_model_type is {base!r}: expected a model type of Transformers {transformers.__version__}. A newer "
            "version may have it."
        )
    return base


class ModelType:
    """Return "interleaved" as the model type of the class, and the base's as that of an instance.

    Transformers saves the type of the class, and looks up an architecture by that of the instance. This is a
    descriptor and not an attribute of the instance, because torchtitan copies attributes and would then build the
    plain base model."""

    def __get__(self, config: PreTrainedConfig | None, owner: Any) -> str:
        return InterleavedConfig.model_type if config is None else owner.__base__.model_type


@cache
def config_class(base_model_type: str) -> type[PreTrainedConfig]:
    """Return the configuration class of interleaved models of a base type.

    Its instances have the base's `model_type`, by which Transformers and PEFT find what the architecture needs, such
    as the renaming of a checkpoint's experts. The class has "interleaved", which is saved."""
    base = CONFIG_MAPPING[base_model_type]

    def get_config_dict(cls, *args, **kwargs) -> tuple:
        fields, kwargs = base.get_config_dict.__func__(cls, *args, **kwargs)
        if fields.get("model_type") == base_model_type:  # the plain base, which PEFT reads to save an adapter of it
            fields["model_type"] = cls.model_type  # else Transformers warns that the types differ
        return fields, kwargs

    def from_dict(cls, config_dict: dict, **kwargs):
        check_scale(config_dict, kwargs)
        fields = {name: value for name, value in config_dict.items() if name != "model_type"}  # see `ModelType`
        return base.from_dict.__func__(cls, fields, **kwargs)

    def to_dict(self) -> dict:
        # List only the tasks that the base has: TRL treats a model that lists AutoModelForImageTextToText as one of
        # images.
        tasks = {name: getattr(transformers, name) for name in AUTO_MAP if name != "AutoConfig"}
        missing = {name for name, auto_class in tasks.items() if base not in auto_class._model_mapping}
        auto_map = {name: reference for name, reference in AUTO_MAP.items() if name not in missing}
        return {**base.to_dict(self), "base_model_type": base_model_type, "auto_map": auto_map}

    # Transformers returns attention maps on the core "eager" alone, and does not know our names of it.
    def set_output_attentions(self, value: bool) -> None:
        if has_eager_core(self):
            self._output_attentions = value
        else:
            base.output_attentions.fset(self, value)

    def validate_output_attentions(self) -> None:
        if not has_eager_core(self):
            base.validate_output_attentions(self)

    def reduce(self) -> tuple:
        return unpickled_config, (base_model_type,), self.__getstate__()

    namespace = {"model_type": ModelType(), "from_dict": classmethod(from_dict), "to_dict": to_dict}
    namespace |= {"__reduce__": reduce, "get_config_dict": classmethod(get_config_dict)}
    namespace["output_attentions"] = property(base.output_attentions.fget, set_output_attentions)
    namespace["validate_output_attentions"] = validate_output_attentions
    # One name for all, because the Auto classes compare names.
    namespace |= {"__module__": __name__, "_auto_class": "AutoConfig"}
    # `strict` collects the validators of the class: without it those of the base would run.
    return strict(type("InterleavedConfig", (base,), namespace))


def has_eager_core(config: PreTrainedConfig) -> bool:
    """Return whether a configuration names the eager core over virtual tokens, such as "iha_eager"."""
    return (config._attn_implementation or "").endswith("_eager")


def base_config_class(config_type: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the base model's own class, of which `config_class` made a subclass."""
    return config_type.__bases__[0]


@cache
def part_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return the class of the configuration of a decoder within an interleaved model, which is not saved by itself.

    It does not say which of its layers are interleaved, so a load would build plain ones."""

    def save_pretrained(self, *args, **kwargs):
        raise ValueError(
            "This is a part of a model with interleaved heads, and by itself it would load without them: save the "
            "whole model."
        )

    def reduce(self) -> tuple:
        return unpickled_part, (base,), self.__getstate__()

    return type(
        base.__name__, (base,), {"save_pretrained": save_pretrained, "__reduce__": reduce, "__doc__": "A part."}
    )


def unpickled_part(base: Any) -> PreTrainedConfig:
    """Return the configuration of a part without fields, which pickle fills."""
    return object.__new__(part_class(base))


def unpickled_config(base_model_type: str) -> PreTrainedConfig:
    """Return a configuration without fields, which pickle then sets.

    Pickle cannot look up the class by name, because it is made at run time. If modeling_interleaved is imported, as
    with the installed package, register the models too: a process that did not read the checkpoint, such as a worker
    of vLLM, can then build them. It is not imported here, because in the code of a checkpoint that would load the
    model's code a second time."""
    models = sys.modules.get(f"{__package__}.modeling_interleaved")
    if models is not None:
        models.register_models(config_class(base_model_type))
    return object.__new__(config_class(base_model_type))
