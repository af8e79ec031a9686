# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Find the weights that mix heads, and read their values."""

import torch
from torch import nn

from .interleaving import Mixing


def mixing_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights by which a model's attention mixes heads, those that train, also within PEFT, DDP or FSDP."""
    weights = [weight for module in model.modules() if isinstance(module, Mixing) for weight in module.parameters()]
    return [weight for weight in dict.fromkeys(weights) if weight.requires_grad]


@torch.no_grad()
def values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a module, with the value of each mixing weight in place of its start and its change."""
    state = module.state_dict()
    for prefix, each in module.named_modules():
        if isinstance(each, Mixing):
            for name, _ in each.named_parameters(prefix, recurse=False):
                state[name] = each.value(name.rpartition(".")[2])
                state.pop(f"{name}_start", None)
    return state
