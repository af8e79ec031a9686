# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Run a decoder of Transformers with interleaved heads (interleaving.py), at one RoPE position for each token.

A module with virtual heads attends over virtual tokens (interleaved_attention.py). The base model computes everything
else: projections, RoPE, FFN. The classes here add what generation, saving and loading need.

They are made by name. `InterleavedLlamaForCausalLM` is the class (ModelMixin, LlamaForCausalLM), and its configuration
`InterleavedLlamaConfig` is (ConfigMixin, LlamaConfig). config.json names them in `auto_map`.

Read virtual_tokens.py first, which has the symbols of shapes, then interleaving.py, interleaved_attention.py and
sdpa_in_blocks.py. triton_kernels.py computes the same faster on a GPU.
"""

import sys
from functools import cache as keep_results
from functools import partial
from inspect import signature

from .transformers_versions import CACHE


# isort: split
# The version of Transformers is checked before these imports.
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate as default_masks_for_generate
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from .interleaved_attention import (
    decoder_config,
    has_virtual_heads,
    implementation_of_user,
    keep_windows,
    prepare_call,
    register_core,
)
from .interleaving import HeadCollapse, HeadMixing
from .mixing import Mixing
from .pairing import PairedHeads
from .sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from .virtual_tokens import refuse_pages


MODEL_TYPE = "interleaved"  # in config.json and nowhere else, so that no Auto class loads the plain base
TASKS = ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "ImageTextToText")
AUTO_CLASSES = ("AutoModel", *(f"AutoModelFor{task}" for task in (*TASKS, "MultimodalLM")))
MIXING_MODULES = ("q_mix", "k_mix", "v_mix", "collapse")
# PyTorch numbers hooks per process, so equal models would get different hashes in `datasets`. This key is fixed.
HOOK = "interleaving"


class ConfigMixin:
    """Save the configuration of an interleaved model under a model type that is not its base's.

    `interleave_heads` or `pair_heads` of the package `modeling_iha`, which a checkpoint does not need, wrote these
    fields. They are in the configuration of the text decoder, which is a part of that of a model with images:
        num_pseudo_heads (`int`): P.
        pseudo_collapse (`str`): "per_head" or "all_heads" (`HeadCollapse`).
        recompute_virtual_tokens (`bool`, *optional*): whether the backward pass makes virtual tokens again.
        virtual_heads (`str`, *optional*): "paired" where the heads are paired (pairing.py), and not mixed.
        interleaved_layers (`dict`): numbers of query, key and value heads of each interleaved attention module, by its
            name in the model without a head.
        interleaved_window (`int`, *optional*): a window for these modules in tokens, besides the base's.
        mixing_scale (`float`): how many times the optimizer's rate the mixing learns at.
        passes_windows (`bool`): whether the base hands its windows to its attention modules.
        passes_cu_seq_lens (`bool`): the same of the bounds of documents, in a base that keeps documents apart.
        base_name_or_path (`str`): what the base was loaded from.

    An instance has the base's `model_type`, by which Transformers finds what an architecture needs."""

    _auto_class = "AutoConfig"  # with this Transformers saves the code with the configuration

    def to_dict(self) -> dict:
        config_class = base_class(type(self))
        models = models_by_auto_class(config_class)
        file = __name__.split(".")[-1]
        auto_map = {"AutoConfig": f"{file}.{interleaved_name(config_class)}"}
        auto_map |= {auto: f"{file}.{interleaved_name(model, config_class)}" for auto, model in models.items()}
        fields = {"model_type": MODEL_TYPE, "base_model_type": config_class.model_type, "auto_map": auto_map}
        return super().to_dict() | fields

    @classmethod
    def get_config_dict(cls, *args, **kwargs) -> tuple[dict, dict]:
        fields, kwargs = super().get_config_dict(*args, **kwargs)
        return without_types(fields), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        own = config_dict.get("mixing_scale")
        if kwargs.get("mixing_scale", own) != own:
            raise ValueError(f"The saved weights depend on mixing_scale={own}: call modeling_iha.set_mixing_scale.")
        return super().from_dict(without_types(config_dict), **kwargs)

    def save_pretrained(self, *args, **kwargs):
        """Save the configuration. Raise a ValueError if a plain model that holds the same object is being saved.

        Such a model is the part `model.model`. Transformers sets `architectures` to its class before this."""
        # A plain model with a head may hold the interleaved part, and be saved rightly.
        plain = models_by_auto_class(base_class(type(self))).get("AutoModel")
        if plain is not None and self.architectures == [plain.__name__]:
            raise ValueError(
                f"This {plain.__name__} would be saved by the configuration of a model with interleaved heads. "
                "If it is a part of that model, save the whole model. If it is another model that was made from the "
                "same configuration object, make each from a copy (copy.deepcopy)."
            )
        return super().save_pretrained(*args, **kwargs)

    # Transformers returns attention weights of "eager" alone, and does not know our name of it.
    @property
    def output_attentions(self) -> bool:
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool):
        if (self._attn_implementation or "").endswith("_eager"):
            self._output_attentions = value
        else:
            base_class(type(self)).output_attentions.fset(self, value)

    def validate_output_attentions(self):
        if not (self._attn_implementation or "").endswith("_eager"):
            super().validate_output_attentions()


def without_types(fields: dict) -> dict:
    """Return the fields of a saved configuration without the types that `ConfigMixin.to_dict` writes anew."""
    return {name: value for name, value in fields.items() if name not in ("model_type", "base_model_type")}


class ModelMixin:
    """Give a model of Transformers virtual heads in the layers that its configuration lists.

    Attention weights, which "eager" alone returns, are those over virtual tokens, [batch, H, N * P, K * P]."""

    init_continuous_batching = refuse_pages  # of `generate_batch`
    is_backend_compatible = refuse_pages  # vLLM and SGLang ask for this

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        check_no_tensor_parallelism(config)
        register_models(base_class(type(config)))
        super().__init__(config, *args, **kwargs)
        attach_virtual_heads(self)
        self.init_weights()  # of the mixing alone: the base model's are done

    def initialize_weights(self):
        # This comes before `super()`, which marks every module as initialized.
        for module in self.modules():
            if isinstance(module, Mixing) and not getattr(module, "_is_hf_initialized", False):
                module.init_mechanism(self.config)
                module._is_hf_initialized = True
        super().initialize_weights()

    def set_attn_implementation(self, *args, **kwargs):
        """Set the attention function, over virtual tokens in the decoder."""
        super().set_attn_implementation(*args, **kwargs)
        use_virtual_core(self)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        core = None if attn_implementation is None else implementation_of_user(attn_implementation)
        return super()._check_and_adjust_attn_implementation(core, *args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if isinstance(model_kwargs.get(CACHE), Cache):
            keep_windows(self, model_kwargs[CACHE])
            if generation_config.is_assistant:
                model_kwargs[CACHE].activate_past_recording()  # again: `keep_windows` may have replaced layers

    def create_masks_for_generate(self, config, inputs_embeds, attention_mask, **kwargs):
        """Return the masks of one new token, which a compiled forward needs ready.

        For a prompt and for flash functions return the padding mask: the forward makes the rest."""
        if inputs_embeds.shape[1] > 1 or "flash" in decoder_config(self)._attn_implementation:
            return attention_mask
        create_masks = getattr(super(), "create_masks_for_generate", default_masks_for_generate)
        return create_masks(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs)

    def save_pretrained(self, *args, **kwargs):
        check_layers(self)
        return super().save_pretrained(*args, **kwargs)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return base_class(cls)._can_set_experts_implementation()  # it reads the source code of the class's file

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # `True` would skip the renaming of weights on load that the base has.


def check_no_tensor_parallelism(config: PreTrainedConfig) -> None:
    """Raise a ValueError for tensor parallelism, which gives each process some of the heads that are mixed."""
    if (getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1) > 1:
        raise ValueError(
            "Tensor parallelism (tp_plan, tp_size) leaves each process some heads, and interleaving mixes all: load "
            "the model without it, and use FSDP2 (fsdp_size) or DistributedDataParallel."
        )


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without a head. Llama 4's `base_model` is the model itself."""
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text decoder: the smallest model of Transformers that holds all interleaved attention."""
    attention = set(interleaved_attention(model).values())
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [each for each in models if attention <= set(each.modules())][-1]  # parts come after what holds them


def interleaved_attention(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the listed attention modules by their names in the model without a head, but for layers that it lacks."""
    backbone, found = backbone_of(model), {}
    for name in decoder_config(model).interleaved_layers:
        try:
            found[name] = backbone.get_submodule(name)
        except AttributeError:
            continue
    return found


def is_mixing(name: str) -> bool:
    """Return whether a parameter or buffer with this name belongs to the mixing."""
    return not set(MIXING_MODULES).isdisjoint(name.split("."))


def take_classes(model: PreTrainedModel) -> None:
    """Make a plain model and its configuration ones of the interleaved classes, which after a load they are."""
    if isinstance(model, ModelMixin):
        return
    config = model.config
    base = type(config)
    register_models(base)  # for `from_config` of the Auto classes
    model.__class__ = interleaved_class(type(model), base)
    config.__class__ = interleaved_config_class(base)
    if config.architectures:
        config.architectures = [f"Interleaved{name}" for name in config.architectures]


def return_classes(model: PreTrainedModel) -> None:
    """Make an interleaved model and its configuration ones of the classes of the base."""
    config = model.config
    model.__class__ = base_class(type(model))
    config.__class__ = base_class(type(config))
    if config.architectures:
        config.architectures = [base_name(name) for name in config.architectures]


def add_heads(model: PreTrainedModel) -> None:
    """Add virtual heads to the attention modules that the configuration lists."""
    config = decoder_config(model)
    modules = interleaved_attention(model)
    if not modules:
        missing = ", ".join(config.interleaved_layers)
        raise ValueError(f"The model has none of its interleaved layers ({missing}): keep more layers.")
    config.interleaved_layers = {name: config.interleaved_layers[name] for name in modules}
    for name, module in modules.items():
        if has_virtual_heads(module):
            continue  # The decoder of a generic task head has them already.
        # CODEPATH: checkpoints of `pair_heads`, not of `interleave_heads`.
        if config.virtual_heads == "paired":
            module.paired_heads = PairedHeads(config.num_pseudo_heads)
            continue
        num_heads, num_key_heads, num_value_heads = config.interleaved_layers[name]
        options = config.num_pseudo_heads, config.mixing_scale
        module.q_mix = HeadMixing(num_heads, *options)
        module.k_mix = HeadMixing(num_key_heads, *options)
        module.v_mix = HeadMixing(num_value_heads, *options)
        module.collapse = HeadCollapse(num_heads, config.num_pseudo_heads, config.pseudo_collapse, config.mixing_scale)
    # Transformers has collected the names of tied weights before, so those of the mixing are added: blocks that share
    # all their weights, as in Zamba, share the mixing's parameters too. Buffers cannot be tied.
    weights = dict(model.named_parameters(remove_duplicate=False))
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    model.all_tied_weights_keys |= {name: tied[name] for name in tied if is_mixing(name) and name in weights}


def remove_heads(model: PreTrainedModel) -> None:
    """Remove the virtual heads, whether mixed or paired."""
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {name: source for name, source in tied.items() if not is_mixing(name)}
    for module in interleaved_attention(model).values():
        for name in (*MIXING_MODULES, "paired_heads"):
            if hasattr(module, name):
                delattr(module, name)


def use_virtual_core(model: PreTrainedModel) -> None:
    """Let the decoder attend over virtual tokens, on the attention function that its configuration names.

    A flat mask holds no window, so "sdpa" becomes `sdpa_in_blocks` only if the decoder hands its windows on. Decoders
    that support FlashAttention do, unless `interleave_heads` has found otherwise.
    Configurations have no public setter for a part of a model: this sets the field of Transformers."""
    config = decoder_config(model)
    core = implementation_of_user(config._attn_implementation)
    gets_windows = decoder_of(model)._supports_flash_attn and getattr(config, "passes_windows", True)
    if core == "sdpa" and gets_windows:
        core = SDPA_IN_BLOCKS
    config._attn_implementation_internal = register_core(core)


def use_base_core(model: PreTrainedModel) -> None:
    """Let the decoder attend over tokens, on the same attention function."""
    config = decoder_config(model)
    # The public `set_attn_implementation` also changes the configurations of vision towers.
    config._attn_implementation_internal = implementation_of_user(config._attn_implementation)


def add_hook(model: PreTrainedModel) -> None:
    """Let the decoder prepare its calls, and refuse to be saved alone if it is a part of the model."""
    decoder = decoder_of(model)
    if decoder is not backbone_of(model):
        decoder.save_pretrained = do_not_save_part
    parameters = signature(type(decoder).forward).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]
    # `register_forward_pre_hook` returns a handle, which a copy of the model would lack: the hook has a fixed key.
    decoder._forward_pre_hooks[HOOK] = partial(prepare_call, names)
    decoder._forward_pre_hooks_with_kwargs[HOOK] = True


def remove_hook(model: PreTrainedModel) -> None:
    """Let the decoder take its calls as they are, and be saved."""
    decoder = decoder_of(model)
    decoder._forward_pre_hooks.pop(HOOK, None)
    decoder._forward_pre_hooks_with_kwargs.pop(HOOK, None)
    vars(decoder).pop("save_pretrained", None)


def do_not_save_part(*args, **kwargs) -> None:
    raise ValueError("This part of a model with interleaved heads would load without them: save the whole model.")


# The steps that give a model virtual heads, in order, each with the one that undoes it, for the package `modeling_iha`
# and the vLLM plugin. All read the fields of the configuration.
EFFECTS = (
    (take_classes, return_classes),
    (add_heads, remove_heads),
    (use_virtual_core, use_base_core),
    (add_hook, remove_hook),
)


def attach_virtual_heads(model: PreTrainedModel) -> None:
    """Give a model the virtual heads of which its configuration has the fields."""
    for attach, _ in EFFECTS:
        attach(model)


def detach_virtual_heads(model: PreTrainedModel) -> None:
    """Undo `attach_virtual_heads`, as far as it got. The fields of the configuration stay."""
    for _, detach in reversed(EFFECTS):
        detach(model)


def check_layers(model: PreTrainedModel) -> None:
    """Raise a ValueError where layers were added, removed or moved after interleaving.

    Wrappers such as those of `torch.compile` pass attributes on, so that `hasattr` finds the heads of a module."""
    present = [module for module in backbone_of(model).modules() if has_virtual_heads(module)]
    listed = interleaved_attention(model)
    have_heads = all(hasattr(module, "q_mix") or hasattr(module, "paired_heads") for module in listed.values())
    if len(present) != len(listed) or not have_heads:
        raise ValueError(
            f"The model has {len(present)} attention modules with interleaved heads, which are not the {len(listed)} "
            f"that its configuration lists ({', '.join(listed)}): a load would make other layers. Change the layers "
            "first, and interleave the heads then."
        )


def base_name(interleaved: str) -> str:
    """Return the name of the class of Transformers that the name of an interleaved class holds."""
    return interleaved.removeprefix("Interleaved").partition("_of_")[0]


def interleaved_name(base: type, config: type | None = None) -> str:
    is_own = config is None or config is base.config_class
    return f"Interleaved{base.__name__}" if is_own else f"Interleaved{base.__name__}_of_{config.__name__}"


@keep_results
def interleaved_config_class(base: type[PreTrainedConfig]) -> type:
    """Return the class `InterleavedXConfig` of a class of configurations of Transformers."""
    made = type(interleaved_name(base), (ConfigMixin, base), {"__module__": __name__})
    return strict(made)  # it collects the validators anew


@keep_results
def interleaved_class(base: type[PreTrainedModel], config: type[PreTrainedConfig]) -> type:
    """Return the class `InterleavedX` of a class X of models of Transformers.

    `InterleavedX_of_Y` has a configuration class Y, `config`, that is not X's own: InternLM3 uses Llama's models."""
    auto_class = next((auto for auto, model in models_by_auto_class(config).items() if model is base), None)
    fields = {"config_class": interleaved_config_class(config), "_auto_class": auto_class, "__module__": __name__}
    # Trainer's label smoothing and pipelines look up the class's name in these mappings, and no public function adds
    # an entry. A second copy of this code writes the same entries.
    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        if base.__name__ in names.values():
            names[f"{MODEL_TYPE}_{config.model_type}"] = interleaved_name(base, config)
    return type(interleaved_name(base, config), (ModelMixin, base), fields)


def base_class(interleaved: type) -> type:
    """Return the class of Transformers of which a class is made, also where FSDP2 made a subclass of that."""
    return next(each for each in interleaved.__mro__ if each.__module__.startswith("transformers."))


def models_by_auto_class(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """Return the models of Transformers for a class of configurations, by the names of their Auto classes."""
    models = {name: getattr(transformers, name)._model_mapping.get(config_class, None) for name in AUTO_CLASSES}
    return {name: model for name, model in models.items() if isinstance(model, type)}


def register_models(config_class: type[PreTrainedConfig]) -> None:
    """Let the Auto classes build the models of an interleaved configuration; generic task heads need this."""
    for name, model in models_by_auto_class(config_class).items():
        auto_class = getattr(transformers, name)
        of_config, of_model = interleaved_config_class(config_class), interleaved_class(model, config_class)
        auto_class.register(of_config, of_model, exist_ok=True)


def __getattr__(name: str) -> type:
    """Make `InterleavedX` where Transformers or pickle look it up in this file."""
    base = getattr(transformers, base_name(name), None)
    if not name.startswith("Interleaved") or base is None:
        raise AttributeError(f"{__name__} has no attribute {name}.")
    if issubclass(base, PreTrainedConfig):
        register_models(base)
        return interleaved_config_class(base)
    config_name = name.partition("_of_")[2]
    config = getattr(transformers, config_name) if config_name else base.config_class
    register_models(config)
    return interleaved_class(base, config)


# dill, which `datasets` uses, looks up modules in their package, to which Transformers does not add remote code.
setattr(sys.modules[__package__], __name__.split(".")[-1], sys.modules[__name__])
