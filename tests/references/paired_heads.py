"""Write out paired heads with loops.

With S = H / P, head p S + i of token n is virtual token (n, p) of virtual head i, with index n P + p; so are the
key/value heads, with S' = G / P. It sees the virtual tokens before it in its window, its own included, and its output
is that of its head. Other symbols as in `iha.py`, whose projection, rotation and masks are used.
"""

import math

import torch

from .iha import linear, rms_norm, rotate, visible_keys
from .options import default_inputs, layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    options = layer_options(config, layer_idx)
    rows = zip(hidden_states, *default_inputs(hidden_states, **inputs))
    return torch.stack([_one_sequence(x, weights, options, *of_row) for x, *of_row in rows])


def _one_sequence(x, weights, options, positions, is_real, document):
    length, num_pseudo, width = len(x), options.num_pseudo_heads, options.head_dim
    queries = _virtual_heads(x, weights, "q", options.num_heads, options, positions)
    keys = _virtual_heads(x, weights, "k", options.num_kv_heads, options, positions)
    values = _virtual_heads(x, weights, "v", options.num_kv_heads, options, positions)
    of_group = options.num_heads // options.num_kv_heads
    tokens = []
    for n in range(length):
        heads = []
        for p in range(num_pseudo):
            v = n * num_pseudo + p
            seen = visible_keys(v, num_pseudo, options.window, is_real, document) if is_real[n] else []
            for i in range(options.num_heads // num_pseudo):
                if not seen:
                    heads.append(x.new_zeros(width))
                    continue
                j = i // of_group
                scores = torch.stack([keys[j][u] @ queries[i][v] for u in seen]) / math.sqrt(width)
                heads.append(torch.softmax(scores, dim=0) @ torch.stack([values[j][u] for u in seen]))
        tokens.append(torch.cat(heads))
    return linear(torch.stack(tokens), weights, "o_proj")


def _virtual_heads(x, weights, name, count, options, positions):
    """Return the vectors `[d]` of the N P virtual tokens of each virtual head; values are not rotated."""
    num_pseudo = options.num_pseudo_heads
    base = linear(x, weights, f"{name}_proj").reshape(len(x), count, options.head_dim)
    if f"{name}_norm.weight" in weights:
        base = rms_norm(base, weights[f"{name}_norm.weight"], options.norm_eps)
    virtual = []
    for i in range(count // num_pseudo):
        virtual.append([])
        for n in range(len(x)):
            for p in range(num_pseudo):
                vector = base[n, p * (count // num_pseudo) + i]
                position = positions[n] * num_pseudo + p if options.pseudo_positions == "interleaved" else positions[n]
                if name != "v":
                    vector = rotate(vector, position, options.inv_freq, options.rope_scaling)
                virtual[i].append(vector)
    return virtual
