"""Describe kind "hyper_feature"."""

from iha.layer_cost import Cost, linear
from modeling_iha import IHAConfig

from . import Companion, mha


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of a score matrix, and of the further values of a value product.

    The features of a head divide its channels, so their scores cost together what one score does."""
    options = config.options_of("hyper_feature")
    groups = config.num_key_value_heads
    further = 0
    if options.value_product:
        orders = options.of_heads(config.num_attention_heads)[:: config.num_attention_heads // groups]
        further = (sum(orders) - groups) * config.head_dim
    values = linear(tokens, config.hidden_size, further, config.attention_bias)
    return mha.score_matrix(config, tokens, window, form) + values


COMPANION = Companion(
    card="HyperFeatureAttention: a head's scores are products of several features' scores.",
    paper="A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions: "
    "Representation, Training, Generalization",
    cost=cost,
)
