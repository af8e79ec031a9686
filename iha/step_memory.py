"""Count the memory that a training step will take.

PyTorch counts: the step runs on a model without data (FakeTensorMode), and the bytes of each tensor count from when it
is made until it is freed.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from modeling_iha import IHAConfig, IHAForCausalLM


class Counter(TorchDispatchMode):
    """Count the bytes of the tensors that are alive, `now`, and the most that ever were, `peak`.

    PyTorch's MemTracker counts the same to the byte, but module by module, and takes a minute for 30 layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: set[int] = set()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result


@contextmanager
def one_document() -> Iterator[None]:
    """Have Transformers take a row without data for one document.

    It takes each for a packed one, and would build its mask [N, N]; nothing public tells it that there is no packing.
    Rows with data, such as those of another thread, are treated the same as before."""
    find = masking_utils.find_packed_sequence_indices

    def find_in_data(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if isinstance(position_ids, FakeTensor) else find(position_ids)

    masking_utils.find_packed_sequence_indices = find_in_data
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


class StepMemory(NamedTuple):
    """Hold the bytes of what stays from step to step, and of a step at its peak, in one process."""

    weights: int
    gradients: int
    optimizer: int
    peak: int


def count_step(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[], None]) -> StepMemory:
    """Count a first step, and then the backward pass of the next, under a FakeTensorMode."""
    counter = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        counter.add(tensor)
    weights = counter.now
    with counter, one_document():
        backward()
        optimizer.step()
        whole = counter.now
        optimizer.zero_grad()
        kept = counter.now
        backward()
    return StepMemory(weights, whole - kept, kept - weights, counter.peak)


def of_training(config: IHAConfig, batch: int, tokens: int, checkpointing: bool) -> StepMemory:
    """Count a step of AdamW on float32 weights, in bfloat16 autocast, with the logits of `batch` rows of `tokens`."""
    with FakeTensorMode():
        model = IHAForCausalLM(config).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        ids = torch.zeros(batch, tokens, dtype=torch.long)

        def backward() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()

        return count_step(model, torch.optim.AdamW(model.parameters()), backward)
