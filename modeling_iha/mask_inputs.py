# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Hold what masks are made from, with all lengths in tokens."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing

from .configuration_iha import IHAConfig


class MaskKey(NamedTuple):
    """Hold what the mask of a layer depends on."""

    layer_type: str  # "full_attention" or "sliding_attention"
    num_pseudo_heads: int  # virtual tokens per token
    past_queries: int = 0  # queries of cached tokens that attention needs; the mask's first rows are theirs

    @property
    def is_sliding(self) -> bool:
        return self.layer_type == "sliding_attention"


@dataclass
class MaskInputs:
    """Hold what masks are made from, with all lengths in tokens."""

    config: IHAConfig
    inputs_embeds: torch.Tensor  # [batch, N, any]; gives batch, length, dtype and device
    # [batch, cached + N], nonzero for real tokens, or a custom boolean or additive [batch, 1, N, cached + N]. Sliding
    # layers keep their window under a custom mask.
    attention_mask: torch.Tensor | None = None
    past_key_values: Cache | None = None  # the cache before it takes the N tokens
    position_ids: torch.Tensor | None = None  # [batch or 1, N]; a restart begins a packed document
    attention_form: str | None = None  # see `IHAModel.attention_form`

    @property
    def has_custom_mask(self) -> bool:
        return self.attention_mask is not None and self.attention_mask.ndim != 2

    @cached_property  # the answer waits for a GPU
    def may_be_packed(self) -> bool:
        """Return whether positions restart in an input that has neither mask nor cache.

        Traced positions have no values, so they may restart."""
        if self.position_ids is None or self.attention_mask is not None or self.past_key_values is not None:
            return False
        return is_tracing(self.inputs_embeds) or bool((self.position_ids.diff(dim=-1) != 1).any())

    @cached_property
    def may_be_padded(self) -> bool:
        """Return True for a mask [batch, keys] that hides tokens, and for a traced one."""
        if self.attention_mask is None:
            return False
        return is_tracing(self.inputs_embeds) or not bool(self.attention_mask.all())

    @cached_property
    def has_holes(self) -> bool:
        """Return whether a mask [batch, keys] hides tokens between those that it shows."""
        if not self.may_be_padded:
            return False
        past = 0 if self.past_key_values is None else int(self.past_key_values.get_seq_length())
        real = self.attention_mask[:, : past + self.inputs_embeds.shape[1]] != 0
        return bool(((real[:, 1:] > real[:, :-1]).sum(dim=1) + real[:, 0] > 1).any())

    def document_ids(self, first: int, num_keys: int) -> torch.Tensor:
        """Return the document of each of `num_keys` keys from position `first` on, int [batch or 1, keys].

        Tokens of equal numbers may see each other. Padding has -1."""
        embeds, mask, positions = self.inputs_embeds, self.attention_mask, self.position_ids
        if mask is not None:
            # As Transformers allows, the mask may be on another device and may cover tokens to come.
            return -(mask[:, first : first + num_keys].to(embeds.device) == 0).int()
        if self.may_be_packed:
            return (positions.diff(prepend=positions[:, :1] - 1) != 1).int().cumsum(dim=-1)
        return torch.zeros(1, num_keys, dtype=torch.int, device=embeds.device)

    @cached_property
    def document_bounds(self) -> tuple[torch.Tensor, int]:
        """Return the bounds of the documents of an input without cached tokens, as `maskless_attention` takes them."""
        ids = self.document_ids(0, self.inputs_embeds.shape[1]).expand(len(self.inputs_embeds), -1)
        return find_document_bounds(ids)

    def key_span(self, layer_idx: int) -> tuple[int, int, int]:
        """Return (all cached tokens, tokens that the layer will see, position of the first that it sees)."""
        length, cache = self.inputs_embeds.shape[1], self.past_key_values
        if cache is None:
            return 0, length, 0
        return cache.get_query_offset(layer_idx), *cache.get_mask_sizes(length, layer_idx)


def find_document_bounds(document_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Compute the bounds that `maskless_attention` takes from ids [batch, N], waiting for a GPU once."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids.diff(dim=-1) != 0
    bounds = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel()).int()
    return bounds, int(bounds.diff().max())
