"""Describe kind "mha", multi-head attention."""

from iha.layer_cost import Cost, cached_tokens, counted_pairs, score_products
from modeling_iha import IHAConfig

from . import Companion, virtual_tokens_per_token


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of multi-head attention between the projections."""
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    d = config.head_dim
    cached = cached_tokens(tokens, window, virtual_tokens_per_token(config))
    return Cost(
        prefill=heads * d * score_products(form, tokens, 1, window),
        training=heads * d * score_products(form, tokens, 1, window, training=True),
        decode=2 * heads * d * (cached + 1),
        cache=2 * groups * d * cached,
    )


def score_matrix(
    config: IHAConfig,
    tokens: int,
    window: int | None,
    form: str,
    per_pair: float = 0,
    linear: int = 0,
    cached_more: int = 0,
) -> Cost:
    """Return the cost, between the projections, of a kind that changes the scores.

    `form` is that of `counted_pairs`. `per_pair` are further multiply-adds for each pair, `linear` is the number of
    parameters in linear maps of every token, and `cached_more` are further values cached for each token. The backward
    pass recomputes the blocks."""
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    d = config.head_dim
    cached = cached_tokens(tokens, window, virtual_tokens_per_token(config))
    per_pair += 2 * heads * d
    forward = per_pair * counted_pairs(form, tokens, 1, window)
    return Cost(
        parameters=linear,
        prefill=forward + tokens * linear,
        training=4 * forward + 3 * tokens * linear,
        decode=per_pair * (cached + 1) + linear,
        cache=(2 * groups * d + cached_more) * cached,
    )


COMPANION = Companion(
    card="ordinary multi-head attention.",
    paper="Vaswani et al., 2017, [Attention Is All You Need](https://arxiv.org/abs/1706.03762)",
    cost=cost,
    served_by_vllm=True,
)
