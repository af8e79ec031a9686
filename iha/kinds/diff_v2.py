"""Describe kind "diff_v2".

Exact start: query head h of Llama becomes heads 2 h and 2 h + 1, which compute the same output y, because they are of
the group that head h was of: 2 h // (2 H / G) = (2 h + 1) // (2 H / G) = h // (H / G). Where W is zero, lambda is
sigmoid(0) = 1/2, so their difference is y - y / 2 = y / 2, and a doubled output projection undoes the half. All
factors are powers of two, so nothing is rounded. The output projection's bias stays. A layer costs as much as one with
2 H query heads: H * head_dim more rows in the query projection, and twice the products of attention.
"""

import torch

from iha.layer_cost import Cost, linear
from modeling_iha import IHAConfig

from . import Companion, mha


def start(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return a lambda of one half."""
    return {"lambda_proj.weight": torch.zeros(config.num_attention_heads, config.hidden_size)}


def from_mha(config: IHAConfig, attention: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return every query head twice, and a doubled output projection."""
    queries = {
        name: rows.unflatten(0, (-1, config.head_dim)).repeat_interleave(2, dim=0).flatten(0, 1)
        for name, rows in attention.items()
        if name.startswith("q_proj.")
    }
    return {**queries, "o_proj.weight": 2 * attention["o_proj.weight"]}


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of twice the query heads of "mha", and of lambda."""
    heads = config.num_attention_heads
    hidden = config.hidden_size
    width = config.num_attention_heads * config.head_dim
    first = mha.cost(config, tokens, window, form)
    second = Cost(0, first.prefill, first.training, first.decode)
    return first + second + linear(tokens, hidden, width, config.attention_bias) + linear(tokens, hidden, heads)


COMPANION = Companion(
    card="differential attention, version 2: each head is the difference of two softmaxes over the same keys and "
    "values. It has twice the query heads, and the KV cache is as large as that of ordinary attention.",
    paper="Ye, Dong, Sun and Wei, 2026, Differential Transformer V2 "
    "([code](https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2))",
    cost=cost,
    start=start,
    from_mha=from_mha,
    # At the exact start lambda's weights are zero.
    control="v_proj.weight",
)
