# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Pair heads: the queries, keys and values of P heads become one sequence of P virtual tokens for each token.

Virtual token (n, p) of virtual head i is head p * (H / P) + i of token n. Projections write [batch, N, H, head_dim],
and [batch, N * P, H / P, head_dim] is a view of it, so only cached states are copied. The G key/value heads are paired
in the same way. Virtual query head i reads virtual key head i // (H / G). The P key heads of that virtual key head are
the ones that the P query heads of i read in ordinary grouped-query attention.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.utils.generic import maybe_autocast

from .triton_kernels import DECODES_PAIRED_HEADS, kernels_decode
from .triton_kernels import decode as decode_by_kernel
from .virtual_tokens import masked_softmax


@dataclass
class PairedHeads:
    """View the heads of one call as virtual tokens, and the output as heads."""

    num_pseudo_heads: int  # P
    collapses_per_head: ClassVar[bool] = True

    def in_parts(self, count: int) -> list["PairedHeads"]:
        return [self]

    def make_virtual_tokens(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple:
        """Arrange queries, keys and values [batch, M, N, head_dim] as [batch, M / P, N * P, head_dim].

        This is a view of what projections write, and a copy of cached states."""
        return tuple(
            states.unflatten(1, (self.num_pseudo_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
            for states in (query, key, value)
        )

    def collapse_output(self, output: torch.Tensor) -> torch.Tensor:
        """View the output of virtual tokens [batch, N * P, H / P, head_dim] as heads [batch, N, H, head_dim]."""
        return output.unflatten(1, (-1, self.num_pseudo_heads)).flatten(2, 3)

    def mask_of_virtual_heads(self, mask: Any) -> Any:
        """Convert a mask per head [batch, H, N * P, K * P] to one per virtual head [batch, H / P, N * P, K * P].

        Row (n, p) of virtual head i is that of its head, p * (H / P) + i. Return any other mask unchanged."""
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[1] == 1:
            return mask
        rows = mask.unflatten(2, (-1, self.num_pseudo_heads))  # [batch, H, N, P (row), K * P]
        rows = rows.unflatten(1, (self.num_pseudo_heads, -1))  # [batch, P (head), H / P, N, P (row), K * P]
        rows = rows.diagonal(dim1=1, dim2=4)  # row p of head p, [batch, H / P, N, K * P, P]
        return rows.movedim(-1, 3).flatten(2, 3)

    def attend_new_token(self, query, key, value, mask: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the output [batch, 1, H, head_dim] of one new token, as `MixedHeads.attend_new_token` does.

        The P queries of a virtual head are multiplied with the cached keys of each of its P heads where they lie, and
        one softmax goes over all of these. Query heads that read one virtual key head lie next to each other. The mask
        is that of virtual heads, [batch or 1, H / P or 1, P, K * P]."""
        if kernels_decode(query, DECODES_PAIRED_HEADS):
            return decode_by_kernel(query, key, value, mask, scaling)
        num_pseudo_heads = self.num_pseudo_heads
        num_virtual_groups = key.shape[1] // num_pseudo_heads
        with maybe_autocast(query.device.type, enabled=False):  # it would round what is in float32 on purpose
            key = key.unflatten(1, (num_pseudo_heads, -1))  # [batch, P, G / P, K, head_dim]
            value = value.unflatten(1, (num_pseudo_heads, -1))
            query = query.squeeze(2).unflatten(1, (num_pseudo_heads, -1)) * scaling  # [batch, P, H / P, head_dim]
            query = query.transpose(1, 2).unflatten(1, (num_virtual_groups, -1)).flatten(2, 3)
            # [batch, 1, G / P, H / G * P, head_dim] times the keys: [batch, P of the keys, G / P, H / G * P, K]
            scores = torch.matmul(query.unsqueeze(1), key.transpose(-1, -2))
            probabilities = masked_softmax(by_virtual_head(scores, num_pseudo_heads), mask).to(value.dtype)
            probabilities = by_key_head(probabilities, num_virtual_groups)
            output = torch.matmul(probabilities, value).sum(dim=1)  # [batch, G / P, H / G * P, head_dim]
            output = output.unflatten(2, (-1, num_pseudo_heads)).flatten(1, 2)  # [batch, H / P, P, head_dim]
            return output.transpose(1, 2).flatten(1, 2).unsqueeze(1)


def by_virtual_head(scores: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """View scores [batch, P of the keys, G / P, H / G * P, K] as [batch, H / P, P of the query, P of the keys, K]."""
    scores = scores.unflatten(3, (-1, num_pseudo_heads))  # [batch, P of the keys, G / P, H / G, P of the query, K]
    return scores.flatten(2, 3).permute(0, 2, 3, 1, 4)


def by_key_head(probabilities: torch.Tensor, num_virtual_groups: int) -> torch.Tensor:
    """Undo `by_virtual_head`."""
    probabilities = probabilities.permute(0, 3, 1, 2, 4)  # [batch, P of the keys, H / P, P of the query, K]
    return probabilities.unflatten(2, (num_virtual_groups, -1)).flatten(3, 4)
