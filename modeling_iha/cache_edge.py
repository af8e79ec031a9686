# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Have a cache keep what the windows of virtual tokens reach."""

from typing import Any

from transformers.cache_utils import Cache


def keep_window_edge(cache: Cache, more: list[int], sliding_window: int | None) -> None:
    """Make sliding layer i of a fresh stock cache keep `more[i]` more tokens: one where P > 1.

    A window of W * P virtual tokens reaches from (n, p) back to (n - W, p + 1). All pseudo-heads but the last still
    see token n - W, which a cache for a window of W tokens has dropped."""
    for layer, tokens in zip(cache.layers, more):
        if tokens == 0 or not lacks_window_edge(layer, sliding_window):
            continue
        if layer.get_seq_length() > 0:
            raise ValueError(
                f"The cache was filled for a window of sliding_window={sliding_window} tokens, but a sliding layer "
                f"of this model needs {tokens} more. Pass a new cache, or none: the model makes its own."
            )
        name = _length_name(layer)
        setattr(layer, name, sliding_window + tokens)
        if layer.is_initialized and name == "max_cache_len":
            layer.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])  # `generate` has allocated it


def lacks_window_edge(layer: Any, sliding_window: int | None) -> bool:
    """Return whether a layer of a cache keeps what a window of tokens reaches, and no more."""
    # A recurrent layer does not say whether it slides. A layer that was made shorter keeps its length.
    return getattr(layer, "is_sliding", False) and getattr(layer, _length_name(layer)) == sliding_window


def _length_name(layer: Any) -> str:
    """Return the name of a sliding layer's length: a dynamic layer has a window, a static one a length."""
    return "sliding_window" if hasattr(layer, "sliding_window") else "max_cache_len"
