# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Pair heads: the queries, keys and values of P heads become one sequence of P virtual tokens for each token.

Virtual token (n, p) of virtual head i is head p * (H / P) + i of token n. Projections write [batch, N, H, head_dim],
and [batch, N * P, H / P, head_dim] is a view of it, so nothing is copied. The G key/value heads are paired in the
same way, and virtual query head i reads virtual key head i // (H / G), whose heads are those of its own heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .windows import has_first_keys


class PairedHeads(NamedTuple):
    """Make virtual tokens of paired heads. It is the `virtual_heads` of a layer, as `MixedHeads` is of another."""

    num_pseudo_heads: int  # P

    @property
    def expands(self) -> bool:
        """Return whether virtual tokens take memory of their own: they are views."""
        return False

    @classmethod
    def of(cls, module: Any, *states) -> "PairedHeads":
        return cls(module.config.num_pseudo_heads)

    def attend(
        self,
        core: Callable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [batch, N, H, head_dim] of heads [batch, H or G, N, head_dim], and the core's weights.

        `core` is a function of queries, keys, values, a mask and `kwargs`, all in virtual tokens. Its weights are
        [batch, H / P, N * P, keys * P]."""
        states = (self.pair(heads) for heads in (query, key, value))
        output, attn_weights = core(*states, self.rows_of_heads(attention_mask), **kwargs)
        return output.unflatten(1, (-1, self.num_pseudo_heads)).flatten(2, 3), attn_weights

    def pair(self, states: torch.Tensor) -> torch.Tensor:
        """View heads [batch, M, N, head_dim] as the virtual sequence [batch, M / P, N * P, head_dim].

        Cached heads, in whose memory the tokens of a head follow each other, are copied."""
        return states.unflatten(1, (self.num_pseudo_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    def rows_of_heads(self, mask: Any) -> Any:
        """Return the mask of virtual heads, [batch, H / P, N * P, keys], of one with a mask for each of the H heads.

        Row (n, p) of virtual head i is that of its head, p * (H / P) + i. Return any other mask as it is."""
        if not isinstance(mask, torch.Tensor) or has_first_keys(mask) or mask.ndim != 4 or mask.shape[1] == 1:
            return mask
        rows = mask.unflatten(2, (-1, self.num_pseudo_heads)).unflatten(1, (self.num_pseudo_heads, -1))
        return rows.diagonal(dim1=1, dim2=4).movedim(-1, 3).flatten(2, 3)

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None = None,
        attention_mask: torch.Tensor | None = None,
        product_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return the output [batch, 1, H, head_dim] of one new token, as `absorbed_attention` of the same arguments.

        The P queries of a virtual head are multiplied with the cached keys of each of its P heads where they lie, and
        one softmax goes over all of these."""
        pseudo_heads, dtype = self.num_pseudo_heads, value.dtype
        # Autocast would round what is in float32 on purpose.
        with torch.autocast(query.device.type, enabled=False):
            query, key, value = (states.to(product_dtype or dtype) for states in (query, key, value))
            key, value = (
                states.unflatten(1, (pseudo_heads, -1)) for states in (key, value)
            )  # [batch, P, G / P, N, d]
            key_heads, num_keys = key.shape[2:4]
            # [batch, H / P, P, d]; the query heads of a key head follow each other
            query = query.squeeze(2).unflatten(1, (pseudo_heads, -1)).transpose(1, 2) * scaling
            query = query.unflatten(1, (key_heads, -1)).flatten(2, 3).unsqueeze(1)
            scores = torch.matmul(query, key.transpose(-1, -2)).unflatten(3, (-1, pseudo_heads)).flatten(2, 3)
            # [batch, P of the keys, H / P, P of the queries, N], in float32 at least, as in the eager core
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            if attention_mask is not None:
                mask = self.rows_of_heads(attention_mask).unflatten(-1, (num_keys, -1)).permute(0, 4, 1, 2, 3)
                lowest = torch.finfo(scores.dtype).min  # padding sees nothing, and -inf alone would give NaN
                scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
            else:
                hidden = torch.full((pseudo_heads,) * 2, -torch.inf, dtype=scores.dtype, device=scores.device)
                scores[..., -1] += hidden.tril(-1).unsqueeze(1)
                if window is not None and num_keys == window + 1:
                    scores[..., 0] += hidden.triu().unsqueeze(1)
            weights = (scores - scores.logsumexp(dim=(1, -1), keepdim=True)).exp().to(value.dtype)
            weights = weights.unflatten(2, (key_heads, -1)).flatten(3, 4)
            output = torch.matmul(weights, value).sum(dim=1)  # [batch, G / P, H / G * P, d]
            output = output.unflatten(2, (-1, pseudo_heads)).flatten(1, 2)  # [batch, H / P, P, d]
            return output.transpose(1, 2).flatten(1, 2).unsqueeze(1).to(dtype)
