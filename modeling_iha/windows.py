# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend within windows and documents on a stock core, without a dense mask.

Masks are those of first_keys.py. Attention is computed in blocks of queries, document by document, or by PyTorch's
FlashAttention.

`attention_function` is an attention function of Transformers that takes a boolean mask, such as that of "sdpa"."""

import inspect
from collections.abc import Callable
from functools import partial

import torch

from .first_keys import Documents, documents_of, narrower, plain_window
from .overlay import Overlay


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a build of PyTorch without it
    varlen_attn = None


# The smallest block of queries. Larger blocks copy fewer keys and compute more pairs outside the window.
MIN_BLOCK = 128
# Rows are joined into one while heads * tokens is at most this. In longer rows copies and masks cost as much as the
# saved calls.
JOINED_ROW = 2048


def is_exported() -> bool:
    """Return whether `torch.export` traces this call, other than by Dynamo.

    In PyTorch 2.11 `is_exporting` is true for everything that Dynamo traces, `torch.compile` included."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def first_key_attention(
    attention_function: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_keys: torch.Tensor,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, L, H, head_dim] of attention under a mask of first keys and a window.

    Query v sees the keys u with first_keys[v] <= u <= v and v - sliding_window < u. The mask is that of documents and
    a window. Documents go one by one, or on a GPU in half precision in one call of PyTorch's FlashAttention. A dense
    mask is made where L is at most MIN_BLOCK or exceeds the window by at most MIN_BLOCK, and in compiled code unless
    the shape of the mask holds the window. In an "iha" layer the cost is O(N W P^2).

    Queries, keys and values are [batch, H or G, L, head_dim]."""
    batch, _, length, _ = query.shape
    has_kernel = query.shape[-1] == value.shape[-1] and has_varlen(query, query.shape[-1], kwargs.get("dropout", 0))
    plain = plain_window(first_keys)
    if plain is not None:
        window = narrower(plain, sliding_window)
        if has_kernel:
            bounds = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
            rows = Documents(bounds, length, window)
            return varlen_attention(rows, module, query, key, value, window, **kwargs)
        return window_attention(attention_function, module, query, key, value, None, window, **kwargs)
    width = first_keys.shape[-1]  # the window if the mask is of `document_first_keys`, else 1
    if width > 1:
        # Slice only in this case: a slice loses the documents stored on the mask.
        first_keys = first_keys[..., :1]
        if length - width > MIN_BLOCK:
            return _attend_in_compiled_blocks(
                attention_function, module, query, key, value, width, first_keys, **kwargs
            )
    if torch.compiler.is_compiling() or length <= MIN_BLOCK:
        mask = _dense_mask(first_keys, length, sliding_window)
        return attention_function(module, query, key, value, mask, **kwargs)
    documents = documents_of(first_keys)
    window = narrower(documents.longest_span, sliding_window)  # a window as long as the longest document hides nothing
    if has_kernel:
        return varlen_attention(documents, module, query, key, value, window, **kwargs)
    if documents.is_one_document_per_row(batch, length):
        return window_attention(attention_function, module, query, key, value, None, window, **kwargs)
    return _attend_by_document(attention_function, module, query, key, value, documents, window, **kwargs)


def _dense_mask(first_keys: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """Return the boolean mask [batch, 1, L, L] of first keys [batch, 1, L, 1] and a window."""
    place = torch.arange(length, device=first_keys.device)
    distance = place[:, None] - place
    mask = (distance >= 0) & (place >= first_keys)
    if window is not None:
        mask = mask & (distance < window)
    return mask


def _attend_by_document(
    attention_function: Callable, module, query, key, value, documents: Documents, window: int, **kwargs
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
        output, _ = window_attention(attention_function, module, *states, None, window, **kwargs)
        outputs.append(output)
    return torch.cat(outputs, dim=1).view(batch, length, *outputs[0].shape[2:]), None


def window_attention(
    attention_function: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output [batch, L, H, head_dim] of causal attention, within `sliding_window` keys unless it is `None`.

    A dense mask costs O(L^2) time and memory regardless of the window, and is faster where L is only slightly longer
    than the window. Elsewhere every block of queries gets the keys that its window reaches, and one call of the core
    computes all blocks, as a batch with one small mask, at a cost of O(L * window). Blocks of keys overlap, and are
    views. Copies would be kept for the backward pass and take (block + window) / block times the memory of the keys
    and values."""
    batch, heads, length, _ = query.shape
    window = sliding_window
    before = key.shape[2] - length  # keys of tokens before the queries: none, or those of a window
    if window is None or before + length <= window:
        return attention_function(module, query, key, value, None, **kwargs)
    if length - window <= MIN_BLOCK and before == 0:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        return attention_function(module, query, key, value, mask[None, None], **kwargs)
    if torch.compiler.is_compiling():
        return _attend_in_compiled_blocks(attention_function, module, query, key, value, window, **kwargs)
    if batch > 1 and heads * length <= JOINED_ROW and before == 0:
        return _attend_in_joined_rows(attention_function, module, query, key, value, window, **kwargs), None
    rows = zip(query.split(1), key.split(1), value.split(1))
    outputs = [_attend_in_blocks(attention_function, module, q, k, v, window, **kwargs) for q, k, v in rows]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output, None


def _join_rows(states: torch.Tensor) -> torch.Tensor:
    """Return states [batch, heads, L, head_dim] as one row [heads, batch * L, head_dim]."""
    return states.transpose(1, 2).flatten(0, 1).transpose(0, 1)


def _attend_in_joined_rows(
    attention_function: Callable, module, query, key, value, window: int, **kwargs
) -> torch.Tensor:
    """Return the output of `window_attention` for short rows, joined into one.

    Overlapping blocks can be a view of one row, but not of several rows."""
    batch, _, length, _ = query.shape
    query = _join_rows(query)[None]
    key = _join_rows(key)[None]
    value = _join_rows(value)[None]
    output = _attend_in_blocks(attention_function, module, query, key, value, window, length, **kwargs)
    return output.view(batch, length, *output.shape[2:])


def _attend_in_blocks(
    attention_function: Callable, module, query, key, value, window: int, row_length: int | None = None, **kwargs
) -> torch.Tensor:
    """Return the output of `window_attention` for more keys than the window has, and a batch of 1.

    With a `row_length` the L tokens are rows of so many tokens, and rows do not see one another."""
    _, _, length, _ = query.shape
    num_keys = key.shape[2]
    num_first = window - (num_keys - length)  # the queries whose windows would begin before the first key
    block = min(block_size(window), length - num_first)
    num_last = (length - num_first) % block
    num_in_blocks = length - num_first - num_last
    # The gradient of `split` is one concatenation; that of each slice would be a tensor as long as all queries.
    first_queries, block_queries, last_queries = query.split((num_first, num_in_blocks, num_last), dim=2)
    outputs = []
    if num_first > 0:
        # Copy the queries: autograd would keep the whole tensor behind a view.
        states = (first_queries.contiguous(), key[:, :, :window], value[:, :, :window])
        outputs.append(attention_function(module, *states, None, **kwargs)[0])
    attend = partial(_attend_in_equal_blocks, attention_function, module)
    mask = _block_mask(block, window, query.device)
    # The first key is visible to no query. It is kept because slicing it off would give a gradient as long as all
    # states.
    reached = num_keys - num_last
    states = (block_queries, key[:, :, :reached], value[:, :, :reached])
    outputs.append(attend(*states, mask, num_first, row_length, **kwargs))
    if num_last > 0:
        reached = num_keys - num_last - window
        states = (last_queries, key[:, :, reached:], value[:, :, reached:])
        last_mask = mask[:num_last, : num_last + window]
        outputs.append(attend(*states, last_mask, length - num_last, row_length, **kwargs))
    return torch.cat(outputs, dim=1)


def _attend_in_equal_blocks(
    attention_function: Callable,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    first_query: int,
    row_length: int | None,
    **kwargs,
) -> torch.Tensor:
    """Return the output [1, queries, H, head_dim] of blocks of `size` queries, by one call of the core.

    Args:
        query: [1, H, blocks * size, head_dim].
        key, value: [1, G, window + blocks * size, head_dim], of the queries' tokens and the `window` before them.
        mask: that of a block, boolean [size, size + window] (see `_block_mask`).
        first_query: the place of the first query among the tokens of all rows.
        row_length: the tokens of a row, or `None` if there is only one row.
    """
    size, num_keys = mask.shape
    window = num_keys - size
    heads = query.shape[1]
    groups = heads // key.shape[1]
    # The heads of a group are rows of one head, because a core would copy the keys for each of them.
    query = query.unflatten(2, (-1, size))  # [1, H, blocks, size, head_dim]
    query = query.unflatten(1, (-1, groups))  # [1, G, groups, blocks, size, head_dim]
    query = query.permute(0, 3, 1, 2, 4, 5)  # [1, blocks, G, groups, size, head_dim]
    query = query.flatten(3, 4).flatten(0, 1)  # [blocks, G, groups * size, head_dim]
    key = _overlapping_blocks(key.squeeze(0), size, window)
    value = _overlapping_blocks(value.squeeze(0), size, window)
    mask = mask[None]  # [1, size, size + window]
    if row_length is not None:
        num_queries = len(query) * size
        query_places = torch.arange(first_query, first_query + num_queries, device=query.device).view(-1, size, 1)
        row_starts = query_places // row_length * row_length  # [blocks, size, 1]
        key_places = query_places[:, :1] - window + torch.arange(size + window, device=query.device)
        mask = mask & (key_places >= row_starts)
    mask = mask.repeat(1, groups, 1)[:, None]  # [blocks or 1, 1, groups * size, size + window]
    view = Overlay(module, num_key_value_groups=1)
    output, _ = attention_function(view, query, key, value, mask, **kwargs)  # [blocks, groups * size, G, head_dim]
    output = output.unflatten(1, (groups, size)).permute(0, 2, 3, 1, 4)  # [blocks, size, G, groups, head_dim]
    return output.reshape(1, -1, heads, output.shape[-1])


def _overlapping_blocks(states: torch.Tensor, size: int, window: int) -> torch.Tensor:
    """View states [G, window + blocks * size, head_dim] as blocks [blocks, G, size + window, head_dim].

    Each block begins `window` tokens before its queries."""
    blocks = states.unfold(1, size + window, size)  # [G, blocks, head_dim, size + window]
    return blocks.permute(1, 0, 3, 2)


def _block_mask(size: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the boolean mask [size, size + window] of a window, for a block of queries over its keys."""
    # Key j of a block lies at j - window from its first query: query i sees the keys at i - window + 1 to i.
    query = torch.arange(size, device=device)[:, None]
    key = torch.arange(size + window, device=device)
    return (query < key) & (key <= query + window)


def _attend_in_compiled_blocks(
    attention_function: Callable,
    module,
    query,
    key,
    value,
    window: int,
    first_keys: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Return the output of `window_attention`, by one call of the core.

    Its graph serves every length, because rows are joined and padded to whole blocks. `first_keys` [batch, 1, L, 1]
    separate documents."""
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    device = query.device
    block = block_size(window)
    total = batch * length
    blocks = (total + block - 1) // block
    padding = blocks * block - total

    query = torch.nn.functional.pad(_join_rows(query), (0, 0, 0, padding))  # [H, blocks * block, head_dim]
    query = query.unflatten(1, (blocks, block))  # [H, blocks, block, head_dim]
    query = query.unflatten(0, (-1, groups))  # [G, groups, blocks, block, head_dim]
    query = query.permute(2, 0, 1, 3, 4).flatten(2, 3)  # [blocks, G, groups * block, head_dim]
    key = torch.nn.functional.pad(_join_rows(key), (0, 0, window, padding))  # [G, window + blocks * block, head_dim]
    value = torch.nn.functional.pad(_join_rows(value), (0, 0, window, padding))
    key = _overlapping_blocks(key, block, window)  # [blocks, G, block + window, head_dim]
    value = _overlapping_blocks(value, block, window)

    # The first key of each query, among the tokens of all rows
    first = torch.arange(batch, device=device)[:, None] * length  # [batch, 1], the starts of the rows
    if first_keys is not None:
        first = first + first_keys[:, 0, :, 0]  # [batch, L]
    first = first.expand(batch, length).flatten()
    first = torch.nn.functional.pad(first, (0, padding)).view(blocks, block, 1)
    key_places = torch.arange(blocks, device=device)[:, None, None] * block - window
    key_places = key_places + torch.arange(block + window, device=device)  # [blocks, 1, block + window]
    mask = _block_mask(block, window, device) & (key_places >= first)  # [blocks, block, block + window]
    mask = mask.repeat(1, groups, 1)[:, None]

    view = Overlay(module, num_key_value_groups=1)
    output, _ = attention_function(view, query, key, value, mask, **kwargs)  # [blocks, groups * block, G, head_dim]
    output = output.unflatten(1, (groups, block)).permute(0, 2, 3, 1, 4)  # [blocks, block, G, groups, head_dim]
    output = output.reshape(blocks * block, heads, -1)[:total]
    return output.unflatten(0, (batch, length)), None


def block_size(window: int) -> int:
    """Return the number of queries in a block for a window of `window` keys."""
    return max(MIN_BLOCK, window // 4)


def varlen_attention(
    documents: Documents,
    module: torch.nn.Module,
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


def has_varlen(states: torch.Tensor, head_dim: int, dropout: float) -> bool:
    """Return whether `varlen_attn` supports the states in the dtype that autocast gives them.

    It takes half precision on a GPU from Ampere on, a head_dim that is a multiple of 8, up to 256, and no dropout."""
    if varlen_attn is None or states.device.type != "cuda" or dropout:
        return False
    if head_dim % 8 or head_dim > 256 or not is_ampere(states.device.index):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else states.dtype
    allowed = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()  # respects `sdpa_kernel`
    return allowed and dtype in (torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def is_ampere(device: int | None) -> bool:
    """Return whether a GPU, by its number, is of the Ampere generation or a later one."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result
def varlen_has_groups() -> bool:
    """Return whether `varlen_attn` takes fewer heads of keys than of queries."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
