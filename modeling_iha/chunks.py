# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend a chunk of tokens at a time: the virtual tokens of a long row never exist at once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .windows import row_window, window_attention


# Bytes of the virtual queries of a chunk. They and their keys then stay in the cache of a CPU. (1 and 4 MiB were as
# fast within 4% on an Intel Xeon with AMX.)
CHUNK_BYTES = 2**21


def chunk_window(
    heads: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, window: int | None
) -> int | None:
    """Return the window, in virtual keys, of a call that goes in chunks, and `None` for any other.

    That is a call on a CPU, without gradients, whose rows are one document each. (The backward pass keeps the virtual
    tokens of a whole row in any case, and a GPU would wait for many small calls.)

    Args:
        heads: what makes virtual tokens. Those of paired heads are views, and take no memory.
        query, key, value: base states [batch, H or G, N, head_dim].
        mask: `None` for causal attention within the `window`, or a mask of first keys, which has its own.
    """
    if not heads.expands or query.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    weights = (each for each in heads if isinstance(each, torch.Tensor))
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value, *weights)):
        return None
    window = row_window(mask, window)
    is_long = window is not None and query.shape[2] > chunk_tokens(heads, query, window)
    return window if is_long else None


def chunk_tokens(heads: Any, query: torch.Tensor, window: int) -> int:
    """Return the tokens of a chunk: no fewer than the window has, because each chunk makes those keys anew."""
    pseudo_heads = heads.num_pseudo_heads
    bytes_of_token = query[:, :, :1].numel() * pseudo_heads * query.element_size()
    return max(window // pseudo_heads, CHUNK_BYTES // bytes_of_token, 1)


def attend_in_chunks(
    heads: Any,
    core: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sliding_window: int,
    **kwargs,
) -> torch.Tensor:
    """Return the output [batch, N, H, head_dim] of `heads.attend` on `window_attention`, chunk by chunk.

    The keys of a chunk begin a window before it. `sliding_window` is in virtual keys, and the
    states are those of tokens."""
    size, before = chunk_tokens(heads, query, sliding_window), sliding_window // heads.num_pseudo_heads
    attend = partial(window_attention, core, module)
    outputs = []
    for start in range(0, query.shape[2], size):
        own, seen = slice(start, start + size), slice(max(0, start - before), start + size)
        states = (query[:, :, own], key[:, :, seen], value[:, :, seen])
        outputs.append(heads.attend(attend, *states, None, sliding_window=sliding_window, **kwargs)[0])
    return torch.cat(outputs, dim=1)
