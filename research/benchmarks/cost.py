"""Print the parameters, FLOPs, cached values and values kept for the backward pass of a model.

The table gives each kind of layer, the whole model, and ratios to the same model with "mha" in every layer. The
figures are those of kind_facts/model_cost.py.
"""

import argparse
from collections.abc import Sequence
from dataclasses import astuple

from iha_io.command_io import UserError, run_cli


FORMS = ("sdpa", "base", "eager")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: %(prog)s --preset paper-2.4b-iha --tokens 8192"
    )
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
    return args


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from configuration_iha import PRESETS
from iha_io.checkpoint_io import load_config
from kind_facts.cost import Cost
from kind_facts.model_cost import attention, ffn, head, model, with_mha
from modeling_iha import IHAConfig


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
    args = parse_arguments(argv)
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
