# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define paired heads, kind "paired_heads": P heads share one virtual sequence.

Source: "Paired Head Attention" of modded-nanogpt (records/track_1_short/2026-01-07_PairedHeadAttention), with P = 2.

Virtual token (n, p) of virtual head i is head p * (H / P) + i of token n, at position n * P + p. The H / P virtual
heads attend to N * P virtual tokens, and the output at (n, p) is that of the head. This is Algorithm 1 of IHA with
fixed mixing. With S = H / P, pseudo-head p of head h is head p * S + h mod S, so heads with the same h mod S have the
same pseudo-heads:

    alpha[m, h, p] = 1[m = p * S + h mod S],  R[h, p] = 1[p = h // S]

An "iha" layer with these weights computes each virtual sequence P times, once for each head that reads it. Here it is
computed once, so attention costs P times as much as in an "mha" layer, and not P^2 times.
"""

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig
from .pairing import PairedHeads
from .virtual_tokens import virtual_attention


class PairedHeadsAttention(MultiHeadAttention):
    """Attend with groups of P heads whose queries, keys and values form one sequence of P virtual tokens per token.

    The layer has Llama's parameters and Llama's cache. Head p * (H / P) + i always has the position n * P + p, so
    the cached keys are rotated once."""

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.num_pseudo_heads = config.num_pseudo_heads
        self.rope_table = "paired" if config.pseudo_positions == "interleaved" else "token"

    def rotate(
        self, query_states: torch.Tensor, key_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate as Llama does, by RoPE [batch, N, head_dim] or, at interleaved positions, [batch, P, N, head_dim]."""
        if self.rope_table == "token":
            return super().rotate(query_states, key_states, cos, sin)
        shape = (self.config.num_pseudo_heads, -1)
        query_states = query_states.unflatten(1, shape)
        key_states = key_states.unflatten(1, shape)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin, unsqueeze_dim=2)
        return query_states.flatten(1, 2), key_states.flatten(1, 2)

    def attend(self, query_states, key_states, value_states, attention_mask, rotation=None, **kwargs) -> tuple:
        """Attend over virtual tokens. The weights are [batch, H / P, N * P, K * P], where the core gives them."""
        heads = PairedHeads(self.num_pseudo_heads)
        states = (query_states, key_states, value_states)
        return virtual_attention(self.core_function, self, heads, *states, attention_mask, **kwargs)
