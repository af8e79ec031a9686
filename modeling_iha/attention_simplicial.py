# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""2-simplicial attention, kind "simplicial" (Fast and Simplex, Section 4; the strongest baseline of IHA, Appendix
D)."""

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
    """Options of kind "simplicial".

    Attributes:
        windows: [w1, w2] for j and k in tokens, the larger being the layer's `sliding_window`; `None` for both that.
    """

    windows: list[int] | None = windows_option()


class SimplicialAttention(PairAttention):
    """2-simplicial attention: a softmax over all pairs of past tokens, in whatever order, with keys and values of
    their own for both tokens, see [`PairAttention`]."""

    kind = "simplicial"
    options_class = SimplicialOptions

    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx, sharing=False, windows=config.options_of("simplicial").windows)

    @classmethod
    def validate(cls, config: IHAConfig) -> None:
        validate_windows(config, "simplicial")

    def is_pair(self, j: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(j >= k)
