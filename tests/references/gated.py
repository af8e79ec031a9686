"""Write out gated attention with loops.

Qiu et al. 2025, Gated Attention for Large Language Models, gate after the softmax and before the output projection:
with Y_h the output of head h for a token and x the layer's input, which is normed before it, the output projection
reads Y_h * sigmoid(x W_h). W_h is `[D, d]` elementwise or `[D, 1]` for one gate per head; output_gate.weight holds
the transposes of W_1, W_2, ... below each other. Other symbols as in `iha.py`.
"""

import math

import torch

from .heads import projected_heads
from .iha import linear, visible_keys
from .options import default_inputs, layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    options = layer_options(config, layer_idx)
    heads, groups, width = options.num_heads, options.num_kv_heads, options.head_dim
    per_head = config.attention_options.get("gated", {}).get("per_head", False)
    rows = []
    for x, positions, is_real, document in zip(hidden_states, *default_inputs(hidden_states, **inputs)):
        queries = projected_heads(x, weights, "q", heads, options, positions)
        keys = projected_heads(x, weights, "k", groups, options, positions)
        values = linear(x, weights, "v_proj").reshape(len(x), groups, width)
        tokens = []
        for n in range(len(x)):
            seen = visible_keys(n, 1, options.window, is_real, document) if is_real[n] else []
            gated = []
            for h in range(heads):
                g = h // (heads // groups)
                output = x.new_zeros(width)
                if seen:
                    output = torch.softmax(keys[seen, g] @ queries[n, h] / math.sqrt(width), dim=0) @ values[seen, g]
                for i in range(width):
                    row = weights["output_gate.weight"][h if per_head else h * width + i]
                    gated.append(output[i] / (1 + torch.exp(-row @ x[n])))
            tokens.append(torch.stack(gated))
        rows.append(linear(torch.stack(tokens), weights, "o_proj"))
    return torch.stack(rows)
