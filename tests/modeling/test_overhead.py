"""Count what a layer costs before anything is computed: operators of PyTorch, and launches of kernels.

A GPU waits for these where tokens are few. The models are tiny, and the base is a plain Llama. "kernels" takes the way
through the Triton kernels, whose launches do nothing here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, interleaving, triton_kernels


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


PASSES = {"inference": inference, "training step": step}


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
        mock.patch.multiple(interleaving, kernels_take=lambda *_: True, kernels_are_faster=lambda *_: True),
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


def counts(model: torch.nn.Module, form: str) -> dict[str, float]:
    """Return operators and launches for each layer, including what is outside of the layers."""
    found = {}
    with way_of(form) as launched:
        for name in PASSES:
            PASSES[name](model)  # the first call makes what later ones find
            found[f"operators, {name}"] = count_operators(lambda: PASSES[name](model)) / LAYERS
            launched.clear()
            PASSES[name](model)
            found[f"launches, {name}"] = len(launched) / LAYERS
    return found


# For each layer: the most operators beyond those of a plain Llama, forward without
# gradients and in a training step. These were counted with PyTorch 2.13, and are a little higher than what was found.
MOST_OPERATORS = {
    "interleaved, P = 2": (42, 104),
    "interleaved, P = 2, with a window": (42, 104),
    "all mha": (0, 0),
    "all iha, P = 2": (64, 136),
    "interleaved, P = 2, kernels": (17, 50),
    "all iha, P = 2, kernels": (17, 50),
}


def test_a_layer_costs_few_operators_and_launches():
    models = {form: make() for form, make in FORMS.items()}
    models |= {form + KERNELS: models[form] for form in WITH_KERNELS}
    plain = counts(models.pop("Llama"), "Llama")
    for form, model in models.items():
        found = counts(model, form)
        for place, name in enumerate(PASSES):
            operators = found[f"operators, {name}"] - plain[f"operators, {name}"]
            assert operators <= MOST_OPERATORS[form][place], (form, name, operators)
        launches = found["launches, inference"], found["launches, training step"]
        assert launches == ((2, 5) if form.endswith(KERNELS) else (0, 0)), form
