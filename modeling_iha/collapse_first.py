"""Attention over the interleaved sequence that collapses the pseudo-heads before it multiplies the values.

The collapse is linear, so sum_p R[h, p] (softmax_p V) = (sum_p R[h, p] softmax_p) V: one product with the values instead of P. In units
of N^2 P^2 d multiply-adds the forward falls from 2 to 1 + 1/P. In the backward dA = dO V^T is the same for all pseudo-heads of a head
and dV = A^T dO is one product, which leaves 3 + 2/P of 5. It holds for the `"per_head"` collapse only.

Queries go in blocks and heads one by one, so that scores stay in the processor's cache and virtual tokens exist for one head at a time;
autograd keeps the base queries, keys and values, as for multi-head attention, and the backward recomputes the rest.
"""

import itertools
import math

import torch
from torch.autograd.function import once_differentiable


# The scores of a block: they are read and written five times, so they should stay in a core's cache.
BLOCK_BYTES = 4 * 2**20
MIN_BLOCK, MAX_BLOCK = 4, 32
# Tokens that are expanded into pseudo-heads at a time.
EXPANDED = 512
# Virtual keys whose gradients the backward holds at a time: all of a short sequence, which spares a pass, else segments.
WHOLE, SEGMENT = 8192, 1024
LN2 = math.log(2)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """States [..., head_dim] turned by tables that broadcast to [..., head_dim / 2], in RoPE's half-split form."""
    x1, x2 = states.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def _rotate_into(
    states: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor
) -> torch.Tensor:
    """As `rotate`, without a temporary and without gradients: R_p states into `out`, both [P, n, head_dim]; `rotation` is (cos, sin)
    [P, 1, head_dim / 2]."""
    if rotation is None:
        return out.copy_(states)
    cos, sin = rotation
    (x1, x2), (y1, y2) = states.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
    return out


def _expand(
    base: torch.Tensor, alpha: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor
) -> None:
    """The pseudo-heads of one head, [P, n, head_dim] into `out`, from base states [M, n, head_dim] and its alpha [M, P]."""
    for base, out in zip(base.split(EXPANDED, dim=1), out.split(EXPANDED, dim=1)):
        _rotate_into(torch.mm(alpha.t(), base.flatten(1)).view(out.shape), rotation, out)


class _Layer:
    """Shapes, masks and blocks that the forward and the backward of a call share."""

    def __init__(self, query, key, collapse, rotation, documents, window, scaling):
        self.batch, self.heads, self.num_queries, self.head_dim = query.shape
        self.groups, self.num_keys = key.shape[1:3]
        self.virtual = collapse.shape[1]
        self.offset = self.num_keys - self.num_queries
        self.rotation, self.window, self.scaling = rotation, window, scaling
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        # One for each row of the batch, `None` where all tokens may see each other.
        self.documents = [None] * self.batch
        if documents is not None:
            rows = documents.expand(self.batch, -1)
            self.documents = [None if (row == row[0]).all() else row for row in rows]
        self.bands = {}

    def buffers(self, count: int, num_keys: int) -> tuple[torch.Tensor, ...]:
        """So many buffers for the scores of a block against so many keys, which together fit in BLOCK_BYTES, and with them the size of
        the blocks."""
        span = num_keys if self.window is None else min(num_keys, self.window)
        entries = BLOCK_BYTES // (self.dtype.itemsize * count)
        self.block = max(MIN_BLOCK, min(MAX_BLOCK, entries // (span * self.virtual**2)))
        span = num_keys if self.window is None else min(num_keys, self.window + self.block)
        return torch.empty(count, self.block * span * self.virtual**2, dtype=self.dtype).unbind()

    def blocks(self, first: int, last: int) -> list[tuple]:
        """Of each block of queries its tokens, those of the keys from `first` to `last` that any of them sees, and the bands to add to
        the scores, with their columns."""
        blocks = []
        for start in range(max(0, first - self.offset), self.num_queries, self.block):
            stop = min(start + self.block, self.num_queries)
            position, end = start + self.offset, stop + self.offset
            begin = 0 if self.window is None else position - self.window
            rows, columns = slice(start, stop), slice(max(first, begin), min(last, end))
            bands = []
            # Only the tokens of the block itself may lie ahead of a query, and only as many at the other end behind its window.
            if (ahead := columns.stop - max(position, columns.start)) > 0:
                band = self.band(stop - start, columns.stop - ahead - position, columns.stop - position)
                bands.append((slice(-ahead * self.virtual, None), band))
            if self.window is not None and (behind := end - self.window - columns.start) > 0:
                band = self.band(stop - start, columns.start - position, columns.start - position + behind)
                bands.append((slice(behind * self.virtual), band))
            blocks.append((rows, columns, bands))
        return blocks

    def band(self, rows: int, first: int, last: int) -> torch.Tensor:
        """0 or -inf, [P * rows, (last - first) * P]: causality and window between `rows` queries and the keys from token `first` to
        `last`, counted from the first query."""
        if (rows, first, last) not in self.bands:
            v = (torch.arange(rows) * self.virtual + torch.arange(self.virtual)[:, None]).view(-1, 1)
            u = torch.arange(first * self.virtual, last * self.virtual)
            visible = u <= v
            if self.window is not None:
                visible &= u > v - self.window * self.virtual
            self.bands[rows, first, last] = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(
                ~visible, -torch.inf
            )
        return self.bands[rows, first, last]

    def scores(self, query, keys, b, rows, columns, bands, buffer) -> torch.Tensor:
        """Scores [P * rows, columns * P] of queries [P * rows, head_dim] and keys [columns * P, head_dim], masked, in `buffer`."""
        scores = buffer[: len(query) * len(keys)].view(len(query), -1)
        # In parts, or the product's own copy of the keys would be as large as all of them.
        for first in range(0, len(keys), WHOLE):
            part = slice(first, first + WHOLE)
            torch.mm(query, keys[part].t(), out=scores[:, part])
        for part, band in bands:
            scores[:, part] += band
        if (documents := self.documents[b]) is not None:
            apart = documents[rows.start + self.offset : rows.stop + self.offset, None] != documents[columns]
            by_token = scores.view(self.virtual, *apart.shape, self.virtual)
            by_token.masked_fill_(apart[..., None], -torch.inf)
        return scores


class _CollapseFirst(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, query, key, value, q_mix, k_mix, v_mix, collapse, layer):
        virtual, dtype, head_dim = layer.virtual, layer.dtype, layer.head_dim
        output = torch.empty(layer.batch, layer.num_queries, layer.heads, head_dim, dtype=dtype)
        log_sums = torch.empty(layer.batch, layer.heads, virtual, layer.num_queries, dtype=dtype)
        queries = torch.empty(virtual, layer.num_queries, head_dim, dtype=dtype)
        keys, values = torch.empty(2, layer.num_keys * virtual, head_dim, dtype=dtype).unbind()
        (buffer,) = layer.buffers(1, layer.num_keys)
        blocks = layer.blocks(0, layer.num_keys)
        for b in range(layer.batch):
            q, k, v = query[b].to(dtype), key[b].to(dtype), value[b].to(dtype)
            for h in range(layer.heads):
                g, place_in_group = divmod(h, layer.heads // layer.groups)
                if place_in_group == 0:
                    _expand(k, k_mix[:, g], layer.rotation, keys.view(-1, virtual, head_dim).transpose(0, 1))
                    _expand(v, v_mix[:, g], None, values.view(-1, virtual, head_dim).transpose(0, 1))
                _expand(q, q_mix[:, h] * layer.scaling, layer.rotation, queries)
                for rows, columns, bands in blocks:
                    block = queries[:, rows].reshape(-1, head_dim)
                    inside = slice(columns.start * virtual, columns.stop * virtual)
                    scores = layer.scores(block, keys[inside], b, rows, columns, bands, buffer)
                    if layer.training:
                        log_sums[b, h, :, rows] = scores.amax(dim=-1).view(virtual, -1)
                    weights = torch.softmax(scores, dim=-1, out=scores)
                    if layer.training:
                        log_sums[b, h, :, rows] -= weights.amax(dim=-1).log_().view(virtual, -1)
                    collapsed = torch.mm(collapse[h : h + 1], weights.view(virtual, -1))
                    torch.mm(collapsed.view(-1, weights.shape[1]), values[inside], out=output[b, rows, h])
        ctx.save_for_backward(query, key, value, q_mix, k_mix, v_mix, collapse, log_sums)
        ctx.layer = layer
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad_output):
        query, key, value, q_mix, k_mix, v_mix, collapse, log_sums = ctx.saved_tensors
        layer = ctx.layer
        virtual, dtype, head_dim = layer.virtual, layer.dtype, layer.head_dim
        grad_query, grad_key, grad_value = (torch.zeros_like(states, dtype=dtype) for states in (query, key, value))
        grad_q_mix, grad_k_mix, grad_v_mix, grad_collapse = (
            torch.zeros_like(w) for w in (q_mix, k_mix, v_mix, collapse)
        )
        inverse = None if layer.rotation is None else (layer.rotation[0], -layer.rotation[1])

        # Keys go in segments, so that their gradients stay in the cache too. A window keeps them together by itself.
        whole = layer.window is not None or layer.num_keys * virtual <= WHOLE
        length = layer.num_keys if whole else max(1, SEGMENT // virtual)
        segments = [slice(first, min(first + length, layer.num_keys)) for first in range(0, layer.num_keys, length)]
        buffer, grad_buffer = layer.buffers(2, segments[0].stop)
        queries = torch.empty(virtual * layer.block * head_dim, dtype=dtype)
        keys, values, grad_keys, grad_values = torch.empty(
            4, segments[0].stop * virtual, head_dim, dtype=dtype
        ).unbind()
        deltas = torch.zeros(layer.heads // layer.groups, virtual, layer.num_queries, dtype=dtype)

        def fold(grads, base, alpha, rotation, grad_base, grad_alpha):
            """Adds the gradients of a head's pseudo-heads [P, n, head_dim] to those of what they were expanded from."""
            grads = _rotate_into(grads, rotation, torch.empty(grads.shape, dtype=dtype)).flatten(1)
            grad_alpha.addmm_(base.flatten(1), grads.t())
            grad_base.flatten(1).addmm_(alpha, grads)

        def blocks(b, h, q, segment):
            """Of every block of queries that sees the segment: its rows, virtual columns in the segment, virtual queries, weights, gradient
            of the output and that of the collapsed weights."""
            for rows, columns, bands in layer.blocks(segment.start, segment.stop):
                n = rows.stop - rows.start
                block = queries[: virtual * n * head_dim].view(virtual, n, head_dim)
                _expand(q[:, rows], q_mix[:, h] * (layer.scaling / LN2), layer.rotation, block)
                inside = slice((columns.start - segment.start) * virtual, (columns.stop - segment.start) * virtual)
                weights = layer.scores(block.flatten(0, 1), keys[inside], b, rows, columns, bands, buffer)
                # Powers of two: of the exponentials, PyTorch's fast one.
                weights = weights.sub_(log_sums[b, h, :, rows].reshape(-1, 1) / LN2).exp2_().view(virtual, n, -1)
                grad_out = grad_output[b, rows, h].to(dtype)
                yield rows, inside, block, weights, grad_out, torch.mm(grad_out, values[inside].t())

        for b, g in itertools.product(range(layer.batch), range(layer.groups)):
            q, k, v = query[b].to(dtype), key[b].to(dtype), value[b].to(dtype)
            heads = range(g * len(deltas), (g + 1) * len(deltas))
            deltas.zero_()

            def expand(segment):
                n = segment.stop - segment.start
                for states, alpha, rotation, out in ((k, k_mix, layer.rotation, keys), (v, v_mix, None, values)):
                    _expand(
                        states[:, segment],
                        alpha[:, g],
                        rotation,
                        out[: n * virtual].view(n, virtual, -1).transpose(0, 1),
                    )

            def add_deltas(place, rows, weights, grad_collapsed):
                """What the softmax's backward subtracts: the sum over the keys of weight times gradient, here without R[h, p]."""
                deltas[place, :, rows] += (
                    torch.bmm(weights.transpose(0, 1), grad_collapsed.unsqueeze(-1)).squeeze(-1).t()
                )

            if len(segments) > 1:
                for segment in segments:
                    expand(segment)
                    for place, h in enumerate(heads):
                        for rows, _, _, weights, _, grad_collapsed in blocks(b, h, q, segment):
                            add_deltas(place, rows, weights, grad_collapsed)
            for segment in segments:
                expand(segment)
                grad_keys.zero_(), grad_values.zero_()
                for place, h in enumerate(heads):
                    for rows, inside, block, weights, grad_out, grad_collapsed in blocks(b, h, q, segment):
                        if len(segments) == 1:
                            add_deltas(place, rows, weights, grad_collapsed)
                        collapsed = torch.mm(collapse[h : h + 1], weights.flatten(1)).view(grad_collapsed.shape)
                        grad_values[inside].addmm_(collapsed.t(), grad_out)
                        # Without the factor R[h, p], which the smaller queries take.
                        grad_scores = grad_buffer[: weights.numel()].view(weights.shape)
                        torch.sub(grad_collapsed, deltas[place, :, rows, None], out=grad_scores).mul_(weights)
                        grad_scores = grad_scores.flatten(0, 1)
                        factor = collapse[h, :, None, None]
                        grad_block = torch.mm(grad_scores, keys[inside]).view(block.shape).mul_(factor * layer.scaling)
                        fold(grad_block, q[:, rows], q_mix[:, h], inverse, grad_query[b][:, rows], grad_q_mix[:, h])
                        grad_keys[inside].addmm_(grad_scores.t(), block.mul_(factor * LN2).flatten(0, 1))
                n = segment.stop - segment.start
                by_pseudo_head = grad_keys[: n * virtual].view(n, virtual, -1).transpose(0, 1)
                fold(by_pseudo_head, k[:, segment], k_mix[:, g], inverse, grad_key[b][:, segment], grad_k_mix[:, g])
                by_pseudo_head = grad_values[: n * virtual].view(n, virtual, -1).transpose(0, 1)
                fold(by_pseudo_head, v[:, segment], v_mix[:, g], None, grad_value[b][:, segment], grad_v_mix[:, g])
            grad_collapse[heads.start : heads.stop] += deltas.sum(dim=-1)

        grads = (grad.to(states.dtype) for grad, states in ((grad_query, query), (grad_key, key), (grad_value, value)))
        return *grads, grad_q_mix, grad_k_mix, grad_v_mix, grad_collapse, None


def collapse_first_attention(
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
    """Causal attention of an IHA layer from its base states (IHA, Algorithm 1, steps 2 to 5), the queries being the last tokens.

    Args:
        query: [batch, H, N, head_dim], contiguous, rotated to the position of pseudo-head 0.
        key, value: [batch, G, cached + N, head_dim], contiguous, keys rotated likewise.
        q_mix, k_mix, v_mix: alpha, [H, H, P] and twice [G, G, P].
        collapse: R, [H, P].
        rotation: (cos, sin) [P, head_dim / 2] of R_p, the rotation of pseudo-head p within its token; `None` for shared positions.
        scaling: factor of the scores.
        window: W in tokens: virtual query v sees the keys u with v - W * P < u <= v; `None` for all.
        documents: int [batch or 1, cached + N], equal where tokens may see each other; `None` if all may.

    Returns:
        [batch, N, H, head_dim] in the dtype of `query`; computed in float32 or, for float64, float64.
    """
    # Autocast would round the scores, which SDPA keeps in float32.
    with torch.autocast(query.device.type, enabled=False):
        dtype = torch.promote_types(query.dtype, torch.float32)
        q_mix, k_mix, v_mix, collapse = (w.to(dtype) for w in (q_mix, k_mix, v_mix, collapse))
        if rotation is not None:
            rotation = tuple(table.to(dtype).unsqueeze(1) for table in rotation)
        layer = _Layer(query, key, collapse, rotation, documents, window, scaling)
        # Inside the function gradients are off, and what it is told of its inputs is the same under `no_grad`.
        inputs = (query, key, value, q_mix, k_mix, v_mix, collapse)
        layer.training = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        return _CollapseFirst.apply(*inputs, layer)
