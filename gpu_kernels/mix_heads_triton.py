# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Multiply the heads of every token by a matrix in Triton kernels, forward and backward, with the rotation R_p.

This is the one linear operation of Interleaved Head Attention:

    expansion   out[n] = R (alpha x[n])      alpha [P * M, M], R turns row p * M + h by R_p  (Algorithm 1, steps 2, 3)
    collapse    out[n] = R_c x[n]            R_c [H, P * H]                                  (step 5)

x[n] is [heads, head_dim]. The backward pass of a product is a product with the transposed matrix. Each kernel reads
its inputs once and writes its output once. PyTorch's own operations read and write the P times longer virtual tokens
about five times. The tests run the kernels in Triton's interpreter and compile them for sm_80, sm_90 and sm_100. No
GPU has run them.
"""

from __future__ import annotations

import torch


try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:
    triton = tl = None

    def jit(kernel=None, **options):
        return jit if kernel is None else kernel


# The shortest side of a tensor-core product, and the longest ones of a block of a matrix.
MIN_SIDE, MAX_ROWS, MAX_COLUMNS = 16, 128, 64
# Programs that sum the gradient of a matrix over parts of the tokens: two for each multiprocessor of a large GPU.
PROGRAMS = 264


@jit
def _load_halves(x, row, valid, stride, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the two halves of the channels, each [rows, COLUMNS], that RoPE rotates in pairs."""
    column = tl.arange(0, COLUMNS)
    offsets, mask = row[:, None] * stride + column, valid[:, None] & (column < HALF)
    return tl.load(x + offsets, mask=mask, other=0.0), tl.load(x + HALF + offsets, mask=mask, other=0.0)


@jit
def _turn(x1, x2, cos, sin, row, valid, HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Rotate row p * HEADS + h of both halves by R_p, in float32."""
    column = tl.arange(0, COLUMNS)
    offsets, mask = (row // HEADS)[:, None] * HALF + column, valid[:, None] & (column < HALF)
    c = tl.load(cos + offsets, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + offsets, mask=mask, other=0.0).to(tl.float32)
    return x1 * c - x2 * s, x2 * c + x1 * s


@jit
def _product(
    x, matrix, cos, sin, out, x_batch, x_token, x_row, matrix_row, matrix_column,
    ROWS_OUT: tl.constexpr, ROWS_IN: tl.constexpr, HEADS: tl.constexpr, TURN_IN: tl.constexpr,
    TURN_OUT: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Write out[n] = matrix x[n] for one token and one block of rows."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    x += batch * x_batch + token * x_token
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    y1 = tl.zeros([ROWS, COLUMNS], tl.float32)
    y2 = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, ROWS_IN, INNER):
        m = start + tl.arange(0, INNER)
        mask = (row < ROWS_OUT)[:, None] & (m < ROWS_IN)[None, :]
        a = tl.load(matrix + row[:, None] * matrix_row + m[None, :] * matrix_column, mask=mask, other=0.0)
        x1, x2 = _load_halves(x, m, m < ROWS_IN, x_row, HALF, COLUMNS)
        a = a.to(x1.dtype)
        if TURN_IN:
            t1, t2 = _turn(x1, x2, cos, sin, m, m < ROWS_IN, HEADS, HALF, COLUMNS)
            x1, x2 = t1.to(a.dtype), t2.to(a.dtype)
        y1 = tl.dot(a, x1, y1, input_precision="ieee")
        y2 = tl.dot(a, x2, y2, input_precision="ieee")
    if TURN_OUT:
        y1, y2 = _turn(y1, y2, cos, sin, row, row < ROWS_OUT, HEADS, HALF, COLUMNS)
    out += (batch * tl.num_programs(0) + token) * ROWS_OUT * 2 * HALF
    column = tl.arange(0, COLUMNS)
    offsets, mask = row[:, None] * (2 * HALF) + column, (row < ROWS_OUT)[:, None] & (column < HALF)
    tl.store(out + offsets, y1.to(out.dtype.element_ty), mask=mask)
    tl.store(out + HALF + offsets, y2.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["SPLIT"])  # one binary for all lengths of the sum
def _matrix_gradient(
    d_out, x, cos, sin, partial, x_batch, x_token, x_row, d_batch, d_token, d_row, N, SPLIT,
    ROWS_OUT: tl.constexpr, ROWS_IN: tl.constexpr, HEADS: tl.constexpr, TURN: tl.constexpr, HALF: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Write the sum over SPLIT tokens of d_out[n] x[n]^T for one block of the matrix [ROWS_OUT, ROWS_IN]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.program_id(1) * INNER + tl.arange(0, INNER)
    part, batch = tl.program_id(2) % tl.cdiv(N, SPLIT), tl.program_id(2) // tl.cdiv(N, SPLIT)
    first = (part * SPLIT).to(tl.int64)
    x += batch.to(tl.int64) * x_batch + first * x_token
    d_out += batch.to(tl.int64) * d_batch + first * d_token
    total = tl.zeros([ROWS, INNER], tl.float32)
    for _ in range(part * SPLIT, tl.minimum((part + 1) * SPLIT, N)):
        d1, d2 = _load_halves(d_out, row, row < ROWS_OUT, d_row, HALF, COLUMNS)
        x1, x2 = _load_halves(x, m, m < ROWS_IN, x_row, HALF, COLUMNS)
        if TURN:
            t1, t2 = _turn(d1, d2, cos, sin, row, row < ROWS_OUT, HEADS, HALF, COLUMNS)
            d1, d2 = t1.to(x1.dtype), t2.to(x1.dtype)
        total = tl.dot(d1, tl.trans(x1), total, input_precision="ieee")
        total = tl.dot(d2, tl.trans(x2), total, input_precision="ieee")
        x += x_token
        d_out += d_token
    partial += tl.program_id(2).to(tl.int64) * ROWS_OUT * ROWS_IN
    mask = (row < ROWS_OUT)[:, None] & (m < ROWS_IN)[None, :]
    tl.store(partial + row[:, None] * ROWS_IN + m[None, :], total, mask=mask)


def _side(rows: int, most: int) -> int:
    return max(MIN_SIDE, min(most, triton.next_power_of_2(rows)))


def _columns(head_dim: int) -> int:
    return max(MIN_SIDE, triton.next_power_of_2(head_dim // 2))


def _multiply(x, matrix, rotation, turn_in: bool, turn_out: bool) -> torch.Tensor:
    """Return matrix x[n], [batch, N, rows, head_dim], of x [batch, N, columns, head_dim] of any strides."""
    (batch, length, rows_in, head_dim), rows_out = x.shape, matrix.shape[0]
    out = x.new_empty(batch, length, rows_out, head_dim)
    cos, sin = (x, x) if rotation is None else rotation
    rows = _side(rows_out, MAX_ROWS)
    with torch.cuda.device_of(x):
        _product[length, triton.cdiv(rows_out, rows), batch](
            x, matrix, cos, sin, out, *x.stride()[:3], *matrix.stride(),
            ROWS_OUT=rows_out, ROWS_IN=rows_in,
            HEADS=(rows_in if turn_in else rows_out) // (1 if rotation is None else len(cos)),
            TURN_IN=turn_in, TURN_OUT=turn_out, HALF=head_dim // 2, COLUMNS=_columns(head_dim), ROWS=rows,
            INNER=_side(rows_in, MAX_COLUMNS), num_warps=8 if rows > 64 else 4,
        )  # fmt: skip
    return out


class _MixHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix, cos, sin):
        ctx.save_for_backward(x, matrix, cos, sin)
        rotation = None if cos is None else (cos, sin)
        return _multiply(x, matrix, rotation, False, rotation is not None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        x, matrix, cos, sin = ctx.saved_tensors
        rotation = None if cos is None else (cos, -sin)
        if d_out.stride(-1) != 1:
            d_out = d_out.contiguous()
        d_x = d_matrix = None
        if ctx.needs_input_grad[0]:
            d_x = _multiply(d_out, matrix.t(), rotation, rotation is not None, False)
        if ctx.needs_input_grad[1]:
            (batch, length, rows_in, head_dim), rows_out = x.shape, matrix.shape[0]
            rows, inner = _side(rows_out, MAX_ROWS), _side(rows_in, MAX_COLUMNS)
            blocks = triton.cdiv(rows_out, rows), triton.cdiv(rows_in, inner)
            split = max(1, triton.cdiv(length * batch * blocks[0] * blocks[1], PROGRAMS))
            parts = triton.cdiv(length, split) * batch
            partial = x.new_empty(parts, rows_out, rows_in, dtype=torch.float32)
            cos, sin = (x, x) if rotation is None else rotation
            with torch.cuda.device_of(x):
                _matrix_gradient[*blocks, parts](
                    d_out, x, cos, sin, partial, *x.stride()[:3], *d_out.stride()[:3], length, split,
                    ROWS_OUT=rows_out, ROWS_IN=rows_in, HEADS=rows_out // (1 if rotation is None else len(cos)),
                    TURN=rotation is not None, HALF=head_dim // 2, COLUMNS=_columns(head_dim), ROWS=rows, INNER=inner,
                    num_warps=8 if rows > 64 else 4,
                )  # fmt: skip
            d_matrix = partial.sum(dim=0).to(matrix.dtype)
        return d_x, d_matrix, None, None


def mix_heads(
    states: torch.Tensor, matrix: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return R (matrix states[n]) for every token n, [batch, N, rows, head_dim].

    The output is summed in float32 and rounded once to the dtype of the states. The gradient of the matrix is
    summed in float32, in the same order in every run.

    Args:
        states: [batch, N, columns, head_dim] in float32, float16 or bfloat16, of any strides but that of head_dim.
        matrix: [rows, columns] in any floating dtype.
        rotation: (cos, sin) of R_p, each [P, head_dim], or `None`. R_p rotates row p * rows / P + h. No gradients.

    Raises:
        ImportError: without Triton.
        ValueError: for another dtype or shape, a CPU tensor outside Triton's interpreter, or bfloat16 in it.
    """
    check(states)
    if matrix.ndim != 2 or matrix.shape[1] != states.shape[2]:
        raise ValueError(f"matrix must have the shape [rows, {states.shape[2]}], not {list(matrix.shape)}.")
    cos = sin = None
    if rotation is not None:
        half = states.shape[3] // 2
        if rotation[0].shape[1] != 2 * half or matrix.shape[0] % len(rotation[0]):
            raise ValueError(
                f"rotation must be tables [P, {2 * half}] with P a divisor of {matrix.shape[0]} rows, not "
                f"{list(rotation[0].shape)}."
            )
        cos, sin = (table[:, :half].contiguous() for table in rotation)
    if states.stride(-1) != 1:
        states = states.contiguous()
    return _MixHeads.apply(states, matrix, cos, sin)


def expand(states: torch.Tensor, alpha: torch.Tensor, rotation: tuple | None = None) -> torch.Tensor:
    """Expand heads as `expand` of interleaving.py does, which this can replace."""
    num_heads, _, num_pseudo_heads = alpha.shape
    matrix = alpha.permute(2, 1, 0).reshape(num_pseudo_heads * num_heads, num_heads)
    mixed = mix_heads(states.transpose(1, 2), matrix, rotation)
    return mixed.unflatten(2, (num_pseudo_heads, num_heads)).flatten(1, 2).transpose(1, 2)


def collapse(states: torch.Tensor, weight: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Collapse pseudo-heads as `collapse` of interleaving.py does, which this can replace."""
    num_heads = weight.shape[0]
    if weight.shape[1] == num_pseudo_heads:
        # Column p * H + h of row h is R[h, p].
        matrix = torch.diag_embed(weight.t()).transpose(0, 1).flatten(1)
    else:
        matrix = weight.unflatten(1, (num_heads, num_pseudo_heads)).transpose(1, 2).flatten(1)
    return mix_heads(states.unflatten(1, (-1, num_pseudo_heads)).flatten(2, 3), matrix)


def check(states: torch.Tensor) -> None:
    """Refuse states that the kernels cannot read."""
    if triton is None:
        raise ImportError("The Triton kernels need Triton: `pip install triton`.")
    if states.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ValueError(
            "The Triton kernels run on a GPU, and the states are on the CPU: move them to a GPU. (For tests, "
            "TRITON_INTERPRET=1 in the environment before Triton is imported runs the kernels on the CPU.)"
        )
    if states.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"The states must be float32, float16 or bfloat16, not {states.dtype}.")
    if states.dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        raise ValueError(
            "Triton's interpreter multiplies the bits of bfloat16 as integers: use float32 or float16 there."
        )
    if states.shape[-1] % 2:
        raise ValueError(f"head_dim must be even, not {states.shape[-1]}.")
