# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Decode one new token of Interleaved Head Attention by a Triton kernel that is split over the cache.

The cache holds base keys and values. The mixing of the query and all rotations are absorbed, as `absorbed_attention`
derives. The mixing of keys and values is a sum of products with the cached heads:

    score[h, i, j, n] = sum_m alpha_K[m, g, j] (R_j^T R_i q~[h, i]) . k[m, n]
    out[h, i]         = sum_(m, n) (sum_j alpha_V[m, g, j] weight[h, i, j, n]) v[m, n]

A program has PAIRS pairs (head, pseudo-head i of the query), PADDED pseudo-keys j for each, a power of two, and
`split` tokens of the cache. No GPU has run it.
"""

from __future__ import annotations

import torch

from gpu_kernels.mix_heads_triton import MIN_SIDE, _columns, _load_halves, check, jit, tl, triton
from modeling_iha.interleaving import IHAWeights


# Rows of a program, and tokens of a step through the cache.
ROWS, KEYS = 128, 64
# Programs that keep a large GPU busy: two for each of an H200's 132 multiprocessors.
PROGRAMS = 264


@jit
def _table(table, p, P: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows p of a table [P, HALF]."""
    column = tl.arange(0, COLUMNS)
    return tl.load(table + p[:, None] * HALF + column, mask=(p < P)[:, None] & (column < HALF), other=0.0)


@jit
def _rotated_queries(
    q, alpha_q, cos, sin, pair, i, j, M: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Return R_j^T R_i sum_m alpha[m, pair] q[m] for rows (pair, j), float32, from q [M, head_dim]."""
    x1 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    x2 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    for head in range(0, M, HEADS):
        m = head + tl.arange(0, HEADS)
        share = tl.load(alpha_q + m * M * P + pair[:, None], mask=(m < M) & (pair < M * P)[:, None], other=0.0)
        y1, y2 = _load_halves(q, m, m < M, 2 * HALF, HALF, COLUMNS)
        x1 = tl.dot(share.to(y1.dtype), y1, x1, input_precision="ieee")
        x2 = tl.dot(share.to(y2.dtype), y2, x2, input_precision="ieee")
    x1 = tl.reshape(tl.broadcast_to(x1[:, None, :], (PAIRS, PADDED, COLUMNS)), (PAIRS * PADDED, COLUMNS))
    x2 = tl.reshape(tl.broadcast_to(x2[:, None, :], (PAIRS, PADDED, COLUMNS)), (PAIRS * PADDED, COLUMNS))
    if cos is not None:
        c, s = _table(cos, i, P, HALF, COLUMNS), _table(sin, i, P, HALF, COLUMNS)
        x1, x2 = x1 * c - x2 * s, x2 * c + x1 * s
        c, s = _table(cos, j, P, HALF, COLUMNS), _table(sin, j, P, HALF, COLUMNS)
        x1, x2 = x1 * c + x2 * s, x2 * c - x1 * s
    return x1, x2


# Each token makes the cache longer. The kernel must not be compiled anew for the divisors of each length.
@jit(do_not_specialize=["window", "first", "split", "N"])
def _decode_forward(
    q, k, v, alpha_q, alpha_k, alpha_v, cos, sin, documents, out, lse, scale, window, first, split, N,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
    COLUMNS: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the outputs and log-sum-exps of PAIRS pairs over `split` tokens of the cache, from `first` on."""
    batch, part = tl.program_id(2).to(tl.int64), tl.program_id(1)
    q, k, v = q + batch * H * 2 * HALF, k + batch * G * N * 2 * HALF, v + batch * G * N * 2 * HALF
    if documents is not None:
        documents += batch * N
    dtype: tl.constexpr = q.dtype.element_ty

    row = tl.arange(0, PAIRS * PADDED)
    pair, j = tl.program_id(0) * PAIRS + row // PADDED, row % PADDED
    i, mixing, row_valid = pair % P, pair // P // (H // G) * P + j, (pair < H * P) & (j < P)
    own = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    r1, r2 = _rotated_queries(q, alpha_q, cos, sin, own, i, j, H, P, HALF, COLUMNS, PAIRS, PADDED, HEADS)
    r1, r2 = r1.to(dtype), r2.to(dtype)

    # The peak is finite, so that the weights of a split that sees no key are 0 and not NaN.
    peak = tl.full([PAIRS], -1e30, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    o1 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    o2 = tl.zeros([PAIRS, COLUMNS], tl.float32)
    start = first + part * split
    stop = tl.minimum(start + split, N)
    for key in range(start, stop, KEYS):
        u = key + tl.arange(0, KEYS)
        valid = u < stop
        scores = tl.zeros([PAIRS * PADDED, KEYS], tl.float32)
        for m in range(G):
            share = tl.load(alpha_k + m * G * P + mixing, mask=row_valid, other=0.0).to(tl.float32)
            k1, k2 = _load_halves(k, (m * N + u).to(tl.int64), valid, 2 * HALF, HALF, COLUMNS)
            products = tl.dot(r1, tl.trans(k1), input_precision="ieee")
            scores += share[:, None] * tl.dot(r2, tl.trans(k2), products, input_precision="ieee")
        query, virtual = (N - 1) * P + i, u[None, :] * P + j[:, None]
        visible = (virtual <= query[:, None]) & (virtual > query[:, None] - window * P)
        visible &= row_valid[:, None] & valid[None, :]
        if documents is not None:
            visible &= (tl.load(documents + u, mask=valid, other=0) == tl.load(documents + N - 1))[None, :]
        scores = tl.reshape(tl.where(visible, scores * scale, float("-inf")), (PAIRS, PADDED, KEYS))
        new_peak = tl.maximum(peak, tl.max(tl.max(scores, axis=2), axis=1))
        weights = tl.exp(scores - new_peak[:, None, None])
        decay = tl.exp(peak - new_peak)
        total = total * decay + tl.sum(tl.sum(weights, axis=2), axis=1)
        o1, o2, peak = o1 * decay[:, None], o2 * decay[:, None], new_peak
        for m in range(G):
            share = tl.load(alpha_v + m * G * P + mixing, mask=row_valid, other=0.0).to(tl.float32)
            mixed = tl.sum(weights * tl.reshape(share, (PAIRS, PADDED))[:, :, None], axis=1).to(dtype)
            v1, v2 = _load_halves(v, (m * N + u).to(tl.int64), valid, 2 * HALF, HALF, COLUMNS)
            o1 = tl.dot(mixed, v1, o1, input_precision="ieee")
            o2 = tl.dot(mixed, v2, o2, input_precision="ieee")

    total = tl.where(total > 0, total, 1.0)
    row = (batch * tl.num_programs(1) + part) * H * P + own
    column = tl.arange(0, COLUMNS)
    offsets = row.to(tl.int64)[:, None] * (2 * HALF) + column
    mask = (own < H * P)[:, None] & (column < HALF)
    tl.store(out + offsets, o1 / total[:, None], mask=mask)
    tl.store(out + HALF + offsets, o2 / total[:, None], mask=mask)
    tl.store(lse + row, peak + tl.log(total), mask=own < H * P)


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: IHAWeights,
    scaling: float,
    window: int | None = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `absorbed_attention` without a mask and without a backward pass.

    Up to ROWS / P pairs of a head and a pseudo-head share a program. The cache is read once where H * P^2 is at most
    ROWS, and otherwise once for each ROWS of them.

    Raises:
        ImportError: without Triton.
        ValueError: for another dtype, a collapse over all heads, an odd head_dim, a CPU tensor outside Triton's
            interpreter, or bfloat16 in it.
    """
    check(value)
    query, key, value = (states.to(value.dtype).contiguous() for states in (query, key, value))
    alpha_q, alpha_k, alpha_v, collapse = (weight.contiguous() for weight in weights[:4])
    (batch, heads, _, head_dim), (groups, length), virtual = query.shape, key.shape[1:3], alpha_q.shape[-1]
    if collapse.shape != (heads, virtual):
        raise ValueError(f"collapse must have the shape {[heads, virtual]}, not {list(collapse.shape)}.")
    cos = sin = documents = None
    if weights.rotation is not None:
        cos, sin = (table[:, : head_dim // 2].contiguous() for table in weights.rotation)
    if document_ids is not None:
        documents = document_ids.expand(batch, -1).contiguous()
    window = length if window is None else min(window, length)
    # For all pseudo-heads but the last, the window begins one token earlier.
    first = max(0, length - 1 - window)
    padded = triton.next_power_of_2(virtual)
    pairs = min(triton.next_power_of_2(heads * virtual), max(1, ROWS // padded))
    blocks = triton.cdiv(heads * virtual, pairs)
    split = KEYS * triton.cdiv((length - first) * batch * blocks, KEYS * PROGRAMS)
    splits = triton.cdiv(length - first, split)
    out = query.new_empty(batch, splits, heads, virtual, head_dim, dtype=torch.float32)
    lse = query.new_empty(batch, splits, heads, virtual, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _decode_forward[blocks, splits, batch](
            query, key, value, alpha_q, alpha_k, alpha_v, cos, sin, documents, out, lse, scaling, window, first, split,
            length, H=heads, G=groups, P=virtual, PADDED=padded, HALF=head_dim // 2, COLUMNS=_columns(head_dim),
            PAIRS=pairs, KEYS=KEYS, HEADS=MIN_SIDE, num_warps=8, num_stages=2,
        )  # fmt: skip
    # Autocast would round a matrix product.
    share = lse.softmax(dim=1) * collapse
    return (share.unsqueeze(-1) * out).sum(dim=(1, 3)).unsqueeze(1).to(value.dtype)
