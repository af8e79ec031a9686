# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attend within windows and documents on a stock core, without a dense mask.

A mask of first keys holds, for each query, the first key that it sees; it sees all keys from there to its own.
Attention is then computed in blocks of queries, document by document, or by PyTorch's FlashAttention. Such a mask is
an int32 tensor, and no other mask is:

    shape                    made by               says
    [1, L, window, 0]        plain_window_mask     a window alone; the tensor is empty
    [batch, 1, L, 1]         first_keys_of         documents, padding and a window
    [batch, 1, L, window]    document_keys         the same for compiled code, one column expanded

It is a tensor because the hooks of FSDP and accelerate keep tensors, and lose objects."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

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


def has_first_keys(mask: Any) -> bool:
    """Return whether a mask is one of first keys, in any of the three layouts.

    Query v sees the keys u with first_keys[v] <= u <= v."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int32


def plain_window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return the mask of a window of `window` keys without documents or padding: empty, int32 [1, L, window, 0].

    The shape holds the window, so compiled code has it as a constant. The tensor is empty: it takes no memory, and
    reading it makes no GPU wait."""
    return torch.empty(1, length, window, 0, dtype=torch.int32, device=device)


def plain_window(mask: torch.Tensor) -> int | None:
    """Return the window of a mask of `plain_window_mask`, and `None` for a mask of first keys."""
    return mask.shape[2] if mask.shape[-1] == 0 else None


def document_keys(position_ids: torch.Tensor, batch: int, num_pseudo_heads: int, window: int | None) -> torch.Tensor:
    """Return the first keys of documents, int32 [batch, 1, N * P, window in virtual tokens or 1], for compiled code.

    A document begins where positions [batch or 1, N] do not go on, as Transformers finds packed ones. The last
    dimension is one expanded column. Its size is the window, so compiled code has it as a constant."""
    begins = torch.nn.functional.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True)
    first = first_keys_of(begins.expand(batch, -1), num_pseudo_heads, window or begins.shape[1])
    return first.expand(-1, -1, -1, 1 if window is None else window * num_pseudo_heads)


def latest(begins: torch.Tensor) -> torch.Tensor:
    """Return the place of the last beginning up to each token of [batch, N]."""
    place = torch.arange(begins.shape[1], device=begins.device)
    return torch.where(begins, place, 0).cummax(dim=-1).values


def first_keys_of(begins: torch.Tensor, num_pseudo_heads: int, window: int) -> torch.Tensor:
    """Return first keys [batch, 1, N * P, 1] for a `window` in tokens and for documents.

    `begins` [batch, N] is true at the first token of each document."""
    first = (latest(begins) * num_pseudo_heads).repeat_interleave(num_pseudo_heads, dim=-1)
    virtual = torch.arange(first.shape[1], device=first.device)
    return torch.maximum(first, virtual - window * num_pseudo_heads + 1).int()[:, None, :, None]


def is_exported() -> bool:
    """Return whether `torch.export` traces this call, other than by Dynamo.

    In PyTorch 2.11 `is_exporting` is true for everything that Dynamo traces, `torch.compile` included."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


class Documents(NamedTuple):
    """Hold what a mask of first keys says of all its rows."""

    # The starts of documents among the batch * L tokens of all rows, and the last end, int32 [documents + 1].
    bounds: torch.Tensor
    longest: int
    reach: int  # the most keys that a query sees

    def are_rows(self, batch: int, length: int) -> bool:
        """Return whether each row of `length` tokens is one document."""
        return self.longest == length and len(self.bounds) == batch + 1


def documents_of(first_keys: torch.Tensor) -> Documents:
    """Return the documents of a mask of first keys, found once and kept beside it. A GPU waits for the answer."""
    if not hasattr(first_keys, "documents"):
        first = first_keys[:, 0, :, 0]
        seen = torch.arange(1, first.shape[1] + 1, device=first.device) - first
        bounds = torch.nn.functional.pad((seen == 1).flatten().nonzero().flatten(), (0, 1), value=seen.numel()).int()
        longest, reach = torch.stack((bounds.diff().max(), seen.max())).tolist()
        first_keys.documents = Documents(bounds, longest, reach)
    return first_keys.documents


def narrower(window: int, other: int | None) -> int:
    """Return the smaller of two windows, where the other may be missing."""
    return min(window, other) if other else window


def row_window(mask: torch.Tensor | None, window: int | None) -> int | None:
    """Return the window in keys if each row is one document without padding, and `None` otherwise.

    `window` is the layer's own window, or `None`. The smaller of it and the mask's window counts."""
    if mask is None:
        return window
    plain = plain_window(mask)
    if plain is not None:
        return narrower(plain, window)
    documents = documents_of(mask)
    if not documents.are_rows(mask.shape[0], mask.shape[2]):
        return None
    return narrower(documents.reach, window)


def first_key_attention(
    core: Callable,
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
    mask is made only where L exceeds the window by at most MIN_BLOCK, and in compiled code for documents without a
    window. In an "iha" layer the cost is O(N W P^2).

    Args:
        core: an attention function of Transformers that takes a boolean mask.
        query, key, value: [batch, H or G, L, head_dim].
    """
    batch, _, length, _ = query.shape
    has_kernel = query.shape[-1] == value.shape[-1] and has_varlen(query, query.shape[-1], kwargs.get("dropout", 0))
    plain = plain_window(first_keys)
    if plain is not None:
        window = narrower(plain, sliding_window)
        if has_kernel:
            bounds = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
            rows = Documents(bounds, length, window)
            return varlen_attention(rows, module, query, key, value, window, **kwargs)
        return window_attention(core, module, query, key, value, None, window, **kwargs)
    width = first_keys.shape[-1]  # the window, where compiled code was given it, and 1 elsewhere
    if width > 1:
        # Only then, because a view would lose the documents that are kept on the mask.
        first_keys = first_keys[..., :1]
        if length - width > MIN_BLOCK:
            return compiled_blocks(core, module, query, key, value, width, first_keys, **kwargs)
    if torch.compiler.is_compiling() or length <= MIN_BLOCK:
        mask = _dense_mask(first_keys, length, sliding_window)
        return core(module, query, key, value, mask, **kwargs)
    documents = documents_of(first_keys)
    window = narrower(documents.reach, sliding_window)  # as long as a document, it hides nothing
    if has_kernel:
        return varlen_attention(documents, module, query, key, value, window, **kwargs)
    if documents.are_rows(batch, length):
        return window_attention(core, module, query, key, value, None, window, **kwargs)
    return _attend_by_document(core, module, query, key, value, documents, window, **kwargs)


def _dense_mask(first_keys: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """Return the boolean mask [batch, 1, L, L] of first keys [batch, 1, L, 1] and a window."""
    place = torch.arange(length, device=first_keys.device)
    distance = place[:, None] - place
    mask = (distance >= 0) & (place >= first_keys)
    if window is not None:
        mask = mask & (distance < window)
    return mask


def _attend_by_document(
    core: Callable, module, query, key, value, documents: Documents, window: int, **kwargs
) -> tuple[torch.Tensor, None]:
    """Return the output of `first_key_attention`, computed for one document after the other."""
    batch, _, length, _ = query.shape
    lengths = documents.bounds.diff().tolist()
    # `split` has one concatenation as its gradient. Each slice would have a gradient as long as all documents.
    split = (states.transpose(0, 1).flatten(1, 2).split(lengths, dim=1) for states in (query, key, value))
    outputs = []
    for queries, keys, values in zip(*split):
        # A block keeps a copy of its queries. A view of one document would keep the queries of all.
        states = (queries[None].contiguous(), keys[None], values[None])
        output, _ = window_attention(core, module, *states, None, window, **kwargs)
        outputs.append(output)
    return torch.cat(outputs, dim=1).view(batch, length, *outputs[0].shape[2:]), None


def window_attention(
    core: Callable,
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
    than the window. Elsewhere every block of queries gets the keys that its window reaches, and all go through the
    core in one call, as a batch with one small mask, at a cost of O(L * window). Blocks of keys overlap, and are
    views: copies would be kept for the backward pass, (block + window) / block times the states."""
    batch, heads, length, _ = query.shape
    window = sliding_window
    before = key.shape[2] - length  # keys of tokens before the queries: none, or those of a window
    if window is None or before + length <= window:
        return core(module, query, key, value, None, **kwargs)
    if length - window <= MIN_BLOCK and before == 0:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        return core(module, query, key, value, mask[None, None], **kwargs)
    if torch.compiler.is_compiling():
        return compiled_blocks(core, module, query, key, value, window, **kwargs)
    if batch > 1 and heads * length <= JOINED_ROW and before == 0:
        return _attend_in_joined_rows(core, module, query, key, value, window, **kwargs), None
    rows = zip(*(states.split(1) for states in (query, key, value)))
    outputs = [_attend_in_blocks(core, module, q, k, v, window, length, **kwargs) for q, k, v in rows]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output, None


def _attend_in_joined_rows(core: Callable, module, query, key, value, window: int, **kwargs) -> torch.Tensor:
    """Return the output of `window_attention` for short rows, joined into one.

    Overlapping blocks of several rows are no view, and those of one row are."""
    batch, _, length, _ = query.shape
    states = (query, key, value)
    query, key, value = (each.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for each in states)
    output = _attend_in_blocks(core, module, query, key, value, window, length, **kwargs)
    return output.view(batch, length, *output.shape[2:])


def _attend_in_blocks(
    core: Callable, module, query, key, value, window: int, row_length: int, **kwargs
) -> torch.Tensor:
    """Return the output of `window_attention` for more keys than the window has.

    The L tokens form rows of `row_length` tokens, and rows do not see one another."""
    _, heads, length, _ = query.shape
    num_keys = key.shape[2]
    groups = heads // key.shape[1]
    num_first = window - (num_keys - length)  # the queries whose windows would begin before the first key
    block = min(block_size(window), length - num_first)
    num_last = (length - num_first) % block
    i = torch.arange(block, device=query.device)[:, None]
    j = torch.arange(block + window, device=query.device)
    mask = (i < j) & (j <= i + window)
    view = Overlay(module, num_key_value_groups=1)

    def attend_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int, size: int):
        # The heads of a group are rows of one head, because a core would copy the keys for each of them.
        query = query.unflatten(2, (-1, size)).unflatten(1, (-1, groups)).permute(0, 3, 1, 2, 4, 5)
        query = query.flatten(3, 4).flatten(0, 1)  # [blocks, G, groups * size, head_dim]
        key, value = (x.unfold(2, size + window, size).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (key, value))
        seen = mask[None, :size, : size + window]
        if row_length < length:
            places = torch.arange(first, first + len(query) * size, device=query.device).view(-1, size, 1)
            seen = seen & (places[:, :1] - window + j[: size + window] >= places // row_length * row_length)
        output, _ = core(view, query, key, value, seen.repeat(1, groups, 1)[:, None], **kwargs)
        return output.unflatten(1, (groups, size)).permute(0, 2, 3, 1, 4).reshape(1, -1, heads, value.shape[-1])

    # Slices of the queries would have gradients as long as the states, so the queries are split.
    sizes = (num_first, length - num_first - num_last, num_last)
    first_queries, block_queries, last_queries = query.split(sizes, dim=2)
    outputs = []
    if num_first > 0:
        # A view of the first queries would keep all queries for the backward pass.
        states = (first_queries.contiguous(), key[:, :, :window], value[:, :, :window])
        outputs.append(core(module, *states, None, **kwargs)[0])
    # Block queries see the keys before their block, up to `window`. No query sees the first of these keys, but slices
    # that leave it out would have gradients as long as the states.
    reached = num_keys - num_last
    outputs.append(attend_blocks(block_queries, key[:, :, :reached], value[:, :, :reached], window, block))
    if num_last > 0:
        seen = slice(num_keys - window - num_last, num_keys)
        outputs.append(attend_blocks(last_queries, key[:, :, seen], value[:, :, seen], length - num_last, num_last))
    return torch.cat(outputs, dim=1)


def compiled_blocks(
    core: Callable, module, query, key, value, window: int, first_keys: torch.Tensor | None = None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Return what `window_attention` returns, by one call.

    Its graph serves every length, because rows are joined and padded to whole blocks. `first_keys` [batch, 1, L, 1]
    separate documents."""
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    device = query.device
    block = block_size(window)
    total = batch * length
    blocks = (total + block - 1) // block
    behind = blocks * block - total

    def joined(states: torch.Tensor, before: int) -> torch.Tensor:
        states = states.transpose(1, 2).flatten(0, 1).transpose(0, 1)  # [heads, batch * L, head_dim]
        return torch.nn.functional.pad(states, (0, 0, before, behind))

    query = joined(query, 0).unflatten(1, (blocks, block)).unflatten(0, (-1, groups)).permute(2, 0, 1, 3, 4)
    key, value = (joined(x, window).unfold(1, block + window, block).permute(1, 0, 3, 2) for x in (key, value))
    starts = torch.arange(batch, device=device)[:, None] * length
    first = (starts if first_keys is None else starts + first_keys[:, 0, :, 0]).expand(batch, length).flatten()
    first = torch.nn.functional.pad(first, (0, behind)).view(blocks, block, 1)
    i = torch.arange(block, device=device)[:, None]
    j = torch.arange(block + window, device=device)
    place = torch.arange(blocks, device=device)[:, None, None] * block - window + j
    seen = ((i < j) & (j <= i + window) & (place >= first)).repeat(1, groups, 1)[:, None]
    view = Overlay(module, num_key_value_groups=1)
    output, _ = core(view, query.flatten(2, 3), key, value, seen, **kwargs)
    output = output.unflatten(1, (groups, block)).permute(0, 2, 3, 1, 4)  # [blocks, block, G, groups, head_dim]
    return output.reshape(blocks * block, heads, -1)[:total].unflatten(0, (batch, length)), None


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
    """Return whether `varlen_attn` computes the attention of the states after autocast.

    It takes half precision on a GPU from Ampere on, heads of 8 to 256 entries by eights, and no dropout."""
    if varlen_attn is None or states.device.type != "cuda" or dropout:
        return False
    if head_dim % 8 or head_dim > 256 or not is_ampere(states.device.index):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else states.dtype
    allowed = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()  # as `sdpa_kernel` says
    return allowed and dtype in (torch.float16, torch.bfloat16)


@torch.compiler.assume_constant_result
def is_ampere(device: int | None) -> bool:
    """Return whether a GPU, by its number, is of the Ampere generation or a later one."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@torch.compiler.assume_constant_result
def varlen_has_groups() -> bool:
    """Return whether `varlen_attn` takes fewer heads of keys than of queries."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters
