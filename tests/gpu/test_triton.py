"""Run triton_checks.py on a GPU or in Triton's interpreter, and compile the Triton kernels without a GPU."""

import importlib.util
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch

import gpu_kernels
from common.command_io import ROOT
from gpu_kernels import decode_triton, mix_heads_triton
from modeling_iha.interleaving import IHAWeights


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the triton package is not installed"
)
# What a block may use at most on an A100, H100 and B200.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@needs_triton
@pytest.mark.parametrize(
    "some",
    [
        ["-k", "refusals or (decoding and 4-2 and 17) or (mix_heads and small and not 64)"],
        pytest.param([], marks=pytest.mark.slow),
    ],
)
def test_kernels_match_their_definition(some):
    # Triton takes the interpreter or the GPU when it is imported.
    interpret = "0" if torch.cuda.is_available() else "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/triton_checks.py", *some]
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    checks = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert checks.returncode == 0, checks.stdout + checks.stderr


def test_package_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("mix_heads_triton", "decode_triton"):  # imported anew; both are put back at the end
        monkeypatch.delitem(sys.modules, f"gpu_kernels.{name}")
        monkeypatch.setattr(gpu_kernels, name, importlib.import_module(f"gpu_kernels.{name}"))
    assert gpu_kernels.decode_triton.triton is None
    with pytest.raises(ImportError, match="The Triton kernels need Triton"):
        gpu_kernels.mix_heads_triton.mix_heads(torch.zeros(1, 2, 3, 4), torch.zeros(2, 3))


@needs_triton
def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="run on a GPU, and the states are on the CPU"):
        mix_heads_triton.mix_heads(torch.zeros(1, 2, 3, 4), torch.zeros(2, 3))


class Compiler:
    """Compile a kernel for a compute capability where a launch would run it.

    It knows what a launch knows of its arguments: pointers and divisors of 16.
    """

    def __init__(self, kernel, capability, compiled):
        self.kernel, self.capability, self.compiled = kernel, capability, compiled

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, num_warps, num_stages=3, **constants):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import mangle_type

        values = dict(zip(self.kernel.arg_names, arguments)) | constants
        special = {parameter.name for parameter in self.kernel.params if not parameter.do_not_specialize}
        constant = {
            name: x
            for name, x in values.items()
            if name in constants or x is None or (type(x) is int and x == 1 and name in special)
        }
        names = self.kernel.arg_names
        signature = {name: "constexpr" if name in constant else mangle_type(values[name]) for name in names}
        aligned = [
            index
            for index, name in enumerate(names)
            if name not in constant
            and (isinstance(values[name], torch.Tensor) or (type(values[name]) is int and values[name] % 16 == 0))
            and name in special
        ]
        attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
        with redirect_stdout(StringIO()) as log:
            binary = triton.compile(
                ASTSource(self.kernel, signature, constant, attributes),
                target=GPUTarget("cuda", self.capability, 32),
                options={"num_warps": num_warps, "num_stages": num_stages},
            )
        registers, spilled = (
            int(re.search(rf"(\d+) {what}", log.getvalue())[1]) for what in ("registers", "bytes spill stores")
        )
        self.compiled.append((self.kernel.__name__, binary.asm["ptx"], registers, binary.metadata.shared, spilled))


@pytest.fixture
def compiles_anew(monkeypatch, tmp_path):
    """Let Triton compile with the log of ptxas, which a cached kernel has not."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)


@needs_triton
def test_sums_of_all_lengths_share_a_binary(monkeypatch, compiles_anew):
    """Compile the gradient of a matrix where a program sums one token and 17."""
    compiled = []
    compiler = Compiler(mix_heads_triton._matrix_gradient, 90, compiled)
    monkeypatch.setattr(mix_heads_triton, "_matrix_gradient", compiler)
    monkeypatch.setattr(mix_heads_triton, "_multiply", lambda x, *_: x)
    for split in (1, 17):
        states = torch.empty(1, split * mix_heads_triton.PROGRAMS // 16 * 16, 2, 16, device="meta")
        mix_heads_triton.mix_heads(states, torch.empty(2, 2, device="meta", requires_grad=True)).sum().backward()
    assert len(compiled) == 2 and len({ptx for _, ptx, *_ in compiled}) == 1


@needs_triton
@pytest.mark.parametrize(
    "dtype,capability,heads,groups,pseudo,head_dim",
    [(torch.bfloat16, 90, 20, 20, 20, 128), (torch.bfloat16, 80, 32, 8, 4, 64), (torch.float16, 100, 9, 3, 2, 64)],
)
def test_kernels_compile_for_a_gpu(dtype, capability, heads, groups, pseudo, head_dim, monkeypatch, compiles_anew):
    """Compile every kernel, as it is launched, by Triton and ptxas: on tensor cores, with hardly a spill."""

    def meta(*sizes, dtype=torch.float32):
        return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    compiled = []
    for module, names in ((mix_heads_triton, ("_product", "_matrix_gradient")), (decode_triton, ["_decode_forward"])):
        for name in names:
            monkeypatch.setattr(module, name, Compiler(getattr(module, name), capability, compiled))
    query, key = (meta(2, count, 48, head_dim, dtype=dtype) for count in (heads, groups))
    mixing, table = [meta(n, n, pseudo) for n in (heads, groups, groups)], meta(pseudo, head_dim)
    mix_heads_triton.expand(query, mixing[0], (table, table)).sum().backward()
    virtual = meta(2, 48 * pseudo, heads, head_dim, dtype=dtype)
    mix_heads_triton.collapse(virtual, meta(heads, pseudo), pseudo).sum().backward()
    weights = IHAWeights(*mixing, meta(heads, pseudo), (table, table))
    decode_triton.decode_attention(query[:, :, -1:], key, key, weights, 0.1)
    assert [name for name, *_ in compiled] == [*["_product", "_product", "_matrix_gradient"] * 2, "_decode_forward"]
    for name, ptx, registers, shared, spilled in compiled:
        assert registers <= 255 and shared <= SHARED_MEMORY[capability] and "mma" in ptx, name
        assert spilled < 64 or name == "_decode_forward", (name, spilled)
