"""The virtual sequence of Interleaved Head Attention: what a stock attention core must be told about it.

P pseudo-heads turn token n into the P consecutive virtual tokens n * P .. n * P + P - 1. Masks, windows, document boundaries
and cache lengths are given in tokens; the cores see virtual tokens. This file holds every translation between the two.
"""

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from .configuration_iha import IHAConfig


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


def _expand_4d_mask(mask: torch.Tensor, num_virtual_tokens: int) -> torch.Tensor:
    """A custom mask [batch, heads or 1, queries, keys] for virtual tokens. It says nothing about the virtual tokens of one
    token, which stay causal; the last query is taken to be the last key."""
    mask = mask.repeat_interleave(num_virtual_tokens, dim=-1).repeat_interleave(num_virtual_tokens, dim=-2)
    queries, keys = mask.shape[-2:]
    q = torch.arange(keys - queries, keys, device=mask.device)[:, None]
    k = torch.arange(keys, device=mask.device)
    later_pseudo_head = (k > q) & (k // num_virtual_tokens == q // num_virtual_tokens)
    return mask.masked_fill(later_pseudo_head, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)


def create_masks(
    config: IHAConfig,
    geometries: list[tuple[str, int]],
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor | None,
) -> dict[tuple[str, int], torch.Tensor | None]:
    """The mask of each geometry (layer type, virtual tokens per token) among the layers, as Transformers builds it for the
    core of `config._attn_implementation`.

    Args:
        geometries (`list[tuple[str, int]]`): (layer type, virtual tokens per token) of each layer.
        inputs_embeds (`torch.Tensor`): [batch, N, any]; gives batch, length, dtype and device.
        attention_mask (`torch.Tensor`, *optional*): over tokens: [batch, cached + N], nonzero for real tokens, or a custom
            boolean or additive [batch, 1, N, cached + N].
        position_ids (`torch.Tensor`, *optional*): [batch, N] in tokens; a restart begins a packed document.
    """
    if past_key_values is not None:
        keep_window_edge(past_key_values, geometries, config.sliding_window)
    batch_size, length = inputs_embeds.shape[:2]
    masks = {}
    for layer_idx, (layer_type, virtual) in enumerate(geometries):
        if (layer_type, virtual) in masks:
            continue
        create_mask = create_sliding_window_causal_mask if layer_type == "sliding_attention" else create_causal_mask
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
            if attention_mask is not None and attention_mask.ndim == 2:
                mask_kwargs["attention_mask"] = attention_mask.repeat_interleave(virtual, dim=1)
            elif attention_mask is not None:
                mask_kwargs["attention_mask"] = _expand_4d_mask(attention_mask, virtual)
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
        if layer.is_initialized:
            raise ValueError(
                f"The cache was allocated for a window of sliding_window={sliding_window} tokens, but a sliding layer with "
                f"{virtual} virtual tokens per token needs one more. Pass a new cache, or none: the model makes its own."
            )
        setattr(layer, name, sliding_window + 1)
