# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define Interleaved Head Attention, kind "iha" (IHA, arXiv:2602.21371, Algorithm 1 and Definition 3)."""

from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig
from .interleaving import HeadCollapse, HeadMixing, MixedHeads
from .virtual_tokens import virtual_attention


class InterleavedHeadAttention(MultiHeadAttention):
    """Attend by Interleaved Head Attention (IHA, Algorithm 1).

    By default, without a window, a cache and grouped queries, a layer computes this from its projections q, k and v,
    each [batch, N, H, head_dim]. The rotation is that of RoPE at positions 0 to N * P - 1:

        query = rotate(einsum("bnmd,mhp->bhnpd", q, q_mix).flatten(2, 3))  # [batch, H, N * P, head_dim]
        key = rotate(einsum("bnmd,mhp->bhnpd", k, k_mix).flatten(2, 3))
        value = einsum("bnmd,mhp->bhnpd", v, v_mix).flatten(2, 3)
        output = scaled_dot_product_attention(query, key, value, is_causal=True).unflatten(2, (N, P))
        output = einsum("bhnpd,hp->bnhd", output, collapse)

    With grouped-query attention the G key/value heads mix among themselves. The cache holds base keys and values, as
    Llama's does. Mixing acts across heads and RoPE within a head, so they commute, and T_{nP+p} = T_p T_{nP}, where
    T_x rotates by x positions. Cached keys are rotated by nP, and the remaining T_p is the same for every token."""

    mixing_modules = ("q_mix", "k_mix", "v_mix", "collapse")

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads
        self.num_pseudo_heads = config.num_pseudo_heads
        self.rope_table = "interleaved" if config.pseudo_positions == "interleaved" else "token"
        self.q_mix = HeadMixing(heads, config.num_pseudo_heads, config.mixing_scale)
        self.k_mix = HeadMixing(key_heads, config.num_pseudo_heads, config.mixing_scale)
        self.v_mix = HeadMixing(key_heads, config.num_pseudo_heads, config.mixing_scale)
        self.collapse = HeadCollapse(heads, config.num_pseudo_heads, config.pseudo_collapse, config.mixing_scale)

    def attend(self, query_states, key_states, value_states, attention_mask, rotation=None, **kwargs) -> tuple:
        """Attend over virtual tokens. The weights are [batch, H, N * P, K * P], where the core gives them."""
        heads = MixedHeads.of_module(self, query_states, rotation)
        states = (query_states, key_states, value_states)
        return virtual_attention(self.core_function, self, heads, *states, attention_mask, **kwargs)
