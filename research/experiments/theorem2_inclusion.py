"""Compare multi-head attention with the IHA layers of Theorem 2 of "Interleaved Head Attention".

The theorem (5 in Appendix B.1): a layer of multi-head attention is an IHA layer of any number P of pseudo-heads with
4 H^2 P more parameters, and for P >= 2 not every IHA layer is one of multi-head attention.

Inclusion: with the proof's mixing every pseudo-head is a copy of its head, and the collapse selects one of them. The
proof has no mask. Here random layers of the package, with the proof's weights, are compared with multi-head attention
without a mask, under the causal mask of the interleaved sequence, and with RoPE at the positions n and n P + p.

Strictness: on repeated tokens 1 x^T multi-head attention is linear in x. The IHA of Appendix B.1 has the queries and
keys [Q; -Q] and [K; -K] and the values [V; V]. Section 4.1 asks for a difference of softmax terms, for which the
values are [V; -V] and the output is V tanh(<q, k> / sqrt(d)). Both are measured by f(2 x) - 2 f(x).

example: python -m research.experiments.theorem2_inclusion
"""

import argparse
from collections.abc import Sequence
from itertools import product

from iha_io.command_io import run_cli
from research.experiments.options import study_parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return study_parser(__doc__, "theorem2_inclusion", seeds=5, keeps_runs=False).parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure

from iha_io import plots
from modeling_iha.virtual_core import virtual_tokens
from research.experiments.bare_attention import BareAttention, relative_error
from research.experiments.study import begin, spread, write


WIDTH, HEADS, HEAD_DIM, LENGTH = 32, 4, 8, 12
PSEUDO_HEADS = (1, 2, 3, 4, 8)
# The masks and RoPE positions that the inclusion is measured with: is it causal, and `pseudo_positions`, if any.
SETTINGS = {
    "no mask": (False, None),
    "causal": (True, None),
    "causal, RoPE at n": (True, "shared"),
    "causal, RoPE at n P + p": (True, "interleaved"),
}


def attention(kind: str, seed: int, **overrides) -> BareAttention:
    """Return a layer with projections drawn by `seed`, the same ones for both kinds."""
    layer = BareAttention(kind, WIDTH, HEADS, HEAD_DIM, **overrides).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.layer, name).weight
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / WIDTH**0.5)
    return layer


def select(layer: BareAttention, pseudo_head: int) -> BareAttention:
    """Give `layer` the proof's weights: all pseudo-heads are copies of their head, and the collapse picks one."""
    module, virtual = layer.layer, virtual_tokens(layer.layer.config)
    with torch.no_grad():
        for mixing in (module.q_mix, module.k_mix, module.v_mix):
            mixing.weight.copy_(torch.eye(HEADS).unsqueeze(-1))
        module.collapse.weight.zero_()
        module.collapse.weight[range(HEADS), [head * virtual + pseudo_head for head in range(HEADS)]] = 1
    return layer


def mask(causal: bool, num_pseudo_heads: int) -> torch.Tensor:
    """Return which virtual keys a virtual query sees, bool [1, 1, N P, N P]."""
    ones = torch.ones(1, 1, *[LENGTH * num_pseudo_heads] * 2, dtype=torch.bool)
    return ones.tril() if causal else ones


@torch.no_grad()
def inclusion_error(setting: str, num_pseudo_heads: int, pseudo_head: int, seed: int) -> float:
    """Return the largest difference between "mha" and the proof's IHA, over the largest output."""
    causal, positions = SETTINGS[setting]
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    position_ids = None if positions is None else torch.arange(LENGTH)[None]
    overrides = {"num_pseudo_heads": num_pseudo_heads, "pseudo_positions": positions or "shared"}
    iha = select(attention("iha", seed, **overrides), pseudo_head)
    expected = attention("mha", seed)(x, mask(causal, 1), position_ids)
    return relative_error(iha(x, mask(causal, num_pseudo_heads), position_ids), expected)


def strict_layers(seed: int) -> dict[str, BareAttention]:
    """Return multi-head attention, and the IHA layers with P = 2 of the two places of the proof."""
    layers = {"MHA": attention("mha", seed)}
    for name, value_sign in {"IHA, Appendix B.1": 1, "IHA, Section 4.1": -1}.items():
        layer = select(attention("iha", seed, num_pseudo_heads=2), 0)
        with torch.no_grad():
            for mixing, sign in ((layer.layer.q_mix, -1), (layer.layer.k_mix, -1), (layer.layer.v_mix, value_sign)):
                mixing.weight[..., 1] *= sign
        layers[name] = layer
    return layers


@torch.no_grad()
def repeated(layer: BareAttention, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs at one token of the repeated tokens 1 x^T, for directions [rows, width]."""
    return layer(x[:, None].expand(-1, LENGTH, -1), mask(False, virtual_tokens(layer.layer.config)))[:, 0]


def nonlinearity(layer: BareAttention, seed: int) -> float:
    """Return |f(2 x) - 2 f(x)| / |f(2 x)| on repeated tokens."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    doubled = repeated(layer, 2 * x)
    return ((doubled - 2 * repeated(layer, x)).norm() / doubled.norm()).item()


def parameters(kind: str, **overrides) -> int:
    return sum(weight.numel() for weight in attention(kind, 0, **overrides).layer.parameters())


def plot(table: dict) -> Figure:
    """Plot the largest errors of the table, and the curves of layers that are drawn again."""
    inclusion, seed = table["inclusion"], table["seeds"][0]

    def largest(setting: str, selected: str) -> float:
        return max(
            row["error"]["max"] for row in inclusion if (row["setting"], row["selected"]) == (setting, selected)
        )

    message = (
        "IHA can be MHA (errors of rounding: below 1e-14) where the right pseudo-head is selected, and more than MHA"
    )
    figure, (errors, curves) = plots.panels(message, 2, 2, 3.4)
    found = {
        f"the {selected} pseudo-head is selected": [largest(setting, selected) for setting in SETTINGS]
        for selected in ("first", "last")
    }
    plots.dots(errors, list(SETTINGS), found)
    errors.set(title="inclusion", xscale="log", xlabel="difference from MHA,\nworst of all seeds and P")
    scale = torch.linspace(-3, 3, 61, dtype=torch.float64)
    direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for (name, layer), style in zip(strict_layers(seed).items(), ("k-", "C8--", "C9-.")):
        curves.plot(scale, repeated(layer, scale[:, None] * direction)[:, 0], style, linewidth=2, label=name)
    curves.set(title="strictness: repeated tokens t x", xlabel="t", ylabel="one coordinate of the output")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results."""
    args = parse_arguments(argv)
    begin(args)
    inclusion = []
    for setting, virtual in product(SETTINGS, PSEUDO_HEADS):
        for selected, pseudo_head in {"first": 0, "last": virtual - 1}.items():
            errors = [inclusion_error(setting, virtual, pseudo_head, seed) for seed in args.seeds]
            row = {"setting": setting, "pseudo_heads": virtual, "selected": selected, "error": spread(errors)}
            inclusion.append(row)
    strictness = {
        name: spread([nonlinearity(strict_layers(seed)[name], seed) for seed in args.seeds])
        for name in strict_layers(0)
    }
    mha = parameters("mha")
    counts = [
        {
            "pseudo_heads": virtual,
            "all_heads": parameters("iha", num_pseudo_heads=virtual) - mha,
            "per_head": parameters("iha", num_pseudo_heads=virtual, pseudo_collapse="per_head") - mha,
            "theorem": 4 * HEADS**2 * virtual,
        }
        for virtual in PSEUDO_HEADS
    ]
    sizes = {"width": WIDTH, "heads": HEADS, "head_dim": HEAD_DIM, "length": LENGTH, "dtype": "float64"}
    tables = {
        "inclusion": inclusion,
        "nonlinearity_on_repeated_tokens": strictness,
        "more_parameters_than_mha": counts,
    }
    write(args, plot, **sizes, seeds=args.seeds, **tables)


if __name__ == "__main__":
    run_cli(main)
