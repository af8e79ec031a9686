"""Write out HyperFeatureAttention with loops.

Definition F.3 of "A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions", with the causal
mask of a language model, for a float64 CPU tensor and for the reader. It shares no code with the package and none with
Transformers, and autograd through it gives the reference gradients.

Symbols: N tokens, D model width, H query heads, G key/value groups, d head width; A_h the order of head h, which has
the queries Q^(h,a) and keys K^(h,a), a = 1..A_h, of width w = d / A_h, side by side in the d rows of the head. With a
value product the value is the elementwise product of A_h vectors of width d. In the linear form the scores are the
weights (Definition 5.1).
"""

import math

import torch

from .iha import linear, rms_norm, rotate, visible_keys
from .options import default_inputs, layer_window, llama_inv_freq


def attention(hidden_states, weights, config, layer_idx, **inputs):
    stated = config.attention_options.get("hyper_feature", {})
    num_heads, num_groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    orders = orders_of_heads(config)
    group = num_heads // num_groups
    theta, window = config.rope_parameters["rope_theta"], layer_window(config, layer_idx)

    def turned(vectors, order, positions):
        """Rotate each of the features of the vectors `[N, d]` of one head; return a list of `[N, w]`."""
        # Component i of a vector of width w turns by theta^(-2i / w) per position (RoFormer, 3.2.2).
        inv_freq = llama_inv_freq(width // order, theta)
        features = vectors.split(width // order, dim=-1)
        return [rotate(x, positions, inv_freq) for x in features]

    rows = []
    for x, positions, is_real, document in zip(hidden_states, *default_inputs(hidden_states, **inputs)):
        q = linear(x, weights, "q_proj").reshape(len(x), num_heads, width)
        k = linear(x, weights, "k_proj").reshape(len(x), num_groups, width)
        if "q_norm.weight" in weights:
            q = rms_norm(q, weights["q_norm.weight"], config.rms_norm_eps)
            k = rms_norm(k, weights["k_norm.weight"], config.rms_norm_eps)
        queries = [turned(q[:, h], orders[h], positions) for h in range(num_heads)]
        keys = [turned(k[:, g], orders[g * group], positions) for g in range(num_groups)]
        values = values_of(x, weights, config)

        tokens = []
        for i in range(len(x)):
            seen = visible_keys(i, 1, window, is_real, document) if is_real[i] else []
            heads = [x.new_zeros(width)] * num_heads
            for h in range(num_heads if seen else 0):
                g = h // group
                scores = []
                for j in seen:
                    features = zip(queries[h], keys[g])
                    scores.append(math.prod(query[i] @ key[j] / math.sqrt(len(query[i])) for query, key in features))
                scores = torch.stack(scores)
                shares = scores if stated.get("linear", False) else torch.softmax(scores, dim=0)
                heads[h] = shares @ values[seen, g]
            tokens.append(torch.cat(heads))
        rows.append(linear(torch.stack(tokens), weights, "o_proj"))
    return torch.stack(rows)


def orders_of_heads(config):
    orders = config.attention_options.get("hyper_feature", {}).get("orders", 2)
    return orders if isinstance(orders, list) else [orders] * config.num_attention_heads


def values_of(x, weights, config):
    v = linear(x, weights, "v_proj").reshape(len(x), -1, config.head_dim)
    has_products = config.attention_options.get("hyper_feature", {}).get("value_product", False)
    # Values of the groups, one after the other: with a value product a group has as many as its order.
    values, first = [], 0
    for order in orders_of_heads(config)[:: config.num_attention_heads // config.num_key_value_heads]:
        count = order if has_products else 1
        values.append(math.prod(v[:, first + a] for a in range(count)))
        first += count
    return torch.stack(values, dim=1)
