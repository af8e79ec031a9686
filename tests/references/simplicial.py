"""2-simplicial attention: what "simplicial" is tested against, all pairs of tokens in the loops of `hyper.py`."""

from .hyper import HyperOptions, tuple_attention


def attention(hidden_states, weights, config, layer_idx, **inputs):
    options = HyperOptions(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        theta=config.rope_parameters["rope_theta"],
        norm_eps=config.rms_norm_eps,
    )
    windows = config.attention_options.get("simplicial", {}).get("windows")
    return tuple_attention(hidden_states, weights, options, config, layer_idx, windows, **inputs)
