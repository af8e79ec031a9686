"""Build an attention layer by itself, as the theorems have it: without positions and output projection.

The map from scores to weights is a choice: the theorems take linear attention, or a softmax at temperature 0.
"""

import torch
from torch import nn
from transformers import AttentionInterface

from modeling_iha import IHAConfig, IHAModel


def linear_core(module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend without softmax, scale and mask: (Q K^T) V."""
    weights = query @ key.transpose(-1, -2)
    return (weights @ value).transpose(1, 2), weights


def hard_core(module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend at temperature 0 without mask: all keys of the highest score have equal weights."""
    scores = query @ key.transpose(-1, -2)
    highest = (scores == scores.amax(dim=-1, keepdim=True)).to(value.dtype)
    weights = highest / highest.sum(dim=-1, keepdim=True)
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register("linear", linear_core)
AttentionInterface.register("hard", hard_core)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected entry."""
    return ((output - expected).abs().max() / expected.abs().max()).item()


class BareAttention(nn.Module):
    """Hold a layer of one kind, whose queries, keys and values are `head_dim` wide, or one more to be even.

    Args:
        kind: of the package, such as "mha".
        width: of the input.
        core: "linear", "hard" or an `attn_implementation` of Transformers.
        overrides: of the config's other fields. RoPE has no effect unless the forward is given positions.
    """

    def __init__(self, kind: str, width: int, num_heads: int, head_dim: int, core: str = "sdpa", **overrides):
        super().__init__()
        fields = {
            "attention_kinds": kind,
            "layer_types": "full_attention",
            "num_hidden_layers": 1,
            "hidden_size": width,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": head_dim + head_dim % 2,  # RoPE rotates pairs
            "num_pseudo_heads": num_heads,
            "pseudo_positions": "shared",
            "pseudo_collapse": "all_heads",
            "initializer_range": width**-0.5,
        }
        model = IHAModel._from_config(
            IHAConfig.from_preset("tiny", **{**fields, **overrides}), attn_implementation=core
        )
        self.layer, self.rotary = model.layers[0].self_attn, model.rotary_emb
        self.layer.o_proj = nn.Identity()

    def by_head(self, *names: str) -> list[torch.Tensor]:
        """Return the transposed weights of projections as views [heads, head_dim, width]."""
        heads = self.layer.config.num_attention_heads
        return [getattr(self.layer, name).weight.unflatten(0, (heads, -1)) for name in names]

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the heads' outputs side by side, [batch, N, heads * head_dim], of inputs [batch, N, width].

        `mask` is that of the core, over virtual tokens.
        """
        if position_ids is None:
            position_ids = torch.zeros(1, x.shape[1], dtype=torch.long, device=x.device)
        return self.layer(x, self.rotary.tables(x, position_ids), mask)[0]
