"""Cost model: multiply-adds, parameters, cached and kept values of a model, layer kind by layer kind, and the ratio to
"mha" everywhere.

Multiply-adds are those of matrix products; norms, rotations and softmax are left out. N tokens, P pseudo-heads, H
heads of d in G groups, and S pairs of a query and a key that see each other: an "iha" layer has P^2 times those of an
"mha" layer, and with a window W = N / (2 P^2) about as many as a global "mha" layer (IHA, Appendix C).

example: python -m benchmarks.cost --preset paper-2.4b-iha --tokens 8192
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from command_io import UserError, run_cli
from configuration_iha import PRESETS
from conversion_scripts.checkpoint_io import load_config
from modeling_iha import IHAConfig
from modeling_iha.collapse_first import MAX_UNSEGMENTED_KEYS
from modeling_iha.window_blocks import BLOCK


FORMS = ("collapse_first", "sdpa", "eager")


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
    segmented = window is None and tokens * virtual > MAX_UNSEGMENTED_KEYS
    backward = 3 + 2 / virtual + (1 + 1 / virtual if segmented else 0)
    return pairs * (1 + 1 / virtual + (backward if training else 0))


def linear(tokens: int, inputs: int, outputs: int, bias: bool = False) -> Cost:
    products = inputs * outputs
    return Cost(products + bias * outputs, tokens * products, 3 * tokens * products, products)


def mha(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Multi-head attention between the projections. Kept are queries, keys, values, output and a sum for each query."""
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    form = "sdpa" if form == "collapse_first" else form
    cached = tokens if window is None else min(tokens, window - 1)
    return Cost(
        prefill=heads * d * score_products(form, tokens, 1, window),
        training=heads * d * score_products(form, tokens, 1, window, training=True),
        decode=2 * heads * d * (cached + 1),
        cache=2 * groups * d * cached,
        kept=tokens * ((2 * heads + 2 * groups) * d + heads),
    )


def iha(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Interleaved Head Attention between the projections: mixing, attention and collapse."""
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    virtual, per_head = config.num_pseudo_heads, config.pseudo_collapse == "per_head"
    if not per_head or virtual == 1:
        form = "sdpa" if form == "collapse_first" else form
    cached = tokens if window is None else min(tokens, window)
    keys = cached + 1
    mixing = (heads**2 + 2 * groups**2) * virtual
    collapse = heads * virtual * (1 if per_head else heads)
    base = tokens * (heads + 2 * groups) * d
    forward, training = (heads * d * score_products(form, tokens, virtual, window, t) for t in (False, True))
    cost = Cost(parameters=mixing + collapse, cache=2 * groups * d * cached)
    if form == "collapse_first":
        # The collapse is of weights, and the mixing happens once more in the backward. Each pseudo-query of a new token
        # goes to every cached head.
        pairs = heads * visible_pairs(tokens, virtual, window)
        return cost + Cost(
            prefill=forward + tokens * mixing * d + pairs,
            training=training + 4 * tokens * mixing * d + 3 * pairs,
            decode=heads * virtual * (groups * d * (virtual + 1) * keys + virtual * keys + heads * d),
            kept=base + tokens * heads * (d + virtual),
        )
    linear_parts = tokens * (mixing + collapse) * d
    return cost + Cost(
        prefill=forward + linear_parts,
        training=training + 3 * linear_parts,
        # Keys and values of all tokens are mixed anew.
        decode=(heads**2 + 2 * groups**2 * keys) * virtual * d + 2 * heads * d * virtual**2 * keys + collapse * d,
        # The output of the virtual tokens once for SDPA and once, in another layout, for the collapse.
        kept=base * (1 + virtual) + tokens * heads * (virtual * (2 * d + 1) + d),
    )


def score_matrix(
    config: IHAConfig, tokens: int, window: int | None, per_pair: float = 0, linear: float = 0, cached_more: int = 0
) -> Cost:
    """A kind that changes the scores, between the projections: `per_pair` more multiply-adds for each pair, parameters in linear maps of
    every token, and values cached for each. Blocks of scores are computed once more in the backward."""
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


def talking_heads(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Two maps [H, H] of every pair."""
    maps = 2 * config.num_attention_heads**2
    return score_matrix(config, tokens, window, per_pair=maps) + Cost(parameters=maps)


def diff(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Every softmax once for each half of the values."""
    twice = mha(config, tokens, window, form)
    more = Cost(4 * config.head_dim, twice.prefill, twice.training, twice.decode)
    return twice + more + Cost(kept=tokens * config.num_attention_heads * config.head_dim)


def dcmha(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Compositions, two of rank R for each stage (DCMHA, Section 3.3)."""
    options, heads = config.options_of("dcmha"), config.num_attention_heads
    groups, rank = options.num_groups, options.rank
    size = heads // groups
    stages = 2 if options.stages == "both" else 1
    sides = 2 if options.sides == "both" else 1
    inner = 2 * size * rank
    weights = groups * inner * (config.hidden_size + 2 * rank * size) + options.gate * heads * config.hidden_size
    base = options.base_map * heads * size
    cached = (options.sides != "query") * stages * heads * (2 * rank + options.gate)
    per_pair = stages * (sides * 2 * rank * heads + base)
    return score_matrix(config, tokens, window, per_pair, stages * sides * weights, cached) + Cost(
        parameters=stages * base
    )


def hyper_feature(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """As many multiply-adds as one score of the whole head; a value product has A projections."""
    options = config.options_of("hyper_feature")
    orders = options.of_heads(config.num_attention_heads)[:: config.num_attention_heads // config.num_key_value_heads]
    more = (sum(orders) - len(orders)) * config.head_dim if options.value_product else 0
    return score_matrix(config, tokens, window) + linear(tokens, config.hidden_size, more, config.attention_bias)


def hyper(config: IHAConfig, tokens: int, window: int | None, form: str, kind: str = "hyper") -> Cost:
    """Pairs (j, k) in place of keys; in the linear form sums [head_dim, head_dim]."""
    options = config.options_of(kind)
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    stacked = 1 if options.sharing else options.order - 1
    more = linear(tokens, config.hidden_size, 2 * (stacked - 1) * groups * d, config.attention_bias)
    cached = tokens if window is None else min(tokens, window - 1)
    if options.linear:
        step = heads * options.order * d**2
        forward, decode = tokens * step, (cached + 1) * step
    else:
        first, second = options.windows or [window, window]
        spans = [[min(n + 1, span or n + 1) for n in range(tokens)] for span in (first, second)]
        # Those that are not in order are computed, and masked.
        pairs = [j * k for j, k in zip(*spans)]
        forward, decode = 2 * heads * d * sum(pairs), 2 * heads * d * pairs[-1]
    states = 2 * stacked * groups * d
    return more + Cost(
        prefill=forward,
        training=4 * forward,
        decode=decode,
        cache=states * cached,
        kept=tokens * (2 * heads * d + states),
    )


def simplicial(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """All pairs (j, k)."""
    return hyper(config, tokens, window, form, kind="simplicial")


# Another kind is a function and a line here.
KINDS = {
    "mha": mha,
    "iha": iha,
    "talking_heads": talking_heads,
    "diff": diff,
    "dcmha": dcmha,
    "hyper_feature": hyper_feature,
    "hyper": hyper,
    "simplicial": simplicial,
}


def attention(config: IHAConfig, kind: str, layer_type: str, tokens: int, form: str = "collapse_first") -> Cost:
    """An attention module with its projections. Raises a ValueError for a kind that has no function in `KINDS`."""
    if kind not in KINDS:
        raise ValueError(
            f"The cost model knows {', '.join(map(repr, KINDS))}, not {kind!r}: add its function to KINDS."
        )
    window = config.sliding_window if layer_type == "sliding_attention" else None
    hidden, bias, norms = config.hidden_size, config.attention_bias, 2 * config.head_dim * config.use_qk_norm
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    projections = linear(tokens, hidden, queries, bias) + linear(tokens, queries, hidden, bias)
    projections += linear(tokens, hidden, keys, bias) + linear(tokens, hidden, keys, bias)
    return projections + Cost(parameters=norms, kept=tokens * hidden) + KINDS[kind](config, tokens, window, form)


def ffn(config: IHAConfig, tokens: int) -> Cost:
    """The FFN. Kept are its input, and of the inner width the input and output of the activation; with a gate also the
    other factor and the product."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    cost = linear(tokens, hidden, inner, bias) + linear(tokens, inner, hidden, bias)
    kept = hidden + 2 * inner
    if config.gated_mlp:
        cost, kept = cost + linear(tokens, hidden, inner, bias), kept + 2 * inner
    return cost + Cost(kept=tokens * kept)


def norm(config: IHAConfig, tokens: int) -> Cost:
    """A norm over the hidden size. Kept are the input, its factor for each token, and their product."""
    return Cost(parameters=config.hidden_size, kept=tokens * (2 * config.hidden_size + 1))


def head(config: IHAConfig, tokens: int) -> Cost:
    """Embedding, last norm and language modeling head, for logits at all tokens."""
    table = linear(tokens, config.hidden_size, config.vocab_size)
    embedding = 0 if config.tie_word_embeddings else table.parameters
    return table + norm(config, tokens) + Cost(embedding, kept=tokens * config.hidden_size)


def model(config: IHAConfig, tokens: int, form: str = "collapse_first") -> Cost:
    """A whole model with one language modeling head."""
    total = head(config, tokens)
    for kind, layer_type in zip(config.attention_kinds, config.layer_types):
        total += attention(config, kind, layer_type, tokens, form) + ffn(config, tokens)
        total += norm(config, tokens) + norm(config, tokens)
    return total


def with_mha(config: IHAConfig, everywhere: str | None = None) -> IHAConfig:
    """The same model with "mha" in every layer, and the layer type `everywhere` if one is given."""
    fields = {**config.to_dict(), "attention_kinds": "mha", "attention_options": None}
    if everywhere is not None:
        fields |= {"layer_types": everywhere, "sliding_window": None}
    return IHAConfig(**fields)


def row(title: str, cost: Cost, tokens: int, value_bytes: int) -> str:
    """Parameters in millions; FLOPs, two to a multiply-add; bytes."""
    figures = (
        f"{cost.parameters / 1e6:.3f} M",
        *(f"{2 * products / 1e9:.3f} G" for products in (cost.prefill, cost.training, cost.decode)),
        f"{value_bytes * cost.cache / tokens:.0f} B",
        f"{value_bytes * cost.kept / 1e6:.1f} MB",
    )
    return f"{title:<30}{''.join(f'{figure:>16}' for figure in figures)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the command line. Raises `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", help="of IHAConfig.from_preset")
    source.add_argument("--config", help="a directory with a config.json of an IHA model, or an id on the Hub")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument(
        "--form", choices=FORMS, default="collapse_first", help='of attention (collapse_first is for "iha" only)'
    )
    parser.add_argument("--bytes", type=int, default=2, help="of a cached or kept value (2)")
    args = parser.parse_args(argv)
    for name in ("tokens", "bytes"):
        if (count := getattr(args, name)) < 1:
            raise UserError(f"--{name} {count}: expected at least 1.")
    if args.preset is not None and args.preset not in PRESETS:
        raise UserError(f"--preset {args.preset}: expected one of {', '.join(PRESETS)}.")
    config = load_config(args.config) if args.preset is None else IHAConfig.from_preset(args.preset)
    if not isinstance(config, IHAConfig):
        raise UserError(f"{args.config} is a {config.model_type!r} model; expected 'iha', as the conversions write.")

    columns = ("parameters", "prefill FLOPs", "training FLOPs", "decode FLOPs", "cache / token", "kept")
    print(f"{'':<30}{''.join(f'{name:>16}' for name in columns)}")
    for kind, layer_type in dict.fromkeys(zip(config.attention_kinds, config.layer_types)):
        cost = attention(config, kind, layer_type, args.tokens, args.form)
        print(row(f"{kind}, {layer_type}", cost, args.tokens, args.bytes))
    print(row("FFN", ffn(config, args.tokens), args.tokens, args.bytes))
    print(row("embedding, last norm, head", head(config, args.tokens), args.tokens, args.bytes))
    whole = model(config, args.tokens, args.form)
    print(row("whole model", whole, args.tokens, args.bytes))
    for title, other in (("mha", with_mha(config)), ("global mha", with_mha(config, "full_attention"))):
        ratios = (a / b for a, b in zip(astuple(whole), astuple(model(other, args.tokens, args.form))))
        print(f"{f'ratio to {title} everywhere':<30}{''.join(f'{ratio:>16.3f}' for ratio in ratios)}")


if __name__ == "__main__":
    run_cli(main)
