"""Write out differential attention with loops.

Ye et al. 2024, Differential Transformer, equations 1 to 3, with heads laid out as in Transformers' DiffLlama:
differential head j of H / 2 has the queries of heads j and j + H / 2, and with g = j // (H / G) the keys of groups g
and g + G / 2 and the values of both side by side, `[2d]`. Its output is the difference of two softmaxes over those
values,

    o = (softmax(q1 k1 / sqrt(d)) - lambda softmax(q2 k2 / sqrt(d))) v,   (1 - lambda_init) o / sqrt(mean(o^2) + eps),
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init,   lambda_init = 0.8 - 0.6 exp(-0.3
    (l - 1))

in layer l = 1, 2, ... Other symbols as in `iha.py`.
"""

import math

import torch

from .heads import per_query
from .iha import linear, rms_norm
from .options import layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    options = layer_options(config, layer_idx)
    pairs, groups, width = options.num_heads // 2, options.num_kv_heads, options.head_dim
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
    q1, k1, q2, k2 = (weights[f"lambda_{name}"] for name in ("q1", "k1", "q2", "k2"))
    lambda_full = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + lambda_init

    def attend(queries, keys, values):
        outputs = []
        for j in range(pairs):
            g = j // (options.num_heads // groups)
            first = torch.softmax(keys[:, g] @ queries[j] / math.sqrt(width), dim=0)
            second = torch.softmax(keys[:, g + groups // 2] @ queries[j + pairs] / math.sqrt(width), dim=0)
            value = torch.cat([values[:, g], values[:, g + groups // 2]], dim=-1)
            output = (first - lambda_full * second) @ value
            outputs.append((1 - lambda_init) * rms_norm(output, 1.0, options.norm_eps))
        return torch.cat(outputs)

    return per_query(attend, hidden_states, weights, options, **inputs)


def values_of(x, weights, config):
    values = linear(x, weights, "v_proj").reshape(len(x), -1, config.head_dim)
    half = values.shape[1] // 2
    return torch.cat([values[:, :half], values[:, half:]], dim=-1)
