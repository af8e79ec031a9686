# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Keep `config.mixing_scale` equal to the scale stored with the weights (see `Mixing`)."""

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedConfig


def check_scale(saved: dict, given: dict) -> None:
    """Raise a ValueError for a `mixing_scale` that is given in place of the one of a saved configuration."""
    own = saved.get("mixing_scale", 1)
    other = given.get("mixing_scale")
    if other is not None and other != own:
        raise ValueError(
            f"mixing_scale={other}, and the checkpoint has {own}, which its weights depend on: load it without the "
            "argument, and then call set_mixing_scale of modeling_iha, which keeps what the model computes."
        )


def weight_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own mixing weights: those with a start, in any copy of this code."""
    buffers = dict(module.named_buffers(recurse=False))
    return [name for name, _ in module.named_parameters(recurse=False) if f"{name}_start" in buffers]


def note_scale(model: nn.Module, configs: Iterable[PreTrainedConfig]) -> None:
    """Write the scale of a model's mixing weights to the configurations, if all weights have the same one."""
    scales = [module.get_buffer(f"{name}_scale") for module in model.modules() for name in weight_names(module)]
    found = {scale.item() for scale in scales if not scale.is_meta}
    if len(found) != 1:
        return
    (own,) = found
    for config in configs:
        if scales[0].new_tensor(config.mixing_scale, device="cpu").item() != own:  # rounded as the weights are
            config.mixing_scale = own
