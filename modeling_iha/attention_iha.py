# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define Interleaved Head Attention, kind "iha" (IHA, Algorithm 1 and Definition 3)."""

import torch
import torch.utils.checkpoint

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig
from .cpu_precision import product_dtype
from .interleaving import HeadCollapse, HeadMixing, IHAWeights, absorbed_attention, attend_interleaved, virtual_kwargs


class InterleavedHeadAttention(MultiHeadAttention):
    """Attend by Interleaved Head Attention (IHA, Algorithm 1).

    `attend_interleaved` has the algorithm. With grouped-query attention the G key/value heads mix among themselves.

    The mixing writes the layout [batch, N, P, heads, head_dim], and [batch, N * P, heads, head_dim] is a view of it.
    Interleaving therefore copies nothing and runs on any attention core of Transformers.

    The cache holds base keys and values at token length, as Llama's does. The virtual ones are rebuilt from it. Mixing
    acts across heads and RoPE within a head, so they commute, and R_{nP+p} = R_p R_{nP}. The cached keys are rotated
    to nP, and the remaining rotation R_p is the same for every token."""

    mixing_modules = ("q_mix", "k_mix", "v_mix", "collapse")

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        num_heads, num_groups = config.num_attention_heads, config.num_key_value_heads
        self.num_pseudo_heads = config.num_pseudo_heads
        self.rope_table = "interleaved" if config.pseudo_positions == "interleaved" else "token"
        self.q_mix = HeadMixing(num_heads, config.num_pseudo_heads)
        self.k_mix = HeadMixing(num_groups, config.num_pseudo_heads)
        self.v_mix = HeadMixing(num_groups, config.num_pseudo_heads)
        self.collapse = HeadCollapse(num_heads, config.num_pseudo_heads, config.pseudo_collapse)

    def attend(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        document_ids: torch.Tensor | None = None,
        attention_form: str | None = None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run steps 2 to 5 on base states, in the `attention_form` that `choose_form` returned.

        Return the output as [`MultiHeadAttention.attend`] does, and weights [batch, H, N * P, keys * P]."""
        # Autocast leaves rotated queries and keys in float32, and their virtual tokens would be in float32 too.
        states = (query_states.to(value_states.dtype), key_states.to(value_states.dtype), value_states)
        mixing = (self.q_mix(query_states), self.k_mix(key_states), self.v_mix(value_states))
        weights = IHAWeights(*mixing, self.collapse(query_states), rotation)
        if attention_form == "absorbed":
            output = absorbed_attention(
                *states,
                weights,
                self.scaling,
                window=self.sliding_window,
                document_ids=document_ids,
                attention_mask=attention_mask,
                product_dtype=product_dtype(value_states),
            )
            return output, None
        steps = (super().attend, *states, weights, attention_mask)
        kwargs = virtual_kwargs({**kwargs, "document_ids": document_ids}, self.num_pseudo_heads)
        if attention_form == "recomputed":
            return torch.utils.checkpoint.checkpoint(attend_interleaved, *steps, use_reentrant=False, **kwargs)
        return attend_interleaved(*steps, **kwargs)
