"""The Triton kernels: triton_checks.py on a GPU or in Triton's interpreter, and compilation for a GPU without one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_kernels import fused_triton as triton_kernels
from modeling_iha.collapse_first import IHAWeights


ROOT = Path(__file__).parents[1]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the triton package is not installed"
)
# A block on Hopper may use this much shared memory.
SHARED_MEMORY = 227 * 1024


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


@needs_triton
def test_kernels_match_their_definition():
    # Triton takes the interpreter or the GPU when it is imported.
    interpret = "0" if torch.cuda.is_available() else "1"
    checks = run("-m", "pytest", "-p", "no:cacheprovider", "tests/triton_checks.py", TRITON_INTERPRET=interpret)
    assert checks.returncode == 0, checks.stdout + checks.stderr


def test_package_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import torch; from gpu_kernels.fused_triton import mix_rotate; "
        "mix_rotate(torch.zeros(1, 2, 3, 4), torch.zeros(2, 2, 2))"
    )
    error = run("-c", code).stderr
    assert "ImportError: The Triton kernels need Triton" in error, error


@needs_triton
def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="run on a GPU, and states is on the CPU"):
        triton_kernels.mix_rotate(torch.zeros(1, 2, 3, 4), torch.zeros(2, 2, 2))


@needs_triton
@pytest.mark.parametrize(
    "dtype,pseudo,head_dim,length,options",
    [
        (torch.bfloat16, 4, 128, 50, {"window": 7, "rotation": True, "documents": True}),
        (torch.float32, 3, 20, 50, {}),
        # Triton makes constants of arguments that are 1.
        (torch.float16, 1, 8, 1, {"window": 1}),
    ],
    ids=str,
)
def test_kernels_compile_for_hopper(dtype, pseudo, head_dim, length, options, monkeypatch, tmp_path):
    """Every kernel, as it is launched, through Triton's compiler and ptxas."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = {}
    names = [name for name in vars(triton_kernels) if name.endswith(("_forward", "_backward", "_queries", "_keys"))]
    names.remove("_virtual_backward")
    for name in names:
        monkeypatch.setattr(triton_kernels, name, Compiler(getattr(triton_kernels, name), compiled))

    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    q = meta(2, 8, length, head_dim, dtype=dtype)
    k, v = meta(2, 4, length, head_dim, dtype=dtype), meta(2, 4, length, head_dim, dtype=dtype)
    mixing = meta(8, 8, pseudo), meta(4, 4, pseudo), meta(4, 4, pseudo), meta(8, pseudo)
    table = meta(pseudo, head_dim // 2)
    rotation = (table, table) if "rotation" in options else None
    documents = meta(2, length, dtype=torch.int32) if "documents" in options else None
    triton_kernels.mix_rotate(q, mixing[0], rotation).sum().backward()
    triton_kernels.fused_attention(
        q, k, v, IHAWeights(*mixing, rotation), 0.1, options.get("window"), documents
    ).sum().backward()

    assert sorted(compiled) == sorted(names)
    for name, kernel in compiled.items():
        assert kernel.asm["cubin"] and kernel.metadata.shared <= SHARED_MEMORY, name
        on_tensor_cores = "mma" in kernel.asm["ptx"]
        assert on_tensor_cores == ("attention" in name and dtype != torch.float32), name


class Compiler:
    """Stands in for a kernel: compiles it for sm_90 instead of launching it."""

    def __init__(self, kernel, compiled):
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, num_warps, **constants):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import mangle_type

        values = dict(zip(self.kernel.arg_names, arguments)) | constants
        constant = {
            name: x for name, x in values.items() if name in constants or x is None or type(x) is int and x == 1
        }
        signature = {
            name: "constexpr" if name in constant else mangle_type(values[name]) for name in self.kernel.arg_names
        }
        source = ASTSource(self.kernel, signature, constant)
        target = GPUTarget("cuda", 90, 32)
        self.compiled[self.kernel.__name__] = triton.compile(source, target=target, options={"num_warps": num_warps})
