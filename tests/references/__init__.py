"""Compute each attention kind with loops, in one module for each, by the name of the kind.

It defines `attention(hidden_states, weights, config, layer_idx, position_ids=None, padding_mask=None,
document_ids=None)`, the layer [B, N, D] of float64 hidden states [B, N, D] and weights by name, for a config that is
read as data; the rest as in `default_inputs`. None shares code with the package.
"""

from functools import partial
from importlib import import_module


def reference_attention(config, layer_idx):
    """Return `attention(hidden_states, weights, **inputs)` of a layer of the config."""
    module = import_module(f".{config.attention_kinds[layer_idx]}", __name__)
    return partial(module.attention, config=config, layer_idx=layer_idx)
