# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Compute steps of interleaving.py on a GPU, each in one pass over virtual tokens, by Triton kernels.

`expand` mixes, rotates and interleaves heads (IHA, Algorithm 1, steps 2 and 3), and `collapse` is step 5. `decode`
attends with one new token. The PyTorch code of interleaving.py and pairing.py defines all three. It computes where
`kernels_are_faster`, `kernels_take` or `kernels_decode` is false. The environment variable `IHA_TRITON_KERNELS` leaves
all kernels out ("0"), or takes also those that no GPU has found faster ("all").

The symbols of virtual_tokens.py are P (pseudo-heads), M (heads in) and H (heads out, here also for keys and values).
D is head_dim and F is D / 2. Names in capitals are constants of a compiled kernel.

RoPE turns feature f of a head together with feature f + F. A head is therefore held as two tiles, one for each half,
and the rotation is a sum of tiles. The columns of a tile are the features of some tokens, and its rows are heads.
`tl.dot` takes at least 16 rows, and sizes that are powers of two.

The kernels that mix sum in float32 and round once, to the dtype of the states. Sums over tokens have a fixed order, so
that every gradient is the same in each run.
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
WANTED = os.environ.get("IHA_TRITON_KERNELS")

# The tokens of a call from which on `expand` and `collapse` pay. An H200 ran them when `expand` was three launches:
# 8,192 tokens with P = 4 took 0.092 ms in place of 1.240, and with gradients 0.308 in place of 2.578. In a decoder of
# 1B with 4,096 tokens a forward took 39.6 ms in place of 34.7, and a training step 0.98 of the time without kernels.
LEAST_TOKENS, LEAST_TOKENS_WITH_GRADIENTS = (0, 0) if WANTED == "all" else (8192, 4096)
# Off, because no GPU has run the present form. An earlier one for mixed heads, of four launches in place of two, was
# faster on an H200: a new token after 65,536 took 0.75 (P = 2) and 0.73 (P = 20) of the time of a model of ordinary
# attention, and without the kernels 1.82 and 1.40.
DECODES_MIXED_HEADS = DECODES_PAIRED_HEADS = DECODES_COMPILED = WANTED == "all"

# A tile of `expand` has at most this many columns, and a tile of `collapse` this many tokens. The sizes depend on the
# shape only: tuning them on each machine would delay the first call, and change results from run to run.
MOST_COLUMNS, COLLAPSED_TOKENS = 128, 16
# The gradient of alpha is a sum over parts, of at least so many tokens each and at most so many for each row. The
# numbers do not depend on the GPU, so neither does the sum.
LEAST_TOKENS_OF_PART, MOST_PARTS = 32, 256

MOST_HEADS = {torch.float32: 32, torch.float16: 64, torch.bfloat16: 64}

Rotation = tuple[torch.Tensor, torch.Tensor] | None  # (cos, sin), each [P, D] with two equal halves


def kernels_are_faster(num_tokens: int) -> bool:
    """Return whether to mix the heads of so many tokens by kernels: where a GPU found them faster.

    In compiled code they are taken at every length: a comparison would make a graph for each answer."""
    if torch.compiler.is_compiling():
        return True
    return num_tokens >= (LEAST_TOKENS_WITH_GRADIENTS if torch.is_grad_enabled() else LEAST_TOKENS)


def kernels_take(states: torch.Tensor, weights: torch.Tensor) -> bool:
    """Return whether the kernels run on states [..., D] with alpha or R: on an NVIDIA GPU from Ampere on.

    A kernel reads plain memory, which subclasses of tensors (DTensor, FakeTensor in an export) and the states of a
    `torch.func` transform lack. With more heads `expand` would spill registers."""
    if WANTED == "0" or triton is None or states.device.type != "cuda" or torch.version.hip is not None:
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
def load_states(
    states, row, token, feature, exists, m, stride_b, stride_m, stride_n, M: tl.constexpr, F: tl.constexpr
):  # fmt: skip
    """Return the two halves of states [b, m, n] of a row, for the heads m and the columns of a tile."""
    source = states + row * stride_b + m.to(tl.int64)[:, None] * stride_m + (token * stride_n + feature)[None]
    return load_halves(source, (m < M)[:, None] & exists[None], F)


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
        # [BLOCK_M, columns]
        first, second = load_states(states, row, token, feature, exists, m, stride_b, stride_m, stride_n, M, F)
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
        first, second = load_states(states, row, token, feature, exists, m, stride_b, stride_m, stride_n, M, F)
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


def expand_without_gradients(query, key, value, q_mix, k_mix, v_mix, cos, sin) -> tuple[torch.Tensor, ...]:
    """Return virtual queries, keys and values [batch, N * P or K * P, H or G, D]."""
    states, mixes = (query, key, value), (q_mix, k_mix, v_mix)
    constants = constants_of_expand(query, value, q_mix, k_mix)
    virtual = [
        each.new_empty(len(each), each.shape[2] * mix.shape[2], mix.shape[1], each.shape[3])
        for each, mix in zip(states, mixes)
    ]
    with on_device_of(query):
        expand_kernel[grid_of_expand(query, key, constants)](
            *states, *mixes, cos, sin, *virtual, query.shape[2], key.shape[2],
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], **constants,
        )  # fmt: skip
    return tuple(virtual)


class Expand(torch.autograd.Function):
    """Differentiate `expand`."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return expand_without_gradients(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        *states, q_mix, k_mix, v_mix, cos, sin = ctx.saved_tensors
        mixes = (q_mix, k_mix, v_mix)
        if torch.is_grad_enabled():  # with create_graph=True
            rotation = None if cos is None else (cos, sin)
            kinds = zip(gradients, states, mixes, (rotation, rotation, None))
            of_states, of_mixes = zip(*(differentiable_gradients_of_expand(*kind) for kind in kinds))
            return *of_states, *of_mixes, None, None
        gradients = tuple(gradient.contiguous() for gradient in gradients)
        of_states = of_mixes = (None, None, None)
        with on_device_of(gradients[0]):
            if any(ctx.needs_input_grad[:3]):
                of_states = gradients_of_states(gradients, states, mixes, cos, sin)
            if any(ctx.needs_input_grad[3:6]):
                of_mixes = gradients_of_mixes(gradients, states, mixes, cos, sin)
        return *of_states, *of_mixes, None, None


def gradients_of_states(gradients: tuple, states: list, mixes: tuple, cos, sin) -> tuple:
    """Return the gradients [batch, M, N, D], as views of the layout of projections [batch, N, M, D]."""
    query, key, value = states
    constants = constants_of_expand(query, value, *mixes[:2])
    results = [torch.empty_like(each.transpose(1, 2), memory_format=torch.contiguous_format) for each in states]
    expand_backward_states_kernel[grid_of_expand(query, key, constants)](
        *gradients, *mixes, cos, sin, *results, query.shape[2], key.shape[2], **constants
    )
    return tuple(result.transpose(1, 2) for result in results)


def gradients_of_mixes(gradients: tuple, states: list, mixes: tuple, cos, sin) -> tuple:
    """Return the gradients [M, H, P], as sums over parts of the tokens."""
    query, key, value = states
    num_tokens, num_keys = query.shape[2], key.shape[2]
    constants = constants_of_expand(query, value, mixes[0], mixes[1], MOST_COLUMNS // 2)  # more would spill registers
    # No tile reaches into the next part: the tokens of a part are a multiple of those of each tile, powers of two.
    tiles = ("COLUMNS", "BLOCK_F"), ("COLUMNS_K", "BLOCK_F"), ("COLUMNS_V", "BLOCK_F_V")
    tokens_of_tile = max([parts_of(constants[columns], constants[block]) for columns, block in tiles])
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
    return tuple(each.view_as(mix).to(mix.dtype) for each, mix in zip(sums, mixes))


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
    states = tuple(each if each.stride(-1) == 1 else each.contiguous() for each in states)
    cos, sin = (None, None) if rotation is None else (table.contiguous() for table in rotation)
    function = Expand.apply if torch.is_grad_enabled() else expand_without_gradients
    virtual = function(*(*states, *(mix.contiguous() for mix in mixes), cos, sin))
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


# So many programs share the keys: one for each of the 132 multiprocessors of an H100, whose registers hold no second
# one. The number does not depend on the GPU, so neither does the sum.
DECODE_PROGRAMS = 132
# A program of the last sum has so many features, and reads so many rows at once.
SUMMED_FEATURES, SUMMED_ROWS = 32, 16
MOST_FEATURES = 128
LEAST = tl.constexpr(torch.finfo(torch.float32).min) if triton else None  # the score of a hidden key


def kernels_decode(query: torch.Tensor, is_on: bool) -> bool:
    """Return whether `decode` takes a query [batch, H, 1, head_dim]: in half precision, without gradients.

    `is_on` is DECODES_MIXED_HEADS or DECODES_PAIRED_HEADS. In float32 no tensor core computes its products. Heads
    longer than `MOST_FEATURES` would spill registers."""
    if not is_on or (torch.compiler.is_compiling() and not DECODES_COMPILED):
        return False
    if torch.is_grad_enabled() or query.dtype == torch.float32 or query.shape[-1] > MOST_FEATURES:
        return False
    return kernels_take(query, query[0])  # in place of weights, of which the number of heads counts


def decode(query, key, value, mask, scaling, q_mix=None, k_mix=None, v_mix=None, collapse=None, rotation=None):
    """Return the output [batch, 1, H, head_dim] of one new token by two kernels.

    `MixedHeads.attend_new_token` defines it, and names the arguments with their shapes; the collapse is "per_head".
    Without mixing and collapse it is `PairedHeads.attend_new_token`, for a mask of virtual heads. Keys and values have
    the dtype of the query.

    Let r[h, i, j] = T_j^T T_i sum_m alpha_Q[m, h, i] query[m], for query pseudo-head i and key pseudo-head j of head h
    in group g. As in flash decoding, each program has some rows (h, i, j) and a chunk of the keys k, and finds

        scores   s[h, i, j, k] = r[h, i, j] . sum_m alpha_K[m, g, j] key[m, k]
        tops     t[h, i, j] = max_k s[h, i, j, k]
        sums     sum_k exp(s[h, i, j, k] - t[h, i, j])
        parts    sum_km exp(s[h, i, j, k] - t[h, i, j]) alpha_V[m, g, j] value[m, k]

    of which scores are not written. The second kernel sums over chunks and j, and collapses the pseudo-heads i.
    For paired heads h is one of H / P virtual heads, and its mixing is 1 where m = i * (H / P) + h, else 0."""
    batch, num_heads_in, _, head_dim = query.shape
    num_groups_in, num_keys = key.shape[1:3]
    value_dim, num_pseudo_heads = value.shape[-1], mask.shape[-2]
    shrinking = num_pseudo_heads if q_mix is None else 1  # P heads become one virtual head
    num_heads, num_groups = num_heads_in // shrinking, num_groups_in // shrinking
    num_rows = num_heads * num_pseudo_heads**2
    # A tile of scores has so many rows (h, i, j) and keys. Where it has 32, larger ones would spill registers.
    tile = 64 if head_dim == 64 or (head_dim == 128 and q_mix is not None) else 32
    row_tiles, key_tiles = parts_of(num_rows, tile), parts_of(num_keys, tile)
    tiles_of_chunk = parts_of(key_tiles, max(1, DECODE_PROGRAMS // (row_tiles * batch)))
    chunks = parts_of(key_tiles, tiles_of_chunk)

    query = query.contiguous()
    mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).expand(batch, num_heads, -1, -1)
    *mixes, collapse = [each if each is None else each.contiguous() for each in (q_mix, k_mix, v_mix, collapse)]
    cos, sin = (None, None) if rotation is None else (table.contiguous() for table in rotation)
    tops, sums = query.new_empty(2, batch, chunks, num_rows, dtype=torch.float32)
    parts = query.new_empty(batch, chunks, num_rows, value_dim, dtype=torch.float32)
    output = query.new_empty(batch, 1, num_heads_in, value_dim)
    sizes = {"H": num_heads, "P": num_pseudo_heads, "D": value_dim}
    with on_device_of(query):
        chunks_kernel[chunks, row_tiles, batch](
            query, key, value, mask, *mixes, cos, sin, tops, sums, parts, num_keys, tiles_of_chunk, scaling,
            *key.stride(), *value.stride(), *mask.stride()[:3], **sizes,
            H_IN=num_heads_in, G_IN=num_groups_in, G=num_groups, F=head_dim // 2, ROWS=tile, KEYS=tile,
            BLOCK_H=power_of_two(num_heads_in, 16), BLOCK_F=power_of_two(head_dim // 2, 16),
            BLOCK_D=power_of_two(value_dim, 16), num_warps=8,
        )  # fmt: skip
        sum_kernel[num_heads, parts_of(value_dim, SUMMED_FEATURES), batch](
            tops, sums, parts, collapse, output, chunks, **sizes, FEATURES=SUMMED_FEATURES, ROWS=SUMMED_ROWS
        )
    return output


@jit
def mixing_of_pairs(weights, m, column, p, H: tl.constexpr, P: tl.constexpr):
    """Return alpha[m, column, p], or where there is none that of paired heads. Places broadcast."""
    if weights is None:
        shares = tl.where(m == p * H + column, 1.0, 0.0)
    else:
        shares = tl.load(weights + (m * H + column) * P + p)
    return shares


@jit
def query_of_pairs(
    query, q_mix, cos, sin, batch, h, i, j,
    H: tl.constexpr, P: tl.constexpr, H_IN: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return r[h, i, j] of some rows, [ROWS, 2 * BLOCK_F]: both halves of the features, one after the other."""
    f = tl.arange(0, BLOCK_F)
    head = tl.arange(0, BLOCK_H)
    shares = mixing_of_pairs(q_mix, tl.minimum(head, H_IN - 1)[None], h[:, None], i[:, None], H, P).to(dtype)
    source = query + (batch * H_IN + head)[:, None] * (2 * F) + f[None]
    is_state = (head < H_IN)[:, None] & (f < F)[None]
    first = tl.dot(shares, tl.load(source, mask=is_state, other=0.0), input_precision="ieee")
    second = tl.dot(shares, tl.load(source + F, mask=is_state, other=0.0), input_precision="ieee")
    if cos is not None:
        # T_j^T T_i rotates by i - j positions, and RoPE feature f with f + F.
        at = tl.abs(i - j)[:, None] * (2 * F) + f[None]
        c = tl.load(cos + at, mask=(f < F)[None], other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=(f < F)[None], other=0.0).to(tl.float32)
        s = tl.where((i < j)[:, None], -s, s)
        first, second = first * c - second * s, second * c + first * s
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (ROWS, 2 * BLOCK_F)).to(dtype)


@jit
def scores_of_keys(
    rows, key, k_mix, g, j, k, is_key, key_m, key_k, key_d,
    P: tl.constexpr, G_IN: tl.constexpr, G: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Return sum_m alpha_K[m, g, j] r[h, i, j] . key[m, k] for some rows and keys, [ROWS, KEYS], not yet scaled."""
    column = tl.arange(0, 2 * BLOCK_F)
    feature = column // BLOCK_F * F + column % BLOCK_F
    keys = key + k.to(tl.int64)[None] * key_k + feature[:, None] * key_d
    exists = (column % BLOCK_F < F)[:, None] & is_key[None]
    scores = tl.zeros((ROWS, KEYS), tl.float32)
    for m in range(G_IN):
        product = tl.dot(rows, tl.load(keys, mask=exists, other=0.0), input_precision="ieee")
        scores += mixing_of_pairs(k_mix, m, g, j, G, P).to(tl.float32)[:, None] * product
        keys += key_m
    return scores


@jit
def hide_scores(scores, mask, h, i, j, k, is_row, is_key, mask_h, mask_i, P: tl.constexpr):
    """Return scores of which those of hidden keys are LEAST, as in `masked_softmax`, and others than keys -inf."""
    of_scores = mask + h[:, None].to(tl.int64) * mask_h + i[:, None] * mask_i + j[:, None]
    seen = tl.load(of_scores + k.to(tl.int64)[None] * P, mask=is_key[None], other=0)
    if mask.dtype.element_ty == tl.int1:
        scores = tl.where(seen, scores, LEAST)
    else:
        scores = tl.maximum(scores + seen.to(tl.float32), LEAST)
    return tl.where(is_row[:, None] & is_key[None], scores, float("-inf"))


@jit
def add_values(
    part, weights, value, v_mix, g, j, k, d, is_key, value_m, value_k, value_d,
    P: tl.constexpr, D: tl.constexpr, G_IN: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Return part + sum_km weights[h, i, j, k] alpha_V[m, g, j] value[m, k], [ROWS, BLOCK_D]."""
    values = value + k.to(tl.int64)[:, None] * value_k + d[None] * value_d
    for m in range(G_IN):
        shares = mixing_of_pairs(v_mix, m, g, j, G, P).to(tl.float32)
        states = tl.load(values, mask=is_key[:, None] & (d < D)[None], other=0.0)
        part = tl.dot((weights * shares[:, None]).to(states.dtype), states, part, input_precision="ieee")
        values += value_m
    return part


# These arguments change with each token: Triton would compile a kernel for each kind of value.
@jit(do_not_specialize=["num_keys", "tiles_of_chunk", "mask_b", "mask_h", "mask_i"])
def chunks_kernel(
    query, key, value, mask, q_mix, k_mix, v_mix, cos, sin, tops, sums, parts, num_keys, tiles_of_chunk, scaling,
    key_b, key_m, key_k, key_d, value_b, value_m, value_k, value_d,  # strides of key and value [batch, G, K, head_dim]
    mask_b, mask_h, mask_i,  # strides of mask [batch, H, P, K * P]
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
    H_IN: tl.constexpr, G_IN: tl.constexpr, G: tl.constexpr, F: tl.constexpr,  # F = head_dim / 2
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write tops and sums [batch, chunks, H * P * P] and parts [batch, chunks, H * P * P, D] of a chunk of keys."""
    chunk = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < H * P * P
    h = tl.minimum(row, H * P * P - 1) // (P * P)  # rows behind the last compute like rows of the last head
    g = h // (H // G)
    i = row // P % P
    j = row % P
    d = tl.arange(0, BLOCK_D)

    rows = query_of_pairs(
        query, q_mix, cos, sin, batch, h, i, j, H, P, H_IN, F, ROWS, BLOCK_H, BLOCK_F, value.dtype.element_ty
    )
    top = tl.full((ROWS,), LEAST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    part = tl.zeros((ROWS, BLOCK_D), tl.float32)
    first_tile = chunk * tiles_of_chunk
    for tile in range(first_tile, tl.minimum(first_tile + tiles_of_chunk, tl.cdiv(num_keys, KEYS))):
        k = tile * KEYS + tl.arange(0, KEYS)
        is_key = k < num_keys
        scores = scores_of_keys(
            rows, key + batch * key_b, k_mix, g, j, k, is_key, key_m, key_k, key_d, P, G_IN, G, F, ROWS, KEYS, BLOCK_F
        )
        scores = hide_scores(scores * scaling, mask + batch * mask_b, h, i, j, k, is_row, is_key, mask_h, mask_i, P)
        # A softmax in steps: what was summed under a lower top shrinks.
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        top = higher
        total = total * shrink + tl.sum(weights, 1)
        part = add_values(
            part * shrink[:, None], weights, value + batch * value_b, v_mix, g, j, k, d, is_key,
            value_m, value_k, value_d, P, D, G_IN, G,
        )  # fmt: skip

    place = (batch * tl.num_programs(0) + chunk) * (H * P * P) + row
    tl.store(tops + place, top, mask=is_row)
    tl.store(sums + place, total, mask=is_row)
    tl.store(parts + place[:, None] * D + d[None], part, mask=is_row[:, None] & (d < D)[None])


@jit(do_not_specialize=["num_chunks"])
def sum_kernel(
    tops, sums, parts, collapse, output, num_chunks,
    H: tl.constexpr, P: tl.constexpr, D: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write sum_i R[h, i] of the pseudo-heads i of a head, or each pseudo-head where paired heads have no R."""
    h = tl.program_id(0)
    d = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    batch = tl.program_id(2).to(tl.int64)
    collapsed = tl.zeros((FEATURES,), tl.float32)
    for i in range(P):
        top = float("-inf")
        total = 0.0
        part = tl.zeros((FEATURES,), tl.float32)
        for start in range(0, num_chunks * P, ROWS):
            chunk_and_j = start + tl.arange(0, ROWS)
            exists = chunk_and_j < num_chunks * P
            row = (h * P + i) * P + chunk_and_j % P
            place = (batch * num_chunks + chunk_and_j // P) * (H * P * P) + row
            row_tops = tl.load(tops + place, mask=exists, other=float("-inf"))
            row_sums = tl.load(sums + place, mask=exists, other=0.0)
            row_parts = tl.load(parts + place[:, None] * D + d[None], mask=exists[:, None] & (d < D)[None], other=0.0)
            higher = tl.maximum(top, tl.max(row_tops, 0))
            weight = tl.exp(row_tops - higher)
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.sum(weight * row_sums, 0)
            part = part * shrink + tl.sum(weight[:, None] * row_parts, 0)
            top = higher
        total = tl.where(top > LEAST, total, 1.0)  # as the plain formula sums values where all are hidden
        if collapse is None:
            target = output + ((batch * P + i) * H + h) * D + d
            tl.store(target, (part / total).to(output.dtype.element_ty), mask=d < D)
        else:
            collapsed += tl.load(collapse + h * P + i).to(tl.float32) * (part / total)
    if collapse is not None:
        tl.store(output + (batch * H + h) * D + d, collapsed.to(output.dtype.element_ty), mask=d < D)
