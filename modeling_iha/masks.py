# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Make the mask of every type of layer, and refuse inputs for which a model would silently compute something else."""

import warnings
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing

from .attention_kinds import ATTENTION_CLASSES
from .attention_mha import SERVER_CORES
from .cache_edge import keep_window_edge
from .cache_names import CACHE
from .configuration_iha import IHAConfig
from .first_keys import FirstKeys, known_first_keys
from .overlay import Overlay
from .tracing import is_exported
from .virtual_masks import (
    CREATE_MASK,
    LOWEST,
    check_mask_type,
    in_window,
    mask_over_virtual_tokens,
    register_masks,
    virtual_tokens_per_token,
)


def make_masks(
    config: IHAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
    default_positions: bool = False,
) -> dict[str, Any]:
    """Return the mask of each layer type, over virtual tokens where the model has virtual heads (see `virtual_mask`).

    Also make the sliding layers of the cache keep the window's edge, before their lengths are read.

    Masks come from one of three places. On SDPA, in models whose kinds all attend on a stock core, `mask_of_window`
    serves calls without `attention_mask`, `position_ids` and cached tokens. `_compiled_masks` serves compiled calls
    without a cache, and Transformers' mask functions all others.

    Args:
        inputs_embeds: [batch, N, any]; gives batch, length, dtype and device.
        attention_mask: [batch, cached + N], nonzero for real tokens, or a custom boolean or additive one
            [batch, heads or 1, N, K], where K is cached + N, also where a layer's cache has dropped tokens, or all
            places of a static cache. Do not put the window into a custom mask: sliding layers apply it themselves. A
            custom mask hides all pseudo-heads of a token, but the window shows some pseudo-heads of token n - W (see
            `virtual_mask`).
        cache: the cache before it takes the N tokens.
        position_ids: [batch or 1, N]. Where they do not increase by one, a packed document begins.
        default_positions: whether `position_ids` are the default ones, which declare no documents.
    """
    num_pseudo_heads = virtual_tokens_per_token(config)
    core = config._attn_implementation
    if cache is not None and num_pseudo_heads > 1:
        keep_window_edge(cache, config.sliding_window)
    if attention_mask is not None and attention_mask.ndim != 2:
        past = 0 if cache is None else cache.get_seq_length()
        attention_mask = mask_over_virtual_tokens(attention_mask, num_pseudo_heads, past, inputs_embeds.dtype)
    if core == "sdpa" and can_skip_mask_functions(config, cache):
        if attention_mask is None and default_positions:
            types = dict.fromkeys(config.layer_types)
            return {layer_type: mask_of_window(config, layer_type, inputs_embeds) for layer_type in types}
        covers_these_tokens = attention_mask is None or attention_mask.shape == inputs_embeds.shape[:2]
        if torch.compiler.is_compiling() and cache is None and covers_these_tokens:
            return _compiled_masks(config, inputs_embeds, attention_mask, position_ids)
    if default_positions and not is_tracing(inputs_embeds):
        # Transformers would search them for packed documents, and a GPU would wait for the answer. They stay
        # while tracing: without them a graph would have no mask, and each length would compile a graph of its own.
        position_ids = None
    core_name = core
    # A core that makes no masks keeps its name if there are no virtual heads; otherwise `register_masks` raises an
    # error. Cores of servers keep theirs too: the layers refuse them with a better message (`check_core`).
    if core in ALL_MASK_ATTENTION_FUNCTIONS or (num_pseudo_heads > 1 and core not in SERVER_CORES):
        core_name = register_masks(core)
    view: Any = Overlay(config, _attn_implementation=core_name)

    return {
        layer_type: _mask_of_type(layer_type, view, inputs_embeds, attention_mask, cache, position_ids)
        for layer_type in dict.fromkeys(config.layer_types)
    }


def _mask_of_type(
    layer_type: str,
    config: Any,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
) -> Any:
    """Return the mask that Transformers' mask functions make for the layers of a type.

    `config` names the core by its name for masks over virtual tokens, over which a custom `attention_mask` already is.
    """
    index = config.layer_types.index(layer_type)
    mask: Any = CREATE_MASK[layer_type](
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        position_ids=position_ids,
        layer_idx=index,
        **{CACHE: cache},
    )
    if attention_mask is not None and attention_mask.ndim == 4:
        window = config.sliding_window if layer_type == "sliding_attention" else None
        return _custom_mask_of_layer(
            mask, virtual_tokens_per_token(config), window, inputs_embeds.shape[1], cache, index
        )
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.float64:
        # The eager core takes its softmax in float32, where the lowest float64 is -inf.
        mask = mask.clamp_min(LOWEST[torch.float64])
    return mask


def _custom_mask_of_layer(
    mask: torch.Tensor, num_pseudo_heads: int, window: int | None, length: int, cache: Cache | None, index: int
) -> torch.Tensor:
    """Return a user's mask over virtual tokens for `length` new tokens and the keys that a layer's cache holds.

    The layer is given by its `index`, and `window` is its window in tokens, or `None`."""
    past = 0  # the keys of this layer before the queries' own
    if cache is not None:
        # This layer's cache has dropped the first `offset` tokens.
        num_keys, offset = cache.get_mask_sizes(length, index)
        mask = mask[..., offset * num_pseudo_heads : (offset + num_keys) * num_pseudo_heads]
        past = cache.get_seq_length() - offset
    if window is None:
        return mask
    return in_window(mask, window * num_pseudo_heads, past * num_pseudo_heads)


def can_skip_mask_functions(config: IHAConfig, cache: Cache | None) -> bool:
    """Return whether the masks of a call follow from shapes, documents and padding, without any mask function.

    It is False if tokens are cached or the cache is static; under `torch.export` and `torch.jit.trace`, because later
    calls may have other lengths; and for kinds that attend without a stock core, because they read first keys in the
    layout [batch, 1, L, 1] only."""
    if not all(ATTENTION_CLASSES[kind].attends_on_stock_core for kind in config.attention_kinds):
        return False
    if is_exported() or (is_tracing() and not torch.compiler.is_compiling()):
        return False
    return cache is None or (not cache.is_compileable and cache.get_seq_length() == 0)


def _compiled_masks(
    config: IHAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the mask of each layer type for compiled code and a call without cache.

    As in Transformers, a document begins where `position_ids` do not increase by one. With an `attention_mask`
    [batch, N] it begins where those of real tokens restart. Uncompiled calls refuse that (`check_inputs`), because
    Transformers would join such documents, and compiled code cannot refuse what it reads from values."""
    batch = len(inputs_embeds)
    if attention_mask is None:
        is_padding = None
        starts_after = position_ids.diff(dim=-1) != 1
    else:
        is_padding = attention_mask.to(inputs_embeds.device) == 0
        starts_after = _document_restarts(position_ids, attention_mask, past=0)
    is_document_start = torch.nn.functional.pad(starts_after, (1, 0), value=True).expand(batch, -1)
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    num_pseudo_heads = virtual_tokens_per_token(config)
    return {
        layer_type: known_first_keys(is_document_start, is_padding, num_pseudo_heads, windows[layer_type]).as_mask()
        for layer_type in dict.fromkeys(config.layer_types)
    }


def mask_of_window(config: IHAConfig, layer_type: str, inputs_embeds: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of a layer type for a call without documents, padding and cached tokens."""
    length = inputs_embeds.shape[1]
    window = config.sliding_window
    if layer_type == "full_attention" or window is None or window >= length:
        return None
    num_pseudo_heads = virtual_tokens_per_token(config)
    first_keys = FirstKeys(length * num_pseudo_heads, window * num_pseudo_heads)
    return first_keys.as_mask(inputs_embeds.device)


def check_inputs(
    config: IHAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
    **kwargs,
) -> None:
    """Raise a ValueError for inputs that the model would misread, in calls that are not traced or compiled.

    These are a `BlockMask`, packed documents that the core would silently join, and a mask or positions that do not
    fit the cache. Also warn of FlexAttention on a CPU.

    Documents are declared by `position_ids` [batch, N] that restart, or by `cu_seq_lens_q` among `kwargs`. In calls
    with a mask or a cache Transformers does not look for them, and would join them. A jump forward begins a document
    for Transformers too, but is not refused, because no data collator makes one. The other arguments are those of
    `make_masks`."""
    check_mask_type(attention_mask)
    _warn_flex_on_cpu(config, inputs_embeds)
    core = config._attn_implementation
    if not is_flash_attention_requested(config) and core not in ("eager", "flex_attention", "sdpa"):
        return  # Other cores, such as the paged ones, keep documents apart by themselves.
    if is_tracing(inputs_embeds) or inputs_embeds.is_meta:
        return  # There are no values to look at.
    if attention_mask is not None and attention_mask.ndim != 2:
        return  # A custom mask decides.

    length = inputs_embeds.shape[1]
    past = 0 if cache is None else cache.get_seq_length()
    if length != 1:
        # The length of a static cache is a tensor, and reading it makes a GPU wait. One new token needs no check.
        past = int(past)
    if isinstance(past, int):
        _check_mask_length(attention_mask, length, past)
    restarts = None
    if position_ids is not None and length > 1:
        found = _document_restarts(position_ids, attention_mask, past)
        if found.any():
            restarts = found
        elif past > 0:
            _check_continues_cache(position_ids, attention_mask, past)
    cu_seq_lens = kwargs.get("cu_seq_lens_q")
    declares_documents = restarts is not None or (cu_seq_lens is not None and len(cu_seq_lens) > 2)
    if declares_documents:
        _check_documents_apart(config, inputs_embeds, attention_mask, cache, position_ids, restarts, **kwargs)


def _warn_flex_on_cpu(config: IHAConfig, inputs_embeds: torch.Tensor) -> None:
    """Warn of FlexAttention compiled for a CPU, unless the whole call is compiled."""
    is_flex = config._attn_implementation == "flex_attention"
    if is_flex and inputs_embeds.device.type == "cpu" and not torch.compiler.is_compiling():
        warnings.warn(
            "FlexAttention compiled for a CPU may fail, crash or silently return wrong results: use 'sdpa' or 'eager'."
        )


def _check_mask_length(attention_mask: torch.Tensor | None, length: int, past: int) -> None:
    """Raise a ValueError for a mask [batch, columns] that would hide the newest of `past` + `length` tokens.

    Assisted decoding with a user's cache may pass such a mask."""
    if attention_mask is not None and attention_mask.shape[1] < past + length:
        raise ValueError(_does_not_fit_cache(length, past))


def _check_continues_cache(position_ids: torch.Tensor, attention_mask: torch.Tensor | None, past: int) -> None:
    """Raise a ValueError for positions that begin at 0 although real tokens are cached.

    Assisted decoding with a user's cache may pass tokens again that are already cached."""
    begins = position_ids < 1
    if attention_mask is not None:
        real = _real_tokens(attention_mask, position_ids, past)
        has_real_past = attention_mask[:, :past].any(dim=-1, keepdim=True).to(position_ids.device)
        begins = begins & real & has_real_past
    if begins.any():
        raise ValueError(_does_not_fit_cache(position_ids.shape[1], past))


def _does_not_fit_cache(length: int, past: int) -> str:
    return (
        f"{length} tokens come after {past} cached ones, but position_ids begin at 0 or attention_mask has fewer "
        f"than {past + length} columns: pass new tokens alone and a mask over all tokens, or no cache."
    )


def _real_tokens(attention_mask: torch.Tensor, position_ids: torch.Tensor, past: int) -> torch.Tensor:
    """Return which of the N new tokens are real, boolean [batch, N]. The mask may have columns for tokens to come."""
    length = position_ids.shape[1]
    return attention_mask[:, past : past + length].to(position_ids.device).bool()


def _document_restarts(position_ids: torch.Tensor, attention_mask: torch.Tensor | None, past: int) -> torch.Tensor:
    """Return where positions restart, boolean [batch, N - 1]. Entry i is true if token i + 1 begins a document."""
    if attention_mask is None:
        return position_ids.diff(dim=-1) < 1
    # `generate` counts from the first real token, so positions of padding may restart. Each real token is compared
    # with the latest real one before it, because each document may end in padding.
    # One row of a mask, or of positions, may stand for all.
    positions, real = torch.broadcast_tensors(position_ids, _real_tokens(attention_mask, position_ids, past))
    index = torch.arange(real.shape[1], device=real.device)
    latest_real = torch.where(real, index, -1).cummax(dim=-1).values[:, :-1]  # -1 before the first real token
    before = positions.gather(1, latest_real.clamp_min(0))
    return (positions[:, 1:] <= before) & real[:, 1:] & (latest_real >= 0)


def _check_documents_apart(
    config: IHAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    position_ids: torch.Tensor | None,
    restarts: torch.Tensor | None,
    **kwargs,
) -> None:
    """Raise a ValueError for packed documents that the core would join.

    `restarts` are those of `_document_restarts`, or `None` if positions do not restart and `kwargs` declare the
    documents."""
    if is_flash_attention_requested(config):
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        are_declared = all(kwargs.get(name) is not None for name in names)
        has_past = cache is not None and cache.get_seq_length() > 0
        if restarts is not None and not has_past and len(inputs_embeds) == 1:
            # Flash cores split a row where a position equals the least one.
            restart_at_first_value = bool((position_ids[:, 1:][restarts] == position_ids[0, 0]).all())
            are_declared = are_declared or restart_at_first_value
        has_padding = attention_mask is not None and not attention_mask.all()
        are_apart = are_declared and not has_padding
        how = (
            "if cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k are all given, or if position_ids restart "
            "at their first value in a batch of one row and the cache is empty, in both cases without padding in "
            "attention_mask"
        )
    else:
        are_apart = restarts is not None and attention_mask is None and cache is None
        how = "if position_ids restart, without attention_mask and without a cache (use_cache=False)"
    if not are_apart:
        raise ValueError(
            f"Packed documents (position_ids that restart, or cu_seq_lens) would attend to one another here: "
            f"attn_implementation={config._attn_implementation!r} keeps them apart {how}."
        )
