# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Choose the layers and the window of the paper, with which a model costs about as much as multi-head attention."""

from collections.abc import Iterable
from typing import TypeVar


Layer = TypeVar("Layer")


def paper_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Return those of some layers that are interleaved and slide: four of every five (IHA, Appendix C)."""
    return [layer for place, layer in enumerate(layers) if place % 5 != 4]


def flop_matched_window(sequence_length: int, num_pseudo_heads: int) -> int:
    """Return W = N / (2 P^2), the window in tokens of a FLOP-matched schedule (IHA, Appendix C).

    Four sliding IHA layers and a global one then attend to about as many pairs as five causal MHA layers."""
    window = sequence_length // (2 * num_pseudo_heads**2)
    if window < 2:
        raise ValueError(
            f"num_pseudo_heads={num_pseudo_heads} leaves no window at {sequence_length} tokens: W = N / (2 P^2) < 2. "
            "Use fewer pseudo-heads, a longer context, or set sliding_window yourself."
        )
    return window
