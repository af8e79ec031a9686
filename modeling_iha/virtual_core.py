# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend on the cores of Transformers: over virtual tokens in layers with virtual heads, over tokens in others."""

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from .chunks import attend_in_chunks, chunk_window
from .first_keys import FirstKeys, narrower, read_mask
from .interleaving import in_virtual_tokens, virtual_kwargs
from .new_token import uses_new_token_path
from .overlay import Overlay
from .virtual_heads import VirtualHeads, virtual_heads_class
from .virtual_masks import check_mask_type, in_window, is_flash_core, token_mask, virtual_tokens_per_token
from .windows import StockCore, first_key_attention, window_attention


# Advice for a mask that is not over virtual tokens
PASS_TO_THE_MODEL = (
    "pass attention_mask [batch, tokens], or [batch, 1, queries, keys] with a key for each token so far (each place "
    "of a static cache), to the model as a keyword argument."
)


def virtual_attention(
    core: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
    product_dtype: torch.dtype | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, N, H, head_dim] and the weights of an attention module, as its core does.

    Queries [batch, H, N, head_dim] and keys [batch, G, K, head_dim] are rotated and cached as in the base model. A
    module without `virtual_heads` attends as in the base model.

    Args:
        core: the name of an attention function of Transformers, such as "sdpa".
        attention_mask: over virtual tokens: `None`, a tensor of first keys (first_keys.py), a dense mask,
            [batch, K * P] for a flash core, or a `BlockMask`.
        rotation: (cos, sin) that rotate pseudo-heads within their token (see `MixedHeads`); `None` where they share
            its position.
        product_dtype: dtype for products with the cache, or `None` for the cache's own.
        kwargs: keyword arguments of the core, in tokens.
    """
    _check_mask(core, attention_mask)
    mask = read_mask(attention_mask)
    num_queries = query.shape[2]
    if isinstance(mask, FirstKeys):
        # First keys already hold the window of `sliding_window`. The layer's own one (`own_window`) is applied below.
        kwargs["sliding_window"] = None
        # Masks of first keys are made only when the cache was empty, so query i is token i.
        key, value = _without_unused_places(key, value, num_queries)
    heads_class = virtual_heads_class(module)
    if heads_class is None:
        return _attend_over_tokens(core, module, query, key, value, mask, **kwargs)

    num_keys = key.shape[2]
    # The window, in tokens, that `interleave_heads` or `pair_heads` gave these layers. `IHAConfig` has no such field:
    # its windows, and those of a base model, are in the mask and in `kwargs["sliding_window"]`.
    own_window = getattr(module.config, "interleaved_window", None)
    num_pseudo_heads = virtual_tokens_per_token(module.config)
    mask = layer_mask(mask, core, own_window, num_pseudo_heads, num_queries, num_keys)
    heads = heads_class.from_module(module, query, key, value, rotation)
    # Autocast leaves rotated queries and keys in float32.
    query = query.to(value.dtype)
    key = key.to(value.dtype)

    # In compiled calls without a cache a single token has first keys too (`_compiled_masks`), and the path of one new
    # token does not read them.
    is_new_token = num_queries == 1 and not isinstance(mask, FirstKeys)
    can_use_base_keys = is_new_token and heads.takes_new_token
    if can_use_base_keys and uses_new_token_path(core, module.config, kwargs.get("dropout"), query, num_keys):
        output = _attend_new_token(heads, query, key, value, mask, own_window, kwargs.get("scaling"), product_dtype)
        return output, None
    return _attend_over_virtual_tokens(core, module, heads, query, key, value, mask, own_window, **kwargs)


def _attend_new_token(
    heads: VirtualHeads,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    own_window: int | None,
    scaling: float | None,
    product_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return the output of one new token, computed from base keys, of which those outside the window are left out."""
    if attention_mask is None and own_window is not None:
        # Every pseudo-head but the last sees one token more than the window.
        key = key[:, :, -own_window - 1 :]
        value = value[:, :, -own_window - 1 :]
    scaling = scaling or query.shape[-1] ** -0.5
    return heads.attend_new_token(query, key, value, scaling, own_window, attention_mask, product_dtype)


def _without_unused_places(
    key: torch.Tensor, value: torch.Tensor, num_queries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of the queries' own tokens. Unused places of a static cache come after them."""
    return key[:, :, :num_queries], value[:, :, :num_queries]


def _attend_over_tokens(
    core: str, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output and weights of a layer without virtual heads.

    The model's mask is over virtual tokens, and is converted to tokens first."""
    per_token = virtual_tokens_per_token(module.config)
    stock = stock_core(core, module, per_token)
    mask = token_mask(mask, per_token)
    if isinstance(mask, FirstKeys):
        return first_key_attention(stock, query, key, value, mask, **kwargs)
    return stock(query, key, value, mask, **kwargs)


def _attend_over_virtual_tokens(
    core: str,
    module: Any,
    heads: VirtualHeads,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    own_window: int | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output and weights of a core that runs on virtual tokens.

    The mask is that of `layer_mask`, and `own_window` is in tokens (see `virtual_attention`)."""
    num_pseudo_heads = virtual_tokens_per_token(module.config)
    stock = stock_core(core, module, num_pseudo_heads)
    if own_window is not None:
        kwargs["sliding_window"] = narrower(own_window, kwargs.get("sliding_window"))
    if kwargs.get("s_aux") is not None:
        kwargs["s_aux"] = stock.module.sinks  # flash cores take the sinks as an argument: those raised by log P
    # From here on windows and lengths in `kwargs` count virtual tokens.
    kwargs = virtual_kwargs(kwargs, num_pseudo_heads)

    # A dense mask or a `BlockMask` holds the whole pattern.
    has_own_pattern = mask is not None and not isinstance(mask, FirstKeys)
    if is_flash_core(core) or has_own_pattern:  # flash cores hide later keys by themselves
        return heads.attend(stock, query, key, value, mask, **kwargs)
    num_queries = query.shape[2]
    if mask is None and num_queries == 1:
        mask = new_token_mask(key.shape[2], own_window, num_pseudo_heads, query.device)
        return heads.attend(stock, query, key, value, mask, **kwargs)
    if mask is None:
        # Several queries without a mask: nothing was cached before, so query i is token i.
        key, value = _without_unused_places(key, value, num_queries)
    virtual_window = kwargs.get("sliding_window")
    dropout = kwargs.get("dropout")
    window = chunk_window(heads, query, key, value, mask, virtual_window, dropout)
    if window is not None:
        kwargs["sliding_window"] = window
        return attend_in_chunks(heads, stock, query, key, value, **kwargs), None
    attend = window_attention if mask is None else first_key_attention
    return heads.attend(partial(attend, stock), query, key, value, mask, **kwargs)


def layer_mask(
    mask: Any, core: str, window: int | None, num_pseudo_heads: int, num_queries: int, num_keys: int
) -> Any:
    """Return the model's mask for a layer with virtual heads and, if it has one, a window of its own.

    `window` is that window in tokens, or `None`. With one, a dense mask is sliced to the layer's keys, and keys
    outside the window are hidden. First keys are returned unchanged. Raise a ValueError for a mask that is not over
    virtual tokens."""
    length = num_queries * num_pseudo_heads
    width = num_keys * num_pseudo_heads
    if isinstance(mask, FirstKeys):
        if mask.length != length:
            raise ValueError(
                f"attention_mask is of first keys of {mask.length} virtual tokens, and the layer has {length} on "
                f"{core!r}: {PASS_TO_THE_MODEL}"
            )
        return mask  # `first_key_attention` takes the window as an argument
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        # The mask may be wider than this layer's cache. A slice loses the result that `in_window` stored on the mask,
        # so slice only if needed. Under tracing always slice, because comparing lengths would specialize the graph.
        if window is not None and (is_tracing(mask) or mask.shape[-1] != width):
            mask = mask[..., -width:]
        _check_size(mask, core, length, width)
    elif isinstance(mask, torch.Tensor) and window is not None:
        # A mask of padding, for a flash core. The layer's own window may shorten its cache.
        mask = mask[:, -width:]
    return in_window(mask, in_virtual_tokens(window, num_pseudo_heads))


def _check_size(mask: torch.Tensor, core: str, length: int, width: int) -> None:
    """Raise a ValueError for a mask that is not over `length` x `width` virtual tokens."""
    if mask.shape[-2:] != (length, width):
        raise ValueError(
            f"attention_mask is {list(mask.shape)} for {length} x {width} virtual tokens on {core!r}: "
            f"{PASS_TO_THE_MODEL}"
        )


def new_token_mask(num_keys: int, window: int | None, num_pseudo_heads: int, device: torch.device) -> torch.Tensor:
    """Return the boolean mask [1, 1, P, keys * P] of one new token, for calls where the base model needs no mask."""
    visible = torch.ones(num_pseudo_heads, num_keys * num_pseudo_heads, dtype=torch.bool, device=device)
    mask = visible.tril((num_keys - 1) * num_pseudo_heads)[None, None]
    return in_window(mask, in_virtual_tokens(window, num_pseudo_heads))


def stock_core(core: str, module: Any, num_pseudo_heads: int) -> StockCore:
    """Return the attention function of a core, with the module as it must see it."""
    return StockCore(core_function(core, module), module_for_core(module, core, num_pseudo_heads))


def core_function(core: str, module: nn.Module) -> Callable:
    """Return the attention function of a core; "eager" is in the modeling file of the base model."""
    if core != "eager":
        return ALL_ATTENTION_FUNCTIONS[core]
    # A subclass may be defined in another file than the function.
    python_modules = (sys.modules[base.__module__] for base in type(module).__mro__)
    return next(found.eager_attention_forward for found in python_modules if hasattr(found, "eager_attention_forward"))


def module_for_core(module: Any, core: str, num_pseudo_heads: int) -> Any:
    """Return the module with the attributes that its core must see.

    A flash core reads its name from the config, so it gets a config with that name. Each token has P virtual keys, so
    the sinks are raised by log P: the weights then stay the same where the P keys are equal (exact_start.py)."""
    overrides: dict = {}
    if is_flash_core(core):
        overrides["config"] = Overlay(module.config, _attn_implementation=core)
    if virtual_heads_class(module) is not None and getattr(module, "sinks", None) is not None:
        overrides["sinks"] = module.sinks + math.log(num_pseudo_heads)
    return Overlay(module, **overrides) if overrides else module


def _check_mask(core: str, mask: Any):
    """Raise a ValueError for a mask that the core would ignore, or cannot take."""
    if core != "flex_attention":
        check_mask_type(mask)
    if is_flash_core(core) and isinstance(mask, torch.Tensor) and mask.ndim == 4:
        raise ValueError(
            f"attn_implementation={core!r} takes no custom mask [batch, 1, queries, keys]: pass attention_mask "
            "[batch, keys], or use 'sdpa', 'eager' or 'flex_attention'."
        )
