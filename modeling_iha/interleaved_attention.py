# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Attend over virtual tokens in a decoder of Transformers, and prepare its calls for this.

Transformers' models look up their attention function and their mask function by one name, such as "sdpa". This file
registers both under a second name, "iha_sdpa". (Most decoders get "iha_sdpa_in_blocks" for "sdpa", by
`use_virtual_core`.) A module with virtual heads then attends over virtual tokens, and any other module over tokens.
A pre-hook of the decoder, `prepare_call`, reads what a call declares once for all layers.

An `attention_mask` goes through these stages:

    1. A user gives [batch, K] in tokens, or [batch, heads, N, K].
    2. `interleaved_mask` makes one mask for all layers. It is flat, which is `None` or [batch, K] in tokens; or dense
       over virtual tokens, which is [batch, 1 or heads, N * P, K * P], or two of these along the heads: that of the
       other modules, then that of the interleaved ones. For FlexAttention it is a `BlockMask` or `LayerMasks`.
    3. `mask_of_interleaved_module` or `mask_of_plain_module` selects what a module needs of it.
    4. The core gets a mask over the tokens or virtual tokens that it attends to (`virtual_attention`).
"""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks, sliding_window_overlay
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from .interleaving import MixedHeads
from .sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from .sdpa_in_blocks import (
    Backend,
    additive,
    how_core_separates,
    is_for_any_length,
    mask_without_padding,
    read_call,
)
from .transformers_versions import CACHE, IS_FROM_5_24, pop_cache
from .virtual_tokens import (
    PREFIX,
    View,
    core_of,
    keep_window_edge,
    mask_over_virtual_tokens,
    takes_flat_mask,
    virtual_attention,
    virtual_mask,
)


# `sdpa_in_blocks` does not read these, so they are left out before they would be converted to virtual tokens.
UNREAD_BY_SDPA_IN_BLOCKS = ("position_ids", "cu_seq_lens_k", "max_length_k")


def attend_interleaved(
    core: str, module: nn.Module, query, key, value, attention_mask: Any, **kwargs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over virtual tokens where the module has virtual heads, and over tokens elsewhere.

    `core` is the attention function that computes it, such as "sdpa". The other arguments and the output are those of
    an attention function of Transformers, in tokens, but for a dense mask, which is over virtual tokens."""
    if core == SDPA_IN_BLOCKS:
        kwargs = {name: value for name, value in kwargs.items() if name not in UNREAD_BY_SDPA_IN_BLOCKS}
    if not has_virtual_heads(module):
        mask = mask_of_plain_module(attention_mask, module, query.shape[2])
        return attend_on_core(core, 1, module, query, key, value, mask, **kwargs)
    mask = mask_of_interleaved_module(attention_mask, module.config)
    # CODEPATH: a window of the interleaved layers alone.
    if module.config.interleaved_window is not None:
        kwargs["sliding_window"] = min(module.config.interleaved_window, kwargs.get("sliding_window") or math.inf)
        mask = mask_of_cached_keys(mask, module.config, query.shape[2], key.shape[2])
    heads = module.paired_heads if hasattr(module, "paired_heads") else MixedHeads.of_module(module, value)
    attend = partial(attend_on_core, core, heads.num_pseudo_heads)
    return virtual_attention(attend, module, heads, query, key, value, mask, **kwargs)


def attend_on_core(core: str, num_pseudo_heads: int, module: nn.Module, *args, **kwargs) -> tuple:
    """Call an attention function of Transformers with the module as the function has to see it.

    A flash function reads its name from the config. An attention sink is raised by log P: each token has P keys."""
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


class LayerMasks(BlockMask):
    """Be the `BlockMask` of interleaved layers, and hold that of the others."""

    def __init__(self, of_interleaved: BlockMask, of_others: BlockMask):
        for name, value in vars(of_interleaved).items():  # the arguments of its `__init__` depend on the version
            setattr(self, name, value)
        self.of_others = of_others

    def to(self, device: torch.device | str) -> "LayerMasks":
        return LayerMasks(super().to(device), self.of_others.to(device))


def interleaved_mask(core: str, *, config, mask_function: Callable, local_size: int | None = None, **kwargs) -> Any:
    """Return the mask of all attention modules of a decoder, flat in tokens or dense over virtual tokens.

    Where the interleaved ones have a window that others lack (`has_two_masks`), a dense mask holds that of the others
    and that of the interleaved ones, one behind the other along the heads. A `BlockMask` of FlexAttention, which
    cannot be cut to tokens, is a `LayerMasks` wherever there are others.

    Raise a ValueError for an attention function without a mask function: aligned at the first key, as SDPA is without
    a mask, the P queries of a new token would not see the cached ones. (vLLM asks for no masks.)"""
    if core not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"The attention function {core!r} has no mask function, which interleaved heads need: register one, such "
            f"as AttentionMaskInterface.register({core!r}, transformers.masking_utils.sdpa_mask)."
        )
    of_others = kwargs | {"config": config, "mask_function": mask_function, "local_size": local_size}
    make_mask_of_tokens = ALL_MASK_ATTENTION_FUNCTIONS[core]
    if not hasattr(config, "num_pseudo_heads"):  # that of a vision tower
        return make_mask_of_tokens(**of_others)
    if takes_flat_mask(core, **of_others):
        return virtual_mask(core, **of_others)  # the layer applies its window
    window = config.interleaved_window
    of_interleaved = of_others
    if window is not None:
        # CODEPATH: a window of the interleaved layers alone. Neither mask may be left out, because both are joined.
        of_others = of_others | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        sees = and_masks(mask_function, sliding_window_overlay(window))
        of_interleaved = of_others | {"mask_function": sees, "local_size": min(window, local_size or window)}
    mask = virtual_mask(core, **of_interleaved)
    if isinstance(mask, BlockMask):
        return LayerMasks(mask, make_mask_of_tokens(**of_others)) if has_other_modules(config) else mask
    if mask is None or not has_two_masks(config):  # some cores make no mask
        return mask
    # Both are over virtual tokens: `mask_of_plain_module` takes the mask of the others back to tokens.
    return torch.cat((virtual_mask(core, **of_others), mask), dim=1)


def has_other_modules(config: PreTrainedConfig) -> bool:
    """Return whether a decoder may have attention modules that are not interleaved: layers, or cross-attention."""
    is_partly_interleaved = len(config.interleaved_layers) < config.num_hidden_layers
    return is_partly_interleaved or getattr(config, "add_cross_attention", False)


def has_two_masks(config: PreTrainedConfig) -> bool:
    """Return whether a dense mask of a decoder is two, of the interleaved modules and of the others."""
    return config.interleaved_window is not None and has_other_modules(config)


def mask_of_interleaved_module(mask: Any, config: PreTrainedConfig) -> Any:
    """Return the mask of a module with virtual heads, from one of `interleaved_mask` or of `prepare_call`."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or not has_two_masks(config):
        return mask
    _, of_interleaved = mask.chunk(2, dim=1)
    return of_interleaved


def mask_of_plain_module(mask: Any, module: nn.Module, num_tokens: int) -> Any:
    """Return the mask over tokens of a module without virtual heads, from one of `interleaved_mask`.

    A base model may have masks of its own, such as those of a vision tower and of images; they are over tokens."""
    if isinstance(mask, LayerMasks):
        return mask.of_others
    num_pseudo_heads = getattr(module.config, "num_pseudo_heads", 1) if hasattr(module, "config") else 1
    is_dense = isinstance(mask, torch.Tensor) and mask.ndim == 4
    # A base's own mask has a row for each token.
    is_over_tokens = num_pseudo_heads == 1 or not is_dense or mask.shape[-2] != num_tokens * num_pseudo_heads
    if is_over_tokens:
        return mask
    if has_two_masks(module.config):
        mask, _ = mask.chunk(2, dim=1)
    # The last pseudo-head of a query sees all of the tokens that the query sees.
    last = slice(num_pseudo_heads - 1, None, num_pseudo_heads)
    return mask[..., last, last]


def mask_of_cached_keys(mask: Any, config: PreTrainedConfig, num_tokens: int, num_keys: int) -> Any:
    """Return the last columns of a mask, those of the keys that a layer with its own window has (`keep_windows`).

    The base knows nothing of this window, and makes masks for all cached tokens. This layer's cache keeps W of them,
    and returns these before the N new ones.

    Raise a RuntimeError if the mask tells that keys of the window are missing, as after a crop of the cache."""
    if not isinstance(mask, torch.Tensor):
        return mask
    size = 1 if mask.ndim == 2 else config.num_pseudo_heads
    if mask.shape[-1] == num_keys * size:
        return mask
    needed = min(mask.shape[-1] // size, config.interleaved_window + num_tokens)
    if num_keys < needed:
        raise RuntimeError(
            f"The cache has {num_keys} of the {needed} keys that the window needs: a crop has removed more tokens "
            "than were recorded (`activate_past_recording`). Start with an empty cache."
        )
    return mask[..., -num_keys * size :]


def has_virtual_heads(module: nn.Module) -> bool:
    """Return whether an attention module mixes or pairs heads."""
    return "q_mix" in module._modules or "paired_heads" in vars(module)


def implementation_of_user(name: str) -> str:
    """Return the `attn_implementation` that a user named for one of ours. Any other name is the user's."""
    core = name.removeprefix(PREFIX)
    if core == name:
        return name
    return "sdpa" if core == SDPA_IN_BLOCKS else core.replace("--", "/")


def register_core(core: str) -> str:
    """Register attention and masks over virtual tokens on an attention function, and return their name.

    A second copy of this code, which a checkpoint may bring, registers its own functions in place of these. Both read
    the same attributes, so either serves all models."""
    name = PREFIX + core.replace("/", "--")  # a "/" would name a kernel of the Hub
    AttentionInterface.register(name, partial(attend_interleaved, core))
    AttentionMaskInterface.register(name, partial(interleaved_mask, core))
    return name


# At import, so that an unpickled model finds them. Any other function is registered when a model first uses it.
for _core in ("eager", "sdpa", SDPA_IN_BLOCKS, "flex_attention", "flash_attention_2"):
    register_core(_core)


def prepare_call(names: list[str], decoder: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Check and change the arguments of a decoder's forward, of which `names` are positional: a pre-hook.

    Windows of the cache become one token longer (`keep_windows`) before the forward reads its lengths.
    `logits_to_keep` becomes `None`: Gemma 4 crops the rows of a mask to it, which are virtual tokens here."""
    config = decoder_config(decoder)
    if not config._attn_implementation.startswith(PREFIX):
        raise RuntimeError(
            f"The attention of this model was set to {config._attn_implementation!r} behind its back, which would "
            "leave out the interleaved heads: call model.set_attn_implementation."
        )
    kwargs = dict(**dict(zip(names, args)), **kwargs)
    if "logits_to_keep" in names:
        kwargs["logits_to_keep"] = None
    cache = pop_cache(kwargs)
    base_makes_cache = cache is None and makes_cache(decoder, kwargs.get("use_cache"))
    if base_makes_cache and getattr(config, "sliding_window", None):
        # The base would make it too late for `keep_windows`.
        cache, base_makes_cache = DynamicCache(config=decoder.config), False
    if cache is not None:
        keep_windows(decoder, cache)
        kwargs[CACHE] = cache
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    if tokens is not None and is_of_user(kwargs.get("attention_mask"), tokens, config.num_pseudo_heads):
        kwargs |= arguments_for_layers(decoder, tokens, cache, base_makes_cache, kwargs)
    return args[len(names) :], kwargs  # only a call with too many arguments has any left


def is_of_user(mask: Any, tokens: torch.Tensor, num_pseudo_heads: int) -> bool:
    """Return whether a mask is a user's or none, and not one of `interleaved_mask`, which `generate` passes.

    A dense one of ours has N * P rows, and a user's has N."""
    if mask is None:
        return True
    is_ours = isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[2] == tokens.shape[1] * num_pseudo_heads
    return isinstance(mask, torch.Tensor) and not is_ours


def arguments_for_layers(
    decoder: PreTrainedModel, tokens: torch.Tensor, cache: Cache | None, base_makes_cache: bool, kwargs: dict
) -> dict[str, Any]:
    """Return the keyword arguments that tell all layers what a call declares, without dense masks if they can.

    Packed documents next to an attention_mask raise a ValueError. Without a mask:

        `how_decoder_separates`    no cache      the base makes one    one is given
        "bounds"                   kept apart    kept apart            ValueError
        "positions"                kept apart    kept apart            ValueError
        "masks"                    as the base   ValueError            ValueError

    For a base with windows `prepare_call` makes the cache, so the last column applies unless use_cache=False.
    """
    config = decoder_config(decoder)
    mask, positions, bounds = (kwargs.get(name) for name in ("attention_mask", "position_ids", "cu_seq_lens_q"))
    if positions is not None and positions.ndim != 2:  # of a model of images: [4, rows, N] with those of text first
        positions = positions[0] if len(positions) == 4 else None
    separates_documents_by = how_decoder_separates(config, positions, bounds)
    # Replicas of DataParallel have no parameters, so `decoder.dtype` fails there.
    dtype = tokens.dtype if tokens.is_floating_point() else decoder.get_input_embeddings().weight.dtype
    backend = Backend.of_model(core_of(config), dtype, tokens.device, separates_documents_by)
    fields = ("interleaved_window", "sliding_window", "attention_chunk_size")
    window = min(getattr(config, field, None) or math.inf for field in fields)
    call = read_call(backend, tokens, mask, positions, cache, bounds, window, base_makes_cache)
    if call.dense is not None:
        return {"attention_mask": dense_mask_of_user(call.dense, backend.core, config)}
    if call.documents is None or separates_documents_by != "bounds":
        return {}  # masks and flash functions find documents themselves, and `read_call` has checked that they can
    found = call.keyword_arguments()
    if mask is None and cache is None:  # the base would look for documents too, and ask for a dense mask
        found["attention_mask"] = mask_without_padding(tokens)
    return found


def how_decoder_separates(
    config: PreTrainedConfig, positions: torch.Tensor | None, bounds: torch.Tensor | None
) -> str:
    """Return how the layers of a base keep packed documents apart: see `how_core_separates`."""
    core = core_of(config)
    if bounds is None and positions is not None and is_tracing(positions):
        return "masks"  # code cannot find bounds in positions that it does not know
    # `interleave_heads` has tried whether the base passes bounds on. An export has dense masks.
    if core == SDPA_IN_BLOCKS and (is_for_any_length() or not getattr(config, "passes_cu_seq_lens", False)):
        return "masks"
    return how_core_separates(core)


def dense_mask_of_user(mask: torch.Tensor, core: str, config: PreTrainedConfig) -> torch.Tensor:
    """Return a user's mask [batch, heads, N, K] over virtual tokens, as `interleaved_mask` returns its own."""
    if core in ("eager", "flex_attention"):  # both add it to scores
        mask = additive(mask, torch.float32)
    mask = mask_over_virtual_tokens(mask, config.num_pseudo_heads)
    return torch.cat((mask, mask), dim=1) if has_two_masks(config) else mask


def makes_cache(decoder: PreTrainedModel, use_cache: bool | None) -> bool:
    """Return whether the base model makes a cache in a call to which none is given."""
    if use_cache is None:
        use_cache = getattr(decoder_config(decoder), "use_cache", False)
    # A base with activation checkpointing makes no cache: Transformers finds packed documents only without one.
    is_checkpointed = getattr(decoder, "gradient_checkpointing", False) and decoder.training
    if IS_FROM_5_24:
        is_checkpointed = is_checkpointed and torch.is_grad_enabled()
    # RecurrentGemma, which is stateful, resets its states where it makes a cache.
    return bool(use_cache) and not is_checkpointed and not decoder._is_stateful


def keep_windows(model: PreTrainedModel, cache: Cache) -> None:
    """Let a cache keep what windows of virtual tokens reach: one token more than the window.

    Where the interleaved layers alone have a window, their empty dynamic layers of the cache become sliding ones."""
    cache = getattr(cache, "self_attention_cache", cache)  # that of a decoder with cross-attention
    config = decoder_config(model)
    window = getattr(config, "sliding_window", None)
    if window:
        keep_window_edge(cache, window)
        return  # Layers without the base's window keep all keys, and `interleaved_window` is in the masks.
    if config.interleaved_window is None or "flex" in config._attn_implementation:  # a `BlockMask` cannot be cut
        return
    # CODEPATH: a window of the interleaved layers alone. With chunks, Transformers takes the length of their masks
    # from the first sliding layer of the cache, which would be ours.
    layers = [] if hasattr(config, "attention_chunk_size") else getattr(cache, "layers", [])
    empty = {i for i, layer in enumerate(layers) if type(layer) is DynamicLayer and not layer.is_initialized}
    for module in model.modules():
        if has_virtual_heads(module) and module.layer_idx in empty:
            layers[module.layer_idx] = DynamicSlidingWindowLayer(config.interleaved_window + 1)


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of the text decoder, which attention modules and masks read."""
    return model.config.get_text_config(decoder=True)
