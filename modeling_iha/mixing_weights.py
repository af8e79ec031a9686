# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Find the weights that mix heads, read their values and how far they moved, and change the rate at which they learn.

Mixing modules are recognized by their buffers (`weight_names`) and not by their class, because a loaded checkpoint has
its own copy of the classes. Under FSDP2 every process must call these functions, because they gather sharded weights.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedConfig

from .exact_start import identity_mixing


# The parts that the modules of an attention module mix.
PARTS = {"q_mix": "queries", "k_mix": "keys", "v_mix": "values", "collapse": "collapse"}


def weight_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own mixing weights: those with a start, in any copy of this code."""
    buffers = dict(module.named_buffers(recurse=False))
    return [name for name, _ in module.named_parameters(recurse=False) if f"{name}_start" in buffers]


def trained_mixing(model: nn.Module) -> list[nn.Parameter]:
    """Return the mixing weights of a model that are trained, without duplicates; there may be none."""
    weights = [getattr(module, name) for module in model.modules() for name in weight_names(module)]
    return [weight for weight in dict.fromkeys(weights) if weight.requires_grad]


def mixing_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable mixing weights of a model's attention, without duplicates.

    The model may be within PEFT, DDP or FSDP; PEFT trains copies of the weights, so call this after it has wrapped
    the model. An optimizer takes the weights as a group, such as `{"params": mixing_parameters(model),
    "weight_decay": 0.0}`. They need no separate rate where `mixing_scale` is not 1.

    The weights hold changes from starts, times a scale, and the starts and scales are buffers. To copy a model into
    one with another seed or scale, copy its `state_dict()`, not only its `parameters()`.

    For paired heads, which mix by fixed weights, and where the weights are frozen, the list is empty. Raise a
    ValueError for a plain model."""
    if not any(weight_names(module) for module in model.modules()) and not has_paired_heads(model):
        raise ValueError(f"{type(model).__name__} has no weights that mix heads: interleave_heads makes them.")
    return trained_mixing(model)


def has_paired_heads(model: nn.Module) -> bool:
    """Return whether layers pair their heads: those of `pair_heads`, or of an `IHAConfig`."""
    configs = [config_of(module) for module in model.modules()]
    return any(
        getattr(config, "virtual_heads", None) == "paired" or "paired_heads" in getattr(config, "attention_kinds", ())
        for config in configs
    )


def config_of(module: nn.Module) -> PreTrainedConfig | None:
    """Return the configuration that a module holds. Wrappers pass on the attributes of others, so look at its own."""
    config = vars(module).get("config")
    return config if isinstance(config, PreTrainedConfig) else None


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, as under FSDP2. Builds of PyTorch may lack this class."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, gathered if FSDP2 shards it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def _value(module: nn.Module, name: str) -> torch.Tensor:
    start = getattr(module, f"{name}_start")
    return torch.addcmul(start, gathered(getattr(module, name)), getattr(module, f"{name}_scale"))


@torch.no_grad()
def state_with_values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a module, with the value of each mixing weight in place of start, change and scale."""
    state = module.state_dict()
    for prefix, submodule in module.named_modules():
        for name in weight_names(submodule):
            full = f"{prefix}.{name}" if prefix else name
            state[full] = _value(submodule, name)
            del state[f"{full}_start"]
            del state[f"{full}_scale"]
    return state


def mixing_change(model: nn.Module) -> dict[str, dict[int, torch.Tensor]]:
    """Return how far the mixing of each head has moved from its start.

    The result has the parts "queries", "keys", "values" and "collapse", and for each of them, by the index of the
    layer, a distance for each head, float32 [heads]. A pseudo-head is a sum of heads, and its distance is the length
    of the vector of what its shares have changed by. A head's change is the root mean square over its pseudo-heads. At
    a distance of 1 a pseudo-head lost its own head, or reads another head in addition.

    The start is that of `interleave_heads`, or the values at the last `set_mixing_scale`. A model that is trained from
    scratch keeps no start, so there the distance is from what the weights are drawn around: its own head for each
    pseudo-head, and the mean over the pseudo-heads for the collapse. `iha.plots.plot_mixing(model)` draws it.

    Raise a ValueError for a model without such weights."""
    differences = mixing_differences(model)
    return {
        part: {layer: each.square().sum(0).mean(-1).sqrt() for layer, each in layers.items()}
        for part, layers in differences.items()
    }


@torch.no_grad()
def mixing_differences(model: nn.Module) -> dict[str, dict[int, torch.Tensor]]:
    """Return the values of the mixing minus their start, by part and layer, float32 [sources, heads, P] on the CPU.

    A collapse of a head's own pseudo-heads has one source."""
    found: dict[str, dict[int, torch.Tensor]] = {part: {} for part in PARTS.values()}
    for attention in model.modules():
        if "q_mix" not in attention._modules:
            continue
        for name, part in PARTS.items():
            mixing = trained_copy(getattr(attention, name))
            difference = gathered(mixing.weight).float() * mixing.weight_scale
            if not mixing.weight_start.any():  # none is kept from scratch
                difference -= drawn_around(mixing, part)
            if part == "collapse":
                difference = difference.unflatten(1, (-1, mixing.num_pseudo_heads)).transpose(0, 1)
            found[part][attention.layer_idx] = difference.cpu()
    if not found["queries"]:
        raise ValueError(f"{type(model).__name__} has no weights that mix heads: interleave_heads makes them.")
    return found


def trained_copy(module: nn.Module) -> nn.Module:
    """Return the copy of a module that an active adapter of PEFT trains, or the module itself."""
    copies = getattr(module, "modules_to_save", None)
    if copies is None:
        return module
    is_replaced = module.active_adapters and not module.disable_adapters
    return copies[module.active_adapters[0]] if is_replaced else module.original_module


def drawn_around(mixing: nn.Module, part: str) -> torch.Tensor:
    """Return what the weights of a mixing are drawn around in a model that is trained from scratch."""
    weight = mixing.weight_start
    if part != "collapse":
        return identity_mixing(weight.shape[1], weight.shape[2]).to(weight.device)
    heads, columns = weight.shape
    is_per_head = columns == mixing.num_pseudo_heads
    own = torch.ones(heads, 1) if is_per_head else torch.eye(heads)
    return own.repeat_interleave(mixing.num_pseudo_heads, dim=1).to(weight.device) / mixing.num_pseudo_heads


@torch.no_grad()
def set_mixing_scale(model: nn.Module, scale: float) -> None:
    """Change `mixing_scale` without changing what the model computes.

    The mixing then learns at another multiple of the optimizer's rate. The present values become the starts, to which
    weight decay pulls, and the weights become zero.

    Args:
        model: any model with weights that mix heads, whole or sharded by FSDP2.
        scale: the new `mixing_scale`, above 0. It is also written to the configuration.

    Raise a ValueError for another scale, and for a model without such weights or with offloaded ones."""
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale!r}: expected a number above 0.")
    found = [(module, name) for module in model.modules() for name in weight_names(module)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no weights that mix heads.")
    if any(getattr(module, name).is_meta for module, name in found):
        raise ValueError("The mixing is offloaded: load the model whole.")
    # Read all values before writing any, because tied blocks share weights.
    started = [_value(module, name) for module, name in found]
    for (module, name), value in zip(found, started):
        getattr(module, f"{name}_start").copy_(value)
        getattr(module, f"{name}_scale").fill_(scale)
        getattr(module, name).zero_()
    for module in model.modules():
        config = config_of(module)
        if hasattr(config, "mixing_scale"):
            config.mixing_scale = scale
