"""Multi-head attention: what "mha" is tested against, one pseudo-head in the loops of `iha.py`."""

from .iha import mha_attention
from .options import layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    return mha_attention(hidden_states, weights, layer_options(config, layer_idx), **inputs)
