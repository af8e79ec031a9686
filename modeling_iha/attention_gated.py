# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define kind "gated" (Qiu et al. 2025, Gated Attention for Large Language Models, arXiv 2505.06708)."""

import torch
from torch import nn

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig


class GatedAttention(MultiHeadAttention):
    """Scale the output of every head by a sigmoid gate of the layer's input: gated attention (its position G1).

    The gate of a token is sigmoid(x W), one factor for each element of a head's output or, with `per_head`, one for
    each head. `output_gate.weight` holds W transposed, [H * head_dim or H, hidden_size]."""

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        width = 1 if config.options_of("gated").per_head else self.head_dim
        self.output_gate = nn.Linear(config.hidden_size, config.num_attention_heads * width, bias=False)

    def combine_heads(self, attn_output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.output_gate(hidden_states))
        return attn_output * gate.unflatten(-1, (attn_output.shape[2], -1))
