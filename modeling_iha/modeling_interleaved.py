# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Run a decoder of Transformers with interleaved heads (interleaving.py), at one RoPE position for each token.

Transformers' models look up their attention function and their mask function by one name, such as "sdpa". This file
registers both under a second name, "iha_sdpa". (Most decoders get "iha_sdpa_in_blocks" for "sdpa", by
`use_virtual_core`.) A module with virtual heads then attends over virtual tokens (virtual_tokens.py, which also lists
the symbols of shapes), and any other module over tokens. The base model computes everything else: projections, RoPE,
FFN. A pre-hook and overridden methods add to its caches, masks, generation, saving and loading what these need.

The classes are made by name. `InterleavedLlamaForCausalLM` is the class (ModelMixin, LlamaForCausalLM), and its
configuration `InterleavedLlamaConfig` is (ConfigMixin, LlamaConfig). config.json names them in `auto_map`.
"""

import math
import sys
from collections.abc import Callable
from functools import cache as keep_results
from functools import partial
from inspect import signature
from typing import Any

from .transformers_versions import CACHE, IS_FROM_5_24, pop_cache


# isort: split
# The version of Transformers is checked before these imports.
import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    create_masks_for_generate,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from .interleaving import HeadCollapse, HeadMixing, MixedHeads
from .mixing import Mixing
from .pairing import PairedHeads
from .sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from .virtual_tokens import CORES, View, keep_window_edge, virtual_attention, virtual_mask


MODEL_TYPE = "interleaved"  # in config.json and nowhere else, so that nothing loads a checkpoint as the plain base
TASKS = ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "ImageTextToText")
AUTO_CLASSES = ("AutoModel", *(f"AutoModelFor{task}" for task in (*TASKS, "MultimodalLM")))
MIXING_MODULES = ("q_mix", "k_mix", "v_mix", "collapse")
PREFIX = "iha_"  # "iha_sdpa" attends by "sdpa" over virtual tokens
CHANGED = "changed_"  # a second prefix, for models whose plain base is no reference model (`differs_from_base`)
# PyTorch numbers hooks per process, so equal models would get different hashes in `datasets`. This name is fixed.
HOOK = "interleaving"


# Attention


def attend_interleaved(
    core: str,
    is_changed: bool,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over virtual tokens where the module has virtual heads, and over tokens elsewhere.

    `core` is the attention function that computes it, such as "sdpa", and `is_changed` is `differs_from_base`. The
    other arguments and the output are those of an attention function of Transformers, in tokens."""
    config = getattr(module, "config", None)
    num_pseudo_heads = getattr(config, "num_pseudo_heads", 1)  # a vision tower and a plain base have none
    num_tokens = query.shape[2]
    if not has_virtual_heads(module):
        if is_changed and not hasattr(config, "num_pseudo_heads"):
            # TRL loads a reference model by `_name_or_path` and `attn_implementation`. After a change in place this
            # path still names the plain base, which is no reference for the changed model.
            raise RuntimeError(
                "This plain base has the attn_implementation of a model that has paired heads, a window of "
                "interleaved heads or a loaded mixing, and so computes something else. For a reference model pass "
                "ref_model, or save the interleaved model and train what from_pretrained loads."
            )
        mask = mask_over_tokens(attention_mask, num_tokens, config)
        return attend_on_core(core, 1, module, query, key, value, mask, **kwargs)
    # CODEPATH: a window of the interleaved layers alone.
    if config.interleaved_window is not None:
        kwargs["sliding_window"] = min(config.interleaved_window, kwargs.get("sliding_window") or math.inf)
    heads = module.paired_heads if hasattr(module, "paired_heads") else MixedHeads.of_module(module, value)
    attend = partial(attend_on_core, core, num_pseudo_heads)
    return virtual_attention(attend, module, heads, query, key, value, attention_mask, **kwargs)


def attend_on_core(core: str, num_pseudo_heads: int, module: nn.Module, *args, **kwargs) -> tuple:
    """Call an attention function of Transformers with the module as the function has to see it.

    A flash function reads its name from the config. An attention sink is raised by log P, because each token has P
    keys."""
    attributes: dict = {}
    if "flash" in core:
        attributes["config"] = View(module.config, _attn_implementation=core)
    if num_pseudo_heads > 1 and getattr(module, "sinks", None) is not None:
        attributes["sinks"] = module.sinks + math.log(num_pseudo_heads)
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = attributes["sinks"]
    view = View(module, **attributes) if attributes else module
    if core != "eager":
        return ALL_ATTENTION_FUNCTIONS[core](view, *args, **kwargs)
    # "eager" is a function in the file of the model.
    files = (sys.modules[base.__module__] for base in type(module).__mro__)
    attend = next(file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward"))
    return attend(view, *args, **kwargs)


def interleaved_mask(core: str, *, config, mask_function: Callable, local_size: int | None = None, **kwargs) -> Any:
    """Return the mask over virtual tokens, as `virtual_mask` does, within the window of the interleaved layers.

    `mask_over_tokens` cuts the mask of plain layers out of it. Where it cannot (a `BlockMask`, or a window of the
    interleaved layers), their mask is the attribute `of_tokens`."""
    make_mask = partial(ALL_MASK_ATTENTION_FUNCTIONS[core], config=config, **kwargs)
    if not hasattr(config, "num_pseudo_heads"):  # that of a vision tower
        return make_mask(mask_function=mask_function, local_size=local_size)
    sees, size, window = mask_function, local_size, config.interleaved_window
    if window is not None:
        sees, size = and_masks(mask_function, sliding_window_overlay(window)), min(window, local_size or window)
    mask = virtual_mask(core, config=config, mask_function=sees, local_size=size, **kwargs)

    has_plain_layers = len(config.interleaved_layers) < config.num_hidden_layers
    if not has_plain_layers or (window is None and not isinstance(mask, BlockMask)):
        return mask
    of_tokens = make_mask(mask_function=mask_function, local_size=local_size)
    if mask is None and of_tokens is not None:  # blocks need no mask, but one has to carry that of plain layers
        dense = kwargs | {"allow_is_causal_skip": False}
        mask = virtual_mask("sdpa", config=config, mask_function=sees, local_size=size, **dense)
    if mask is not None:
        mask.of_tokens = of_tokens
    return mask


def mask_over_tokens(mask: Any, num_tokens: int, config: PreTrainedConfig) -> Any:
    """Return the mask of a layer without virtual tokens, from one over virtual tokens: that of the last pseudo-heads.

    A user's mask [batch, heads, N, K] is over tokens already."""
    size = getattr(config, "num_pseudo_heads", 1)
    if mask is None or size == 1:
        return mask
    if hasattr(mask, "of_tokens"):
        return mask.of_tokens
    if not isinstance(mask, BlockMask) and mask.ndim == 4 and mask.shape[-2] == num_tokens:
        return mask
    if isinstance(mask, BlockMask) or config.interleaved_window is not None:
        raise ValueError(
            "The mask of layers without virtual heads is an attribute of that of the others, and a copy to another "
            "device lost it: keep the decoder on one device."
        )
    last = slice(size - 1, None, size)
    return mask[:, last] if mask.ndim == 2 else mask[..., last, last]


def core_of(name: str) -> str:
    """Return the attention function that an `attn_implementation` of ours stands for; any other stands for itself.

    "iha_sdpa_in_blocks" stands for "sdpa", from which `use_virtual_core` chooses blocks again."""
    core = name.removeprefix(CHANGED).removeprefix(PREFIX)
    if core == name:
        return name
    return "sdpa" if core == SDPA_IN_BLOCKS else core.replace("--", "/")


def register_core(core: str, is_changed: bool) -> str:
    """Register attention and masks over virtual tokens on an attention function, and return their name.

    If a second copy of this code is loaded in a process, its functions replace those of the first. They read the same
    attributes of a module, so models of both copies run on either."""
    name = (CHANGED if is_changed else "") + PREFIX + core.replace("/", "--")  # a "/" would name a kernel of the Hub
    AttentionInterface.register(name, partial(attend_interleaved, core, is_changed))
    AttentionMaskInterface.register(name, partial(interleaved_mask, core))
    return name


# At import, so that an unpickled model finds them. Any other function is registered when a model first uses it.
for _core in CORES:
    register_core(_core, is_changed=False)
    register_core(_core, is_changed=True)


# The call of a decoder


def prepare_decoder(names: list[str], decoder: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Check and change the arguments of a decoder's forward: a pre-hook of the decoder.

    `names` are those of the positional arguments. Windows of the cache become one token longer (`keep_windows`) before
    the forward reads its lengths. `logits_to_keep` becomes `None`, because Gemma 4 crops the rows of a mask to it,
    which are virtual tokens here."""
    core = decoder_config(decoder)._attn_implementation
    if core == core_of(core):
        raise RuntimeError(
            f"The attention of this model was set to {core!r} behind its back, which would leave out the interleaved "
            "heads: call model.set_attn_implementation."
        )
    kwargs = dict(**dict(zip(names, args)), **kwargs)
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal=False: interleaved heads are causal. Leave it out, or use the plain model.")
    if "logits_to_keep" in names:
        kwargs["logits_to_keep"] = None
    cache = pop_cache(kwargs)
    if cache is None:
        cache = new_cache(decoder, kwargs.get("use_cache"))
    if cache is not None:
        keep_windows(decoder, cache)
        kwargs[CACHE] = cache
    mask = kwargs.get("attention_mask")
    lengths = [kwargs[name].shape[1] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None]
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[2] in lengths:
        check_mask_over_tokens(decoder_config(decoder), mask, cache)
    return args[len(names) :], kwargs


def check_mask_over_tokens(config: PreTrainedConfig, mask: torch.Tensor, cache: Cache | None) -> None:
    """Raise a ValueError for a user's mask [batch, heads, N, K] that does not tell what virtual tokens see."""
    window = min(config.interleaved_window or math.inf, getattr(config, "sliding_window", None) or math.inf)
    length = mask.shape[2] if cache is None else mask.shape[2] + cache.get_seq_length()
    limit = "" if window == math.inf else f", at most {window} (the window)"
    if getattr(cache, "is_compileable", False) or mask.shape[3] != length or length > window:
        raise ValueError(
            f"attention_mask [batch, heads, queries, keys] has {mask.shape[3]} keys for {length} tokens: it needs one "
            f"for each of them{limit}, and no static cache. Give padding as [batch, tokens]. Packed documents are "
            "declared by position_ids that restart, with use_cache=False and without attention_mask."
        )


def new_cache(decoder: PreTrainedModel, use_cache: bool | None) -> Cache | None:
    """Return the cache of a call to which none is given, or `None` to leave it to the base model.

    A base makes its own in the forward, which is too late for `keep_windows` if it has windows."""
    config = decoder_config(decoder)
    if use_cache is None:
        use_cache = getattr(config, "use_cache", False)
    # A base with activation checkpointing makes no cache, and Transformers finds packed documents only without one.
    is_checkpointed = getattr(decoder, "gradient_checkpointing", False) and decoder.training
    if IS_FROM_5_24:
        is_checkpointed = is_checkpointed and torch.is_grad_enabled()
    # RecurrentGemma, which is stateful, resets its states where it makes a cache.
    if not use_cache or is_checkpointed or decoder._is_stateful or not getattr(config, "sliding_window", None):
        return None
    return DynamicCache(config=decoder.config)


def keep_windows(model: PreTrainedModel, cache: Cache) -> None:
    """Let a cache keep what windows of virtual tokens reach: one token more than the window.

    If the base has no window and the interleaved layers have one, their empty dynamic layers of the cache become
    sliding ones."""
    cache = getattr(cache, "self_attention_cache", cache)  # that of a decoder with cross-attention
    config = decoder_config(model)
    window = getattr(config, "sliding_window", None)
    if window:
        keep_window_edge(cache, window)
        return
    layers = getattr(cache, "layers", [])
    empty = {i for i, layer in enumerate(layers) if type(layer) is DynamicLayer and not layer.is_initialized}
    # CODEPATH: a window of the interleaved layers alone.
    if config.interleaved_window is None or "flex" in config._attn_implementation:  # a `BlockMask` cannot be cut
        return
    for module in model.modules():
        if has_virtual_heads(module) and module.layer_idx in empty:
            layers[module.layer_idx] = DynamicSlidingWindowLayer(config.interleaved_window + 1)


# Configurations


class ConfigMixin:
    """Save the configuration of an interleaved model under a model type that is not its base's.

    These fields are in the configuration of the text decoder, which is a part of that of a model with images:
        num_pseudo_heads (`int`): P of the paper.
        pseudo_collapse (`str`): "per_head" (Algorithm 1) or "all_heads" (Definition 3).
        virtual_heads (`str`, *optional*): "paired" where the heads are paired (`pair_heads`), and not mixed.
        interleaved_layers (`dict`): numbers of query, key and value heads of each interleaved attention module, by its
            name in the model without a head.
        interleaved_window (`int`, *optional*): a window for these modules in tokens, besides the base's.
        mixing_scale (`float`): how many times the optimizer's rate the mixing learns at.
        recompute_virtual_tokens (`bool`, *optional*): as in `IHAConfig`.

    An instance has the base's `model_type`, by which Transformers finds what an architecture needs."""

    _auto_class = "AutoConfig"  # with this Transformers saves the code with the configuration

    def to_dict(self) -> dict:
        base = base_class(type(self))
        file = __name__.split(".")[-1]
        auto_map = {"AutoConfig": f"{file}.{interleaved_name(base)}"}
        auto_map |= {auto: f"{file}.{interleaved_name(model, base)}" for auto, model in tasks(base).items()}
        fields = {"model_type": MODEL_TYPE, "base_model_type": base.model_type, "auto_map": auto_map}
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
        return super().from_dict(config_dict, **kwargs)

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


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of the text decoder, which attention modules and masks read."""
    return model.config.get_text_config(decoder=True)


# Models


class ModelMixin:
    """Give a model of Transformers virtual heads in the layers that its configuration lists."""

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
        core = None if attn_implementation is None else core_of(attn_implementation)
        return super()._check_and_adjust_attn_implementation(core, *args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if isinstance(model_kwargs.get(CACHE), Cache):
            keep_windows(self, model_kwargs[CACHE])
            if generation_config.is_assistant:
                model_kwargs[CACHE].activate_past_recording()  # again: `keep_windows` may have replaced layers

    def create_masks_for_generate(self, config, inputs_embeds, attention_mask, **kwargs):
        """Return the masks of one new token, which a compiled forward needs.

        For a prompt or a flash function return the padding mask, and let the forward make its masks: a mask
        [batch, keys * P] that is made here would be taken for a padding mask."""
        if inputs_embeds.shape[1] > 1 or "flash" in decoder_config(self)._attn_implementation:
            return attention_mask
        create_masks = getattr(super(), "create_masks_for_generate", create_masks_for_generate)
        return create_masks(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs)

    def save_pretrained(self, *args, **kwargs):
        check_layers(self)
        return super().save_pretrained(*args, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError(
            "Continuous batching keeps one key for each token, and interleaved heads need P: serve the model by vLLM "
            "with the plugin vllm_iha, or call generate, which takes batches too."
        )

    @classmethod
    def is_backend_compatible(cls) -> bool:
        raise NotImplementedError(
            "The paged caches of vLLM and SGLang hold one key for each token, and interleaved heads need P: for vLLM "
            "install the plugin vllm_iha and leave out --model-impl, or use generate of Transformers."
        )

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
    return [each for each in models if attention <= set(each.modules())][-1]


def interleaved_attention(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the attention modules that the configuration lists, by their names in the model without a head.

    Those of layers that the model lacks are left out: it may have been loaded with fewer layers."""
    backbone, found = backbone_of(model), {}
    for name in decoder_config(model).interleaved_layers:
        try:
            found[name] = backbone.get_submodule(name)
        except AttributeError:
            continue
    return found


def has_virtual_heads(module: nn.Module) -> bool:
    """Return whether an attention module mixes or pairs heads."""
    return "q_mix" in module._modules or "paired_heads" in vars(module)


def is_mixing(name: str) -> bool:
    """Return whether a parameter or buffer with this name belongs to the mixing."""
    return not set(MIXING_MODULES).isdisjoint(name.split("."))


def attach_virtual_heads(model: PreTrainedModel) -> None:
    """Add virtual heads to the attention modules that the configuration lists, and a hook to the decoder."""
    config = decoder_config(model)
    modules = interleaved_attention(model)
    if not modules:
        raise ValueError(
            f"The model has none of its interleaved layers ({', '.join(config.interleaved_layers)}): keep more "
            "layers, or load it by the class that saved it."
        )
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
    # Blocks that share all their weights, as in Zamba, share the mixing's parameters (Transformers ties no buffers).
    weights = dict(model.named_parameters(remove_duplicate=False))
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    model.all_tied_weights_keys |= {name: tied[name] for name in tied if is_mixing(name) and name in weights}
    use_virtual_core(model)
    decoder = decoder_of(model)
    if decoder is not backbone_of(model):
        decoder.save_pretrained = do_not_save_part
    parameters = signature(type(decoder).forward).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]
    decoder._forward_pre_hooks[HOOK] = partial(prepare_decoder, names)
    decoder._forward_pre_hooks_with_kwargs[HOOK] = True


def do_not_save_part(*args, **kwargs) -> None:
    raise ValueError(
        "This is a part of a model with interleaved heads, and by itself it would load without them: save the whole "
        "model."
    )


def use_virtual_core(model: PreTrainedModel) -> None:
    """Let the decoder attend over virtual tokens, on the attention function that its configuration names.

    "sdpa" is computed by `sdpa_in_blocks` where the decoder supports FlashAttention, because only such decoders pass
    their window to an attention function. Configurations have no public setter for a single part of a model, so this
    sets the field that Transformers sets."""
    config = decoder_config(model)
    core = core_of(config._attn_implementation)
    if core == "sdpa" and decoder_of(model)._supports_flash_attn:
        core = SDPA_IN_BLOCKS
    config._attn_implementation_internal = register_core(core, differs_from_base(config))


def differs_from_base(config: PreTrainedConfig) -> bool:
    """Return whether a model computes something else than its plain base even before it is trained."""
    has_loaded_mixing = getattr(config, "has_loaded_mixing", False)  # by `modeling_iha.load_adapter`
    return has_loaded_mixing or config.interleaved_window is not None or config.virtual_heads == "paired"


def check_layers(model: PreTrainedModel) -> None:
    """Raise a ValueError where layers were added, removed or moved after interleaving.

    A load makes virtual heads for the listed names alone. Wrappers such as those of `torch.compile` pass attributes
    on, so that `hasattr` finds the heads of a listed module through its wrapper."""
    present = [module for module in backbone_of(model).modules() if has_virtual_heads(module)]
    listed = interleaved_attention(model)
    have_heads = all(hasattr(module, "q_mix") or hasattr(module, "paired_heads") for module in listed.values())
    if len(present) != len(listed) or not have_heads:
        raise ValueError(
            f"The model has {len(present)} attention modules with interleaved heads, which are not the {len(listed)} "
            f"that its configuration lists ({', '.join(listed)}): layers were added, removed or moved after "
            "interleaving, and a load would make other layers. Change the layers first, and interleave the heads then."
        )


# Classes by name


def interleaved_name(base: type, config: type | None = None) -> str:
    is_own = config is None or config is base.config_class
    return f"Interleaved{base.__name__}" if is_own else f"Interleaved{base.__name__}_of_{config.__name__}"


@keep_results
def interleaved_class(base: type, config: type[PreTrainedConfig] | None = None) -> type:
    """Return the class `InterleavedX` of a class X of Transformers, a model or a configuration.

    `InterleavedX_of_Y` is the class of X with a configuration class Y, the argument `config`, which is not X's own:
    some model types use the models of another type, as InternLM3 does Llama's."""
    fields: dict[str, Any] = {"__module__": __name__}
    if issubclass(base, PreTrainedConfig):
        return strict(type(interleaved_name(base), (ConfigMixin, base), fields))  # it collects the validators anew
    if config is None:
        return interleaved_class(base, base.config_class)
    fields["config_class"] = interleaved_class(config)
    fields["_auto_class"] = next((auto for auto, model in tasks(config).items() if model is base), None)
    # Trainer's label smoothing and pipelines look up the class's name in these mappings, and no public function adds
    # an entry. A second copy of this code writes the same entries.
    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        if base.__name__ in names.values():
            names[f"{MODEL_TYPE}_{config.model_type}"] = interleaved_name(base, config)
    return type(interleaved_name(base, config), (ModelMixin, base), fields)


def base_class(interleaved: type) -> type:
    """Return the class of Transformers of which a class is made, also where FSDP2 made a subclass of that."""
    return next(each for each in interleaved.__mro__ if each.__module__.startswith("transformers."))


def tasks(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """Return the models of Transformers for a class of configurations, by the names of their Auto classes."""
    models = {name: getattr(transformers, name)._model_mapping.get(config_class, None) for name in AUTO_CLASSES}
    return {name: model for name, model in models.items() if isinstance(model, type)}


def register_models(config_class: type[PreTrainedConfig]) -> None:
    """Let the Auto classes build the models of an interleaved configuration; generic task heads need this."""
    for name, model in tasks(config_class).items():
        auto_class = getattr(transformers, name)
        auto_class.register(interleaved_class(config_class), interleaved_class(model, config_class), exist_ok=True)


def __getattr__(name: str) -> type:
    """Make `InterleavedX` where Transformers or pickle look it up in this file."""
    base_name, _, config_name = name.removeprefix("Interleaved").partition("_of_")
    base = getattr(transformers, base_name, None)
    if not name.startswith("Interleaved") or base is None:
        raise AttributeError(f"{__name__} has no attribute {name}.")
    if issubclass(base, PreTrainedConfig):
        register_models(base)
        return interleaved_class(base)
    config = getattr(transformers, config_name) if config_name else base.config_class
    register_models(config)
    return interleaved_class(base, config)


# Transformers adds modules of remote code to `sys.modules`, but not to their package. dill, which `datasets` uses,
# looks them up there.
setattr(sys.modules[__package__], __name__.split(".")[-1], sys.modules[__name__])
