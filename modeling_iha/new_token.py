# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Compute one new token from base keys and values, without building virtual ones.

Mixing, rotation and collapse are linear, so they move from the cached tokens to the new one."""

from typing import Any

import torch
from transformers.utils.generic import maybe_autocast

from .interleaving import rotate
from .tracing import is_exported


# How many cached tokens are converted to `product_dtype` at a time.
WIDENED_TOKENS = 1024
# How many cached tokens one streaming multiprocessor of a GPU sums. On an H200, 8,193 tokens took 0.09 ms, and
# 0.22 ms without a split.
SPLIT_TOKENS = 512


def uses_new_token_path(core: str, config: Any, dropout: float | None, states: torch.Tensor, num_keys: int) -> bool:
    """Return whether to compute one new token from base keys.

    The core must allow it, and it must be faster than building virtual tokens."""
    if core != "sdpa" or config.num_pseudo_heads == 1 or dropout:
        return False
    if states.device.type != "cpu":
        return True
    if is_exported():
        return False  # the comparison below would specialize the exported graph to a range of lengths
    # On a CPU virtual tokens are faster where few are cached (research/benchmarks/default_form.py).
    return num_keys >= 64 and len(states) * num_keys >= 128


def new_token_attention(
    heads: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None = None,
    attention_mask: torch.Tensor | None = None,
    product_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the output [batch, 1, H, head_dim] of one new token (IHA, Algorithm 1, steps 2 to 5).

    It rebuilds no pseudo-key or pseudo-value, because mixing and rotation are linear. For query pseudo-head i and key
    pseudo-head j of a head in group g,

        q_i . T_j sum_m alpha_K[m, g, j] k_m = sum_m (alpha_K[m, g, j] T_j^T q_i) . k_m

    T_j is the rotation of pseudo-head j (interleaving.py), and R[h, i] the collapse. The term in parentheses does not
    depend on the cached tokens and has the size of a query. It is computed first, and the scores are then one product
    with the cache as it is. In the same way alpha_V moves behind the sum over the cached values, and the collapse
    moves before it: sum_i R[h, i] (softmax_i V) = (sum_i R[h, i] softmax_i) V.

    Args:
        heads: the `MixedHeads` of the layer, with a collapse [H, P].
        query: [batch, H, 1, head_dim], rotated as the cached keys are.
        key, value: [batch, G, K, head_dim]. Without a mask the last of the K keys is the new token's.
        scaling: factor of the scores.
        window: W in tokens, or `None`; ignored with a mask. There are no more than W + 1 keys.
        attention_mask: boolean or additive [batch or 1, H or 1, P, K * P] over virtual tokens, or `None`.
        product_dtype: dtype in which to multiply if products in the cache's dtype are slow, or `None`."""
    # Autocast would round what is in float32 on purpose.
    with maybe_autocast(query.device.type, enabled=False):
        batch, num_heads, _, head_dim = query.shape
        num_pseudo_heads = heads.collapse.shape[1]
        dtype = value.dtype
        fast_dtype = product_dtype or dtype
        groups, num_keys = key.shape[1:3]
        query = query.to(fast_dtype)
        q_mix = heads.q_mix.to(fast_dtype)
        k_mix = heads.k_mix.to(fast_dtype).repeat_interleave(num_heads // groups, dim=1)
        v_mix = heads.v_mix.to(fast_dtype).repeat_interleave(num_heads // groups, dim=1)
        slice_tokens = num_keys if key.dtype == fast_dtype else WIDENED_TOKENS

        # The pseudo-heads q_i of the query, [batch, H, P (i), 1, head_dim]
        pseudo_query = torch.matmul(q_mix.flatten(1).t() * scaling, query.squeeze(2))
        pseudo_query = pseudo_query.view(batch, num_heads, num_pseudo_heads, 1, head_dim)
        if heads.rotation is not None:
            cos, sin = (table.to(fast_dtype) for table in heads.rotation)
            rotated = rotate(pseudo_query, cos.unsqueeze(1), sin.unsqueeze(1))  # by T_i
            # By T_j^T for every j: the tables of all j broadcast, [batch, H, P (i), P (j), head_dim].
            pseudo_query = rotate(rotated, cos, -sin)
        # [batch, G, H * P * P, head_dim], one for each query pseudo-head i and key pseudo-head j
        absorbed = (pseudo_query.unsqueeze(1) * k_mix[:, :, None, :, None]).flatten(2, 4)
        parts = [_scores(absorbed, keys.to(fast_dtype)) for keys in key.split(slice_tokens, dim=2)]
        scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)  # `cat` copies one tensor too
        scores = scores.view(batch, num_heads, num_pseudo_heads, num_pseudo_heads, num_keys)

        if attention_mask is None:
            hide_in_place(scores, window)
        else:
            scores = apply_mask(scores, attention_mask)
        # The softmax is in float32 at least, as in the eager core.
        probabilities = torch.softmax(scores.flatten(-2), dim=-1, dtype=torch.promote_types(fast_dtype, torch.float32))

        share_of_pseudo_head = heads.collapse.to(probabilities.dtype).unsqueeze(1)  # R, [H, 1, P]
        collapsed = torch.matmul(share_of_pseudo_head, probabilities).to(fast_dtype)
        collapsed = collapsed.view(batch, 1, num_heads * num_pseudo_heads, num_keys)
        pairs = zip(collapsed.split(slice_tokens, dim=-1), value.split(slice_tokens, dim=2))
        output = sum(_weighted_sum(shares, values.to(fast_dtype)) for shares, values in pairs)
        output = output.unflatten(2, (num_heads, num_pseudo_heads))  # [batch, m, H, j, head_dim]
        return (output * v_mix.unsqueeze(-1)).sum(dim=(1, 3)).unsqueeze(1).to(dtype)


def apply_mask(scores: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return scores [batch, H, i, j, K] with the keys that a mask hides at the lowest value.

    A boolean mask changes the scores in place, which keeps the layout of the view that paired heads pass. An additive
    mask gives a new tensor."""
    num_pseudo_heads, num_keys = scores.shape[-2:]
    # [batch, heads, i, K * j] as [batch, heads, i, j, K]
    mask = attention_mask.unflatten(-1, (num_keys, num_pseudo_heads)).transpose(-1, -2)
    if mask.dtype != torch.bool:
        return scores + mask
    # Padding sees nothing, and a row of -inf would become NaN.
    return scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)


def hide_in_place(scores: torch.Tensor, window: int | None) -> None:
    """Set the hidden keys among scores [batch, H, i, j, K] to -inf, for a call without a mask.

    `window` is in tokens, or `None`. With a window there are at most window + 1 keys. If there are that many,
    the oldest is partly hidden."""
    num_pseudo_heads, num_keys = scores.shape[-2:]
    hidden = torch.full((num_pseudo_heads,) * 2, -torch.inf, dtype=scores.dtype, device=scores.device)
    # Pseudo-head i sees the pseudo-heads up to i of its own token.
    scores[..., -1] += hidden.triu(1)
    if window is not None and num_keys == window + 1:
        # It sees the pseudo-heads after i of the token just before the window.
        scores[..., 0] += hidden.tril()


def _scores(absorbed: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return sum_m absorbed[m] . key[m], [batch, rows, K].

    `absorbed` is [batch, G, rows, head_dim], and `key` is [batch, G, K, head_dim]."""
    if key.device.type != "cpu":
        return torch.matmul(absorbed.transpose(1, 2).flatten(2), key.transpose(1, 2).flatten(2).transpose(1, 2))
    if key.dtype == torch.float32:
        scores = absorbed.new_zeros(len(key), absorbed.shape[2], key.shape[2])
        for m in range(key.shape[1]):
            scores.baddbmm_(absorbed[:, m], key[:, m].transpose(1, 2))
        return scores
    # One product over all cached heads rounds a score once and is faster in half precision. It goes row by row of the
    # batch, because a batched product would first transpose the keys.
    rows = zip(absorbed.transpose(1, 2).flatten(2), key.transpose(1, 2).flatten(2))
    return torch.stack([torch.mm(queries, keys.t()) for queries, keys in rows])


def _weighted_sum(shares: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return shares @ value, [batch, G, rows, head_dim].

    Shares are [batch, 1, rows, K], and values [batch, G, K, head_dim]. A GPU would compute the few rows of
    a head on one of its many streaming multiprocessors, so there K is split."""
    # How many of the first tokens are split, in parts of SPLIT_TOKENS
    split_length = 0 if value.device.type == "cpu" else value.shape[2] // SPLIT_TOKENS * SPLIT_TOKENS
    output = torch.matmul(shares[..., split_length:], value[:, :, split_length:])
    if split_length > 0:
        shares = shares[..., :split_length].unflatten(-1, (-1, SPLIT_TOKENS)).transpose(2, 3)
        value = value[:, :, :split_length].unflatten(2, (-1, SPLIT_TOKENS))
        output = output + torch.matmul(shares, value).sum(dim=2)
    return output
