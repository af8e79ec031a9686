"""Dynamically Composable Multi-Head Attention, and the released DCFormer around it, written out with loops.

The layer follows DCMHA's Equations 4 to 7 and the pseudo-code of its Appendix D, one query, one key and one
composition vector at a time, for a float64 CPU tensor; the model follows the layout of the released checkpoints.
Neither shares code with the package or with the official one, and autograd through them gives the reference gradients.

Symbols: N tokens, D model width, H query heads, G key/value groups, d head width, R rank, M heads in each group of
heads that are composed with one another (M = H in the paper's main form), I = 2 M R. A composition vector of the pair
(query i, key j) is A[:, i, j], the scores or weights of all heads. Token i composes it through w_1 [M, R], w_2 [R, M]
and w_g [M].
"""

import math

import torch
from torch import Tensor

from .iha import _linear, _rotate, _under, _visible_keys, rms_norm
from .options import AttentionOptions, layer_options


def attention(hidden_states, weights, config, layer_idx, **inputs):
    num_groups = config.attention_options.get("dcmha", {}).get("num_groups", 1)
    return dcmha_attention(hidden_states, weights, layer_options(config, layer_idx), num_groups, **inputs)


def dcmha_attention(
    hidden_states: Tensor,
    weights: dict[str, Tensor],
    options: AttentionOptions,
    num_groups: int = 1,
    position_ids: Tensor | None = None,
    padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """One DCMHA layer.

    Args:
        hidden_states: `[B, N, D]`.
        weights: the layer's state dict: {q,k,v,o}_proj.weight, {q,k}_norm.weight if there is QK-norm, and for
            {pre,post}_{query,key} w1.weight `[H / M * I, D]`, w2 `[H / M, 2 R, M, I]` and gate.weight `[H, D]`, and
            {pre,post}_base.weight `[H / M, M, M]`. What the state dict lacks is left out of the composition.
        num_groups: H / M, the groups of heads that are composed.
        options, position_ids, padding_mask, document_ids: as in `iha_attention`.

    Returns:
        `[B, N, D]`.
    """
    batch_size, length, _ = hidden_states.shape
    if position_ids is None:
        position_ids = torch.arange(length).expand(batch_size, length)
    if padding_mask is None:
        padding_mask = torch.ones(batch_size, length, dtype=torch.bool)
    if document_ids is None:
        document_ids = torch.zeros(batch_size, length, dtype=torch.long)
    return torch.stack(
        [
            _one_sequence(
                hidden_states[b], weights, options, num_groups, position_ids[b], padding_mask[b], document_ids[b]
            )
            for b in range(batch_size)
        ]
    )


def _one_sequence(x, weights, options, num_groups, positions, is_real, document):
    length, heads, groups, width = x.shape[0], options.num_heads, options.num_kv_heads, options.head_dim

    q = _linear(x, weights, "q_proj").reshape(length, heads, width)
    k = _linear(x, weights, "k_proj").reshape(length, groups, width)
    v = _linear(x, weights, "v_proj").reshape(length, groups, width)
    if "q_norm.weight" in weights:
        q = rms_norm(q, weights["q_norm.weight"], options.norm_eps)
        k = rms_norm(k, weights["k_norm.weight"], options.norm_eps)
    q = [[_rotate(q[n, h], positions[n], options) for h in range(heads)] for n in range(length)]
    k = [[_rotate(k[n, g], positions[n], options) for g in range(groups)] for n in range(length)]

    token_weights = {
        name: [_composition_weights(x[n], _under(weights, f"{name}."), num_groups) for n in range(length)]
        for name in ("pre_query", "pre_key", "post_query", "post_key")
    }
    outputs = []
    for i in range(length):
        if not is_real[i]:
            outputs.append(x.new_zeros(heads * width))
            continue
        visible = _visible_keys(i, 1, options.window, is_real, document)
        scores = []  # [key] -> [H]
        for j in visible:
            dots = torch.stack([q[i][h] @ k[j][h // (heads // groups)] / math.sqrt(width) for h in range(heads)])
            by_token = token_weights["pre_query"][i] + token_weights["pre_key"][j]
            scores.append(_compose(dots, weights.get("pre_base.weight"), by_token, num_groups))
        softmax = torch.softmax(torch.stack(scores), dim=0)
        output = [x.new_zeros(width) for _ in range(heads)]
        for j, attention in zip(visible, softmax):
            by_token = token_weights["post_query"][i] + token_weights["post_key"][j]
            composed = _compose(attention, weights.get("post_base.weight"), by_token, num_groups)
            for h in range(heads):
                output[h] = output[h] + composed[h] * v[j, h // (heads // groups)]
        outputs.append(torch.cat(output))
    return _linear(torch.stack(outputs), weights, "o_proj")


def _composition_weights(x, weights, num_groups):
    """What one token contributes to each group of heads (Equations 5 and 6): [group] -> (pairs of rows of w_1 and w_2,
    each `[M]`; w_g `[M]` or None); an empty list where it contributes nothing."""
    if not weights:
        return []
    contributions = []
    for group in range(num_groups):
        pairs, gate = [], None
        if "w2" in weights:
            hidden_size = weights["w2"].shape[3]
            hidden = weights["w1.weight"][group * hidden_size : (group + 1) * hidden_size] @ x
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))  # GELU
            rows = [row @ hidden for row in weights["w2"][group]]
            rank = len(rows) // 2
            pairs = [(w1 / torch.sqrt((w1 * w1).mean() + 1e-6), w2) for w1, w2 in zip(rows[:rank], rows[rank:])]
        if "gate.weight" in weights:
            gate = torch.tanh(weights["gate.weight"].chunk(num_groups)[group] @ x)
        contributions.append((pairs, gate))
    return [contributions]


def _compose(attention, base, by_token, num_groups):
    """A' = A W_b + A w_q1 w_q2 + A * w_qg + A w_k1 w_k2 + A * w_kg (Equation 7) of one `[H]` vector, within each group
    of heads; without W_b, a skip connection."""
    composed = []
    for group, a in enumerate(attention.chunk(num_groups)):
        new = a if base is None else a @ base[group]
        for contributions in by_token:
            pairs, gate = contributions[group]
            for w1, w2 in pairs:
                new = new + (a @ w1) * w2
            if gate is not None:
                new = new + a * gate
        composed.append(new)
    return torch.cat(composed)


def group_gated_mlp(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The FFN of the released DCFormers on `[..., D]`: SwiGLU whose channels, in E groups of neighbours, are scaled by
    a softmax over the groups. Takes gate_proj, up_proj, down_proj and group_gate `[E, D]`."""
    inner = torch.nn.functional.silu(_linear(x, weights, "gate_proj")) * _linear(x, weights, "up_proj")
    shares = torch.softmax(_linear(x, weights, "group_gate"), dim=-1)
    size = inner.shape[-1] // shares.shape[-1]
    scaled = [inner[..., c] * shares[..., c // size] for c in range(inner.shape[-1])]
    return _linear(torch.stack(scaled, dim=-1), weights, "down_proj")


def released_causal_lm(
    input_ids: Tensor, weights: dict[str, Tensor], config: dict, layer_windows: list[int | None]
) -> Tensor:
    """Logits `[B, N, vocabulary]` of a released DCFormer.

    Args:
        input_ids: `[B, N]`.
        weights: its state dict: wqkv `[3 D, D]` fused; dyn_w_proj.dw1 `[D, 1, 4, I]`, qkw `[1, 4, I, 2 R, H]` and dd
            `[D, 1, 4 H]`, which stack pre-query, pre-key, post-query and post-key; feed_forward.w1 (gate), w3 (up), w2
            (down) and mg (of the groups).
        config: the entries of its config.json.
        layer_windows: the window of each layer, in tokens.
    """
    heads = config["n_head"]
    head_dim = config["dim"] // heads
    inv_freq = torch.tensor(
        [config["rope_base"] ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64
    )
    hidden = weights["tok_embeddings.weight"][input_ids]
    for i, window in enumerate(layer_windows):
        layer = _under(weights, f"layers.{i}.")
        attention = {"o_proj.weight": layer["attention.wo.weight"]}
        for n, name in enumerate(("q_proj", "k_proj", "v_proj")):
            attention[f"{name}.weight"] = layer["attention.wqkv.weight"][n * config["dim"] : (n + 1) * config["dim"]]
        if config["use_qk_norm"]:
            attention |= {f"{name}.weight": layer[f"attention.{name}.scale"] for name in ("q_norm", "k_norm")}
        for c, name in enumerate(("pre_query", "pre_key", "post_query", "post_key")):
            attention[f"{name}.w1.weight"] = layer["attention.dyn_w_proj.dw1"][:, 0, c].T
            attention[f"{name}.w2"] = torch.einsum("irm->rmi", layer["attention.dyn_w_proj.qkw"][0, c])[None]
            attention[f"{name}.gate.weight"] = layer["attention.dyn_w_proj.dd"][:, 0, c * heads : (c + 1) * heads].T
        # The official QK-norm has an epsilon of its own.
        options = AttentionOptions(heads, heads, head_dim, inv_freq, window=window, norm_eps=1e-6)
        normed = rms_norm(hidden, layer["attention_norm.weight"], config["norm_eps"])
        hidden = hidden + dcmha_attention(normed, attention, options)

        normed = rms_norm(hidden, layer["ffn_norm.weight"], config["norm_eps"])
        names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "mg": "group_gate"}
        mlp = {
            f"{ours}.weight": layer[f"feed_forward.{theirs}.weight"]
            for theirs, ours in names.items()
            if f"feed_forward.{theirs}.weight" in layer
        }
        if "group_gate.weight" not in mlp:
            mlp["group_gate.weight"] = mlp["up_proj.weight"].new_zeros(1, config["dim"])  # one group, whose share is 1
        hidden = hidden + group_gated_mlp(normed, mlp)
    return rms_norm(hidden, weights["norm.weight"], config["norm_eps"]) @ weights["output.weight"].T
