# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Compute steps of interleaving.py on a GPU, each in one pass over virtual tokens, by Triton kernels.

`expand` mixes, rotates and interleaves heads (IHA, Algorithm 1, steps 2 and 3), and `collapse` is step 5. The PyTorch
code of interleaving.py defines both. It computes where `kernels_take` is false, as it is without Triton.

The symbols of virtual_tokens.py are P (pseudo-heads), M (heads in) and H (heads out, here also for keys and values).
D is head_dim and F is D / 2. Names in capitals are constants of a compiled kernel.

RoPE turns feature f of a head together with feature f + F. A head is therefore held as two tiles, one for each half,
and the rotation is a sum of tiles. The columns of a tile are the features of some tokens, and its rows are heads.
`tl.dot` takes at least 16 rows, and sizes that are powers of two.

Kernels sum in float32 and round once, to the dtype of the states. Sums over tokens have a fixed order, so that every
gradient is the same in each run.
"""

# Without Triton the annotations of the kernels have no meaning.
from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
from transformers.utils import logging


try:
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:
    triton = None

    def jit(function):
        return function


logger = logging.get_logger(__name__)

# A tile of `expand` has at most this many columns, and a tile of `collapse` this many tokens. The sizes depend on the
# shape only: tuning them on each machine would delay the first call, and change results from run to run.
MOST_COLUMNS, COLLAPSED_TOKENS = 128, 16
# The gradient of alpha is a sum over parts, of at least so many tokens each and at most so many for each row. The
# numbers do not depend on the GPU, so neither does the sum.
LEAST_TOKENS_OF_PART, MOST_PARTS = 32, 256

MOST_HEADS = {torch.float32: 32, torch.float16: 64, torch.bfloat16: 64}

Rotation = tuple[torch.Tensor, torch.Tensor] | None  # (cos, sin), each [P, D] with two equal halves


def kernels_take(states: torch.Tensor, weights: torch.Tensor) -> bool:
    """Return whether the kernels run on states [..., D] with alpha or R: on an NVIDIA GPU from Ampere on.

    A kernel reads plain memory, which subclasses of tensors (DTensor, FakeTensor in an export) and the states of a
    `torch.func` transform lack. With more heads `expand` would spill registers."""
    if triton is None or states.device.type != "cuda" or torch.version.hip is not None:
        return False
    if type(states) is not torch.Tensor or states.shape[-1] % 2 or len(weights) > MOST_HEADS.get(states.dtype, 0):
        return False
    if torch.compiler.is_compiling():
        return True  # Inductor needs Triton too, and Dynamo does not trace what follows
    if torch._C._are_functorch_transforms_active():  # no public function tells
        return False
    return torch.cuda.get_device_capability(states.device) >= (8, 0) and triton_works()


@cache
def triton_works() -> bool:
    """Return whether Triton can launch kernels here. It needs a C compiler, which not every machine has."""
    try:
        triton.runtime.driver.active.get_current_device()
    except Exception as error:  # of the compiler, the linker or the driver
        logger.warning(f"Triton does not work here, so heads are mixed by slower PyTorch code: {error}")
        return False
    return True


def on_device_of(states: torch.Tensor):
    """Return a context whose GPU is that of the states.

    Triton launches on the current one, which is another if `device_map` splits a model."""
    if states.is_cuda and not torch.compiler.is_compiling():
        return torch.cuda.device_of(states)
    return nullcontext()


def power_of_two(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is neither below `size` nor below `least`."""
    return max(least, 1 << (size - 1).bit_length())


def parts_of(size: int, part: int) -> int:
    """Return how many parts cover a size."""
    return -(-size // part)


# Expand


@jit
def columns(first, num_tokens, F: tl.constexpr, BLOCK_F: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the token and the feature of each column of a tile, and whether it exists.

    The columns of all tokens are in a row, BLOCK_F for each token."""
    column = first + tl.arange(0, COLUMNS)
    token = column // BLOCK_F
    feature = column % BLOCK_F
    return token.to(tl.int64), feature, (token < num_tokens) & (feature < F)


@jit
def load_halves(pointers, exists, F: tl.constexpr):
    """Return the two halves of heads, from pointers to the first ones."""
    return tl.load(pointers, mask=exists, other=0.0), tl.load(pointers + F, mask=exists, other=0.0)


@jit
def store_halves(pointers, first, second, exists, F: tl.constexpr):
    tl.store(pointers, first.to(pointers.dtype.element_ty), mask=exists)
    tl.store(pointers + F, second.to(pointers.dtype.element_ty), mask=exists)


@jit
def load_rotation(cos, sin, p, feature, F: tl.constexpr):
    """Return the cosines and sines of T_p, [1, columns] in float32."""
    c = tl.load(cos + p * 2 * F + feature, mask=feature < F, other=0.0)
    s = tl.load(sin + p * 2 * F + feature, mask=feature < F, other=0.0)
    return c.to(tl.float32)[None], s.to(tl.float32)[None]


@jit
def load_rotated_back(
    gradient, cos, sin, p, feature, exists, H: tl.constexpr, F: tl.constexpr, ROTATES: tl.constexpr
):  # fmt: skip
    """Return T_p^T of the gradients of pseudo-head p as two halves, from pointers to those of pseudo-head 0."""
    first, second = load_halves(gradient + p * (H * 2 * F), exists, F)
    if ROTATES:
        c, s = load_rotation(cos, sin, p, feature, F)
        one, two = first.to(tl.float32), second.to(tl.float32)
        first, second = (one * c + two * s).to(first.dtype), (two * c - one * s).to(second.dtype)
    return first, second


@jit
def expand_kernel(
    states, alpha, cos, sin, virtual, num_tokens,
    stride_b, stride_m, stride_n,  # of the states [batch, M, N, D]
    alpha_m, alpha_h, alpha_p,  # strides of alpha [M, H, P]
    M: tl.constexpr, H: tl.constexpr, P: tl.constexpr, F: tl.constexpr, ROTATES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute virtual[b, n, p, h] = T_p sum_m alpha[m, h, p] states[b, m, n].

    A program has some columns of all heads and pseudo-heads. It reads the states once."""
    row = tl.program_id(1).to(tl.int64)
    token, feature, exists = columns(tl.program_id(0) * COLUMNS, num_tokens, F, BLOCK_F, COLUMNS)
    m = tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    source = states + row * stride_b + m.to(tl.int64)[:, None] * stride_m + (token * stride_n + feature)[None]
    first, second = load_halves(source, (m < M)[:, None] & exists[None], F)  # [BLOCK_M, columns]
    weights = alpha + h[:, None] * alpha_h + m[None] * alpha_m
    target = virtual + ((row * num_tokens + token) * (P * H * 2 * F) + feature)[None] + h[:, None] * (2 * F)
    for p in range(P):
        mix = tl.load(weights + p * alpha_p, mask=(h < H)[:, None] & (m < M)[None], other=0.0).to(first.dtype)
        one = tl.dot(mix, first, input_precision="ieee")  # [BLOCK_H, columns]
        two = tl.dot(mix, second, input_precision="ieee")
        if ROTATES:
            c, s = load_rotation(cos, sin, p, feature, F)
            one, two = one * c - two * s, two * c + one * s
        store_halves(target + p * (H * 2 * F), one, two, (h < H)[:, None] & exists[None], F)


@jit
def expand_backward_states_kernel(
    gradient, alpha, cos, sin, states_gradient, num_tokens,
    stride_b, stride_m, stride_n,  # of the states' gradient [batch, M, N, D]
    alpha_m, alpha_h, alpha_p,  # strides of alpha [M, H, P]
    M: tl.constexpr, H: tl.constexpr, P: tl.constexpr, F: tl.constexpr, ROTATES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute states_gradient[b, m, n] = sum_p sum_h alpha[m, h, p] T_p^T gradient[b, n, p, h].

    The sum stays in registers and is written once."""
    row = tl.program_id(1).to(tl.int64)
    token, feature, exists = columns(tl.program_id(0) * COLUMNS, num_tokens, F, BLOCK_F, COLUMNS)
    m = tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    source = gradient + ((row * num_tokens + token) * (P * H * 2 * F) + feature)[None] + h[:, None] * (2 * F)
    weights = alpha + m[:, None] * alpha_m + h[None] * alpha_h
    first = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    second = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for p in range(P):
        read = (h < H)[:, None] & exists[None]
        one, two = load_rotated_back(source, cos, sin, p, feature, read, H, F, ROTATES)
        mix = tl.load(weights + p * alpha_p, mask=(m < M)[:, None] & (h < H)[None], other=0.0).to(one.dtype)
        first = tl.dot(mix, one, first, input_precision="ieee")
        second = tl.dot(mix, two, second, input_precision="ieee")
    target = states_gradient + row * stride_b + m.to(tl.int64)[:, None] * stride_m
    store_halves(target + (token * stride_n + feature)[None], first, second, (m < M)[:, None] & exists[None], F)


@jit
def expand_backward_alpha_kernel(
    gradient, states, cos, sin, parts, num_tokens, tokens_of_part,
    stride_b, stride_m, stride_n,  # of the states [batch, M, N, D]
    M: tl.constexpr, H: tl.constexpr, P: tl.constexpr, F: tl.constexpr, ROTATES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute parts[b, part, m, h, p], the sum over the tokens n of a part of states[m, n] . T_p^T gradient[n, p, h].

    A program has one p and one part. It reads the gradient a second time: one kernel for both gradients holds three
    products at once, spills registers and issues twice the instructions of the two (ptxas, sm_90)."""
    p = tl.program_id(0)  # programs that follow each other share the states, which then come from the L2 cache
    part = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H, BLOCK_M), tl.float32)
    end = tl.minimum((part + 1) * tokens_of_part, num_tokens) * BLOCK_F
    for first_column in range(part * tokens_of_part * BLOCK_F, end, COLUMNS):
        token, feature, exists = columns(first_column, num_tokens, F, BLOCK_F, COLUMNS)
        source = gradient + ((row * num_tokens + token) * (P * H * 2 * F) + feature)[None] + h[:, None] * (2 * F)
        read = (h < H)[:, None] & exists[None]
        one, two = load_rotated_back(source, cos, sin, p, feature, read, H, F, ROTATES)
        source = states + row * stride_b + m.to(tl.int64)[:, None] * stride_m + (token * stride_n + feature)[None]
        first, second = load_halves(source, (m < M)[:, None] & exists[None], F)
        total = tl.dot(one, tl.trans(first), total, input_precision="ieee")
        total = tl.dot(two, tl.trans(second), total, input_precision="ieee")
    target = parts + (row * tl.num_programs(1) + part) * (M * H * P) + (m[None] * H + h[:, None]) * P + p
    tl.store(target, total, mask=(m < M)[None] & (h < H)[:, None])


def constants_of_expand(states: torch.Tensor, alpha: torch.Tensor, rotation: Rotation) -> dict:
    """Return the constants of the three kernels."""
    num_heads_in, num_heads_out, num_pseudo_heads = alpha.shape
    rows_in, rows_out = power_of_two(num_heads_in, 16), power_of_two(num_heads_out, 16)
    half = states.shape[-1] // 2
    return {
        **{"M": num_heads_in, "H": num_heads_out, "P": num_pseudo_heads, "F": half, "ROTATES": rotation is not None},
        **{"BLOCK_M": rows_in, "BLOCK_H": rows_out, "BLOCK_F": power_of_two(half)},
        "COLUMNS": columns_of_tile(max(rows_in, rows_out), states.element_size()),
    }


def columns_of_tile(rows: int, itemsize: int) -> int:
    """Return how many columns of a tile fit in the registers of a program."""
    columns = MOST_COLUMNS if rows <= 32 else MOST_COLUMNS // 4
    return columns * 2 // itemsize


def grid_of_expand(states: torch.Tensor, constants: dict) -> tuple[int, int]:
    """Return the programs of the kernels that go over all tokens [batch, M, N, D]."""
    batch, _, num_tokens, _ = states.shape
    return parts_of(num_tokens * constants["BLOCK_F"], constants["COLUMNS"]), batch


class Expand(torch.autograd.Function):
    """Differentiate `expand`."""

    @staticmethod
    def forward(ctx, states, alpha, cos, sin):
        ctx.save_for_backward(states, alpha, cos, sin)
        batch, _, num_tokens, head_dim = states.shape
        rotation = None if cos is None else (cos, sin)
        constants = constants_of_expand(states, alpha, rotation)
        virtual = states.new_empty(batch, num_tokens * constants["P"], constants["H"], head_dim)
        tables = rotation or (states, states)  # a kernel that does not rotate reads none
        with on_device_of(states):
            expand_kernel[grid_of_expand(states, constants)](
                states, alpha, *tables, virtual, num_tokens, *states.stride()[:3], *alpha.stride(), **constants
            )
        return virtual

    @staticmethod
    def backward(ctx, gradient):
        states, alpha, cos, sin = ctx.saved_tensors
        rotation = None if cos is None else (cos, sin)
        if torch.is_grad_enabled():  # with create_graph=True
            return *differentiable_gradients_of_expand(gradient, states, alpha, rotation), None, None
        gradient = gradient.contiguous()
        with on_device_of(states):
            of_states = gradient_of_states(gradient, states, alpha, rotation) if ctx.needs_input_grad[0] else None
            of_alpha = gradient_of_alpha(gradient, states, alpha, rotation) if ctx.needs_input_grad[1] else None
        return of_states, of_alpha, None, None


def gradient_of_states(gradient, states, alpha, rotation: Rotation) -> torch.Tensor:
    """Return the gradient [batch, M, N, D], as a view of the layout of projections [batch, N, M, D]."""
    batch, num_heads, num_tokens, head_dim = states.shape
    constants = constants_of_expand(states, alpha, rotation)
    result = states.new_empty(batch, num_tokens, num_heads, head_dim).transpose(1, 2)
    expand_backward_states_kernel[grid_of_expand(states, constants)](
        gradient,
        alpha,
        *(rotation or (states, states)),
        result,
        num_tokens,
        *result.stride()[:3],
        *alpha.stride(),
        **constants,
    )
    return result


def gradient_of_alpha(gradient, states, alpha, rotation: Rotation) -> torch.Tensor:
    """Return the gradient [M, H, P] as a sum over parts of the tokens."""
    batch, _, num_tokens, _ = states.shape
    constants = constants_of_expand(states, alpha, rotation)
    constants["COLUMNS"] = max(16, constants["COLUMNS"] // 2)  # more would spill registers
    tokens_of_tile = parts_of(constants["COLUMNS"], constants["BLOCK_F"])
    tokens_of_part = max(LEAST_TOKENS_OF_PART, parts_of(num_tokens, MOST_PARTS))
    tokens_of_part = parts_of(tokens_of_part, tokens_of_tile) * tokens_of_tile  # no tile reaches into the next part
    num_parts = parts_of(num_tokens, tokens_of_part)
    parts = states.new_empty(batch, num_parts, *alpha.shape, dtype=torch.float32)
    expand_backward_alpha_kernel[constants["P"], num_parts, batch](
        gradient,
        states,
        *(rotation or (states, states)),
        parts,
        num_tokens,
        tokens_of_part,
        *states.stride()[:3],
        num_stages=2,
        **constants,
    )
    return parts.sum((0, 1)).to(alpha.dtype)


def differentiable_gradients_of_expand(gradient, states, alpha, rotation: Rotation) -> tuple:
    """Return both gradients by PyTorch, which can differentiate them again."""
    gradient = gradient.unflatten(1, (-1, alpha.shape[-1]))  # [batch, N, P, H, D]
    if rotation is not None:
        cos, sin = (table.to(gradient.dtype).unsqueeze(1) for table in rotation)
        one, two = gradient.chunk(2, dim=-1)
        gradient = gradient * cos + torch.cat((two, -one), dim=-1) * sin
    of_states = torch.einsum("bnphd,mhp->bmnd", gradient, alpha.to(gradient.dtype))
    return of_states, torch.einsum("bnphd,bmnd->mhp", gradient, states).to(alpha.dtype)


def expand(states: torch.Tensor, alpha: torch.Tensor, rotation: Rotation = None) -> torch.Tensor:
    """Return virtual tokens [batch, N * P, H, D] of heads [batch, M, N, D], by alpha [M, H, P] and T_p.

    Virtual token (n, p) of head h is T_p sum_m alpha[m, h, p] states[m, n], in the dtype of the states. alpha may be a
    slice of its heads h. Its dtype and that of the tables may differ from that of the states."""
    states = states if states.stride(-1) == 1 else states.contiguous()
    cos, sin = (None, None) if rotation is None else (table.contiguous() for table in rotation)
    return Expand.apply(states, alpha, cos, sin)


# Collapse


@jit
def collapse_kernel(
    output, weight, collapsed, num_tokens,
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute collapsed[n, h] = sum_p weight[h, p] output[n, p, h] for `TOKENS` tokens of one head."""
    h = tl.program_id(0) % H  # heads lie next to each other in memory
    token = (tl.program_id(0) // H * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    feature = tl.arange(0, BLOCK_D)
    exists = (token < num_tokens)[:, None] & (feature < D)[None]
    source = output + (token * (P * H * D))[:, None] + h * D + feature[None]
    total = tl.zeros((TOKENS, BLOCK_D), tl.float32)
    for p in range(P):
        share = tl.load(weight + h * P + p).to(tl.float32)
        total += share * tl.load(source + p * (H * D), mask=exists, other=0.0).to(tl.float32)
    target = collapsed + (token * (H * D))[:, None] + h * D + feature[None]
    tl.store(target, total.to(collapsed.dtype.element_ty), mask=exists)


@jit
def collapse_backward_kernel(
    gradient, output, weight, output_gradient, parts, num_tokens,
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute output_gradient[n, p, h] = weight[h, p] gradient[n, h] for `TOKENS` tokens of one head.

    parts[., h, p] is their sum of gradient[n, h] . output[n, p, h]."""
    h = tl.program_id(0) % H
    part = tl.program_id(0) // H
    token = (part * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    feature = tl.arange(0, BLOCK_D)
    exists = (token < num_tokens)[:, None] & (feature < D)[None]
    source = gradient + (token * (H * D))[:, None] + h * D + feature[None]
    of_head = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    place = (token * (P * H * D))[:, None] + h * D + feature[None]
    for p in range(P):
        share = tl.load(weight + h * P + p).to(tl.float32)
        states = tl.load(output + place + p * (H * D), mask=exists, other=0.0).to(tl.float32)
        tl.store(parts + (part * H + h) * P + p, tl.sum(of_head * states))
        target = output_gradient + place + p * (H * D)
        tl.store(target, (share * of_head).to(output_gradient.dtype.element_ty), mask=exists)


def constants_of_collapse(output: torch.Tensor, weight: torch.Tensor) -> dict:
    """Return the constants of the two kernels."""
    num_heads, num_pseudo_heads = weight.shape
    head_dim = output.shape[-1]
    sizes = {"D": head_dim, "BLOCK_D": power_of_two(head_dim), "TOKENS": COLLAPSED_TOKENS}
    return {"H": num_heads, "P": num_pseudo_heads, **sizes}


class Collapse(torch.autograd.Function):
    """Differentiate `collapse`."""

    @staticmethod
    def forward(ctx, output, weight):
        ctx.save_for_backward(output, weight)
        batch, num_virtual_tokens, num_heads, head_dim = output.shape
        constants = constants_of_collapse(output, weight)
        collapsed = output.new_empty(batch, num_virtual_tokens // constants["P"], num_heads, head_dim)
        num_tokens = collapsed.shape[0] * collapsed.shape[1]  # of all rows, which lie one after the other
        with on_device_of(output):
            collapse_kernel[(parts_of(num_tokens, COLLAPSED_TOKENS) * num_heads,)](
                output, weight, collapsed, num_tokens, **constants
            )
        return collapsed

    @staticmethod
    def backward(ctx, gradient):
        output, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph=True
            return differentiable_gradients_of_collapse(gradient, output, weight)
        gradient = gradient.contiguous()
        num_tokens = gradient.shape[0] * gradient.shape[1]
        num_parts = parts_of(num_tokens, COLLAPSED_TOKENS)
        output_gradient = torch.empty_like(output)
        parts = output.new_empty(num_parts, *weight.shape, dtype=torch.float32)
        with on_device_of(output):
            collapse_backward_kernel[(num_parts * len(weight),)](
                gradient, output, weight, output_gradient, parts, num_tokens, **constants_of_collapse(output, weight)
            )
        return output_gradient, parts.sum(0).to(weight.dtype)


def differentiable_gradients_of_collapse(gradient, output, weight) -> tuple:
    """Return both gradients by PyTorch, which can differentiate them again."""
    gradient = gradient.unsqueeze(2)  # [batch, N, 1, H, D]
    of_output = gradient * weight.to(gradient.dtype).t().unsqueeze(-1)
    of_weight = (gradient * output.unflatten(1, (-1, weight.shape[1]))).sum((0, 1, 4)).t()
    return of_output.flatten(1, 2), of_weight.to(weight.dtype)


def collapse(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return heads [batch, N, H, D] of virtual outputs [batch, N * P, H, D] by R [H, P], in their dtype."""
    return Collapse.apply(output.contiguous(), weight.contiguous())
