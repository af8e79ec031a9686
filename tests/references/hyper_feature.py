"""HyperFeatureAttention written out with loops: what the kind "hyper_feature" is tested against.

Definition F.3 of "A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions", with the causal
mask of a language model, for a float64 CPU tensor and for the reader. It shares no code with the package and none with
Transformers, and autograd through it gives the reference gradients.

Symbols: N tokens, D model width, H query heads, G key/value groups, d head width; A_h the order of head h, which has
the queries Q^(h,a) and keys K^(h,a), a = 1..A_h, of width w = d / A_h, side by side in the d rows of the head.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .iha import rms_norm
from .options import layer_window


@dataclass(frozen=True)
class HyperFeatureOptions:
    """What a layer's weights do not say.

    Args:
        num_heads: H.
        num_kv_heads: G, a divisor of H. Head h reads key/value group h // (H / G).
        head_dim: d.
        orders: A_h of each head, equal for the heads of a group.
        theta: base of RoPE: component i of a vector of width w turns by theta^(-2i / w) per position (RoFormer,
            3.2.2).
        value_product: the value is the elementwise product of A_h vectors of width d.
        linear: the scores are the weights (Definition 5.1).
        norm_eps: epsilon of the QK-norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    orders: list[int]
    theta: float
    value_product: bool = False
    linear: bool = False
    norm_eps: float = 1e-6


def attention(hidden_states, weights, config, layer_idx, position_ids=None, **masks):
    batch, length, _ = hidden_states.shape
    stated = config.attention_options.get("hyper_feature", {})
    orders = stated.get("orders", 2)
    options = HyperFeatureOptions(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        orders=orders if isinstance(orders, list) else [orders] * config.num_attention_heads,
        theta=config.rope_parameters["rope_theta"],
        value_product=stated.get("value_product", False),
        linear=stated.get("linear", False),
        norm_eps=config.rms_norm_eps,
    )
    if position_ids is None:
        position_ids = torch.arange(length).expand(batch, -1)
    visible = visible_in_rows(batch, length, layer_window(config, layer_idx), **masks)
    rows = [
        hyper_feature_attention(hidden, weights, options, positions, of_row)
        for hidden, positions, of_row in zip(hidden_states, position_ids.expand(batch, -1), visible)
    ]
    return torch.stack(rows)


def hyper_feature_attention(
    hidden_states: Tensor,
    weights: dict[str, Tensor],
    options: HyperFeatureOptions,
    position_ids: Tensor,
    visible: Tensor,
) -> Tensor:
    """One layer, [N, D] from [N, D].

    Args:
        hidden_states: `[N, D]` of one sequence.
        weights: the layer's state dict: {q,k,v,o}_proj.weight and optional .bias, {q,k}_norm.weight if there is
            QK-norm.
        position_ids: `[N]` RoPE position of each token.
        visible: bool `[N, N]`, of query and key, see `visible_keys`.
    """
    length, width = hidden_states.shape[0], options.head_dim
    heads_per_group = options.num_heads // options.num_kv_heads
    q = linear(hidden_states, weights, "q_proj").reshape(length, options.num_heads, width)
    k = linear(hidden_states, weights, "k_proj").reshape(length, options.num_kv_heads, width)
    v = linear(hidden_states, weights, "v_proj").reshape(length, -1, width)
    if "q_norm.weight" in weights:
        q = rms_norm(q, weights["q_norm.weight"], options.norm_eps)
        k = rms_norm(k, weights["k_norm.weight"], options.norm_eps)

    # Values of the groups, one after the other: with a value product a group has as many as its order.
    values, first = [], 0
    for g in range(options.num_kv_heads):
        count = options.orders[g * heads_per_group] if options.value_product else 1
        value = v[:, first]
        for a in range(1, count):
            value = value * v[:, first + a]
        values.append(value)
        first += count

    def turned(vectors, order):
        """RoPE on each of the features of the vectors `[N, d]` of one head: a list of `[N, w]`."""
        features = vectors.split(width // order, dim=-1)
        return [torch.stack([rotate(x[n], position_ids[n], options.theta) for n in range(length)]) for x in features]

    queries = [turned(q[:, h], options.orders[h]) for h in range(options.num_heads)]
    keys = [turned(k[:, g], options.orders[g * heads_per_group]) for g in range(options.num_kv_heads)]

    rows = []
    for i in range(length):
        heads = []
        for h in range(options.num_heads):
            g = h // heads_per_group
            seen = [j for j in range(length) if visible[i, j]]
            if not seen:
                heads.append(hidden_states.new_zeros(width))
                continue
            scores = []
            for j in seen:
                score = 1.0
                for query, key in zip(queries[h], keys[g]):
                    score = score * (query[i] @ key[j]) / math.sqrt(query.shape[-1])
                scores.append(score)
            scores = torch.stack(scores)
            attention = scores if options.linear else torch.softmax(scores, dim=0)
            heads.append(sum(attention[n] * values[g][j] for n, j in enumerate(seen)))
        rows.append(torch.cat(heads))
    return linear(torch.stack(rows), weights, "o_proj")


def visible_keys(
    length: int, window: int | None = None, is_real: Tensor | None = None, document: Tensor | None = None
) -> Tensor:
    """Bool [N, N]: which key a query sees, causal, in its window, real (`is_real` [N]), and of its own document
    ([N])."""
    visible = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i + 1):
            visible[i, j] = (
                (window is None or j > i - window)
                and (is_real is None or bool(is_real[i] and is_real[j]))
                and (document is None or bool(document[i] == document[j]))
            )
    return visible


def visible_in_rows(
    batch: int, length: int, window: int | None, padding_mask: Tensor | None = None, document_ids: Tensor | None = None
) -> list[Tensor]:
    """`visible_keys` of each row; `padding_mask` and `document_ids` are [B, N]."""
    real = [None] * batch if padding_mask is None else padding_mask
    documents = [None] * batch if document_ids is None else document_ids.expand(batch, -1)
    return [visible_keys(length, window, *of_row) for of_row in zip(real, documents)]


def rotate(vector: Tensor, position: Tensor, theta: float) -> Tensor:
    """RoPE of one `[w]` vector in Llama's half-split convention: component i turns with component i + w / 2."""
    half = vector.shape[0] // 2
    angle = torch.tensor([theta ** (-i / half) * float(position) for i in range(half)], dtype=torch.float64)
    first, second = vector[:half], vector[half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()])


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """x W^T + b, b if there is one."""
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out
