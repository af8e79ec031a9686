# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of Interleaved Head Attention (IHA, Algorithm 1), forward and backward: the virtual tokens in one
pass (steps 2 and 3), and the whole attention (steps 2 to 5) without virtual queries, keys or values in global memory.

Triton is optional: without it the module imports, and its two functions say what is missing. The tests run the
kernels in Triton's interpreter and compile them for sm_80, sm_90 and sm_100. Their speed has not been measured.

In the kernels a tile is TOKENS tokens of one head with CHUNK of their P pseudo-heads, so that the rows of a token can
be summed by a reshape: row r is pseudo-head first + r % CHUNK of token start + r // CHUNK. A state is two tensors
[rows, COLUMNS], the halves that RoPE turns against one another, whose first HALF = head_dim / 2 columns count. Sums
are in float32, the factors of tensor-core products in the dtype of the states, alpha among them.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from modeling_iha.collapse_first import IHAWeights


try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:
    triton = tl = None

    def jit(kernel=None, **options):
        return jit if kernel is None else kernel


# The shortest side of a tensor-core product, and the heads that one takes.
MIN_SIDE = 16
# Rows and tokens that a tile has at most: of queries that a program keeps, of keys that it keeps, and of those that
# pass by, where a head has up to 128 bytes and where it has more. These are the largest that compile without many
# spilled registers (benchmarks/results/gpu/resources.json): a program keeps twice as many sums for a key as for a
# query, and a product that mixes pads a chunk of pseudo-heads to 8, which few pseudo-heads pay in registers.
QUERY_TILE, KEY_TILE, PASSING_TILES = (128, 32), (64, 16), ((64, 16), (32, 8))


@jit
def _tile(start, first, N, P: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr):
    """Token, pseudo-head and validity of each row of the tile of tokens from `start` and pseudo-heads from `first`."""
    row = tl.arange(0, TOKENS * CHUNK)
    token, pseudo = start + row // CHUNK, first + row % CHUNK
    return token, pseudo, (token < N) & (pseudo < P)


@jit
def _offsets(row, valid, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets and mask [..., COLUMNS] of the first halves of rows `row` [...] of a tensor [any, head_dim]."""
    column = tl.arange(0, COLUMNS)
    row, valid = tl.expand_dims(row, -1), tl.expand_dims(valid, -1)
    return row.to(tl.int64) * (2 * HALF) + column, valid & (column < HALF)


@jit
def _load(states, row, valid, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    offsets, mask = _offsets(row, valid, HALF, COLUMNS)
    return tl.load(states + offsets, mask=mask, other=0.0), tl.load(states + HALF + offsets, mask=mask, other=0.0)


@jit
def _store(states, x1, x2, row, valid, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    offsets, mask = _offsets(row, valid, HALF, COLUMNS)
    tl.store(states + offsets, x1.to(states.dtype.element_ty), mask=mask)
    tl.store(states + HALF + offsets, x2.to(states.dtype.element_ty), mask=mask)


@jit
def _turn(x1, x2, cos, sin, first, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """R_p of x [tokens, COLUMNS, CHUNK], by tables [P, HALF]; its transpose where the caller exchanges the halves on
    both sides."""
    p, column = first + tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
    offsets, mask = p[None, :] * HALF + column[:, None], (p < P)[None, :] & (column < HALF)[:, None]
    cos, sin = tl.load(cos + offsets, mask=mask, other=0.0)[None], tl.load(sin + offsets, mask=mask, other=0.0)[None]
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@jit
def _mixed(
    half, alpha, start, first, N,
    M: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """sum_m alpha[m, h, p] half[m, n], float32 [TOKENS, COLUMNS, CHUNK], of one half of the states."""
    n, p = start + tl.arange(0, TOKENS), first + tl.arange(0, CHUNK)
    x = tl.zeros([TOKENS * COLUMNS, CHUNK], tl.float32)
    for head in range(0, M, HEADS):
        m = head + tl.arange(0, HEADS)[:, None]
        share = tl.load(alpha + m * M * P + p, mask=(m < M) & (p < P), other=0.0).to(half.dtype.element_ty)
        offsets, mask = _offsets(m * N + n, (m < M) & (n < N), HALF, COLUMNS)
        y = tl.reshape(tl.load(half + offsets, mask=mask, other=0.0), (HEADS, TOKENS * COLUMNS))
        # The pseudo-heads take the side of a product that tensor cores pad to 8, the other they pad to 16 or 64.
        x = tl.dot(tl.trans(y), share, x, input_precision="ieee")
    return tl.reshape(x, (TOKENS, COLUMNS, CHUNK))


@jit
def _virtual(
    states, alpha, cos, sin, start, first, N,
    M: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr = 16,
):  # fmt: skip
    """Virtual tokens R_p sum_m alpha[m, h, p] states[m, n] of a tile, in the dtype of the states, with `alpha` at
    [0, h, 0]."""
    dtype: tl.constexpr = states.dtype.element_ty
    x1 = _mixed(states, alpha, start, first, N, M, P, CHUNK, HALF, COLUMNS, TOKENS, HEADS)
    x2 = _mixed(states + HALF, alpha, start, first, N, M, P, CHUNK, HALF, COLUMNS, TOKENS, HEADS)
    if cos is not None:
        x1, x2 = _turn(x1, x2, cos, sin, first, P, CHUNK, HALF, COLUMNS)
    x1, x2 = tl.permute(x1.to(dtype), (0, 2, 1)), tl.permute(x2.to(dtype), (0, 2, 1))
    return tl.reshape(x1, (TOKENS * CHUNK, COLUMNS)), tl.reshape(x2, (TOKENS * CHUNK, COLUMNS))


@jit
def _virtual_backward(
    d1, d2, states, alpha, cos, sin, d_states, d_alpha, start, first, N,
    M: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Adds what the gradients d1, d2 of the virtual tokens of a tile give the float32 `d_states` and `d_alpha`. It
    runs once for each tile that a program keeps: as products on tensor cores these sums would spill most registers."""
    d1 = tl.permute(tl.reshape(d1, (TOKENS, CHUNK, COLUMNS)), (0, 2, 1))
    d2 = tl.permute(tl.reshape(d2, (TOKENS, CHUNK, COLUMNS)), (0, 2, 1))
    if cos is not None:
        d2, d1 = _turn(d2, d1, cos, sin, first, P, CHUNK, HALF, COLUMNS)
    n, p = start + tl.arange(0, TOKENS), first + tl.arange(0, CHUNK)
    for m in range(M):
        share = tl.load(alpha + m * M * P + p, mask=p < P, other=0.0).to(tl.float32)
        offsets, mask = _offsets(m * N + n, n < N, HALF, COLUMNS)
        tl.atomic_add(d_states + offsets, tl.sum(d1 * share, axis=2), mask=mask, sem="relaxed")
        tl.atomic_add(d_states + HALF + offsets, tl.sum(d2 * share, axis=2), mask=mask, sem="relaxed")
        y1, y2 = _load(states, m * N + n, n < N, HALF, COLUMNS)
        d_share = d1 * y1.to(tl.float32)[:, :, None] + d2 * y2.to(tl.float32)[:, :, None]
        tl.atomic_add(d_alpha + m * M * P + p, tl.sum(tl.sum(d_share, axis=0), axis=0), mask=p < P, sem="relaxed")


@jit
def _token_sum(x, CHUNK: tl.constexpr, TOKENS: tl.constexpr):
    """[TOKENS, columns] from [TOKENS * CHUNK, columns]."""
    return tl.sum(tl.reshape(x, (TOKENS, CHUNK, x.shape[1])), axis=1)


@jit
def _token_repeat(x, CHUNK: tl.constexpr, TOKENS: tl.constexpr):
    """[TOKENS * CHUNK, columns] from [TOKENS, columns]."""
    x = tl.broadcast_to(x[:, None, :], (TOKENS, CHUNK, x.shape[1]))
    return tl.reshape(x, (TOKENS * CHUNK, x.shape[2]))


@jit
def _products(x1, x2, y1, y2):
    """Scalar products [rows of x, rows of y]."""
    return tl.dot(x2, tl.trans(y2), tl.dot(x1, tl.trans(y1), input_precision="ieee"), input_precision="ieee")


@jit
def _scores(q1, q2, n, i, query_valid, k1, k2, u, j, key_valid, documents, scale, window, P: tl.constexpr):
    """Scaled scores of virtual queries (n, i) and keys (u, j), minus infinity where the key is hidden."""
    query, key = n * P + i, u * P + j
    visible = (key[None, :] <= query[:, None]) & (key[None, :] > query[:, None] - window * P)
    visible &= query_valid[:, None] & key_valid[None, :]
    if documents is not None:
        query_document = tl.load(documents + n, mask=query_valid, other=0)
        visible &= query_document[:, None] == tl.load(documents + u, mask=key_valid, other=0)[None, :]
    return tl.where(visible, _products(q1, q2, k1, k2) * scale, float("-inf"))


@jit
def _weights_and_pull(
    q1, q2, n, i, query_valid, row_lse, g1, g2, k, v, alpha_k, alpha_v, cos, sin, documents, scale, window, key, other,
    N, G: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Weights of a tile of queries on the keys of the tile (key, other), the pull d_out[n] . v~ on them, and those
    keys."""
    u, j, key_valid = _tile(key, other, N, P, CHUNK, KEYS)
    k1, k2 = _virtual(k, alpha_k, cos, sin, key, other, N, G, P, CHUNK, HALF, COLUMNS, KEYS)
    v1, v2 = _virtual(v, alpha_v, None, None, key, other, N, G, P, CHUNK, HALF, COLUMNS, KEYS)
    scores = _scores(q1, q2, n, i, query_valid, k1, k2, u, j, key_valid, documents, scale, window, P)
    weights = tl.exp(scores - row_lse[:, None])
    return weights, _token_repeat(_products(g1, g2, v1, v2), CHUNK, QUERIES), k1, k2


@jit
def _mix_rotate_forward(
    states, alpha, cos, sin, out, N,
    M: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * TOKENS
    batch, h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    states += batch * M * N * 2 * HALF
    out += batch * N * P * M * 2 * HALF
    for first in range(0, P, CHUNK):
        token, pseudo, valid = _tile(start, first, N, P, CHUNK, TOKENS)
        x1, x2 = _virtual(states, alpha + h * P, cos, sin, start, first, N, M, P, CHUNK, HALF, COLUMNS, TOKENS)
        _store(out, x1, x2, (token * P + pseudo) * M + h, valid, HALF, COLUMNS)


@jit
def _mix_rotate_backward(
    states, alpha, cos, sin, d_out, d_states, d_alpha, N,
    M: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * TOKENS
    batch, h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    base = batch * M * N * 2 * HALF
    for first in range(0, P, CHUNK):
        token, pseudo, valid = _tile(start, first, N, P, CHUNK, TOKENS)
        d1, d2 = _load(d_out + base * P, (token * P + pseudo) * M + h, valid, HALF, COLUMNS)
        _virtual_backward(
            d1.to(tl.float32), d2.to(tl.float32), states + base, alpha + h * P, cos, sin, d_states + base,
            d_alpha + h * P, start, first, N, M, P, CHUNK, HALF, COLUMNS, TOKENS,
        )  # fmt: skip


@jit
def _of_program(q, k, v, N, H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr):
    """Row of the batch, head and group that a program of the attention kernels is about, and q, k and v from that row
    on."""
    batch, h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row = batch * N * 2 * HALF
    return batch, h, h // (H // G), q + row * H, k + row * G, v + row * G


@jit
def _attention_forward(
    q, k, v, alpha_q, alpha_k, alpha_v, collapse, cos, sin, documents, out, lse, scale, window, N,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr,
    COLUMNS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * QUERIES
    batch, h, g, q, k, v = _of_program(q, k, v, N, H, G, HALF)
    if documents is not None:
        documents += batch * N

    out1 = tl.zeros([QUERIES, COLUMNS], tl.float32)
    out2 = tl.zeros([QUERIES, COLUMNS], tl.float32)
    for first in range(0, P, CHUNK):
        n, i, query_valid = _tile(start, first, N, P, CHUNK, QUERIES)
        q1, q2 = _virtual(q, alpha_q + h * P, cos, sin, start, first, N, H, P, CHUNK, HALF, COLUMNS, QUERIES)
        # Finite, so that a row that has seen no key yet weighs it 0 and not NaN.
        peak = tl.full([QUERIES * CHUNK], -1e30, tl.float32)
        total = tl.zeros([QUERIES * CHUNK], tl.float32)
        o1 = tl.zeros([QUERIES * CHUNK, COLUMNS], tl.float32)
        o2 = tl.zeros([QUERIES * CHUNK, COLUMNS], tl.float32)
        for key in range(tl.maximum(start - window, 0), tl.minimum(start + QUERIES, N), KEYS):
            for other in range(0, P, CHUNK):
                u, j, key_valid = _tile(key, other, N, P, CHUNK, KEYS)
                k1, k2 = _virtual(k, alpha_k + g * P, cos, sin, key, other, N, G, P, CHUNK, HALF, COLUMNS, KEYS)
                scores = _scores(q1, q2, n, i, query_valid, k1, k2, u, j, key_valid, documents, scale, window, P)
                new_peak = tl.maximum(peak, tl.max(scores, axis=1))
                weights = tl.exp(scores - new_peak[:, None])
                decay = tl.exp(peak - new_peak)
                total = total * decay + tl.sum(weights, axis=1)
                v1, v2 = _virtual(v, alpha_v + g * P, None, None, key, other, N, G, P, CHUNK, HALF, COLUMNS, KEYS)
                weights = weights.to(v1.dtype)
                o1 = tl.dot(weights, v1, o1 * decay[:, None], input_precision="ieee")
                o2 = tl.dot(weights, v2, o2 * decay[:, None], input_precision="ieee")
                peak = new_peak

        total = tl.where(query_valid, total, 1.0)
        share = tl.load(collapse + h * P + i, mask=query_valid, other=0.0).to(tl.float32) / total
        out1 += _token_sum(o1 * share[:, None], CHUNK, QUERIES)
        out2 += _token_sum(o2 * share[:, None], CHUNK, QUERIES)
        tl.store(lse + (batch * H + h) * N * P + n * P + i, peak + tl.log(total), mask=query_valid)
    n_out = start + tl.arange(0, QUERIES)
    _store(out + batch * N * H * 2 * HALF, out1, out2, n_out * H + h, n_out < N, HALF, COLUMNS)


@jit
def _attention_backward_queries(
    q, k, v, alpha_q, alpha_k, alpha_v, collapse, cos, sin, documents, d_out, lse, mean_pull, d_q, d_alpha_q,
    scale, window, N,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr,
    COLUMNS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of q and alpha_q, and mean_pull[n, i] = sum_(u, j) weights * pull = d_out[n] . O_i[n], which the
    softmax's gradient subtracts and whose sum over n is the gradient of R[h, i]. The gradient of a weight is R[h, i]
    times the pull d_out[n] . v~ on it, which is one product for all i."""
    start = tl.program_id(0) * QUERIES
    batch, h, g, q, k, v = _of_program(q, k, v, N, H, G, HALF)
    if documents is not None:
        documents += batch * N
    dtype: tl.constexpr = q.dtype.element_ty

    n_out = start + tl.arange(0, QUERIES)
    g1, g2 = _load(d_out + batch * N * H * 2 * HALF, n_out * H + h, n_out < N, HALF, COLUMNS)
    earliest, last = tl.maximum(start - window, 0), tl.minimum(start + QUERIES, N)
    for first in range(0, P, CHUNK):
        n, i, query_valid = _tile(start, first, N, P, CHUNK, QUERIES)
        q1, q2 = _virtual(q, alpha_q + h * P, cos, sin, start, first, N, H, P, CHUNK, HALF, COLUMNS, QUERIES)
        row = (batch * H + h) * N * P + n * P + i
        row_lse = tl.load(lse + row, mask=query_valid, other=0.0)
        mean = tl.zeros([QUERIES * CHUNK], tl.float32)
        for key in range(earliest, last, KEYS):
            for other in range(0, P, CHUNK):
                weights, pull, k1, k2 = _weights_and_pull(
                    q1, q2, n, i, query_valid, row_lse, g1, g2, k, v, alpha_k + g * P, alpha_v + g * P, cos, sin,
                    documents, scale, window, key, other, N, G, P, CHUNK, HALF, COLUMNS, QUERIES, KEYS,
                )  # fmt: skip
                mean += tl.sum(weights * pull, axis=1)
        tl.store(mean_pull + row, mean, mask=query_valid)

        share = tl.load(collapse + h * P + i, mask=query_valid, other=0.0).to(tl.float32) * scale
        d1 = tl.zeros([QUERIES * CHUNK, COLUMNS], tl.float32)
        d2 = tl.zeros([QUERIES * CHUNK, COLUMNS], tl.float32)
        for key in range(earliest, last, KEYS):
            for other in range(0, P, CHUNK):
                weights, pull, k1, k2 = _weights_and_pull(
                    q1, q2, n, i, query_valid, row_lse, g1, g2, k, v, alpha_k + g * P, alpha_v + g * P, cos, sin,
                    documents, scale, window, key, other, N, G, P, CHUNK, HALF, COLUMNS, QUERIES, KEYS,
                )  # fmt: skip
                d_scores = (weights * (pull - mean[:, None]) * share[:, None]).to(dtype)
                d1 = tl.dot(d_scores, k1, d1, input_precision="ieee")
                d2 = tl.dot(d_scores, k2, d2, input_precision="ieee")
        _virtual_backward(
            d1, d2, q, alpha_q + h * P, cos, sin, d_q + batch * H * N * 2 * HALF, d_alpha_q + h * P,
            start, first, N, H, P, CHUNK, HALF, COLUMNS, QUERIES,
        )  # fmt: skip


@jit
def _attention_backward_keys(
    q, k, v, alpha_q, alpha_k, alpha_v, collapse, cos, sin, documents, d_out, lse, mean_pull, d_k, d_v,
    d_alpha_k, d_alpha_v, scale, window, N,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr,
    COLUMNS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What head h gives the gradients of k, v, alpha_k and alpha_v; v~ sees the collapsed weights, one row a token."""
    start = tl.program_id(0) * KEYS
    batch, h, g, q, k, v = _of_program(q, k, v, N, H, G, HALF)
    if documents is not None:
        documents += batch * N
    dtype: tl.constexpr = q.dtype.element_ty

    base = batch * G * N * 2 * HALF
    for other in range(0, P, CHUNK):
        u, j, key_valid = _tile(start, other, N, P, CHUNK, KEYS)
        k1, k2 = _virtual(k, alpha_k + g * P, cos, sin, start, other, N, G, P, CHUNK, HALF, COLUMNS, KEYS)
        v1, v2 = _virtual(v, alpha_v + g * P, None, None, start, other, N, G, P, CHUNK, HALF, COLUMNS, KEYS)
        d_k1 = tl.zeros([KEYS * CHUNK, COLUMNS], tl.float32)
        d_k2 = tl.zeros([KEYS * CHUNK, COLUMNS], tl.float32)
        d_v1 = tl.zeros([KEYS * CHUNK, COLUMNS], tl.float32)
        d_v2 = tl.zeros([KEYS * CHUNK, COLUMNS], tl.float32)
        for query in range(start, tl.minimum(start + KEYS + window, N), QUERIES):
            n_out = query + tl.arange(0, QUERIES)
            g1, g2 = _load(d_out + batch * N * H * 2 * HALF, n_out * H + h, n_out < N, HALF, COLUMNS)
            for first in range(0, P, CHUNK):
                n, i, query_valid = _tile(query, first, N, P, CHUNK, QUERIES)
                q1, q2 = _virtual(q, alpha_q + h * P, cos, sin, query, first, N, H, P, CHUNK, HALF, COLUMNS, QUERIES)
                scores = _scores(q1, q2, n, i, query_valid, k1, k2, u, j, key_valid, documents, scale, window, P)
                row = (batch * H + h) * N * P + n * P + i
                weights = tl.exp(scores - tl.load(lse + row, mask=query_valid, other=0.0)[:, None])
                weights *= tl.load(collapse + h * P + i, mask=query_valid, other=0.0).to(tl.float32)[:, None]

                collapsed = tl.trans(_token_sum(weights, CHUNK, QUERIES).to(dtype))
                d_v1 = tl.dot(collapsed, g1, d_v1, input_precision="ieee")
                d_v2 = tl.dot(collapsed, g2, d_v2, input_precision="ieee")

                pull = _token_repeat(_products(g1, g2, v1, v2), CHUNK, QUERIES)
                mean = tl.load(mean_pull + row, mask=query_valid, other=0.0)
                d_scores = tl.trans((weights * (pull - mean[:, None]) * scale).to(dtype))
                d_k1 = tl.dot(d_scores, q1, d_k1, input_precision="ieee")
                d_k2 = tl.dot(d_scores, q2, d_k2, input_precision="ieee")
        _virtual_backward(
            d_k1, d_k2, k, alpha_k + g * P, cos, sin, d_k + base, d_alpha_k + g * P,
            start, other, N, G, P, CHUNK, HALF, COLUMNS, KEYS,
        )  # fmt: skip
        _virtual_backward(
            d_v1, d_v2, v, alpha_v + g * P, None, None, d_v + base, d_alpha_v + g * P,
            start, other, N, G, P, CHUNK, HALF, COLUMNS, KEYS,
        )  # fmt: skip


def _check(states: dict[str, torch.Tensor], shapes: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]]) -> None:
    """Raises an ImportError without Triton, and a ValueError for tensors that the kernels cannot read."""
    if triton is None:
        raise ImportError("The Triton kernels need Triton: `pip install triton`.")
    name, first = next(iter(states.items()))
    if first.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"The Triton kernels run on a GPU, and {name} is on the CPU: move the tensors to a GPU. (For tests, "
            f"TRITON_INTERPRET=1 in the environment before Triton is imported runs the kernels on the CPU.)"
        )
    if first.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{name} must be float32, float16 or bfloat16, not {first.dtype}.")
    if first.dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        raise ValueError(
            "Triton's interpreter multiplies the bits of bfloat16 as integers: use float32 or float16 there."
        )
    for other, tensor in states.items():
        if tensor.dtype != first.dtype:
            raise ValueError(f"{other} must have the dtype of {name}, {first.dtype}, not {tensor.dtype}.")
    if first.shape[-1] % 2:
        raise ValueError(f"head_dim must be even, but {name} has {first.shape[-1]}.")
    for other, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{other} must have the shape {list(shape)}, not {list(tensor.shape)}.")


def _contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [tensor if tensor is None else tensor.contiguous() for tensor in tensors]


def columns(head_dim: int) -> int:
    """Columns of a tile of halves."""
    return max(MIN_SIDE, triton.next_power_of_2(head_dim // 2))


def chunk_of(num_pseudo_heads: int) -> int:
    """Pseudo-heads of a tile: as many as leave the fewest rows of the last chunk empty."""
    fitting = [chunk for chunk in (8, 4) if chunk < 2 * num_pseudo_heads]
    return min(fitting, key=lambda chunk: -num_pseudo_heads % chunk, default=num_pseudo_heads)


def tokens_of(tile: tuple[int, int], num_pseudo_heads: int) -> int:
    """Tokens of a tile that has at most so many rows and tokens, and rows enough for a side of a product."""
    (rows, tokens), chunk = tile, chunk_of(num_pseudo_heads)
    return max(min(rows // chunk, tokens), MIN_SIDE // chunk)


def _passing(states: torch.Tensor) -> tuple[int, int]:
    return PASSING_TILES[states.shape[-1] * states.itemsize > 128]


def _constants(states: torch.Tensor, num_pseudo_heads: int) -> dict[str, int]:
    """The constants that all kernels take, and the launch options."""
    head_dim = states.shape[-1]
    return {
        "P": num_pseudo_heads,
        "CHUNK": chunk_of(num_pseudo_heads),
        "HALF": head_dim // 2,
        "COLUMNS": columns(head_dim),
        "num_warps": 8,
        # Two steps of float32 heads fit no multiprocessor.
        "num_stages": 2 if states.itemsize == 2 else 1,
    }


class _MixRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, alpha, cos, sin):
        batch, heads, length, head_dim = states.shape
        ctx.save_for_backward(states, alpha, cos, sin)
        out = states.new_empty(batch, length, alpha.shape[-1], heads, head_dim)
        tokens = tokens_of(_passing(states), alpha.shape[-1])
        _mix_rotate_forward[triton.cdiv(length, tokens), heads, batch](
            states, alpha, cos, sin, out, length, M=heads, TOKENS=tokens, **_constants(states, alpha.shape[-1])
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        states, alpha, cos, sin = ctx.saved_tensors
        batch, heads, length, _ = states.shape
        d_states, d_alpha = (torch.zeros_like(x, dtype=torch.float32) for x in (states, alpha))
        tokens = tokens_of(_passing(states), alpha.shape[-1])
        _mix_rotate_backward[triton.cdiv(length, tokens), heads, batch](
            states, alpha, cos, sin, d_out.contiguous(), d_states, d_alpha, length, M=heads, TOKENS=tokens,
            **_constants(states, alpha.shape[-1]),
        )  # fmt: skip
        return d_states.to(states.dtype), d_alpha.to(alpha.dtype), None, None


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, alpha_q, alpha_k, alpha_v, collapse, cos, sin, documents, scale, window):
        batch, heads, length, head_dim = q.shape
        num_pseudo_heads = alpha_q.shape[-1]
        inputs = (q, k, v, alpha_q, alpha_k, alpha_v, collapse)
        out = q.new_empty(batch, length, heads, head_dim)
        lse = q.new_empty(batch, heads, length, num_pseudo_heads, dtype=torch.float32)
        ctx.scale, ctx.window = scale, window
        ctx.constants = {"H": heads, "G": k.shape[1], **_constants(q, num_pseudo_heads)}
        passing = tokens_of(_passing(q), num_pseudo_heads)
        ctx.by_queries = {"QUERIES": tokens_of(QUERY_TILE, num_pseudo_heads), "KEYS": passing}
        # One row a token is a factor of a product.
        ctx.by_keys = {"QUERIES": max(MIN_SIDE, passing), "KEYS": tokens_of(KEY_TILE, num_pseudo_heads)}
        _attention_forward[triton.cdiv(length, ctx.by_queries["QUERIES"]), heads, batch](
            *inputs, cos, sin, documents, out, lse, scale, window, length, **ctx.constants, **ctx.by_queries
        )
        ctx.save_for_backward(*inputs, cos, sin, documents, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        *inputs, cos, sin, documents, lse = ctx.saved_tensors
        q, k, v, alpha_q, alpha_k, alpha_v, collapse = inputs
        batch, heads, length, _ = q.shape
        d_q, d_k, d_v, d_alpha_q, d_alpha_k, d_alpha_v = (
            torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v, alpha_q, alpha_k, alpha_v)
        )
        mean_pull = torch.empty_like(lse)
        shared = (*inputs, cos, sin, documents, d_out.contiguous(), lse, mean_pull)
        geometry = (ctx.scale, ctx.window, length)
        _attention_backward_queries[triton.cdiv(length, ctx.by_queries["QUERIES"]), heads, batch](
            *shared, d_q, d_alpha_q, *geometry, **ctx.constants, **ctx.by_queries
        )
        _attention_backward_keys[triton.cdiv(length, ctx.by_keys["KEYS"]), heads, batch](
            *shared, d_k, d_v, d_alpha_k, d_alpha_v, *geometry, **ctx.constants, **ctx.by_keys
        )
        gradients = (d_q, d_k, d_v, d_alpha_q, d_alpha_k, d_alpha_v, mean_pull.sum(dim=(0, 2)))
        return *(gradient.to(x.dtype) for gradient, x in zip(gradients, inputs)), None, None, None, None, None


def checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_queries: int,
    weights: IHAWeights,
    window: int | None,
    document_ids: torch.Tensor | None,
) -> list:
    """What the kernels read: q, k, v, the mixing weights, the collapse, cos, sin and documents, contiguous, and the
    window. Raises an ImportError without Triton, and a ValueError for what the kernels cannot read."""
    alpha_q, alpha_k, alpha_v, collapse, rotation = weights
    cos, sin = rotation if rotation is not None else (None, None)
    documents = document_ids
    q, k = q.to(v.dtype), k.to(v.dtype)
    (batch, groups, length, head_dim), heads, virtual = v.shape, q.shape[1], alpha_q.shape[-1]
    if documents is not None and len(documents) == 1:
        documents = documents.expand(batch, -1)
    shapes = {
        "q": (q, (batch, heads, num_queries, head_dim)),
        "k": (k, (batch, groups, length, head_dim)),
        "alpha_q": (alpha_q, (heads, heads, virtual)),
        "alpha_k": (alpha_k, (groups, groups, virtual)),
        "alpha_v": (alpha_v, (groups, groups, virtual)),
        "collapse": (collapse, (heads, virtual)),
        "cos": (cos, (virtual, head_dim // 2)),
        "sin": (sin, (virtual, head_dim // 2)),
        "documents": (documents, (batch, length)),
    }
    _check({"q": q, "k": k, "v": v}, shapes)
    if heads % groups:
        raise ValueError(f"The heads of k and v must divide those of q, but there are {groups} and {heads}.")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, not {window}.")
    # A window of N tokens hides nothing.
    window = length if window is None else min(window, length)
    return [*_contiguous(q, k, v, alpha_q, alpha_k, alpha_v, collapse, cos, sin, documents), window]


def mix_rotate(
    states: torch.Tensor, alpha: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Virtual tokens [batch, N, P, M, head_dim] in one pass: out[n, p, h] = R_p sum_m alpha[m, h, p] states[m, n]
    (IHA, Algorithm 1, steps 2 and 3), rounded once to the dtype of the states. [batch, N * P, M, head_dim] is a
    view of it.

    The gradients are summed by atomic additions in float32: their last bits can differ between runs.

    Args:
        states: [batch, M, N, head_dim] in float32, float16 or bfloat16; head_dim is even.
        alpha: [M, M, P] in any floating dtype of Triton.
        rotation: cosine and sine of R_p, each [P, head_dim / 2], which get no gradients, or `None` for no rotation.

    Raises:
        ImportError: without Triton.
        ValueError: for another dtype or shape, a CPU tensor outside Triton's interpreter, or bfloat16 in it.
    """
    cos, sin = rotation if rotation is not None else (None, None)
    heads, head_dim = states.shape[1], states.shape[3]
    table = (alpha.shape[-1], head_dim // 2)
    shapes = {"alpha": (alpha, (heads, heads, alpha.shape[-1])), "cos": (cos, table), "sin": (sin, table)}
    _check({"states": states}, shapes)
    with torch.cuda.device_of(states):
        return _MixRotate.apply(*_contiguous(states, alpha, cos, sin))


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: IHAWeights,
    scaling: float,
    window: int | None = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Collapsed heads [batch, N, H, head_dim] of causal attention over the virtual tokens (IHA, Algorithm 1, steps 2
    to 5, per-head collapse), in the dtype of v. Virtual queries, keys and values are made from the base states tile by
    tile and never written; kept for the backward pass are the base states and float32 log-sum-exps [batch, H, N, P].

    With A = sum_i R[h, i] softmax_i the output is A v~: the backward pass forms d_out . v~ and A^T d_out once for all
    P pseudo-heads. The gradients are summed by atomic additions in float32: their last bits can differ between runs.

    Args:
        q: [batch, H, N, head_dim], rotated to n * P, or to n for shared positions; head_dim is even.
        k, v: [batch, G, N, head_dim], where G divides H. Head h reads group h // (H / G). The dtype of v, float32,
            float16 or bfloat16, is that of the tensor-core products: autocast leaves what was rotated in float32.
        weights: with the collapse [H, P], in any floating dtype of Triton; the rotation's tables get no gradients.
        scaling: factor of the scores.
        window: W in tokens, or `None`: virtual query v sees the virtual keys v - W * P < u <= v.
        document_ids: integers [batch or 1, N], equal where tokens may see each other (padding is one of them), or
            `None`.

    Raises:
        ImportError: without Triton.
        ValueError: for another dtype or shape, a window below 1, a CPU tensor outside Triton's interpreter, or
            bfloat16 in it.
    """
    *tensors, window = checked(q, k, v, v.shape[2], weights, window, document_ids)
    with torch.cuda.device_of(v):
        return _FusedAttention.apply(*tensors, scaling, window)
