"""Describe kind "hyper_feature"."""

from modeling_iha import IHAConfig

from . import Companion
from .cost import Cost, linear, score_matrix


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of a score matrix, and of the projections that a value product adds.

    The scores of all features together take as many multiply-adds as one score of the whole head."""
    options = config.options_of("hyper_feature")
    orders = options.of_heads(config.num_attention_heads)[:: config.num_attention_heads // config.num_key_value_heads]
    more = (sum(orders) - len(orders)) * config.head_dim if options.value_product else 0
    plain = score_matrix(config, tokens, window, form)
    return plain + linear(tokens, config.hidden_size, more, config.attention_bias)


COMPANION = Companion(
    card="HyperFeatureAttention: a head's scores are products of several features' scores.",
    paper="A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions: "
    "Representation, Training, Generalization",
    cost=cost,
    forms={"hyper_feature, order 4": {"attention_options": {"hyper_feature": {"orders": 4}}}},
)
