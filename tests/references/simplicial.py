"""Compute 2-simplicial attention with the loops of `hyper.py`: all pairs of tokens, each with separate keys."""

from .hyper import tuple_attention


def attention(hidden_states, weights, config, layer_idx, **inputs):
    windows = config.attention_options.get("simplicial", {}).get("windows")
    return tuple_attention(hidden_states, weights, config, layer_idx, windows=windows, **inputs)
