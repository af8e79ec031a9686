"""Compute multi-head attention with the loops of `iha.py`: it is one pseudo-head."""

from .iha import mha_attention
from .options import layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    return mha_attention(hidden_states, weights, layer_options(config, layer_idx), **inputs)
