"""Write out with loops what a config adds to the heads of any kind, between attention and the output projection.

Exclusive self attention (XSA, arXiv 2603.09078): with y the output of a head for a token and v the value of that
token which the head reads, z = y - (y . v / |v|^2) v. In "iha" v is the value before the mixing.

The gate (Qiu et al. 2025, Gated Attention for Large Language Models, arXiv 2505.06708, position G1): with Y_h the
output of head h, after XSA, and x the layer's input, the output projection reads Y_h * sigmoid(x W_h). W_h is `[D, d]`
elementwise or `[D, 1]` for one gate per head; output_gate.weight holds the transposes of W_1, W_2, ... below each
other. In "diff" a head is 2 d wide, and has one gate for each of its halves.
"""

import torch

from .iha import linear


def attention(hidden_states, weights, bare, values_of, config, **inputs):
    """Compute a layer from `bare`, which has no additions, and from the values [N, groups, width] of `values_of`."""
    columns = weights["o_proj.weight"].shape[1]
    without = {name: weight for name, weight in weights.items() if not name.startswith("o_proj.")}
    outputs = bare(hidden_states, without | {"o_proj.weight": torch.eye(columns).double()}, **inputs)
    rows = []
    for x, row in zip(hidden_states, outputs):
        tokens = list(row)
        if config.exclusive_attention:
            values = values_of(x, weights, config)
            tokens = [exclusive(token, values[n]) for n, token in enumerate(tokens)]
        if config.output_gate is not None:
            columns_of_gate = {"elementwise": 1, "per_head": config.head_dim}[config.output_gate]
            for n, token in enumerate(tokens):
                gates = [1 / (1 + torch.exp(-gate @ x[n])) for gate in weights["output_gate.weight"]]
                tokens[n] = torch.stack([token[i] * gates[i // columns_of_gate] for i in range(columns)])
        rows.append(linear(torch.stack(tokens), weights, "o_proj"))
    return torch.stack(rows)


def exclusive(token, values):
    """Return the heads `[H * d]` of one token, by its values [groups, width]."""
    heads = token.split(values.shape[1])
    of_group = len(heads) // len(values)
    own = [values[h // of_group] for h in range(len(heads))]
    return torch.cat([y - (y @ v) / (v @ v) * v for y, v in zip(heads, own)])


def projected_values(x, weights, config):
    """Return the values [N, groups, width] of most kinds."""
    return linear(x, weights, "v_proj").reshape(len(x), -1, config.head_dim)
