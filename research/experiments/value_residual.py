"""Add a value residual to a model: every layer mixes its values with those of the first layer.

Source: Zhou et al. 2024, Value Residual Learning (arXiv 2410.17897), in the form of modded-nanogpt: from the second
layer on v = (1 - s) v + s v_1, with one learned share s a layer, 0.5 at the start. `IHAConfig` has no field for it:
v_1 would have to travel from layer to layer past activation checkpointing, FSDP and pipelines (docs/FORMS.md).
"""

import torch
from torch import nn

from modeling_iha import IHAForCausalLM


class ValueResidual:
    """Mix the values of an attention layer with those that the first layer has left in `first`."""

    layer_idx: int
    share_of_first: nn.Parameter
    first: dict[str, torch.Tensor]

    def project(self, hidden_states: torch.Tensor, position_embeddings: dict[str, tuple]) -> tuple:
        query, key, value = super().project(hidden_states, position_embeddings)  # type: ignore[misc]
        if self.layer_idx == 0:
            self.first["values"] = value
        else:
            value = torch.lerp(value, self.first["values"], self.share_of_first.to(value.dtype))
        return query, key, value


def add_value_residual(model: IHAForCausalLM) -> IHAForCausalLM:
    """Add a value residual to all layers of a model, in place, and return the model."""
    first: dict[str, torch.Tensor] = {}
    for layer in model.model.layers:
        attention = layer.self_attn
        kind = type(attention)
        attention.__class__ = type(f"{kind.__name__}WithValueResidual", (ValueResidual, kind), {})
        attention.first = first
        if attention.layer_idx > 0:
            attention.share_of_first = nn.Parameter(torch.tensor(0.5))
    return model
