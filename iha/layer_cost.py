"""Count what a layer costs: `Cost`, and the multiply-adds that several mechanisms share."""

from dataclasses import astuple, dataclass


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
