"""Describe kind "paired_heads".

There is no exact start from Llama: with Llama's weights every head of a group sees the keys and values of the others
too, and the layer has no parameters that could undo it.
"""

from iha.layer_cost import Cost, cached_tokens, score_products
from modeling_iha import IHAConfig

from . import Companion


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of paired heads between the projections: H / P heads over N * P virtual tokens."""
    heads = config.num_attention_heads
    groups = config.num_key_value_heads
    d = config.head_dim
    virtual = config.num_pseudo_heads
    cached = cached_tokens(tokens, window, virtual)
    forward, training = (
        heads // virtual * d * score_products(form, tokens, virtual, window, t) for t in (False, True)
    )
    return Cost(
        prefill=forward,
        training=training,
        decode=2 * heads * d * virtual * (cached + 1),
        cache=2 * groups * d * cached,
    )


COMPANION = Companion(
    card="paired heads: {config.num_pseudo_heads} heads share one sequence, with a virtual token of each head for "
    "each token, and attend to the keys and values of all of them. The layer has the parameters and the KV cache of "
    "ordinary attention.",
    paper="modded-nanogpt, 2026, [Paired Head Attention](https://github.com/KellerJordan/modded-nanogpt/tree/master/"
    "records/track_1_short/2026-01-07_PairedHeadAttention)",
    cost=cost,
    times_pairs=lambda config: config.num_pseudo_heads,
    served_by_vllm=True,
)
