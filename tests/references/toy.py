"""Scale the scores of each head by a learned temperature, as the mechanism of test_toy_mechanism.py does."""

import math

import torch

from .heads import per_query
from .options import layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    options = layer_options(config, layer_idx)
    group = options.num_heads // options.num_kv_heads

    def attend(queries, keys, values):
        heads = []
        for h, temperature in enumerate(weights["temperature.weight"]):
            scores = temperature * (keys[:, h // group] @ queries[h]) / math.sqrt(options.head_dim)
            heads.append(torch.softmax(scores, dim=0) @ values[:, h // group])
        return torch.cat(heads)

    return per_query(attend, hidden_states, weights, options, **inputs)
