"""Write out Dynamically Composable Multi-Head Attention, and the released DCFormer around it, with loops.

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

from .heads import projected_heads
from .iha import linear, rms_norm, under, visible_keys
from .options import AttentionOptions, default_inputs, layer_options, llama_inv_freq


def attention(hidden_states, weights, config, layer_idx, **inputs):
    num_groups = config.attention_options.get("dcmha", {}).get("num_groups", 1)
    return dcmha_attention(hidden_states, weights, layer_options(config, layer_idx), num_groups, **inputs)


def dcmha_attention(
    hidden_states: Tensor,
    weights: dict[str, Tensor],
    options: AttentionOptions,
    num_groups: int = 1,
    **inputs: Tensor | None,
) -> Tensor:
    """Compute one DCMHA layer.

    Args:
        hidden_states: `[B, N, D]`.
        weights: the layer's state dict: {q,k,v,o}_proj.weight, {q,k}_norm.weight if there is QK-norm, and for
            {pre,post}_{query,key} w1.weight `[H / M * I, D]`, w2 `[H / M, 2 R, M, I]` and gate.weight `[H, D]`, and
            {pre,post}_base.weight `[H / M, M, M]`. What the state dict lacks is left out of the composition.
        num_groups: H / M, the groups of heads that are composed.
        options, inputs: as in `iha_attention`.

    Returns:
        `[B, N, D]`.
    """
    rows = zip(hidden_states, *default_inputs(hidden_states, **inputs))
    return torch.stack([_one_sequence(x, weights, options, num_groups, *of_row) for x, *of_row in rows])


def _one_sequence(x, weights, options, num_groups, positions, is_real, document):
    length, heads, groups, width = x.shape[0], options.num_heads, options.num_kv_heads, options.head_dim

    q = projected_heads(x, weights, "q", heads, options, positions)
    k = projected_heads(x, weights, "k", groups, options, positions)
    v = linear(x, weights, "v_proj").reshape(length, groups, width)
    token_weights = {
        name: [_composition_weights(x[n], under(weights, f"{name}."), num_groups) for n in range(length)]
        for name in ("pre_query", "pre_key", "post_query", "post_key")
    }
    outputs = []
    for i in range(length):
        if not is_real[i]:
            outputs.append(x.new_zeros(heads * width))
            continue
        visible = visible_keys(i, 1, options.window, is_real, document)
        scores = []  # [key] -> [H]
        for j in visible:
            dots = torch.stack([q[i, h] @ k[j, h // (heads // groups)] / math.sqrt(width) for h in range(heads)])
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
    return linear(torch.stack(outputs), weights, "o_proj")


def _composition_weights(x, weights, num_groups):
    """Return what one token contributes to each group of heads (Equations 5 and 6), an empty list if nothing.

    A group has pairs of rows of w_1 and w_2, each `[M]`, and w_g, `[M]` or None.
    """
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
    """Compose one `[H]` vector within each group of heads (Equation 7); without W_b, with a skip connection.

    A' = A W_b + A w_q1 w_q2 + A * w_qg + A w_k1 w_k2 + A * w_kg
    """
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
    """Compute the FFN of the released DCFormers on `[..., D]`.

    It is SwiGLU whose channels, in E groups of neighbours, are scaled by a softmax over the groups. The weights are
    gate_proj, up_proj, down_proj and group_gate `[E, D]`.
    """
    inner = torch.nn.functional.silu(linear(x, weights, "gate_proj")) * linear(x, weights, "up_proj")
    shares = torch.softmax(linear(x, weights, "group_gate"), dim=-1)
    size = inner.shape[-1] // shares.shape[-1]
    scaled = [inner[..., c] * shares[..., c // size] for c in range(inner.shape[-1])]
    return linear(torch.stack(scaled, dim=-1), weights, "down_proj")


def released_causal_lm(
    input_ids: Tensor, weights: dict[str, Tensor], config: dict, layer_windows: list[int | None]
) -> Tensor:
    """Return the logits `[B, N, vocabulary]` of a released DCFormer.

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
    inv_freq = llama_inv_freq(head_dim, config["rope_base"])
    hidden = weights["tok_embeddings.weight"][input_ids]
    for i, window in enumerate(layer_windows):
        layer = under(weights, f"layers.{i}.")
        attention = {"o_proj.weight": layer["attention.wo.weight"]}
        for n, name in enumerate(("q_proj", "k_proj", "v_proj")):
            attention[f"{name}.weight"] = layer["attention.wqkv.weight"][n * config["dim"] : (n + 1) * config["dim"]]
        if config["use_qk_norm"]:
            attention |= {f"{name}.weight": layer[f"attention.{name}.scale"] for name in ("q_norm", "k_norm")}
        for c, name in enumerate(("pre_query", "pre_key", "post_query", "post_key")):
            attention[f"{name}.w1.weight"] = layer["attention.dyn_w_proj.dw1"][:, 0, c].T
            attention[f"{name}.w2"] = torch.einsum("irm->rmi", layer["attention.dyn_w_proj.qkw"][0, c])[None]
            attention[f"{name}.gate.weight"] = layer["attention.dyn_w_proj.dd"][:, 0, c * heads : (c + 1) * heads].T
        # The official QK-norm has a separate epsilon.
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
