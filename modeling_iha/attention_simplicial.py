# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define 2-simplicial attention, kind "simplicial" (Fast and Simplex, Section 4).

It is the strongest baseline of IHA, Appendix D."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from huggingface_hub.dataclasses import strict

from .tuple_attention import PairAttention, validate_windows, windows_option


if TYPE_CHECKING:
    from .configuration_iha import IHAConfig


@strict
@dataclass
class SimplicialOptions:
    """Hold the options of kind "simplicial".

    Attributes:
        windows: [w1, w2] of j and k in tokens; the larger one is the layer's `sliding_window`. `None` sets both to it.
    """

    windows: list[int] | None = windows_option()


class SimplicialAttention(PairAttention):
    """Compute 2-simplicial attention, a softmax over all pairs of past tokens in any order.

    The two tokens of a pair have separate keys and values: see [`PairAttention`]."""

    kind = "simplicial"
    options_class = SimplicialOptions

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx, sharing=False, windows=config.options_of("simplicial").windows)

    @classmethod
    def validate(cls, config: IHAConfig) -> None:
        validate_windows(config, "simplicial")

    def is_pair(self, j: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(j >= k)
