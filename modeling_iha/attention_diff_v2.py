# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define kind "diff_v2", differential attention in its second version.

It is from Ye et al. 2026, Differential Transformer V2 (microsoft/unilm, Diff-Transformer-V2)."""

import torch
from torch import nn

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig


class DifferentialAttentionV2(MultiHeadAttention):
    """Subtract from every head a second one over the same keys and values: differential attention, version 2.

    `q_proj` holds 2 H query heads, and `k_proj` and `v_proj` hold Llama's G. Head h of the output is attention's head
    2 h minus lambda times head 2 h + 1, and both are of one group. lambda = sigmoid(x W) is computed for each token
    and head from the layer's input; `lambda_proj.weight` holds W transposed, [H, hidden_size]. The heads are laid out
    as in the authors' code. The attention weights returned are those of the 2 H softmaxes, before the difference."""

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        num_heads = config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, 2 * num_heads * self.head_dim, bias=config.attention_bias)
        self.lambda_proj = nn.Linear(config.hidden_size, num_heads, bias=False)
        self.num_key_value_groups *= 2  # the query heads of a group, by which cores repeat keys and values

    def combine_heads(self, attn_output, hidden_states, own_values) -> torch.Tensor:
        """Combine differential heads [batch, N, H, head_dim] of attention's 2 H heads."""
        # Two close heads cancel, so their difference is rounded once.
        dtype = torch.promote_types(attn_output.dtype, torch.float32)
        lambda_full = torch.sigmoid(self.lambda_proj(hidden_states).to(dtype))
        first, second = attn_output.to(dtype).unflatten(2, (-1, 2)).unbind(3)
        difference = (first - lambda_full.unsqueeze(-1) * second).to(attn_output.dtype)
        return super().combine_heads(difference, hidden_states, own_values)
