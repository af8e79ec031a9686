"""What the references of mechanisms on ordinary heads share: projections, RoPE, and one query at a time with the keys
it sees."""

import torch
from torch import Tensor

from .iha import _linear, _rotate, _visible_keys, rms_norm
from .options import AttentionOptions


def per_query(
    attend,
    hidden_states: Tensor,
    weights: dict[str, Tensor],
    options: AttentionOptions,
    position_ids: Tensor | None,
    padding_mask: Tensor | None,
    document_ids: Tensor | None,
) -> Tensor:
    """The layer `[B, N, D]` whose heads' outputs, `[H * d]` for one token of one sequence, are
    `attend(queries [H, d], keys [keys, G, d], values [keys, G, d])` of the keys that the token sees.

    The other arguments are those of `iha_attention`. Padding is neither a key nor a query; its output is o_proj's
    bias.
    """
    batch_size, length, _ = hidden_states.shape
    if position_ids is None:
        position_ids = torch.arange(length).expand(batch_size, length)
    if padding_mask is None:
        padding_mask = torch.ones(batch_size, length, dtype=torch.bool)
    if document_ids is None:
        document_ids = torch.zeros(batch_size, length, dtype=torch.long)
    rows = []
    for x, positions, is_real, document in zip(hidden_states, position_ids, padding_mask, document_ids):
        queries = _heads(x, weights, "q", options.num_heads, options, positions)
        keys = _heads(x, weights, "k", options.num_kv_heads, options, positions)
        values = _linear(x, weights, "v_proj").reshape(length, options.num_kv_heads, options.head_dim)
        tokens = []
        for n in range(length):
            if not is_real[n]:
                tokens.append(x.new_zeros(options.num_heads * options.head_dim))
                continue
            seen = _visible_keys(n, 1, options.window, is_real, document)
            tokens.append(attend(queries[n], keys[seen], values[seen]))
        rows.append(_linear(torch.stack(tokens), weights, "o_proj"))
    return torch.stack(rows)


def _heads(x, weights, name, count, options, positions):
    """Rotated queries or keys `[N, heads, d]`."""
    base = _linear(x, weights, f"{name}_proj").reshape(len(x), count, options.head_dim)
    if f"{name}_norm.weight" in weights:
        base = rms_norm(base, weights[f"{name}_norm.weight"], options.norm_eps)
    return torch.stack(
        [
            torch.stack([_rotate(base[n, h], positions[n], options) for h in range(count)])
            for n in range(len(positions))
        ]
    )
