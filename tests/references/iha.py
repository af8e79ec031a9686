"""Write out Interleaved Head Attention with loops: the model is tested against it.

This follows Algorithm 1 of the IHA paper line by line, for a float64 CPU tensor and for the reader: one loop for each
of the heads, pseudo-heads and queries of the paper, no batching and no masks. It shares no code with the package and
none with Transformers, and autograd through it gives the reference gradients.

Symbols: N tokens, D model width, H query heads, G key/value groups, d head width, P pseudo-heads. Virtual token (n, p)
of the interleaved sequence has index n * P + p, with n and p counted from 0.
"""

import math

import torch
from torch import Tensor

from .options import AttentionOptions, default_inputs, layer_options


def iha_attention(
    hidden_states: Tensor,
    weights: dict[str, Tensor],
    options: AttentionOptions,
    **inputs: Tensor | None,
) -> Tensor:
    """Compute one IHA layer (IHA, Algorithm 1) with either collapse map (its step 5, or Definition 3).

    Args:
        hidden_states: `[B, N, D]`.
        weights: the layer's state dict: {q,k,v,o}_proj.weight and optional .bias, {q,k}_norm.weight if there is
            QK-norm, q_mix.weight `[H, H, P]`, {k,v}_mix.weight `[G, G, P]`, collapse.weight `[H, P]` or `[H, H * P]`.
        options: geometry of the layer.
        inputs: those of `default_inputs`.

    Returns:
        `[B, N, D]`.
    """
    rows = zip(hidden_states, *default_inputs(hidden_states, **inputs))
    return torch.stack([_one_sequence(x, weights, options, *of_row) for x, *of_row in rows])


def attention(hidden_states, weights, config, layer_idx, **inputs):
    return iha_attention(hidden_states, weights, layer_options(config, layer_idx), **inputs)


def mha_attention(hidden_states: Tensor, weights: dict[str, Tensor], options: AttentionOptions, **kwargs) -> Tensor:
    """Compute multi-head attention: one pseudo-head per head that copies the head, collapsed by 1.

    Take a state dict without mixing and collapse; otherwise as `iha_attention`.
    """
    dtype = hidden_states.dtype
    copy = {
        "q_mix.weight": torch.eye(options.num_heads, dtype=dtype).unsqueeze(-1),
        "k_mix.weight": torch.eye(options.num_kv_heads, dtype=dtype).unsqueeze(-1),
        "v_mix.weight": torch.eye(options.num_kv_heads, dtype=dtype).unsqueeze(-1),
        "collapse.weight": torch.ones(options.num_heads, 1, dtype=dtype),
    }
    return iha_attention(hidden_states, weights | copy, options, **kwargs)


def causal_lm(
    input_ids: Tensor, weights: dict[str, Tensor], attentions: list, norm_eps: float = 1e-6, activation=None, **inputs
) -> Tensor:
    """Return the logits `[B, N, vocabulary]` of a whole pre-norm decoder (Llama's).

    Args:
        input_ids: `[B, N]`.
        weights: the causal language model's state dict. What it holds decides the form: a layer without gate_proj has
            the two-matrix FFN, no lm_head means a tied one.
        attentions: of each layer, a function of hidden states, weights and `inputs`.
        norm_eps: epsilon of the RMSNorms.
        activation: FFN activation, SiLU by default.
        inputs: those of `default_inputs`.
    """
    activation = activation or torch.nn.functional.silu
    hidden = weights["model.embed_tokens.weight"][input_ids]
    for i, attention_of_layer in enumerate(attentions):
        layer = under(weights, f"model.layers.{i}.")
        normed = rms_norm(hidden, layer["input_layernorm.weight"], norm_eps)
        hidden = hidden + attention_of_layer(normed, under(layer, "self_attn."), **inputs)
        normed = rms_norm(hidden, layer["post_attention_layernorm.weight"], norm_eps)
        up = linear(normed, layer, "mlp.up_proj")
        if "mlp.gate_proj.weight" in layer:
            inner = activation(linear(normed, layer, "mlp.gate_proj")) * up
        else:
            inner = activation(up)
        hidden = hidden + linear(inner, layer, "mlp.down_proj")
    hidden = rms_norm(hidden, weights["model.norm.weight"], norm_eps)
    return hidden @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _one_sequence(x, weights, options, positions, is_real, document):
    length, num_pseudo = x.shape[0], options.num_pseudo_heads
    heads, groups, width = options.num_heads, options.num_kv_heads, options.head_dim

    base_q = linear(x, weights, "q_proj").reshape(length, heads, width)
    base_k = linear(x, weights, "k_proj").reshape(length, groups, width)
    base_v = linear(x, weights, "v_proj").reshape(length, groups, width)
    if "q_norm.weight" in weights:
        base_q = rms_norm(base_q, weights["q_norm.weight"], options.norm_eps)
        base_k = rms_norm(base_k, weights["k_norm.weight"], options.norm_eps)

    queries = [_interleave(_rotate_all(row, positions, options)) for row in _mix(base_q, weights["q_mix.weight"])]
    keys = [_interleave(_rotate_all(row, positions, options)) for row in _mix(base_k, weights["k_mix.weight"])]
    values = [_interleave(row) for row in _mix(base_v, weights["v_mix.weight"])]

    visible = [visible_keys(v, num_pseudo, options.window, is_real, document) for v in range(length * num_pseudo)]
    outputs = []  # [head][n * P + p] -> [d]
    for h in range(heads):
        g = h // (heads // groups)
        outputs.append([])
        for v in range(length * num_pseudo):
            if not is_real[v // num_pseudo]:
                outputs[h].append(x.new_zeros(width))
                continue
            scores = keys[g][visible[v]] @ queries[h][v] / math.sqrt(width)
            outputs[h].append(torch.softmax(scores, dim=0) @ values[g][visible[v]])

    collapsed = [
        _collapse(outputs, weights["collapse.weight"], h, n, num_pseudo) for n in range(length) for h in range(heads)
    ]
    return linear(torch.stack(collapsed).reshape(length, heads * width), weights, "o_proj")


def _mix(base, alpha):
    """Return X~[h][p] = sum_m alpha[m, h, p] X[:, m], each `[N, d]` (IHA, Algorithm 1, step 2)."""
    sources, heads, num_pseudo = alpha.shape
    return [
        [sum(alpha[m, h, p] * base[:, m] for m in range(sources)) for p in range(num_pseudo)] for h in range(heads)
    ]


def _interleave(pseudo):
    """Interleave the P sequences `[N, d]` of one head: (1,1)..(1,P),(2,1)..(N,P), `[N * P, d]`."""
    length = pseudo[0].shape[0]
    return torch.stack([pseudo[p][n] for n in range(length) for p in range(len(pseudo))])


def _rotate_all(pseudo, positions, options):
    """Rotate the P sequences `[N, d]` of one head."""
    rotated = []
    for p, x in enumerate(pseudo):
        virtual = positions * options.num_pseudo_heads + p if options.pseudo_positions == "interleaved" else positions
        rotated.append(rotate(x, virtual, options.inv_freq, options.rope_scaling))
    return rotated


def rotate(vectors: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> Tensor:
    """Rotate vectors `[..., d]` at positions `[...]` as Llama does: component i turns with component i + d/2."""
    angle = positions[..., None] * inv_freq
    cos, sin = torch.cos(angle) * scaling, torch.sin(angle) * scaling
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def visible_keys(v, num_pseudo, window, is_real, document):
    """Return the indices of the virtual keys that virtual query v sees.

    They are causal, in its window, real, and of its document.
    """
    n = v // num_pseudo
    first = 0 if window is None else max(0, v - window * num_pseudo + 1)
    return [u for u in range(first, v + 1) if is_real[u // num_pseudo] and document[u // num_pseudo] == document[n]]


def _collapse(outputs, weight, h, n, num_pseudo):
    """Collapse head h of token n: its own P outputs (weight `[H, P]`), or those of all heads (`[H, H * P]`)."""
    sources = [h] if weight.shape[1] == num_pseudo else range(len(outputs))
    return sum(
        weight[h, i * num_pseudo + p] * outputs[source][n * num_pseudo + p]
        for i, source in enumerate(sources)
        for p in range(num_pseudo)
    )


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """Return x W^T + b, without b where there is none."""
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def under(weights, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
