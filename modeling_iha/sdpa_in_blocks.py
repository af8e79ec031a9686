# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend within a window in blocks of queries: `attn_implementation="sdpa_in_blocks"`.

PyTorch's SDPA needs a dense mask for a window, and computes all pairs of it, O(length^2). Here each block of queries
meets the keys that its window reaches, O(length * window). In half precision a GPU takes PyTorch's FlashAttention
(`varlen_attn`).

The function takes what FlashAttention takes in Transformers: a mask that is `None` or [batch, keys], and the window as
`sliding_window`. So it serves every decoder with windows that supports FlashAttention. Packed documents begin where
`position_ids` do not increase by one. Given such positions, Transformers makes a dense mask, which goes to SDPA, as do
calls without a window or with cached keys. Documents are found here only if the mask was made without positions.
"""

from inspect import signature
from itertools import repeat
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of PyTorch without it
    varlen_attn = None


VARLEN_ARGUMENTS = frozenset(signature(varlen_attn).parameters if varlen_attn else ())  # PyTorch 2.10 has no windows
NAME = "sdpa_in_blocks"
LEAST_BLOCK = 128  # queries of a block. Rows that are longer than their window by at most this go to SDPA.
CPU_CACHE_BYTES = 2**21  # of what is computed at once without gradients


def takes_blocks(length: int, window: int | None) -> bool:
    """Return whether blocks are faster than a dense mask for rows of `length` tokens."""
    if window is None or (torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()):
        return False  # an export would specialize the graph to a range of lengths
    return length - window > LEAST_BLOCK


def mask_in_blocks(
    attention_mask: torch.Tensor | None = None, local_size: int | None = None, config=None, **kwargs
) -> torch.Tensor | None:
    """Return `None` or [batch, keys] where `sdpa_in_blocks` computes blocks, and SDPA's mask everywhere else.

    Blocks know no rule but the window. `allow_is_causal_skip` is false where Transformers adds another one, such as
    documents, and `attention_chunk_size` is set where `local_size` is that of chunks."""
    length, offset = kwargs["kv_length"], kwargs.get("q_offset", 0)
    is_whole_row = isinstance(offset, int) and offset == kwargs.get("kv_offset", 0) and length == kwargs["q_length"]
    is_window = kwargs.get("allow_is_causal_skip", True) and getattr(config, "attention_chunk_size", None) is None
    if not (is_whole_row and is_window and takes_blocks(length, local_size)):
        if local_size is not None and not is_tracing() and local_size >= length:
            local_size = None  # the window hides no key, so SDPA may go without a mask
        return sdpa_mask(attention_mask=attention_mask, local_size=local_size, **kwargs)
    if attention_mask is None or (not is_tracing(attention_mask) and attention_mask.all()):
        return None
    attention_mask = attention_mask[:, :length]  # it may have columns for tokens to come
    return attention_mask.bool().expand(kwargs["batch_size"], -1)


def sdpa_in_blocks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Return causal attention [batch, length, H, head_dim] within a window, as an attention function of Transformers.

    Queries are [batch, H, length, head_dim], keys and values [batch, G, length, head_dim]. Query v sees the keys u of
    its document with v - sliding_window < u <= v."""
    batch, heads, length, _ = query.shape
    is_dense = attention_mask is not None and attention_mask.ndim == 4
    # An export has dense masks, and comparing the lengths first would specialize its graph.
    if is_dense or sliding_window is None or key.shape[2] != length or sliding_window >= length:
        kwargs["position_ids"] = position_ids
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"attn_implementation={NAME!r} does not support {unknown[0]}: use 'eager'.")

    starts = None
    if attention_mask is None and position_ids is not None:  # next to padding, positions declare no documents
        starts = pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True).expand(batch, -1)
    options = {"dropout": dropout, "scaling": scaling}
    can_list = starts is None or not torch.compiler.is_compiling()  # to list documents would break a compiled graph
    if attention_mask is None and can_list and has_varlen_kernel(query, value, dropout):
        return attend_by_varlen(query, key, value, starts, sliding_window, scaling), None
    if torch.compiler.is_compiling() or attention_mask is not None or (starts is not None and starts[:, 1:].any()):
        return attend_in_joined_rows(query, key, value, attention_mask, starts, sliding_window, **options), None
    if batch == 1:
        return attend_in_a_row(module, query, key, value, sliding_window, **options), None
    rows = zip(query.split(1), key.split(1), value.split(1))
    return torch.cat([attend_in_a_row(module, *row, sliding_window, **options) for row in rows]), None


def attend_in_a_row(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, **options
) -> torch.Tensor:
    """Return the output of one row that is one document.

    Its first `window` queries need no mask, and all blocks after them have the same one."""
    first, others = query.split((window, query.shape[2] - window), dim=2)
    # Copy the first queries: autograd would keep the whole tensor behind a view.
    begin, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, first.contiguous(), key[:, :, :window], value[:, :, :window], None, **options
    )
    block = block_size(query, window)
    queries = torch.arange(block, device=query.device)[:, None] + window
    keys = torch.arange(window + block, device=query.device)
    mask = (queries - window < keys) & (keys <= queries)
    end = attend_in_blocks(others.squeeze(0), key.squeeze(0), value.squeeze(0), mask[None], window, **options)
    return torch.cat((begin, end[None]), dim=1)


def attend_in_joined_rows(query, key, value, attention_mask, starts, window: int, **options) -> torch.Tensor:
    """Return the output of rows with documents (`starts`, boolean [batch, length]) or padding, joined into one row.

    `first` is the place of the earliest key that a query sees, in its row, document and window. Compiled calls that
    FlashAttention does not take come here too, because this is one graph."""
    batch, _, length, _ = query.shape
    block = block_size(query, window)
    total = batch * length
    rest = -total % block
    place = torch.arange(total + rest, device=query.device)
    if starts is None:
        start = place // length * length
    else:
        start = torch.where(pad(starts.flatten(), (0, rest), value=True), place, 0).cummax(dim=0).values
    first = torch.maximum(start, place - window + 1).unflatten(0, (-1, block, 1))
    queries = place.unflatten(0, (-1, block, 1))
    keys = queries[:, :1] - window + torch.arange(window + block, device=query.device)
    mask = (first <= keys) & (keys <= queries)  # [count, block, window + block]
    if attention_mask is not None:
        real = pad(attention_mask.flatten(), (window, rest)).unfold(0, window + block, block)
        mask = mask & (real[:, None] | (keys == queries))  # padding sees itself, so that no row of the mask is empty
    key, value = (pad(join_rows(states), (0, 0, window, 0)) for states in (key, value))
    return attend_in_blocks(join_rows(query), key, value, mask, window, **options).unflatten(0, (batch, length))


def attend_in_blocks(query, key, value, mask, window: int, dropout: float, scaling: float | None) -> torch.Tensor:
    """Return the output [length, H, head_dim] of blocks of queries, each with the keys that its window reaches.

    Queries are [H, length, head_dim], and keys and values [G, window + length, head_dim] begin `window` keys before
    them. `mask` is boolean, [blocks or 1, block, window + block]."""
    heads, length, _ = query.shape
    groups = key.shape[0]
    block = mask.shape[1]
    if rest := -length % block:
        query, key, value = (pad(states, (0, 0, 0, rest)) for states in (query, key, value))
    # The heads of a group become rows of one head, because SDPA would copy the keys for each of them.
    query = query.unflatten(1, (-1, block)).unflatten(0, (groups, -1))  # [G, H / G, blocks, block, head_dim]
    query = query.permute(2, 0, 1, 3, 4).flatten(2, 3)  # [blocks, G, H / G * block, head_dim]
    key, value = (OverlappingBlocks.apply(states, block, window) for states in (key, value))
    mask = mask.repeat(1, heads // groups, 1)[:, None]

    def attend(query, key, value, mask) -> torch.Tensor:
        output = scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scaling)
        output = output.unflatten(2, (-1, block)).permute(0, 3, 1, 2, 4)  # [blocks, block, G, H / G, head_dim]
        return output.flatten(2, 3).flatten(0, 1)

    size = at_once(query, dim=0)
    if size >= len(query):  # to split into one part would copy gradients
        return attend(query, key, value, mask)[:length]
    masks = mask.split(size) if len(mask) > 1 else repeat(mask)
    parts = zip(query.split(size), key.split(size), value.split(size), masks)
    return torch.cat([attend(*part) for part in parts])[:length]


def is_plain_forward(states: torch.Tensor) -> bool:
    """Return whether a CPU runs uncompiled code without gradients, which takes a little at a time."""
    return states.device.type == "cpu" and not torch.is_grad_enabled() and not is_tracing(states)


def block_size(states: torch.Tensor, window: int) -> int:
    """Return the number of queries in a block. Smaller blocks compute fewer masked pairs, but gradients copy keys."""
    return LEAST_BLOCK if is_plain_forward(states) else max(LEAST_BLOCK, window // 4)


def join_rows(states: torch.Tensor) -> torch.Tensor:
    """Return states [batch, heads, length, head_dim] as one row [heads, batch * length, head_dim]."""
    return states.transpose(1, 2).flatten(0, 1).transpose(0, 1)


def at_once(states: torch.Tensor, dim: int, growth: int = 1) -> int:
    """Return how many slices to compute at once, with results `growth` times as large: all, or what a CPU caches."""
    count = states.shape[dim]
    return max(1, CPU_CACHE_BYTES * count // (states.nbytes * growth)) if is_plain_forward(states) else count


class OverlappingBlocks(torch.autograd.Function):
    """View states [heads, window + count * block, head_dim] as blocks [count, heads, window + block, head_dim].

    On a CPU the gradient of PyTorch's `unfold` takes several times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(states: torch.Tensor, block: int, window: int) -> torch.Tensor:
        return states.unfold(1, window + block, block).permute(1, 0, 3, 2)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.block, ctx.length = inputs[1], inputs[0].shape[1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        count, heads, _, head_dim = gradient.shape
        # Cut the keys into pieces of `block`: block i has the pieces i, i + 1, ..., the last perhaps not whole.
        parts = gradient.split(ctx.block, dim=2)
        total = gradient.new_zeros(heads, count + len(parts) - 1, ctx.block, head_dim)
        for place, part in enumerate(parts):
            total[:, place : place + count, : part.shape[2]] += part.transpose(0, 1)
        return total.flatten(1, 2)[:, : ctx.length], None, None


def has_varlen_kernel(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Return whether PyTorch's FlashAttention takes these states: half precision, on a GPU from Ampere on."""
    if "window_size" not in VARLEN_ARGUMENTS or query.device.type != "cuda" or dropout:
        return False
    fits = query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    is_half = value.dtype in (torch.float16, torch.bfloat16)
    return fits and is_half and torch.cuda.get_device_properties(query.device).major >= 8


def attend_by_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor | None, window: int, scale: Any
) -> torch.Tensor:
    """Compute `sdpa_in_blocks` by one call of FlashAttention on the documents of all rows."""
    batch, heads, length, _ = query.shape
    if "enable_gqa" not in VARLEN_ARGUMENTS:  # PyTorch 2.11 lacks it
        key, value = (states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value))
    options = {} if key.shape[1] == heads else {"enable_gqa": True}
    if starts is None:
        bounds = torch.arange(batch + 1, device=query.device, dtype=torch.int32) * length
    else:
        bounds = pad(starts.flatten().nonzero().flatten(), (0, 1), value=batch * length).int()
    states = [each.to(value.dtype).transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    # `length` is an upper bound of the longest document: to find it would mean to wait for the GPU once more.
    output = varlen_attn(*states, bounds, bounds, length, length, scale=scale, window_size=(window - 1, 0), **options)
    return output.unflatten(0, (batch, length))


# The public registries of Transformers. A second copy of this code, in a checkpoint, leaves what the first registered.
if NAME not in ALL_ATTENTION_FUNCTIONS:
    AttentionInterface.register(NAME, sdpa_in_blocks)
    AttentionMaskInterface.register(NAME, mask_in_blocks)
