"""Compare what interleaved heads and what more key and value heads buy, and what each costs in decoding.

More key and value heads take a larger cache, and a longer time for each decoded token. Pseudo-heads make more
patterns from the same cached keys and values. "iha" with one key and value head and P pseudo-heads is compared with
"mha" at the same cache (G = 1 head) and at one P times as large (G = P). The models learn text as in
language_models.py, at equal parameters; all layers are global.

The price is measured on models of a serving size with the same heads: bytes of cache for a token in a layer, and the
time of a token after a prompt, batch 1, in float32.

example: python -m research.experiments.equal_cache --kinds mha_g1 iha_g1_p2
"""

import argparse
from collections.abc import Sequence

from common.command_io import run_cli
from research.experiments.options import protocol_parser


# Variant -> its fields beside those of the size. The first has the smallest cache, `control` one P times as large.
ONE_HEAD = {"attention_kinds": "iha", "num_key_value_heads": 1}
VARIANTS: dict[str, dict] = {
    **{f"mha_g{groups}": {"num_key_value_heads": groups} for groups in (1, 2, 4)},
    **{f"iha_g1_p{p}": {**ONE_HEAD, "num_pseudo_heads": p, "control": f"mha_g{p}"} for p in (2, 4)},
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return protocol_parser(__doc__, "equal_cache", 0.02, VARIANTS).parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure

from common import plots
from kinds.model_cost import attention
from modeling_iha import IHAForCausalLM
from research.benchmarks.decode_model import NEW_TOKENS, greedy
from research.benchmarks.harness import medians
from research.experiments.language_models import FULL, SMALL, build, compare, plot_differences, size_of, sized
from research.experiments.protocol import COUNTS
from research.experiments.study import begin, write


SERVED = sized(width=512, ffn=1408, layers=4, heads=4, tokens=32768)
TOKENS, PROMPT = 128, 4096  # of a row, and cached where decoding is timed
REPEATS = 5


def add_prices(rows: list[dict]) -> None:
    """Add to each row the bytes that a layer caches for a token in float32, and the seconds of a decoded token."""
    steps = {}
    for row in rows:
        config = build(SERVED, **VARIANTS[row["variant"]])
        torch.manual_seed(0)
        model = IHAForCausalLM(config).eval()
        row["cached_bytes"] = 4 * attention(config, config.attention_kinds[0], "full_attention", 1).cache
        steps[row["variant"]] = greedy(model, torch.randint(config.vocab_size, (1, PROMPT)))
    for row, seconds in zip(rows, medians(steps, REPEATS).values()):
        row["seconds_per_token"] = seconds / NEW_TOKENS


def plot(table: dict) -> Figure:
    """Plot the differences from the smallest cache, and the price of a token."""
    rows = table["rows"]
    base, *others = rows

    def losses(budget: str) -> str:
        found = ((row["variant"], row["minus_base"][budget]["difference"]) for row in others)
        return ", ".join(f"{name} {each['mean']:.3f} ± {each['half_width'] or 0:.3f}" for name, each in found)

    message = (
        f"Loss minus that of {base['variant']}, at equal steps: {losses('steps')}; at equal FLOPs as the paper "
        f"counts: {losses(COUNTS['paper'])}"
    )
    figure, (apart, price) = plots.panels(message, 2, height=2.6)
    plot_differences(apart, rows)
    names = [f"{row['variant']}, {row['cached_bytes']:,} bytes cached" for row in rows]
    plots.dots(price, names, {"_": [1000 * row["seconds_per_token"] for row in rows]})
    price.set(xlabel=f"milliseconds for a token after {table['prompt']:,} (lower is better)")
    price.set_xlim(0, 1.1 * price.get_xlim()[1])
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args)
    table = compare(args, size_of(FULL if args.full else SMALL, TOKENS), VARIANTS)
    add_prices(table["rows"])
    write(args, plot, prompt=PROMPT, **table)


if __name__ == "__main__":
    run_cli(main)
