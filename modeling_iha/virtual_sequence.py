"""The virtual sequence of Interleaved Head Attention: what a stock attention core must be told about it.

P pseudo-heads turn token n into the P consecutive virtual tokens n * P .. n * P + P - 1. Masks, windows, document boundaries
and cache lengths are given in tokens; the cores see virtual tokens. This file holds every translation between the two.
"""

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing

from .base_attention import SDPA_CORES, base_attention
from .configuration_iha import IHAConfig
from .window_blocks import BLOCK


# The largest dense mask that is built for an interleaved sequence; on "sdpa" a row of N * P = 65536 virtual tokens takes it.
MAX_MASK_BYTES = 4 * 2**30


class _Virtual:
    """A config or cache seen from the virtual sequence: `overrides`, and the rest from `target`."""

    def __init__(self, target, **overrides):
        self.__dict__.update(overrides, _target=target)

    def __getattr__(self, name):
        return getattr(self._target, name)


def _virtual_cache(past_key_values: Cache, num_virtual_tokens: int) -> _Virtual:
    """The lengths of `past_key_values`, which holds base keys and values at token length, in virtual tokens."""

    def get_query_offset(layer_idx: int) -> int:
        return past_key_values.get_query_offset(layer_idx) * num_virtual_tokens

    def get_mask_sizes(query_length: int, layer_idx: int) -> tuple[int, int]:
        sizes = past_key_values.get_mask_sizes(query_length // num_virtual_tokens, layer_idx)
        return tuple(size * num_virtual_tokens for size in sizes)

    return _Virtual(past_key_values, get_query_offset=get_query_offset, get_mask_sizes=get_mask_sizes)


def virtual_positions(position_ids: torch.Tensor, num_virtual_tokens: int) -> torch.Tensor:
    """Positions n * P + p of the virtual tokens, [batch, N * P], from those of the tokens, [batch, N]."""
    offsets = torch.arange(num_virtual_tokens, device=position_ids.device)
    return (position_ids[..., None] * num_virtual_tokens + offsets).flatten(-2)


def virtual_kwargs(kwargs: dict, num_virtual_tokens: int) -> dict:
    """The keyword arguments by which flash cores find packed documents, in virtual tokens. The positions count n * P + p
    even where RoPE shares n: a repeated position would start a new document."""
    virtual = dict(kwargs)
    if kwargs.get("position_ids") is not None:
        virtual["position_ids"] = virtual_positions(kwargs["position_ids"], num_virtual_tokens)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if kwargs.get(name) is not None:
            virtual[name] = kwargs[name] * num_virtual_tokens
    return virtual


def _custom_mask(
    mask: torch.Tensor,
    num_virtual_tokens: int,
    window: int | None,
    dtype: torch.dtype,
    past_key_values: Cache | None,
    layer_idx: int,
) -> torch.Tensor:
    """The additive mask [batch, heads or 1, queries * P, keys * P] of a layer from a custom one over tokens, [batch, heads or 1,
    queries, cached + queries], boolean (True: attend) or additive. It says nothing about the virtual tokens of one token, which
    stay causal, and the layer keeps its window of so many tokens."""
    if mask.dtype == torch.bool:
        # The eager and flex cores add the mask to the scores: True would be 1.
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    query_offset, key_offset = 0, 0
    if past_key_values is not None:
        query_offset = past_key_values.get_query_offset(layer_idx) * num_virtual_tokens
        num_keys, key_offset = past_key_values.get_mask_sizes(mask.shape[-2], layer_idx)
        mask = mask[..., key_offset : key_offset + num_keys]
    mask = mask.repeat_interleave(num_virtual_tokens, dim=-1).repeat_interleave(num_virtual_tokens, dim=-2)
    q = torch.arange(mask.shape[-2], device=mask.device)[:, None] + query_offset
    k = torch.arange(mask.shape[-1], device=mask.device) + key_offset * num_virtual_tokens
    hidden = (k > q) & (k // num_virtual_tokens == q // num_virtual_tokens)
    if window is not None:
        hidden |= k <= q - window * num_virtual_tokens
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def check_packing(
    config: IHAConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs,
) -> None:
    """Raises a ValueError for packed documents that the attention core would silently join. They are declared by `position_ids`
    [batch, N] that restart or by `cu_seq_lens_q`; masks and flash cores look for them in some cases only."""
    flash = is_flash_attention_requested(config)
    if not flash and config._attn_implementation not in ("eager", "flex_attention", *SDPA_CORES):
        return  # Another core has a way of its own, such as the paged ones.
    if is_tracing(inputs_embeds) or inputs_embeds.is_meta or (attention_mask is not None and attention_mask.ndim == 4):
        return  # There are no values to look at, or a custom mask says itself who sees whom.

    restarts = False
    if position_ids is not None and position_ids.shape[-1] > 1:
        restart = position_ids.diff(dim=-1) < 1
        if attention_mask is not None:
            # `generate` counts from the first real token: padding may restart.
            real = attention_mask[:, -position_ids.shape[-1] :].bool()
            restart = restart & real[:, 1:] & real[:, :-1]
        restarts = bool(restart.any())
    if not restarts and (cu_seq_lens_q is None or len(cu_seq_lens_q) <= 2):
        return

    if flash:
        by_lengths = None not in (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        by_positions = (
            restarts
            and len(inputs_embeds) == 1
            and (past_key_values is None or past_key_values.get_seq_length() == 0)
            and bool((position_ids[:, 1:][restart] == position_ids[0, 0]).all())
        )
        apart = (by_lengths or by_positions) and (attention_mask is None or bool(attention_mask.all()))
        how = (
            "by cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k together, or in a batch of one row that continues no "
            "cache by position_ids that restart at their first value; in both cases without padding in attention_mask"
        )
    else:
        apart = restarts and attention_mask is None and past_key_values is None
        how = "by position_ids that restart, without attention_mask and without a cache (use_cache=False)"
    if not apart:
        raise ValueError(
            f"Packed documents (position_ids that restart, or cu_seq_lens) would attend to one another here: "
            f"attn_implementation={config._attn_implementation!r} keeps them apart {how}."
        )


def _check_mask_size(
    config: IHAConfig,
    geometry: tuple[str, int],
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    layer_idx: int,
) -> None:
    """Raises a ValueError where a dense mask larger than MAX_MASK_BYTES would be built for an interleaved sequence."""
    layer_type, virtual = geometry
    core = config._attn_implementation
    if core not in ("eager", *SDPA_CORES) or is_tracing(inputs_embeds):
        return
    rows, queries = inputs_embeds.shape[:2]
    keys = queries if past_key_values is None else past_key_values.get_mask_sizes(queries, layer_idx)[0]
    custom = attention_mask is not None and attention_mask.ndim == 4
    entry = inputs_embeds.dtype.itemsize if custom or core == "eager" else 1
    size = rows * queries * keys * virtual**2 * entry
    if size <= MAX_MASK_BYTES:
        return
    # SDPA needs no mask for causal attention over the whole input.
    if core != "eager" and not custom:
        windowed = layer_type == "sliding_attention" and keys >= config.sliding_window
        cached = past_key_values is not None and past_key_values.get_query_offset(layer_idx) != 0
        padded = attention_mask is not None and not attention_mask.all()
        packed = position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any())
        if not (windowed or cached or padded or packed):
            return
    raise ValueError(
        f"attn_implementation={core!r} needs a mask of {size / 2**30:.3g} GiB here: {rows} rows of {queries} x {virtual} queries and "
        f"{keys} x {virtual} keys; at most {MAX_MASK_BYTES / 2**30:.3g} GiB are allocated. Use attn_implementation='flash_attention_2' "
        f"or 'flash_attention_4', which take windows, padding and packing without a mask, 'flex_attention', whose mask is in blocks, "
        f"or a smaller batch."
    )


def _documents(
    config: IHAConfig,
    geometry: tuple[str, int],
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
    layer_idx: int,
) -> torch.Tensor | None:
    """What attention without a dense mask takes in place of one, int [batch or 1, keys]: the document of each token, -1 for padding.
    It is given to `base_attention` and to `window_attention`; `None` where neither runs."""
    layer_type, virtual = geometry
    length = num_keys = inputs_embeds.shape[1]
    first = past = 0
    if is_tracing(inputs_embeds) or (attention_mask is not None and attention_mask.ndim != 2):
        return None
    if past_key_values is not None:
        past = past_key_values.get_query_offset(layer_idx)
        num_keys, first = past_key_values.get_mask_sizes(length, layer_idx)
        # The keys of a static cache need not end with the new tokens, and `generate` may hand the mask of one token to a compiled forward.
        if first + num_keys != past + length or (length == 1 and past_key_values.is_compileable):
            return None
    if virtual == 1 or base_attention(config, inputs_embeds, num_keys) is None:
        # For short inputs and chunks that continue a cache SDPA's own mask is as good.
        if config._attn_implementation not in SDPA_CORES or layer_type != "sliding_attention" or past > 0:
            return None
        if (length - config.sliding_window) * virtual <= BLOCK:
            return None
    if attention_mask is not None:
        # As in Transformers' masks: it may come from another device, and be long enough for tokens to come.
        return -(attention_mask[:, first : first + num_keys].to(inputs_embeds.device) == 0).int()
    if past_key_values is None and position_ids is not None:
        return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).int().cumsum(dim=-1)
    return torch.zeros(1, num_keys, dtype=torch.int, device=inputs_embeds.device)


def create_masks(
    config: IHAConfig,
    geometries: list[tuple[str, int]],
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
) -> dict[tuple[str, int], torch.Tensor | None]:
    """The mask of each geometry (layer type, virtual tokens per token) among the layers, as Transformers builds it for the
    core of `config._attn_implementation`; where attention runs without a dense mask, the document of each token instead (see `_documents`).

    Args:
        geometries (`list[tuple[str, int]]`): (layer type, virtual tokens per token) of each layer.
        inputs_embeds (`torch.Tensor`): [batch, N, any]; gives batch, length, dtype and device.
        attention_mask (`torch.Tensor`, *optional*): over tokens: [batch, cached + N], nonzero for real tokens, or a custom
            boolean or additive [batch, 1, N, cached + N], within which sliding layers keep their window.
        position_ids (`torch.Tensor`, *optional*): [batch, N] in tokens; a restart begins a packed document.
    """
    if past_key_values is not None:
        keep_window_edge(past_key_values, geometries, config.sliding_window)
    batch_size, length = inputs_embeds.shape[:2]
    custom = attention_mask is not None and attention_mask.ndim == 4
    masks = {}
    for layer_idx, (layer_type, virtual) in enumerate(geometries):
        if (layer_type, virtual) in masks:
            continue
        sliding = layer_type == "sliding_attention"
        tokens = (inputs_embeds, attention_mask, past_key_values, position_ids)
        documents = _documents(config, (layer_type, virtual), *tokens, layer_idx)
        if documents is not None:
            masks[layer_type, virtual] = documents
            continue
        if virtual > 1:
            _check_mask_size(config, (layer_type, virtual), *tokens, layer_idx)
        if custom:
            if is_flash_attention_requested(config):
                raise ValueError(
                    f"attn_implementation={config._attn_implementation!r} takes no custom mask [batch, 1, queries, keys]: pass "
                    f"attention_mask [batch, keys], or use 'sdpa', 'eager' or 'flex_attention'."
                )
            window = config.sliding_window if sliding else None
            masks[layer_type, virtual] = _custom_mask(
                attention_mask, virtual, window, inputs_embeds.dtype, past_key_values, layer_idx
            )
            continue
        create_mask = create_sliding_window_causal_mask if sliding else create_causal_mask
        mask_kwargs = {
            "config": config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "position_ids": position_ids,
        }
        if virtual > 1:
            mask_kwargs["config"] = _Virtual(config, sliding_window=(config.sliding_window or 0) * virtual)
            mask_kwargs["inputs_embeds"] = inputs_embeds.new_empty(batch_size, length * virtual, 0)
            if attention_mask is not None:
                mask_kwargs["attention_mask"] = attention_mask.repeat_interleave(virtual, dim=1)
            if past_key_values is not None:
                mask_kwargs["past_key_values"] = _virtual_cache(past_key_values, virtual)
            if position_ids is not None:
                mask_kwargs["position_ids"] = virtual_positions(position_ids, virtual)
        masks[layer_type, virtual] = create_mask(**mask_kwargs, layer_idx=layer_idx)
    return masks


def keep_window_edge(past_key_values: Cache, geometries: list[tuple[str, int]], sliding_window: int | None) -> None:
    """Makes the sliding layers of a fresh stock cache keep one token more where P > 1. A window of W * P virtual tokens
    reaches from (n, p) back to (n - W, p + 1): all but the last pseudo-head still see token n - W, which a cache for a window of W
    tokens has dropped. A window of one token needs it for every P: a stock layer that should keep no token keeps them all."""
    for layer, (layer_type, virtual) in zip(past_key_values.layers, geometries):
        if layer_type != "sliding_attention" or (virtual == 1 and sliding_window > 1) or not layer.is_sliding:
            continue
        # A dynamic layer names its window, a static layer was cut to it; one that is shorter by choice stays.
        name = "sliding_window" if hasattr(layer, "sliding_window") else "max_cache_len"
        if getattr(layer, name) != sliding_window:
            continue
        if layer.get_seq_length() > 0:
            raise ValueError(
                f"The cache was filled for a window of sliding_window={sliding_window} tokens, but a sliding layer with "
                f"{virtual} virtual tokens per token needs one more. Pass a new cache, or none: the model makes its own."
            )
        setattr(layer, name, sliding_window + 1)
        if layer.is_initialized and name == "max_cache_len":
            layer.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])  # `generate` has allocated it
