"""Write out HyperAttention and 2-simplicial attention with loops.

Definitions G.1 (sharing) and G.3 (no sharing) of "A Theoretical Study of (Hyper) Self-Attention through the Lens of
Interactions" and Section 4 of "Fast and Simplex: 2-Simplicial Attention in Triton", with the causal mask of a language
model, for a float64 CPU tensor and for the reader. It shares no code with the package and none with Transformers, and
autograd through it gives the reference gradients.

Symbols: N tokens, D model width, H query heads, G key/value groups, d head width, n the order: query i attends to
tuples (j_1, .., j_{n-1}) of tokens, of which member a has the key K^(a) and the value V^(a).
"""

import math
from itertools import product

import torch

from .iha import linear, rms_norm, rotate, visible_keys
from .options import default_inputs, layer_window, llama_inv_freq


def attention(hidden_states, weights, config, layer_idx, **inputs):
    stated = config.attention_options.get("hyper", {})
    linear_form = stated.get("linear", False)
    return tuple_attention(
        hidden_states,
        weights,
        config,
        layer_idx,
        order=stated.get("order", 3),
        sharing=stated.get("sharing", True),
        kept="all" if linear_form else "j > k" if stated.get("strict_order", False) else "j >= k",
        is_linear=linear_form,
        windows=stated.get("windows"),
        **inputs,
    )


def tuple_attention(
    hidden_states,
    weights,
    config,
    layer_idx,
    order=3,
    sharing=False,
    kept="all",
    is_linear=False,
    windows=None,
    **inputs,
):
    """Compute the layer `[B, N, D]`.

    Args:
        hidden_states, weights, config, layer_idx, inputs: as `attention` of each kind takes them.
        order: n.
        sharing: all members of a tuple have one key and one value, so k_proj has G d rows; else (n - 1) G d, K^(1)
            first.
        kept: the pairs to keep, "j >= k", "j > k" or "all"; the linear form keeps all tuples.
        is_linear: the scores are the weights.
        windows: of the members of a tuple, in tokens, by default the layer's own.
    """
    windows = windows or [layer_window(config, layer_idx)] * (order - 1)
    rows = []
    for x, positions, is_real, document in zip(hidden_states, *default_inputs(hidden_states, **inputs)):
        queries, keys, values = _heads(x, weights, config, positions, order, sharing)
        tokens = []
        for i in range(len(x)):
            seen = [visible_keys(i, 1, window, is_real, document) if is_real[i] else [] for window in windows]
            tuples = list(product(*seen))
            if kept != "all":
                tuples = [(j, k) for j, k in tuples if (j > k if kept == "j > k" else j >= k)]
            heads = []
            for h, query in enumerate(queries):
                g = h // (len(queries) // len(keys))
                heads.append(_attend(query[i], keys[g], values[g], tuples, is_linear))
            tokens.append(torch.cat(heads))
        rows.append(linear(torch.stack(tokens), weights, "o_proj"))
    return torch.stack(rows)


def _heads(x, weights, config, positions, order, sharing):
    """Return queries of each head, and keys and values of each group and member of a tuple, `[N, d]` each."""
    length, width, groups = len(x), config.head_dim, config.num_key_value_heads
    q = linear(x, weights, "q_proj").reshape(length, config.num_attention_heads, width)
    k = linear(x, weights, "k_proj").reshape(length, -1, groups, width)
    v = linear(x, weights, "v_proj").reshape(length, -1, groups, width)
    if "q_norm.weight" in weights:
        q = rms_norm(q, weights["q_norm.weight"], config.rms_norm_eps)
        k = rms_norm(k, weights["k_norm.weight"], config.rms_norm_eps)
    inv_freq = llama_inv_freq(width, config.rope_parameters["rope_theta"])

    members = [0 if sharing else a for a in range(order - 1)]
    queries = [rotate(q[:, h], positions, inv_freq) for h in range(config.num_attention_heads)]
    keys = [[rotate(k[:, a, g], positions, inv_freq) for a in members] for g in range(groups)]
    values = [[v[:, a, g] for a in members] for g in range(groups)]
    return queries, keys, values


def _attend(query, keys, values, tuples, is_linear):
    """Return the output `[d]` of one head for one query, 0 where it sees no tuple."""
    if not tuples:
        return torch.zeros_like(query)
    of_member = [list(tokens) for tokens in zip(*tuples)]
    key, value = (math.prod(x[tokens] for x, tokens in zip(states, of_member)) for states in (keys, values))
    scores = key @ query / math.sqrt(len(query))
    return (scores if is_linear else torch.softmax(scores, dim=0)) @ value
