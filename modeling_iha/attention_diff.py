"""Differential attention, kind "diff" (Ye et al. 2024, Differential Transformer, arXiv 2410.05258), as in Transformers' DiffLlama."""

import math

import torch
from torch import nn
from transformers import initialization as init

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig


class HeadDifference(nn.Module):
    """What the first half of the heads sees less lambda times what the second half does, normalised (Differential Transformer,
    equations 1 to 3).

    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init, with a fixed lambda_init that grows with the
    layer and four learned vectors [head_dim].
    """

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__()
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        self.lambda_q1 = nn.Parameter(torch.empty(config.head_dim))
        self.lambda_k1 = nn.Parameter(torch.empty(config.head_dim))
        self.lambda_q2 = nn.Parameter(torch.empty(config.head_dim))
        self.lambda_k2 = nn.Parameter(torch.empty(config.head_dim))
        self.groupnorm = nn.RMSNorm(2 * config.head_dim, eps=config.rms_norm_eps, elementwise_affine=False)

    def init_mechanism(self, config: IHAConfig):
        """Normal, of the standard deviation that the option `lambda_std_dev` gives."""
        for parameter in self.parameters():
            init.normal_(parameter, 0.0, config.options_of("diff")["lambda_std_dev"])

    def forward(self, attn_output: torch.Tensor) -> torch.Tensor:
        """Differential heads [batch, N, H / 2, 2 head_dim] of the heads' outputs [batch, N, H, 2 head_dim]."""
        attn_output1, attn_output2 = attn_output.chunk(2, dim=2)
        lambda_1 = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1, dtype=torch.float32))
        lambda_2 = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dim=-1, dtype=torch.float32))
        # Rounded one by one, and not to the dtype of autocast, as a DiffLlama checkpoint was trained.
        dtype = self.lambda_q1.dtype
        lambda_full = lambda_1.to(dtype) - lambda_2.to(dtype) + self.lambda_init
        return (1 - self.lambda_init) * self.groupnorm(attn_output1 - lambda_full * attn_output2)


class DifferentialAttention(MultiHeadAttention):
    """Differential attention: two ordinary softmaxes, of head h and head h + H / 2, over the same values, and their difference.

    The values of the pair are those of two groups side by side, g and g + G / 2, so a head is twice as wide and there are half as
    many. Stock cores take no values wider than the keys without losing their fast paths: each half of the values goes through
    the core on its own. The attention weights returned are those of the softmaxes, before the difference.
    """

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.difference = HeadDifference(config, layer_idx)

    def attend(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Differential heads [batch, queries, H / 2, 2 head_dim], and the weights [batch, H, queries, keys] of both softmaxes where
        the core gives them."""
        value_states1, value_states2 = (half.repeat(1, 2, 1, 1) for half in value_states.chunk(2, dim=1))
        attn_output1, attn_weights = super().attend(query_states, key_states, value_states1, attention_mask, **kwargs)
        attn_output2, _ = super().attend(query_states, key_states, value_states2, attention_mask, **kwargs)
        return self.difference(torch.cat((attn_output1, attn_output2), dim=-1)), attn_weights
