# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define kind "knocking_heads" (Zhou et al. 2025, Knocking-Heads Attention, arXiv 2510.23052)."""

import torch
from torch import nn

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig
from .mixing import Mixing


class SharedMap(Mixing):
    """Multiply every head [..., head_dim] by one matrix (KHA-Linear, Equations 5 to 7).

    The value of `weight` [head_dim, head_dim] is T of the paper. It folds into the projection (Equation 8)."""

    def __init__(self, head_dim: int, scale: float):
        super().__init__(scale)
        self.add_weight("weight", torch.eye(head_dim))

    def init_mechanism(self, config: IHAConfig):
        """Start at the identity, so that the layer starts as multi-head attention."""
        self.init_weight("weight", torch.eye(len(self.weight)))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.value().to(states.dtype)


class SharedMLP(Mixing):
    """Map every head [..., head_dim] by one gated MLP, 2 (v U * sigmoid(v G)) D (KHA-MLP, Equation 9)."""

    def __init__(self, head_dim: int, scale: float):
        super().__init__(scale)
        self.add_weight("up", torch.eye(head_dim))
        self.add_weight("gate", torch.zeros(head_dim, head_dim))
        self.add_weight("down", torch.eye(head_dim))

    def init_mechanism(self, config: IHAConfig):
        """Start at U = D = I and G = 0, so that the layer starts as multi-head attention."""
        identity = torch.eye(len(self.up))
        self.init_weight("up", identity)
        self.init_weight("gate", torch.zeros_like(identity))
        self.init_weight("down", identity)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        up, gate, down = (self.value(name).to(states.dtype) for name in ("up", "gate", "down"))
        return 2 * (states @ up * torch.sigmoid(states @ gate)) @ down


MAPS = {None: nn.Identity, "linear": SharedMap, "mlp": SharedMLP}


class KnockingHeadsAttention(MultiHeadAttention):
    """Map the queries, keys and values of all heads by matrices that the heads share: knocking-heads attention.

    The maps come after the projections and before QK-norm and RoPE. The cache holds mapped keys and values. Linear
    maps are a re-parametrization of the projections: they change how a model learns, and not what it can compute."""

    mixing_modules = ("q_map", "k_map", "v_map")

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        options = config.options_of("knocking_heads")
        size = (self.head_dim, config.mixing_scale)
        self.q_map = MAPS["linear" if options.queries else None](*size)
        self.k_map = MAPS["linear" if options.keys else None](*size)
        self.v_map = MAPS[options.values](*size)

    def project_heads(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        heads = super().project_heads(hidden_states)
        return [map_heads(each) for map_heads, each in zip((self.q_map, self.k_map, self.v_map), heads)]
