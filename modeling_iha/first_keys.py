# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Describe windows, documents and padding by the first key that each query sees, without a dense mask.

Query v sees the keys u with first[v] <= u <= v. `FirstKeys` says so to every function that reads or makes such a mask,
in O(N) memory. Queries, keys and windows are counted in virtual tokens, of which there are L = N * P; after
`over_tokens` P is 1. The functions that make masks take `num_pseudo_heads` and a window in tokens.

Between the model and its layers a mask has to be a tensor: Transformers' models, the hooks of accelerate and FSDP,
checkpointing and compiled layers take, slice, move and trace tensors. Another object would be refused or lost. So
`as_mask` is called where a mask has been made, and `read_mask` where the attention of a layer begins. The tensor is
int32, because no other mask has this dtype and FSDP does not cast integers. It has one of three layouts:

    shape                    describes
    [1, L, window, 0]        only a window: the shape holds it, and the tensor is empty
    [batch, 1, L, 1]         documents and padding, and a window by the values alone
    [batch, window, L, 1]    documents, padding and a window that compiled code knows. Dimension 1 is expanded, and its
                             size is the window. (Some models slice the last dimension of a mask.)

An attribute of a tensor is lost when the tensor is copied or sliced, so attributes of masks hold only results that can
be recomputed: `documents` of this file, and `in_window` of virtual_masks.py. (A `BlockMask` of FlexAttention is the
only mask that is not a tensor.)"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.utils.import_utils import is_tracing

from .interleaving import in_virtual_tokens


class Documents(NamedTuple):
    """Hold the documents that first keys describe."""

    # Start of each document in the concatenation of all rows, then the total length, int32 [documents + 1].
    bounds: torch.Tensor
    longest: int
    longest_span: int  # the most keys that a query sees
    # True if padding has the first key L. `bounds` and `longest` are wrong then: readers take a dense mask.
    has_hidden_padding: bool = False

    def is_one_document_per_row(self, batch: int, length: int) -> bool:
        """Return whether each row of `length` tokens is one document."""
        return self.longest == length and len(self.bounds) == batch + 1 and not self.has_hidden_padding

    def over_tokens(self, num_pseudo_heads: int) -> "Documents":
        """Return the documents of tokens from those of virtual tokens."""
        return Documents(
            bounds=self.bounds // num_pseudo_heads,
            longest=self.longest // num_pseudo_heads,
            longest_span=self.longest_span // num_pseudo_heads,
            has_hidden_padding=self.has_hidden_padding,
        )


class FirstKeys:
    """Say which keys the queries of whole rows see: each query those from its first key to its own.

    Hidden padding is an exception. In eager code each run of padding becomes a document of its own. Compiled code
    cannot branch on values, so there each padding token gets the first key L, past the end of the row: the token sees
    no key, and SDPA returns zeros. A key u with first[u] > u is padding, and readers hide it from all queries.

    Args:
        length: L, the number of queries, and of keys.
        window: a window that is known without reading a value, or `None`. Compiled code has it as a constant. The
            values of `first` hold it too.
        first: the first keys, int32 [batch, L], or `None` if the window is all there is to say.
        documents: the documents, or `None` if they are not known yet.
        mask: the tensor that these first keys were read from. The documents are kept on it for the other layers.
    """

    def __init__(
        self,
        length: int,
        window: int | None = None,
        first: torch.Tensor | None = None,
        documents: Documents | None = None,
        mask: torch.Tensor | None = None,
    ):
        self.length = length
        self.window = window
        self.first = first
        self._documents = documents
        self._mask = mask

    def as_mask(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the mask tensor, in one of the three layouts. One of a window alone is made on `device`."""
        if self.first is None:
            # It takes no memory, and reading its shape makes no GPU wait.
            return torch.empty(1, self.length, self.window, 0, dtype=torch.int32, device=device)
        return self.first[:, None, :, None].expand(-1, self.window or 1, -1, -1)

    def is_plain_causal(self) -> bool:
        """Return whether every query sees all earlier keys. Compiled code cannot read that, and gets False."""
        return not torch.compiler.is_compiling() and not self.first.any()

    def documents(self) -> Documents:
        """Return the documents. Finding them synchronizes with the GPU."""
        if self._documents is None and hasattr(self._mask, "documents"):
            self._documents = self._mask.documents
        if self._documents is None:
            self._documents = find_documents(self.first)
            if self._mask is not None:
                self._mask.documents = self._documents
        return self._documents

    def over_tokens(self, num_pseudo_heads: int) -> "FirstKeys":
        """Return the first keys of tokens from those of virtual tokens: the ones of the last pseudo-heads."""
        length = self.length // num_pseudo_heads
        window = None if self.window is None else self.window // num_pseudo_heads
        if self.first is None:
            return FirstKeys(length, window)
        first = self.first[:, num_pseudo_heads - 1 :: num_pseudo_heads] // num_pseudo_heads
        if torch.compiler.is_compiling():
            return FirstKeys(length, window, first)
        # The documents are converted, because finding them again would synchronize with the GPU.
        return FirstKeys(length, window, first, self.documents().over_tokens(num_pseudo_heads))

    def window_of_whole_rows(self, window: int | None) -> int | None:
        """Return the window if causal attention within it, over whole rows, equals attention by these first keys.

        It is `None` if a row has several documents or padding. `window` is the layer's own window in virtual tokens,
        or `None`. The smaller of it and the window of the first keys counts."""
        if self.first is None:
            return narrower(self.window, window)
        documents = self.documents()
        if not documents.is_one_document_per_row(len(self.first), self.length):
            return None
        return narrower(documents.longest_span, window)


def is_first_key_mask(mask: Any) -> bool:
    """Return whether a mask is a tensor of first keys, in any of the three layouts."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int32


def read_mask(mask: Any) -> Any:
    """Return the `FirstKeys` that a mask tensor holds. Return any other mask unchanged."""
    if not is_first_key_mask(mask):
        return mask
    if mask.shape[-1] == 0:
        return FirstKeys(mask.shape[1], window=mask.shape[2])
    window = mask.shape[1] if mask.shape[1] > 1 else None
    return FirstKeys(mask.shape[2], window, first=mask[:, 0, :, 0], mask=mask)


def find_documents(first: torch.Tensor) -> Documents:
    """Return the documents of first keys [batch, L]. This synchronizes with the GPU."""
    seen = torch.arange(1, first.shape[1] + 1, device=first.device) - first
    is_start = seen == 1
    is_start[:, 0] = True  # also where a row begins with padding that has the first key L
    bounds = torch.nn.functional.pad(is_start.flatten().nonzero().flatten(), (0, 1), value=seen.numel()).int()
    # One reading for all three, because each makes a GPU wait.
    spans = torch.stack((bounds.diff().max(), seen.max(), seen.min()))
    longest, longest_span, shortest_span = spans.tolist()
    return Documents(bounds, longest, longest_span, has_hidden_padding=shortest_span < 1)


def narrower(window: int, other: int | None) -> int:
    """Return the smaller of two windows, where the other may be missing."""
    return min(window, other) if other else window


def known_first_keys(
    is_document_start: torch.Tensor, is_padding: torch.Tensor | None, num_pseudo_heads: int, window: int | None
) -> FirstKeys:
    """Return the first keys of documents and padding, with a `window` in tokens that compiled code knows, or `None`.

    Both masks are boolean [batch, N]. Padding is hidden."""
    first = first_keys_of(is_document_start, num_pseudo_heads, window or is_document_start.shape[1])
    length = first.shape[1]
    if is_padding is not None:
        first = first.masked_fill(is_padding.repeat_interleave(num_pseudo_heads, dim=-1), length)
    return FirstKeys(length, in_virtual_tokens(window, num_pseudo_heads), first)


def latest_document_start(is_document_start: torch.Tensor) -> torch.Tensor:
    """Return, for each token of [batch, N], the index of the latest document start at or before it."""
    place = torch.arange(is_document_start.shape[1], device=is_document_start.device)
    return torch.where(is_document_start, place, 0).cummax(dim=-1).values


def first_keys_of(is_document_start: torch.Tensor, num_pseudo_heads: int, window: int) -> torch.Tensor:
    """Return first keys, int32 [batch, N * P], for a `window` in tokens and for documents.

    `is_document_start` [batch, N] is true at the first token of each document."""
    first = (latest_document_start(is_document_start) * num_pseudo_heads).repeat_interleave(num_pseudo_heads, dim=-1)
    virtual = torch.arange(first.shape[1], device=first.device)
    return torch.maximum(first, virtual - window * num_pseudo_heads + 1).int()


def first_keys_of_mask_function(
    num_pseudo_heads: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> FirstKeys | None:
    """Return the first keys of N * P queries if each sees all keys from its first to its own, else `None`.

    The arguments are those of `virtual_mask`, in tokens. Documents are read from the mask function: one begins where a
    token does not see the token before it. Padding is read from `attention_mask` [batch, N]. Each chunk of chunked
    attention counts as a document, and so does each run of padding. The result is `None` for bidirectional blocks,
    such as image tokens.

    The result is checked against the mask function at both ends of what each token sees, and at distances of powers of
    two. This is a sample: a mask function that differs only at other distances would be mistaken for one of these.
    Transformers has no such mask function, and a mask of the user's goes through `mask_over_virtual_tokens`."""
    place = torch.arange(q_length, device=device)
    if q_length == 1 or kv_length < q_length:
        return None
    if use_vmap or is_tracing(place) or place.is_meta:
        return None  # there are no values to look at
    if q_offset != 0 or kv_offset != 0:
        return None  # tokens are cached, so query i is not token i
    sees = partial(_sees, mask_function, batch_size)
    window = local_size or q_length
    is_document_start = _document_starts(mask_function, batch_size, place)
    first = torch.maximum(latest_document_start(is_document_start), place - window + 1)
    sees_first = sees(place, first).all()
    # No query sees the key before its first one, if there is one.
    sees_none_before = (~sees(place, (first - 1).clamp(min=0)) | (first == 0)).all()
    checks = [sees_first, sees_none_before]
    # At each distance exactly the keys from the first one on are seen, and none that lie ahead.
    for distance in [0] + [2**power for power in range((q_length - 1).bit_length())]:
        later = place[distance:]
        earlier = place[: q_length - distance]
        checks.append((sees(later, earlier) == (first[:, distance:] <= earlier)).all())
        if distance > 0:
            checks.append(~sees(earlier, later).any())
    if attention_mask is not None:
        real = torch.nn.functional.pad(attention_mask, (0, q_length - attention_mask.shape[-1])).to(device).bool()
        # This needs the documents without padding, so it comes before padding becomes a document.
        checks.append(~_resumes_after_padding(real, is_document_start).any())
        is_document_start = is_document_start | torch.nn.functional.pad(real[:, 1:] != real[:, :-1], (1, 0))
    if not torch.stack(checks).all():
        return None
    first = first_keys_of(is_document_start, num_pseudo_heads, window)
    return FirstKeys(first.shape[1], first=first)


def compiled_first_keys_of_mask_function(
    num_pseudo_heads: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None,
    batch_size: int,
    q_length: int,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs,
) -> FirstKeys:
    """Return the first keys of a mask function as `known_first_keys` makes them.

    The arguments are those of `virtual_mask`, in tokens. Compiled code cannot check the mask function by its values:
    the caller must know that it makes a window or chunks of tokens (`is_known_when_compiled` of virtual_masks.py)."""
    is_document_start = _document_starts(mask_function, batch_size, torch.arange(q_length, device=device))
    is_padding = None if attention_mask is None else attention_mask.to(device) == 0
    return known_first_keys(is_document_start, is_padding, num_pseudo_heads, local_size)


def _sees(mask_function: Callable, batch_size: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return whether each query token sees its key token, boolean [batch, pairs].

    `query` and `key` hold the places of the tokens, [pairs] or [batch, pairs]."""
    rows = torch.arange(batch_size, device=query.device)[:, None]
    head = torch.zeros((), dtype=torch.long, device=query.device)
    return mask_function(rows, head, query, key).expand(batch_size, -1)


def _document_starts(mask_function: Callable, batch_size: int, place: torch.Tensor) -> torch.Tensor:
    """Return where a token does not see the token before it, boolean [batch, N], for the places of N tokens."""
    sees_one_before = _sees(mask_function, batch_size, place[1:], place[:-1])
    return torch.nn.functional.pad(~sees_one_before, (1, 0), value=True)


def _resumes_after_padding(real: torch.Tensor, is_document_start: torch.Tensor) -> torch.Tensor:
    """Return where a real token follows padding and sees real tokens of its document before that padding.

    First keys cannot say this, because padding is a document of its own. All are boolean [batch, N]."""
    real_before = real.cumsum(dim=-1) - real.long()  # how many real tokens come before each token
    real_before_document = real_before.gather(1, latest_document_start(is_document_start))
    follows_padding = torch.nn.functional.pad(real[:, 1:] & ~real[:, :-1], (1, 0))
    resumes = follows_padding & ~is_document_start
    # More real tokens before this one than before its document: the document had some before the padding.
    return resumes & (real_before > real_before_document)
