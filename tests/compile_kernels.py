"""Compile the Triton kernels for an NVIDIA GPU, which need not be there, and print what they take as JSON.

TRITON_DUMP_PTXAS_LOG=1 python tests/compile_kernels.py '[90, "bfloat16", 20, 4, 128]' takes the architecture, the
dtype, heads, P and head_dim. It launches the kernels as on a GPU, forward and backward, but Triton only compiles them.
"""

import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


# The file alone: the package imports for seconds what the kernels do not need.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "modeling_iha"))

from triton_kernels import collapse, expand


class Driver:
    """Stand in for Triton's driver of a GPU."""

    def __init__(self, architecture: int):
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def kernels(architecture: int, dtype: str, num_heads: int, num_pseudo_heads: int, head_dim: int) -> dict[str, dict]:
    """Return the bytes of spilled registers and of shared memory of each kernel."""
    found = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        log = io.StringIO()
        with redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
        registers = re.findall(r"Used (\d+) registers", log.getvalue())
        found[self.fn.__name__] = {
            "registers": max(map(int, registers)),
            "spilled": sum(map(int, spilled)),
            "shared": kernel.metadata.shared,
        }

    driver.set_active(Driver(architecture))
    JITFunction.run = compile_only
    states = torch.empty(1, 64, num_heads, head_dim, dtype=getattr(torch, dtype)).transpose(1, 2).requires_grad_()
    alpha = torch.empty(num_heads, num_heads, num_pseudo_heads, requires_grad=True)
    virtual = expand(states, alpha, tuple(torch.empty(2, num_pseudo_heads, head_dim)))
    torch.autograd.grad(virtual, (states, alpha), torch.empty_like(virtual))
    weight = torch.empty(num_heads, num_pseudo_heads, requires_grad=True)
    collapsed = collapse(virtual, weight)
    torch.autograd.grad(collapsed, (virtual, weight), torch.empty_like(collapsed))
    return found


print(json.dumps(kernels(*json.loads(sys.argv[1]))))
