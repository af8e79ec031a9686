# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Reduce attention maps over virtual tokens to maps over tokens, for people who look at them."""

import torch


def token_attentions(
    attentions: tuple[torch.Tensor, ...], num_tokens: int, num_heads: int
) -> tuple[torch.Tensor, ...]:
    """Return attention maps over tokens, [batch, H, N, K], of the `attentions` that a model returned.

    Maps over virtual tokens, [batch, H, N * P, K * P], are summed over the P of a key and averaged over the P of a
    query. In a layer of paired heads, [batch, H / P, N * P, K * P], each virtual query belongs to one head, so the
    rows are returned to their heads and not averaged. Other maps stay as they are.

    Args:
        attentions: the maps of each layer that returned one.
        num_tokens: N, the tokens of the call.
        num_heads: H, the query heads of a layer (`num_attention_heads`).

    Raise a ValueError if there are no maps, and for a `num_tokens` that does not divide their size. A multiple of N
    that does cannot be told from N."""
    if not attentions:
        raise ValueError(
            'There are no attention maps, because SDPA returns none: call model.set_attn_implementation("eager"), and '
            "then the model with output_attentions=True."
        )
    maps = []
    for weights in attentions:
        if weights.shape[-2] % num_tokens != 0:
            raise ValueError(f"num_tokens is {num_tokens}, and a map has the shape {tuple(weights.shape)}.")
        size = weights.shape[-2] // num_tokens  # P, or 1 in a layer without virtual tokens
        by_key = weights.unflatten(-1, (-1, size)).sum(-1)
        by_query = by_key.unflatten(-2, (-1, size))  # [batch, heads, N, P, K]
        if weights.shape[1] < num_heads:
            maps.append(by_query.movedim(3, 1).flatten(1, 2))
        else:
            maps.append(by_query.mean(-2))
    return tuple(maps)
