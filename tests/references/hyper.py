"""HyperAttention and 2-simplicial attention written out with loops: what "hyper" and "simplicial" are tested against.

Definitions G.1 (sharing) and G.3 (no sharing) of "A Theoretical Study of (Hyper) Self-Attention through the Lens of
Interactions" and Section 4 of "Fast and Simplex: 2-Simplicial Attention in Triton", with the causal mask of a language
model, for a float64 CPU tensor and for the reader. It shares no code with the package and none with Transformers, and
autograd through it gives the reference gradients.

Symbols: N tokens, D model width, H query heads, G key/value groups, d head width, n the order: query i attends to
tuples (j_1, .., j_{n-1}) of tokens, of which member a has the key K^(a) and the value V^(a).
"""

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from .hyper_feature import linear, rotate, visible_in_rows
from .iha import rms_norm
from .options import layer_window


@dataclass(frozen=True)
class HyperOptions:
    """What a layer's weights do not say.

    Args:
        num_heads: H.
        num_kv_heads: G, a divisor of H. Head h reads key/value group h // (H / G).
        head_dim: d.
        theta: base of RoPE.
        order: n.
        sharing: all members of a tuple have one key and one value, so k_proj has G d rows; else (n - 1) G d, K^(1)
            first.
        kept: the pairs to keep, "j >= k", "j > k" or "all"; the linear form keeps all tuples.
        linear: the scores are the weights.
        norm_eps: epsilon of the QK-norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    theta: float
    order: int = 3
    sharing: bool = False
    kept: str = "all"
    linear: bool = False
    norm_eps: float = 1e-6


def attention(hidden_states, weights, config, layer_idx, **inputs):
    stated = config.attention_options.get("hyper", {})
    linear_form = stated.get("linear", False)
    options = HyperOptions(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        theta=config.rope_parameters["rope_theta"],
        order=stated.get("order", 3),
        sharing=stated.get("sharing", True),
        kept="all" if linear_form else "j > k" if stated.get("strict_order", False) else "j >= k",
        linear=linear_form,
        norm_eps=config.rms_norm_eps,
    )
    return tuple_attention(hidden_states, weights, options, config, layer_idx, stated.get("windows"), **inputs)


def tuple_attention(hidden_states, weights, options, config, layer_idx, windows, position_ids=None, **masks):
    """The layer [B, N, D] with these windows of the members of a tuple, by default the layer's own; `masks` as in
    `visible_in_rows`."""
    batch, length, _ = hidden_states.shape
    if position_ids is None:
        position_ids = torch.arange(length).expand(batch, -1)
    windows = windows or [layer_window(config, layer_idx)] * (options.order - 1)
    visible = zip(*[visible_in_rows(batch, length, window, **masks) for window in windows])
    rows = [
        hyper_attention(hidden, weights, options, positions, list(of_members))
        for hidden, positions, of_members in zip(hidden_states, position_ids.expand(batch, -1), visible)
    ]
    return torch.stack(rows)


def hyper_attention(
    hidden_states: Tensor,
    weights: dict[str, Tensor],
    options: HyperOptions,
    position_ids: Tensor,
    visible: list[Tensor],
) -> Tensor:
    """One layer, [N, D] from [N, D].

    Args:
        hidden_states: `[N, D]` of one sequence.
        weights: the layer's state dict: {q,k,v,o}_proj.weight and optional .bias, {q,k}_norm.weight if there is
            QK-norm.
        position_ids: `[N]` RoPE position of each token.
        visible: for each member of a tuple bool `[N, N]`, of query and key: `hyper_feature.visible_keys`.
    """
    length, width, groups = hidden_states.shape[0], options.head_dim, options.num_kv_heads
    q = linear(hidden_states, weights, "q_proj").reshape(length, options.num_heads, width)
    k = linear(hidden_states, weights, "k_proj").reshape(length, -1, groups, width)
    v = linear(hidden_states, weights, "v_proj").reshape(length, -1, groups, width)
    if "q_norm.weight" in weights:
        q = rms_norm(q, weights["q_norm.weight"], options.norm_eps)
        k = rms_norm(k, weights["k_norm.weight"], options.norm_eps)
    members = range(options.order - 1)

    def turned(vectors):
        return torch.stack([rotate(vectors[n], position_ids[n], options.theta) for n in range(length)])

    heads_per_group = options.num_heads // groups
    queries = [turned(q[:, h]) for h in range(options.num_heads)]
    keys = [[turned(k[:, 0 if options.sharing else a, g]) for a in members] for g in range(groups)]
    values = [[v[:, 0 if options.sharing else a, g] for a in members] for g in range(groups)]

    rows = []
    for i in range(length):
        tuples = list(product(*[[j for j in range(length) if visible[a][i, j]] for a in members]))
        if options.kept != "all":
            tuples = [(j, k) for j, k in tuples if (j > k if options.kept == "j > k" else j >= k)]
        heads = []
        for h in range(options.num_heads):
            if not tuples:
                heads.append(hidden_states.new_zeros(width))
                continue
            g = h // heads_per_group
            scores, of_tuples = [], []
            for positions in tuples:
                key, value = 1.0, 1.0
                for a, j in zip(members, positions):
                    key, value = key * keys[g][a][j], value * values[g][a][j]
                scores.append((queries[h][i] * key).sum() / math.sqrt(width))
                of_tuples.append(value)
            scores = torch.stack(scores)
            attention = scores if options.linear else torch.softmax(scores, dim=0)
            heads.append(attention @ torch.stack(of_tuples))
        rows.append(torch.cat(heads))
    return linear(torch.stack(rows), weights, "o_proj")
