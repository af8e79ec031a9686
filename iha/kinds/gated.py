"""Describe kind "gated".

Exact start: a gate whose weights are zero is sigmoid(0) = 1/2 for every token, head and element, and a doubled output
projection undoes it. Both factors are powers of two, so nothing is rounded. The output projection's bias stays.
"""

import torch

from iha.layer_cost import Cost, linear
from modeling_iha import IHAConfig

from . import Companion, mha


def _gates(config: IHAConfig) -> int:
    """Return the number of gates of a token."""
    return config.num_attention_heads * (1 if config.options_of("gated").per_head else config.head_dim)


def start(config: IHAConfig, generator: torch.Generator, value_offsets: str) -> dict[str, torch.Tensor]:
    """Return gates of one half."""
    return {"output_gate.weight": torch.zeros(_gates(config), config.hidden_size)}


def from_mha(config: IHAConfig, attention: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a doubled output projection."""
    return {"o_proj.weight": 2 * attention["o_proj.weight"]}


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of multi-head attention and of the gates."""
    return mha.cost(config, tokens, window, form) + linear(tokens, config.hidden_size, _gates(config))


COMPANION = Companion(
    card="gated attention: a sigmoid gate, computed from the layer's input, scales the output of each head.",
    paper="Qiu et al., 2025, [Gated Attention for Large Language Models](https://arxiv.org/abs/2505.06708)",
    cost=cost,
    start=start,
    from_mha=from_mha,
    # At the exact start the gate's weights are zero.
    control="v_proj.weight",
)
