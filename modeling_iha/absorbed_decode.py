# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding from a cache of base keys and values, without rebuilding one pseudo-key or pseudo-value.

Mixing and rotation are linear. For query pseudo-head i and key pseudo-head j of a head in group g,

    q_i . R_j sum_m alpha_K[m, g, j] k_m = sum_m (alpha_K[m, g, j] R_j^T q_i) . k_m

The bracket is as small as a query: mixing and rotation of the keys move into the query, and the scores are one product
with the cache as it is. In the same way alpha_V moves behind the sum over the cached values, and the collapse before
it (see `collapse_first.py`).
"""

import torch

from .collapse_first import IHAWeights, rotate


def absorbed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: IHAWeights,
    scaling: float,
    window: int | None = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output [batch, 1, H, head_dim] of one new token, with the arguments of `collapse_first_attention`."""
    # Autocast would round what is in float32 on purpose.
    with torch.autocast(query.device.type, enabled=False):
        batch, heads, _, head_dim = query.shape
        num_pseudo_heads, dtype = weights.collapse.shape[1], query.dtype
        if window is not None:
            # The window of all pseudo-heads but the last begins one token earlier.
            key, value = key[:, :, -window - 1 :], value[:, :, -window - 1 :]
            document_ids = None if document_ids is None else document_ids[:, -window - 1 :]
        groups, num_keys = key.shape[1:3]
        q_mix, k_mix = weights.q_mix.to(dtype), weights.k_mix.to(dtype).repeat_interleave(heads // groups, dim=1)
        v_mix = weights.v_mix.to(value.dtype).repeat_interleave(heads // groups, dim=1)

        query = torch.matmul(q_mix.flatten(1).t() * scaling, query.squeeze(2))
        query = query.view(batch, heads, num_pseudo_heads, 1, head_dim)
        if weights.rotation is not None:
            cos, sin = weights.rotation
            # R_i, then R_j^T for every j: [batch, H, i, j, head_dim].
            query = rotate(rotate(query, cos.unsqueeze(1), sin.unsqueeze(1)), cos, -sin)
        # [batch, m, H * i * j, head_dim]
        absorbed = (query.unsqueeze(1) * k_mix[:, :, None, :, None]).flatten(2, 4)
        if dtype == torch.float32:
            scores = query.new_zeros(batch, absorbed.shape[2], num_keys)
            for m in range(groups):
                scores.baddbmm_(absorbed[:, m], key[:, m].transpose(1, 2))
        else:
            # One product over all cached heads rounds a score once, and is the faster one in half precision.
            # (Row by row of the batch: a batched product would first transpose the keys.)
            rows = zip(absorbed.transpose(1, 2).flatten(2), key.transpose(1, 2).flatten(2))
            scores = torch.stack([torch.mm(queries, keys.t()) for queries, keys in rows])
        scores = scores.view(batch, heads, num_pseudo_heads, num_pseudo_heads, num_keys)

        hidden = torch.full((num_pseudo_heads,) * 2, -torch.inf, dtype=scores.dtype, device=scores.device)
        scores[..., -1] += hidden.triu(1)
        if window is not None and num_keys == window + 1:
            scores[..., 0] += hidden.tril()
        if document_ids is not None:
            apart = document_ids != document_ids[:, -1:]
            scores = scores.masked_fill(apart[:, None, None, None], -torch.inf)
        # At least float32, as in the eager core.
        probabilities = torch.softmax(scores.flatten(-2), dim=-1, dtype=torch.promote_types(dtype, torch.float32))

        collapse = weights.collapse.to(probabilities.dtype).unsqueeze(1)
        collapsed = torch.matmul(collapse, probabilities).to(value.dtype)
        output = torch.matmul(collapsed.view(batch, 1, heads * num_pseudo_heads, num_keys), value)
        output = output.unflatten(2, (heads, num_pseudo_heads))  # [batch, m, H, j, head_dim]
        return (output * v_mix.unsqueeze(-1)).sum(dim=(1, 3)).unsqueeze(1)
