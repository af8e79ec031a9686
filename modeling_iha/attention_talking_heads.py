# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Talking-heads attention, kind "talking_heads" (Shazeer et al. 2020, Talking-Heads Attention, arXiv 2003.02436)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import initialization as init

from .score_matrix import ScoreMatrixAttention


if TYPE_CHECKING:
    from .configuration_iha import IHAConfig


class HeadTalk(nn.Module):
    """A linear map across the heads of a score matrix, the logits or the weights projection of Talking-Heads
    Attention.

    `weight` [H, H] holds in row h, column g the share of head h in head g after the map.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, num_heads))

    def init_mechanism(self, config: IHAConfig):
        """Every head its own: the layer starts as multi-head attention."""
        init.copy_(self.weight, torch.eye(len(self.weight), device=self.weight.device, dtype=self.weight.dtype))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        """Scores or weights [batch, H, rows, columns] after the map."""
        return torch.einsum("hg,bhij->bgij", self.weight.to(matrix.dtype), matrix)


class TalkingHeadsAttention(ScoreMatrixAttention):
    """Talking-heads attention: the heads mix their scores before the softmax, and their weights after it.

    Scores are mixed before they are masked, so that a masked score of one head never reaches another. With
    grouped-query attention each of the H query heads has scores of its own, and all H of them talk.
    """

    kind = "talking_heads"
    mixing_modules = ("score_mix", "weight_mix")

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.score_mix = HeadTalk(config.num_attention_heads)
        self.weight_mix = HeadTalk(config.num_attention_heads)

    def compose_scores(self, scores: torch.Tensor, rows: slice, columns: slice, **kwargs) -> torch.Tensor:
        return self.score_mix(scores)

    def compose_weights(self, weights: torch.Tensor, rows: slice, columns: slice, **kwargs) -> torch.Tensor:
        return self.weight_mix(weights)
