"""What the Triton kernels ask of a GPU, by Triton's compiler and ptxas; it needs no GPU. For each shape (bfloat16, 8
heads in 8 groups, with documents) and compute capability: registers of a thread, shared bytes of a block and spilled
bytes of a thread. "forward / flash, by arithmetic" predicts the time of the forward over that of FlashAttention on
expanded tensors, on the rates of an H200's data sheet. No GPU has run the kernels.

A shape that is in the results is not compiled again: the command goes on where it stopped. Results of other versions
or kernels are refused.

example: python -m benchmarks.gpu_resources --capabilities 90 --pseudo-heads 4 --head-dims 64
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from benchmarks.harness import RESULTS
from command_io import UserError, file_sha256, read_json, run_cli, write_json
from gpu_kernels import fused_triton
from gpu_kernels.ahead_of_time import KERNELS, Shape, compile_kernels


HEADS = 8
# Multiply-adds a second of an H200: dense bfloat16 on tensor cores, float32 outside of them.
TENSOR_RATE, SCALAR_RATE = 495e12, 33.5e12


def predicted_ratio(pseudo_heads: int) -> float:
    """Time of the fused forward over that of its two products. For each tile of queries, every entry of the virtual
    keys and values is mixed by a product that pads a chunk of pseudo-heads to 8 and the groups to 16, and that of the
    keys also turned; all is taken one after the other. FlashAttention has the products only, without the rows that
    fill up a chunk."""
    chunk = fused_triton.chunk_of(pseudo_heads)
    rows = chunk * fused_triton.tokens_of(fused_triton.QUERY_TILE, pseudo_heads)
    filling = math.ceil(pseudo_heads / chunk) * chunk / pseudo_heads
    side = fused_triton.MIN_SIDE
    products, mixing = 2 * rows / TENSOR_RATE, 2 * math.ceil(HEADS / side) * side * max(8, chunk) / chunk / TENSOR_RATE
    return (products * filling**2 + (mixing + 2 / SCALAR_RATE) * filling) / products


def measure(pseudo_heads: int, head_dim: int, capability: int) -> dict:
    shape = Shape(torch.bfloat16, pseudo_heads, head_dim, heads=HEADS, groups=HEADS, documents=True)
    kernels = {
        name: {key: value for key, value in kernel._asdict().items() if key != "ptx"}
        for name, kernel in compile_kernels(shape, capability).items()
    }
    ratio = {"forward / flash, by arithmetic": predicted_ratio(pseudo_heads)}
    return {"capability": capability, "pseudo_heads": pseudo_heads, "head_dim": head_dim, "kernels": kernels, **ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100], help="(80 90 100)")
    parser.add_argument("--pseudo-heads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="(1 2 4 8 16 32)")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], help="(64 128)")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu", help="directory of the results")
    args = parser.parse_args()
    if fused_triton.triton is None:
        raise UserError("The compiler of the kernels is missing: `pip install triton`.")
    path = args.out / "resources.json"
    sources = {Path(module.__file__).name: file_sha256(module.__file__) for module in KERNELS}
    versions = {"torch": torch.__version__, "triton": fused_triton.triton.__version__, **sources}
    table = read_json(path) if path.exists() else {"heads": HEADS, "dtype": "bfloat16", **versions, "rows": []}
    if different := [name for name, version in versions.items() if table.get(name) != version]:
        raise UserError(f"{path} was written with another version of {', '.join(different)}: remove it first.")
    keys = ("capability", "pseudo_heads", "head_dim")
    for pseudo_heads in args.pseudo_heads:
        for head_dim in args.head_dims:
            for capability in args.capabilities:
                if (capability, pseudo_heads, head_dim) in (tuple(row[key] for key in keys) for row in table["rows"]):
                    continue
                start = time.monotonic()
                row = measure(pseudo_heads, head_dim, capability)
                table["rows"].append(row)
                write_json(path, table)
                spilled = max(kernel["spilled_bytes"] for kernel in row["kernels"].values())
                setting = ", ".join(f"{key} {row[key]}" for key in keys)
                print(f"{setting}: at most {spilled} bytes spilled; {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    run_cli(main)
