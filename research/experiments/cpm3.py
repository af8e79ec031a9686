"""Count the ordered pairs of CPM-3 by one layer of attention, as Theorem 4 of "Interleaved Head Attention" claims.

CPM-3 counts for every token i of N the ordered pairs (j1, j2) with x_i + G x_j1 + x_j2 = 0 modulo M (Sections 4.3 and
B.3). By the theorem one layer with ceil(sqrt(N)) interleaved heads can, where the known constructions of multi-head
attention need N heads.

Constructed: the package's own layer with the proof's weights and a softmax at temperature 0 collects all N tokens at
every token, and the proof's MLP counts. Both are compared with loops over all pairs, and the paper's example and its
counts of parameters are checked. A second construction has 2 heads of multi-head attention for every N
(`histogram_layer`, `histogram_count`). Its weights are for one N, as those of the others are, and as in the theorem
the vocabulary is of the order of N.

example: python -m research.experiments.cpm3
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product

from iha_io.command_io import run_cli
from research.experiments.options import study_parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return study_parser(__doc__, "cpm3", seeds=3, keeps_runs=False).parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import numpy as np
import torch
from matplotlib.figure import Figure

from iha_io import plots
from research.experiments.bare_attention import BareAttention
from research.experiments.polynomial_filters import constructed, filter_bank, root
from research.experiments.study import begin, write


LENGTHS = (4, 9, 16, 25)  # N
SEQUENCES = 20  # for each length and seed


def brute_force(x: list[int], factor: int, modulus: int) -> list[int]:
    """Return CPM-3 of every token, by loops over all pairs."""
    return [sum((own + factor * a + b) % modulus == 0 for a, b in product(x, x)) for own in x]


def collector(kind: str, length: int) -> BareAttention:
    """Return the proof's layer.

    It is that of the polynomial filters with the cyclic permutation, (P x)[i] = x[i + 1], for A, and with the softmax
    at temperature 0.
    """
    layer = constructed(kind, np.eye(length, dtype=int)[:, range(-1, length - 1)], 1, length, core="hard")
    if kind == "iha":
        with torch.no_grad():
            layer.layer.v_proj.weight.mul_(root(length))  # the H keys of highest score share the weight
    return layer


def collect(layer: BareAttention, x: list[int], length: int) -> torch.Tensor:
    """Return x[i + t] at token i, [tokens, N], by a layer for N tokens."""
    return filter_bank(layer, torch.tensor(x, dtype=torch.float64)[:, None], length)[..., 0].T


def count_pairs(collected: torch.Tensor, factor: int, modulus: int) -> torch.Tensor:
    """Apply the proof's MLP: one unit for each of the N^2 pairs, with ReLU(1 - (. mod M)), and their sum."""
    pairs = collected[:, :1, None] + factor * collected[:, :, None] + collected[:, None]
    return torch.relu(1 - pairs.remainder(modulus)).sum(dim=(1, 2))


def histogram_layer(length: int, modulus: int) -> BareAttention:
    """Return 2 heads on [one-hot x mod M, I]: the first averages all tokens, the second leaves the token itself."""
    layer = BareAttention("mha", modulus + length, 2, max(length, modulus), core="hard").double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
        query, key, value = layer.by_head("q_proj", "k_proj", "v_proj")
        query[1, :length, modulus:] = key[1, :length, modulus:] = torch.eye(length)
        value[0, :modulus, :modulus] = length * torch.eye(modulus)
        value[1, :modulus, :modulus] = torch.eye(modulus)
    return layer


@torch.no_grad()
def histogram_count(x: list[int], factor: int, modulus: int) -> torch.Tensor:
    """Return CPM-3 by `histogram_layer` and one hidden layer of at most 6 N M^2 ReLUs.

    The count depends on x_i and on how many tokens have each residue modulo M. If a tokens have the residue r1 and b
    tokens r2, then the pairs are a b = ((a + b)^2 - a^2 - b^2) / 2. The square of a whole number s is ReLU(s) + 2
    sum_t ReLU(s - t). A large negative term switches these units off except at tokens with x + G r1 + r2 = 0.
    """
    length = len(x)
    residues = torch.eye(modulus, dtype=torch.float64)[torch.tensor(x) % modulus]
    inputs = torch.cat((residues, torch.eye(length, dtype=torch.float64)), dim=1)
    numbers, own = histogram_layer(length, modulus)(inputs[None])[0].chunk(2, dim=-1)
    below = torch.arange(2 * length, dtype=torch.float64)
    slopes = torch.where(below == 0, 1.0, 2.0).double()

    def gated_square(s: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (torch.relu(s[:, None] - below - 2 * length * (1 - gate[:, None])) * slopes).sum(dim=1)

    total = torch.zeros(length, dtype=torch.float64)
    for first, second in product(range(modulus), repeat=2):
        a, b, gate = numbers[:, first], numbers[:, second], own[:, (-factor * first - second) % modulus]
        total += (gated_square(a + b, gate) - gated_square(a, gate) - gated_square(b, gate)) / 2
    return total


def proof_count(kind: str, x: list[int], factor: int, modulus: int) -> torch.Tensor:
    """Return CPM-3 by the proof's layer and MLP."""
    return count_pairs(collect(collector(kind, len(x)), x, len(x)), factor, modulus)


CONSTRUCTIONS = {
    "IHA, ceil(sqrt(N)) heads": partial(proof_count, "mha"),
    "MHA, N heads": partial(proof_count, "mha"),
    "MHA, 2 heads": histogram_count,
}


def sequences(length: int, seed: int) -> list[tuple[list[int], int, int]]:
    """Draw random x with entries from 1 to N, and G and M with 2 M < G."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=generator).tolist()

    drawn = []
    for _ in range(SEQUENCES):
        (modulus,) = integer(2, length)
        drawn.append((integer(1, length, length), integer(2 * modulus + 1, 4 * modulus)[0], modulus))
    return drawn


def largest_difference(counts: torch.Tensor, *drawn) -> float:
    """Return the largest difference of counts from the brute force."""
    return (counts - torch.tensor(brute_force(*drawn))).abs().max().item()


def construction_error(name: str, length: int, seed: int) -> float:
    """Return the largest difference from the brute force over random sequences."""
    return max(largest_difference(CONSTRUCTIONS[name](*drawn), *drawn) for drawn in sequences(length, seed))


def shorter_error(length: int, seed: int) -> float:
    """Return the error of the proof's layer for N tokens on N - 1 tokens, which the theorem includes.

    A place that no token fills counts as 0 in every pair.
    """
    layer, errors = collector("iha", length), []
    for (*x, _), factor, modulus in sequences(length, seed):
        counts = count_pairs(collect(layer, x, length), factor, modulus)
        errors.append(largest_difference(counts, x, factor, modulus))
    return max(errors)


def paper_example() -> dict:
    """Return the counts of the paper's x = (1, 2, 3) and G = 10, with all M that G > 2 M allows.

    The second table tells for each M if exchanging x_j1 and x_j2 ever changes the predicate.
    """
    x, factor = [1, 2, 3], 10
    moduli = range(1, (factor + 1) // 2)
    return {
        "counts_by_modulus": {modulus: brute_force(x, factor, modulus) for modulus in moduli},
        "order_matters_by_modulus": {
            modulus: any(
                ((own + factor * a + b) % modulus == 0) != ((own + factor * b + a) % modulus == 0)
                for own, a, b in product(x, repeat=3)
            )
            for modulus in moduli
        },
    }


def attention_parameters(kind: str, length: int) -> int:
    """Count the parameters of the constructed layer, without the channels that fill its heads up to one width."""
    if kind == "mha":
        return length * (2 * length + 1) * (length + 1)
    heads = root(length)
    return heads * (2 * length + heads) * (length + 1) + 4 * heads**3


def first_length_with_fewer_parameters() -> int:
    """Return the lowest N at which the theorem's upper bound for IHA is below its lower bound for "mha"."""
    return next(length for length in range(1, 1000) if 37 * length**2.5 < 3 * length**3)


def plot(table: dict) -> Figure:
    """Plot heads and parameters of the constructions."""
    counts = table["counts"]
    message = "Interleaved heads count ordered pairs with ceil(sqrt(N)) heads, but so do two ordinary ones by residues"
    figure, (heads, parameters) = plots.panels(message, 2, 2, 3.8)
    lengths = [row["length"] for row in counts if row["kind"] == "mha"]
    heads.plot(lengths, lengths, "C0o-", label="mha")
    heads.plot(lengths, [root(length) for length in lengths], "C1s-", label="iha")
    heads.plot(lengths, [2] * len(lengths), "C2^:", label="mha, by residues")
    for kind, style in (("mha", "C0o-"), ("iha", "C1s-")):
        chosen = [row["attention_parameters"] for row in counts if row["kind"] == kind]
        parameters.plot(lengths, chosen, style, label=kind)
    heads.set(title="constructed", xlabel="N", ylabel="heads (fewer is better)")
    parameters.set(title="constructed", xlabel="N", ylabel="parameters of attention (fewer is better)")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results."""
    args = parse_arguments(argv)
    begin(args)
    exactness = [
        {
            "length": length,
            "construction": name,
            "largest_difference": max(construction_error(name, length, seed) for seed in args.seeds),
        }
        for length in LENGTHS
        for name in CONSTRUCTIONS
    ]
    shorter = {length: max(shorter_error(length, seed) for seed in args.seeds) for length in LENGTHS}
    counts = [
        {"kind": kind, "length": length, "attention_parameters": attention_parameters(kind, length)}
        for kind in ("mha", "iha")
        for length in LENGTHS
    ]
    setting = {"sequences_per_length": SEQUENCES * len(args.seeds), "seeds": args.seeds}
    tables = {
        "paper_example": paper_example(),
        "exactness": exactness,
        "largest_difference_with_a_token_less": shorter,
        "counts": counts,
        "first_length_with_fewer_parameters_by_the_bounds": first_length_with_fewer_parameters(),
    }
    write(args, plot, **setting, **tables)


if __name__ == "__main__":
    run_cli(main)
