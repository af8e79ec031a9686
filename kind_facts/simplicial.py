"""Describe kind "simplicial"."""

from modeling_iha import IHAConfig

from . import Companion
from .cost import Cost, pair_products, tuples


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of attention to all pairs (j, k)."""
    windows = config.options_of("simplicial").windows
    return tuples(config, tokens, window, 2, *pair_products(config, tokens, window, windows))


COMPANION = Companion(
    card="2-simplicial attention: every token attends to pairs of tokens.",
    paper="Roy et al., 2025, Fast and Simplex: 2-Simplicial Attention in Triton",
    cost=cost,
    forms={"simplicial, windows of 32": {"layer_types": "sliding_attention", "sliding_window": 32}},
)
