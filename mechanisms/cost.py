"""What the cost functions of several mechanisms share: what a `Cost` is, and the products of a score matrix."""

import math
from dataclasses import astuple, dataclass

from modeling_iha import IHAConfig, collapse_first
from modeling_iha.window_blocks import BLOCK


@dataclass(frozen=True)
class Cost:
    """What a part of a model takes for one sequence of N tokens.

    Attributes:
        parameters: their number.
        prefill, training, decode: multiply-adds of a forward, of a forward with its backward, and of one more token
            after N cached ones.
        cache: keys and values that the cache holds, their number.
        kept: values that autograd keeps for the backward, their number.
    """

    parameters: int = 0
    prefill: float = 0
    training: float = 0
    decode: float = 0
    cache: int = 0
    kept: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other))))


def visible_pairs(tokens: int, virtual: int = 1, window: int | None = None) -> int:
    """S: pairs (v, u) of N * P virtual tokens with u <= v and, with a window of W tokens, v - W * P < u."""
    length = tokens * virtual
    span = length if window is None else min(window * virtual, length)
    return span * (span + 1) // 2 + (length - span) * span


def count_segments(tokens: int, virtual: int, window: int | None) -> int:
    """Segments of keys that the backward of collapse-first attention goes through."""
    if window is not None or tokens * virtual <= collapse_first.MAX_UNSEGMENTED_KEYS:
        return 1
    return math.ceil(tokens / max(1, collapse_first.SEGMENT_KEYS // virtual))


def score_products(
    form: str, tokens: int, virtual: int = 1, window: int | None = None, training: bool = False
) -> float:
    """Multiply-adds of one head of size 1, of its products with keys and values, forward or with the backward.

    Args:
        form: "eager" and "dense mask" (SDPA with one) compute all pairs, "sdpa" those that are visible, "blocks" those
            in the blocks of `window_blocks.py`. Of 2 products forward and 4 backward all but "eager" repeat the first
            in the backward. "collapse_first" needs 1 + 1/P and 3 + 2/P, and once more 1 + 1/P where its backward takes
            keys in segments.
    """
    length = tokens * virtual
    if form == "eager":
        return length**2 * (6 if training else 2)
    if form == "dense mask":
        return length**2 * (7 if training else 2)
    if form == "blocks":
        return length * (BLOCK + window * virtual - 1) * (7 if training else 2)
    pairs = visible_pairs(tokens, virtual, window)
    if form == "sdpa":
        return pairs * (7 if training else 2)
    segmented = count_segments(tokens, virtual, window) > 1
    backward = 3 + 2 / virtual + (1 + 1 / virtual if segmented else 0)
    return pairs * (1 + 1 / virtual + (backward if training else 0))


def linear(tokens: int, inputs: int, outputs: int, bias: bool = False) -> Cost:
    products = inputs * outputs
    return Cost(products + bias * outputs, tokens * products, 3 * tokens * products, products)


def score_matrix(
    config: IHAConfig, tokens: int, window: int | None, per_pair: float = 0, linear: float = 0, cached_more: int = 0
) -> Cost:
    """A kind that changes the scores, between the projections: `per_pair` more multiply-adds for each pair, parameters
    in linear maps of every token, and values cached for each. Blocks of scores are computed once more in the
    backward."""
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    cached = tokens if window is None else min(tokens, window - 1)
    per_pair += 2 * heads * d
    forward = per_pair * visible_pairs(tokens, 1, window)
    return Cost(
        parameters=linear,
        prefill=forward + tokens * linear,
        training=4 * forward + 3 * tokens * linear,
        decode=per_pair * (cached + 1) + linear,
        cache=(2 * groups * d + cached_more) * cached,
        kept=tokens * ((2 * heads + 2 * groups) * d + cached_more),
    )


def pair_products(
    config: IHAConfig, tokens: int, window: int | None, windows: list[int] | None
) -> tuple[float, float]:
    """Multiply-adds of a softmax over pairs (j, k), forward and of one more token."""
    first, second = windows or [window, window]
    spans = [[min(n + 1, span or n + 1) for n in range(tokens)] for span in (first, second)]
    # Those that are not in order are computed, and masked.
    pairs = [j * k for j, k in zip(*spans)]
    products = 2 * config.num_attention_heads * config.head_dim
    return products * sum(pairs), products * pairs[-1]


def tuples(config: IHAConfig, tokens: int, window: int | None, stacked: int, forward: float, decode: float) -> Cost:
    """A kind that attends to tuples of tokens, with `stacked` keys and values for each token, between the projections:
    its further projections, its cache, and the multiply-adds `forward` and `decode`, the first computed once more in
    the backward."""
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    more = linear(tokens, config.hidden_size, 2 * (stacked - 1) * groups * d, config.attention_bias)
    cached = tokens if window is None else min(tokens, window - 1)
    states = 2 * stacked * groups * d
    return more + Cost(
        prefill=forward,
        training=4 * forward,
        decode=decode,
        cache=states * cached,
        kept=tokens * (2 * heads * d + states),
    )
