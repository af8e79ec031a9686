"""Describe kind "mha", multi-head attention."""

from iha.layer_cost import Cost, cached_tokens, score_products, virtual_tokens_per_token
from modeling_iha import IHAConfig

from . import Companion


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


COMPANION = Companion(
    card="ordinary multi-head attention.",
    paper="Vaswani et al., 2017, [Attention Is All You Need](https://arxiv.org/abs/1706.03762)",
    cost=cost,
)
