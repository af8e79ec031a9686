"""Describe kind "talking_heads".

A layer computes the multi-head attention that it replaces while both of its maps are identities."""

import torch

from iha.layer_cost import Cost
from modeling_iha import IHAConfig

from . import Companion, mha


MAPS = ("score_mix.weight", "weight_mix.weight")


def start(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return identity maps."""
    return {name: torch.eye(config.num_attention_heads) for name in MAPS}


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of a score matrix with two maps [H, H] for every pair."""
    maps = 2 * config.num_attention_heads**2
    return mha.score_matrix(config, tokens, window, form, per_pair=maps) + Cost(parameters=maps)


COMPANION = Companion(
    card="Talking-Heads Attention: the heads mix their attention scores before the softmax and their weights after "
    "it.",
    paper="Shazeer et al., 2020, [Talking-Heads Attention](https://arxiv.org/abs/2003.02436)",
    cost=cost,
    start=start,
    control="weight_mix.weight",
)
