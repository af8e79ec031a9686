# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define IHA for vLLM: its Llama with the attention and the FFN of `IHAForCausalLM` in modeling_iha."""

from dataclasses import replace
from functools import cache, partial
from math import gcd

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, extract_layer_index
from vllm.model_executor.models.whisper_causal import WhisperCausalAttentionWithBlockPooling
from vllm.v1.attention.backend import AttentionBackend, MultipleOf, subclass_attention_backend_with_overrides
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import KVCacheSpec

from .checks import KERNEL_BLOCK


@cache
def virtual_backend(pooling: type[AttentionBackend], num_pseudo_heads: int) -> type[AttentionBackend]:
    """Return a backend with block pooling that takes grouped queries and blocks of whole virtual tokens."""

    class Builder(pooling.get_builder_cls()):
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            # Block pooling was made for Whisper, whose layers have as many query heads as key heads.
            self.num_heads_q = get_num_attention_heads_from_layers(vllm_config, layer_names)

    tokens = MultipleOf(KERNEL_BLOCK // gcd(KERNEL_BLOCK, num_pseudo_heads))
    overrides = {
        "get_builder_cls": lambda: Builder,
        "get_supported_kernel_block_sizes": lambda kv_cache_spec=None: [tokens],
    }
    return subclass_attention_backend_with_overrides("Virtual", pooling, overrides)


class VirtualAttention(WhisperCausalAttentionWithBlockPooling):
    """Attend over the virtual sequence, whose P keys and values of each token lie in the paged cache.

    Whisper's block pooling gives the kernel slots, lengths and window in virtual tokens. The cache manager counts
    tokens and keeps W + 1 of them for a window of W."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.attn_backend = virtual_backend(self.attn_backend, self.block_pool_size)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Give a block as many virtual tokens as a block of an "mha" layer has tokens: all pages have one size."""
        spec = super().get_kv_cache_spec(vllm_config)
        return replace(spec, block_size=spec.block_size // self.block_pool_size)


def rotary_tables(config: PreTrainedConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [positions, head_dim / 2], with angles in the dtype of the positions."""
    angles = torch.outer(positions, LlamaRotaryEmbedding(config).inv_freq.to(positions.dtype))
    return angles.cos(), angles.sin()


def rotary_embedding(vllm_config: VllmConfig, kind: str) -> RotaryEmbedding:
    """Build the rotation of token n: by position n, or by n * P in an "iha" layer with interleaved positions."""
    config, length = vllm_config.model_config.hf_config, vllm_config.model_config.max_model_len
    positions = torch.arange(length, dtype=torch.float32)
    if kind == "iha" and config.pseudo_positions == "interleaved":
        positions = positions.double() * config.num_pseudo_heads  # too large for angles in float32
    dtype, head_dim = torch.get_default_dtype(), config.head_dim
    rotary = RotaryEmbedding(head_dim, head_dim, length, 0.0, is_neox_style=True, dtype=dtype, init_cache=False)
    table = torch.cat(rotary_tables(config, positions), dim=-1) * LlamaRotaryEmbedding(config).attention_scaling
    rotary.register_buffer("cos_sin_cache", table.to(dtype), persistent=False)
    return rotary


class MultiHeadAttention(nn.Module):
    """Attend as Llama does, with optional QK-norm."""

    num_pseudo_heads = 1
    attention = Attention

    def __init__(self, vllm_config: VllmConfig, rotary_emb: RotaryEmbedding, prefix: str):
        super().__init__()
        config, layer = vllm_config.model_config.hf_config, extract_layer_index(prefix)
        heads, groups, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.sizes = [heads * self.head_dim, groups * self.head_dim, groups * self.head_dim]
        bias, size = config.attention_bias, config.hidden_size
        self.qkv_proj = QKVParallelLinear(size, self.head_dim, heads, groups, bias=bias, prefix=f"{prefix}.qkv_proj")
        self.o_proj = RowParallelLinear(self.sizes[0], size, bias=bias, prefix=f"{prefix}.o_proj")
        self.norms = config.use_qk_norm
        if self.norms:
            self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.rotary_emb = rotary_emb
        window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.attn = self.attention(
            heads,
            self.head_dim,
            self.head_dim**-0.5,
            num_kv_heads=groups,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=window and window * self.num_pseudo_heads,
            prefix=f"{prefix}.attn",
        )

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.attn(query, key, value)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv_proj(hidden_states)[0].split(self.sizes, dim=-1)
        if self.norms:
            query = self.q_norm(query.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            key = self.k_norm(key.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        query, key = self.rotary_emb(positions, query, key)
        return self.o_proj(self.attend(query, key, value))[0]


class Weight(nn.Module):
    """Hold a mixing weight as a checkpoint does: itself, or the change from a start (`Mixing` of modeling_iha)."""

    def __init__(self, *shape: int, scale: float):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        if scale != 1:
            self.weight_start = nn.Parameter(torch.empty(shape), requires_grad=False)

    def value(self) -> torch.Tensor:
        return self.weight if self.scale == 1 else torch.add(self.weight_start, self.weight, alpha=self.scale)


class InterleavedHeadAttention(MultiHeadAttention):
    """Attend by Interleaved Head Attention; modeling_iha/attention_iha.py explains the steps."""

    def __init__(self, vllm_config: VllmConfig, rotary_emb: RotaryEmbedding, prefix: str):
        config = vllm_config.model_config.hf_config
        self.num_pseudo_heads = config.num_pseudo_heads
        self.attention = partial(VirtualAttention, block_pool_size=config.num_pseudo_heads)
        super().__init__(vllm_config, rotary_emb, prefix)
        heads, groups, pseudo_heads = config.num_attention_heads, config.num_key_value_heads, config.num_pseudo_heads
        weight = partial(Weight, scale=getattr(config, "mixing_scale", 1.0))  # saved before there was one
        self.q_mix = weight(heads, heads, pseudo_heads)
        self.k_mix, self.v_mix = weight(groups, groups, pseudo_heads), weight(groups, groups, pseudo_heads)
        self.collapse = weight(heads, pseudo_heads * (1 if config.pseudo_collapse == "per_head" else heads))
        self.rotation = None
        if config.pseudo_positions == "interleaved":
            tables = rotary_tables(config, torch.arange(pseudo_heads, dtype=torch.float64))
            self.rotation = [table.to(torch.get_default_dtype()).repeat(1, 2).unsqueeze(1) for table in tables]

    def expand(self, states: torch.Tensor, mix: Weight, rotate: bool) -> torch.Tensor:
        """Return virtual tokens [N * P, M * head_dim] of heads [N, M * head_dim]."""
        heads = mix.weight.shape[0]
        alpha = mix.value().permute(2, 1, 0).reshape(-1, heads)
        states = torch.matmul(alpha, states.unflatten(-1, (heads, -1))).unflatten(1, (-1, heads))
        if rotate and self.rotation is not None:
            cos, sin = self.rotation
            states = states * cos + rotate_half(states) * sin
        return states.flatten(0, 1).flatten(1)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key = self.expand(query, self.q_mix, True), self.expand(key, self.k_mix, True)
        output = self.attn(query, key, self.expand(value, self.v_mix, False))
        pseudo_heads, weight = self.num_pseudo_heads, self.collapse.value()
        output = output.view(-1, pseudo_heads, weight.shape[0], self.head_dim)
        if weight.shape[1] == pseudo_heads:  # per head
            return (output * weight.t().unsqueeze(-1)).sum(dim=1).flatten(1)
        return torch.einsum("hgp,npgd->nhd", weight.unflatten(1, (-1, pseudo_heads)), output).flatten(1)


class FeedForward(nn.Module):
    """Apply the gated or the two-matrix FFN, where vLLM's Llama has a gated one with SiLU."""

    def __init__(self, config: PreTrainedConfig, prefix: str):
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gated, self.act_fn = config.gated_mlp, ACT2FN[config.hidden_act]
        outputs = [inner] * (1 + self.gated)
        self.gate_up_proj = MergedColumnParallelLinear(size, outputs, bias=bias, prefix=f"{prefix}.gate_up_proj")
        self.down_proj = RowParallelLinear(inner, size, bias=bias, prefix=f"{prefix}.down_proj")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        channels = self.gate_up_proj(hidden_states)[0]
        if self.gated:
            gate, up = channels.chunk(2, dim=-1)
            channels = self.act_fn(gate) * up
        else:
            channels = self.act_fn(channels)
        return self.down_proj(channels)[0]


class IHADecoderLayer(LlamaDecoderLayer):
    """Run Llama's decoder layer with the attention and the FFN of this file."""

    def __init__(self, vllm_config: VllmConfig, prefix: str, rotary: dict[str, RotaryEmbedding]):
        nn.Module.__init__(self)  # Llama's would build the attention and the FFN that are replaced here.
        config = vllm_config.model_config.hf_config
        kind = config.attention_kinds[extract_layer_index(prefix)]
        attention = InterleavedHeadAttention if kind == "iha" else MultiHeadAttention
        self.self_attn = attention(vllm_config, rotary[kind], f"{prefix}.self_attn")
        self.mlp = FeedForward(config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class IHAForCausalLM(LlamaForCausalLM):
    """Run vLLM's Llama with the decoder layer of this file."""

    def _init_model(self, vllm_config: VllmConfig, prefix: str, layer_type: type[nn.Module]) -> LlamaModel:
        config = vllm_config.model_config.hf_config
        rotary = {kind: rotary_embedding(vllm_config, kind) for kind in set(config.attention_kinds)}
        layer_type = partial(IHADecoderLayer, rotary=rotary)
        model = LlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)
        if not config.gated_mlp:
            stacked = {**model.hf_to_vllm_mapper.orig_to_new_stacked, ".up_proj": (".gate_up_proj", 0)}
            model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_stacked=stacked)
        return model
