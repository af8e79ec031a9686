"""Share what benchmarks and studies need: layers of one size, and what a table records of its origin."""

import os
import platform
import re
import shlex
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from transformers.cache_utils import Cache

from iha.files import current_commit
from modeling_iha import IHAConfig, IHAModel


CONTEXT = 2**20  # the longest context of the models: more tokens than any benchmark takes


class Attention(torch.nn.Module):
    """Run the attention modules of a model of width 512, with 8 heads and one layer.

    `overrides` change fields of the config."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        **overrides,
    ):
        super().__init__()
        sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 8}
        one = {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
        config = IHAConfig.from_preset("tiny", **{**sizes, **one, **overrides})
        self.model = IHAModel._from_config(config, dtype=dtype).eval()

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

        def run(hidden_states: torch.Tensor) -> torch.Tensor:
            for module in modules:
                hidden_states, _ = module(hidden_states, tables, masks[module.mask_name], cache=cache)
            return hidden_states

        return run

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the output [batch, N, 512], with masks and rotary tables made here."""
        return self.attend(hidden_states)(hidden_states)


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
