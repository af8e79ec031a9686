# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define 2-simplicial attention, kind "simplicial" (Fast and Simplex, Section 4).

It is the strongest baseline of IHA, Appendix D."""

import torch

from .configuration_iha import IHAConfig
from .tuple_attention import PairAttention


class SimplicialAttention(PairAttention):
    """Compute 2-simplicial attention, a softmax over all pairs of past tokens in any order.

    The two tokens of a pair have separate keys and values: see [`PairAttention`]."""

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx, sharing=False, windows=config.options_of("simplicial").windows)

    def is_pair(self, j: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(j >= k)
