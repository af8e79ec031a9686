"""Compute each attention kind with loops, in one module for each, by the name of the kind.

It defines `attention(hidden_states, weights, config, layer_idx, position_ids=None, padding_mask=None,
document_ids=None)`, the layer [B, N, D] of float64 hidden states [B, N, D] and weights by name, for a config that is
read as data; the rest as in `default_inputs`. A kind that maps values has `values_of` too, for `additions.py`, which
adds what every kind may have. They share no code with the package.
"""

from functools import partial
from importlib import import_module

from . import additions


def reference_attention(config, layer_idx):
    """Return `attention(hidden_states, weights, **inputs)` of a layer of the config."""
    module = import_module(f".{config.attention_kinds[layer_idx]}", __name__)
    attention = partial(module.attention, config=config, layer_idx=layer_idx)
    if config.output_gate is None and not config.exclusive_attention:
        return attention
    values_of = getattr(module, "values_of", additions.projected_values)
    return partial(additions.attention, bare=attention, values_of=values_of, config=config)
