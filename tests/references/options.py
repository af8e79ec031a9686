"""Read the geometry of a layer from a config, and complete the inputs of a layer."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True)
class AttentionOptions:
    """Say what a layer's weights do not.

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
    """Return the `[head_dim / 2]` float64 frequencies theta^(-2i/d) of plain RoPE (RoFormer, section 3.2.2)."""
    return torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)


def layer_options(config, layer_idx: int) -> AttentionOptions:
    """Return the geometry of a layer; frequencies of a RoPE type other than the plain one are Transformers'."""
    layer_type, rope = config.layer_types[layer_idx], config.rope_parameters
    own = {"layer_type": layer_type} if layer_type in rope else {}
    rope = rope.get(layer_type, rope)
    if rope["rope_type"] == "default":
        inv_freq, scaling = llama_inv_freq(config.head_dim, rope["rope_theta"]), 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **own)
    return AttentionOptions(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        inv_freq=inv_freq.double(),
        num_pseudo_heads=config.num_pseudo_heads
        if config.attention_kinds[layer_idx] in ("iha", "paired_heads")
        else 1,
        pseudo_positions=config.pseudo_positions,
        window=layer_window(config, layer_idx),
        rope_scaling=scaling,
        norm_eps=config.rms_norm_eps,
    )


def layer_window(config, layer_idx: int) -> int | None:
    """Return W in tokens, None for a global layer."""
    return config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None


def default_inputs(
    hidden_states: Tensor,
    position_ids: Tensor | None = None,
    padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs of a layer but hidden states `[B, N, D]`, by default those of one document without padding.

    Args:
        position_ids: `[B, N]` RoPE position of each token, default 0..N-1.
        padding_mask: `[B, N]`, True for a real token. Padding is neither a key nor a query; its output is o_proj's
            bias.
        document_ids: `[B, N]`, equal for the tokens of one packed document; a query sees its own document only.
    """
    batch_size, length, _ = hidden_states.shape
    if position_ids is None:
        position_ids = torch.arange(length).expand(batch_size, length)
    if padding_mask is None:
        padding_mask = torch.ones(batch_size, length, dtype=torch.bool)
    if document_ids is None:
        document_ids = torch.zeros(batch_size, length, dtype=torch.long)
    return position_ids, padding_mask, document_ids
