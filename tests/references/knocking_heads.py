"""Write out knocking-heads attention with loops.

Zhou et al. 2025, Knocking-Heads Attention, on the vectors of a token that the projections give, before QK-norm and
RoPE: q_i T^Q, k_i T^K and v_i T^V with matrices `[d, d]` that all heads share (equations 5 to 7), or for the values
2 (v_i U * sigmoid(v_i G)) D (equation 9). Other symbols as in `iha.py`.
"""

import math

import torch

from .iha import linear, rms_norm, rotate, visible_keys
from .options import default_inputs, layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    options = layer_options(config, layer_idx)
    heads, groups, width = options.num_heads, options.num_kv_heads, options.head_dim
    stated = stated_options(config)

    def position(vector, name, is_mapped, at):
        if is_mapped:
            vector = vector @ weights[f"{name}_map.weight"]
        if f"{name}_norm.weight" in weights:
            vector = rms_norm(vector, weights[f"{name}_norm.weight"], options.norm_eps)
        return rotate(vector, at, options.inv_freq, options.rope_scaling)

    rows = []
    for x, positions, is_real, document in zip(hidden_states, *default_inputs(hidden_states, **inputs)):
        q, k = (linear(x, weights, f"{name}_proj").reshape(len(x), -1, width) for name in "qk")
        queries = [
            [position(q[n, h], "q", stated["queries"], positions[n]) for h in range(heads)] for n in range(len(x))
        ]
        keys = [[position(k[n, g], "k", stated["keys"], positions[n]) for g in range(groups)] for n in range(len(x))]
        values = values_of(x, weights, config)
        tokens = []
        for n in range(len(x)):
            seen = visible_keys(n, 1, options.window, is_real, document) if is_real[n] else []
            outputs = [x.new_zeros(width)] * heads
            for h in range(heads if seen else 0):
                g = h // (heads // groups)
                scores = torch.stack([keys[m][g] @ queries[n][h] / math.sqrt(width) for m in seen])
                outputs[h] = torch.softmax(scores, dim=0) @ torch.stack([values[m][g] for m in seen])
            tokens.append(torch.cat(outputs))
        rows.append(linear(torch.stack(tokens), weights, "o_proj"))
    return torch.stack(rows)


def values_of(x, weights, config):
    how = stated_options(config)["values"]

    def value(vector):
        if how == "linear":
            return vector @ weights["v_map.weight"]
        if how == "mlp":
            gate = 1 / (1 + torch.exp(-vector @ weights["v_map.gate"]))
            return 2 * (vector @ weights["v_map.up"] * gate) @ weights["v_map.down"]
        return vector

    v = linear(x, weights, "v_proj").reshape(len(x), -1, config.head_dim)
    return torch.stack([torch.stack([value(vector) for vector in token]) for token in v])


def stated_options(config):
    return {"queries": False, "keys": False, "values": "mlp", **config.attention_options.get("knocking_heads", {})}
