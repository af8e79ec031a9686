"""Attention over the interleaved sequence that collapses the pseudo-heads before it multiplies the values.

The collapse is linear, so sum_p R[h, p] (softmax_p V) = (sum_p R[h, p] softmax_p) V: one product with the values instead of P. In units
of N^2 P^2 d multiply-adds the forward falls from 2 to 1 + 1/P. In the backward dA = dO V^T is the same for all pseudo-heads of a head
and dV = A^T dO is one product, which leaves 3 + 2/P of 5. It holds for the `"per_head"` collapse only.

Queries go in blocks and heads one by one, so that scores stay in the processor's cache and virtual tokens exist for one head at a time;
autograd keeps the base queries, keys and values, as for multi-head attention, and the backward recomputes the rest.
"""

import torch
from torch.autograd.function import once_differentiable
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import is_tracing

from .configuration_iha import IHAConfig


# The attention implementation of this file, which is SDPA wherever `collapses_first` says no, masks included.
AttentionInterface.register("collapse_first", sdpa_attention_forward)
AttentionMaskInterface.register("collapse_first", sdpa_mask)
SDPA_CORES = ("sdpa", "collapse_first")

# The scores of a block: they are read and written five times, so they should stay in a core's cache.
BLOCK_BYTES = 4 * 2**20
MIN_BLOCK, MAX_BLOCK = 4, 32


# The shortest virtual sequence for which it wins over SDPA.
MIN_KEYS = 512


def collapses_first(config: IHAConfig, states: torch.Tensor, num_keys: int) -> bool:
    """Whether an "iha" layer attends from its base states: under the attention implementation "collapse_first", where that is exact and,
    as far as measured, faster than SDPA on the virtual sequence. `states` are on the layer's device."""
    return (
        config._attn_implementation == "collapse_first"
        and config.pseudo_collapse == "per_head"
        and config.num_pseudo_heads > 1
        and config.attention_dropout == 0.0
        and num_keys * config.num_pseudo_heads >= MIN_KEYS
        and states.device.type == "cpu"
        and not is_tracing(states)
    )


def _rotate(
    states: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor
) -> torch.Tensor:
    """R_p states into `out`, both [P, n, head_dim]; `rotation` is (cos, sin) [P, 1, head_dim / 2]."""
    if rotation is None:
        return out.copy_(states)
    cos, sin = rotation
    (x1, x2), (y1, y2) = states.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
    return out


def _expand(
    base: torch.Tensor, alpha: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor
) -> torch.Tensor:
    """The pseudo-heads of one head, [P, n, head_dim] into `out`, from base states [M, n, head_dim] and its alpha [M, P]."""
    mixed = torch.mm(alpha.t(), base.flatten(1)).view(out.shape)
    return _rotate(mixed, rotation, out)


class _Layer:
    """Shapes, masks and blocks that the forward and the backward of a call share."""

    def __init__(self, query, key, collapse, rotation, documents, window, scaling):
        self.batch, self.heads, self.num_queries, self.head_dim = query.shape
        self.groups, self.num_keys = key.shape[1:3]
        self.virtual = collapse.shape[1]
        self.offset = self.num_keys - self.num_queries
        self.rotation, self.window, self.scaling = rotation, window, scaling
        # One for each row of the batch, `None` where all tokens may see each other.
        self.documents = [None] * self.batch
        if documents is not None:
            rows = documents.expand(self.batch, -1)
            self.documents = [None if (row == row[0]).all() else row for row in rows]
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.bands = {}

    def buffers(self, count: int) -> tuple[torch.Tensor, ...]:
        """So many buffers for the scores of a block, which together fit in BLOCK_BYTES, and with them the size of the blocks."""
        span = self.num_keys if self.window is None else min(self.num_keys, self.window)
        entries = BLOCK_BYTES // (self.dtype.itemsize * count)
        self.block = max(MIN_BLOCK, min(MAX_BLOCK, entries // (span * self.virtual**2)))
        span = self.num_keys if self.window is None else min(self.num_keys, self.window + self.block)
        return torch.empty(count, self.block * span * self.virtual**2, dtype=self.dtype).unbind()

    def blocks(self):
        """(rows, columns): tokens of each block of queries, and of the keys that any of them sees."""
        for start in range(0, self.num_queries, self.block):
            stop = min(start + self.block, self.num_queries)
            first = 0 if self.window is None else max(0, start + self.offset - self.window)
            yield slice(start, stop), slice(first, stop + self.offset)

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

    def weights(self, query, keys, b, rows, columns, buffer) -> torch.Tensor:
        """The softmax [P * rows, columns * P] of queries [P, rows, head_dim] over keys [columns * P, head_dim], in `buffer`."""
        num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
        scores = buffer[: num_rows * num_columns * self.virtual**2].view(num_rows * self.virtual, -1)
        torch.mm(query.reshape(-1, self.head_dim), keys.t(), out=scores)
        # Only the tokens of the block itself may lie ahead of a query, and only as many at the other end behind its window.
        scores[:, -num_rows * self.virtual :] += self.band(num_rows, 0, num_rows)
        if self.window is not None and (behind := rows.stop + self.offset - self.window - columns.start) > 0:
            first = columns.start - rows.start - self.offset
            scores[:, : behind * self.virtual] += self.band(num_rows, first, first + behind)
        if (documents := self.documents[b]) is not None:
            own = documents[rows.start + self.offset : rows.stop + self.offset]
            apart = own[:, None] != documents[columns]
            scores = scores.view(self.virtual, num_rows, num_columns, self.virtual)
            scores = scores.masked_fill_(apart[..., None], -torch.inf).view(num_rows * self.virtual, -1)
        return torch.softmax(scores, dim=-1, out=scores)


class _CollapseFirst(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, query, key, value, q_mix, k_mix, v_mix, collapse, layer):
        ctx.save_for_backward(query, key, value, q_mix, k_mix, v_mix, collapse)
        ctx.layer = layer
        virtual, dtype, head_dim = layer.virtual, layer.dtype, layer.head_dim
        output = torch.empty(layer.batch, layer.num_queries, layer.heads, head_dim, dtype=dtype)
        queries = torch.empty(virtual, layer.num_queries, head_dim, dtype=dtype)
        keys, values = torch.empty(2, layer.num_keys * virtual, head_dim, dtype=dtype).unbind()
        (buffer,) = layer.buffers(1)
        for b in range(layer.batch):
            q, k, v = query[b].to(dtype), key[b].to(dtype), value[b].to(dtype)
            for h in range(layer.heads):
                g, place_in_group = divmod(h, layer.heads // layer.groups)
                if place_in_group == 0:
                    _expand(k, k_mix[:, g], layer.rotation, keys.view(-1, virtual, head_dim).transpose(0, 1))
                    _expand(v, v_mix[:, g], None, values.view(-1, virtual, head_dim).transpose(0, 1))
                _expand(q, q_mix[:, h] * layer.scaling, layer.rotation, queries)
                for rows, columns in layer.blocks():
                    virtual_columns = slice(columns.start * virtual, columns.stop * virtual)
                    weights = layer.weights(queries[:, rows], keys[virtual_columns], b, rows, columns, buffer)
                    collapsed = torch.mm(collapse[h : h + 1], weights.view(virtual, -1)).view(-1, weights.shape[1])
                    torch.mm(collapsed, values[virtual_columns], out=output[b, rows, h])
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad_output):
        query, key, value, q_mix, k_mix, v_mix, collapse = ctx.saved_tensors
        layer = ctx.layer
        virtual, dtype, head_dim = layer.virtual, layer.dtype, layer.head_dim
        grad_query, grad_key, grad_value = (torch.zeros_like(states, dtype=dtype) for states in (query, key, value))
        grad_q_mix, grad_k_mix, grad_v_mix, grad_collapse = (
            torch.zeros_like(w) for w in (q_mix, k_mix, v_mix, collapse)
        )
        inverse = None if layer.rotation is None else (layer.rotation[0], -layer.rotation[1])
        keys, values, grad_keys, grad_values = torch.empty(4, layer.num_keys * virtual, head_dim, dtype=dtype).unbind()
        buffer, grad_buffer = layer.buffers(2)
        queries = torch.empty(virtual * layer.block * head_dim, dtype=dtype)

        def fold(grads, base, alpha, rotation, grad_base, grad_alpha):
            """Adds the gradients of a head's pseudo-heads [P, n, head_dim] to those of what they were expanded from."""
            grads = _rotate(grads, rotation, torch.empty(grads.shape, dtype=dtype)).flatten(1)
            grad_alpha.addmm_(base.flatten(1), grads.t())
            grad_base += torch.mm(alpha, grads).view(base.shape)

        for b in range(layer.batch):
            q, k, v = query[b].to(dtype), key[b].to(dtype), value[b].to(dtype)
            for h in range(layer.heads):
                g, place_in_group = divmod(h, layer.heads // layer.groups)
                if place_in_group == 0:
                    _expand(k, k_mix[:, g], layer.rotation, keys.view(-1, virtual, head_dim).transpose(0, 1))
                    _expand(v, v_mix[:, g], None, values.view(-1, virtual, head_dim).transpose(0, 1))
                    grad_keys.zero_(), grad_values.zero_()
                for rows, columns in layer.blocks():
                    n, virtual_columns = rows.stop - rows.start, slice(columns.start * virtual, columns.stop * virtual)
                    block = queries[: virtual * n * head_dim].view(virtual, n, -1)
                    block = _expand(q[:, rows], q_mix[:, h] * layer.scaling, layer.rotation, block)
                    weights = layer.weights(block, keys[virtual_columns], b, rows, columns, buffer)
                    collapsed = torch.mm(collapse[h : h + 1], weights.view(virtual, -1)).view(n, -1)
                    grad_out = grad_output[b, rows, h].to(dtype)
                    grad_values[virtual_columns].addmm_(collapsed.t(), grad_out)
                    grad_collapsed = torch.mm(grad_out, values[virtual_columns].t())
                    grad_collapse[h] += torch.mv(weights.view(virtual, -1), grad_collapsed.flatten())
                    # Without the factor R[h, p], which the smaller queries take.
                    grad_scores = grad_buffer[: weights.numel()].view(virtual, n, -1)
                    for p in range(virtual):
                        torch.ops.aten._softmax_backward_data.out(
                            grad_collapsed, weights.view(grad_scores.shape)[p], -1, dtype, grad_input=grad_scores[p]
                        )
                    grad_scores = grad_scores.view(weights.shape)
                    factor = collapse[h, :, None, None]
                    grad_block = torch.mm(grad_scores, keys[virtual_columns]).view(block.shape).mul_(factor)
                    grad_keys[virtual_columns].addmm_(grad_scores.t(), block.mul_(factor).view(-1, head_dim))
                    fold(
                        grad_block.mul_(layer.scaling),
                        q[:, rows],
                        q_mix[:, h],
                        inverse,
                        grad_query[b][:, rows],
                        grad_q_mix[:, h],
                    )
                if place_in_group == layer.heads // layer.groups - 1:
                    by_pseudo_head = grad_keys.view(-1, virtual, head_dim).transpose(0, 1)
                    fold(by_pseudo_head, k, k_mix[:, g], inverse, grad_key[b], grad_k_mix[:, g])
                    by_pseudo_head = grad_values.view(-1, virtual, head_dim).transpose(0, 1)
                    fold(by_pseudo_head, v, v_mix[:, g], None, grad_value[b], grad_v_mix[:, g])
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
    documents: torch.Tensor | None,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Causal attention of an IHA layer from its base states (IHA, Algorithm 1, steps 2 to 5), the queries being the last tokens.

    Args:
        query: [batch, H, N, head_dim], rotated to the position of pseudo-head 0.
        key, value: [batch, G, cached + N, head_dim], keys rotated likewise.
        q_mix, k_mix, v_mix: alpha, [H, H, P] and twice [G, G, P].
        collapse: R, [H, P].
        rotation: (cos, sin) [P, head_dim / 2] of R_p, the rotation of pseudo-head p within its token; `None` for shared positions.
        documents: int [batch or 1, cached + N], equal where tokens may see each other; `None` if all may.
        window: W in tokens: virtual query v sees the keys u with v - W * P < u <= v; `None` for all.
        scaling: factor of the scores.

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
        states = (x.contiguous() for x in (query, key, value))
        return _CollapseFirst.apply(*states, q_mix, k_mix, v_mix, collapse, layer)
