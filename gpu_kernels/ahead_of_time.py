# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels ask of a GPU, without one: every kernel as its launcher launches it, on meta tensors,
through Triton's compiler and ptxas."""

from __future__ import annotations

import io
import re
from contextlib import ExitStack, redirect_stdout
from typing import NamedTuple
from unittest import mock

import torch

from gpu_kernels import decode_triton, fused_triton
from modeling_iha.collapse_first import IHAWeights


class Shape(NamedTuple):
    """Inputs of the kernels."""

    dtype: torch.dtype
    pseudo_heads: int
    head_dim: int
    heads: int = 8
    groups: int = 4
    length: int = 50  # decides nothing but whether it is 1, a constant to Triton
    window: int | None = None
    rotated: bool = True
    documents: bool = False


class Compiled(NamedTuple):
    """A kernel of one GPU."""

    ptx: str
    registers: int  # of a thread
    shared_bytes: int  # of a block
    spilled_bytes: int  # of a thread, stored


class Compiler:
    """Stands in for a kernel: compiles it for `capability`, such as 90, where a launch would run it."""

    def __init__(self, kernel, capability: int, compiled: dict[str, Compiled]):
        self.kernel, self.capability, self.compiled = kernel, capability, compiled

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, num_warps: int, num_stages: int, **constants) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import mangle_type

        values = dict(zip(self.kernel.arg_names, arguments)) | constants
        specialized = {parameter.name for parameter in self.kernel.params if not parameter.do_not_specialize}
        constant = {
            name: x
            for name, x in values.items()
            if name in constants or x is None or type(x) is int and x == 1 and name in specialized
        }
        signature = {
            name: "constexpr" if name in constant else mangle_type(values[name]) for name in self.kernel.arg_names
        }
        source, target = ASTSource(self.kernel, signature, constant), GPUTarget("cuda", self.capability, 32)
        with redirect_stdout(io.StringIO()) as log:
            options = {"num_warps": num_warps, "num_stages": num_stages}
            binary = triton.compile(source, target=target, options=options)
        registers, spilled = (
            re.search(rf"(\d+) {what}", log.getvalue()) for what in ("registers", "bytes spill stores")
        )
        self.compiled[self.kernel.__name__] = Compiled(
            binary.asm["ptx"], int(registers[1]), binary.metadata.shared, int(spilled[1])
        )


KERNELS = {
    fused_triton: (
        *("_mix_rotate_forward", "_mix_rotate_backward"),
        *("_attention_forward", "_attention_backward_queries", "_attention_backward_keys"),
    ),
    decode_triton: ("_decode_forward",),
}


def compile_kernels(shape: Shape, capability: int) -> dict[str, Compiled]:
    """Every kernel for inputs of this shape and GPUs of this compute capability, by name."""
    import triton

    def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    heads, groups, pseudo = shape.heads, shape.groups, shape.pseudo_heads
    q = meta(2, heads, shape.length, shape.head_dim, dtype=shape.dtype)
    k, v = (meta(2, groups, shape.length, shape.head_dim, dtype=shape.dtype) for _ in range(2))
    mixing = [meta(heads, heads, pseudo), *(meta(groups, groups, pseudo) for _ in range(2)), meta(heads, pseudo)]
    table = meta(pseudo, shape.head_dim // 2)
    rotation = (table, table) if shape.rotated else None
    documents = meta(2, shape.length, dtype=torch.int32) if shape.documents else None
    compiled = {}
    with ExitStack() as patches:
        for module, names in KERNELS.items():
            stand_ins = {name: Compiler(getattr(module, name), capability, compiled) for name in names}
            patches.enter_context(mock.patch.multiple(module, **stand_ins))
        patches.enter_context(mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True))
        # Without a cache: a kernel that was compiled before has no log.
        patches.enter_context(mock.patch.object(triton.knobs.compilation, "always_compile", True))
        fused_triton.mix_rotate(q, mixing[0], rotation).sum().backward()
        weights = IHAWeights(*mixing, rotation)
        fused_triton.fused_attention(q, k, v, weights, 0.1, shape.window, documents).sum().backward()
        decode_triton.decode_attention(q[:, :, -1:], k, v, weights, 0.1, shape.window, documents)
    return compiled
