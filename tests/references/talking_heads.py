"""Write out talking-heads attention with loops.

Shazeer et al. 2020, Talking-Heads Attention: heads h and g, S[h] the scores of one query, S'[g] = sum_h L[h, g] S[h]
over the keys it sees, A[g] = softmax(S'[g]), A'[g] = sum_h W[h, g] A[h], and the output of head g is A'[g] V. The
paper's numbers of heads for keys, logits and values are all H here. L is score_mix.weight and W weight_mix.weight,
`[H, H]`. Other symbols as in `iha.py`.
"""

import math

import torch

from .heads import per_query
from .options import layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    options = layer_options(config, layer_idx)
    heads, group = range(options.num_heads), options.num_heads // options.num_kv_heads

    def attend(queries, keys, values):
        scores = [keys[:, h // group] @ queries[h] / math.sqrt(options.head_dim) for h in heads]
        softmaxes = [torch.softmax(mixed, dim=0) for mixed in _talk(scores, weights["score_mix.weight"])]
        mixtures = _talk(softmaxes, weights["weight_mix.weight"])
        return torch.cat([mixtures[g] @ values[:, g // group] for g in heads])

    return per_query(attend, hidden_states, weights, options, **inputs)


def _talk(rows, share):
    """Return sum_h share[h, g] rows[h] for every head g."""
    return [sum(share[h, g] * rows[h] for h in range(len(rows))) for g in range(len(rows))]
