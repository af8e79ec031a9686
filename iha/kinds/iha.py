"""Describe kind "iha", Interleaved Head Attention (IHA)."""

import torch

from iha.layer_cost import Cost, cached_tokens, score_products
from modeling_iha import IHAConfig
from modeling_iha.exact_start import deviations as deviations_from_start
from modeling_iha.exact_start import exact_start
from modeling_iha.mixing_weights import state_with_values

from . import Companion


def start(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return the mixing and collapse that leave a layer's output unchanged (see modeling_iha/exact_start.py).

    Value offsets from the generator make the pseudo-heads differ. Without one they are equal."""
    return exact_start(heads_of(config), config.num_pseudo_heads, config.pseudo_collapse, generator)


def heads_of(config: IHAConfig) -> tuple[int, int, int]:
    """Return the numbers of query, key and value heads."""
    return config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads


def foldable(config: IHAConfig) -> dict[str, str]:
    """Return {mixing parameter: the projection into which it can be multiplied}, for one pseudo-head.

    Such a layer mixes heads and makes no virtual tokens. RoPE acts within a head, so it commutes with a mixing of
    heads. A QK-norm does not."""
    if config.num_pseudo_heads > 1:
        return {}
    queries_and_keys = {} if config.use_qk_norm else {"q_mix.weight": "q_proj", "k_mix.weight": "k_proj"}
    return {**queries_and_keys, "v_mix.weight": "v_proj", "collapse.weight": "o_proj"}


def to_mha(config: IHAConfig, attention: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the projections with the mixing of one pseudo-head multiplied in, in float64."""
    folded = {}
    for mixing, projection in foldable(config).items():
        weight = attention[mixing].double()
        for name, tensor in attention.items():
            if name.rpartition(".")[0] != projection:
                continue
            if projection != "o_proj":
                rows = tensor.double().unflatten(0, (-1, config.head_dim))
                product = torch.einsum("mh,m...->h...", weight[..., 0], rows).flatten(0, 1)
            elif name.endswith(".weight"):  # its bias follows the collapse
                collapse = weight.diagflat() if config.pseudo_collapse == "per_head" else weight
                columns = tensor.double().unflatten(1, (-1, config.head_dim))
                product = torch.einsum("hg,xhd->xgd", collapse, columns).flatten(1)
            else:
                continue
            folded[name] = product
    return folded


def deviations(attention: torch.nn.Module, config: IHAConfig) -> dict[str, torch.Tensor]:
    """Return the differences from the exact start, and zeros for what folds into the projections.

    For the value offsets return the sum over the pseudo-heads, beyond rounding: for equal keys only the sum matters.
    NaN and infinity become NaN."""
    moved = deviations_from_start(
        state_with_values(attention), heads_of(config), config.num_pseudo_heads, config.pseudo_collapse
    )
    return moved | {name: 0 * moved[name] for name in foldable(config)}


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of Interleaved Head Attention between the projections: mixing, attention and collapse."""
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    d = config.head_dim
    virtual = config.num_pseudo_heads
    per_head = config.pseudo_collapse == "per_head"
    cached = cached_tokens(tokens, window, virtual)
    keys = cached + 1
    mixing = (heads**2 + 2 * groups**2) * virtual
    collapse = heads * virtual * (1 if per_head else heads)
    forward, training = (heads * d * score_products(form, tokens, virtual, window, t) for t in (False, True))
    # A collapse per head is not a matrix product.
    collapsing = 0 if per_head else collapse
    linear_parts = tokens * (mixing + collapsing) * d
    if form == "eager" or not per_head or virtual == 1:
        # The keys and values of all tokens are mixed again for each new token.
        decode = (heads**2 + 2 * groups**2 * keys) * virtual * d + 2 * heads * d * virtual**2 * keys + collapsing * d
    else:
        # Each pseudo-query of a new token is multiplied with every cached head (`attend_new_token`).
        decode = heads * virtual * (groups * d * (virtual + 1) * keys + virtual * keys + heads * d)
    return Cost(
        parameters=mixing + collapse,
        cache=2 * groups * d * cached,
        prefill=forward + linear_parts,
        training=training + 3 * linear_parts,
        decode=decode,
    )


COMPANION = Companion(
    card="Interleaved Head Attention: every head is a learned combination of all heads, and every token takes part "
    "in attention as {config.num_pseudo_heads} interleaved virtual tokens. The KV cache holds base keys and values "
    "only, so it is as large as that of the same model with ordinary attention.",
    paper="Duvvuri, Ekbote, Bansal, Tiwari, Khatri, Brandfonbrener, Liang, Dhillon and Zaheer, 2026, "
    "[Interleaved Head Attention](https://arxiv.org/abs/2602.21371)",
    cost=cost,
    times_pairs=lambda config: config.num_pseudo_heads**2,
    served_by_vllm=True,
    start=start,
    control="v_mix.weight",
)
