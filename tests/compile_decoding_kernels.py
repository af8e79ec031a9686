"""Compile the Triton kernels of one new token for an NVIDIA GPU, which need not be there, and print what they take.

python tests/compile_decoding_kernels.py '[90, [[20, 20, 4, 128, true]]]': architecture, and shapes of heads, groups,
P, head_dim and whether pseudo-heads rotate. The kernels are launched as on a GPU, but Triton stops after compiling
them. It needs TRITON_DUMP_PTXAS_LOG=1 and TRITON_ALWAYS_COMPILE=1. The output is JSON.
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

from triton_kernels import decode


NUM_KEYS = 2049


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


def launch(num_heads: int, groups: int, num_pseudo_heads: int, head_dim: int, rotates: bool) -> None:
    """Call `decode` on tensors without data."""
    with torch.device("meta"):
        query = torch.empty(1, num_heads, 1, head_dim, dtype=torch.bfloat16)
        key, value = torch.empty(2, 1, groups, NUM_KEYS, head_dim, dtype=torch.bfloat16)
        mask = torch.empty(1, 1, num_pseudo_heads, NUM_KEYS * num_pseudo_heads, dtype=torch.bool)
        sizes = (num_heads, groups, groups)
        mixes = [torch.empty(size, size, num_pseudo_heads, dtype=torch.bfloat16) for size in sizes]
        collapse = torch.empty(num_heads, num_pseudo_heads, dtype=torch.bfloat16)
        rotation = tuple(torch.empty(2, num_pseudo_heads, head_dim, dtype=torch.bfloat16)) if rotates else None
    decode(query, key, value, mask, head_dim**-0.5, *mixes, collapse, rotation)


def kernels(architecture: int, shapes: list) -> list[dict]:
    """Return the registers, the bytes of spilled ones and of shared memory of each kernel, for each shape."""
    found = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        self.device_caches.clear()  # or a kernel that two shapes share would be compiled once
        log = io.StringIO()
        with redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        registers, spilled = (
            [int(each) for each in re.findall(pattern, log.getvalue())]
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill (?:stores|loads)")
        )
        found.append(
            {
                **{"kernel": self.fn.__name__, "shape": shape, "architecture": architecture},
                **{"registers": max(registers), "spilled": sum(spilled), "shared": kernel.metadata.shared},
            }
        )

    driver.set_active(Driver(architecture))
    JITFunction.run = compile_only
    for shape in shapes:
        launch(*shape)
    return found


print(json.dumps(kernels(*json.loads(sys.argv[1]))))
