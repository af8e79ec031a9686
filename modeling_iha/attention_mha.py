# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define multi-head attention, kind "mha", in steps that the other kinds share (virtual_tokens.py has the symbols)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_iha import IHAConfig
from .sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from .transformers_versions import pop_cache


def core_for(attn_implementation: str | None) -> str:
    """Return the attention function that an `IHAModel` calls for the `attn_implementation` of its configuration."""
    return SDPA_IN_BLOCKS if attn_implementation == "sdpa" else attn_implementation or "eager"


class MultiHeadAttention(LlamaAttention):
    """Attend as Llama does. The steps of `forward` are `project`, `attend`, `combine_heads` and the output projection.

    A core is an attention function of Transformers, by its name in `attn_implementation`."""

    mixing_modules: tuple[str, ...] = ()  # submodules that mix heads, which adapters train in full
    rope_table = "token"  # which table of `IHARotaryEmbedding.tables` rotates the queries and keys
    num_pseudo_heads = 1  # virtual tokens of each token

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.layer_type = config.layer_types[layer_idx]
        self.use_rope = config.no_rope_layers[layer_idx] == 1
        self.attention_dropout = config.attention_dropout or 0.0  # a configuration may hold `None`
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.use_qk_norm else None
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.use_qk_norm else None
        self.exclusive_attention = config.exclusive_attention
        gates_of_head = {None: 0, "per_head": 1, "elementwise": self.head_dim}[config.output_gate]
        gates = config.num_attention_heads * gates_of_head
        self.output_gate = nn.Linear(config.hidden_size, gates, bias=False) if gates else None

    @classmethod
    def for_layer(cls, config: IHAConfig, layer_idx: int) -> "MultiHeadAttention":
        return cls(config, layer_idx)

    @property
    def sliding_window(self) -> int | None:
        """Return the window in tokens, or `None`."""
        return self.config.sliding_window if self.layer_type == "sliding_attention" else None

    @property
    def core(self) -> str:
        """Return the name of the attention function. For "sdpa" it is that of `sdpa_in_blocks`."""
        return core_for(self.config._attn_implementation)

    @property
    def mask_name(self) -> str:
        """Return the name of the mask, which layers of one core, layer type and number of virtual tokens share."""
        return f"{self.core}.{self.layer_type}.{self.num_pseudo_heads}"

    @property
    def core_function(self) -> Callable:
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.core, eager_attention_forward)

    def project_heads(self, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """Return queries, keys and values [batch, N, heads, head_dim]. Some kinds map heads, before norms and RoPE."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        return [project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj)]

    def rotate(self, query_states, key_states, cos, sin) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries [batch, H, N, head_dim] and keys [batch, G, N, head_dim] by RoPE [batch, N, head_dim]."""
        return apply_rotary_pos_emb(query_states, key_states, cos, sin)

    def project(self, hidden_states: torch.Tensor, position_embeddings: dict[str, tuple]) -> tuple:
        """Return rotated queries, rotated keys and values [batch, heads, N, head_dim] of [batch, N, hidden_size]."""
        query_states, key_states, value_states = self.project_heads(hidden_states)
        if self.q_norm is not None:
            query_states, key_states = self.q_norm(query_states), self.k_norm(key_states)
        query_states, key_states = query_states.transpose(1, 2), key_states.transpose(1, 2)
        if self.use_rope:
            query_states, key_states = self.rotate(query_states, key_states, *position_embeddings[self.rope_table])
        return query_states, key_states, value_states.transpose(1, 2)

    def attend(self, query_states, key_states, value_states, attention_mask, rotation=None, **kwargs) -> tuple:
        """Return the output [batch, N, H, head_dim] of the core, and the weights [batch, H, N, K] where it gives them.

        `rotation` is that of pseudo-heads within their token. `kwargs` are passed to the core."""
        return self.core_function(self, query_states, key_states, value_states, attention_mask, **kwargs)

    def combine_heads(self, attn_output, hidden_states, own_values) -> torch.Tensor:
        """Return what `o_proj` reads [batch, N, H * head_dim], of the output of `attend` [batch, N, H, head_dim].

        `own_values` [batch, G, N, head_dim] are the values of the same tokens, before any cache."""
        if self.exclusive_attention:  # XSA, arXiv 2603.09078: leave out what is along the head's own value
            own = nn.functional.normalize(own_values.transpose(1, 2), dim=-1, eps=1e-6).unsqueeze(3)
            attn_output = attn_output.unflatten(2, (own.shape[2], -1))  # [batch, N, G, H / G, head_dim]
            attn_output = attn_output - (attn_output * own).sum(dim=-1, keepdim=True) * own
        attn_output = attn_output.reshape(*hidden_states.shape[:-1], -1)
        if self.output_gate is not None:  # arXiv 2505.06708, position G1
            gate = torch.sigmoid(self.output_gate(hidden_states)).unsqueeze(-1)
            attn_output = (attn_output.unflatten(-1, (gate.shape[2], -1)) * gate).flatten(2)
        return attn_output

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: dict[str, tuple], attention_mask: Any = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run as Llama's attention does, with tables of `IHARotaryEmbedding` and a mask of `IHAModel.create_masks`."""
        cache = pop_cache(kwargs)
        query_states, key_states, own_values = self.project(hidden_states, position_embeddings)
        value_states = own_values
        if cache is not None:
            key_states, value_states = cache.update(key_states, own_values, self.layer_idx)
        attn_output, attn_weights = self.attend(
            *(query_states, key_states, value_states, attention_mask),
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            rotation=position_embeddings.get("pseudo_head") if self.use_rope else None,
            **kwargs,
        )
        return self.o_proj(self.combine_heads(attn_output, hidden_states, own_values)), attn_weights
