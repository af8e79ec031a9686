"""Describe kind "hyper"."""

from modeling_iha import IHAConfig

from . import Companion
from .cost import Cost, pair_products, tuples


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of attention to pairs (j, k) or, in the linear form, of running sums [head_dim, head_dim]."""
    options = config.options_of("hyper")
    stacked = 1 if options.sharing else options.order - 1
    if options.linear:
        cached = tokens if window is None else min(tokens, window - 1)
        step = config.num_attention_heads * options.order * config.head_dim**2
        return tuples(config, tokens, window, stacked, tokens * step, (cached + 1) * step)
    return tuples(config, tokens, window, stacked, *pair_products(config, tokens, window, options.windows))


COMPANION = Companion(
    card="HyperAttention: every token attends to tuples of tokens.",
    paper="A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions: "
    "Representation, Training, Generalization",
    cost=cost,
    forms={
        "hyper, windows of 32": {"layer_types": "sliding_attention", "sliding_window": 32},
        "hyper, linear": {"attention_options": {"hyper": {"linear": True}}},
    },
)
