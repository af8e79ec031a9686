# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Run a decoder of Transformers with interleaved heads (IHA, Algorithm 1, with one RoPE position for each token).

Transformers' models call attention and make masks through two registries. Each attention core, such as "sdpa", gets a
second name in both, such as "iha_sdpa" (virtual_masks.py). Under that name a mask is over virtual tokens, and an
attention module with virtual heads attends over virtual tokens. Everything else is the base model's own: its
projections, RoPE, cache, generation and parallel plans.
"""

import os
import sys
from collections.abc import Iterable
from functools import cache, partial
from inspect import signature
from typing import Any

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
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .adapter_records import meet_adapter, watch_peft
from .attended import add_records, begin_forward, check_all_attended, check_attended, note_attended
from .cache_edge import WINDOW_EDGE, keep_window_edge, lacks_window_edge
from .cache_names import CACHE, IS_FROM_5_24, pop_cache
from .configuration_interleaved import FIELDS, MIXING_MODULES, TASKS, InterleavedConfig, config_class, part_class
from .first_keys import is_first_key_mask
from .interleaving import token_attentions
from .mixed_heads import MixedHeads
from .mixing import HeadCollapse, HeadMixing, set_initial_scale
from .mixing_scale import note_scale
from .paged_requests import PagedRequests, init_requests
from .pairing import PairedHeads
from .virtual_core import PASS_TO_THE_MODEL, virtual_attention
from .virtual_heads import virtual_heads_class
from .virtual_masks import (
    CHANGED,
    CORES,
    check_causal,
    core_of,
    is_visible,
    mask_over_virtual_tokens,
    register_masks,
)


# Trainer's label smoothing, pipelines and Transformers' server look up models in these mappings, and no public
# function adds an entry. Two copies of this code write the same entries.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["interleaved"] = "InterleavedForCausalLM"
MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES["interleaved"] = "InterleavedForMultimodalLM"

# PyTorch numbers hooks per process, so equal models would get different hashes in `datasets`. A fixed name avoids
# this. Only the copy of this code that interleaved a module hooks it, so one name is enough.
HOOK = "interleaving"
LOADED_MIXING = "has_loaded_mixing"  # attribute of a model whose mixing `load_adapter` loaded
ABSENT_FROM_OLD_CHECKPOINTS = rf"({'|'.join(MIXING_MODULES)})\.weight_(start|scale)$"


def register_core(core: str, is_changed: bool = False) -> str:
    """Register attention and masks over virtual tokens on a core of Transformers, and return their name.

    A model that is changed from its base gets another name (see `differs_from_base` and `changed_attention`)."""
    name = register_masks(core)
    if not is_changed:
        ALL_ATTENTION_FUNCTIONS.register(name, partial(noted_attention, core))
        return name
    changed_name = CHANGED + name
    CORES[changed_name] = core
    ALL_MASK_ATTENTION_FUNCTIONS.register(changed_name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    ALL_ATTENTION_FUNCTIONS.register(changed_name, partial(changed_attention, core))
    return changed_name


def changed_attention(core: str, module: Any, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call `noted_attention`, or raise a RuntimeError in a model without interleaved heads.

    TRL loads a reference model from `_name_or_path` and gives it the `attn_implementation` of the trained model. If
    that model was interleaved in place, the path leads to the plain base, so a model without interleaved heads calls
    this core. Its outputs differ beyond a window, and from paired heads and a loaded mixing at every length."""
    config = getattr(module, "config", None)
    if config is not None and not hasattr(config, "num_pseudo_heads"):
        raise RuntimeError(
            "This reference model is the plain base, and the trained model has paired heads, a window of interleaved "
            "heads, or a mixing that load_adapter loaded: their outputs differ. Pass ref_model (another such copy; "
            "GRPO takes none), or save the model and train what from_pretrained loads, with trust_remote_code=True "
            "for the trainer too."
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
    requests = kwargs.pop("paged_requests", None)
    if requests is not None:
        _check_pages(requests, module, key, value, attention_mask)
        requests.attended.add(module.layer_idx)
        attend = partial(requests.attend, attend, module.layer_idx)
    if virtual_heads_class(module) is not None:
        note_attended(module)
    return attend(query, key, value, attention_mask, **kwargs)


def _check_pages(
    requests: PagedRequests, module: Any, key: torch.Tensor, value: torch.Tensor, attention_mask: Any
) -> None:
    """Raise a NotImplementedError if the attention call of a layer cannot be served from pages."""
    # Anything but the placeholder of `PagedRequests`
    has_own_mask = attention_mask is None or attention_mask.numel() != 1
    if key.shape != value.shape or has_own_mask or module.layer_idx in requests.attended:
        raise NotImplementedError(
            "Continuous batching calls attention once in a layer, with values as wide as keys and no mask of its own, "
            f"and {type(module).__name__} does not. Use generate, which takes batches too."
        )


class InterleavedMixin:
    """Add virtual heads to a model of Transformers: `interleaved_class` places this mixin before the model's class."""

    def token_attentions(self, attentions: tuple[torch.Tensor, ...], num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return attention maps over tokens, as the method of this name of [`IHAModel`] does."""
        return token_attentions(attentions, num_tokens, [self.config.virtual_heads == "paired"] * len(attentions))

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        check_no_tensor_parallelism(config)
        super().__init__(config, *args, **kwargs)
        attach_virtual_heads(self)
        self.init_weights()  # of the mixing alone: the base model's are done

    def set_attn_implementation(self, *args, **kwargs):
        """Set the core of attention, and make it attend over virtual tokens in the decoder."""
        super().set_attn_implementation(*args, **kwargs)
        # Transformers passed the name of our core to all models within this one, vision towers too.
        for config in configs(self.modules()):
            if name := config._attn_implementation:
                set_core(config, core_of(name))
        use_virtual_cores(self)

    def initialize_weights(self):
        # This comes before `super()`, because a nested plain decoder would mark the mixing as initialized without
        # initializing it.
        for module in self.modules():
            if isinstance(module, (HeadMixing, HeadCollapse)) and not getattr(module, "_is_hf_initialized", False):
                module.init_mechanism(self.config)
                module._is_hf_initialized = True
        super().initialize_weights()

    def save_pretrained(self, *args, **kwargs):
        check_layers(self)
        note_scale(self, [self.config])
        return super().save_pretrained(*args, **kwargs)

    def meet_adapter(self, tuner: Any, config: Any):
        """Check an adapter of this model, and make its configuration record the model (see `watch_peft`)."""
        meet_adapter(self, tuner, config)

    def __reduce__(self) -> tuple:
        return unpickled_model, (type(self).__name__, self.config.model_type), self.__getstate__()

    def __setstate__(self, state: dict):
        super().__setstate__(state)
        use_virtual_cores(self)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        """Return the name under which the requested core attends over virtual tokens."""
        core = None if attn_implementation is None else core_of(attn_implementation)
        core = super()._check_and_adjust_attn_implementation(core, *args, **kwargs)
        return register_core(core, differs_from_base(self))

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

    # Transformers decides the next three by a class's name or by its module's source code, so the base model's class
    # is asked.
    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return base_model_class(cls)._supports_default_dynamic_cache()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return base_model_class(cls)._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return base_model_class(cls)._can_set_experts_implementation()

    @classmethod
    def is_custom_code(cls) -> bool:
        return False  # The weights of a checkpoint are renamed on load, as for the base model.

    @classmethod
    def is_backend_compatible(cls) -> bool:
        return False  # The paged caches of vLLM and SGLang hold one key for each token.


def check_no_tensor_parallelism(config: PreTrainedConfig) -> None:
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
    """Return the modules that hold all interleaved attention, from the model to the smallest.

    For `layers.0.self_attn` and `layers.3.self_attn` these are the model, its backbone and the `layers` of that."""
    backbone = backbone_of(model)
    names = [name.split(".") for name in model.config.interleaved_layers]
    common = os.path.commonprefix(names)  # it takes any sequences, here lists of the parts of names
    prefixes = [".".join(common[:depth]) for depth in range(len(common) + 1)]
    return [model] + [backbone.get_submodule(prefix) for prefix in prefixes]


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text decoder, the smallest model of Transformers that holds all interleaved attention."""
    return [module for module in holders(model) if isinstance(module, PreTrainedModel)][-1]


def attach_virtual_heads(model: PreTrainedModel) -> None:
    """Add virtual heads and hooks to the attention modules listed in `interleaved_layers`.

    Virtual heads are mixing weights, or none where the heads are paired."""
    config = model.config
    backbone = backbone_of(model)
    config.interleaved_layers = {
        name: counts for name, counts in config.interleaved_layers.items() if not is_cut_off(backbone, name)
    }
    if not config.interleaved_layers:
        raise ValueError("The first num_hidden_layers layers include no interleaved one: keep more layers.")
    _share_fields(model)
    for name, head_counts in config.interleaved_layers.items():
        module = backbone.get_submodule(name)
        # The decoder of a generic task head is a model of this package, and has its virtual heads already.
        if virtual_heads_class(module) is None:
            _add_virtual_heads(module, head_counts, config)
    _tie_mixing(model)
    use_virtual_cores(model)
    _install_decoder_hooks(decoder_of(model))


def _share_fields(model: PreTrainedModel) -> None:
    """Give the configurations of a model, and of the models within it, the fields that attention and masks read."""
    for config in virtual_configs(model):
        for field in FIELDS:
            setattr(config, field, getattr(model.config, field, None))  # older checkpoints name no `virtual_heads`
        if not hasattr(config, "interleaved_layers"):
            config.__class__ = part_class(type(config))


def _add_virtual_heads(module: nn.Module, head_counts: list[int], config: PreTrainedConfig) -> None:
    """Add to an attention module what makes its virtual tokens, and a hook that checks that it attends over them.

    `head_counts` are the numbers of query, key and value heads."""
    add_records(module)
    module._forward_hooks[HOOK] = _check_attention
    module._forward_hooks_with_kwargs[HOOK] = True
    # CODEPATH: decoders of `pair_heads` are paired, those of `interleave_heads` mixed.
    if config.virtual_heads == "paired":
        module.virtual_heads = PairedHeads  # these have no mixing
        return
    module.virtual_heads = MixedHeads
    num_heads, num_key_heads, num_value_heads = head_counts
    module.q_mix = HeadMixing(num_heads, config.num_pseudo_heads)
    module.k_mix = HeadMixing(num_key_heads, config.num_pseudo_heads)
    module.v_mix = HeadMixing(num_value_heads, config.num_pseudo_heads)
    module.collapse = HeadCollapse(num_heads, config.num_pseudo_heads, config.pseudo_collapse)
    set_initial_scale(module, config.mixing_scale)


def _tie_mixing(model: PreTrainedModel) -> None:
    """Tie the mixing weights of blocks that share all their weights, such as those of Zamba."""
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    weights = dict(model.named_parameters(remove_duplicate=False))  # Transformers ties no buffers
    for name, source in tied.items():
        if is_mixing(name) and name in weights:
            model.all_tied_weights_keys[name] = source


def _install_decoder_hooks(decoder: PreTrainedModel) -> None:
    """Install the hooks that prepare a decoder's arguments and check that its attention modules attended."""
    parameters = signature(decoder.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    # Gemma 4 crops the mask's rows to `logits_to_keep` tokens, but here the rows are virtual tokens. `None` prevents
    # this.
    replaced = {"logits_to_keep": None} if "logits_to_keep" in names else {}
    interleaved = {}
    for name, module in decoder.named_modules():
        if virtual_heads_class(module) is not None:
            interleaved[name] = module
    decoder._forward_pre_hooks[HOOK] = partial(_prepare_decoder, interleaved, names, replaced)
    decoder._forward_pre_hooks_with_kwargs[HOOK] = True
    decoder._forward_hooks[HOOK] = partial(_check_decoder, interleaved)


def remove_hooks(*modules: nn.Module) -> None:
    """Remove the hooks that `attach_virtual_heads` gave modules."""
    for module in modules:
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            getattr(module, kind).pop(HOOK, None)
            getattr(module, f"{kind}_with_kwargs").pop(HOOK, None)


def virtual_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configurations read by virtual attention and its masks.

    Those of vision towers are not among them."""
    return configs([*holders(model), *interleaved_attention(model).values()])


def interleaved_attention(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the attention modules with virtual heads, mixed or paired, by their names in the model without a head."""
    backbone = backbone_of(model)
    names = [name for name in model.config.interleaved_layers if not is_cut_off(backbone, name)]
    return {name: backbone.get_submodule(name) for name in names}


def check_layers(model: PreTrainedModel) -> None:
    """Raise a ValueError where layers were added, removed or moved after interleaving.

    A load makes virtual heads for the names in `interleaved_layers` alone, and would make the other layers plain."""
    # Wrappers such as those of `torch.compile` change names and pass attributes on. So the modules are counted by
    # attributes of their own, and the listed ones may have the attribute from what they wrap.
    present = [module for module in backbone_of(model).modules() if "virtual_heads" in vars(module)]
    listed = interleaved_attention(model)
    if len(present) != len(listed) or not all(hasattr(module, "virtual_heads") for module in listed.values()):
        raise ValueError(
            f"The model has {len(present)} attention modules with interleaved heads, which are not the {len(listed)} "
            f"that its configuration lists ({', '.join(listed)}): layers were added, removed or moved after "
            "interleaving, and a load would make other layers. Change the layers first, and interleave the heads then."
        )


def is_cut_off(model: nn.Module, name: str) -> bool:
    """Return whether a name is that of a layer after the last layer of a model."""
    module = model
    for part in name.split("."):
        if isinstance(module, nn.ModuleList) and int(part) >= len(module):
            return True
        module = getattr(module, part, None)
    return False


def use_virtual_cores(model: PreTrainedModel) -> None:
    """Make the decoder attend over virtual tokens, on the cores that its configurations name."""
    for config in virtual_configs(model):
        set_core(config, register_core(core_of(config._attn_implementation), differs_from_base(model)))


def differs_from_base(model: PreTrainedModel) -> bool:
    """Return whether a model is known to compute something other than its base.

    Mixing that was trained since interleaving does not count, because its values are not read."""
    has_paired_heads = getattr(model.config, "virtual_heads", None) == "paired"  # older checkpoints lack the field
    has_loaded_mixing = getattr(model, LOADED_MIXING, False)
    return model.config.interleaved_window is not None or has_paired_heads or has_loaded_mixing


def set_core(config: PreTrainedConfig, core: str) -> None:
    """Set the attention core of one configuration, but not those of configurations within it.

    The public `set_attn_implementation` sets cores of vision towers too, checks them by their names, and in a model of
    `interleave_heads` calls this. A configuration has no public setter; this is the field that Transformers sets."""
    config._attn_implementation_internal = core


def _check_attention(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
    """Raise a RuntimeError where a module attended without its virtual heads, or with a cache that lacks keys."""
    check_attended(module)
    _check_cache(module, [*args, *kwargs.values()])


def _check_cache(module: nn.Module, inputs: list) -> None:
    """Raise a RuntimeError for a cache with earlier tokens that does not keep the token just before the window."""
    window = getattr(module.config, "sliding_window", None)
    if not window:
        return
    for past in inputs:
        if not isinstance(past, Cache) or module.layer_idx >= len(past.layers):
            continue  # The last layers of a model may share the cache of earlier ones.
        layer = past.layers[module.layer_idx]
        # The first tensor holds the hidden states, [batch, N, hidden_size].
        length = next(states.shape[1] for states in inputs if isinstance(states, torch.Tensor))
        if lacks_window_edge(layer, window) and layer.get_seq_length() > length:
            raise RuntimeError(
                f"The cache keeps {window} tokens, and windows of interleaved heads reach one more. forward was "
                "called directly, which does not prepare the cache: call the model or its decoder itself."
            )


def _check_decoder(interleaved: dict[str, nn.Module], decoder: PreTrainedModel, args: tuple, output: Any) -> None:
    """Raise a RuntimeError where attention modules, by their names, were replaced or bypassed."""
    present = {name: module for name, module in interleaved.items() if not is_cut_off(decoder, name)}
    check_all_attended(decoder, present)


def is_mixing(name: str) -> bool:
    """Return whether a parameter with this name belongs to the mixing."""
    return not set(MIXING_MODULES).isdisjoint(name.split("."))


def _prepare_decoder(
    interleaved: dict[str, nn.Module],
    names: list[str],
    replaced: dict,
    decoder: PreTrainedModel,
    args: tuple,
    kwargs: dict,
) -> tuple[tuple, dict]:
    """Prepare the arguments of a decoder's forward: its cache, a user's mask, and the pages of continuous batching.

    `interleaved` are the attention modules by their names, `names` those of the positional arguments, and `replaced`
    replaces keyword arguments."""
    begin_forward(decoder, interleaved.values())
    named = dict(zip(names, args))
    args = args[len(names) :]
    kwargs = dict(**named, **kwargs) | replaced
    cache = pop_cache(kwargs)
    if isinstance(cache, PagedAttentionCache):  # continuous batching
        requests = PagedRequests(decoder, cache, **kwargs)
        return args, kwargs | {"paged_requests": requests, "attention_mask": requests.attention_mask}
    check_causal(decoder.config, **kwargs)
    if cache is None:
        cache = _new_cache(decoder, kwargs.get("use_cache"))
    keep_windows(decoder, cache)
    if cache is not None:
        kwargs[CACHE] = cache
    is_users_mask = _is_users_mask(**kwargs)
    if is_users_mask:
        past = 0 if cache is None else cache.get_seq_length()
        mask = kwargs["attention_mask"]
        _check_no_window(decoder, mask)
        kwargs["attention_mask"] = mask_over_virtual_tokens(mask, decoder.config.num_pseudo_heads, past, decoder.dtype)
    _check_own_window(decoder, next(iter(interleaved.values())), cache, kwargs.get("attention_mask"), is_users_mask)
    return args, kwargs


def _new_cache(decoder: PreTrainedModel, use_cache: bool | None) -> Cache | None:
    """Create the cache of a call to which none is given, or return `None` to leave that to the base model.

    Only a base with windows needs it created here, because `keep_windows` changes it before the call."""
    if use_cache is None:
        use_cache = getattr(decoder.config, "use_cache", False)
    # With activation checkpointing the base makes no cache. We must not make one either, because Transformers finds
    # packed documents only in calls without a cache. From 5.24 on nothing is checkpointed without gradients.
    is_checkpointed = getattr(decoder, "gradient_checkpointing", False) and decoder.training
    if IS_FROM_5_24:
        is_checkpointed = is_checkpointed and torch.is_grad_enabled()
    # RecurrentGemma resets its states where it makes a cache.
    makes_cache = use_cache and not is_checkpointed and not decoder._is_stateful
    return DynamicCache(config=decoder.config) if makes_cache and _base_window(decoder) else None


def _is_users_mask(attention_mask: Any = None, input_ids: Any = None, inputs_embeds: Any = None, **kwargs) -> bool:
    """Return whether `attention_mask` is a user's: [batch, 1, N, K] over tokens, or of a shape that is refused later.

    A mask with as many rows as tokens is the user's. Masks of an enclosing model, or of `generate` with a static
    cache, already have P rows per token."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim == 2:
        return False
    if attention_mask.ndim != 4:
        return True  # `mask_over_virtual_tokens` refuses it
    inputs = inputs_embeds if input_ids is None else input_ids
    return inputs is not None and attention_mask.shape[2] == inputs.shape[1]


def _check_no_window(decoder: PreTrainedModel, mask: torch.Tensor) -> None:
    """Raise a ValueError for a user's mask [batch, 1, N, K] that would have to hold the window of the base model.

    Such a mask hides a token with all its pseudo-heads, and the model's own window does not (see `virtual_mask`). The
    difference is 0 at the exact start, and appears when the mixing learns."""
    window = _base_window(decoder)
    if window and mask.shape[-1] > window:
        raise ValueError(
            f"attention_mask [batch, 1, queries, keys] has {mask.shape[-1]} keys, more than the window of {window}: a "
            "mask over tokens cannot hold the window of interleaved heads. Pass attention_mask [batch, tokens], or "
            "position_ids that restart at each document."
        )


def _check_own_window(
    decoder: PreTrainedModel, module: nn.Module, cache: Cache | None, attention_mask: Any, is_users: bool
) -> None:
    """Raise a ValueError for a mask in which a layer cannot find a query's own key (see `in_window`).

    It concerns decoders whose interleaved layers, of which `module` is one, have a window of their own. Such a layer
    finds the own keys by a guess that needs three things:
    - A user's mask has a column for each token so far, dropped ones too, or for each place of a static cache.
    - A user's mask shows each token to itself, or shows it nothing.
    - In a static cache no mask shows later keys, as that of an image does.
    Traced masks are not checked: they have no values to look at."""
    window = decoder.config.interleaved_window
    if not window:
        return
    cache = getattr(cache, "self_attention_cache", cache)  # that of a decoder beside an encoder
    layers = getattr(cache, "layers", ())
    layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    is_static = getattr(layer, "is_compileable", False)
    num_pseudo_heads = decoder.config.num_pseudo_heads
    masks = attention_mask.values() if isinstance(attention_mask, dict) else [attention_mask]
    for mask in masks:
        is_dense = isinstance(mask, torch.Tensor) and mask.ndim == 4 and not is_first_key_mask(mask)
        if not is_dense or is_tracing(mask):
            continue
        length, width = mask.shape[-2:]
        if is_users:
            num_tokens = length // num_pseudo_heads
            num_keys = num_tokens if layer is None else sum(cache.get_mask_sizes(num_tokens, module.layer_idx))
            _check_num_keys(width // num_pseudo_heads, num_keys)
        if width <= max(length, window * num_pseudo_heads):
            continue  # no other columns than those of the own keys, or the window reaches all
        # A mask of Transformers' shows one new token no later key. Reading it would make a GPU wait.
        if is_static and (is_users or length > num_pseudo_heads):
            _check_shows_none_later(mask, int(layer.get_seq_length()) * num_pseudo_heads)
        if is_users:
            _check_shows_own(mask, int(layer.get_seq_length()) * num_pseudo_heads if is_static else width - length)


def _check_num_keys(given: int, expected: int) -> None:
    """Raise a ValueError for a user's mask without a key for each token so far (each place of a static cache)."""
    if given != expected:
        raise ValueError(
            f"attention_mask [batch, 1, queries, keys] has {given} keys, and {expected} are needed: "
            f"{PASS_TO_THE_MODEL}"
        )


def _check_shows_none_later(mask: torch.Tensor, past: int) -> None:
    """Raise a ValueError for a mask that shows a query keys after its own, where `past` keys come before the first."""
    own = torch.arange(past, past + mask.shape[2], device=mask.device)[:, None]
    is_later = torch.arange(mask.shape[3], device=mask.device) > own
    if (is_visible(mask) & is_later).any():
        raise ValueError(
            "attention_mask shows later tokens, as it may for images, and the interleaved layers have a window of "
            "their own, which a static cache would misplace. Use the default cache."
        )


def _check_shows_own(mask: torch.Tensor, past: int) -> None:
    """Raise a ValueError for a mask that shows a query keys, but not its own; `past` keys come before the first."""
    visible = is_visible(mask)
    own = torch.arange(past, past + mask.shape[2], device=mask.device)[:, None]
    is_own = torch.arange(mask.shape[3], device=mask.device) == own
    if (visible.any(dim=-1) & ~(visible & is_own).any(dim=-1)).any():
        raise ValueError(
            "attention_mask hides a token from itself and shows it others: the window of the interleaved layers "
            "would be misplaced. Show each token to itself, or hide all tokens from it."
        )


def _base_window(decoder: PreTrainedModel) -> int | None:
    """Return the window of the base model in tokens, or `None`."""
    return getattr(decoder.config.get_text_config(decoder=True), "sliding_window", None)


def keep_windows(decoder: PreTrainedModel, cache: Cache | None) -> None:
    """Make the sliding layers of a cache keep the token just before their window, which virtual tokens still see.

    If the base model has no window and the interleaved layers have one, make their empty cache layers sliding ones.
    Only layers of the default cache are changed, not those of a static one."""
    layers = getattr(cache, "layers", ())  # caches of encoders have none
    if not layers:
        return
    window = _base_window(decoder)
    if window:
        # One mask serves all sliding layers, also those that are not interleaved.
        keep_window_edge(cache, window)
        return
    # CODEPATH: bases without windows, whose interleaved layers have one of their own (`sliding_window=...`).
    if not decoder.config.interleaved_window:
        return
    empty = {i for i, layer in enumerate(layers) if _is_empty_layer(layer)}
    if not empty:
        return
    for module in decoder.modules():
        if virtual_heads_class(module) is not None and getattr(module, "layer_idx", None) in empty:
            layers[module.layer_idx] = DynamicSlidingWindowLayer(decoder.config.interleaved_window + WINDOW_EDGE)


def _is_empty_layer(layer: Any) -> bool:
    """Return whether a cache's layer is a default one, without a window, that holds nothing yet."""
    return type(layer) is DynamicLayer and not layer.is_initialized


def base_model_class(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class of Transformers from which `interleaved_class` made a class."""
    # The bases are (`InterleavedMixin`, the base model's class). FSDP2 makes a subclass of the interleaved class. For
    # it this returns the interleaved class, whose methods call this function again and so reach the base.
    return model_class.__bases__[1]


@cache
def interleaved_class(name: str, config_type: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return the class "InterleavedForCausalLM", or of another task, for a class of configurations.

    `config_type` is a subclass of the base model's own (see configuration_interleaved.py)."""
    watch_peft()
    auto_class = f"AutoModel{name.removeprefix('Interleaved').removeprefix('Model')}"
    base = getattr(transformers, auto_class)._model_mapping.get(config_type.__base__, None)
    if base is None:
        raise ValueError(f"Transformers has no {auto_class} of {config_type.__base__.model_type!r}.")
    headless = transformers.AutoModel._model_mapping.get(config_type.__base__, None)
    if headless is not None and name != "InterleavedModel":  # Generic task heads build their decoder by this mapping.
        decoder = interleaved_class("InterleavedModel", config_type)
        transformers.AutoModel.register(config_type, decoder, exist_ok=True)
    attributes = {"config_class": config_type, "_auto_class": auto_class, "__module__": __name__}
    # Checkpoints of earlier versions lack what `Mixing.init_weight` then sets.
    may_be_missing = [*(base._keys_to_ignore_on_load_missing or ()), ABSENT_FROM_OLD_CHECKPOINTS]
    attributes["_keys_to_ignore_on_load_missing"] = may_be_missing
    attributes["__qualname__"] = f"{name}[{base.__name__}]"
    new_class = type(name, (InterleavedMixin, base), attributes)
    # A model's `__init__` registers by `str(class)` what `output_hidden_states` returns. A model that is interleaved
    # in place was built as another class, so we register ours here. From 5.24 on the registry takes models as its
    # keys and not names; the method of `dict` works in every version.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(new_class), new_class._can_record_outputs)
    return new_class


def register_models(config_type: type[PreTrainedConfig]) -> None:
    """Make the Auto classes take the models of a class of configurations from this code."""
    for task in TASKS:
        try:
            model_class = interleaved_class(f"Interleaved{task}", config_type)
        except ValueError:
            continue  # Transformers has no such head of this base.
        getattr(transformers, f"AutoModel{task}").register(config_type, model_class, exist_ok=True)


def unpickled_model(name: str, base_model_type: str) -> PreTrainedModel:
    """Return a model without modules, whose state pickle restores afterwards.

    Pickle cannot look up the class itself, which is made at run time."""
    return object.__new__(interleaved_class(name, config_class(base_model_type)))


class InterleavedModel(PreTrainedModel):
    """Name a model without a head in `auto_map`. This class and its subclasses have no instances.

    A loaded model is of another class of the same name, which `interleaved_class` makes of the mixin and the class of
    its base, such as (InterleavedMixin, LlamaForCausalLM). The methods below pass calls on to that class. This one is
    a `PreTrainedModel` because vLLM and SGLang accept nothing else and call `is_backend_compatible`."""

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


# Transformers adds modules of remote code to `sys.modules`, but not to their package. dill, which `datasets` uses,
# looks them up there.
for name in ("configuration_interleaved", "modeling_interleaved"):
    setattr(sys.modules[__package__], name, sys.modules[f"{__package__}.{name}"])
