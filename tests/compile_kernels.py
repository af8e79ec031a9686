"""Compile the Triton kernels for an NVIDIA GPU, which need not be there, and print what they take as JSON.

python tests/compile_kernels.py '[90, [["mixing", "bfloat16", 20, 20, 4, 128]]]' takes the architecture, and names of
launches with their arguments. The launches run as on a GPU, but Triton stops after compiling. It needs
TRITON_DUMP_PTXAS_LOG=1 and TRITON_ALWAYS_COMPILE=1. `compiled_kernels` in helpers.py starts it, and
`python -m pytest tests/modeling/test_triton_kernels.py -k table -s` prints the table of kernels/README.md.
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

from triton_kernels import collapse, decode, expand


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


def mixing(dtype: str, num_heads: int, groups: int, num_pseudo_heads: int, head_dim: int) -> None:
    """Call `expand` and `collapse`, forward and backward."""
    counts = (num_heads, groups, groups)
    states = [torch.empty(1, 64, count, head_dim, dtype=getattr(torch, dtype)).transpose(1, 2) for count in counts]
    mixes = [torch.empty(count, count, num_pseudo_heads) for count in counts]
    inputs = [tensor.requires_grad_() for tensor in (*states, *mixes)]
    virtual = expand(states, mixes, tuple(torch.empty(2, num_pseudo_heads, head_dim)))
    torch.autograd.grad(virtual, inputs, [torch.empty_like(each) for each in virtual])
    weight = torch.empty(num_heads, num_pseudo_heads, requires_grad=True)
    output = virtual[0].transpose(1, 2).contiguous()
    collapsed = collapse(output, weight)
    torch.autograd.grad(collapsed, (output, weight), torch.empty_like(collapsed))


def decoding(num_heads: int, groups: int, num_pseudo_heads: int, head_dim: int, rotates: bool | None) -> None:
    """Call `decode` on tensors without data, or for paired heads if `rotates` is `None`."""
    with torch.device("meta"):
        query = torch.empty(1, num_heads, 1, head_dim, dtype=torch.bfloat16)
        key, value = torch.empty(2, 1, groups, NUM_KEYS, head_dim, dtype=torch.bfloat16)
        mask = torch.empty(1, 1, num_pseudo_heads, NUM_KEYS * num_pseudo_heads, dtype=torch.bool)
        sizes = (num_heads, groups, groups)
        mixing = [torch.empty(size, size, num_pseudo_heads, dtype=torch.bfloat16) for size in sizes]
        mixing += [torch.empty(num_heads, num_pseudo_heads, dtype=torch.bfloat16)]
        mixing += [tuple(torch.empty(2, num_pseudo_heads, head_dim, dtype=torch.bfloat16)) if rotates else None]
    decode(query, key, value, mask, head_dim**-0.5, *([] if rotates is None else mixing))


LAUNCHES = {"mixing": mixing, "decoding": decoding}


def kernels(architecture: int, calls: list) -> list[dict]:
    """Return the registers of each kernel, and the bytes of spilled ones and of shared memory, for each call."""
    found = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        self.device_caches.clear()  # or a kernel that two calls share would be compiled once
        log = io.StringIO()
        with redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        registers = re.findall(r"Used (\d+) registers", log.getvalue())
        spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
        found.append(
            {
                "kernel": self.fn.__name__,
                "call": call,
                "registers": max(map(int, registers)),
                "spilled": sum(map(int, spilled)),
                "shared": kernel.metadata.shared,
            }
        )

    driver.set_active(Driver(architecture))
    JITFunction.run = compile_only
    for call in calls:
        launch, *arguments = call
        LAUNCHES[launch](*arguments)
    return found


print(json.dumps(kernels(*json.loads(sys.argv[1]))))
