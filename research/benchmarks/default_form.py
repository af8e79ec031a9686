"""Compare the default of an "iha" layer with Transformers' SDPA on the virtual sequence.

One attention module with the same weights runs a forward pass, a training step (forward and backward), and one token
after N cached ones, of one row and of 16 (batch decoding). It has width 512 and 8 heads of 64. The default takes a
window in blocks and SDPA under a dense mask. One new token meets base keys in the default and virtual keys in SDPA.
Without a window and a cache both are the same.

Idle, the default may take at most 1.05 of SDPA's time, and next to busy processes 1.2: the command fails if it takes
more. Results are kept for each CPU, in default_form/.

example: python -m research.benchmarks.default_form --threads 1 2 8 --busy 0 2 --dtypes float32 bfloat16
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from unittest import mock

import torch
from transformers.cache_utils import DynamicCache

from iha.errors import UserError, run_cli
from iha.files import read_json
from modeling_iha import virtual_tokens
from research.benchmarks.harness import (
    Attention,
    expanded,
    inference,
    medians,
    processor,
    reported,
    training,
    wall_seconds,
    write,
)
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, None)
PARSER.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count(), 8], help="numbers of threads")
PARSER.add_argument("--busy", type=int, nargs="+", default=[0, os.cpu_count()], help="numbers of busy processes")
PARSER.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(float32 bfloat16)")
PARSER.add_argument("--cases", nargs="+", help="parts to measure, such as forward or 'batch decoding' (all)")


IDLE_LIMIT = 1.05
BUSY_LIMIT = 1.2
RATIO = "default / sdpa"
# What the runs of a case take together, if they are not fewer than --repeats.
SECONDS = 5
# Part, tokens, pseudo-heads, window in tokens.
CASES = [
    *((part, 1024, 4, 64) for part in ("forward", "training")),
    *(("decoding", tokens, virtual, None) for tokens in (512, 8192) for virtual in (2, 4)),
    *(("batch decoding", tokens, 4, None) for tokens in (8, 64, 512)),
]
# What tells the rows of a CPU apart.
SETTING = ("dtype", "threads", "busy", "pass", "tokens", "pseudo_heads", "window")
# Variables by which PyTorch and oneDNN make as if the CPU had fewer instructions.
ISA_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


@contextlib.contextmanager
def plain_sdpa() -> Iterator[None]:
    """Make dense masks for windows and virtual tokens for one new token."""
    with expanded(), mock.patch.object(virtual_tokens, "needs_no_dense_mask", lambda **_: False):
        yield


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def prepare(module: Attention, states: torch.Tensor, part: str) -> Callable[[], None]:
    if part == "training":
        return training(module, [states.clone()], module.leaves())
    if part == "forward":
        return inference(module, states)
    cache = DynamicCache()
    token = states[:, :1]
    cache.update(*torch.randn(2, len(states), 8, states.shape[1], 64, dtype=states.dtype), 0)

    @torch.no_grad()
    def step() -> None:
        module.attend(token, cache)(token)
        cache.crop(-1)

    return step


def forms(dtype: torch.dtype, part: str, tokens: int, virtual: int, window: int | None) -> dict[str, Callable]:
    """Return the default and SDPA as functions of no arguments."""
    fields = {"num_pseudo_heads": virtual}
    if window is not None:
        fields |= {"layer_types": "sliding_attention", "sliding_window": window}
    modules = {name: Attention(dtype, **fields) for name in ("default", "sdpa")}
    modules["default"].load_state_dict(modules["sdpa"].state_dict())
    states = torch.randn(16 if part == "batch decoding" else 1, tokens, 512, dtype=dtype)
    runs = {name: prepare(module, states, part) for name, module in modules.items()}
    return {"default": runs["default"], "sdpa": plain_sdpa()(runs["sdpa"])}


def measure(dtype: str, threads: int, busy: int, case: tuple, repeats: int) -> dict:
    torch.set_num_threads(threads)
    runs = forms(getattr(torch, dtype), *case)
    with busy_processes(busy):
        once = sum(map(wall_seconds, runs.values()))  # and warms up
        seconds = medians(runs, max(repeats, min(30, int(SECONDS / once))))
    setting = dict(zip(SETTING, (dtype, threads, busy, *case), strict=True))
    return {**setting, "seconds": seconds, "ratios": {RATIO: seconds["default"] / seconds["sdpa"]}, "predicted": {}}


def cpu_name() -> str:
    """Return the name of this CPU and of the instructions that PyTorch uses, as a file name."""
    names = {
        "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    products = [name for name, supported in names.items() if supported]
    words = [processor(), torch.backends.cpu.get_cpu_capability(), *products]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def over_the_limit(rows: list[dict]) -> list[dict]:
    """Return the rows over the limit."""
    return [row for row in rows if row["ratios"][RATIO] > (BUSY_LIMIT if row["busy"] else IDLE_LIMIT)]


def main() -> None:
    """Measure, or raise a `UserError` where the default loses."""
    args = PARSER.parse_args()
    cases = CASES if args.cases is None else [case for case in CASES if case[0] in args.cases]
    path = args.out / "default_form" / f"{cpu_name()}.json"
    rows = read_json(path)["rows"] if path.exists() else []
    measured = []
    settings = product(args.dtypes, dict.fromkeys(args.threads), dict.fromkeys(args.busy), cases)
    for row in reported(measure(dtype, threads, busy, case, args.repeats) for dtype, threads, busy, case in settings):
        rows = [old for old in rows if any(old[key] != row[key] for key in SETTING)] + [row]
        measured.append(row)

    path.parent.mkdir(parents=True, exist_ok=True)
    limits = [f"{name}={os.environ[name]}" for name in ISA_LIMITS if name in os.environ]
    machine = ", ".join([processor(), torch.backends.cpu.get_cpu_capability(), *limits])
    threads = sorted({row["threads"] for row in rows})
    write(path.parent, path.stem, rows, threads=threads, machine=machine, benchmark="default_form")
    if losses := over_the_limit(measured):
        worst = max(losses, key=lambda row: row["ratios"][RATIO])
        raise UserError(
            f"{len(losses)} of {len(measured)} settings take more than {IDLE_LIMIT} of SDPA's time idle or "
            f"{BUSY_LIMIT} next to busy processes; the worst {worst['ratios'][RATIO]:.2f}: "
            f"{ {key: worst[key] for key in SETTING} }."
        )


if __name__ == "__main__":
    run_cli(main)
