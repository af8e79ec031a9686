# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define Interleaved Head Attention, kind "iha" (IHA, Algorithm 1 and Definition 3)."""

import torch
import torch.utils.checkpoint
from torch import nn
from transformers import initialization as init

from .absorbed_decode import IHAWeights, absorbed_attention, rotate
from .attention_mha import MultiHeadAttention
from .configuration_iha import IHAConfig
from .virtual_tokens import virtual_kwargs


class HeadMixing(nn.Module):
    """Combine heads into pseudo-heads by learned weights, alpha of IHA, Algorithm 1, step 2.

    `weight` [M, M, P] holds alpha[m, h, p], the share of head m in pseudo-head p of head h."""

    def __init__(self, num_heads: int, num_pseudo_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(num_heads).unsqueeze(-1).repeat(1, 1, num_pseudo_heads))

    def init_mechanism(self, config: IHAConfig):
        """Start every pseudo-head near its own head, so that the layer starts close to MHA.

        The paper gives no initialisation. The noise makes the pseudo-heads differ."""
        noise = torch.randn_like(self.weight) * config.initializer_range
        identity = torch.eye(self.weight.shape[0], device=noise.device, dtype=noise.dtype)
        init.copy_(self.weight, identity.unsqueeze(-1) + noise)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return alpha for the states. Wrappers (PEFT, offloading) act on this call, not on the weight."""
        return self.weight


class HeadCollapse(nn.Module):
    """Combine pseudo-heads into heads by learned weights, R of IHA, Algorithm 1, step 5.

    `weight` is [H, P] for `"per_head"`: out[h] = sum_p R[h, p] O[h, p]. It is [H, H * P] for `"all_heads"`, which also
    sums over the heads: column h' * P + p of row h, counted from 0, is the share of pseudo-head p of head h'
    (Definition 3)."""

    def __init__(self, num_heads: int, num_pseudo_heads: int, pseudo_collapse: str):
        super().__init__()
        self.num_pseudo_heads = num_pseudo_heads
        columns = num_pseudo_heads if pseudo_collapse == "per_head" else num_heads * num_pseudo_heads
        self.weight = nn.Parameter(torch.empty(num_heads, columns))
        self.init_mechanism()

    def init_mechanism(self, config: IHAConfig | None = None):
        """Start at the mean over the pseudo-heads."""
        identity = torch.eye(self.weight.shape[0], device=self.weight.device, dtype=self.weight.dtype)
        if self.weight.shape[1] == self.num_pseudo_heads:
            identity = torch.ones_like(identity[:, :1])
        init.copy_(self.weight, identity.repeat_interleave(self.num_pseudo_heads, dim=1) / self.num_pseudo_heads)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return R for the states, as `HeadMixing` returns alpha."""
        return self.weight


def mix(states: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Return pseudo-heads [batch, N, P, M, head_dim] of heads [batch, M, N, head_dim] by alpha [M, M, P] (step 2)."""
    num_heads, _, num_pseudo_heads = alpha.shape
    alpha = alpha.to(states.dtype).permute(2, 1, 0).reshape(num_pseudo_heads * num_heads, num_heads)
    return torch.matmul(alpha, states.transpose(1, 2)).unflatten(2, (num_pseudo_heads, num_heads))


def interleave(states: torch.Tensor) -> torch.Tensor:
    """View pseudo-heads [batch, N, P, M, head_dim] as the virtual sequence [batch, M, N * P, head_dim] (step 3)."""
    return states.flatten(1, 2).transpose(1, 2)


def collapse(states: torch.Tensor, weight: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Collapse virtual tokens [batch, N * P, H, head_dim] to heads [batch, N, H, head_dim] by R (step 5)."""
    states, weight = states.unflatten(1, (-1, num_pseudo_heads)), weight.to(states.dtype)
    if weight.shape[1] == num_pseudo_heads:
        # A product and a sum keep no copy of the states for the backward pass.
        return (states * weight.t().unsqueeze(-1)).sum(dim=2)
    return torch.einsum("hgp,bnpgd->bnhd", weight.unflatten(1, (-1, num_pseudo_heads)), states)


class InterleavedHeadAttention(MultiHeadAttention):
    """Attend by Interleaved Head Attention (IHA, Algorithm 1).

    Every token becomes P virtual tokens whose heads mix all H heads. Stock causal attention runs once over the N * P
    virtual tokens. The pseudo-heads then collapse into heads. With grouped-query attention the G key/value heads mix
    among themselves.

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

    def expand(
        self, states: torch.Tensor, alpha: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Return the virtual sequence [batch, M, N * P, head_dim] of heads [batch, M, N, head_dim] (steps 2, 3).

        `rotation` is R_p, as in [`IHAWeights`]."""
        states = mix(states, alpha)
        if rotation is not None:
            cos, sin = (table.to(states.dtype).unsqueeze(1) for table in rotation)
            states = rotate(states, cos, sin)
        return interleave(states)

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
            masks = {"document_ids": document_ids, "attention_mask": attention_mask}
            return absorbed_attention(*states, weights, self.scaling, window=self.sliding_window, **masks), None
        arguments = (*states, weights, attention_mask)
        kwargs = virtual_kwargs({**kwargs, "document_ids": document_ids}, self.num_pseudo_heads)
        if attention_form == "recomputed":
            return torch.utils.checkpoint.checkpoint(self.attend_virtual, *arguments, use_reentrant=False, **kwargs)
        return self.attend_virtual(*arguments, **kwargs)

    def attend_virtual(
        self,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        weights: IHAWeights,
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run steps 2 to 5 on the virtual sequence, with `kwargs` in virtual tokens."""
        query_states = self.expand(query_states, weights.q_mix, weights.rotation)
        key_states = self.expand(key_states, weights.k_mix, weights.rotation)
        value_states = self.expand(value_states, weights.v_mix, None)
        attn_output, attn_weights = super().attend(query_states, key_states, value_states, attention_mask, **kwargs)
        return collapse(attn_output, weights.collapse, self.num_pseudo_heads), attn_weights
