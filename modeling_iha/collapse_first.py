# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over the interleaved sequence that collapses the pseudo-heads before it multiplies the values.

For one head h with virtual queries q_p, virtual keys K and virtual values V, masked as the interleaved sequence asks:

    S_p = scaling * q_p K^T          the scores of pseudo-head p, [N, N * P]
    A_p = softmax(S_p)
    O   = sum_p R[h, p] A_p V = C V  with C = sum_p R[h, p] A_p, because the collapse is linear

One product with the values remains instead of P. In units of N^2 P^2 d multiply-adds, the forward falls from 2 to
1 + 1/P. The backward recomputes A_p from the log-sum-exp of each row of S_p, and dC is the same for all pseudo-heads:

    dV      = C^T dO
    dC      = dO V^T
    delta_p = rowsum(A_p * dC)       and dR[h, p] = sum_n delta_p[n]
    dS_p    = R[h, p] A_p * (dC - delta_p)
    dq_p    = scaling * dS_p K       and dK = scaling * sum_p dS_p^T q_p

It takes 3 + 2/P units, a fused attention takes 5. All of this holds for the `"per_head"` collapse only.

Queries go in blocks, and as many heads at a time as there are threads: the scores of a block stay in each core's
cache, and virtual tokens exist for few heads at a time. Autograd keeps the base queries, keys and values, as for
multi-head attention.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable


# The scores of a block of one head are read and written five times, so they should stay in a core's cache.
BLOCK_BYTES = 4 * 2**20
MIN_BLOCK, MAX_BLOCK = 4, 64
# Tokens that are mixed at a time.
MIXED_TOKENS = 512
# The backward holds the gradients of this many virtual keys at a time: all of a short sequence, which spares a pass,
# or else a segment.
MAX_UNSEGMENTED_KEYS, SEGMENT_KEYS = 8192, 1024
LN2 = math.log(2)

Rotation = tuple[torch.Tensor, torch.Tensor] | None


class IHAWeights(NamedTuple):
    """What an "iha" layer does to its heads' queries, keys and values (IHA, Algorithm 1)."""

    q_mix: torch.Tensor  # alpha^Q, [H, H, P]
    k_mix: torch.Tensor  # alpha^K, [G, G, P]
    v_mix: torch.Tensor  # alpha^V, [G, G, P]
    collapse: torch.Tensor  # R, [H, P] or [H, H * P]
    # (cos, sin), each [P, head_dim / 2], of R_p, which rotates pseudo-head p within its token; `None` for shared
    # positions.
    rotation: Rotation


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """States [..., head_dim] turned by tables that broadcast to [..., head_dim / 2], in RoPE's half-split form."""
    x1, x2 = states.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def rotate_into(states: torch.Tensor, rotation: Rotation, out: torch.Tensor) -> torch.Tensor:
    """`rotate` without a temporary: `states` and `out` are [..., P, n, head_dim], the tables [P, 1, head_dim / 2]."""
    if rotation is None:
        return out.copy_(states)
    cos, sin = rotation
    (x1, x2), (y1, y2) = states.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
    return out


def mix_into(base: torch.Tensor, alpha: torch.Tensor, rotation: Rotation, out: torch.Tensor) -> torch.Tensor:
    """out[b, h, p, n] = R_p sum_m alpha[m, h, p] base[b, m, n].

    Args:
        base: [B, M, n, head_dim].
        alpha: [M, H, P].
        out: [B, H, P, n, head_dim], of any strides.
    """
    mixing = alpha.flatten(1).t()
    for base, part in zip(base.split(MIXED_TOKENS, dim=2), out.split(MIXED_TOKENS, dim=3)):
        rotate_into(torch.matmul(mixing, base.flatten(2)).view(part.shape), rotation, part)
    return out


def mix_backward(
    grads: torch.Tensor,
    base: torch.Tensor,
    alpha: torch.Tensor,
    rotation: Rotation,
    grad_base: torch.Tensor,
    grad_alpha: torch.Tensor,
) -> None:
    """Adds to `grad_base` and `grad_alpha` what the gradients [B, H, P, n, head_dim] of the output of `mix_into`
    give."""
    if rotation is not None:
        cos, sin = rotation
        grads = rotate_into(grads, (cos, -sin), torch.empty(grads.shape, dtype=grads.dtype))
    grads = grads.flatten(3).flatten(1, 2)  # [B, H * P, n * head_dim]
    grad_base += torch.matmul(alpha.flatten(1), grads).view(grad_base.shape)
    grad_alpha += torch.matmul(base.flatten(2), grads.transpose(1, 2)).sum(dim=0).view(grad_alpha.shape)


def share_lanes(batch: int, heads: int) -> tuple[int, int, float]:
    """How the threads share the lanes, heads of rows of the batch: (rows, heads) that are computed at a time, in as
    few rounds as possible, and the share of the threads' time that they fill."""
    threads = torch.get_num_threads()

    def rounds(rows: int) -> int:
        return math.ceil(batch / rows) * math.ceil(heads / min(heads, threads // rows))

    # Heads before rows: the heads of a row are mixed from the same states.
    rows = min(range(1, min(batch, threads) + 1), key=rounds)
    return rows, min(heads, threads // rows), batch * heads / (rounds(rows) * threads)


class Tile(NamedTuple):
    """A block of queries and those keys of a segment that any of them sees."""

    rows: slice  # tokens of the queries
    columns: slice  # tokens of the keys
    inside: slice  # virtual keys within the segment
    bands: list[tuple[slice, torch.Tensor]]  # virtual keys, and the 0 or -inf that is added to their scores


class Problem:
    """Shapes, masks and tiles, which the forward and the backward of a call share. A lane is one head of one row of
    the batch; each entry (rows of the batch, heads) of `lanes` is computed at a time."""

    def __init__(self, query, key, weights: IHAWeights, scaling, window, document_ids):
        batch, num_heads, self.num_queries, self.head_dim = query.shape
        self.num_keys, self.num_pseudo_heads = key.shape[2], weights.collapse.shape[1]
        self.offset = self.num_keys - self.num_queries
        self.rotation, self.scaling, self.window = weights.rotation, scaling, window
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.document_ids = None if document_ids is None else document_ids.expand(batch, -1)
        self.known_bands = {}
        rows, heads, _ = share_lanes(batch, num_heads)
        starts = itertools.product(range(0, batch, rows), range(0, num_heads, heads))
        self.lanes = [(slice(b, b + rows), slice(h, h + heads)) for b, h in starts]
        self.lanes_at_a_time = rows * heads

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def set_block(self, num_buffers: int, num_keys: int) -> torch.Tensor:
        """Sets the number of queries to a block, so that the scores of a lane fit into BLOCK_BYTES with `num_buffers`
        of them; returns the buffers, [num_buffers, entries]."""
        reach = num_keys if self.window is None else min(num_keys, self.window)
        entries = BLOCK_BYTES // (self.dtype.itemsize * num_buffers)
        self.block = max(MIN_BLOCK, min(MAX_BLOCK, entries // (reach * self.num_pseudo_heads**2)))
        span = num_keys if self.window is None else min(num_keys, self.window + self.block)
        return self.empty(num_buffers, self.lanes_at_a_time * self.block * span * self.num_pseudo_heads**2)

    def tiles(self, segment: slice) -> Iterator[Tile]:
        """Yields the tile of each block of queries that sees any token of a segment of the keys."""
        pseudo = self.num_pseudo_heads
        for start in range(max(0, segment.start - self.offset), self.num_queries, self.block):
            rows = slice(start, min(start + self.block, self.num_queries))
            first, last = rows.start + self.offset, rows.stop + self.offset  # positions among the keys
            begin = 0 if self.window is None else first - self.window
            columns = slice(max(segment.start, begin), min(segment.stop, last))
            inside = slice((columns.start - segment.start) * pseudo, (columns.stop - segment.start) * pseudo)
            bands = []
            # Only keys of the block itself may lie ahead of a query, and only as many may lie behind its window.
            if (ahead := columns.stop - max(first, columns.start)) > 0:
                band = self.band(rows, columns.stop - ahead - first, columns.stop - first)
                bands.append((slice(-ahead * pseudo, None), band))
            if self.window is not None and (behind := last - self.window - columns.start) > 0:
                band = self.band(rows, columns.start - first, columns.start - first + behind)
                bands.append((slice(behind * pseudo), band))
            yield Tile(rows, columns, inside, bands)

    def band(self, rows: slice, first: int, last: int) -> torch.Tensor:
        """0 or -inf, [P * rows, (last - first) * P]: causality and window between the queries and the keys of the
        tokens from `first` to `last`, counted from the first query."""
        shape = (rows.stop - rows.start, first, last)
        if shape not in self.known_bands:
            pseudo = self.num_pseudo_heads
            v = (torch.arange(shape[0]) * pseudo + torch.arange(pseudo)[:, None]).view(-1, 1)
            u = torch.arange(first * pseudo, last * pseudo)
            visible = u <= v
            if self.window is not None:
                visible &= u > v - self.window * pseudo
            self.known_bands[shape] = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, -torch.inf)
        return self.known_bands[shape]

    def expand(self, states: torch.Tensor, alpha: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The virtual tokens of keys or values [B, G, n, head_dim], [lanes, n * P, head_dim]."""
        (rows, _, length, head_dim), (_, heads, pseudo) = states.shape, alpha.shape
        virtual = self.empty(rows, heads, length, pseudo, head_dim)
        mix_into(states, alpha, rotation, virtual.transpose(2, 3))
        return virtual.view(rows * heads, length * pseudo, head_dim)

    def scores(self, queries, keys, batch_rows: slice, tile: Tile, buffer: torch.Tensor) -> torch.Tensor:
        """The masked scores [lanes, P * queries, keys * P] of a tile in `buffer`, from virtual queries [lanes, P *
        queries, head_dim] and the segment's virtual keys [lanes, n * P, head_dim]."""
        keys = keys[:, tile.inside]
        shape = (*queries.shape[:2], keys.shape[1])
        scores = torch.bmm(queries, keys.transpose(1, 2), out=buffer[: math.prod(shape)].view(shape))
        for part, band in tile.bands:
            scores[:, :, part] += band
        if self.document_ids is not None:
            ids = self.document_ids[batch_rows]
            query_ids = ids[:, tile.rows.start + self.offset : tile.rows.stop + self.offset]
            apart = query_ids[:, :, None] != ids[:, None, tile.columns]  # [B, queries, keys]
            by_token = scores.view(len(ids), -1, self.num_pseudo_heads, *apart.shape[1:], self.num_pseudo_heads)
            by_token.masked_fill_(apart[:, None, None, :, :, None], -torch.inf)
        return scores


class CollapseFirst(torch.autograd.Function):
    """The equations at the head of this file. `k_mix` and `v_mix` are [G, H, P], those of its group for every head."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, query, key, value, q_mix, k_mix, v_mix, collapse, problem, keep_log_sums):
        batch, num_heads, num_queries, head_dim = query.shape
        pseudo, whole = problem.num_pseudo_heads, slice(0, problem.num_keys)
        output = problem.empty(batch, num_queries, num_heads, head_dim)
        log_sums = problem.empty(batch, num_heads, pseudo, num_queries)
        (buffer,) = problem.set_block(1, problem.num_keys)
        for b, h in problem.lanes:
            q, k, v = (states[b].to(problem.dtype) for states in (query, key, value))
            shape = (len(q), q_mix[:, h].shape[1])
            queries = problem.empty(*shape, pseudo, num_queries, head_dim)
            mix_into(q, q_mix[:, h] * problem.scaling, problem.rotation, queries)
            keys = problem.expand(k, k_mix[:, h], problem.rotation)
            values = problem.expand(v, v_mix[:, h], None)
            lane_collapse = collapse[h].repeat(len(q), 1).unsqueeze(1)  # [lanes, 1, P]
            for tile in problem.tiles(whole):
                tile_queries = queries[:, :, :, tile.rows].reshape(len(keys), -1, head_dim)
                scores = problem.scores(tile_queries, keys, b, tile, buffer)
                if keep_log_sums:
                    row_max = scores.amax(dim=-1)
                weights = torch.softmax(scores, dim=-1, out=scores)
                if keep_log_sums:
                    # The largest weight of a row is 1 / sum(exp(scores - row_max)).
                    log_sum = row_max - weights.amax(dim=-1).log_()
                    log_sums[b, h, :, tile.rows] = log_sum.view(*shape, pseudo, -1)
                collapsed = torch.bmm(lane_collapse, weights.view(len(keys), pseudo, -1))
                attended = torch.bmm(collapsed.view(len(keys), -1, weights.shape[-1]), values[:, tile.inside])
                output[b, tile.rows, h] = attended.view(*shape, -1, head_dim).transpose(1, 2)
        ctx.save_for_backward(query, key, value, q_mix, k_mix, v_mix, collapse, log_sums)
        ctx.problem = problem
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad_output):
        saved, problem = ctx.saved_tensors, ctx.problem  # a checkpoint gives what was saved once
        query, key, value, q_mix, k_mix, v_mix, collapse, log_sums = saved
        pseudo, num_keys, head_dim = problem.num_pseudo_heads, problem.num_keys, problem.head_dim
        grads = [torch.zeros_like(tensor, dtype=problem.dtype) for tensor in saved]
        grad_query, grad_key, grad_value, grad_q_mix, grad_k_mix, grad_v_mix, grad_collapse, delta = grads

        # Keys go in segments, so that their gradients stay in the cache too. A window keeps them together by itself.
        whole = problem.window is not None or num_keys * pseudo <= MAX_UNSEGMENTED_KEYS
        length = num_keys if whole else max(1, SEGMENT_KEYS // pseudo)
        segments = [slice(first, min(first + length, num_keys)) for first in range(0, num_keys, length)]
        # (whether delta gets its sums, whether the gradients do, segment): delta needs whole rows.
        passes = [(True, False, segment) for segment in segments if len(segments) > 1]
        passes += [(len(segments) == 1, True, segment) for segment in segments]
        buffers = problem.set_block(2, length)

        for b, h in problem.lanes:
            q, k, v = (states[b].to(problem.dtype) for states in (query, key, value))
            shape = (len(q), q_mix[:, h].shape[1])
            lane_collapse = collapse[h].repeat(len(q), 1)  # [lanes, P]
            factor = lane_collapse.view(*shape, pseudo, 1, 1)
            lane_grads = grad_output[b, :, h].to(problem.dtype).transpose(1, 2).flatten(0, 1)  # [lanes, N, head_dim]
            for sums_delta, sums_gradients, segment in passes:
                segment_keys, segment_values = k[:, :, segment], v[:, :, segment]
                keys = problem.expand(segment_keys, k_mix[:, h], problem.rotation)
                values = problem.expand(segment_values, v_mix[:, h], None)
                grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
                for tile in problem.tiles(segment):
                    rows, inside = tile.rows, tile.inside
                    queries = problem.empty(*shape, pseudo, rows.stop - rows.start, head_dim)
                    # Powers of two: PyTorch's fast exponential.
                    mix_into(q[:, :, rows], q_mix[:, h] * (problem.scaling / LN2), problem.rotation, queries)
                    scores = problem.scores(queries.view(len(keys), -1, head_dim), keys, b, tile, buffers[0])
                    weights = scores.sub_(log_sums[b, h, :, rows].reshape(len(keys), -1, 1) / LN2).exp2_()
                    weights = weights.view(len(keys), pseudo, -1, scores.shape[-1])
                    grad_collapsed = torch.bmm(lane_grads[:, rows], values[:, inside].transpose(1, 2))
                    weighted = buffers[1][: weights.numel()].view(weights.shape)
                    torch.mul(weights, grad_collapsed.unsqueeze(1), out=weighted)
                    if sums_delta:
                        delta[b, h, :, rows] += weighted.sum(dim=-1).view(*shape, pseudo, -1)
                    if not sums_gradients:
                        continue
                    collapsed = torch.bmm(lane_collapse.unsqueeze(1), weights.flatten(2))
                    collapsed = collapsed.view(len(keys), -1, weights.shape[-1])
                    grad_values[:, inside].baddbmm_(collapsed.transpose(1, 2), lane_grads[:, rows])
                    # dS without its factor R[h, p], which multiplies the smaller queries.
                    tile_delta = delta[b, h, :, rows].reshape(*weights.shape[:3], 1)
                    grad_scores = weighted.addcmul_(weights, tile_delta, value=-1).flatten(1, 2)
                    grad_queries = torch.bmm(grad_scores, keys[:, inside]).view(queries.shape)
                    grad_queries.mul_(factor * problem.scaling)
                    of_query = (grad_query[b, :, rows], grad_q_mix[:, h])
                    mix_backward(grad_queries, q[:, :, rows], q_mix[:, h], problem.rotation, *of_query)
                    queries = queries.mul_(factor * LN2).view(len(keys), -1, head_dim)
                    grad_keys[:, inside].baddbmm_(grad_scores.transpose(1, 2), queries)
                if sums_gradients:
                    by_head = (*shape, -1, pseudo, head_dim)
                    grad_keys, grad_values = (x.view(by_head).transpose(2, 3) for x in (grad_keys, grad_values))
                    of_key = (grad_key[b, :, segment], grad_k_mix[:, h])
                    mix_backward(grad_keys, segment_keys, k_mix[:, h], problem.rotation, *of_key)
                    of_value = (grad_value[b, :, segment], grad_v_mix[:, h])
                    mix_backward(grad_values, segment_values, v_mix[:, h], None, *of_value)
        grad_collapse += delta.sum(dim=(0, 3))
        return *(grad.to(tensor.dtype) for grad, tensor in zip(grads[:7], saved)), None, None


def collapse_first_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: IHAWeights,
    scaling: float,
    window: int | None = None,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of an "iha" layer from its base states (IHA, Algorithm 1, steps 2 to 5), on a CPU.

    Args:
        query: [batch, H, N, head_dim] of the last N tokens, rotated to the position of pseudo-head 0.
        key, value: [batch, G, cached + N, head_dim], the keys rotated likewise.
        weights: with the collapse [H, P].
        scaling: factor of the scores.
        window: W in tokens: virtual query v sees the keys u with v - W * P < u <= v; `None` for all.
        document_ids: int [batch or 1, cached + N], equal where tokens may see each other; `None` if all may.

    Returns:
        [batch, N, H, head_dim] in the dtype of `query`; computed in float32 or, for float64, float64.
    """
    # Autocast would round the scores, which SDPA keeps in float32.
    with torch.autocast(query.device.type, enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        heads_per_group = query.shape[1] // key.shape[1]
        q_mix, k_mix, v_mix, collapse = (weight.to(dtype) for weight in weights[:4])
        k_mix, v_mix = (mix.repeat_interleave(heads_per_group, dim=1) for mix in (k_mix, v_mix))
        if weights.rotation is not None:
            weights = weights._replace(rotation=tuple(table.to(dtype).unsqueeze(1) for table in weights.rotation))
        if document_ids is not None and (document_ids == document_ids[:, :1]).all():
            document_ids = None
        problem = Problem(query, key, weights, scaling, window, document_ids)
        inputs = (query, key, value, q_mix, k_mix, v_mix, collapse)
        # Inside the function gradients are off, and what it is told of its inputs is the same under `no_grad`.
        keep_log_sums = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        return CollapseFirst.apply(*inputs, problem, keep_log_sums)
