"""What the benchmarks share: layers of one size, interleaved times, peaks of memory, and results as JSON with a plot beside it."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from modeling_iha import IHAConfig, IHAModel  # noqa: E402


RESULTS = Path(__file__).parent / "results"
# Blocks from here on come straight from the system, so that what was freed does not hide in a peak.
MMAP_THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class Attention(torch.nn.Module):
    """The attention modules of a model of width 512 with 8 heads, one for each kind, with their masks and rotary tables."""

    def __init__(self, core: str | None = None, **overrides):
        super().__init__()
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 8}
        config = IHAConfig.from_preset("tiny", **{**sizes, "num_hidden_layers": 1, **overrides})
        self.model = IHAModel._from_config(config, attn_implementation=core).eval()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, N, 512] through the attention of every layer, one after the other."""
        positions = torch.arange(hidden_states.shape[1])[None]
        masks = self.model.create_masks(hidden_states, None, None, positions)
        tables = self.model.rotary_emb.tables(hidden_states, positions)
        for layer in self.model.layers:
            hidden_states = layer.self_attn(hidden_states, tables, masks[layer.geometry], position_ids=positions)[0]
        return hidden_states


def train(attention: torch.nn.Module, hidden_states: torch.Tensor) -> None:
    """A forward and a backward, to the input and every parameter."""
    attention(hidden_states.requires_grad_()).sum().backward()


def medians(forms: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Seconds that each function takes, medians of so many interleaved runs after one that warms up."""
    seconds = {name: [] for name in forms}
    for repeat in range(repeats + 1):
        for name, function in forms.items():
            start = time.perf_counter()
            function()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def extra_bytes(warm_up: Callable, function: Callable) -> int:
    """Bytes that a function takes at its peak beyond what this process holds before, after a small run of the same. It should run in a
    process of its own, see `in_own_process`."""
    warm_up()
    # Not the earlier peak: imports hold more for a moment than they keep.
    before, peak = _memory("VmRSS"), _memory("VmHWM")
    function()
    if _memory("VmHWM") == peak:
        raise RuntimeError("The process held more before the function ran: measure a larger size.")
    return _memory("VmHWM") - before


def in_own_process(script: str, *arguments) -> int:
    """The last number that `python script --one *arguments` prints."""
    command = [sys.executable, script, "--one", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **MMAP_THRESHOLD})
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return int(result.stdout.split()[-1])


def write(name: str, rows: list[dict], panels: dict[str, tuple[str, Callable]], lines: list[str], **setting) -> None:
    """Writes results/{name}.json and results/{name}.png.

    Args:
        rows: one measurement each.
        panels: for each panel of the plot its label on the vertical axis, and (x, y) of a row and a line.
        lines: what is drawn in each panel.
        setting: what all rows have in common; versions and threads are added.
    """
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({**setting, "threads": torch.get_num_threads(), **versions, "rows": rows}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
