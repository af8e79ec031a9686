"""Write out multi-token attention with loops.

Golovneva et al. 2025, Multi-Token Attention: S[h][i][j] is the score of query i and key j, theta[h] [c_q, c_k] the
kernel of head h. Equation 5, with zeros for the pairs that are masked:

    S'[h][i][j] = sum_{a, b} theta[h][c_q - 1 - a][b] S[h][i - a][j - c_k // 2 + b]

for a < c_q and b < c_k; then S''[n] = sum_m W[m, n] S'[m] over the heads m of n's group (Equation 7), and the softmax
over the keys that query i sees. Its weights go through another convolution (Equation 6), are masked again, and mix. A
row i - a counts where query i sees token i - a, else it is zeros. Then, as options, RMSNorm of each head's output and
sigmoid(w . output + b), which scales it. Other symbols as in `iha.py`.
"""

import math

import torch

from .heads import projected_heads
from .iha import linear, rms_norm, visible_keys
from .options import default_inputs, layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    options = layer_options(config, layer_idx)
    rows = zip(hidden_states, *default_inputs(hidden_states, **inputs))
    return torch.stack([_one_sequence(x, weights, options, *of_row) for x, *of_row in rows])


def _one_sequence(x, weights, options, positions, is_real, document):
    length, heads, group = len(x), options.num_heads, options.num_heads // options.num_kv_heads
    queries = projected_heads(x, weights, "q", heads, options, positions)
    keys = projected_heads(x, weights, "k", options.num_kv_heads, options, positions)
    values = linear(x, weights, "v_proj").reshape(length, options.num_kv_heads, options.head_dim)
    seen = [visible_keys(i, 1, options.window, is_real, document) for i in range(length)]

    scores = [
        [
            _row(length, seen[i], keys[seen[i], h // group] @ queries[i, h] / math.sqrt(options.head_dim))
            for i in range(length)
        ]
        for h in range(heads)
    ]
    scores = _mix(_convolve(scores, weights.get("score_conv.weight"), seen), weights.get("score_mix.weight"))
    softmaxes = [
        [_row(length, seen[i], torch.softmax(scores[h][i][seen[i]], dim=0)) for i in range(length)]
        for h in range(heads)
    ]
    mixtures = _convolve(softmaxes, weights.get("weight_conv.weight"), seen)
    mixtures = _mix(
        [[_row(length, seen[i], mixtures[h][i][seen[i]]) for i in range(length)] for h in range(heads)],
        weights.get("weight_mix.weight"),
    )
    outputs = []
    for i in range(length):
        if not is_real[i]:
            outputs.append(x.new_zeros(heads * options.head_dim))
            continue
        outputs.append(
            torch.cat([_scaled(mixtures[h][i] @ values[:, h // group], weights, options) for h in range(heads)])
        )
    return linear(torch.stack(outputs), weights, "o_proj")


def _row(length, seen, entries):
    """Return a row `[length]` with these entries at the keys that are seen, and zeros elsewhere."""
    return entries.new_zeros(length).index_put((torch.tensor(seen, dtype=torch.long),), entries)


def _convolve(matrix, theta, seen):
    """Convolve matrix[h][i] `[N]`, zero where it is masked, by theta `[H, 1, c_q, c_k]`."""
    if theta is None:
        return matrix
    _, _, c_q, c_k = theta.shape
    convolved = []
    for h, of_head in enumerate(matrix):
        # [i][j] holds the c_k keys around key j, and zeros before the first and behind the last.
        around = [torch.nn.functional.pad(row, (c_k // 2, c_k // 2)).unfold(0, c_k, 1) for row in of_head]
        convolved.append([])
        for i in range(len(of_head)):
            rows = [a for a in range(c_q) if a == 0 or i - a in seen[i]]
            convolved[h].append(sum(around[i - a] @ theta[h, 0, c_q - 1 - a] for a in rows))
    return convolved


def _mix(matrix, share):
    """Return sum_m share[group, m, n] matrix[m] for each head n of a group; `share` is `[groups, M, M]`."""
    if share is None:
        return matrix
    size = share.shape[1]
    mixed = []
    for head in range(len(matrix)):
        g, n = divmod(head, size)
        rows = [sum(share[g, m, n] * matrix[g * size + m][i] for m in range(size)) for i in range(len(matrix[head]))]
        mixed.append(rows)
    return mixed


def _scaled(output, weights, options):
    """Norm and gate the output `[d]` of one head, where the layer has them."""
    if "head_norm.weight" in weights:
        output = rms_norm(output, weights["head_norm.weight"], options.norm_eps)
    if "head_gate.weight" in weights:
        output = output / (1 + torch.exp(-(weights["head_gate.weight"][0] @ output + weights["head_gate.bias"][0])))
    return output
