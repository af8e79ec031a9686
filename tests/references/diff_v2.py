"""Write out the second version of differential attention with loops.

Ye et al. 2026, Differential Transformer V2: 2 H query heads and G key/value heads. With attn_i the output of query
head i, which reads group i // (2 H / G), head h of the output is attn_2h - sigmoid(x W)_h attn_(2h+1), where x is the
layer's input and lambda_proj.weight `[H, D]` is W transposed. Other symbols as in `iha.py`.
"""

import math

import torch

from .heads import projected_heads
from .iha import linear, visible_keys
from .options import default_inputs, layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    options = layer_options(config, layer_idx)
    heads, groups, width = options.num_heads, options.num_kv_heads, options.head_dim
    rows = []
    for x, positions, is_real, document in zip(hidden_states, *default_inputs(hidden_states, **inputs)):
        queries = projected_heads(x, weights, "q", 2 * heads, options, positions)
        keys = projected_heads(x, weights, "k", groups, options, positions)
        values = linear(x, weights, "v_proj").reshape(len(x), groups, width)
        tokens = []
        for n in range(len(x)):
            seen = visible_keys(n, 1, options.window, is_real, document) if is_real[n] else []
            outputs = [x.new_zeros(width)] * (2 * heads)
            for i in range(2 * heads if seen else 0):
                g = i // (2 * heads // groups)
                outputs[i] = torch.softmax(keys[seen, g] @ queries[n, i] / math.sqrt(width), dim=0) @ values[seen, g]
            differences = []
            for h in range(heads):
                share = 1 / (1 + torch.exp(-weights["lambda_proj.weight"][h] @ x[n]))
                differences.append(outputs[2 * h] - share * outputs[2 * h + 1])
            tokens.append(torch.cat(differences))
        rows.append(linear(torch.stack(tokens), weights, "o_proj"))
    return torch.stack(rows)
