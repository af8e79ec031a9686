# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Make a cache keep what the windows of virtual tokens reach."""

from typing import Any

from transformers.cache_utils import Cache


# A sliding layer of a cache is built for the window and this many tokens more. With P > 1 a window of W * P virtual
# tokens reaches from (n, p) back to (n - W, p + 1), so all pseudo-heads but the last still see token n - W. A cache
# for a window of W tokens has dropped it, because its length counts the new token: a dynamic layer stores W - 1
# tokens, and a static one drops its oldest when a new one comes.
WINDOW_EDGE = 1


def keep_window_edge(cache: Cache, sliding_window: int | None) -> None:
    """Make each sliding layer of a fresh stock cache keep one more token than its window (see `WINDOW_EDGE`)."""
    for layer in cache.layers:
        if not lacks_window_edge(layer, sliding_window):
            continue
        if layer.get_seq_length() > 0:
            raise ValueError(
                f"The cache was filled for a window of sliding_window={sliding_window} tokens, but a sliding layer "
                f"of this model needs {WINDOW_EDGE} more. Pass a new cache, or none: the model makes its own."
            )
        name = _length_name(layer)
        setattr(layer, name, sliding_window + WINDOW_EDGE)
        if hasattr(layer, "_sliding_window_tensor"):  # a dynamic layer's copy, from which `Cache.__iter__` rebuilds it
            layer._sliding_window_tensor.fill_(sliding_window + WINDOW_EDGE)
        if layer.is_initialized and name == "max_cache_len":
            layer.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])  # `generate` has allocated it


def lacks_window_edge(layer: Any, sliding_window: int | None) -> bool:
    """Return whether a sliding layer of a cache keeps exactly the tokens of the window, and so lacks the edge."""
    # Recurrent layers have no `is_sliding`. A layer with another length was changed on purpose and is left alone.
    return getattr(layer, "is_sliding", False) and getattr(layer, _length_name(layer)) == sliding_window


def _length_name(layer: Any) -> str:
    """Return the name of a sliding layer's length: a dynamic layer has a window, a static one a length."""
    return "sliding_window" if hasattr(layer, "sliding_window") else "max_cache_len"
