# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend within windows and documents on a stock core, with a dense mask only where it is faster or needed.

`FirstKeys` say which keys a query sees. Attention is computed in blocks of queries, document by document, or by
PyTorch's FlashAttention. Lengths and windows are counted in the keys that the core sees, which are virtual tokens in a
layer with virtual heads."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .first_keys import Documents, FirstKeys, narrower
from .overlay import Overlay


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of PyTorch without it
    varlen_attn = None


# The smallest block of queries. Larger blocks copy fewer keys and compute more pairs outside the window.
MIN_BLOCK = 128
# A dense mask is faster than blocks for rows of at most so many keys, and for windows that leave out at most so many.
DENSE_KEYS = 128
# Rows are joined into one while heads * tokens is at most this. In longer rows copies and masks cost as much as the
# saved calls.
JOINED_ROW = 2048


class StockCore(NamedTuple):
    """Call an attention function of Transformers, such as that of "sdpa", for one attention module."""

    attention_function: Callable
    module: Any  # an attention module, or an `Overlay` of one

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [batch, L, H, head_dim] and, where the core gives them, the attention weights."""
        return self.attention_function(self.module, query, key, value, attention_mask, **kwargs)

    def without_groups(self) -> "StockCore":
        """Return the core for as many heads of keys as of queries."""
        return StockCore(self.attention_function, Overlay(self.module, num_key_value_groups=1))


def first_key_attention(
    stock: StockCore,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_keys: FirstKeys,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, L, H, head_dim] of attention by first keys and within a window.

    Query v sees the keys u with first[v] <= u <= v and v - sliding_window < u. The first of these that applies is
    used:

    - only a window: PyTorch's FlashAttention on a GPU in half precision, and elsewhere `window_attention`
    - compiled code that knows a window, of the layer or of the first keys, with more than DENSE_KEYS keys outside it:
      blocks of all rows in one call
    - other compiled code, at most DENSE_KEYS keys, or padding that sees nothing: a dense mask
    - documents on a GPU in half precision: PyTorch's FlashAttention
    - rows of one document: `window_attention`
    - other documents: `window_attention` for one after the other

    In blocks the cost is O(L * window), which is O(N W P^2) in an "iha" layer; with a dense mask it is O(L^2).
    Queries, keys and values are [batch, H or G, L, head_dim], and the core takes a boolean mask."""
    length = query.shape[2]
    states = (query, key, value)
    if first_keys.first is None:
        return _attend_in_only_a_window(stock, *states, first_keys, sliding_window, **kwargs)
    if torch.compiler.is_compiling():  # it cannot read the values
        return _attend_when_compiled(stock, *states, first_keys, sliding_window, **kwargs)
    if length <= DENSE_KEYS:
        return stock(*states, _dense_mask(first_keys, sliding_window), **kwargs)
    documents = first_keys.documents()
    if documents.has_hidden_padding:
        return stock(*states, _dense_mask(first_keys, sliding_window), **kwargs)
    # No query sees more keys than `longest_span`: within documents a window of that length hides what `first` hides.
    window = narrower(documents.longest_span, sliding_window)
    if _has_varlen_kernel(*states, **kwargs):
        return varlen_attention(documents, *states, window, **kwargs)
    if documents.is_one_document_per_row(len(query), length):
        return window_attention(stock, *states, None, window, **kwargs)
    return _attend_by_document(stock, *states, documents, window, **kwargs)


def _attend_in_only_a_window(
    stock: StockCore, query, key, value, first_keys: FirstKeys, sliding_window: int | None, **kwargs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output of `first_key_attention` where first keys say only a window."""
    batch, _, length, _ = query.shape
    window = narrower(first_keys.window, sliding_window)
    if not _has_varlen_kernel(query, key, value, **kwargs):
        return window_attention(stock, query, key, value, None, window, **kwargs)
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
    rows = Documents(bounds, length, window)
    return varlen_attention(rows, query, key, value, window, **kwargs)


def _attend_when_compiled(
    stock: StockCore, query, key, value, first_keys: FirstKeys, sliding_window: int | None, **kwargs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output of `first_key_attention` in compiled code, by the values of first keys."""
    window = sliding_window if first_keys.window is None else narrower(first_keys.window, sliding_window)
    if window is not None and first_keys.length - window > DENSE_KEYS:
        return _attend_in_padded_blocks(stock, query, key, value, window, first_keys, **kwargs), None
    return stock(query, key, value, _dense_mask(first_keys, sliding_window), **kwargs)


def _dense_mask(first_keys: FirstKeys, window: int | None) -> torch.Tensor:
    """Return the boolean mask [batch, 1, L, L] of first keys and a window."""
    first = first_keys.first[:, None]  # [batch, 1, L]
    place = torch.arange(first_keys.length, device=first.device)
    distance = place[:, None] - place
    is_padding = first > place
    mask = (distance >= 0) & (place >= first[..., None]) & ~is_padding[..., None, :]
    if window is not None:
        mask = mask & (distance < window)
    return mask


def _attend_by_document(
    stock: StockCore, query, key, value, documents: Documents, window: int, **kwargs
) -> tuple[torch.Tensor, None]:
    """Return the output of `first_key_attention`, computed for one document after the other."""
    batch, _, length, _ = query.shape
    lengths = documents.bounds.diff().tolist()
    # The gradient of `split` is one concatenation; that of each slice would be a tensor as long as all documents.
    split = [states.transpose(0, 1).flatten(1, 2).split(lengths, dim=1) for states in (query, key, value)]
    outputs = []
    for queries, keys, values in zip(*split):
        # Copy the queries: autograd would keep the whole tensor behind a view.
        states = (queries[None].contiguous(), keys[None], values[None])
        output, _ = window_attention(stock, *states, None, window, **kwargs)
        outputs.append(output)
    return torch.cat(outputs, dim=1).view(batch, length, *outputs[0].shape[2:]), None


def window_attention(
    stock: StockCore,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,  # always `None`; `MixedHeads.attend` passes a mask to every function
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, L, H, head_dim] of causal attention, within `sliding_window` keys unless it is `None`.

    The core has to be causal without a mask, as SDPA is. `virtual_mask` makes a mask for every core that is not.

    A dense mask costs O(L^2) time and memory regardless of the window, and is faster where L is only slightly longer
    than the window. Elsewhere every block of queries gets the keys that its window reaches. One call of the core
    computes all whole blocks of a row, as a batch with one small mask, at a cost of O(L * window). Blocks of keys
    overlap, and are views. Copies would be kept for the backward pass and take (block + window) / block times the
    memory of the keys and values."""
    batch, num_heads, length, _ = query.shape
    window = sliding_window
    # The number of keys before the queries' own: 0, or exactly `window`, as `attend_in_chunks` passes them.
    before = key.shape[2] - length
    if window is None or before + length <= window:
        return stock(query, key, value, None, **kwargs)
    if length - window <= DENSE_KEYS and before == 0:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        return stock(query, key, value, mask[None, None], **kwargs)
    if torch.compiler.is_compiling():
        return _attend_in_padded_blocks(stock, query, key, value, window, **kwargs), None
    if batch > 1 and num_heads * length <= JOINED_ROW and before == 0:
        return _attend_in_joined_rows(stock, query, key, value, window, **kwargs), None
    rows = zip(query.split(1), key.split(1), value.split(1))
    outputs = [_attend_in_blocks(stock, q, k, v, window, **kwargs) for q, k, v in rows]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output, None


def _join_rows(states: torch.Tensor) -> torch.Tensor:
    """Return states [batch, heads, L, head_dim] as one row [heads, batch * L, head_dim]."""
    return states.transpose(1, 2).flatten(0, 1).transpose(0, 1)


def _attend_in_joined_rows(stock: StockCore, query, key, value, window: int, **kwargs) -> torch.Tensor:
    """Return the output of `window_attention` for short rows, joined into one.

    Overlapping blocks can be a view of one row, but not of several rows."""
    batch, _, length, _ = query.shape
    query = _join_rows(query)[None]
    key = _join_rows(key)[None]
    value = _join_rows(value)[None]
    output = _attend_in_blocks(stock, query, key, value, window, length, **kwargs)
    return output.view(batch, length, *output.shape[2:])


def _attend_in_blocks(
    stock: StockCore, query, key, value, window: int, row_length: int | None = None, **kwargs
) -> torch.Tensor:
    """Return the output of `window_attention` for more keys than the window has, and a batch of 1.

    With a `row_length`, the L tokens are several rows of `row_length` tokens each, and no row sees another."""
    _, _, length, _ = query.shape
    num_keys = key.shape[2]
    # The first `window` queries see all keys before them. They need no mask, because query 0 is at key 0. If the keys
    # of a whole window come before query 0, there are no such queries.
    num_first = window - (num_keys - length)
    block = min(block_size(window), length - num_first)
    num_last = (length - num_first) % block
    num_in_blocks = length - num_first - num_last
    # The gradient of `split` is one concatenation; that of each slice would be a tensor as long as all queries.
    first_queries, block_queries, last_queries = query.split((num_first, num_in_blocks, num_last), dim=2)
    outputs = []
    if num_first > 0:
        # Copy the queries: autograd would keep the whole tensor behind a view.
        states = (first_queries.contiguous(), key[:, :, :window], value[:, :, :window])
        outputs.append(stock(*states, None, **kwargs)[0])
    mask = _block_mask(block, window, query.device)
    # The blocks get key 0 too, which none of their queries sees. So the whole tensor is passed where `num_last` is 0:
    # the gradient of a slice would be one more tensor as long as all states.
    end = num_keys - num_last
    states = (block_queries, key[:, :, :end], value[:, :, :end])
    outputs.append(_attend_in_equal_blocks(stock, *states, mask, num_first, row_length, **kwargs))
    if num_last > 0:
        start = num_keys - num_last - window
        states = (last_queries, key[:, :, start:], value[:, :, start:])
        last_mask = mask[:num_last, : num_last + window]
        outputs.append(_attend_in_equal_blocks(stock, *states, last_mask, length - num_last, row_length, **kwargs))
    return torch.cat(outputs, dim=1)


def _attend_in_equal_blocks(
    stock: StockCore,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    first_query: int,
    row_length: int | None,
    **kwargs,
) -> torch.Tensor:
    """Return the output [1, queries, H, head_dim] of blocks of `size` queries.

    Args:
        query: [1, H, blocks * size, head_dim].
        key, value: [1, G, window + blocks * size, head_dim], of the queries' tokens and the `window` before them.
        mask: that of a block, boolean [size, size + window] (see `_block_mask`).
        first_query: the place of the first query among the tokens of all rows.
        row_length: the tokens of a row, or `None` if there is only one row.
    """
    size, num_keys = mask.shape
    window = num_keys - size
    mask = mask[None]  # [1, size, size + window]
    if row_length is not None:
        query_places = torch.arange(first_query, first_query + query.shape[2], device=query.device).view(-1, size, 1)
        row_starts = query_places // row_length * row_length  # [blocks, size, 1]
        key_places = query_places[:, :1] - window + torch.arange(num_keys, device=query.device)
        mask = mask & (key_places >= row_starts)
    key = _overlapping_blocks(key.squeeze(0), size, window)
    value = _overlapping_blocks(value.squeeze(0), size, window)
    return _attend_with_folded_groups(stock, query.squeeze(0), key, value, mask, **kwargs)[None]


def _attend_with_folded_groups(
    stock: StockCore, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **kwargs
) -> torch.Tensor:
    """Return the output [blocks * size, H, head_dim] of blocks of queries, by one call of the core.

    The heads of a group become rows of one head, because a core would copy the keys for each of them.

    Args:
        query: [H, blocks * size, head_dim].
        key, value: [blocks, G, size + window, head_dim].
        mask: boolean [blocks or 1, size, size + window].
    """
    num_heads = query.shape[0]
    size = mask.shape[1]
    group = num_heads // key.shape[1]
    query = query.unflatten(1, (-1, size))  # [H, blocks, size, head_dim]
    query = query.unflatten(0, (-1, group))  # [G, group, blocks, size, head_dim]
    query = query.permute(2, 0, 1, 3, 4).flatten(2, 3)  # [blocks, G, group * size, head_dim]
    mask = mask.repeat(1, group, 1)[:, None]  # [blocks or 1, 1, group * size, size + window]
    # [blocks, group * size, G, head_dim]
    output, _ = stock.without_groups()(query, key, value, mask, **kwargs)
    output = output.unflatten(1, (group, size)).permute(0, 2, 3, 1, 4)  # [blocks, size, G, group, head_dim]
    return output.reshape(-1, num_heads, output.shape[-1])


class _OverlappingBlocks(torch.autograd.Function):
    """View keys as overlapping blocks, as `_overlapping_blocks` says.

    `unfold` alone would do, but its gradient takes several times as long on a CPU as the few sums below."""

    generate_vmap_rule = True

    @staticmethod
    def forward(states: torch.Tensor, size: int, window: int) -> torch.Tensor:
        return _unfold(states, size, window)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.size, ctx.window = inputs

    @staticmethod
    def jvp(ctx, tangent: torch.Tensor, *sizes) -> torch.Tensor:
        return _unfold(tangent, ctx.size, ctx.window)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        blocks, groups, num_keys, head_dim = gradient.shape
        # A block reaches over its own place and those of the next blocks, a part of `size` keys in each.
        parts = gradient.split(ctx.size, dim=2)
        total = gradient.new_zeros(groups, blocks + len(parts) - 1, ctx.size, head_dim)
        for place, part in enumerate(parts):
            total[:, place : place + blocks, : part.shape[2]] += part.transpose(0, 1)
        return total.flatten(1, 2)[:, : ctx.window + blocks * ctx.size], None, None


def _overlapping_blocks(states: torch.Tensor, size: int, window: int) -> torch.Tensor:
    """View states [G, window + blocks * size, head_dim] as blocks [blocks, G, size + window, head_dim].

    Each block begins `window` tokens before its queries."""
    if torch.compiler.is_compiling() or not states.requires_grad:
        return _unfold(states, size, window)
    return _OverlappingBlocks.apply(states, size, window)


def _unfold(states: torch.Tensor, size: int, window: int) -> torch.Tensor:
    """Compute `_overlapping_blocks` by PyTorch's `unfold`."""
    blocks = states.unfold(1, size + window, size)  # [G, blocks, head_dim, size + window]
    return blocks.permute(1, 0, 3, 2)


def _block_mask(size: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the boolean mask [size, size + window] of a window, for a block of queries over its keys."""
    # Key j of a block lies at j - window from its first query: query i sees the keys at i - window + 1 to i.
    query = torch.arange(size, device=device)[:, None]
    key = torch.arange(size + window, device=device)
    return (query < key) & (key <= query + window)


def _attend_in_padded_blocks(
    stock: StockCore, query, key, value, window: int, first_keys: FirstKeys | None = None, **kwargs
) -> torch.Tensor:
    """Return the output of `window_attention` by one call of the core, on rows joined and padded to whole blocks.

    Compiled code takes this form, because one graph serves every length. `first_keys` separate documents and hide
    padding."""
    batch, _, length, _ = query.shape
    device = query.device
    block = block_size(window)
    total = batch * length
    blocks = (total + block - 1) // block
    padding = blocks * block - total

    query = torch.nn.functional.pad(_join_rows(query), (0, 0, 0, padding))  # [H, blocks * block, head_dim]
    key = torch.nn.functional.pad(_join_rows(key), (0, 0, window, padding))  # [G, window + blocks * block, head_dim]
    value = torch.nn.functional.pad(_join_rows(value), (0, 0, window, padding))
    key = _overlapping_blocks(key, block, window)  # [blocks, G, block + window, head_dim]
    value = _overlapping_blocks(value, block, window)

    # The first key of each query, among the tokens of all rows
    first = torch.arange(batch, device=device)[:, None] * length  # [batch, 1], the starts of the rows
    if first_keys is not None:
        first = first + first_keys.first  # [batch, L]
    first = torch.nn.functional.pad(first.expand(batch, length).flatten(), (0, padding))  # [blocks * block]
    places = torch.arange(blocks * block, device=device)
    is_padding = first > places  # its first key comes after itself
    is_padding_of_block = torch.nn.functional.pad(is_padding, (window, 0)).unfold(0, block + window, block)
    first_of_query = first.view(blocks, block, 1)
    block_start = places.view(blocks, block, 1)[:, :1]
    key_places = block_start - window + torch.arange(block + window, device=device)  # [blocks, 1, block + window]
    mask = _block_mask(block, window, device) & (key_places >= first_of_query)  # [blocks, block, block + window]
    mask = mask & ~is_padding_of_block[:, None]
    output = _attend_with_folded_groups(stock, query, key, value, mask, **kwargs)[:total]
    return output.unflatten(0, (batch, length))


def block_size(window: int) -> int:
    """Return the number of queries in a block for a window of `window` keys."""
    return max(MIN_BLOCK, window // 4)


def varlen_attention(
    documents: Documents,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Compute `first_key_attention` by one call of FlashAttention on the tokens of all rows."""
    bounds = documents.bounds
    longest = documents.longest
    batch, _, length, _ = query.shape
    left = -1 if window >= longest else window - 1  # keys before a query's own; -1 stands for all
    options: dict = {"scale": scaling, "window_size": (left, 0)}
    if query.shape[1] > key.shape[1]:
        if varlen_has_groups():
            options["enable_gqa"] = True
        else:
            groups = query.shape[1] // key.shape[1]
            key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    # Autocast leaves rotated queries and keys in float32, and does not reach this operator.
    query, key, value = (states.to(value.dtype).transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    output = varlen_attn(query, key, value, bounds, bounds, longest, longest, **options)
    return output.unflatten(0, (batch, length)), None


def _has_varlen_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs) -> bool:
    """Return whether `varlen_attention` can take these states, with the keyword arguments of the core."""
    return query.shape[-1] == value.shape[-1] and has_varlen(query, kwargs.get("dropout", 0))


def has_varlen(states: torch.Tensor, dropout: float) -> bool:
    """Return whether `varlen_attn` supports states [..., head_dim] in the dtype that autocast gives them.

    It takes half precision on a GPU from Ampere on, a head_dim that is a multiple of 8, up to 256, and no dropout."""
    if varlen_attn is None or states.device.type != "cuda" or dropout:
        return False
    head_dim = states.shape[-1]
    if head_dim % 8 or head_dim > 256 or not is_ampere(states.device.index):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else states.dtype
    # Outside of compiled code respect `torch.nn.attention.sdpa_kernel`.
    allowed = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()
    return allowed and dtype in (torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def is_ampere(device: int | None) -> bool:
    """Return whether a GPU, by its number, is of the Ampere generation or a later one."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result
def varlen_has_groups() -> bool:
    """Return whether `varlen_attn` takes fewer heads of keys than of queries."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
