# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend a chunk of tokens at a time: the virtual tokens of a long row never exist at once."""

from functools import partial

import torch

from .first_keys import FirstKeys
from .virtual_heads import VirtualHeads
from .windows import StockCore, window_attention


# Bytes of a chunk's virtual queries: few enough for them and their keys to stay in a CPU's cache. (1 MiB and 4 MiB
# were as fast, within 4%, on an Intel Xeon with AMX.)
CHUNK_BYTES = 2**21
# The fewest tokens of a chunk. With P = 16 and more each chunk is large, and shorter ones are no faster.
LEAST_TOKENS = 32


def may_chunk(
    heads: VirtualHeads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float | None
) -> bool:
    """Return whether chunks would save memory and time for base states [batch, H or G, N, head_dim].

    Chunks serve a CPU, without gradients. The backward pass would keep the virtual tokens of the whole row anyway, and
    a GPU would wait for many small calls. Paired heads make virtual tokens as views, which take no memory. With
    dropout there are no chunks: reentrant activation checkpointing computes a layer without gradients first and with
    gradients later, and both must draw the same random numbers."""
    if not heads.allocates_virtual_tokens or query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if dropout:
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(tensor.requires_grad for tensor in (query, key, value, *heads.weights))


def chunk_tokens(heads: VirtualHeads, query: torch.Tensor, window: int) -> int:
    """Return the number of tokens in a chunk, for a `window` in virtual keys.

    It is at least the window, because each chunk recomputes the keys of the window before it."""
    pseudo_heads = heads.num_pseudo_heads
    bytes_of_token = query[:, :, :1].numel() * pseudo_heads * query.element_size()
    return max(window // pseudo_heads, CHUNK_BYTES // bytes_of_token, LEAST_TOKENS)


def chunk_window(
    heads: VirtualHeads,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: FirstKeys | None,
    window: int | None,
    dropout: float | None,
) -> int | None:
    """Return the window in virtual keys by which to attend chunk by chunk, or `None` to take whole rows.

    `window` is that of the layer in virtual keys, or `None`."""
    if not may_chunk(heads, query, key, value, dropout):
        return None
    if mask is not None:
        window = mask.window_of_whole_rows(window)
    if window is None or query.shape[2] <= chunk_tokens(heads, query, window):
        return None
    return window


def attend_in_chunks(
    heads: VirtualHeads,
    stock: StockCore,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sliding_window: int,
    **kwargs,
) -> torch.Tensor:
    """Return the output [batch, N, H, head_dim] of `heads.attend` on `window_attention`, chunk by chunk.

    `sliding_window` is in virtual keys, a multiple of P; the states are over tokens. Each chunk also gets the keys of
    the window before it."""
    size = chunk_tokens(heads, query, sliding_window)
    before = sliding_window // heads.num_pseudo_heads
    attend = partial(window_attention, stock)
    outputs = []
    for start in range(0, query.shape[2], size):
        chunk = slice(start, start + size)
        # A chunk is at least as long as the window (`chunk_tokens`), so each one but the first has all of it before.
        reached = slice(max(0, start - before), start + size)
        states = (query[:, :, chunk], key[:, :, reached], value[:, :, reached])
        output, _ = heads.attend(attend, *states, None, sliding_window=sliding_window, **kwargs)
        outputs.append(output)
    return torch.cat(outputs, dim=1)
