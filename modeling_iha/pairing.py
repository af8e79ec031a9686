# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Pair heads: the queries, keys and values of P heads become one sequence of P virtual tokens for each token.

Virtual token (n, p) of virtual head i is head p * (H / P) + i of token n. Projections write [batch, N, H, head_dim],
and [batch, N * P, H / P, head_dim] is a view of it, so only cached states are copied. The G key/value heads are paired
in the same way. Virtual query head i reads virtual key head i // (H / G). The P key heads of that virtual key head are
the ones that the P query heads of i read in ordinary grouped-query attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.utils.generic import maybe_autocast

from .new_token import apply_mask, hide_in_place


class PairedHeads(NamedTuple):
    """Make virtual tokens of paired heads.

    "paired_heads" layers and those of `pair_heads` have such heads (see `VirtualHeads`)."""

    num_pseudo_heads: int  # P

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        return ()

    @property
    def allocates_virtual_tokens(self) -> bool:
        return False  # without a cache virtual tokens are views

    @property
    def takes_new_token(self) -> bool:
        return True

    @classmethod
    def from_module(cls, module: Any, *ignored) -> "PairedHeads":
        """Return the pairing of a module. It needs no states and no rotation, which `MixedHeads.from_module` takes."""
        return cls(module.config.num_pseudo_heads)

    def attend(
        self,
        attend_virtual: Callable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and the weights as `VirtualHeads.attend` does.

        The weights are [batch, H / P, N * P, K * P]."""
        mask = self.mask_of_virtual_heads(attention_mask)
        output, weights = attend_virtual(self.pair(query), self.pair(key), self.pair(value), mask, **kwargs)
        return output.unflatten(1, (-1, self.num_pseudo_heads)).flatten(2, 3), weights

    def pair(self, states: torch.Tensor) -> torch.Tensor:
        """View heads [batch, M, N, head_dim] as the virtual sequence [batch, M / P, N * P, head_dim].

        A cache stores the tokens of each head contiguously, so cached states are copied."""
        return states.unflatten(1, (self.num_pseudo_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    def mask_of_virtual_heads(self, mask: Any) -> Any:
        """Convert a mask per head [batch, H, N * P, K * P] to one per virtual head [batch, H / P, N * P, K * P].

        Row (n, p) of virtual head i is that of its head, p * (H / P) + i. Return any other mask unchanged."""
        if not isinstance(mask, torch.Tensor) or mask.ndim != 4 or mask.shape[1] == 1:
            return mask
        rows = mask.unflatten(2, (-1, self.num_pseudo_heads))  # [batch, H, N, P (row), K * P]
        rows = rows.unflatten(1, (self.num_pseudo_heads, -1))  # [batch, P (head), H / P, N, P (row), K * P]
        rows = rows.diagonal(dim1=1, dim2=4)  # row p of head p, [batch, H / P, N, K * P, P]
        return rows.movedim(-1, 3).flatten(2, 3)

    def attend_new_token(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None = None,
        attention_mask: torch.Tensor | None = None,
        product_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the output [batch, 1, H, head_dim] of one new token, by the arguments of `new_token_attention`.

        The P queries of a virtual head are multiplied with the cached keys of each of its P heads where they lie, and
        one softmax goes over all of these."""
        num_pseudo_heads = self.num_pseudo_heads
        dtype = value.dtype
        # Autocast would round what is in float32 on purpose.
        with maybe_autocast(query.device.type, enabled=False):
            query, key, value = (states.to(product_dtype or dtype) for states in (query, key, value))
            key = key.unflatten(1, (num_pseudo_heads, -1))  # [batch, P, G / P, K, head_dim]
            value = value.unflatten(1, (num_pseudo_heads, -1))
            key_heads = key.shape[2]
            query = self._group_queries(query.squeeze(2) * scaling, key_heads)
            scores = torch.matmul(query, key.transpose(-1, -2))  # [batch, P of the keys, G / P, H / G * P, K]
            # A view of them as [batch, H / P, P of the queries, P of the keys, K], the order in `new_token_attention`.
            scores = scores.unflatten(3, (-1, num_pseudo_heads)).flatten(2, 3).permute(0, 2, 3, 1, 4)
            # The softmax is in float32 at least, as in the eager core.
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            if attention_mask is None:
                hide_in_place(scores, window)
            else:
                scores = apply_mask(scores, self.mask_of_virtual_heads(attention_mask))
            weights = (scores - scores.logsumexp(dim=(-2, -1), keepdim=True)).exp().to(value.dtype)
            weights = weights.permute(0, 3, 1, 2, 4)  # in the order of the product with the keys
            weights = weights.unflatten(2, (key_heads, -1)).flatten(3, 4)
            output = torch.matmul(weights, value).sum(dim=1)  # [batch, G / P, H / G * P, head_dim]
            output = output.unflatten(2, (-1, num_pseudo_heads)).flatten(1, 2)  # [batch, H / P, P, head_dim]
            return output.transpose(1, 2).flatten(1, 2).unsqueeze(1).to(dtype)

    def _group_queries(self, query: torch.Tensor, key_heads: int) -> torch.Tensor:
        """Return queries [batch, H, head_dim] as [batch, 1, G / P, H / G * P, head_dim], by the key head they read.

        `key_heads` is G / P, the number of virtual key heads."""
        query = query.unflatten(1, (self.num_pseudo_heads, -1)).transpose(1, 2)  # [batch, H / P, P, head_dim]
        # The virtual query heads of a key head follow each other.
        return query.unflatten(1, (key_heads, -1)).flatten(2, 3).unsqueeze(1)
