"""Count and time what a layer costs before anything is computed: operators, Python calls, and launches of kernels.

A GPU waits for these where tokens are few. The models are so small (16 layers of width 64, 8 tokens) that on a CPU
they take most of the time. The base is a plain Llama. "kernels" takes the way through the Triton kernels, whose
launches do nothing here: on a machine with a GPU each takes about 13 us more (estimated, not measured by this script).

example: python -m research.benchmarks.overhead --repeats 60
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from iha.errors import run_cli
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, interleaving, triton_kernels
from research.benchmarks.harness import reported, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, tokens=None, repeats=60)

TOKENS = 8
LAYERS = 16
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
KERNELS = ", kernels"


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).train()


def iha(kind: str) -> IHAForCausalLM:
    torch.manual_seed(0)
    return IHAForCausalLM(IHAConfig(**SIZES, attention_kinds=kind, num_pseudo_heads=2)).train()


# The first is the base. A window that is longer than the input computes no less, but takes the way of a window.
FORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "Llama": llama,
    "interleaved, P = 2": lambda: interleave_heads(llama(), 2),
    "interleaved, P = 2, with a window": lambda: interleave_heads(llama(), 2, sliding_window=1024),
    "all mha": lambda: iha("mha"),
    "all iha, P = 2": lambda: iha("iha"),
}
WITH_KERNELS = ("interleaved, P = 2", "all iha, P = 2")


def forward(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(TOKENS)[None], use_cache=False).logits


def inference(model: torch.nn.Module) -> None:
    with torch.no_grad():
        forward(model)


def step(model: torch.nn.Module) -> None:
    forward(model).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


PASSES = {"inference": inference, "forward": forward, "training step": step}


# Launches that do nothing


class Launch:
    """Take the place of a kernel, and write its name into a list when it is launched."""

    def __init__(self, name: str, launched: list[str]):
        self.name, self.launched = name, launched

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *_, **__: self.launched.append(self.name)


@contextmanager
def launches() -> Iterator[list[str]]:
    """Let the model take the Triton kernels, which compute nothing. Yield the names of those that are launched."""
    launched: list[str] = []
    kernels = {name: Launch(name, launched) for name in vars(triton_kernels) if name.endswith("_kernel")}
    with (
        mock.patch.multiple(triton_kernels, **kernels),
        mock.patch.object(interleaving, "kernels_take", lambda *_: True),
    ):
        yield launched


def way_of(form: str):
    """Return a context in which the model of a form takes kernels if the form is named so."""
    return launches() if form.endswith(KERNELS) else nullcontext([])


# Counts


class Operators(TorchDispatchMode):
    """Count the operators that PyTorch dispatches."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


def count_operators(run: Callable[[], object]) -> int:
    with Operators() as mode:
        run()
    return mode.count


def count_calls(run: Callable[[], object]) -> int:
    """Return how many Python functions are called."""
    count = 0

    def profile(frame, event: str, argument) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def counts(model: torch.nn.Module, form: str) -> dict[str, float]:
    """Return operators, calls and launches for each layer, including what is outside of the layers."""
    found = {}
    with way_of(form) as launched:
        for name in ("inference", "training step"):
            PASSES[name](model)  # the first call makes what later ones find
            found[f"operators, {name}"] = count_operators(lambda: PASSES[name](model)) / LAYERS
            found[f"calls, {name}"] = count_calls(lambda: PASSES[name](model)) / LAYERS
            launched.clear()
            PASSES[name](model)
            found[f"launches, {name}"] = len(launched) / LAYERS
    return found


# Times


def cpu_seconds(run: Callable, model: torch.nn.Module) -> float:
    start = time.process_time_ns()
    run(model)
    return (time.process_time_ns() - start) / 1e9


def measure(name: str, models: dict[str, torch.nn.Module], repeats: int) -> dict:
    """Return the row of a pass: CPU seconds of a layer, and the median of their ratios to those of the base.

    The forms take turns, so that what else the machine does weighs on all of them."""
    seconds = {form: [] for form in models}
    gc.collect()
    gc.disable()
    for _ in range(repeats):
        for form, model in models.items():
            with way_of(form):
                seconds[form].append(cpu_seconds(PASSES[name], model) / LAYERS)
    gc.enable()
    base, *others = models
    pairs = {form: zip(seconds[form], seconds[base]) for form in others}
    return {
        "pass": name,
        "seconds": {form: statistics.median(times) for form, times in seconds.items()},
        "ratios": {f"{form} / {base}": statistics.median(a / b for a, b in each) for form, each in pairs.items()},
    }


def build() -> dict[str, torch.nn.Module]:
    """Return the models of all forms. Those with kernels are those without."""
    models = {form: make() for form, make in FORMS.items()}
    return models | {form + KERNELS: models[form] for form in WITH_KERNELS}


def main() -> None:
    args = PARSER.parse_args()
    torch.set_num_threads(1)
    models = build()
    of_forms = {form: counts(model, form) for form, model in models.items()}
    for form, found in of_forms.items():
        print(f"{form}: " + "; ".join(f"{name} {count:.1f}" for name, count in found.items()), flush=True)
    rows = reported(measure(name, models, args.repeats) for name in PASSES)
    write(args.out, "overhead", rows, tokens=TOKENS, layers=LAYERS, counts=of_forms)


if __name__ == "__main__":
    run_cli(main)
