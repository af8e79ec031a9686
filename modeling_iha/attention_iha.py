"""Interleaved Head Attention, kind "iha" (IHA, Algorithm 1 and Definition 3)."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing

from .attention_mha import MultiHeadAttention
from .base_attention import base_attention
from .collapse_first import rotate
from .configuration_iha import IHAConfig
from .triton_kernels import mix_rotate
from .virtual_sequence import virtual_kwargs


class HeadMixing(nn.Module):
    """Pseudo-heads as learned combinations of heads, alpha of IHA, Algorithm 1, step 2.

    `weight` [M, M, P] holds alpha[m, h, p], the share of head m in pseudo-head p of head h.
    """

    def __init__(self, num_heads: int, num_pseudo_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, num_heads, num_pseudo_heads))

    def init_mechanism(self, config: IHAConfig):
        """Every pseudo-head near its own head, as the paper gives no start: the layer starts close to MHA, and the noise sets the
        pseudo-heads apart."""
        noise = torch.randn_like(self.weight) * config.initializer_range
        identity = torch.eye(self.weight.shape[0], device=noise.device, dtype=noise.dtype)
        init.copy_(self.weight, identity.unsqueeze(-1) + noise)

    def forward(self, states: torch.Tensor | None) -> torch.Tensor:
        """The virtual tokens [batch, N, P, M, head_dim] of the heads' states [batch, M, N, head_dim]; of `None`, alpha itself."""
        if states is None:
            return self.weight
        num_heads, _, num_pseudo_heads = self.weight.shape
        alpha = self.weight.to(states.dtype).permute(2, 1, 0).reshape(num_pseudo_heads * num_heads, num_heads)
        mixed = torch.matmul(alpha, states.transpose(1, 2))
        return mixed.unflatten(2, (num_pseudo_heads, num_heads))


class HeadCollapse(nn.Module):
    """The heads' outputs from the pseudo-heads', R of IHA, Algorithm 1, step 5.

    `weight` is [H, P] for `"per_head"`: out[h] = sum_p R[h, p] O[h, p]; and [H, H * P] for `"all_heads"`, which also sums over the
    heads: column (h' - 1) P + p of row h is the share of pseudo-head p of head h' (Definition 3).
    """

    def __init__(self, num_heads: int, num_pseudo_heads: int, pseudo_collapse: str):
        super().__init__()
        self.num_pseudo_heads = num_pseudo_heads
        columns = num_pseudo_heads if pseudo_collapse == "per_head" else num_heads * num_pseudo_heads
        self.weight = nn.Parameter(torch.empty(num_heads, columns))

    def init_mechanism(self, config: IHAConfig):
        """The mean over the pseudo-heads."""
        identity = torch.eye(self.weight.shape[0], device=self.weight.device, dtype=self.weight.dtype)
        if self.weight.shape[1] == self.num_pseudo_heads:
            identity = torch.ones_like(identity[:, :1])
        mean = identity / self.num_pseudo_heads
        init.copy_(self.weight, mean.repeat_interleave(self.num_pseudo_heads, dim=1))

    def forward(self, states: torch.Tensor | None) -> torch.Tensor:
        """Heads [batch, N, H, head_dim] of the attention output [batch, N * P, H, head_dim]; of `None`, R itself."""
        if states is None:
            return self.weight
        states = states.unflatten(1, (-1, self.num_pseudo_heads))
        weight = self.weight.to(states.dtype)
        if weight.shape[1] == self.num_pseudo_heads:
            return torch.einsum("hp,bnphd->bnhd", weight, states)
        return torch.einsum("hgp,bnpgd->bnhd", weight.unflatten(1, (-1, self.num_pseudo_heads)), states)


class InterleavedHeadAttention(MultiHeadAttention):
    """Interleaved Head Attention (IHA, Algorithm 1): every token becomes P virtual tokens whose heads mix all H heads, stock
    causal attention runs once over the N * P virtual tokens, and the pseudo-heads collapse back into heads.

    The mixing emits the layout [batch, N, P, heads, head_dim], of which [batch, N * P, heads, head_dim] is a view: interleaving
    copies nothing, and the attention core is whatever Transformers offers.

    The cache holds what Llama's would, base keys and values at token length, and the virtual ones are rebuilt from it: mixing
    acts across heads and RoPE within a head, so they commute, and R_{nP+p} = R_p R_{nP}. The cached keys are rotated to nP, and
    the remaining rotation R_p is the same for every token.

    With grouped-query attention the G key/value heads mix among themselves.
    """

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        num_heads, num_groups = config.num_attention_heads, config.num_key_value_heads
        self.num_virtual_tokens = config.num_pseudo_heads
        self.rope_table = "interleaved" if config.pseudo_positions == "interleaved" else "token"
        if self.sliding_window is not None:
            self.sliding_window *= self.num_virtual_tokens
        self.q_mix = HeadMixing(num_heads, config.num_pseudo_heads)
        self.k_mix = HeadMixing(num_groups, config.num_pseudo_heads)
        self.v_mix = HeadMixing(num_groups, config.num_pseudo_heads)
        self.collapse = HeadCollapse(num_heads, config.num_pseudo_heads, config.pseudo_collapse)

    def interleave(self, states: torch.Tensor) -> torch.Tensor:
        """Virtual tokens [batch, N, P, heads, head_dim] as the sequence [batch, heads, N * P, head_dim] of the cores; a view."""
        return states.flatten(1, 2).transpose(1, 2)

    def expand(
        self, mix: nn.Module, states: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """The virtual tokens [batch, N, P, heads, head_dim] of states [batch, heads, N, head_dim]: mixed, and turned by R_p, the
        rotation of pseudo-head p within its token."""
        if self.config._attn_implementation == "fused_triton" and not is_tracing(states):
            return mix_rotate(states, mix(None), rotation)
        states = mix(states)
        if rotation is None:
            return states
        cos, sin = rotation
        return rotate(states, cos.unsqueeze(1), sin.unsqueeze(1))

    def attend_base(
        self,
        attention: Callable,
        query_states: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        documents: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Collapsed output [batch, N, H, head_dim] straight from the base states, without a virtual sequence (see `base_attention.py`)."""
        if query_states.shape[2] > 1 and documents is None:
            # As SDPA without a mask: a static cache that was empty is longer than what is filled.
            key_states, value_states = (x[:, :, : query_states.shape[2]] for x in (key_states, value_states))
        # Called, not read: a module may be wrapped (PEFT) or have its weight elsewhere until then (offloading).
        weights = (mix(None) for mix in (self.q_mix, self.k_mix, self.v_mix, self.collapse))
        window = None if self.sliding_window is None else self.sliding_window // self.num_virtual_tokens
        return attention(query_states, key_states, value_states, *weights, rotation, self.scaling, window, documents)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        query_states, key_states, value_states = self.project(hidden_states, position_embeddings, past_key_values)

        rotation = position_embeddings["pseudo_head"] if self.rope_table == "interleaved" else None

        attention = base_attention(self.config, query_states, key_states.shape[2])
        if attention is not None and (attention_mask is None or attention_mask.ndim == 2):
            # One by one, so that of the memory order that `project` leaves nothing is kept.
            query_states = query_states.contiguous()
            key_states = key_states.contiguous()
            value_states = value_states.contiguous()
            attn_output = self.attend_base(attention, query_states, key_states, value_states, attention_mask, rotation)
            return self.o_proj(attn_output.reshape(*input_shape, -1)), None

        query_states = self.expand(self.q_mix, query_states, rotation)
        key_states = self.expand(self.k_mix, key_states, rotation)
        value_states = self.expand(self.v_mix, value_states, None)

        attn_output, attn_weights = self.attend(
            self.interleave(query_states),
            self.interleave(key_states),
            self.interleave(value_states),
            attention_mask,
            **virtual_kwargs(kwargs, self.num_virtual_tokens),
        )

        attn_output = self.collapse(attn_output).reshape(*input_shape, -1)
        return self.o_proj(attn_output), attn_weights
