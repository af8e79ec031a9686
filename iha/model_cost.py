"""Count the parameters, multiply-adds and cached values of a model.

PyTorch counts the multiply-adds of matrix products (`FlopCounterMode`) on a model without data; norms, rotations and
softmax do not count. Attention counts the pairs that causality and windows leave (iha/counted_attention.py). An "iha"
layer with P pseudo-heads has P^2 times the pairs of an "mha" layer. Code of Transformers that computes more than it
needs costs more: Llama 4 runs every expert on every token. `python -m iha.cost` prints the table.
"""

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from iha import counted_attention
from iha.counted_adapters import add_adapters
from iha.without_data import counting, keep_one_of_each, layers_of, row_of_tokens, without_data
from modeling_iha.transformers_versions import CACHE


@dataclass(frozen=True)
class Cost:
    """Hold the cost of a part of a model for one sequence of N tokens.

    Attributes:
        parameters: number of parameters.
        prefill, training, decode: multiply-adds of a forward pass, of a forward and a backward pass, and of one more
            token after N cached ones.
        cache: number of values in the cached keys and values.
    """

    parameters: int = 0
    prefill: float = 0
    training: float = 0
    decode: float = 0
    cache: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(*(a - b for a, b in zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class LayerCost:
    """Hold the cost of a layer's attention, and of the rest of the layer."""

    attention: Cost
    rest: Cost

    @property
    def whole(self) -> Cost:
        return self.attention + self.rest


@dataclass(frozen=True)
class ModelCost:
    """Hold the cost of each layer, and of the rest of the model: embedding, last norm, head."""

    layers: list[LayerCost]
    rest: Cost

    @property
    def whole(self) -> Cost:
        return sum((layer.whole for layer in self.layers), self.rest)


def model_cost(config: PreTrainedConfig, tokens: int) -> ModelCost:
    """Count the cost of a model with its language modeling head, with logits at all tokens. Raise `UserError`."""
    with counting(config):
        model = without_data(config, counted_attention.NAME)
        kept = keep_one_of_each(model)
        row = row_of_tokens(model, 1, tokens)
        prefill, training = count_training(model, kept.layers, row)
        # The masks of one more token follow from the cache of all layers, so all of them run.
        decode, cache = count_decoding(without_data(config), row["input_ids"])
    layers = []
    for i, place in enumerate(kept.like):
        layer = kept.layers[place]
        attention = Cost(
            parameters=sum(count_parameters(module) for module in attention_of(layer)),
            prefill=prefill.attention[place],
            training=training.attention[place],
            decode=decode.attention[i],
            cache=cache[i],
        )
        whole = Cost(
            parameters=count_parameters(layer),
            prefill=prefill.layers[place],
            training=training.layers[place],
            decode=decode.layers[i],
            cache=cache[i],
        )
        layers.append(LayerCost(attention, whole - attention))
    size = count_parameters(model) - count_parameters(kept.layers)
    return ModelCost(layers, Cost(size, prefill.rest, training.rest, decode.rest))


def cost_of_model(config: PreTrainedConfig, tokens: int) -> Cost:
    """Count the cost of a whole model. Raise `UserError`."""
    return model_cost(config, tokens).whole


class Passes(NamedTuple):
    """Hold the multiply-adds of a forward pass, and of a forward and a backward pass."""

    prefill: int
    training: int


def passes_of_model(config: PreTrainedConfig, tokens: int, lora_r: int | None = None) -> Passes:
    """Count the passes of a whole model alone, in a fraction of the time of its other costs.

    With `lora_r` adapters of this rank are trained, and the weights below them get no gradients. Raise `UserError`.
    """
    with counting(config):
        model = without_data(config, counted_attention.NAME)
        kept = keep_one_of_each(model)
        if lora_r is not None:
            add_adapters(model, kept.layers, lora_r, bits=32)
            model.to(torch.bfloat16)  # adapters in float32 need autocast, which models on the meta device lack
        counts = count_training(model, kept.layers, row_of_tokens(model, 1, tokens))
    return Passes(*(each.rest + sum(each.layers[place] for place in kept.like) for each in counts))


def flops_of_a_token(config: PreTrainedConfig, tokens: int) -> float:
    """Return the FLOPs of a model in a training step, for each token of rows of `tokens` tokens.

    They are three times those of a forward pass, and leave out what a kernel or activation checkpointing recomputes,
    as in the utilization of model FLOPs (PaLM, Appendix B). Only the pairs that the masks leave count.
    """
    return 3 * 2 * passes_of_model(config, tokens).prefill / tokens


def attention_of(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that mix tokens: they know the number of their layer, as their cache does."""
    return [module for module in layer.children() if hasattr(module, "layer_idx")]


def parameters_of(config: PreTrainedConfig) -> int:
    """Count the parameters of a model alone. Raise `UserError`."""
    return count_parameters(without_data(config))


def count_parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


class Counts(NamedTuple):
    """Hold multiply-adds of the layers of a model, of their attention, and of the rest of the model."""

    layers: list[int]
    attention: list[int]
    rest: int


class LayerCounter(FlopCounterMode):
    """Count the FLOPs of layers and of their attention, by hooks where their passes begin and end.

    A backward pass goes the other way: it begins in a layer at the gradient of the layer's output, and ends at the
    gradient of its input. So the hook on the input's gradient calls `end`, and the one on the output's calls `begin`.
    `FlopCounterMode` counts by module too, but not the backward pass of a module whose input is a keyword."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__(display=False, custom_mapping=counted_attention.FLOPS)
        self.layers = layers
        self.flops = {module: 0 for layer in layers for module in (layer, *attention_of(layer))}
        for module in self.flops:
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
            module.register_forward_hook(self.leave)

    def counts(self) -> Counts:
        """Return the multiply-adds up to now."""
        layers = [self.flops[layer] // 2 for layer in self.layers]
        attention = [sum(self.flops[module] for module in attention_of(layer)) // 2 for layer in self.layers]
        return Counts(layers, attention, self.get_total_flops() // 2 - sum(layers))

    # The first takes the total away and the second adds it, so what was counted between them remains.

    def begin(self, module: nn.Module) -> None:
        self.flops[module] -= self.get_total_flops()

    def end(self, module: nn.Module) -> None:
        self.flops[module] += self.get_total_flops()

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.begin(module)
        states = args[0] if args else kwargs["hidden_states"]
        if states.requires_grad:
            states.register_hook(lambda gradient: self.end(module))

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.end(module)
        states = output if isinstance(output, torch.Tensor) else output[0]
        if states.requires_grad:
            states.register_hook(lambda gradient: self.begin(module))


def count_training(
    model: PreTrainedModel, layers: nn.ModuleList, row: dict[str, torch.Tensor]
) -> tuple[Counts, Counts]:
    """Count a forward pass, and a forward and a backward pass."""
    with LayerCounter(layers) as counter:
        logits = model(**row, use_cache=False).logits
        prefill = counter.counts()
        logits.backward(torch.empty_like(logits))
    return prefill, counter.counts()


def count_decoding(model: PreTrainedModel, input_ids: torch.Tensor) -> tuple[Counts, list[int]]:
    """Count a forward pass of one more token, and the values that each layer has cached before it."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=input_ids, **{CACHE: cache})
        cached = [values_of(layer) for layer in cache.layers]
        with LayerCounter(layers_of(model)) as counter:
            model(input_ids=input_ids[:, :1], **{CACHE: cache})
    return counter.counts(), cached


def values_of(layer: object) -> int:
    """Return the number of values that a layer of a cache holds: keys and values, or states of linear attention."""
    tensors = (each for each in vars(layer).values() if isinstance(each, torch.Tensor))
    return sum(each.numel() for each in tensors if each.is_floating_point())
