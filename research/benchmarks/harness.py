"""Share what benchmarks and studies need: layers of one size, times, peaks of memory, and tables."""

import gc
import multiprocessing
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from iha.files import current_commit, write_json
from modeling_iha import IHAConfig, IHAForCausalLM, IHAModel, virtual_tokens
from modeling_iha.modeling_iha import mask_name


# Imported once for all processes that measure memory.
PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "matplotlib.figure"]
CONTEXT = 2**20  # the longest context of the models: more tokens than any benchmark takes


class Attention(torch.nn.Module):
    """Run the attention modules of a model of width 512, with 8 heads and one layer.

    `overrides` change fields of the config. With `checkpointing` the backward pass runs each layer again."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
        attn_implementation: str = "sdpa",
        **overrides,
    ):
        super().__init__()
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 8}
        one = {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
        config = IHAConfig.from_preset("tiny", **{**sizes, **one, **overrides})
        self.model = IHAModel._from_config(config, dtype=dtype, attn_implementation=attn_implementation).eval()
        self.checkpointing = checkpointing

    def leaves(self) -> list[torch.nn.Parameter]:
        return [parameter for layer in self.model.layers for parameter in layer.self_attn.parameters()]

    def attend(self, states: torch.Tensor, cache: Cache | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that applies the attention of every layer in turn to hidden states [batch, N, 512].

        Masks and rotary tables are made beforehand, for the shape of `states`."""
        past = 0 if cache is None else cache.get_seq_length()
        positions = torch.arange(past, past + states.shape[1], device=states.device)[None]
        masks = self.model.create_masks(states, None, cache, None)
        tables = self.model.rotary_emb.tables(states, positions)

        modules = [layer.self_attn for layer in self.model.layers]
        calls: list[Callable] = list(modules)
        if self.checkpointing:
            calls = [partial(checkpoint, module, use_reentrant=False) for module in modules]

        def run(hidden_states: torch.Tensor) -> torch.Tensor:
            for module, call in zip(modules, calls):
                hidden_states, _ = call(hidden_states, tables, masks[mask_name(module)], cache=cache)
            return hidden_states

        return run

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the output [batch, N, 512], with masks and rotary tables made here."""
        return self.attend(hidden_states)(hidden_states)


def expanded() -> mock._patch:
    """Return a context in which "iha" layers decode from rebuilt virtual tokens, however many are cached."""
    return mock.patch.object(virtual_tokens, "takes_new_token", lambda *_: False)


def causal_lm(config: IHAConfig) -> IHAForCausalLM:
    return IHAForCausalLM._from_config(config).eval()


def inference(function: Callable, *inputs) -> Callable[[], None]:
    """Return a function of no arguments that runs `function(*inputs)` without gradients."""

    @torch.no_grad()
    def run() -> None:
        function(*inputs)

    return run


def training(
    function: Callable, inputs: list[torch.Tensor], parameters: list[torch.Tensor] = ()
) -> Callable[[], None]:
    """Return a function of no arguments that runs a forward and a backward to the inputs and parameters."""
    inputs = [states.requires_grad_() for states in inputs]

    def run() -> None:
        output = function(*inputs)
        torch.autograd.grad(output, [*inputs, *parameters], torch.ones_like(output))

    return run


def wall_seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def medians(
    forms: dict[str, Callable[[], None]], repeats: int, timer: Callable[[Callable], float] = wall_seconds
) -> dict[str, float]:
    """Return the median of the seconds that each function takes by `timer`, in `repeats` interleaved runs.

    One run before them warms up, unless there is a single run."""
    seconds = {name: [] for name in forms}
    for repeat in range(repeats + (repeats > 1)):
        for name, function in forms.items():
            elapsed = timer(function)
            if repeat or repeats == 1:
                seconds[name].append(elapsed)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _memory(field: str) -> int:
    """Return a figure of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _extra_bytes(prepare: Callable, sizes: tuple, small: tuple) -> int:
    torch.set_num_threads(1)
    prepare(*small)()
    gc.collect()  # TRL's loss puts a model into a cycle: freed later, it would hide the peak of the next one
    function = prepare(*sizes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before = _memory("VmRSS")
    function()
    return max(0, _memory("VmHWM") - before)


def extra_bytes(prepare: Callable, sizes: tuple, small: tuple) -> int:
    """Return the bytes that the function `prepare(*sizes)` takes at its peak beyond what its process held before.

    It runs in a new process (on Linux), after `prepare(*small)()`. `prepare` is a module's function, to be pickled."""
    # malloc takes blocks of this size and larger from the system, so that memory freed earlier hides no peak.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_extra_bytes, prepare, sizes, small).result()


def ratios(values: dict[str, float], base: str, what: str = "") -> dict[str, float]:
    """Return each value over that of `base`, or nothing if that is zero. `what` opens the name of each ratio."""
    if not values[base]:
        return {}
    others = {name: value for name, value in values.items() if name != base}
    return {f"{what}{name} / {base}": value / values[base] for name, value in others.items()}


def reported(rows: Iterable[dict]) -> list[dict]:
    """Return the rows as a list, and print a line of progress as soon as each is measured.

    They are measured on one thread, and draw the same in every run.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kept = []
    for row in rows:
        kept.append(row)
        setting = ", ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, dict))
        measured = "; ".join(f"{name} {value:.3g}" for name, value in {**row["seconds"], **row["ratios"]}.items())
        print(f"{setting}: {measured}", flush=True)
    return kept


def processor() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def environment(command: str) -> dict:
    """Return the command, the machine and the versions that a table records."""
    return {
        "command": f"python -m {command}",
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "commit": current_commit(),
        **versions(),
    }


def shown_command(words: Iterable[str]) -> str:
    """Return a command line to record. It shortens absolute paths to their names, so that no table names a machine."""
    return shlex.join(map(_without_directory, words))


def _without_directory(word: str) -> str:
    """Return a word of a command line, without the directory of an absolute path: "/a/b" or "--option=/a/b"."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def write(out: Path, name: str, rows: list[dict], benchmark: str = "", **setting) -> None:
    """Write {name}.json to the directory `out`.

    Args:
        rows: the measurements; report.py says what a row holds.
        benchmark: its module, where the file has another name.
        setting: what all rows have in common. Command, machine and versions are added.
    """
    command = shown_command([f"research.benchmarks.{benchmark or name}", *sys.argv[1:]])
    path = out / f"{name}.json"
    write_json(path, {**environment(command), **setting, "rows": rows})
    print(f"Wrote {path}", flush=True)
