# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Give the mixing and collapse weights a learning rate of their own.

Their entries are of order 1. Adam at a backbone's rate of 5e-5 moves them by less than 0.003 in 60 steps, and weight
decay pulls them to zero."""

import torch


# Chosen at a backbone's rate of 5e-5 (docs/LOG.md, Warm start).
MIXING_LR_MULTIPLIER = 40.0


def mixing_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the weights by which a model's attention mixes heads, those that train, also within PEFT, DDP or FSDP."""
    names = [(module, name) for module in model.modules() for name in getattr(module, "mixing_modules", ())]
    mixing = [getattr(module, name) for module, name in names if getattr(module, name, None) is not None]
    weights = [weight for module in mixing for weight in module.parameters() if weight.requires_grad]
    return list(dict.fromkeys(weights))


def parameter_groups(
    model: torch.nn.Module, learning_rate: float, mixing_learning_rate: float | None = None
) -> list[dict]:
    """Return the groups of an optimizer: all other weights that train, and the mixing, at its own rate without decay.

    Trainer and TRL take `optimizers=(torch.optim.AdamW(parameter_groups(model, 5e-5)), None)`.

    Args:
        model: a model with interleaved heads, an `IHAForCausalLM`, or a PEFT model of one.
        learning_rate: of all other weights.
        mixing_learning_rate: of the mixing; `None` for 40 times the `learning_rate`.

    Raise a ValueError where no mixing trains."""
    mixing = mixing_parameters(model)
    if not mixing:
        raise ValueError(
            "No mixing trains in this model: interleave its heads first and, with PEFT, name the mixing in "
            "modules_to_save."
        )
    found = set(mixing)
    others = [weight for weight in model.parameters() if weight.requires_grad and weight not in found]
    rate = MIXING_LR_MULTIPLIER * learning_rate if mixing_learning_rate is None else mixing_learning_rate
    return [{"params": others, "lr": learning_rate}, {"params": mixing, "lr": rate, "weight_decay": 0.0}]
