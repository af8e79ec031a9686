"""Predict the parameters, FLOPs, cached values and values kept for the backward pass of a model.

The table gives each kind of layer, the whole model, and ratios to the same model with "mha" in every layer. The
multiply-adds of matrix products are counted; norms, rotations and softmax are not. An "iha" layer with P pseudo-heads
has P^2 times the query-key pairs of an "mha" layer, and with a window W = N / (2 P^2) about as many as a global "mha"
layer over N tokens (IHA, Appendix C).

example: python -m benchmarks.cost --preset paper-2.4b-iha --tokens 8192
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from command_io import UserError, run_cli
from configuration_iha import PRESETS
from conversion_scripts.checkpoint_io import load_config
from mechanisms import all_mechanisms, mechanism_of
from mechanisms.cost import Cost, linear
from modeling_iha import IHAConfig


FORMS = ("sdpa", "base", "eager")


def attention(config: IHAConfig, kind: str, layer_type: str, tokens: int, form: str = "sdpa") -> Cost:
    """Return the cost of an attention module with its projections.

    Raise a ValueError for a kind whose mechanism has no cost function."""
    if (between := mechanism_of(kind).cost) is None:
        known = [known for known, mechanism in all_mechanisms().items() if mechanism.cost]
        raise ValueError(
            f"The cost model knows {', '.join(map(repr, known))}, not {kind!r}: add its function to mechanisms/{kind}.py."
        )
    window = config.sliding_window if layer_type == "sliding_attention" else None
    hidden, bias, norms = config.hidden_size, config.attention_bias, 2 * config.head_dim * config.use_qk_norm
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    projections = linear(tokens, hidden, queries, bias) + linear(tokens, queries, hidden, bias)
    projections += linear(tokens, hidden, keys, bias) + linear(tokens, hidden, keys, bias)
    return projections + Cost(parameters=norms, kept=tokens * hidden) + between(config, tokens, window, form)


def ffn(config: IHAConfig, tokens: int) -> Cost:
    """Return the cost of the FFN.

    Autograd keeps its input and, at inner width, both ends of the activation and, with a gate, factor and product."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    cost = linear(tokens, hidden, inner, bias) + linear(tokens, inner, hidden, bias)
    kept = hidden + 2 * inner
    if config.gated_mlp:
        cost, kept = cost + linear(tokens, hidden, inner, bias), kept + 2 * inner
    return cost + Cost(kept=tokens * kept)


def norm(config: IHAConfig, tokens: int) -> Cost:
    """Return the cost of a norm; autograd keeps the input, a factor for each token, and their product."""
    return Cost(parameters=config.hidden_size, kept=tokens * (2 * config.hidden_size + 1))


def head(config: IHAConfig, tokens: int) -> Cost:
    """Return the cost of embedding, last norm and language modeling head, with logits at all tokens."""
    table = linear(tokens, config.hidden_size, config.vocab_size)
    embedding = 0 if config.tie_word_embeddings else table.parameters
    return table + norm(config, tokens) + Cost(embedding, kept=tokens * config.hidden_size)


def model(config: IHAConfig, tokens: int, form: str = "sdpa") -> Cost:
    """Return the cost of a whole model with its language modeling head."""
    total = head(config, tokens)
    for kind, layer_type in zip(config.attention_kinds, config.layer_types):
        total += attention(config, kind, layer_type, tokens, form) + ffn(config, tokens)
        total += norm(config, tokens) + norm(config, tokens)
    return total


def with_mha(config: IHAConfig, everywhere: str | None = None) -> IHAConfig:
    """Return the config with "mha" in every layer, and with the layer type `everywhere` if it is given."""
    fields = {**config.to_dict(), "attention_kinds": "mha", "attention_options": None}
    if everywhere is not None:
        fields |= {"layer_types": everywhere, "sliding_window": None}
    return IHAConfig(**fields)


def row(title: str, cost: Cost, tokens: int, value_bytes: int) -> str:
    """Return a line of the table: parameters in millions, FLOPs (two for each multiply-add), and bytes."""
    figures = (
        f"{cost.parameters / 1e6:.3f} M",
        *(f"{2 * products / 1e9:.3f} G" for products in (cost.prefill, cost.training, cost.decode)),
        f"{value_bytes * cost.cache / tokens:.0f} B",
        f"{value_bytes * cost.kept / 1e6:.1f} MB",
    )
    return f"{title:<30}{''.join(f'{figure:>16}' for figure in figures)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table that the arguments ask for, or raise a `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--preset", help="name of a preset of IHAConfig.from_preset")
    source.add_argument("--config", help="IHA model: a directory with a config.json, or a Hub id")
    parser.add_argument("--tokens", type=int, required=True, help="length of the sequence")
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="sdpa",
        help='form of attention; base is SDPA with "iha" layers that keep base states only (default: sdpa)',
    )
    parser.add_argument("--bytes", type=int, default=2, help="bytes of a cached or kept value (default: 2)")
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
