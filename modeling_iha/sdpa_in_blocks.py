# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Attend on PyTorch's SDPA by FlashAttention's contract: `attn_implementation="sdpa_in_blocks"`.

As FlashAttention, the function needs no mask with an entry for each pair of tokens:

    attention_mask    `None`, or [batch, keys] for padding (flat); a query that sees padding alone returns zero
    sliding_window    a number: query n sees the keys k with n - sliding_window < k <= n
    cu_seq_lens_q     where the documents of all rows begin, and the end, int32 [documents + 1]
    max_length_q      tokens of the longest document
    document_lengths  tokens of each document, where a GPU computes one after the other

Under a flat mask query n is at key n, unlike in FlashAttention, which aligns the ends. (`needs_no_dense_mask` leaves
tokens after cached ones to dense masks.) Each document is computed by itself, and a window in blocks of queries with
the keys that they reach. In half precision a GPU takes PyTorch's FlashAttention for both. SDPA gets the dense masks
that Transformers makes for everything else.
"""

import math
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import prepare_padding_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing


VARLEN_ARGUMENTS = frozenset(signature(varlen_attn).parameters)
NAME = "sdpa_in_blocks"
LEAST_BLOCK = 128  # queries of a block
JOINED_DOCUMENTS = (
    "Packed documents would attend to one another: pass use_cache=False, no attention_mask, and to a flash function a "
    "single row."
)
UNKNOWN_DOCUMENTS = (
    "Compiled code cannot find in position_ids whether documents are packed, and next to a cache they would attend to "
    "one another: pass use_cache=False, or for rows of one document attention_mask."
)
HIDDEN = -30_000.0  # feature of keys of padding, which lowers their scores by it times the scaling; float16 holds it


# What a call declares, which `read_call` reads once for all layers


class Call(NamedTuple):
    """Hold what a call declares about which tokens see which, in tokens. Windows are those of the layers.

    A user's dense mask says it all. Any other call has padding, documents, both (`with_runs`) or neither."""

    rows: int
    tokens: int  # N
    padding: torch.Tensor | None = None  # [rows, cached + N], 0 for padding; longer next to a cache
    dense: torch.Tensor | None = None  # a user's mask [rows or 1, heads or 1, N, cached + N], in place of all these
    positions: torch.Tensor | None = None  # [rows or 1, N], only where documents would be kept apart
    # Where the documents of all rows begin, and the end, int32 [documents + 1]. Runs of padding are documents too, so
    # with documents no real token sees padding.
    documents: torch.Tensor | None = None
    longest: int | None = None  # tokens of the longest document, unless the caller has given the documents
    sizes: tuple[int, ...] | None = None  # tokens of each document, where a GPU computes one after the other

    def keyword_arguments(self) -> dict[str, Any]:
        """Return the documents as arguments of attention functions."""
        found = {"cu_seq_lens_q": self.documents, "max_length_q": self.longest, "document_lengths": self.sizes}
        return {name: value for name, value in found.items() if value is not None}


class Backend(NamedTuple):
    """Say what computes attention, on which device and in which dtype, and how it keeps packed documents apart."""

    core: str  # the attention function
    device: torch.device
    dtype: torch.dtype  # of queries, keys and values
    separates_documents_by: str  # "bounds", "positions" or "masks" (`how_core_separates`)

    @classmethod
    def of_model(
        cls, core: str, dtype: torch.dtype, device: torch.device, separates_documents_by: str | None = None
    ) -> "Backend":
        """Return the backend of a model whose weights have a dtype, which autocast may change."""
        has_autocast = torch.amp.is_autocast_available(device.type)  # tensors without data have none
        if has_autocast and torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return cls(core, device, dtype, separates_documents_by or how_core_separates(core))


def how_core_separates(core: str) -> str:
    """Return how an attention function keeps packed documents apart: by "bounds", "positions" or "masks".

    "bounds"       `sdpa_in_blocks` gets their bounds (`cu_seq_lens_q`)
    "positions"    flash functions look at `position_ids` themselves
    "masks"        for all others Transformers makes masks from `position_ids`, if there is no mask and no cache
    """
    if core == NAME:
        return "bounds"
    return "positions" if "flash" in core else "masks"


def read_call(
    backend: Backend,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    bounds: torch.Tensor | None = None,
    window: float = math.inf,
    makes_cache: bool = False,
) -> Call:
    """Read what a call declares. Bounds of documents are found for a backend that separates documents by them.

    Args:
        backend: what computes attention.
        tokens: their ids or embeddings, [rows, N, ...].
        attention_mask: [rows, cached + N], or longer next to a cache; or a dense one.
        position_ids: [rows or 1, N].
        cache: what the caller has given.
        bounds: the `cu_seq_lens_q` that the call has already.
        window: the shortest window of the layers in tokens.
        makes_cache: whether the model will make a cache, as there is none.

    Raise a ValueError for packed documents where they would silently be joined: next to a mask or a given cache, next
    to a cache that the model makes if masks tell documents, and in several rows of a flash function."""
    rows, length = tokens.shape[:2]
    if attention_mask is not None and attention_mask.ndim != 2:
        check_dense_mask(backend.core, attention_mask, length, cache, window)
        is_mask = attention_mask.dtype == torch.bool or attention_mask.is_floating_point()
        return Call(rows, length, dense=attention_mask if is_mask else attention_mask.bool())
    # Whether packed documents would be kept apart, if there are any. If not, `read_rows_of_one_document` rejects them.
    would_separate = attention_mask is None and cache is None
    if makes_cache and backend.separates_documents_by == "masks":  # which are made without a cache alone
        would_separate = False
    if rows > 1 and "flash" in backend.core:  # a flash function looks for documents in a single row
        would_separate = False
    call = Call(rows, length, attention_mask, positions=position_ids if would_separate else None)
    if bounds is not None:
        if not would_separate:
            raise ValueError(JOINED_DOCUMENTS)
        if backend.separates_documents_by == "masks":
            check_that_positions_restart(call, backend, bounds)
        return call._replace(documents=bounds, sizes=sizes_for(backend, bounds))
    if length == 1:
        return call
    if not would_separate:
        return read_rows_of_one_document(call, backend, position_ids, cache)
    return find_documents(call, backend, makes_cache) if backend.separates_documents_by == "bounds" else call


def check_that_positions_restart(call: Call, backend: Backend, bounds: torch.Tensor) -> None:
    """Raise a ValueError if positions, of which masks are made, do not restart where documents begin."""
    if call.positions is not None and has_unknown_values(call.positions):
        return
    if call.positions is not None:
        begins = pad(call.positions.expand(call.rows, -1).diff(dim=-1) != 1, (1, 0), value=True).flatten()
        if begins[bounds[bounds < len(begins)]].all():
            return
    raise ValueError(
        f"attn_implementation={backend.core!r} tells documents by position_ids alone: next to cu_seq_lens_q pass "
        "position_ids that restart where documents begin."
    )


def find_documents(call: Call, backend: Backend, makes_cache: bool) -> Call:
    """Add the documents of a packed call.

    One begins where positions do not increase by one, which is the rule of Transformers. Next to a cache Transformers
    has no rule: there a document begins where positions do not rise, and they may jump within it."""
    if call.positions is None:
        return with_a_document_for_each_row(call, backend)
    if has_unknown_values(call.positions):
        return call
    positions = call.positions.expand(call.rows, -1).cpu()  # the only copy, because a GPU is waited for at each
    steps = positions.diff(dim=-1)
    begins_another = steps <= 0 if makes_cache else steps != 1
    return with_documents(call, backend, pad(begins_another, (1, 0), value=True))


def read_rows_of_one_document(
    call: Call, backend: Backend, position_ids: torch.Tensor | None, cache: Cache | None
) -> Call:
    """Check that each row is one document. Add these documents if there are no cached tokens."""
    if position_ids is None and (call.padding is None or backend.separates_documents_by != "bounds"):
        return call
    if has_unknown_values(call.padding if position_ids is None else position_ids):
        if call.padding is None and not position_ids.is_meta:  # `position_ids` is given here
            raise ValueError(UNKNOWN_DOCUMENTS)
        return call
    past = 0 if cache is None else int(cache.get_seq_length())
    if call.padding is not None:
        check_mask(call.padding, call.rows, past + call.tokens, is_longest=cache is None)
    positions = positions_of_real_tokens(call, backend, position_ids, past)
    is_real = positions >= 0
    earlier = positions.cummax(dim=-1).values[:, :-1]
    begins_another = is_real[:, 1:] & (positions[:, 1:] <= earlier)  # within a document positions rise
    if begins_another.any():
        raise ValueError(JOINED_DOCUMENTS + hint_of_prefix(call, past))
    if backend.separates_documents_by != "bounds" or past > 0:
        return call
    if is_real.all():
        return with_a_document_for_each_row(call, backend)
    # `generate` reads the logits of the last tokens. Those of right padding have to see the real tokens before them.
    reads_padding = not torch.is_grad_enabled() and not is_real[:, -1].all()
    if reads_padding or not has_flash_attention(backend.device, backend.dtype):
        return call
    return with_runs(call, backend, is_real)


def positions_of_real_tokens(
    call: Call, backend: Backend, position_ids: torch.Tensor | None, past: int
) -> torch.Tensor:
    """Return the positions of the tokens of a call after `past` cached ones, [rows, N] on the CPU, -1 for padding."""
    positions = torch.arange(call.tokens, device=backend.device) if position_ids is None else position_ids
    if call.padding is not None:
        is_real = call.padding[:, past : past + call.tokens].to(positions.device, torch.bool)
        positions = torch.where(is_real, positions, -1)
    return positions.expand(call.rows, -1).cpu()  # the only copy


def with_runs(call: Call, backend: Backend, is_real: torch.Tensor) -> Call:
    """Add each run of real tokens and of padding as a document, for FlashAttention, if no row has padding within.

    Features that hide padding would make heads wider than its kernels are compiled for."""
    begins = pad(is_real.diff(dim=-1), (1, 0), value=True)
    has_padding_within = (begins & is_real).sum(dim=-1).max() > 1
    return call if has_padding_within else with_documents(call, backend, begins)


def with_documents(call: Call, backend: Backend, begins: torch.Tensor) -> Call:
    """Add documents that begin at some tokens, `begins` [rows, N] on the CPU."""
    bounds = pad(begins.flatten().nonzero().flatten(), (0, 1), value=call.rows * call.tokens).int()
    longest = int(bounds.diff().max())
    return call._replace(documents=bounds.to(backend.device), longest=longest, sizes=sizes_for(backend, bounds))


def with_a_document_for_each_row(call: Call, backend: Backend) -> Call:
    """Make each row a document. Callers know that no row has padding.

    By the number of documents `visibility_of_arguments` knows it too, and drops the bounds and a mask of ones."""
    return call._replace(documents=row_bounds(call.rows, call.tokens, backend.device), longest=call.tokens)


def sizes_for(backend: Backend, bounds: torch.Tensor) -> tuple[int, ...] | None:
    """Return the tokens of each document where a GPU computes one after the other, so that no layer waits for them."""
    is_split = backend.separates_documents_by == "bounds" and not has_flash_attention(backend.device, backend.dtype)
    if not is_split or backend.device.type == "cpu" or has_unknown_values(bounds):
        return None
    return tuple(bounds.diff().tolist())


def has_unknown_values(tensor: torch.Tensor) -> bool:
    """Return whether code cannot depend on the values of a tensor: on the meta device, and while it is traced."""
    return tensor.is_meta or is_tracing(tensor)


def row_bounds(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch + 1, device=device, dtype=torch.int32) * length


def hint_of_prefix(call: Call, past: int) -> str:
    """Return a sentence for a mask with more columns than tokens, as prefix tuning makes it."""
    num_more = 0 if call.padding is None else call.padding.shape[1] - past - call.tokens
    if num_more == 0:
        return ""
    return f" If the {num_more} columns of attention_mask without a token are a prefix, the cache lacks it."


def check_mask(mask: torch.Tensor, batch: int, num_keys: int, is_longest: bool = True) -> None:
    if mask.shape[0] != batch or mask.shape[1] < num_keys or (is_longest and mask.shape[1] > num_keys):
        raise ValueError(f"attention_mask {list(mask.shape)} does not fit {batch} rows of {num_keys} tokens.")


def check_dense_mask(core: str, mask: torch.Tensor, num_tokens: int, cache: Cache | None, window: float) -> None:
    """Raise a ValueError for a user's mask that is not [batch, heads, N, K], or does not tell the edge of a window."""
    if "flash" in core:
        raise ValueError(f"attn_implementation={core!r} takes attention_mask [batch, tokens] alone: use 'sdpa'.")
    length = num_tokens if cache is None else num_tokens + cache.get_seq_length()
    is_4d = mask.ndim == 4 and mask.shape[2:] == (num_tokens, length)
    if not is_4d or length > window or getattr(cache, "is_compileable", False):
        raise ValueError(
            "attention_mask must be [batch, tokens], or [batch, heads, tokens, keys] up to the length of the window "
            f"and without a static cache. This one is {list(mask.shape)}, for {num_tokens} tokens, {length} keys and "
            f"a window of {window} tokens. Packed documents are declared by position_ids that restart."
        )


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a dense mask to add to scores. Some functions of Transformers would add the 0 and 1 of others."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask == 0, torch.finfo(dtype).min)


# Masks


def needs_no_dense_mask(q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **kwargs) -> bool:
    """Return whether several queries are the first keys, which nothing but causality, a window and padding hides.

    `allow_is_causal_skip` is false where Transformers adds another rule, and `attention_chunk_size` is set where a
    window is one of chunks. An export has dense masks: it would specialize the program to a range of lengths."""
    has_chunks = getattr(kwargs.get("config"), "attention_chunk_size", None) is not None
    is_unknown = isinstance(q_offset, torch.Tensor) and is_tracing(q_offset)  # of a static cache in compiled code
    if is_for_any_length() or has_chunks or is_unknown or not kwargs.get("allow_is_causal_skip", True):
        return False
    return q_length > 1 and bool(q_offset == 0) and bool(kv_offset == 0)


def is_for_any_length() -> bool:
    """Return whether code makes a program for inputs of any length: for `torch.export` and `torch.jit.trace`."""
    is_export = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return is_export or torch.jit.is_tracing()


def mask_without_padding(tokens: torch.Tensor) -> torch.Tensor:
    """Return a mask of ones that takes no memory, and that `padding_mask` knows by its strides.

    It keeps Transformers from looking for documents in the positions, which compiled code cannot do."""
    return torch.ones((), dtype=torch.bool, device=tokens.device).expand(tokens.shape[:2])


def padding_mask(attention_mask: torch.Tensor | None, kv_length: int, **kwargs) -> torch.Tensor | None:
    """Return a mask of padding, [batch, keys], or `None` without one and for one of `mask_without_padding`."""
    if attention_mask is None or attention_mask.stride() == (0, 0):
        return None
    return prepare_padding_mask(attention_mask, kv_length, 0)[:, :kv_length].bool()


def mask_in_blocks(batch_size: int, q_length: int, attention_mask=None, **kwargs) -> torch.Tensor | None:
    """Return `None` or [batch, keys] where `sdpa_in_blocks` needs no dense mask, and SDPA's mask everywhere else."""
    if not needs_no_dense_mask(q_length=q_length, **kwargs):
        return sdpa_mask(batch_size=batch_size, q_length=q_length, attention_mask=attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.shape == (batch_size, q_length):
        if not is_tracing(attention_mask) and attention_mask.all():
            return None
    return padding_mask(attention_mask, **kwargs)


# The three forms


class Visibility(NamedTuple):
    """Say by FlashAttention's contract which earlier keys each query sees, in a call with a flat mask.

    A field is `None` where it hides nothing. Where a call has both, padding is among the documents."""

    padding: torch.Tensor | None  # the flat mask, bool [batch, keys], false for padding
    documents: torch.Tensor | None  # where the documents of all rows begin, and the end, int32 [documents + 1]
    longest: int  # tokens of the longest document
    sizes: tuple[int, ...] | None  # tokens of each document, if `read_call` has found them
    window: int | None


def sdpa_in_blocks(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Return causal attention [batch, length, H, head_dim] as an attention function of Transformers.

    Queries are [batch, H, length, head_dim], keys and values [batch, G, keys, head_dim]. A call has one of three
    forms: several tokens under a flat mask, one new token under a row of a mask, and several tokens under a dense
    mask. SDPA takes the last two as they are."""
    length = query.shape[2]
    options = {"dropout": dropout, "scaling": scaling or query.shape[-1] ** -0.5}
    has_flat_mask = attention_mask is None or attention_mask.ndim == 2
    # Several queries come with a flat mask only if no key is cached before them (`needs_no_dense_mask`), so that query
    # n is key n. The checks are in this order, because an export has dense masks, and comparing lengths would
    # specialize it.
    if has_flat_mask and length > 1 and key.shape[2] >= length and getattr(module, "is_causal", True):
        visibility = visibility_of_arguments(query, attention_mask, sliding_window, kwargs)
        return attend_flat(module, query, key, value, visibility, options, kwargs), None
    if has_flat_mask and attention_mask is not None:
        attention_mask = attention_mask[:, None, None, :]  # a row, which all heads and queries share
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options, **kwargs)


def visibility_of_arguments(
    query: torch.Tensor, padding: torch.Tensor | None, window: int | None, kwargs: dict
) -> Visibility:
    """Return what the arguments of an attention function let its queries see, without what hides nothing."""
    batch, length = query.shape[0], query.shape[2]
    documents = kwargs.get("cu_seq_lens_q")
    if documents is not None and documents.shape[0] == batch + 1:
        # Each row begins a document, so as many documents as rows are the rows, and there is no padding.
        documents = padding = None
    window = None if window is None or window >= length else window
    longest = kwargs.get("max_length_q") or length
    return Visibility(padding, documents, longest, kwargs.get("document_lengths"), window)


def attend_flat(module, query, key, value, visibility: Visibility, options: dict, kwargs: dict) -> torch.Tensor:
    """Return the output of several tokens under a flat mask, from the other arguments of an attention function.

    If there are more keys than queries (a prompt on a static cache), the queries are the first of them."""
    if visibility.padding is None and visibility.documents is None and visibility.window is None:
        key, value = first_keys(query, key, value)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, **options, **kwargs)[0]
    for name in ("softcap", "s_aux", "position_bias"):  # by which Gemma 2, GPT-OSS and T5 change scores
        if kwargs.get(name) is not None:
            raise ValueError(f"attn_implementation={NAME!r} does not support {name}: use 'eager'.")
    if visibility.padding is None:
        return attend_without_padding(module, query, *first_keys(query, key, value), visibility, options)
    check_mask(visibility.padding, len(key), key.shape[2])
    num_features = value.shape[-1]
    # A query that sees padding alone then returns zero, as SDPA does for one that sees nothing. In training the last
    # token of left padding predicts the first real one.
    value = value.masked_fill(~visibility.padding[:, None, :, None], 0)
    if visibility.documents is None:
        query, key, value = hide_padding(query, key, value, visibility.padding)
    output = attend_without_padding(module, query, *first_keys(query, key, value), visibility, options)
    return output[..., :num_features]


def first_keys(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of the queries themselves."""
    length = query.shape[2]
    return (key[:, :, :length], value[:, :, :length]) if key.shape[2] > length else (key, value)


def hide_padding(query, key, value, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states by which padding is hidden (`mask`, [batch, keys]), with more features.

    Each query gets the feature 1, and each key of padding HIDDEN there: next to a real key its share is zero."""
    zeros = 0 if is_cpu_inference(query) else 7  # kernels of GPUs take multiples of 8, and gradients are no slower
    hidden = torch.zeros(mask.shape, dtype=key.dtype, device=key.device).masked_fill(~mask, HIDDEN)
    hidden = hidden[:, None, :, None].expand(*key.shape[:3], 1)
    query = pad(pad(query, (0, 1), value=1.0), (0, zeros))
    return query, pad(torch.cat((key, hidden), dim=-1), (0, zeros)), pad(value, (0, 1 + zeros))


def attend_without_padding(module, query, key, value, visibility: Visibility, options: dict) -> torch.Tensor:
    """Return the output under the documents and the window: padding is hidden already."""
    if visibility.documents is None and visibility.window is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, **options)[0]
    if has_varlen_kernel(query, value, options["dropout"]):
        return attend_by_varlen(query, key, value, visibility, options["scaling"])
    if visibility.documents is None:
        return attend_to_rows(module, query, key, value, visibility.window, **options)
    return attend_to_documents(module, query, key, value, visibility, **options)


# Documents and windows on SDPA


def attend_to_rows(module, query, key, value, window: int | None, **options) -> torch.Tensor:
    """Return the output of rows of one document each: the rows of a batch are as heads of one row."""
    batch = len(query)
    query, key, value = (states.flatten(0, 1)[None] for states in (query, key, value))
    output = attend_to_document(module, query, key, value, window, **options)
    return output.squeeze(0).unflatten(1, (batch, -1)).transpose(0, 1)


@torch.compiler.disable  # a graph cannot depend on the number of documents
def attend_to_documents(module, query, key, value, visibility: Visibility, **options) -> torch.Tensor:
    """Return the output of documents one by one."""
    sizes = [each for each in visibility.sizes or visibility.documents.diff().tolist() if each]
    parts = zip(*(join_rows(states).split(sizes, dim=2) for states in (query, key, value)))
    output = torch.cat([attend_to_document(module, q, k, v, visibility.window, **options) for q, k, v in parts], dim=1)
    return output.view(query.shape[0], query.shape[2], *output.shape[2:])


def attend_to_document(module, query, key, value, window: int | None, **options) -> torch.Tensor:
    """Return the output [1, length, H, head_dim] of one document, in blocks where it is longer than the window.

    Its first `window` queries need no mask, and all blocks after them have the same one."""
    length = query.shape[2]
    if window is None or window >= length:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, **options)[0]
    first, others = query.split((window, length - window), dim=2)
    states = (first.contiguous(), key[:, :, :window], value[:, :, :window])  # behind a view autograd would keep all
    begin, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *states, None, **options)
    block = block_size(query, window)
    queries = torch.arange(block, device=query.device)[:, None] + window
    keys = torch.arange(window + block, device=query.device)
    mask = (queries - window < keys) & (keys <= queries)
    end = attend_in_blocks(others.squeeze(0), key.squeeze(0), value.squeeze(0), mask, window, **options)
    return torch.cat((begin, end[None]), dim=1)


def attend_in_blocks(query, key, value, mask, window: int, dropout: float, scaling: float | None) -> torch.Tensor:
    """Return the output [length, H, head_dim] of blocks of queries, each with the keys that its window reaches.

    Queries are [H, length, head_dim], and keys and values [G, window + length, head_dim] begin `window` keys before
    them. `mask` of a block is boolean, [block, window + block]."""
    heads, length, _ = query.shape
    groups = key.shape[0]
    block = mask.shape[0]
    if rest := -length % block:
        query, key, value = (pad(states, (0, 0, 0, rest)) for states in (query, key, value))
    # The heads of a group become rows of one head, because SDPA would copy the keys for each of them.
    query = query.unflatten(1, (-1, block)).unflatten(0, (groups, -1))  # [G, H / G, blocks, block, head_dim]
    query = query.permute(2, 0, 1, 3, 4).flatten(2, 3)  # [blocks, G, H / G * block, head_dim]
    key, value = (OverlappingBlocks.apply(states, block, window) for states in (key, value))
    mask = mask.repeat(heads // groups, 1)

    output = scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scaling)
    output = output.unflatten(2, (-1, block)).permute(0, 3, 1, 2, 4)  # [blocks, block, G, H / G, head_dim]
    return output.flatten(2, 3).flatten(0, 1)[:length]


def is_cpu_inference(states: torch.Tensor) -> bool:
    """Return whether a CPU runs uncompiled code without gradients, where fewer features and smaller blocks pay."""
    return states.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def block_size(states: torch.Tensor, window: int) -> int:
    """Return the number of queries in a block. Smaller blocks compute fewer masked pairs, but gradients copy keys.

    `states` are those of a document that is longer than the window."""
    block = LEAST_BLOCK if is_cpu_inference(states) else max(LEAST_BLOCK, window // 4)
    if torch.compiler.is_compiling():
        return block  # a block as short as a short document would make a graph for this length alone
    return min(block, states.shape[2] - window)


def join_rows(states: torch.Tensor) -> torch.Tensor:
    """Return states [batch, heads, length, head_dim] as one row [1, heads, batch * length, head_dim]."""
    return states.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


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
        if count == 1:
            return gradient.squeeze(0), None, None
        # Cut the keys into pieces of `block`: block i has the pieces i, i + 1, ..., the last perhaps not whole.
        parts = gradient.split(ctx.block, dim=2)
        total = gradient.new_zeros(heads, count + len(parts) - 1, ctx.block, head_dim)
        for place, part in enumerate(parts):
            total[:, place : place + count, : part.shape[2]] += part.transpose(0, 1)
        return total.flatten(1, 2)[:, : ctx.length], None, None


# PyTorch's FlashAttention


def has_varlen_kernel(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Return whether PyTorch's FlashAttention takes these states."""
    fits = query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    return fits and not dropout and has_flash_attention(query.device, value.dtype)


def has_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's FlashAttention runs on a device in a dtype: in half precision, from Ampere on."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return is_half and device.type == "cuda" and torch.cuda.get_device_properties(device).major >= 8


def attend_by_varlen(query, key, value, visibility: Visibility, scale: float) -> torch.Tensor:
    """Return the output of all documents by one call of FlashAttention."""
    batch, heads, length, _ = query.shape
    if "enable_gqa" not in VARLEN_ARGUMENTS:  # PyTorch 2.11 lacks it
        key, value = (states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value))
    options = {} if key.shape[1] == heads else {"enable_gqa": True}
    bounds = row_bounds(batch, length, query.device) if visibility.documents is None else visibility.documents
    states = [each.to(value.dtype).transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    left = -1 if visibility.window is None else visibility.window - 1
    longest = (visibility.longest, visibility.longest)
    output = varlen_attn(*states, bounds, bounds, *longest, scale=scale, window_size=(left, 0), **options)
    return output.unflatten(0, (batch, length))


# The public registries of Transformers. A second copy of this code, in a checkpoint, leaves what the first registered.
if NAME not in ALL_ATTENTION_FUNCTIONS:
    AttentionInterface.register(NAME, sdpa_in_blocks)
    AttentionMaskInterface.register(NAME, mask_in_blocks)
