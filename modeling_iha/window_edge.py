# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Make stock caches keep every token that the window of a layer reaches."""

from transformers.cache_utils import Cache

from .mask_inputs import MaskKey


def keep_window_edge(past_key_values: Cache, layers: list[MaskKey], sliding_window: int | None) -> None:
    """Make the sliding layers of a fresh stock cache keep one more token where P > 1, and `past_queries` more.

    A window of W * P virtual tokens reaches from (n, p) back to (n - W, p + 1). All pseudo-heads but the last still
    see token n - W, which a cache for a window of W tokens has dropped. A window of one token needs this for every P,
    because its stock cache layer wrongly drops no token. The first past query's window begins earlier."""
    for layer, key in zip(past_key_values.layers, layers):
        more = key.past_queries or int(key.num_pseudo_heads > 1 or sliding_window == 1)
        if not key.is_sliding or more == 0 or not layer.is_sliding:
            continue
        # A dynamic layer names its window, a static one its length. A layer that was made shorter keeps its length.
        name = "sliding_window" if hasattr(layer, "sliding_window") else "max_cache_len"
        if getattr(layer, name) != sliding_window:
            continue
        if layer.get_seq_length() > 0:
            raise ValueError(
                f"The cache was filled for a window of sliding_window={sliding_window} tokens, but a sliding layer "
                f"of this model needs {more} more. Pass a new cache, or none: the model makes its own."
            )
        setattr(layer, name, sliding_window + more)
        if layer.is_initialized and name == "max_cache_len":
            layer.lazy_initialization(layer.keys[:, :, :0], layer.values[:, :, :0])  # `generate` has allocated it
