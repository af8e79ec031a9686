"""Project and rotate ordinary heads, and attend with one query at a time to the keys it sees."""

import torch
from torch import Tensor

from .iha import linear, rms_norm, rotate, visible_keys
from .options import AttentionOptions, default_inputs


def per_query(
    attend,
    hidden_states: Tensor,
    weights: dict[str, Tensor],
    options: AttentionOptions,
    **inputs: Tensor | None,
) -> Tensor:
    """Compute a layer `[B, N, D]` from the outputs `[H * d]` of the heads for each token.

    They are `attend(queries [H, d], keys [keys, G, d], values [keys, G, d])` of the keys that the token sees. The
    other arguments are those of `iha_attention`.
    """
    length = hidden_states.shape[1]
    rows = []
    for x, positions, is_real, document in zip(hidden_states, *default_inputs(hidden_states, **inputs)):
        queries = projected_heads(x, weights, "q", options.num_heads, options, positions)
        keys = projected_heads(x, weights, "k", options.num_kv_heads, options, positions)
        values = linear(x, weights, "v_proj").reshape(length, options.num_kv_heads, options.head_dim)
        tokens = []
        for n in range(length):
            if not is_real[n]:
                tokens.append(x.new_zeros(options.num_heads * options.head_dim))
                continue
            seen = visible_keys(n, 1, options.window, is_real, document)
            tokens.append(attend(queries[n], keys[seen], values[seen]))
        rows.append(linear(torch.stack(tokens), weights, "o_proj"))
    return torch.stack(rows)


def projected_heads(x, weights, name, count, options, positions):
    """Return rotated queries or keys `[N, heads, d]`."""
    base = linear(x, weights, f"{name}_proj").reshape(len(x), count, options.head_dim)
    if f"{name}_norm.weight" in weights:
        base = rms_norm(base, weights[f"{name}_norm.weight"], options.norm_eps)
    return rotate(base, positions[:, None], options.inv_freq, options.rope_scaling)
