# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend a chunk of tokens at a time: the virtual tokens of a long row never exist at once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .windows import row_window, window_attention


# Bytes of a chunk's virtual queries: few enough for them and their keys to stay in a CPU's cache. (1 MiB and 4 MiB
# were as fast, within 4%, on an Intel Xeon with AMX.)
CHUNK_BYTES = 2**21
# The fewest tokens of a chunk. With P = 16 and more each chunk is large, and shorter ones are no faster.
LEAST_TOKENS = 32


def chunk_window(
    heads: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, window: int | None
) -> int | None:
    """Return the window in virtual keys if the call is computed chunk by chunk, and `None` otherwise.

    Chunks serve a CPU, without gradients, where each row is one document. The backward pass would keep the virtual
    tokens of the whole row anyway, and a GPU would wait for many small calls.

    Args:
        heads: what makes virtual tokens. Paired heads make them as views, which take no memory.
        query, key, value: base states [batch, H or G, N, head_dim].
        mask: `None` for causal attention within the `window`, or a mask of first keys, which has its own.
    """
    if not _may_chunk(heads, query, key, value):
        return None
    window = row_window(mask, window)
    if window is None or query.shape[2] <= chunk_tokens(heads, query, window):
        return None
    return window


def _may_chunk(heads: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether chunks would save memory and time: on a CPU, for heads that expand, without gradients."""
    if not heads.expands or query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(tensor.requires_grad for tensor in (query, key, value, *heads.weights))


def chunk_tokens(heads: Any, query: torch.Tensor, window: int) -> int:
    """Return the number of tokens in a chunk. It is at least the window, because each chunk makes its keys anew."""
    pseudo_heads = heads.num_pseudo_heads
    bytes_of_token = query[:, :, :1].numel() * pseudo_heads * query.element_size()
    return max(window // pseudo_heads, CHUNK_BYTES // bytes_of_token, LEAST_TOKENS)


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

    `sliding_window` is in virtual keys; the states are over tokens. Each chunk also gets the keys of the window before
    it."""
    size = chunk_tokens(heads, query, sliding_window)
    before = sliding_window // heads.num_pseudo_heads
    attend = partial(window_attention, core, module)
    outputs = []
    for start in range(0, query.shape[2], size):
        chunk = slice(start, start + size)
        reached = slice(max(0, start - before), start + size)
        states = (query[:, :, chunk], key[:, :, reached], value[:, :, reached])
        output, _ = heads.attend(attend, *states, None, sliding_window=sliding_window, **kwargs)
        outputs.append(output)
    return torch.cat(outputs, dim=1)
