# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Translate positions, lengths and documents from tokens to the virtual tokens of Interleaved Head Attention.

P pseudo-heads turn token n into the P consecutive virtual tokens n * P .. n * P + P - 1. Attention cores see virtual
tokens."""

from typing import Any

import torch
from transformers.cache_utils import Cache


def virtual_positions(position_ids: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Return positions n * P + p of virtual tokens, [batch, N * P], from positions n of tokens, [batch, N]."""
    offsets = torch.arange(num_pseudo_heads, device=position_ids.device)
    return (position_ids[..., None] * num_pseudo_heads + offsets).flatten(-2)


def virtual_kwargs(kwargs: dict, num_pseudo_heads: int) -> dict:
    """Convert the keyword arguments by which cores find windows and packed documents to virtual tokens.

    Positions become n * P + p even where RoPE shares n: a core would take a repeated position for a new document."""
    virtual = dict(kwargs)
    if kwargs.get("position_ids") is not None:
        virtual["position_ids"] = virtual_positions(kwargs["position_ids"], num_pseudo_heads)
    if kwargs.get("document_ids") is not None:
        virtual["document_ids"] = kwargs["document_ids"].repeat_interleave(num_pseudo_heads, dim=1)
    if kwargs.get("document_bounds") is not None:
        bounds, longest = kwargs["document_bounds"]
        virtual["document_bounds"] = bounds * num_pseudo_heads, longest * num_pseudo_heads
    for name in ("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if kwargs.get(name) is not None:
            virtual[name] = kwargs[name] * num_pseudo_heads
    return virtual


class Overlay:
    """Show an object, such as a config or a cache, with the attributes of `overrides` in place of its own."""

    def __init__(self, target: Any, **overrides):
        self._target, self._overrides = target, overrides

    def __getattr__(self, name: str) -> Any:
        return self._overrides[name] if name in self._overrides else getattr(self._target, name)


def virtual_cache(cache: Cache, num_pseudo_heads: int, past_rows: int) -> Any:
    """Show a cache of base keys and values in virtual tokens, where the last `past_rows` are queries, too."""

    def get_mask_sizes(query_length: int, layer_idx: int) -> tuple[int, int]:
        length, offset = cache.get_mask_sizes((query_length - past_rows) // num_pseudo_heads, layer_idx)
        return length * num_pseudo_heads, offset * num_pseudo_heads

    def get_query_offset(layer_idx: int) -> int:
        return cache.get_query_offset(layer_idx) * num_pseudo_heads - past_rows

    return Overlay(cache, get_query_offset=get_query_offset, get_mask_sizes=get_mask_sizes)
