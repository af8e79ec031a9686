"""Decoding from a cache of base keys and values, without rebuilding one pseudo-key or pseudo-value.

Mixing and rotation are linear, so for query pseudo-head i and key pseudo-head j of a head in group g

    q_i . R_j sum_m alpha_K[m, g, j] k_m = sum_m (alpha_K[m, g, j] R_j^T q_i) . k_m

where the bracket is as small as a query: the mixing and the rotation of the keys move into the query, and the scores are one product with the
cache as it is. Likewise alpha_V moves behind the sum over the cached values, and the collapse before it (see `collapse_first.py`).
"""

import torch

from .collapse_first import rotate


@torch.no_grad()
def absorbed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_mix: torch.Tensor,
    k_mix: torch.Tensor,
    v_mix: torch.Tensor,
    collapse: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    scaling: float,
    window: int | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Output [batch, 1, H, head_dim] of one new token, without gradients, with the arguments of `collapse_first_attention`."""
    # Autocast would round what is in float32 on purpose.
    with torch.autocast(query.device.type, enabled=False):
        batch, heads, _, head_dim = query.shape
        virtual, dtype = collapse.shape[1], query.dtype
        if window is not None:
            # The window of all pseudo-heads but the last begins one token earlier.
            key, value = key[:, :, -window - 1 :], value[:, :, -window - 1 :]
            documents = None if documents is None else documents[:, -window - 1 :]
        groups, num_keys = key.shape[1:3]
        q_mix, k_mix = q_mix.to(dtype), k_mix.to(dtype).repeat_interleave(heads // groups, dim=1)
        v_mix = v_mix.to(value.dtype).repeat_interleave(heads // groups, dim=1)

        query = torch.matmul(q_mix.flatten(1).t() * scaling, query.squeeze(2)).view(batch, heads, virtual, 1, head_dim)
        if rotation is not None:
            cos, sin = rotation
            # R_i, then R_j^T for every j: [batch, H, i, j, head_dim].
            query = rotate(rotate(query, cos.unsqueeze(1), sin.unsqueeze(1)), cos, -sin)
        # [batch, m, H * i * j, head_dim]
        absorbed = (query.unsqueeze(1) * k_mix[:, :, None, :, None]).flatten(2, 4)
        if dtype == torch.float32:
            scores = query.new_zeros(batch, absorbed.shape[2], num_keys)
            for m in range(groups):
                scores.baddbmm_(absorbed[:, m], key[:, m].transpose(1, 2))
        else:
            # One product over all cached heads rounds a score once, and is the faster one in half precision.
            # (Row by row of the batch: a batched product would first transpose the keys.)
            rows = zip(absorbed.transpose(1, 2).flatten(2), key.transpose(1, 2).flatten(2))
            scores = torch.stack([torch.mm(queries, keys.t()) for queries, keys in rows])
        scores = scores.view(batch, heads, virtual, virtual, num_keys)

        hidden = torch.full((virtual, virtual), -torch.inf, dtype=scores.dtype, device=scores.device)
        scores[..., -1] += hidden.triu(1)
        if window is not None and num_keys == window + 1:
            scores[..., 0] += hidden.tril()
        if documents is not None:
            scores.masked_fill_((documents != documents[:, -1:])[:, None, None, None], -torch.inf)
        # At least float32, as in the eager core.
        weights = torch.softmax(scores.flatten(-2), dim=-1, dtype=torch.promote_types(dtype, torch.float32))

        collapsed = torch.matmul(collapse.to(weights.dtype).unsqueeze(1), weights).to(value.dtype)
        output = torch.matmul(collapsed.view(batch, 1, heads * virtual, num_keys), value)
        output = output.unflatten(2, (heads, virtual))  # [batch, m, H, j, head_dim]
        return (output * v_mix.unsqueeze(-1)).sum(dim=(1, 3)).unsqueeze(1)
