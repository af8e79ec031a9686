"""Check Theorems 2 and 4 of "Interleaved Head Attention" on layers of the package that have the proofs' weights.

- Theorem 2 (B.1): multi-head attention (MHA) is an IHA for every P, here under the causal mask. From P = 2 on not
  every IHA is an MHA: on repeated tokens MHA is linear, and an IHA with Section 4.1's alternating signs is not.
- Theorem 4 (B.3): ceil(sqrt(N)) heads of IHA, or N of MHA, count for each token i the ordered pairs (j1, j2) with
  x_i + G x_j1 + x_j2 = 0 modulo M (CPM-3). Counter-example: 2 heads of MHA do so for every N. It takes 20 seconds.

example: python -m research.experiments.theorems
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
from matplotlib.figure import Figure

from iha import plots
from iha.errors import run_cli
from research.experiments.options import study_parser
from research.experiments.polynomial_filters import BareAttention, constructed, filter_bank, root
from research.experiments.study import begin, write


# The sizes for Theorem 2
WIDTH = 32
HEADS = 4
TOKENS = 12
PSEUDO_HEADS = range(1, 9)  # P
LENGTHS = (4, 9, 16, 25)  # N
SEQUENCES = 20  # of each N and seed


def layer_of(kind: str, virtual: int, selected: int = 0, alternating: str = "", **overrides) -> BareAttention:
    """Return a layer with the proof's mixing, in which some of "qkv" alternate in sign over the pseudo-heads."""
    layer = BareAttention(kind, WIDTH, HEADS, 8, "sdpa", num_pseudo_heads=virtual, **overrides).double()
    if kind == "iha":
        for name in "qkv":
            signs = (-1.0 if name in alternating else 1.0) ** torch.arange(virtual)
            layer.layer.get_submodule(f"{name}_mix").weight.copy_(torch.eye(HEADS)[..., None] * signs)
        layer.layer.collapse.weight.zero_()
        layer.layer.collapse.weight[range(HEADS), range(selected % virtual, HEADS * virtual, virtual)] = 1
    return layer


def outputs(layer: BareAttention, x: torch.Tensor, virtual: int, causal: bool, seed: int) -> torch.Tensor:
    """Return a layer's outputs for x [rows, tokens, width], with projections of a seed."""
    generator = torch.Generator().manual_seed(seed)
    size = x.shape[1] * virtual
    for weight in (layer.layer.q_proj.weight, layer.layer.k_proj.weight, layer.layer.v_proj.weight):
        weight.normal_(std=x.shape[2] ** -0.5, generator=generator)
    mask = torch.ones(1, 1, size, size, dtype=torch.bool)
    return layer(x, mask.tril() if causal else mask, torch.arange(x.shape[1])[None] * causal)


def inclusion_error(virtual: int, selected: int, positions: str, seed: int) -> float:
    """Return the largest difference of the proof's IHA from MHA under the causal mask, over the largest output."""
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(2, TOKENS, WIDTH)))
    expected = outputs(layer_of("mha", 1), x, 1, True, seed)
    found = outputs(layer_of("iha", virtual, selected, pseudo_positions=positions), x, virtual, True, seed)
    return ((found - expected).abs().max() / expected.abs().max()).item()


def nonlinearity(virtual: int, alternating: str, seed: int) -> float:
    """Return |f(2 x) - 2 f(x)| / |f(2 x)| on repeated tokens, without a mask and positions."""
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(16, 1, WIDTH))).expand(-1, TOKENS, -1)
    layer = layer_of("iha", virtual, 0, alternating)
    once, doubled = (outputs(layer, scale * x, virtual, False, seed) for scale in (1, 2))
    return ((doubled - 2 * once).norm() / doubled.norm()).item()


@torch.no_grad()
def theorem_2(virtual: int, seeds: Sequence[int]) -> dict:
    """Return the largest errors of the inclusion, the nonlinearities and the parameters more than MHA, for one P."""
    chosen = {"first": (0, "shared"), "last": (-1, "shared"), "last, RoPE at n P + p": (-1, "interleaved")}
    sizes = [sum(map(torch.numel, layer_of(kind, virtual).parameters())) for kind in ("iha", "mha")]
    return {
        "pseudo_heads": virtual,
        "selected": {name: max(inclusion_error(virtual, *how, s) for s in seeds) for name, how in chosen.items()},
        "largest_nonlinearity_of_appendix": max(nonlinearity(virtual, "qk", seed) for seed in seeds),
        "least_nonlinearity_of_section": min(nonlinearity(virtual, "qkv", seed) for seed in seeds),
        "more_parameters": sizes[0] - sizes[1],
    }


def proof_layer(kind: str, tokens: int) -> BareAttention:
    """Return the proof's layer, which collects at each of so many tokens the values of all."""
    layer = constructed(kind, np.eye(tokens, dtype=int)[:, range(-1, tokens - 1)], 1, tokens, "hard")
    if kind == "iha":
        layer.layer.v_proj.weight *= root(tokens)  # the H keys of the highest score share the weight
    return layer


def proof_count(kind: str, tokens: int, x: list[int], factor: int, modulus: int) -> torch.Tensor:
    """Return CPM-3 by the proof's layer for so many tokens, and a ReLU for each pair of what it collects."""
    layer = proof_layer(kind, tokens)
    collected = filter_bank(layer, torch.tensor(x).double()[:, None], tokens)[..., 0].T  # x[i + t] at token i
    pairs = collected[:, :1, None] + factor * collected[:, :, None] + collected[:, None]
    return torch.relu(1 - pairs.remainder(modulus)).sum(dim=(1, 2))


def residue_count(x: list[int], factor: int, modulus: int) -> torch.Tensor:
    """Return CPM-3 by 2 heads of MHA on one-hot residues and positions, and by at most 6 N M^2 ReLUs.

    The first head counts all residues, the second keeps the token's own. Residues that a and b tokens have give a b =
    ((a + b)^2 - a^2 - b^2) / 2 pairs, s^2 = ReLU(s) + 2 sum_t ReLU(s - t). A negative term turns these off."""
    tokens = len(x)
    residues = torch.eye(modulus).double()[torch.tensor(x) % modulus]
    layer = BareAttention("mha", modulus + tokens, 2, max(tokens, modulus), "hard").double()
    query, key, value = (weight.zero_() for weight in layer.by_head("q_proj", "k_proj", "v_proj"))
    query[1, :tokens, modulus:] = torch.eye(tokens)
    key[1, :tokens, modulus:] = torch.eye(tokens)
    value[:, :modulus, :modulus] = torch.eye(modulus) * torch.tensor([tokens, 1])[:, None, None]
    numbers, own = layer(torch.cat((residues, torch.eye(tokens)), dim=1)[None])[0].unflatten(-1, (2, -1)).unbind(1)
    a = numbers[:, :modulus, None]
    b = numbers[:, None, :modulus]
    below = torch.arange(2 * tokens)
    residue = -factor * torch.arange(modulus)[:, None] - torch.arange(modulus)
    off = 2 * tokens * (1 - own[:, residue % modulus])[..., None]
    slopes = 2 - (below == 0).double()
    both, first, second = (torch.relu(s[..., None] - below - off) @ slopes for s in (a + b, a, b))
    return (both - first - second).sum(dim=(1, 2)) / 2


@torch.no_grad()
def theorem_4(tokens: int, seeds: Sequence[int]) -> dict:
    """Return the largest differences from loops over all pairs, also with a token less than the layer is built for.

    The table also has the parameters of the proof's layers.
    """
    counts = {"iha": partial(proof_count, "iha", tokens), "mha": partial(proof_count, "mha", tokens)}
    counts |= {"mha, 2 heads": residue_count, "iha, a token less": counts["iha"]}
    errors = dict.fromkeys(counts, 0.0)
    for (name, count), seed, index in product(counts.items(), seeds, range(SEQUENCES)):
        draw = np.random.default_rng([seed, index])
        x = draw.integers(1, tokens + 1, tokens - ("less" in name)).tolist()
        modulus = int(draw.integers(2, tokens + 1))
        factor = int(draw.integers(2 * tokens + 1, 4 * tokens))
        exact = torch.tensor([sum((i + factor * a + b) % modulus == 0 for a, b in product(x, x)) for i in x])
        errors[name] = max(errors[name], (count(x, factor, modulus) - exact).abs().max().item())
    return {
        "tokens": tokens,
        "heads": {"iha": root(tokens), "mha": tokens, "mha, 2 heads": 2},
        "parameters": {kind: sum(map(torch.numel, proof_layer(kind, tokens).parameters())) for kind in ("iha", "mha")},
        "error": errors,
    }


def plot(table: dict) -> Figure:
    """Plot the errors of the inclusion, and the heads of CPM-3."""
    message = "IHA can be MHA where the last pseudo-head is selected; CPM-3 takes ceil(sqrt(N)) heads, or 2 of MHA"
    figure, (errors, heads) = plots.panels(message, 2, 2, 3.8)
    for axes, rows, part in ((errors, table["theorem_2"], "selected"), (heads, table["theorem_4"], "heads")):
        for name in rows[0][part]:
            # A logarithmic axis has no zero: at P = 1 some differ by nothing.
            points = [(next(iter(row.values())), row[part][name]) for row in rows if row[part][name] > 0]
            axes.plot(*zip(*points), "o-", label=name)
        axes.legend(fontsize="small")
    errors.set(yscale="log", xlabel="P", ylabel="difference from MHA", title="pseudo-head that is selected")
    heads.set(xlabel="N", ylabel="heads that count exactly (fewer is better)")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results."""
    args = study_parser(__doc__, "theorems", seeds=3).parse_args(argv)
    study = begin(args)
    by_p = [theorem_2(virtual, args.seeds) for virtual in PSEUDO_HEADS]
    by_n = [theorem_4(tokens, args.seeds) for tokens in LENGTHS]
    write(study, plot, heads=HEADS, sequences=SEQUENCES, seeds=args.seeds, theorem_2=by_p, theorem_4=by_n)


if __name__ == "__main__":
    run_cli(main)
