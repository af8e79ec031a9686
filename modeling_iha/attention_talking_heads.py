# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define kind "talking_heads" (Shazeer et al. 2020, Talking-Heads Attention, arXiv 2003.02436)."""

import torch

from .configuration_iha import IHAConfig
from .mixing import Mixing
from .score_matrix import ScoreMatrixAttention


class HeadTalk(Mixing):
    """Map scores or weights linearly across heads, by the logits or the weights projection of the paper.

    The value of `weight` [H, H] holds in row h, column g the share of head h in head g after the map."""

    def __init__(self, num_heads: int, scale: float):
        super().__init__(scale)
        self.add_weight("weight", torch.eye(num_heads))

    def init_mechanism(self, config: IHAConfig):
        """Start at the identity, so that the layer starts as multi-head attention."""
        self.init_weight("weight", torch.eye(len(self.weight)))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return scores or weights [batch, H, rows, columns] after the map."""
        return torch.einsum("hg,bhij->bgij", self.value().to(matrix.dtype), matrix)


class TalkingHeadsAttention(ScoreMatrixAttention):
    """Mix the scores of the heads before the softmax, and their weights after it: talking-heads attention.

    Scores are mixed before they are masked, so that a masked score of one head never reaches another. With
    grouped-query attention each of the H query heads has its own scores, and all H of them mix."""

    mixing_modules = ("score_mix", "weight_mix")

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.score_mix = HeadTalk(config.num_attention_heads, config.mixing_scale)
        self.weight_mix = HeadTalk(config.num_attention_heads, config.mixing_scale)

    def compose_scores(self, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        return self.score_mix(scores)

    def compose_weights(self, weights: torch.Tensor, **kwargs) -> torch.Tensor:
        return self.weight_mix(weights)
