# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Attend over virtual tokens in a decoder of Transformers, and prepare its calls for this.

Transformers' models look up their attention function and their mask function by one name, such as "sdpa". This file
registers both under a second name, "iha_sdpa". (Most decoders get "iha_sdpa_in_blocks" for "sdpa", by
`use_virtual_core`.) A module with virtual heads then attends over virtual tokens, and any other module over tokens.
A pre-hook of the decoder, `prepare_call`, reads what a call declares once for all layers.
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

from .interleaving import MixedHeads
from .sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from .sdpa_in_blocks import read_documents
from .transformers_versions import CACHE, IS_FROM_5_24, pop_cache
from .virtual_tokens import View, check_dense_mask, keep_window_edge, takes_flat_mask, virtual_attention, virtual_mask


PREFIX = "iha_"  # "iha_sdpa" attends by "sdpa" over virtual tokens


def attend_interleaved(
    core: str, module: nn.Module, query, key, value, attention_mask: Any, **kwargs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over virtual tokens where the module has virtual heads, and over tokens elsewhere.

    `core` is the attention function that computes it, such as "sdpa". The other arguments and the output are those of
    an attention function of Transformers, in tokens."""
    config = getattr(module, "config", None)  # a vision tower's has no fields of ours
    if core == SDPA_IN_BLOCKS:  # it reads documents from `cu_seq_lens_q` alone
        kwargs = {name: kwargs[name] for name in kwargs.keys() - {"position_ids", "cu_seq_lens_k", "max_length_k"}}
    if not has_virtual_heads(module):
        mask = mask_over_tokens(attention_mask, query.shape[2])
        return attend_on_core(core, 1, module, query, key, value, mask, **kwargs)
    # CODEPATH: a window of the interleaved layers alone.
    if config.interleaved_window is not None:
        kwargs["sliding_window"] = min(config.interleaved_window, kwargs.get("sliding_window") or math.inf)
        if isinstance(attention_mask, torch.Tensor) and is_over_virtual_tokens(attention_mask, query.shape[2]):
            attention_mask = attention_mask[:, -1:]  # see `interleaved_mask`
    heads = module.paired_heads if hasattr(module, "paired_heads") else MixedHeads.of_module(module, value)
    attend = partial(attend_on_core, core, heads.num_pseudo_heads)
    return virtual_attention(attend, module, heads, query, key, value, attention_mask, **kwargs)


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


def interleaved_mask(core: str, *, config, mask_function: Callable, local_size: int | None = None, **kwargs) -> Any:
    """Return the mask of all layers of a decoder: dense over virtual tokens, or [batch, keys] over tokens.

    A dense mask has two planes, [batch, 2, N * P, K * P], where the interleaved layers have a window that the others
    lack: without it for those, and with it. A `BlockMask` has no planes, so there the mask of layers without virtual
    heads is its attribute `of_tokens`. No window cuts the mask of an encoder (`allow_is_bidirectional_skip`)."""
    if not hasattr(config, "num_pseudo_heads"):  # that of a vision tower
        make_mask = ALL_MASK_ATTENTION_FUNCTIONS[core]
        return make_mask(config=config, mask_function=mask_function, local_size=local_size, **kwargs)
    kwargs["config"] = config
    window = config.interleaved_window
    if window is None or "allow_is_bidirectional_skip" in kwargs or takes_flat_mask(core, **kwargs):
        mask = virtual_mask(core, mask_function=mask_function, local_size=local_size, **kwargs)
    else:
        kwargs["allow_is_causal_skip"] = False
        sees, size = and_masks(mask_function, sliding_window_overlay(window)), min(window, local_size or window)
        mask = virtual_mask(core, mask_function=sees, local_size=size, **kwargs)
    if len(config.interleaved_layers) == config.num_hidden_layers:
        return mask
    if isinstance(mask, BlockMask):
        make_mask = ALL_MASK_ATTENTION_FUNCTIONS[core]
        mask.of_tokens = make_mask(mask_function=mask_function, local_size=local_size, **kwargs)
    elif window is not None and mask is not None and mask.ndim == 4:
        of_others = virtual_mask(core, mask_function=mask_function, local_size=local_size, **kwargs)
        mask = torch.cat((of_others, mask), dim=1)
    return mask


def mask_over_tokens(mask: Any, num_tokens: int) -> Any:
    """Return the mask of a layer without virtual tokens, from one of `interleaved_mask` or of a user."""
    if isinstance(mask, BlockMask):
        if not hasattr(mask, "of_tokens") and mask.shape[-2] != num_tokens:
            raise ValueError(
                "A copy to another device lost the mask of the layers that are not interleaved: keep the decoder on "
                "one device, or use another attn_implementation than FlexAttention."
            )
        return getattr(mask, "of_tokens", mask)
    if mask is None or not is_over_virtual_tokens(mask, num_tokens):
        return mask
    num_pseudo_heads = mask.shape[-2] // num_tokens
    last = slice(num_pseudo_heads - 1, None, num_pseudo_heads)
    return mask[:, :1, last, last]


def is_over_virtual_tokens(mask: torch.Tensor, num_tokens: int) -> bool:
    """Return whether `interleaved_mask` made a dense mask. Other masks are over tokens, such as a user's."""
    return mask.ndim == 4 and mask.shape[-2] != num_tokens


def has_virtual_heads(module: nn.Module) -> bool:
    """Return whether an attention module mixes or pairs heads."""
    return "q_mix" in module._modules or "paired_heads" in vars(module)


def core_of(name: str) -> str:
    """Return the attention function that an `attn_implementation` of ours stands for; any other stands for itself."""
    core = name.removeprefix(PREFIX)
    if core == name:
        return name
    return "sdpa" if core == SDPA_IN_BLOCKS else core.replace("--", "/")


def register_core(core: str) -> str:
    """Register attention and masks over virtual tokens on an attention function, and return their name.

    Those of a second copy of this code replace the first. They read the same attributes, so each serves all models."""
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
    if cache is None:
        cache = new_cache(decoder, kwargs.get("use_cache"))
    if cache is not None:
        keep_windows(decoder, cache)
        kwargs[CACHE] = cache
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[2] == tokens.shape[1]:
        windows = config.interleaved_window, getattr(config, "sliding_window", None)
        check_dense_mask(mask, tokens.shape[1], cache, min(each or math.inf for each in windows))
    is_flat = mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)
    if config._attn_implementation == PREFIX + SDPA_IN_BLOCKS and is_flat and tokens is not None:
        found = declared(tokens, mask, cache, kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"))
        kwargs |= found if getattr(config, "passes_cu_seq_lens", False) else {}  # as `interleave_heads` has tried
    return args[len(names) :], kwargs


def declared(tokens: torch.Tensor, mask, cache, positions, lengths) -> dict[str, Any]:
    """Return the keyword arguments that tell all layers the documents of a call, without dense masks.

    A call without a mask gets one of ones, a single number that is expanded. Without it Transformers would look for
    documents in the positions again, and compiled code, which cannot look, would get dense masks."""
    if positions is not None and positions.ndim != 2:
        positions = positions[0] if len(positions) == 4 else None  # of text, or of images alone: no declaration
    found = read_documents("sdpa", tokens, mask, positions, cache, lengths)
    if mask is None and cache is None and (found or lengths is not None):
        found["attention_mask"] = torch.ones((), dtype=torch.bool, device=tokens.device).expand(tokens.shape[:2])
    return found


def new_cache(decoder: PreTrainedModel, use_cache: bool | None) -> Cache | None:
    """Return the cache of a call to which none is given, or `None` to leave it to the base model.

    A base makes its own in the forward, which is too late for `keep_windows` if it has windows."""
    config = decoder_config(decoder)
    if use_cache is None:
        use_cache = getattr(config, "use_cache", False)
    # A base with activation checkpointing makes no cache: Transformers finds packed documents only without one.
    is_checkpointed = getattr(decoder, "gradient_checkpointing", False) and decoder.training
    if IS_FROM_5_24:
        is_checkpointed = is_checkpointed and torch.is_grad_enabled()
    # RecurrentGemma, which is stateful, resets its states where it makes a cache.
    if not use_cache or is_checkpointed or decoder._is_stateful or not getattr(config, "sliding_window", None):
        return None
    return DynamicCache(config=decoder.config)


def keep_windows(model: PreTrainedModel, cache: Cache) -> None:
    """Let a cache keep what windows of virtual tokens reach: one token more than the window.

    Where the interleaved layers alone have a window, their empty dynamic layers of the cache become sliding ones."""
    cache = getattr(cache, "self_attention_cache", cache)  # that of a decoder with cross-attention
    config = decoder_config(model)
    window = getattr(config, "sliding_window", None)
    if window:
        keep_window_edge(cache, window)
        return
    layers = [] if hasattr(config, "attention_chunk_size") else getattr(cache, "layers", [])  # chunks size all masks
    empty = {i for i, layer in enumerate(layers) if type(layer) is DynamicLayer and not layer.is_initialized}
    # CODEPATH: a window of the interleaved layers alone.
    if config.interleaved_window is None or "flex" in config._attn_implementation:  # a `BlockMask` cannot be cut
        return
    for module in model.modules():
        if has_virtual_heads(module) and module.layer_idx in empty:
            layers[module.layer_idx] = DynamicSlidingWindowLayer(config.interleaved_window + 1)


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of the text decoder, which attention modules and masks read."""
    return model.config.get_text_config(decoder=True)
