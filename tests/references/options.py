"""The geometry of a layer with ordinary heads, and how a config states it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer's weights do not say.

    Args:
        num_heads: H.
        num_kv_heads: G, a divisor of H. Head h reads key/value group h // (H / G).
        head_dim: d.
        inv_freq: `[d / 2]` rotation frequencies of RoPE in radians per position (see `llama_inv_freq`).
        num_pseudo_heads: P.
        pseudo_positions: "interleaved" puts virtual token (n, p) at RoPE position n * P + p, as the paper does,
            "shared" at n.
        window: W in tokens, or None for a global layer: virtual query v sees the keys v - W * P < u <= v.
        rope_scaling: factor on both the cosine and the sine (YaRN's attention factor).
        norm_eps: epsilon of the RMSNorms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    inv_freq: Tensor
    num_pseudo_heads: int = 1
    pseudo_positions: str = "interleaved"
    window: int | None = None
    rope_scaling: float = 1.0
    norm_eps: float = 1e-6


def llama_inv_freq(head_dim: int, theta: float) -> Tensor:
    """The `[head_dim / 2]` float64 frequencies theta^(-2i/d) of plain RoPE (RoFormer, section 3.2.2)."""
    return torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)


def layer_options(config, layer_idx: int) -> AttentionOptions:
    """The geometry of a layer of the config. Frequencies of a RoPE type other than the plain one are Transformers'."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        inv_freq, scaling = llama_inv_freq(config.head_dim, rope["rope_theta"]), 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    return AttentionOptions(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        inv_freq=inv_freq.double(),
        num_pseudo_heads=config.num_pseudo_heads if config.attention_kinds[layer_idx] == "iha" else 1,
        pseudo_positions=config.pseudo_positions,
        window=layer_window(config, layer_idx),
        rope_scaling=scaling,
        norm_eps=config.rms_norm_eps,
    )


def layer_window(config, layer_idx: int) -> int | None:
    """W in tokens, None for a global layer."""
    return config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
