# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention within sliding windows and within packed documents for SDPA, a core that knows masks but neither of them.

A dense mask of L queries and L keys costs O(L^2) time and memory whatever the window. Here every block of queries gets
the keys that its window reaches, all blocks go through the core in one call as a batch, and the cost is
O(L * (window + BLOCK)). In an "iha" layer L = N * P and the window spans W * P virtual tokens: O(N W P^2) in all.
Without a window each document goes through the core by itself, which costs the sum of their squares and no mask.
"""

from collections.abc import Callable

import torch


# Queries to a block: long enough to keep the core busy, short enough that few keys outside the window are computed.
BLOCK = 128


def window_attention(
    core: Callable,
    document_ids: torch.Tensor,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    sliding_window: int,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Output [batch, L, H, head_dim] of causal attention in which query v sees the keys u with v - sliding_window < u
    <= v of its own document.

    Args:
        core: an attention function of Transformers that takes a boolean mask.
        document_ids: int [batch or 1, L], equal where tokens may see each other; padding is a document of its own.
        query, key, value: [batch, H or G, L, head_dim].
    """
    batch, _, length, head_dim = query.shape
    reach = sliding_window - 1
    end = -length % BLOCK
    span = BLOCK + reach

    def key_blocks(states: torch.Tensor) -> torch.Tensor:
        states = torch.nn.functional.pad(states, (0, 0, reach, end)).unfold(2, span, BLOCK)
        return states.permute(0, 2, 1, 4, 3).flatten(0, 1)

    query = torch.nn.functional.pad(query, (0, 0, 0, end)).unflatten(2, (-1, BLOCK)).transpose(1, 2).flatten(0, 1)
    # The filling at the start and at the end is a document too, so that every query sees at least itself.
    document_ids = torch.nn.functional.pad(document_ids.expand(batch, -1), (reach, end), value=-2)
    key_ids = document_ids.unfold(1, span, BLOCK)
    i, j = torch.arange(BLOCK, device=query.device)[:, None], torch.arange(span, device=query.device)
    mask = (i <= j) & (j <= i + reach) & (key_ids[..., reach:, None] == key_ids[..., None, :])

    output, _ = core(module, query, key_blocks(key), key_blocks(value), mask.flatten(0, 1).unsqueeze(1), **kwargs)
    return output.reshape(batch, -1, *output.shape[2:])[:, :length], None


def document_attention(
    core: Callable,
    document_ids: torch.Tensor,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Output [1, L, H, head_dim] of causal attention within each run of equal `document_ids`, int [1, L]; the other
    arguments as in `window_attention`, of one row."""
    lengths = document_ids[0].unique_consecutive(return_counts=True)[1].tolist()
    documents = zip(*(states.split(lengths, dim=2) for states in (query, key, value)))
    return torch.cat([core(module, *states, None, **kwargs)[0] for states in documents], dim=1), None
