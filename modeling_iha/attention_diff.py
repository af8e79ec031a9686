# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define differential attention, kind "diff", as Transformers' DiffLlama computes it.

It is from Ye et al. 2024, Differential Transformer, arXiv 2410.05258."""

import math

import torch
from torch import nn
from transformers import initialization as init

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig


class DifferentialAttention(MultiHeadAttention):
    """Subtract two softmax attentions over the same values (Differential Transformer, equations 1 to 3).

    Heads h and h + H / 2 apply two softmaxes to the same values. The output is the first result minus lambda times the
    second, normalized. lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init has four learned
    vectors [head_dim] and a fixed lambda_init that grows with the layer.

    The values of the pair are those of groups g and g + G / 2 side by side, so there are half as many heads, each
    twice as wide. Stock cores lose their fast paths with values wider than the keys, so each half of the values goes
    through the core on its own. The attention weights returned are those of the softmaxes, before the difference.
    """

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        std_dev = float(config.options_of("diff").lambda_std_dev)
        self.lambda_q1 = nn.Parameter(torch.full((self.head_dim,), std_dev))
        self.lambda_k1 = nn.Parameter(torch.full((self.head_dim,), std_dev))
        self.lambda_q2 = nn.Parameter(torch.full((self.head_dim,), std_dev))
        self.lambda_k2 = nn.Parameter(torch.full((self.head_dim,), std_dev))
        self.groupnorm = nn.RMSNorm(2 * self.head_dim, eps=config.rms_norm_eps, elementwise_affine=False)

    def init_mechanism(self, config: IHAConfig):
        """Draw the lambda vectors from a normal distribution with standard deviation `lambda_std_dev`."""
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            init.normal_(vector, 0.0, config.options_of("diff").lambda_std_dev)

    def attend(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return differential heads [batch, queries, H / 2, 2 head_dim] and the weights of both softmaxes.

        The weights are [batch, H, queries, keys], where the core gives them."""
        value_states1, value_states2 = (half.repeat(1, 2, 1, 1) for half in value_states.chunk(2, dim=1))
        attn_output1, attn_weights = super().attend(query_states, key_states, value_states1, attention_mask, **kwargs)
        attn_output2, _ = super().attend(query_states, key_states, value_states2, attention_mask, **kwargs)
        attn_output = torch.cat((attn_output1, attn_output2), dim=-1)
        attn_output1, attn_output2 = attn_output.chunk(2, dim=2)

        lambda_1 = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1, dtype=torch.float32))
        lambda_2 = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dim=-1, dtype=torch.float32))
        # DiffLlama checkpoints were trained with each lambda rounded by itself, not to the dtype of autocast.
        dtype = self.lambda_q1.dtype
        lambda_full = lambda_1.to(dtype) - lambda_2.to(dtype) + self.lambda_init
        attn_output = (1 - self.lambda_init) * self.groupnorm(attn_output1 - lambda_full * attn_output2)
        return attn_output, attn_weights

    def combine_heads(self, attn_output, hidden_states, own_values) -> torch.Tensor:
        """Combine differential heads, whose own values are those of two groups side by side."""
        return super().combine_heads(attn_output, hidden_states, torch.cat(own_values.chunk(2, dim=1), dim=-1))
