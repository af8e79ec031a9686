"""Share one long row of N tokens between S processes: each holds a piece of n = N / S, and all attend as one would.

An attention function that follows FlashAttention's contract ("sdpa_in_blocks", "flash_attention_2") is replaced, under
the name by which models look it up, by one that exchanges states with the other processes around it. The model does
not change. Interleaved attention is ordinary attention over P * N tokens in the order of their tokens, so contiguous
pieces of a row are contiguous pieces of its virtual sequence: here n and N count whatever a layer attends over.

    without a window: heads for sequence (Ulysses)          with a window: keys of the processes before
      query     [1, H,   n, d] -> [1, H/S, N, d]              query     [1, H, n, d]
      key       [1, G,   n, d] -> [1, G/S, N, d]              key       [1, G, n, d] -> [1, G, W - 1 + n, d]
      core      over the whole row, own heads                 core      over own queries, all heads
      output    [1, N, H/S, d] -> [1, n, H, d]                output    [1, n, H, d]

    lcm(S, G) divides H (of paired heads both over P):      any S
    keys repeat where S does not divide G

Documents need no exchange: every process has the `cu_seq_lens_q` of the whole row, which TRL's collator writes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import lcm

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from iha.errors import UserError


# Keyword arguments of an attention function that describe a piece, and not the row that the core gets.
OF_THE_PIECE = {"document_lengths", "position_ids", "seq_idx"}
OF_THE_PIECE |= {f"{name}_{which}" for name in ("cu_seq_lens", "max_length") for which in "qk"}
# `piece` cuts these. The collator's lengths stay those of the whole row.
CUT = ("input_ids", "position_ids", "labels", "shift_labels", "seq_idx")


def piece(batch: dict, rank: int, size: int) -> dict:
    """Return one process's piece of a batch of TRL's collator, [1, N] with `padding_free` and `pad_to_multiple_of`.

    Labels are shifted before they are cut, because the last token of a piece predicts the first one of the next. Raise
    `UserError` for a batch that is no single row of documents, or that `size` does not divide."""
    length, rest = divmod(batch["input_ids"].shape[1], size)
    if rest or len(batch["input_ids"]) > 1 or "cu_seq_lens_q" not in batch:
        raise UserError(
            f"{size} processes share one row of documents: set packing or padding_free, and pad_to_multiple_of to a "
            f"multiple of {size}."
        )
    shifted = pad(batch["labels"][:, 1:], (0, 1), value=-100)
    batch = {**batch, "labels": shifted, "shift_labels": shifted}  # Trainer asks for `labels` too
    own = slice(rank * length, (rank + 1) * length)
    return {name: value[:, own] if name in CUT else value for name, value in batch.items()}


class Exchange(torch.autograd.Function):
    """Send rows of a tensor to the processes of a group, and return the rows from them. Gradients go back."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, sent: list[int], received: list[int], group) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return exchange(states, sent, received, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def exchange(states: torch.Tensor, sent: list[int], received: list[int], group) -> torch.Tensor:
    """Send `sent[i]` rows of `states` to process i, and return the `received[i]` rows that come from each."""
    result = states.new_empty(sum(received), *states.shape[1:])
    dist.all_to_all_single(result, states.contiguous(), received, sent, group=group)
    return result


def heads_for_sequence(states: torch.Tensor, group) -> torch.Tensor:
    """Return own heads of the row [1, M / S, N, d], of all heads of the own piece [1, M, n, d]."""
    size, length = group.size(), states.shape[2]
    parts = states[0].transpose(0, 1).unflatten(1, (size, -1)).transpose(0, 1)  # [S, n, M / S, d]
    counts = [length] * size
    return Exchange.apply(parts.flatten(0, 1), counts, counts, group).transpose(0, 1)[None]


def sequence_for_heads(output: torch.Tensor, group) -> torch.Tensor:
    """Return all heads of the own piece [1, n, M, d], of own heads of the row [1, N, M / S, d]."""
    size = group.size()
    counts = [output.shape[1] // size] * size
    parts = Exchange.apply(output[0], counts, counts, group).unflatten(0, (size, -1))  # [S, n, M / S, d]
    return parts.transpose(0, 1).flatten(1, 2)[None]


def with_tokens_before(states: torch.Tensor, most: int, group) -> torch.Tensor:
    """Return states [1, G, reach + n, d] of the own piece [1, G, n, d] and of up to `most` tokens before it."""
    size, rank, length = group.size(), group.rank(), states.shape[2]

    def needed(distance: int) -> int:
        """Return how many tokens a process needs from the one that is `distance` places before it."""
        return min(max(most - (distance - 1) * length, 0), length) if distance > 0 else 0

    rows = states[0].transpose(0, 1)  # [n, G, d]
    sent = [needed(other - rank) for other in range(size)]
    received = [needed(rank - other) for other in range(size)]
    last_rows = torch.cat([rows[length - count :] for count in sent])
    before = Exchange.apply(last_rows, sent, received, group)
    return torch.cat((before, rows)).transpose(0, 1)[None]


def attend_by_heads(attend: Callable, group, query, key, value, **lengths) -> torch.Tensor:
    """Return the output [1, n, H, d] of a layer without a window: each process attends with its share of the heads."""
    size, heads, groups = group.size(), query.shape[1], key.shape[1]
    shared = lcm(size, groups)  # with fewer key heads than processes, some processes have the same ones
    if heads % shared:
        raise UserError(f"{size} processes cannot share {heads} heads of {groups} key heads: choose another number.")
    key, value = (states.repeat_interleave(shared // groups, dim=1) for states in (key, value))
    query, key, value = (heads_for_sequence(states, group) for states in (query, key, value))
    return sequence_for_heads(attend(query, key, value, **lengths), group)


def attend_by_neighbours(attend: Callable, group, query, key, value, window: int, bounds, longest) -> torch.Tensor:
    """Return the output [1, n, H, d] of a layer with a window: each process gets the keys that its queries reach."""
    length = query.shape[2]
    states = with_tokens_before(torch.cat((key, value), dim=-1), window - 1, group)  # one exchange for both
    key, value = states.split((key.shape[-1], value.shape[-1]), dim=-1)
    begin = group.rank() * length
    first = begin + length - key.shape[2]  # place in the row of the first key
    bounds = bounds.clamp(first, begin + length) - first
    return attend(query, key, value, bounds=bounds, longest=min(longest, key.shape[2]), sliding_window=window)


class AttendInPieces:
    """Attend over rows that the processes of a group share, with the signature of Transformers' attention functions.

    Attributes:
        core: the name of the attention function that computes own heads or own queries.
        layers: the layers that have exchanged so far. A layer that calls another function is missing here."""

    def __init__(self, core: str, group) -> None:
        self.core = core
        self.attend = ALL_ATTENTION_FUNCTIONS[core]
        self.group = group
        self.layers: set[int] = set()

    def __call__(
        self, module, query, key, value, attention_mask, sliding_window: int | None = None, **kwargs
    ) -> tuple[torch.Tensor, None]:
        """Return the output [1, n, H, d] for queries [1, H, n, d], keys and values [1, G, n, d] of the own piece.

        `cu_seq_lens_q`, int32 [documents + 1], has the bounds of the documents of the whole row. Raise `UserError`
        for padding, several rows and attention sinks."""
        total = query.shape[2] * self.group.size()
        bounds = kwargs.get("cu_seq_lens_q")
        longest = kwargs.get("max_length_q") or total
        if len(query) > 1 or attention_mask is not None or bounds is None:
            raise UserError("A shared row is a single one without padding, whose documents are in cu_seq_lens_q.")
        if any(kwargs.get(name) is not None for name in ("s_aux", "position_bias")):
            raise UserError("Attention sinks and biases belong to heads, which processes of a shared row exchange.")
        torch._assert_async(bounds[-1] == total, "cu_seq_lens_q must be that of the whole row, and not of a piece.")
        self.layers.add(module.layer_idx)
        others = {name: value for name, value in kwargs.items() if name not in OF_THE_PIECE}
        attend = partial(self.attend_to_documents, module, **others)
        states = (query.to(value.dtype), key.to(value.dtype), value)  # autocast leaves rotated states in float32
        if sliding_window is None or sliding_window >= total:
            return attend_by_heads(attend, self.group, *states, bounds=bounds, longest=longest), None
        return attend_by_neighbours(attend, self.group, *states, sliding_window, bounds, longest), None

    def attend_to_documents(self, module, query, key, value, bounds, longest, **kwargs) -> torch.Tensor:
        """Return the core's output for documents with these bounds among the keys. The queries are the last keys."""
        reach = key.shape[2] - query.shape[2]
        kwargs |= {"cu_seq_lens_q": bounds, "max_length_q": longest}
        if "flash" in self.core:
            kwargs["cu_seq_lens_q"] = (bounds - reach).clamp(min=0)
            kwargs |= {"cu_seq_lens_k": bounds, "max_length_k": longest}
            return self.attend(module, query, key, value, None, **kwargs)[0]
        # `sdpa_in_blocks` takes a query for each key: zeros stand before the own ones, and their output is left out.
        query = pad(query, (0, 0, reach, 0))
        return self.attend(module, query, key, value, None, **kwargs)[0][:, reach:]


@contextmanager
def shared_rows(core: str, group) -> Iterator[AttendInPieces]:
    """Have all models of this process attend over rows that the group shares, where they attend by this core.

    Models look the function up by its name at each call, so no model changes, and the public registry gets the
    original back at the end."""
    attend = AttendInPieces(core, group)
    AttentionInterface.register(core, attend)
    try:
        yield attend
    finally:
        AttentionInterface.register(core, attend.attend)
