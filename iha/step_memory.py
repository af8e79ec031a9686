"""Count the memory that a training step will take.

PyTorch counts: the step runs on a model without data (FakeTensorMode), and the bytes of each tensor count from when it
is made until it is freed. Attention keeps what FlashAttention keeps (iha/counted_attention.py). The model has one
layer of each kind, and the stages of its step (`Stage`) are put together to the step of the whole model, whose layers
of a kind take the same memory.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from iha.counted_adapters import add_adapters
from iha.counted_attention import NAME, of_shared_rows
from iha.without_data import (
    Kept,
    check_can_share_rows,
    choose_layers,
    counting,
    keep_one_of_each,
    row_of_tokens,
    without_data,
)
from modeling_iha.modeling_interleaved import backbone_of


LOSS_TILE = (4096, 32768)  # tokens and entries of the vocabulary whose logits TRL 1.16 computes at a time


class Stage(NamedTuple):
    """Hold by how many bytes a part of a step changes what is alive, and how far that rises above its beginning."""

    change: int
    peak: int


class Counter(TorchDispatchMode):
    """Count the bytes of the tensors that are alive, `now`, and the most that were since a stage began, `peak`.

    PyTorch's MemTracker counts the same to the byte, but module by module, and takes a minute for 30 layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._began = 0
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

    def stage(self) -> Stage:
        """Return the stage that ends now, and begin the next one."""
        ended = Stage(self.now - self._began, self.peak - self._began)
        self._began = self.peak = self.now
        return ended

    def _drop(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            result = grouped_mm(*args, **(kwargs or {}))
        else:
            result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, **kwargs) -> torch.Tensor:
    """Allocate the product of a mixture of experts, or a gradient. Without data PyTorch's own takes bfloat16 alone."""
    shape = (len(offs), a.shape[0], b.shape[1]) if a.ndim == b.ndim else (a.shape[-2], b.shape[-1])
    return a.new_empty(shape)


class StepMemory(NamedTuple):
    """Hold the bytes of what stays from step to step, and of a step at its peak, in one process."""

    weights: int
    gradients: int
    optimizer: int
    peak: int


class Way(NamedTuple):
    """Hold how a model is trained, as far as the memory of a step depends on it.

    Attributes:
        checkpointing: whether a layer keeps its input alone, and computes the rest again in the backward pass.
        tiled_loss: whether the logits are computed in tiles, as in TRL's loss, and never for all tokens.
        offload: whether these inputs wait in the memory of the host.
        lora_r: the rank of adapters, which are trained with the mixing in place of the weights.
        bits: of the weights below adapters, 32, 16 or 4.
        share_rows: how many processes share each row.
    """

    checkpointing: bool = False
    tiled_loss: bool = False
    offload: bool = False
    lora_r: int | None = None
    bits: int = 32
    share_rows: int = 1


class Sizes(NamedTuple):
    """Hold the bytes of a module's trained weights, of all its tensors, and of the optimizer's states."""

    trained: int
    tensors: int
    optimizer: int


class Layer(NamedTuple):
    """Hold what was counted of a layer.

    Attributes:
        forward, backward: its stages.
        copies: the bytes of the weights that autocast has cast, which it keeps to the end of the model's forward pass.
        sizes: those of what stays from step to step.
    """

    forward: Stage
    backward: Stage
    copies: int
    sizes: Sizes


class CountedStep(NamedTuple):
    """Hold what was counted of a step.

    Attributes:
        layers: the layers in their order.
        begin: the embedding, the masks and the RoPE tables.
        head, head_backward: the last norm and the loss.
        end: the backward pass of the embedding.
        update: the optimizer.
        sizes: those of the model without its layers.
    """

    layers: list[Layer]
    begin: Stage
    head: Stage
    head_backward: Stage
    end: Stage
    update: Stage
    sizes: Sizes


class TiledLoss(torch.autograd.Function):
    """Allocate what TRL's loss allocates, which computes the logits in tiles."""

    @staticmethod
    def tile(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, columns = map(min, zip(LOSS_TILE, (len(hidden), len(weight))))
        return hidden.new_empty(rows, columns, dtype=torch.float32)

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return TiledLoss.tile(hidden, weight).sum()

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = [torch.empty_like(tensor, dtype=torch.float32) for tensor in ctx.saved_tensors]
        TiledLoss.tile(*ctx.saved_tensors)
        return tuple(total.to(tensor.dtype) for total, tensor in zip(sums, ctx.saved_tensors))


def sizes_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> Sizes:
    """Return the sizes of a module."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    tensors = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    states = (state for weight in trained for state in optimizer.state[weight].values())
    return Sizes(sum(weight.nbytes for weight in trained), tensors, sum(state.nbytes for state in states))


class Recorder:
    """Record the stages of a step, by hooks where each layer begins and where the last one ends: the borders.

    With the layers `first`, which does not count, and A and B, one of each kind, the stages are

        forward pass   | begin | first | A | B | head           in this order, and then
        backward pass  | end   | first | A | B | head_backward  from right to left

    Activation checkpointing runs a layer's hooks again in the backward pass; these are no borders."""

    def __init__(self, counter: Counter, layers: nn.ModuleList) -> None:
        self.counter = counter
        self.forward: list[Stage] = []
        self.copies: list[int] = []
        self.backward: list[Stage] = []
        self.num_borders = len(layers) + 1
        self.hooks: list[Any] = [layer.register_forward_pre_hook(self.enter, with_kwargs=True) for layer in layers]
        self.hooks.append(layers[-1].register_forward_hook(self.leave))

    def enter(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        self.border(args[0] if args else kwargs["hidden_states"])

    def leave(self, layer: nn.Module, args: tuple, output: Any) -> None:
        self.border(output if isinstance(output, torch.Tensor) else output[0])

    def border(self, states: torch.Tensor) -> None:
        """End the stage before a border of the forward pass, and let the backward pass end the one behind it."""
        if len(self.forward) == self.num_borders:
            return
        self.forward.append(self.counter.stage())
        torch.clear_autocast_cache()
        freed = -self.counter.stage().change  # what autocast has copied since the last border
        self.copies.append(freed)
        self.hooks.append(states.register_hook(lambda gradient: self.backward.append(self.counter.stage())))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def count_step(
    model: PreTrainedModel,
    kept: Kept,
    optimizer: torch.optim.Optimizer,
    row: dict[str, torch.Tensor],
    tiled_loss: bool,
) -> CountedStep:
    """Count a step of a model without data, under a FakeTensorMode. The optimizer has its states already.

    The layers are one that does not count, and one of each kind."""
    counter = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        counter.add(tensor)
    for state in optimizer.state.values():
        for tensor in state.values():
            counter.add(tensor)
    counter.stage()
    recorder = Recorder(counter, kept.layers)
    with counter:
        with torch.autocast("cpu", torch.bfloat16):
            if tiled_loss:
                hidden = backbone_of(model)(**row, use_cache=False).last_hidden_state
                loss = TiledLoss.apply(hidden.flatten(0, 1), model.get_output_embeddings().weight)
                del hidden
            else:
                loss = model(**row, labels=row["input_ids"], use_cache=False).loss
            recorder.forward.append(counter.stage())
        loss.backward()
        del loss
        recorder.backward.append(counter.stage())
        optimizer.step()
        update = counter.stage()
    recorder.remove()
    return by_layers(recorder, update, model, kept, optimizer)


def by_layers(
    recorder: Recorder, update: Stage, model: PreTrainedModel, kept: Kept, optimizer: torch.optim.Optimizer
) -> CountedStep:
    """Return what was recorded of a step (see `Recorder`), for every layer of the whole model."""
    begin, *forward, head = recorder.forward
    head_backward, *backward, end = recorder.backward
    backward.reverse()
    sizes = [sizes_of(layer, optimizer) for layer in kept.layers]
    counted = [Layer(*each) for each in zip(forward, backward, recorder.copies[1:], sizes)]
    others = (whole - sum(each) for whole, each in zip(sizes_of(model, optimizer), zip(*sizes)))
    layers = [counted[1 + i] for i in kept.like]  # without the first one
    return CountedStep(layers, begin, head, head_backward, end, update, Sizes(*others))


def step_of(config: PreTrainedConfig, batch: int, tokens: int, way: Way, dtype: torch.dtype) -> CountedStep:
    """Count a step of AdamW in bfloat16 autocast, on weights of a dtype. Raise `UserError`."""
    with counting(config):
        model, kept = model_to_train(config, way, dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):  # unlike meta tensors its tensors have autocast
            model.to_empty(device="cpu").tie_weights()
            row = row_of_tokens(model, batch, tokens // way.share_rows)
            step = count_step(model, kept, optimizer_of(model), row, way.tiled_loss)
    return offloaded(step) if way.offload else step


def model_to_train(config: PreTrainedConfig, way: Way, dtype: torch.dtype) -> tuple[PreTrainedModel, Kept]:
    """Build a model on the meta device with one layer that does not count, and one of each kind. Raise `UserError`."""
    core = NAME if way.share_rows == 1 else of_shared_rows(way.share_rows)
    model = without_data(config, core, dtype).train()
    if way.share_rows > 1:
        check_can_share_rows(model)
    kept = keep_one_of_each(model)
    # A copy of the first layer comes before the others and does not count, because with adapters the lowest layer of a
    # model keeps its input to the end of a step.
    choose_layers(model, [0, *range(len(kept.layers))])
    if way.lora_r is not None:
        add_adapters(model, kept.layers, way.lora_r, way.bits)
    if way.checkpointing:
        model.activation_checkpointing_enable()
    return model, kept


def optimizer_of(model: PreTrainedModel) -> torch.optim.AdamW:
    """Return the optimizer of the weights that are trained, with its states, which its first step makes."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def offloaded(step: CountedStep) -> CountedStep:
    """Return a step whose layers keep nothing from their forward pass to their backward pass, which brings it back."""
    layers = []
    for layer in step.layers:
        kept = layer.forward.change - layer.copies
        forward = layer.forward._replace(change=layer.copies)
        backward = Stage(layer.backward.change + kept, layer.backward.peak + kept)
        layers.append(layer._replace(forward=forward, backward=backward))
    return step._replace(layers=layers)


def whole_sizes(step: CountedStep) -> Sizes:
    """Return the sizes of a whole model."""
    return Sizes(*map(sum, zip(step.sizes, *(layer.sizes for layer in step.layers))))


def forward_of(step: CountedStep) -> list[Stage]:
    """Return the stages of the forward pass of a whole model, after which autocast drops its copies of weights."""
    copies = sum(layer.copies for layer in step.layers)
    return [step.begin, *(layer.forward for layer in step.layers), step.head, Stage(-copies, 0)]


def highest(stages: Iterable[Stage]) -> int:
    """Return the most bytes that are ever alive in these stages, above those of their beginning."""
    now = peak = 0
    for stage in stages:
        peak = max(peak, now + stage.peak)
        now += stage.change
    return peak


def of_training(config: PreTrainedConfig, batch: int, tokens: int, way: Way) -> StepMemory:
    """Count a step of AdamW in bfloat16 autocast, with `batch` rows of `tokens`, on float32 weights or by LoRA.

    Raise `UserError`."""
    step = step_of(config, batch, tokens, way, torch.float32 if way.bits == 32 else torch.bfloat16)
    trained, tensors, optimizer = whole_sizes(step)
    backward = [layer.backward for layer in reversed(step.layers)]
    peak = highest([*forward_of(step), step.head_backward, *backward, step.end, step.update])
    return StepMemory(tensors, trained, optimizer, tensors + optimizer + peak)


def of_sharded_training(config: PreTrainedConfig, batch: int, tokens: int, way: Way, gpus: int) -> StepMemory:
    """Estimate a step on each of several GPUs of FSDP2, as sft/accelerate_configs/fsdp2.yaml sets it up.

    Each GPU has `batch` rows, or each group of GPUs that share rows, and its share of the float32 weights, of their
    gradients and of AdamW's states. Layers are gathered in bfloat16: one computes while another is on its way, and a
    third is copied. The gradients of one layer are summed over the GPUs while the next are made. Embedding, last norm
    and head stay gathered. Raise `UserError`.
    """
    step = step_of(config, batch, tokens, way, torch.bfloat16)
    trained, tensors, _ = whole_sizes(step)  # in bfloat16, and twice as much in float32
    gradients = 2 * trained // gpus
    weights = gradients + tensors - trained
    optimizer = 2 * gradients  # two states of AdamW
    largest = max(layer.sizes.trained for layer in step.layers)
    backward = []
    for layer in reversed(step.layers):
        # In place of the layer's whole gradients in bfloat16 a GPU keeps its share of them in float32.
        share = 2 * layer.sizes.trained // gpus
        backward.append(Stage(layer.backward.change - layer.sizes.trained + share, layer.backward.peak + largest))
    peak = highest([*forward_of(step), step.head_backward, *backward, step.end])
    gathered = step.sizes.trained + 3 * largest
    return StepMemory(weights, gradients, optimizer, weights + optimizer + gathered + peak)
