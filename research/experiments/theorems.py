"""Check Theorems 2 and 4 of "Interleaved Head Attention" on layers of the package that have the proofs' weights.

- Theorem 2 (B.1): multi-head attention (MHA) is an IHA for every P, here under the causal mask. From P = 2 on not
  every IHA is an MHA: on repeated tokens MHA is linear, and an IHA with Section 4.1's alternating signs is not.
- Theorem 4 (B.3): ceil(sqrt(N)) heads of IHA, or N of MHA, count for each token i the ordered pairs (j1, j2) with
  x_i + G x_j1 + x_j2 = 0 modulo M (CPM-3). Counter-example: 2 heads of MHA do so for every N. It takes 20 seconds.

example: python -m research.experiments.theorems
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from transformers import AttentionInterface

from iha import plots
from iha.errors import run_cli
from modeling_iha import IHAConfig, IHAModel
from research.experiments.options import study_parser
from research.experiments.study import begin, write


# The sizes for Theorem 2
WIDTH = 32
HEADS = 4
TOKENS = 12
PSEUDO_HEADS = range(1, 9)  # P
LENGTHS = (4, 9, 16, 25)  # N
SEQUENCES = 20  # of each N and seed


def hard_core(module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend at temperature 0 without a mask: the keys of the highest score share the weight."""
    scores = query @ key.transpose(-1, -2)
    highest = (scores == scores.amax(dim=-1, keepdim=True)).to(value.dtype)
    weights = highest / highest.sum(dim=-1, keepdim=True)
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register("hard", hard_core)


class BareAttention(nn.Module):
    """Hold a layer of the package as the theorems have it: without output projection.

    Queries, keys and values are `head_dim` wide, or one more to be even. `core` is a name that Transformers'
    registry has for the map from scores to weights, and `overrides` are other fields of the config.
    """

    def __init__(self, kind: str, width: int, num_heads: int, head_dim: int, core: str, **overrides):
        super().__init__()
        fields = {
            "attention_kinds": kind,
            "layer_types": "full_attention",
            "num_hidden_layers": 1,
            "hidden_size": width,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "head_dim": head_dim + head_dim % 2,  # RoPE rotates pairs
            "num_pseudo_heads": num_heads,
            "pseudo_positions": "shared",
            "pseudo_collapse": "all_heads",
            "initializer_range": 1.0,
        }
        config = IHAConfig.from_preset("tiny", **{**fields, **overrides})
        model = IHAModel._from_config(config, attn_implementation=core)
        self.layer = model.layers[0].self_attn
        self.rotary = model.rotary_emb
        self.layer.o_proj = nn.Identity()

    def by_head(self, *names: str) -> list[torch.Tensor]:
        """Return the transposed weights of projections as views [heads, head_dim, width]."""
        heads = self.layer.config.num_attention_heads
        return [getattr(self.layer, name).weight.unflatten(0, (heads, -1)) for name in names]

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the heads' outputs side by side, [batch, N, heads * head_dim], of inputs [batch, N, width].

        `mask` is over virtual tokens. Without `positions`, [1, N], RoPE rotates nothing.
        """
        if positions is None:
            positions = torch.zeros(1, x.shape[1], dtype=torch.long)
        return self.layer(x, self.rotary.tables(x, positions), mask)[0]


def root(k: int) -> int:
    """Return ceil(sqrt(k))."""
    return math.isqrt(k - 1) + 1


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


def heads_and_blocks(kind: str, tokens: int) -> tuple[int, int]:
    """Return the heads of the proof's layer for so many tokens, and the values that each head collects."""
    return (root(tokens), root(tokens)) if kind == "iha" else (tokens, 1)


@torch.no_grad()
def proof_layer(kind: str, tokens: int) -> BareAttention:
    """Return the proof's layer, which collects at each of so many tokens the values of all.

    A token is its value x next to its one-hot position. Head h of "mha" holds x[i + h] in its first channel. "iha" has
    H = P = ceil(sqrt(N)) heads, and head h holds x[i + h H], ..., x[i + h H + H - 1] in its first H channels.
    """
    heads, blocks = heads_and_blocks(kind, tokens)
    layer = BareAttention(kind, 1 + tokens, heads, max(tokens, blocks), "hard").double()
    module = layer.layer
    positions = torch.eye(tokens, dtype=torch.float64)
    for weight in module.parameters():
        weight.zero_()
    query, key, value = layer.by_head("q_proj", "k_proj", "v_proj")
    for head in range(heads):
        block = head % blocks
        # The position of a query is moved by whole blocks, and that of a key within a block.
        query[head, :tokens, 1:] = positions.roll(head * blocks, dims=0)
        key[head, :tokens, 1:] = positions.roll(-block, dims=0)
        value[head, block, 0] = 1
    if kind == "iha":
        value *= heads  # the H keys of the highest score share the weight
        identity = torch.eye(heads, dtype=torch.float64)
        module.q_mix.weight[:, :, 0] = identity  # 1[m = h] 1[p = 1]
        for mixing in (module.k_mix, module.v_mix):
            mixing.weight.copy_(identity.unsqueeze(1).expand(-1, heads, -1))  # 1[m = p]
        module.collapse.weight[range(heads), range(0, heads * heads, heads)] = 1  # p = 1 of the head itself
    return layer


def collect(kind: str, tokens: int, x: list[int]) -> torch.Tensor:
    """Return x[i + t] at token i by the proof's layer for so many tokens, [len(x), tokens]."""
    heads, blocks = heads_and_blocks(kind, tokens)
    values = torch.tensor(x).double()[:, None]
    positions = torch.eye(tokens, dtype=torch.float64)[: len(x)]
    output = proof_layer(kind, tokens)(torch.cat((values, positions), dim=1)[None])[0]
    return output.unflatten(-1, (heads, -1))[..., :blocks].flatten(1)[:, :tokens]


def proof_count(kind: str, tokens: int, x: list[int], factor: int, modulus: int) -> torch.Tensor:
    """Return CPM-3 by the proof's layer for so many tokens, and a ReLU for each pair of what it collects."""
    collected = collect(kind, tokens, x)
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
