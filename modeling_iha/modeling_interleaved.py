# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Run a decoder of Transformers with interleaved heads (IHA, Algorithm 1, with one RoPE position for each token).

Transformers' models call attention and make masks through two registries. Each attention core, such as "sdpa", gets a
second name in both, such as "iha_sdpa" (virtual_masks.py). Under that name a mask is over virtual tokens, and an
attention module with mixing weights attends over virtual tokens. All else is the base model's own: its projections,
RoPE, cache, generation and parallel plans.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, partial
from inspect import signature
from threading import local
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from .adapter_records import meet_adapter, watch_peft
from .cache_edge import keep_window_edge, lacks_window_edge
from .cache_names import CACHE, pop_cache
from .configuration_interleaved import FIELDS, MIXING_MODULES, TASKS, InterleavedConfig, config_class, part_class
from .head_mixing import HeadCollapse, HeadMixing, build_at
from .interleaving import token_attentions
from .mixed_heads import MixedHeads
from .mixing_scale import note_scale
from .paged_requests import PagedRequests, init_requests
from .pairing import PairedHeads
from .virtual_core import virtual_attention, virtual_heads
from .virtual_masks import CORES, WINDOWED, core_of, expand_mask, register_masks


# By these names Trainer's label smoothing shifts the labels, and pipelines and Transformers' server know the models.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["interleaved"] = "InterleavedForCausalLM"
MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["interleaved"] = "InterleavedForMultimodalLM"

# The numbers by which PyTorch names hooks count up in a process, and equal models would hash unequal (datasets).
HOOK = "interleaving"
ABSENT_FROM_OLD_CHECKPOINTS = rf"({'|'.join(MIXING_MODULES)})\.weight_(start|scale)$"


class Attended(local):
    """Hold what attended through `virtual_attention`, in each thread: threads may share a model.

    Dynamo loses what compiled code writes here, and keeps attributes of modules (see `noted_attention`)."""

    module: nn.Module | None = None  # the last one, until it is checked

    def __init__(self):
        self.by_decoder = WeakKeyDictionary[nn.Module, set[nn.Module]]()  # those checked in its present forward


ATTENDED = Attended()
REPLACED = (
    "{} has interleaved heads and attended without them: the module, its forward or its attention core was replaced. "
    "Use the model without the tool that did so, or apply remove_interleaving first."
)


def register_core(core: str, window: int | None = None) -> str:
    """Register attention and masks over virtual tokens on a core of Transformers, and return their name.

    A model with a `window` that its base lacks has a name of its own (see `windowed_attention`)."""
    name, attention = register_masks(core), noted_attention
    if window is not None:
        masks = ALL_MASK_ATTENTION_FUNCTIONS[name]
        name, attention = WINDOWED + name, windowed_attention
        CORES[name] = core
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, masks)
    ALL_ATTENTION_FUNCTIONS.register(name, partial(attention, core))
    return name


def windowed_attention(core: str, module: Any, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call `noted_attention`, or raise a RuntimeError in a model without interleaved heads.

    TRL's trainers load the reference of a model by its `_name_or_path`, with the name of its core. Where the model was
    interleaved in place that is the plain base, without the window: it would compute something else."""
    config = getattr(module, "config", None)
    if config is not None and not hasattr(config, "num_pseudo_heads"):
        raise RuntimeError(
            "This reference model is the plain base, and the trained model has interleaved heads with a window: their "
            "outputs differ beyond it. Pass ref_model (another interleaved copy), or save the interleaved model and "
            "train what from_pretrained loads, with trust_remote_code=True for the trainer too."
        )
    return noted_attention(core, module, *args, **kwargs)


def noted_attention(
    core: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call `virtual_attention`, and note that interleaved attention went through it."""
    attend = partial(virtual_attention, core, module)
    if (requests := kwargs.pop("paged_requests", None)) is not None:
        _check_pages(requests, module, key, value, attention_mask)
        attend = partial(requests.attend, attend, module.layer_idx)
    if virtual_heads(module) is not None:
        module.attended = True
        if not torch.compiler.is_dynamo_compiling():
            ATTENDED.module = module
    return attend(query, key, value, attention_mask, **kwargs)


def _check_pages(
    requests: PagedRequests, module: Any, key: torch.Tensor, value: torch.Tensor, attention_mask: Any
) -> None:
    """Raise a NotImplementedError where pages would hold something else than the layer attends to."""
    if key.shape != value.shape or attention_mask.numel() != 1 or module.layer_idx in requests.attended:
        raise NotImplementedError(
            "Continuous batching calls attention once in a layer, with values as wide as keys and no mask of its own, "
            f"and {type(module).__name__} does not. Use generate, which takes batches too."
        )
    requests.attended.add(module.layer_idx)


class InterleavedPreTrainedModel:
    """Add mixing weights to a model of Transformers, whose class stands behind this one."""

    def token_attentions(self, attentions: tuple[torch.Tensor, ...], num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return attention maps over tokens, as the method of this name of [`IHAModel`] does."""
        return token_attentions(attentions, num_tokens, [self.config.virtual_heads == "paired"] * len(attentions))

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        check_all_heads(config)
        super().__init__(config, *args, **kwargs)
        attach_mixing(self)
        self.init_weights()  # of the mixing alone: the base model's are done

    def set_attn_implementation(self, *args, **kwargs):
        """Set the core of attention, and have it attend over virtual tokens in the decoder."""
        super().set_attn_implementation(*args, **kwargs)
        use_virtual_cores(self)  # the models within are the base's own, and took its cores

    def initialize_weights(self):
        for module in self.modules():  # first, because a base decoder within leaves these as they are
            if isinstance(module, (HeadMixing, HeadCollapse)) and not getattr(module, "_is_hf_initialized", False):
                module.init_mechanism(self.config)
                module._is_hf_initialized = True
        super().initialize_weights()

    def save_pretrained(self, *args, **kwargs):
        note_scale(self, [self.config])
        return super().save_pretrained(*args, **kwargs)

    def meet_adapter(self, tuner: Any, config: Any):
        """Check an adapter of this model, and have its configuration record the model (see `watch_peft`)."""
        meet_adapter(self, tuner, config)

    def __reduce__(self) -> tuple:
        return unpickled_model, (type(self).__name__, self.config.model_type), self.__getstate__()

    def __setstate__(self, state: dict):
        super().__setstate__(state)
        use_virtual_cores(self)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        """Return the name under which the requested core attends over virtual tokens."""
        core = attn_implementation and core_of(attn_implementation)
        core = super()._check_and_adjust_attn_implementation(core, *args, **kwargs)
        return register_core(core, self.config.interleaved_window)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        prepared = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        keep_windows(decoder_of(self), model_kwargs.get(CACHE))
        if generation_config.is_assistant:
            model_kwargs[CACHE].activate_past_recording()  # the new layers too
        return prepared

    def init_continuous_batching(self, *args, **kwargs):
        """Start continuous batching as [`GenerationMixin`] does (see `init_requests`).

        Raise a NotImplementedError for a decoder that counts the positions of a row by itself."""
        decoder = decoder_of(self)
        if "position_ids" not in signature(decoder.forward).parameters:
            raise NotImplementedError(
                f"Continuous batching passes position_ids, which {type(decoder).__name__} does not take. Use "
                "generate, which takes batches too."
            )
        return init_requests(super().init_continuous_batching.__func__, self, decoder, *args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return cls.__bases__[1]._supports_default_dynamic_cache()  # which asks by the name of the class

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # Checkpoints are renamed on load as the base model's are.

    @classmethod
    def is_backend_compatible(cls) -> bool:
        return False  # The paged caches of vLLM and SGLang hold one key for each token.


def check_all_heads(config: PreTrainedConfig) -> None:
    """Raise a ValueError for tensor parallelism, which gives each process some of the heads that are mixed."""
    if (getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1) > 1:
        raise ValueError(
            "Tensor parallelism (tp_plan, tp_size) leaves each process some heads, and interleaving mixes all: load "
            "the model without it, and share it by FSDP2 (fsdp_size) or DistributedDataParallel."
        )


def configs(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Return the configurations that modules read, each once. Their cores may differ."""
    found = [vars(module).get("config") for module in modules]
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without a head. Llama 4's `base_model` is the model itself."""
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def holders(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that hold all interleaved attention, from the model to the smallest."""
    backbone, found = backbone_of(model), [model]
    names = [name.split(".") for name in model.config.interleaved_layers]
    common = os.path.commonprefix(names) if len(names) > 1 else names[0]
    return found + [backbone.get_submodule(".".join(common[:depth])) for depth in range(len(common) + 1)]


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text decoder, the smallest model of Transformers that holds all interleaved attention."""
    return [module for module in holders(model) if isinstance(module, PreTrainedModel)][-1]


def attach_mixing(model: PreTrainedModel) -> None:
    """Give the attention modules that the configuration names their mixing weights, and have them used."""
    config, backbone = model.config, backbone_of(model)
    config.interleaved_layers = {
        name: heads for name, heads in config.interleaved_layers.items() if not is_cut_off(backbone, name)
    }
    if not config.interleaved_layers:
        raise ValueError("None of the interleaved layers is among the first num_hidden_layers: keep more layers.")
    decoder = decoder_of(model)
    for each in virtual_configs(model):
        for field in FIELDS:
            setattr(each, field, getattr(config, field, None))  # older checkpoints name no `virtual_heads`
        if not hasattr(each, "interleaved_layers"):
            each.__class__ = part_class(type(each))
    for name, (num_heads, num_key_heads, num_value_heads) in config.interleaved_layers.items():
        module = backbone.get_submodule(name)
        if virtual_heads(module) is not None:
            continue  # A generic task head has a decoder of this package within.
        module.attended = module.was_traced = False  # see `noted_attention` and `_check_attention`
        module._forward_hooks[HOOK], module._forward_hooks_with_kwargs[HOOK] = _check_attention, True
        # CODEPATH: decoders of `pair_heads` are paired, those of `interleave_heads` mixed.
        module.virtual_heads = PairedHeads if config.virtual_heads == "paired" else MixedHeads
        if module.virtual_heads is PairedHeads:
            continue
        module.q_mix = HeadMixing(num_heads, config.num_pseudo_heads)
        module.k_mix = HeadMixing(num_key_heads, config.num_pseudo_heads)
        module.v_mix = HeadMixing(num_value_heads, config.num_pseudo_heads)
        module.collapse = HeadCollapse(num_heads, config.num_pseudo_heads, config.pseudo_collapse)
        build_at(module, config.mixing_scale)
    tied = model.get_expanded_tied_weights_keys(all_submodels=True).items()  # Zamba's blocks share all their weights
    weights = dict(model.named_parameters(remove_duplicate=False))  # Transformers ties no buffers
    model.all_tied_weights_keys |= {name: source for name, source in tied if is_mixing(name) and name in weights}
    use_virtual_cores(model)
    # Gemma 4 would leave out rows of a mask, which are of virtual tokens, for any number. It asks for cores by name.
    parameters = signature(decoder.forward).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    prepare = partial(_prepare_decoder, names, {"logits_to_keep": None} if "logits_to_keep" in names else {})
    decoder._forward_pre_hooks[HOOK], decoder._forward_pre_hooks_with_kwargs[HOOK] = prepare, True
    interleaved = {name: module for name, module in decoder.named_modules() if virtual_heads(module) is not None}
    decoder._forward_hooks[HOOK] = partial(_check_decoder, interleaved)


def remove_hooks(*modules: nn.Module) -> None:
    """Remove the hooks that `attach_mixing` gave modules."""
    for module in modules:
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            getattr(module, kind).pop(HOOK, None)
            getattr(module, f"{kind}_with_kwargs").pop(HOOK, None)


def virtual_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configurations that attention and masks over virtual tokens read, and no vision tower."""
    return configs([*holders(model), *interleaved_attention(model).values()])


def interleaved_attention(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the attention modules with mixing weights, by their names in the model without a head."""
    backbone = backbone_of(model)
    names = [name for name in model.config.interleaved_layers if not is_cut_off(backbone, name)]
    return {name: backbone.get_submodule(name) for name in names}


def is_cut_off(model: nn.Module, name: str) -> bool:
    """Return whether a name is of a layer behind the last one of a model."""
    module = model
    for part in name.split("."):
        if isinstance(module, nn.ModuleList) and int(part) >= len(module):
            return True
        module = getattr(module, part, None)
    return False


def use_virtual_cores(model: PreTrainedModel) -> None:
    """Have the decoder attend over virtual tokens, on the cores that its configurations name."""
    for each in virtual_configs(model):
        set_core(each, register_core(core_of(each._attn_implementation), model.config.interleaved_window))


def set_core(config: PreTrainedConfig, core: str) -> None:
    """Set the attention core of one configuration, and of none within it.

    The public `set_attn_implementation` sets cores of vision towers too, checks them by their names, and in a model of
    `interleave_heads` calls this. A configuration has no public setter; this is the field that Transformers sets."""
    config._attn_implementation_internal = core


def _check_attention(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    """Raise a RuntimeError where attention was computed without the mixing weights that stand beside it."""
    attended, module.attended = module.attended, False
    if torch.compiler.is_dynamo_compiling():
        _note_traced(module)
    else:
        attended, ATTENDED.module = attended or ATTENDED.module is module, None
        for modules in ATTENDED.by_decoder.values():
            modules.add(module)
    if not attended:
        raise RuntimeError(REPLACED.format(type(module).__name__))
    _check_cache(module, [*args, *kwargs.values()])


@torch.compiler.assume_constant_result
def _note_traced(module: nn.Module) -> bool:
    """Note, while Dynamo traces, that a compiled module attends. Compiled code cannot note it where it recomputes."""
    module.was_traced = True
    return True


def _check_cache(module: nn.Module, inputs: list) -> None:
    """Raise a RuntimeError for cached tokens without the one that only windows of virtual tokens reach."""
    window = getattr(module.config, "sliding_window", None)
    for past in [each for each in inputs if window and isinstance(each, Cache)]:
        layer = past.layers[module.layer_idx] if module.layer_idx < len(past.layers) else None  # shared by two layers
        length = next(each.shape[1] for each in inputs if isinstance(each, torch.Tensor))
        if lacks_window_edge(layer, window) and layer.get_seq_length() > length:
            raise RuntimeError(
                f"The cache keeps {window} tokens, and windows of interleaved heads reach one more, because forward "
                "was called directly: call the model or its decoder itself, which prepares the cache."
            )


def _check_decoder(interleaved: dict[str, nn.Module], decoder: PreTrainedModel, args: tuple, output: Any) -> None:
    """Raise a RuntimeError where attention modules, by their names, were replaced or passed by.

    Training may leave out layers at random, and generation the last ones (`assistant_early_exit`). A compiled module
    attended when it was traced, and no more is known of it."""
    is_traced = torch.compiler.is_dynamo_compiling()
    attended = None if is_traced else ATTENDED.by_decoder.pop(decoder, None)
    depth = getattr(decoder.config.get_text_config(decoder=True), "num_hidden_layers", None)
    drops_layers = decoder.training and getattr(decoder, "layerdrop", 0)
    for name, module in interleaved.items():
        if is_cut_off(decoder, name):
            continue
        with suppress(AttributeError):  # within a wrapper of its layer
            module = decoder.get_submodule(name)
        if virtual_heads(module) is None:  # a wrapper of the module, such as that of PEFT's adaption prompts
            module = next((each for each in module.modules() if virtual_heads(each) is not None), module)
        is_left_out = drops_layers or (depth and (getattr(module, "layer_idx", None) or 0) >= depth)
        is_known = attended is not None and not is_left_out
        if virtual_heads(module) is None or (is_known and not (module.was_traced or module in attended)):
            raise RuntimeError(REPLACED.format(f"{name} of {type(decoder).__name__}"))


def is_mixing(name: str) -> bool:
    """Return whether a parameter, by its name, is of the mixing."""
    return not set(MIXING_MODULES).isdisjoint(name.split("."))


def _prepare_decoder(
    names: list[str], fixed: dict, decoder: PreTrainedModel, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Keep what windows reach, in the cache that the decoder gets, or would make if the base model has windows.

    A user's mask [batch, 1, N, K] becomes one over virtual tokens."""
    if not torch.compiler.is_dynamo_compiling():
        ATTENDED.by_decoder[decoder] = set()
    args, kwargs = args[len(names) :], dict(**dict(zip(names, args)), **kwargs)
    kwargs |= fixed
    cache, mask = pop_cache(kwargs), kwargs.get("attention_mask")
    if isinstance(cache, PagedAttentionCache):  # continuous batching
        requests = PagedRequests(decoder, cache, **kwargs)
        return args, kwargs | {"paged_requests": requests, "attention_mask": requests.attention_mask}
    use_cache = kwargs.get("use_cache")
    use_cache = getattr(decoder.config, "use_cache", False) if use_cache is None else use_cache
    # RecurrentGemma resets its states where it makes a cache.
    if use_cache and not decoder._is_stateful and cache is None and _window(decoder):
        cache = DynamicCache(config=decoder.config)
    keep_windows(decoder, cache)
    if cache is not None:
        kwargs[CACHE] = cache
    inputs = [kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
    length = next((each.shape[1] for each in inputs if each is not None), None)
    # A model around the decoder, and `generate` with a static cache, give masks over virtual tokens.
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[2] == length:
        past = 0 if cache is None else cache.get_seq_length()
        kwargs["attention_mask"] = expand_mask(mask, decoder.config.num_pseudo_heads, past, decoder.dtype)
    return args, kwargs


def _window(decoder: PreTrainedModel) -> int | None:
    return getattr(decoder.config.get_text_config(decoder=True), "sliding_window", None)


def keep_windows(decoder: PreTrainedModel, cache: Cache | None) -> None:
    """Make the layers of a cache keep what windows of virtual tokens reach: one token more than the windows have."""
    config, layers = decoder.config, getattr(cache, "layers", ())  # caches of encoders have none
    if layers and (window := _window(decoder)):
        # One mask serves all sliding layers, also those that are not interleaved.
        keep_window_edge(cache, window)
    # CODEPATH: bases without windows, whose changed layers have one of their own (`sliding_window=...`).
    elif layers and config.interleaved_window:
        fresh = {i for i, layer in enumerate(layers) if type(layer) is DynamicLayer and not layer.is_initialized}
        for module in decoder.modules() if fresh else ():
            if virtual_heads(module) is not None and getattr(module, "layer_idx", None) in fresh:
                layers[module.layer_idx] = DynamicSlidingWindowLayer(config.interleaved_window + 1)


@cache
def interleaved_class(name: str, config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return the class "InterleavedForCausalLM", or of another task, for a class of configurations.

    `config_class` is a subclass of the base model's own (see configuration_interleaved.py)."""
    watch_peft()
    auto_class = f"AutoModel{name.removeprefix('Interleaved').removeprefix('Model')}"
    base = getattr(transformers, auto_class)._model_mapping.get(config_class.__base__, None)
    if base is None:
        raise ValueError(f"Transformers has no {auto_class} of {config_class.__base__.model_type!r}.")
    headless = transformers.AutoModel._model_mapping.get(config_class.__base__, None)
    if headless is not None and name != "InterleavedModel":  # Generic task heads build their decoder by this mapping.
        decoder = interleaved_class("InterleavedModel", config_class)
        transformers.AutoModel.register(config_class, decoder, exist_ok=True)
    attributes = {"config_class": config_class, "_auto_class": auto_class, "__module__": __name__}
    # Checkpoints of earlier versions lack what `Mixing.begin` then sets.
    may_be_missing = [*(base._keys_to_ignore_on_load_missing or ()), ABSENT_FROM_OLD_CHECKPOINTS]
    attributes["_keys_to_ignore_on_load_missing"] = may_be_missing
    return type(name, (InterleavedPreTrainedModel, base), attributes)


def register_models(config_class: type[PreTrainedConfig]) -> None:
    """Have the Auto classes take the models of a class of configurations from this code."""
    for task in TASKS:
        with suppress(ValueError):  # Transformers has no such head of this base.
            model_class = interleaved_class(f"Interleaved{task}", config_class)
            getattr(transformers, f"AutoModel{task}").register(config_class, model_class, exist_ok=True)


def unpickled_model(name: str, base_model_type: str) -> PreTrainedModel:
    """Return a model without modules; pickle fills it, and finds no class that is made at run time."""
    return object.__new__(interleaved_class(name, config_class(base_model_type)))


class InterleavedModel(PreTrainedModel):
    """Load a decoder without a head. `auto_map` names this class and its subclasses.

    The class of the model itself depends on the base type: see `interleaved_class`. A server takes a model of
    Transformers alone, and asks it whether it may replace the attention."""

    config_class = InterleavedConfig

    @classmethod
    def is_backend_compatible(cls) -> bool:
        raise NotImplementedError(
            "The paged caches of vLLM and SGLang hold one key for each token, and interleaved heads need P: for vLLM "
            "install the plugin vllm_iha and leave out --model-impl, or use generate of Transformers."
        )

    @classmethod
    def from_pretrained(cls, *args, config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
        return interleaved_class(cls.__name__, type(config)).from_pretrained(*args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
        return interleaved_class(cls.__name__, type(config))._from_config(config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class=None):
        """Do nothing; the Auto classes call this after they loaded remote code."""


class InterleavedForCausalLM(InterleavedModel): ...


class InterleavedForSequenceClassification(InterleavedModel): ...


class InterleavedForTokenClassification(InterleavedModel): ...


class InterleavedForQuestionAnswering(InterleavedModel): ...


class InterleavedForImageTextToText(InterleavedModel): ...


class InterleavedForMultimodalLM(InterleavedModel): ...


# Transformers puts remote code into `sys.modules` alone, and dill (datasets) finds it as an attribute of its package.
for name in ("configuration_interleaved", "modeling_interleaved"):
    setattr(sys.modules[__package__], name, sys.modules[f"{__package__}.{name}"])
