# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Compute steps of interleaving.py on a GPU, each in one pass over virtual tokens, by Triton kernels.

`expand` mixes, rotates and interleaves heads (IHA, Algorithm 1, steps 2 and 3), and `collapse` is step 5. `decode`
attends with one new token. The PyTorch code of interleaving.py defines all three. It computes where `kernels_take` or
`kernels_decode` is false, as they are without Triton, and with the environment variable `IHA_TRITON_KERNELS=0`. The
kernels have passed their tests on an H200, and have run on no other GPU.

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

import os
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

    def jit(function=None, **options):
        return function or jit


logger = logging.get_logger(__name__)
ENABLED = os.environ.get("IHA_TRITON_KERNELS") != "0"

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
    if not ENABLED or triton is None or states.device.type != "cuda" or torch.version.hip is not None:
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
def load_rotated_back(gradient, cos, sin, p, feature, exists, H: tl.constexpr, F: tl.constexpr):
    """Return T_p^T of the gradients of pseudo-head p as two halves, from pointers to those of pseudo-head 0."""
    first, second = load_halves(gradient + p * (H * 2 * F), exists, F)
    if cos is not None:
        c, s = load_rotation(cos, sin, p, feature, F)
        one, two = first.to(tl.float32), second.to(tl.float32)
        first, second = (one * c + two * s).to(first.dtype), (two * c - one * s).to(second.dtype)
    return first, second


# Each of the next three functions has one kind of states (queries, keys or values), and a kernel that calls it for all
# three: to launch a kernel takes longer than to mix a thousand tokens. `cos` and `sin` are `None` without a rotation.


@jit
def expand_states(
    states, alpha, cos, sin, virtual, num_tokens,
    stride_b, stride_m, stride_n,  # of the states [batch, M, N, D]
    M: tl.constexpr, H: tl.constexpr, P: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute virtual[b, n, p, h] = T_p sum_m alpha[m, h, p] states[b, m, n].

    A program has some columns of all heads and pseudo-heads. It reads the states once."""
    first_column = tl.program_id(0) * COLUMNS
    if first_column < num_tokens * BLOCK_F:  # other kinds of states may have more programs
        row = tl.program_id(1).to(tl.int64)
        token, feature, exists = columns(first_column, num_tokens, F, BLOCK_F, COLUMNS)
        m = tl.arange(0, BLOCK_M)
        h = tl.arange(0, BLOCK_H)
        source = states + row * stride_b + m.to(tl.int64)[:, None] * stride_m + (token * stride_n + feature)[None]
        first, second = load_halves(source, (m < M)[:, None] & exists[None], F)  # [BLOCK_M, columns]
        weights = alpha + (m[None] * H + h[:, None]) * P
        target = virtual + ((row * num_tokens + token) * (P * H * 2 * F) + feature)[None] + h[:, None] * (2 * F)
        for p in range(P):
            mix = tl.load(weights + p, mask=(h < H)[:, None] & (m < M)[None], other=0.0).to(first.dtype)
            one = tl.dot(mix, first, input_precision="ieee")  # [BLOCK_H, columns]
            two = tl.dot(mix, second, input_precision="ieee")
            if cos is not None:
                c, s = load_rotation(cos, sin, p, feature, F)
                one, two = one * c - two * s, two * c + one * s
            store_halves(target + p * (H * 2 * F), one, two, (h < H)[:, None] & exists[None], F)


@jit
def expand_kernel(
    query, key, value, q_mix, k_mix, v_mix, cos, sin, virtual_query, virtual_key, virtual_value, num_tokens, num_keys,
    q_b, q_m, q_n, k_b, k_m, k_n, v_b, v_m, v_n,  # strides of queries, keys and values [batch, M, N or K, D]
    P: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, F_V: tl.constexpr, BLOCK_F_V: tl.constexpr,
    H_IN: tl.constexpr, H: tl.constexpr, BLOCK_H_IN: tl.constexpr, BLOCK_H: tl.constexpr, COLUMNS: tl.constexpr,
    G_IN: tl.constexpr, G: tl.constexpr, BLOCK_G_IN: tl.constexpr, BLOCK_G: tl.constexpr,
    COLUMNS_K: tl.constexpr, COLUMNS_V: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        expand_states(query, q_mix, cos, sin, virtual_query, num_tokens, q_b, q_m, q_n,
                      H_IN, H, P, F, BLOCK_H_IN, BLOCK_H, BLOCK_F, COLUMNS)  # fmt: skip
    elif tl.program_id(2) == 1:
        expand_states(key, k_mix, cos, sin, virtual_key, num_keys, k_b, k_m, k_n,
                      G_IN, G, P, F, BLOCK_G_IN, BLOCK_G, BLOCK_F, COLUMNS_K)  # fmt: skip
    else:
        expand_states(value, v_mix, None, None, virtual_value, num_keys, v_b, v_m, v_n,
                      G_IN, G, P, F_V, BLOCK_G_IN, BLOCK_G, BLOCK_F_V, COLUMNS_V)  # fmt: skip


@jit
def gradient_of_states(
    gradient, alpha, cos, sin, states_gradient, num_tokens,
    M: tl.constexpr, H: tl.constexpr, P: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute states_gradient[b, n, m] = sum_p sum_h alpha[m, h, p] T_p^T gradient[b, n, p, h].

    The sum stays in registers and is written once."""
    first_column = tl.program_id(0) * COLUMNS
    if first_column < num_tokens * BLOCK_F:
        row = tl.program_id(1).to(tl.int64)
        token, feature, exists = columns(first_column, num_tokens, F, BLOCK_F, COLUMNS)
        m = tl.arange(0, BLOCK_M)
        h = tl.arange(0, BLOCK_H)
        place = row * num_tokens + token
        source = gradient + (place * (P * H * 2 * F) + feature)[None] + h[:, None] * (2 * F)
        weights = alpha + (m[:, None] * H + h[None]) * P
        first = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
        second = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
        for p in range(P):
            read = (h < H)[:, None] & exists[None]
            one, two = load_rotated_back(source, cos, sin, p, feature, read, H, F)
            mix = tl.load(weights + p, mask=(m < M)[:, None] & (h < H)[None], other=0.0).to(one.dtype)
            first = tl.dot(mix, one, first, input_precision="ieee")
            second = tl.dot(mix, two, second, input_precision="ieee")
        target = states_gradient + (place * (M * 2 * F) + feature)[None] + m[:, None] * (2 * F)
        store_halves(target, first, second, (m < M)[:, None] & exists[None], F)


@jit
def expand_backward_states_kernel(
    query, key, value, q_mix, k_mix, v_mix, cos, sin, of_query, of_key, of_value, num_tokens, num_keys,
    P: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, F_V: tl.constexpr, BLOCK_F_V: tl.constexpr,
    H_IN: tl.constexpr, H: tl.constexpr, BLOCK_H_IN: tl.constexpr, BLOCK_H: tl.constexpr, COLUMNS: tl.constexpr,
    G_IN: tl.constexpr, G: tl.constexpr, BLOCK_G_IN: tl.constexpr, BLOCK_G: tl.constexpr,
    COLUMNS_K: tl.constexpr, COLUMNS_V: tl.constexpr,
):  # fmt: skip
    """Write the gradients of states, from `query`, `key` and `value`, the gradients of virtual ones."""
    if tl.program_id(2) == 0:
        gradient_of_states(query, q_mix, cos, sin, of_query, num_tokens,
                           H_IN, H, P, F, BLOCK_H_IN, BLOCK_H, BLOCK_F, COLUMNS)  # fmt: skip
    elif tl.program_id(2) == 1:
        gradient_of_states(key, k_mix, cos, sin, of_key, num_keys,
                           G_IN, G, P, F, BLOCK_G_IN, BLOCK_G, BLOCK_F, COLUMNS_K)  # fmt: skip
    else:
        gradient_of_states(value, v_mix, None, None, of_value, num_keys,
                           G_IN, G, P, F_V, BLOCK_G_IN, BLOCK_G, BLOCK_F_V, COLUMNS_V)  # fmt: skip


@jit
def gradient_of_alpha(
    gradient, states, cos, sin, parts, weights_of_part, num_tokens, tokens_of_part, stride_b, stride_m, stride_n,
    M: tl.constexpr, H: tl.constexpr, P: tl.constexpr, F: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute parts[b, part, m, h, p], the sum over the tokens n of a part of states[m, n] . T_p^T gradient[n, p, h].

    A program has one p and one part. It reads the gradient a second time: one kernel for both gradients holds three
    products at once, spills registers and issues twice the instructions of the two (ptxas, sm_90)."""
    p = tl.program_id(0) % P  # programs that follow each other share the states, which then come from the L2 cache
    part = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    h = tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_H, BLOCK_M), tl.float32)
    end = tl.minimum((part + 1) * tokens_of_part, num_tokens) * BLOCK_F
    for first_column in range(part * tokens_of_part * BLOCK_F, end, COLUMNS):  # without tokens the sum is zero
        token, feature, exists = columns(first_column, num_tokens, F, BLOCK_F, COLUMNS)
        source = gradient + ((row * num_tokens + token) * (P * H * 2 * F) + feature)[None] + h[:, None] * (2 * F)
        read = (h < H)[:, None] & exists[None]
        one, two = load_rotated_back(source, cos, sin, p, feature, read, H, F)
        source = states + row * stride_b + m.to(tl.int64)[:, None] * stride_m + (token * stride_n + feature)[None]
        first, second = load_halves(source, (m < M)[:, None] & exists[None], F)
        total = tl.dot(one, tl.trans(first), total, input_precision="ieee")
        total = tl.dot(two, tl.trans(second), total, input_precision="ieee")
    target = parts + (row * tl.num_programs(1) + part) * weights_of_part + (m[None] * H + h[:, None]) * P + p
    tl.store(target, total, mask=(m < M)[None] & (h < H)[:, None])


@jit
def expand_backward_alpha_kernel(
    of_query, of_key, of_value, query, key, value, cos, sin, parts, num_tokens, num_keys, tokens_of_part,
    q_b, q_m, q_n, k_b, k_m, k_n, v_b, v_m, v_n,  # strides of queries, keys and values [batch, M, N or K, D]
    P: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, F_V: tl.constexpr, BLOCK_F_V: tl.constexpr,
    H_IN: tl.constexpr, H: tl.constexpr, BLOCK_H_IN: tl.constexpr, BLOCK_H: tl.constexpr, COLUMNS: tl.constexpr,
    G_IN: tl.constexpr, G: tl.constexpr, BLOCK_G_IN: tl.constexpr, BLOCK_G: tl.constexpr,
    COLUMNS_K: tl.constexpr, COLUMNS_V: tl.constexpr,
):  # fmt: skip
    """Write parts [batch, parts, gradients of q_mix, k_mix and v_mix one after the other]."""
    q_weights = H_IN * H * P
    k_weights = G_IN * G * P
    weights = q_weights + 2 * k_weights
    kind = tl.program_id(0) // P
    if kind == 0:
        gradient_of_alpha(of_query, query, cos, sin, parts, weights, num_tokens, tokens_of_part, q_b, q_m, q_n,
                          H_IN, H, P, F, BLOCK_H_IN, BLOCK_H, BLOCK_F, COLUMNS)  # fmt: skip
    elif kind == 1:
        gradient_of_alpha(of_key, key, cos, sin, parts + q_weights, weights, num_keys, tokens_of_part, k_b, k_m, k_n,
                          G_IN, G, P, F, BLOCK_G_IN, BLOCK_G, BLOCK_F, COLUMNS_K)  # fmt: skip
    else:
        gradient_of_alpha(of_value, value, None, None, parts + q_weights + k_weights, weights, num_keys,
                          tokens_of_part, v_b, v_m, v_n,
                          G_IN, G, P, F_V, BLOCK_G_IN, BLOCK_G, BLOCK_F_V, COLUMNS_V)  # fmt: skip


def constants_of_expand(query, value, q_mix, k_mix, most_columns: int = MOST_COLUMNS) -> dict:
    """Return the constants of the three kernels."""
    heads_in, heads_out, num_pseudo_heads = q_mix.shape
    groups_in, groups_out, _ = k_mix.shape
    half, half_of_value = query.shape[-1] // 2, value.shape[-1] // 2
    rows_in, rows_out = power_of_two(heads_in, 16), power_of_two(heads_out, 16)
    group_rows_in, group_rows_out = power_of_two(groups_in, 16), power_of_two(groups_out, 16)
    most_columns = most_columns * 2 // query.element_size()
    rows, group_rows = max(rows_in, rows_out), max(group_rows_in, group_rows_out)
    return {
        **{"P": num_pseudo_heads, "F": half, "BLOCK_F": power_of_two(half)},
        **{"F_V": half_of_value, "BLOCK_F_V": power_of_two(half_of_value)},
        **{"H_IN": heads_in, "H": heads_out, "BLOCK_H_IN": rows_in, "BLOCK_H": rows_out},
        **{"G_IN": groups_in, "G": groups_out, "BLOCK_G_IN": group_rows_in, "BLOCK_G": group_rows_out},
        "COLUMNS": columns_of_tile(rows, half, most_columns),
        "COLUMNS_K": columns_of_tile(group_rows, half, most_columns),
        "COLUMNS_V": columns_of_tile(group_rows, half_of_value, most_columns),
    }


def columns_of_tile(rows: int, half: int, most_columns: int) -> int:
    """Return how many columns of a tile fit in the registers of a program, at least the 16 of a product."""
    columns = most_columns if rows <= 32 else most_columns // 4
    if half != power_of_two(half):  # the masks of missing features take registers too
        columns //= 2
    return max(16, columns)


def grid_of_expand(query, key, constants: dict) -> tuple[int, int, int]:
    """Return the programs of the kernels that go over all tokens: columns, rows, and kinds of states."""
    of_query = parts_of(query.shape[2] * constants["BLOCK_F"], constants["COLUMNS"])
    of_key = parts_of(key.shape[2] * constants["BLOCK_F"], constants["COLUMNS_K"])
    of_value = parts_of(key.shape[2] * constants["BLOCK_F_V"], constants["COLUMNS_V"])
    return max(of_query, of_key, of_value), len(query), 3


class Expand(torch.autograd.Function):
    """Differentiate `expand`."""

    @staticmethod
    def forward(ctx, query, key, value, q_mix, k_mix, v_mix, cos, sin):
        states, mixes = (query, key, value), (q_mix, k_mix, v_mix)
        ctx.save_for_backward(*states, *mixes, cos, sin)
        constants = constants_of_expand(query, value, q_mix, k_mix)
        virtual = [  # [batch, N * P or K * P, H or G, D]
            each.new_empty(len(each), each.shape[2] * mix.shape[2], mix.shape[1], each.shape[3])
            for each, mix in zip(states, mixes)
        ]
        with on_device_of(query):
            expand_kernel[grid_of_expand(query, key, constants)](
                *states, *mixes, cos, sin, *virtual, query.shape[2], key.shape[2],
                *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], **constants,
            )  # fmt: skip
        return tuple(virtual)

    @staticmethod
    def backward(ctx, *gradients):
        *states, q_mix, k_mix, v_mix, cos, sin = ctx.saved_tensors
        mixes = (q_mix, k_mix, v_mix)
        if torch.is_grad_enabled():  # with create_graph=True
            rotation = None if cos is None else (cos, sin)
            kinds = zip(gradients, states, mixes, (rotation, rotation, None))
            of_states, of_mixes = zip(*(differentiable_gradients_of_expand(*kind) for kind in kinds))
            return *of_states, *of_mixes, None, None
        gradients = [gradient.contiguous() for gradient in gradients]
        of_states = of_mixes = (None, None, None)
        with on_device_of(gradients[0]):
            if any(ctx.needs_input_grad[:3]):
                of_states = gradients_of_states(gradients, states, mixes, cos, sin)
            if any(ctx.needs_input_grad[3:6]):
                of_mixes = gradients_of_mixes(gradients, states, mixes, cos, sin)
        return *of_states, *of_mixes, None, None


def gradients_of_states(gradients: list, states: list, mixes: tuple, cos, sin) -> list[torch.Tensor]:
    """Return the gradients [batch, M, N, D], as views of the layout of projections [batch, N, M, D]."""
    query, key, value = states
    constants = constants_of_expand(query, value, *mixes[:2])
    results = [torch.empty_like(each.transpose(1, 2), memory_format=torch.contiguous_format) for each in states]
    expand_backward_states_kernel[grid_of_expand(query, key, constants)](
        *gradients, *mixes, cos, sin, *results, query.shape[2], key.shape[2], **constants
    )
    return [result.transpose(1, 2) for result in results]


def gradients_of_mixes(gradients: list, states: list, mixes: tuple, cos, sin) -> list[torch.Tensor]:
    """Return the gradients [M, H, P], as sums over parts of the tokens."""
    query, key, value = states
    num_tokens, num_keys = query.shape[2], key.shape[2]
    constants = constants_of_expand(query, value, *mixes[:2], MOST_COLUMNS // 2)  # more would spill registers
    # No tile reaches into the next part: the tokens of a part are a multiple of those of each tile, powers of two.
    tokens_of_tile = max(
        parts_of(constants["COLUMNS"], constants["BLOCK_F"]),
        parts_of(constants["COLUMNS_K"], constants["BLOCK_F"]),
        parts_of(constants["COLUMNS_V"], constants["BLOCK_F_V"]),
    )
    longest = max(num_tokens, num_keys)
    tokens_of_part = max(LEAST_TOKENS_OF_PART, parts_of(longest, MOST_PARTS))
    tokens_of_part = parts_of(tokens_of_part, tokens_of_tile) * tokens_of_tile
    num_parts = parts_of(longest, tokens_of_part)
    num_weights = [mix.numel() for mix in mixes]
    parts = query.new_empty(len(query), num_parts, sum(num_weights), dtype=torch.float32)
    expand_backward_alpha_kernel[3 * constants["P"], num_parts, len(query)](
        *gradients, *states, cos, sin, parts, num_tokens, num_keys, tokens_of_part,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], num_stages=2, **constants,
    )  # fmt: skip
    sums = parts.sum((0, 1)).split(num_weights)
    return [each.view_as(mix).to(mix.dtype) for each, mix in zip(sums, mixes)]


def differentiable_gradients_of_expand(gradient, states, alpha, rotation: Rotation) -> tuple:
    """Return both gradients by PyTorch, which can differentiate them again."""
    gradient = gradient.unflatten(1, (-1, alpha.shape[-1]))  # [batch, N, P, H, D]
    if rotation is not None:
        cos, sin = (table.to(gradient.dtype).unsqueeze(1) for table in rotation)
        one, two = gradient.chunk(2, dim=-1)
        gradient = gradient * cos + torch.cat((two, -one), dim=-1) * sin
    of_states = torch.einsum("bnphd,mhp->bmnd", gradient, alpha.to(gradient.dtype))
    return of_states, torch.einsum("bnphd,bmnd->mhp", gradient, states).to(alpha.dtype)


def expand(states: tuple, mixes: tuple, rotation: Rotation = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return virtual queries, keys and values [batch, H or G, N * P or K * P, D], of ones [batch, M, N or K, D].

    `mixes` are alpha of each, [M, H or G, P], which may be a slice of its heads H or G. Virtual token (n, p) of head h
    is T_p sum_m alpha[m, h, p] states[m, n] (values are not rotated), in the dtype of the states. The dtypes of alpha
    and of the tables may differ from it."""
    states = [each if each.stride(-1) == 1 else each.contiguous() for each in states]
    cos, sin = (None, None) if rotation is None else (table.contiguous() for table in rotation)
    virtual = Expand.apply(*states, *(mix.contiguous() for mix in mixes), cos, sin)
    return tuple(each.transpose(1, 2) for each in virtual)


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


# Decode: attend with one new token over base keys and values


# A tile of scores has so many rows (h, i, j) and keys.
SCORE_ROWS, SCORE_KEYS = 64, 64
NORM_BLOCK = 256
# So many programs sum values: about two for each of the 132 multiprocessors of an H100. The number does not depend on
# the GPU, so neither does the sum.
VALUE_PROGRAMS = 264
MOST_FEATURES = 128


def kernels_decode(query: torch.Tensor, q_mix: torch.Tensor) -> bool:
    """Return whether `decode` takes a query [batch, H, 1, head_dim]: in half precision, without gradients.

    In float32 no tensor core computes its products. Heads longer than `MOST_FEATURES` would spill registers. Compiled
    code decodes by PyTorch's operations, because no GPU has run these kernels in it."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return query.dtype != torch.float32 and query.shape[-1] <= MOST_FEATURES and kernels_take(query, q_mix)


def decode(query, key, value, mask, scaling: float, q_mix, k_mix, v_mix, collapse, rotation: Rotation) -> torch.Tensor:
    """Return the output [batch, 1, H, head_dim] of one new token by four kernels, a sum and a cast.

    `MixedHeads.attend_new_token` defines it, and names the arguments with their shapes. The collapse is "per_head",
    and keys and values have the dtype of the query.

    Let r[h, i, j] = T_j^T T_i sum_m alpha_Q[m, h, i] query[m], for query pseudo-head i and key pseudo-head j of head h
    in group g. The kernels compute, each with all keys in parallel:

        scores   s[h, i, j, k] = r[h, i, j] . sum_m alpha_K[m, g, j] key[m, k]
        norms    n[h, i] = log(sum_jk exp(s[h, i, j, k]))
        shares   w[h, m, k] = sum_j alpha_V[m, g, j] sum_i R[h, i] exp(s[h, i, j, k] - n[h, i])
        parts    sum_k w[h, m, k] value[m, k], over chunks of keys; the output is their sum"""
    batch, num_heads, _, head_dim = query.shape
    num_groups, num_keys = key.shape[1:3]
    value_dim = value.shape[-1]
    size = collapse.shape[1]
    rows = num_heads * size**2
    tiles = parts_of(num_keys, SCORE_KEYS)
    tiles_of_chunk = parts_of(tiles, max(1, VALUE_PROGRAMS // (num_groups * batch)))
    chunks = parts_of(tiles, tiles_of_chunk)

    query = query.contiguous()
    mask = mask.expand(batch, num_heads, -1, -1)
    q_mix, k_mix, v_mix, collapse = (weight.contiguous() for weight in (q_mix, k_mix, v_mix, collapse))
    cos, sin = (None, None) if rotation is None else (table.contiguous() for table in rotation)
    # Rows of whole tiles are aligned, and kernels need no bound in them.
    scores = query.new_empty(batch, rows, tiles * SCORE_KEYS, dtype=torch.float32)
    tops, sums = query.new_empty(2, batch, rows, tiles, dtype=torch.float32)
    norms = query.new_empty(batch, num_heads, size, dtype=torch.float32)
    shares = query.new_empty(batch, num_heads, num_groups, tiles * SCORE_KEYS)
    parts = query.new_empty(batch, chunks * num_groups, num_heads, value_dim, dtype=torch.float32)

    sizes = {"H": num_heads, "G": num_groups, "KEYS": SCORE_KEYS}
    with on_device_of(query):
        scores_kernel[tiles, parts_of(rows, SCORE_ROWS), batch](
            query, key, mask, q_mix, k_mix, cos, sin, scores, tops, sums, num_keys, scaling,
            *key.stride(), *mask.stride(), **sizes, P=size, F=head_dim // 2, ROWS=SCORE_ROWS,
            BLOCK_H=power_of_two(num_heads, 16), BLOCK_F=power_of_two(head_dim // 2, 16),
        )  # fmt: skip
        norms_kernel[(batch * num_heads * size,)](tops, sums, norms, size * tiles, BLOCK=NORM_BLOCK)
        shares_kernel[tiles, num_heads, batch](
            scores, norms, v_mix, collapse, shares,
            **sizes, P=size, BLOCK_P=power_of_two(size, 16), BLOCK_G=power_of_two(num_groups, 16),
        )  # fmt: skip
        parts_kernel[chunks, num_groups, batch](
            shares, value, parts, num_keys, tiles, tiles_of_chunk, *value.stride(),
            **sizes, D=value_dim, BLOCK_H=power_of_two(num_heads, 16), BLOCK_D=power_of_two(value_dim, 16),
        )  # fmt: skip
    return parts.sum(1).to(value.dtype).unsqueeze(1)


@jit(do_not_specialize=["num_keys", "mask_b", "mask_h", "mask_i", "mask_k"])  # these change with each token
def scores_kernel(
    query, key, mask, q_mix, k_mix, cos, sin, scores, tops, sums, num_keys, scaling,
    key_b, key_m, key_k, key_d,  # strides of key [batch, G, K, head_dim]
    mask_b, mask_h, mask_i, mask_k,  # strides of mask [batch, H, P, K * P]
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, F: tl.constexpr,  # F = head_dim / 2
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Write scores [batch, H * P * P, tiles * KEYS]; for each tile, the maximum and the sum of exponentials.

    The latter are [batch, H * P * P, tiles]. Scores of keys that the mask hides are the least number, as in
    `masked_softmax`, and those behind the last key are -inf."""
    tile = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # (h, i, j)
    exists = row < H * P * P
    h = row // (P * P)
    i = row // P % P
    j = row % P
    k = tile * KEYS + tl.arange(0, KEYS)
    f = tl.arange(0, BLOCK_F)
    is_key = k < num_keys

    # Two halves of r[h, i, j]: RoPE rotates feature f with f + F.
    m = tl.arange(0, BLOCK_H)
    mix = tl.load(
        q_mix + (m[None] * H + h[:, None]) * P + i[:, None], mask=exists[:, None] & (m < H)[None], other=0.0
    ).to(query.dtype.element_ty)
    source = query + (batch * H + m)[:, None] * (2 * F) + f[None]
    is_state = (m < H)[:, None] & (f < F)[None]
    first = tl.dot(mix, tl.load(source, mask=is_state, other=0.0), input_precision="ieee")
    second = tl.dot(mix, tl.load(source + F, mask=is_state, other=0.0), input_precision="ieee")
    if cos is not None:
        # T_j^T T_i rotates by i - j positions.
        at = tl.abs(i - j)[:, None] * (2 * F) + f[None]
        c = tl.load(cos + at, mask=(f < F)[None], other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=(f < F)[None], other=0.0).to(tl.float32)
        s = tl.where((i < j)[:, None], -s, s)
        first, second = first * c - second * s, second * c + first * s
    first = first.to(key.dtype.element_ty)
    second = second.to(key.dtype.element_ty)

    keys = key + batch * key_b + k.to(tl.int64)[None] * key_k + f[:, None] * key_d
    weights = k_mix + h // (H // G) * P + j
    is_key_feature = (f < F)[:, None] & is_key[None]
    total = tl.zeros((ROWS, KEYS), tl.float32)
    for _ in range(G):
        product = tl.dot(first, tl.load(keys, mask=is_key_feature, other=0.0), input_precision="ieee")
        later = tl.load(keys + F * key_d, mask=is_key_feature, other=0.0)
        product = tl.dot(second, later, product, input_precision="ieee")
        total += tl.load(weights, mask=exists, other=0.0).to(tl.float32)[:, None] * product
        keys += key_m
        weights += G * P

    total *= scaling
    least = -3.4028234663852886e38  # `torch.finfo(torch.float32).min`
    place = batch * mask_b + h[:, None] * mask_h + i[:, None] * mask_i + (k[None] * P + j[:, None]) * mask_k
    seen = tl.load(mask + place, mask=exists[:, None] & is_key[None], other=0)
    if mask.dtype.element_ty == tl.int1:
        total = tl.where(seen, total, least)
    else:
        total = tl.maximum(total + seen.to(tl.float32), least)
    total = tl.where(is_key[None], total, float("-inf"))
    top = tl.max(total, 1)
    place = batch * (H * P * P) + row
    num_tiles = tl.num_programs(0)
    tl.store(scores + place[:, None] * (num_tiles * KEYS) + k[None], total, mask=exists[:, None])
    tl.store(tops + place * num_tiles + tile, top, mask=exists)
    tl.store(sums + place * num_tiles + tile, tl.sum(tl.exp(total - top[:, None]), 1), mask=exists)


@jit(do_not_specialize=["size"])
def norms_kernel(tops, sums, norms, size, BLOCK: tl.constexpr):
    """Write the norms [batch * H * P] of P * tiles = `size` maxima and sums each."""
    i = tl.program_id(0).to(tl.int64)
    top = float("-inf")
    total = 0.0
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tile_top = tl.load(tops + i * size + place, mask=place < size, other=float("-inf"))
        tile_sum = tl.load(sums + i * size + place, mask=place < size, other=0.0)
        higher = tl.maximum(top, tl.max(tile_top))
        total = total * tl.exp(top - higher) + tl.sum(tile_sum * tl.exp(tile_top - higher))
        top = higher
    tl.store(norms + i, top + tl.log(total))


@jit
def shares_kernel(
    scores, norms, v_mix, collapse, shares, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Write shares [batch, H, G, tiles * KEYS], each program for one head and one tile of keys."""
    h = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64) * H + h
    num_keys = tl.num_programs(0) * KEYS
    k = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    j = tl.arange(0, BLOCK_P)
    m = tl.arange(0, BLOCK_G)
    total = tl.zeros((BLOCK_P, KEYS), tl.float32)
    for i in range(P):
        place = (head * P + i) * P + j
        score = tl.load(scores + place[:, None] * num_keys + k[None], mask=(j < P)[:, None], other=float("-inf"))
        total += tl.load(collapse + h * P + i).to(tl.float32) * tl.exp(score - tl.load(norms + head * P + i))
    weights = v_mix + (m[:, None] * G + h // (H // G)) * P + j[None]
    mix = tl.load(weights, mask=(m < G)[:, None] & (j < P)[None], other=0.0).to(tl.float32)
    mixed = tl.dot(mix, total, input_precision="ieee")
    target = shares + (head * G + m)[:, None] * num_keys + k[None]
    tl.store(target, mixed.to(shares.dtype.element_ty), mask=(m < G)[:, None])


@jit(do_not_specialize=["num_keys", "num_tiles", "tiles_of_chunk"])
def parts_kernel(
    shares, value, parts, num_keys, num_tiles, tiles_of_chunk,
    value_b, value_m, value_k, value_d,  # strides of value [batch, G, K, D]
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write parts [batch, chunks * G, H, D], each program for one chunk of keys of one cached head."""
    chunk = tl.program_id(0)
    m = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    first = chunk * tiles_of_chunk
    total = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for tile in range(first, tl.minimum(first + tiles_of_chunk, num_tiles)):
        k = tile * KEYS + tl.arange(0, KEYS)
        source = shares + ((batch * H + h) * G + m)[:, None] * (num_tiles * KEYS) + k[None]
        share = tl.load(source, mask=(h < H)[:, None], other=0.0)
        source = value + batch * value_b + m.to(tl.int64) * value_m + k.to(tl.int64)[:, None] * value_k
        states = tl.load(source + d[None] * value_d, mask=(k < num_keys)[:, None] & (d < D)[None], other=0.0)
        total = tl.dot(share, states, total, input_precision="ieee")
    place = ((batch * tl.num_programs(0) + chunk) * G + m) * H + h
    tl.store(parts + place[:, None] * D + d[None], total, mask=(h < H)[:, None] & (d < D)[None])
