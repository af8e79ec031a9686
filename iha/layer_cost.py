"""Count what a layer costs: `Cost`, and the multiply-adds that several mechanisms share."""

from dataclasses import astuple, dataclass

from transformers import PreTrainedConfig

from modeling_iha import IHAConfig


def virtual_tokens_per_token(config: PreTrainedConfig) -> int:
    """Return the number of virtual tokens that the layers with virtual tokens of a model make of each token."""
    kinds = getattr(config, "attention_kinds", None)  # only `IHAConfig` has the field
    if kinds is not None and {"iha", "paired_heads"}.isdisjoint(kinds):
        return 1
    return getattr(config.get_text_config(decoder=True), "num_pseudo_heads", 1)


@dataclass(frozen=True)
class Cost:
    """Hold the cost of a part of a model for one sequence of N tokens.

    Attributes:
        parameters: number of parameters.
        prefill, training, decode: multiply-adds of a forward pass, of a forward and a backward pass, and of one more
            token after N cached ones.
        cache: number of values in the cached keys and values.
    """

    parameters: int = 0
    prefill: float = 0
    training: float = 0
    decode: float = 0
    cache: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other))))


def cached_tokens(tokens: int, window: int | None, virtual: int = 1) -> int:
    """Return how many of N cached tokens a layer keeps for the next one.

    If a model has layers with P > 1 `virtual` tokens for each token, all its windows keep one token more (see
    `keep_window_edge`).
    """
    edge = 1 if virtual > 1 else 0
    return tokens if window is None else min(tokens, window - 1 + edge)


def visible_pairs(tokens: int, virtual: int = 1, window: int | None = None) -> int:
    """Count the pairs (v, u) of N * P virtual tokens with u <= v and, with a window of W tokens, v - W * P < u."""
    length = tokens * virtual
    span = length if window is None else min(window * virtual, length)
    return span * (span + 1) // 2 + (length - span) * span


def counted_pairs(form: str, tokens: int, virtual: int = 1, window: int | None = None) -> int:
    """Count the pairs of N * P virtual tokens that a form computes, or that a paper counts.

    Args:
        form: "eager" computes all pairs, and "sdpa" the visible ones. "paper" is the count of IHA, Appendix C,
            which leaves the causal mask out: all pairs of a global layer, N^2 for "mha", and N * P times W * P of a
            window of W.
    """
    length = tokens * virtual
    span = length if window is None else min(window * virtual, length)
    if form == "paper":
        return length * span
    if form == "eager":
        return length**2
    return visible_pairs(tokens, virtual, window)


def score_products(form: str, tokens: int, virtual: int, window: int | None = None, training: bool = False) -> float:
    """Return the multiply-adds of query-key and weight-value products, for one head of size 1.

    They are those of a forward pass, 2 products of a pair, or, with `training`, of a forward and a backward pass, 4
    more. All forms of `counted_pairs` except "eager" recompute the scores in the backward pass, which is one more.
    """
    products = 2 + training * (4 + (form != "eager"))
    return products * counted_pairs(form, tokens, virtual, window)


def linear(tokens: int, inputs: int, outputs: int, bias: bool = False) -> Cost:
    """Return the cost of a linear map of every token."""
    products = inputs * outputs
    return Cost(products + bias * outputs, tokens * products, 3 * tokens * products, products)


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
