"""Compute the filter bank of a graph by one layer of linear attention, with and without interleaved heads.

By Theorems 1 and 3 of "Interleaved Head Attention" (Sections 3.1, 4.2 and B.2) the filter bank [X, A X, ...,
A^(k-1) X] of a graph takes k heads, or ceil(sqrt(k)) heads with interleaving.

The package's own layer without softmax, with the weights of the proof, computes it on Zachary's karate club, a grid
and a random regular graph, and is compared with powers in exact integers. The table also gives the parameters that
heads and pseudo-heads take as k grows. It takes some seconds.

example: python -m research.experiments.polynomial_filters
"""

import math
from collections.abc import Sequence

import networkx
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from transformers import AttentionInterface

from iha import plots
from iha.errors import run_cli
from iha.kinds import virtual_tokens_per_token
from modeling_iha import IHAConfig, IHAModel
from research.experiments.options import study_parser
from research.experiments.study import begin, write


GRAPHS = {
    "karate club": networkx.karate_club_graph(),
    "6 x 6 grid": networkx.grid_2d_graph(6, 6),
    "random 4-regular": networkx.random_regular_graph(4, 32, seed=0),
}
FILTERS = (4, 9, 16, 25)  # k
FEATURES = 3  # d


def linear_core(module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend without softmax, scale and mask: (Q K^T) V."""
    weights = query @ key.transpose(-1, -2)
    return (weights @ value).transpose(1, 2), weights


def hard_core(module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend at temperature 0 without a mask: the keys of the highest score share the weight."""
    scores = query @ key.transpose(-1, -2)
    highest = (scores == scores.amax(dim=-1, keepdim=True)).to(value.dtype)
    weights = highest / highest.sum(dim=-1, keepdim=True)
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register("linear", linear_core)
AttentionInterface.register("hard", hard_core)


class BareAttention(nn.Module):
    """Hold a layer of the package as the theorems have it: without output projection.

    Queries, keys and values are `head_dim` wide, or one more to be even. `core` is a name that Transformers'
    registry has for the map from scores to weights, and `overrides` are other fields of the config.
    """

    def __init__(self, kind: str, width: int, num_heads: int, head_dim: int, core: str = "linear", **overrides):
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


def adjacency(graph: networkx.Graph) -> np.ndarray:
    """Return 0 or 1 for each pair of nodes, [N, N]; weights of edges do not count."""
    return networkx.to_numpy_array(graph, weight=None, dtype=np.int64)


def powers(matrix: np.ndarray, count: int) -> list[np.ndarray]:
    """Return [I, A, ..., A^(count - 1)] in Python's integers, which have no largest one."""
    matrix = matrix.astype(object)
    result = [np.eye(len(matrix), dtype=int).astype(object)]
    while len(result) < count:
        result.append(result[-1] @ matrix)
    return result


def embed(x: torch.Tensor, nodes: int) -> torch.Tensor:
    """Return [X, I], [batch, rows, d + N], of features of the first rows of N nodes, [batch, rows, d]."""
    return torch.cat((x, torch.eye(nodes, dtype=x.dtype)[: x.shape[1]].expand(len(x), -1, -1)), dim=-1)


def root(k: int) -> int:
    """Return ceil(sqrt(k))."""
    return math.isqrt(k - 1) + 1


def constructed(kind: str, matrix: np.ndarray, features: int, k: int, core: str = "linear") -> BareAttention:
    """Return the layer of Theorem 1 ("mha", k heads) or of Theorem 3 ("iha", H = P = ceil(sqrt(k))).

    Head h of "mha" holds A^h X in its first d channels. Head h of "iha" holds [A^(h H) X, ..., A^(h H + H - 1) X] in
    its first d H channels.
    """
    nodes = len(matrix)
    heads, blocks = (root(k), root(k)) if kind == "iha" else (k, 1)
    layer = BareAttention(kind, features + nodes, heads, max(nodes, features * blocks), core).double()
    module = layer.layer
    steps = [torch.from_numpy(power.astype(np.float64)) for power in powers(matrix, heads * blocks)]
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
        query, key, value = layer.by_head("q_proj", "k_proj", "v_proj")
        for head in range(heads):
            block = head % blocks
            query[head, :nodes, features:] = steps[head * blocks].T
            key[head, :nodes, features:] = steps[block]
            value[head, features * block : features * (block + 1), :features] = torch.eye(features)
        if kind == "iha":
            identity = torch.eye(heads, dtype=torch.float64)
            module.q_mix.weight[:, :, 0] = identity  # 1[m = h] 1[p = 1]
            for mixing in (module.k_mix, module.v_mix):
                mixing.weight.copy_(identity.unsqueeze(1).expand(-1, heads, -1))  # 1[m = p]
            module.collapse.weight[range(heads), range(0, heads * heads, heads)] = 1  # p = 1 of the head itself
    return layer


@torch.no_grad()
def filter_bank(layer: BareAttention, x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the first k blocks of the heads of a constructed layer, [k, rows, d], of X [rows, d]."""
    module = layer.layer
    features = x.shape[1]
    heads = module.config.num_attention_heads
    nodes = module.q_proj.in_features - features
    blocks = virtual_tokens_per_token(module.config)
    output = layer(embed(x[None], nodes))[0].unflatten(-1, (heads, -1))[..., : features * blocks]
    return output.reshape(len(x), heads * blocks, features).transpose(0, 1)[:k]


def construction_error(kind: str, matrix: np.ndarray, k: int, seed: int) -> float:
    """Return the largest error of a block A^i X against exact integers, over the largest entry of the block."""
    x = np.random.default_rng(seed).integers(-9, 10, (len(matrix), FEATURES))
    layer = constructed(kind, matrix, FEATURES, k)
    exact = (torch.from_numpy((power @ x.astype(object)).astype(np.float64)) for power in powers(matrix, k))
    found = filter_bank(layer, torch.from_numpy(x).double(), k)
    return max(((f - e).abs().max() / e.abs().max()).item() for f, e in zip(found, exact, strict=True))


def theorem_parameters(kind: str, nodes: int, features: int, k: int) -> int:
    """Count parameters as Theorem 3 does: queries, keys and values, and those of mixing and collapse for "iha"."""
    if kind == "mha":
        return 2 * nodes * (nodes + features) * k + features * (nodes + features) * k
    heads = root(k)
    return 2 * nodes * (nodes + features) * heads + features * (nodes + features) * heads**2 + 4 * heads**3


def used_parameters(kind: str, nodes: int, features: int, k: int) -> int:
    """Count the same in the constructed layer, without the channels that fill its heads up to one width."""
    layer = constructed(kind, np.eye(nodes, dtype=int), features, k).layer
    heads = layer.config.num_attention_heads
    query_and_key = 2 * heads * nodes * layer.q_proj.in_features
    value = heads * features * (heads if kind == "iha" else 1) * layer.v_proj.in_features
    mixing = sum(weight.numel() for name, weight in layer.named_parameters() if "proj" not in name)
    return query_and_key + value + mixing


def plot(table: dict) -> Figure:
    """Plot heads and parameters of the constructions."""
    figure, (heads, parameters) = plots.panels("k filters of a graph take ceil(sqrt(k)) interleaved heads", 2, 2, 3.8)
    for kind, style in (("mha", "C0o-"), ("iha", "C1s-")):
        chosen = [row for row in table["counts"] if row["kind"] == kind]
        heads.plot([row["k"] for row in chosen], [row["heads"] for row in chosen], style, label=kind)
        parameters.plot([row["k"] for row in chosen], [row["parameters"] for row in chosen], style, label=kind)
    heads.set(xlabel="k", ylabel="heads (fewer is better)")
    parameters.set(xlabel="k", ylabel="parameters, karate club (fewer is better)")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results."""
    args = study_parser(__doc__, "polynomial_filters", seeds=3).parse_args(argv)
    study = begin(args)
    exactness = [
        {
            "graph": name,
            "nodes": len(graph),
            "k": k,
            "largest_relative_error": {
                kind: max(construction_error(kind, adjacency(graph), k, seed) for seed in args.seeds)
                for kind in ("mha", "iha")
            },
        }
        for name, graph in GRAPHS.items()
        for k in FILTERS
    ]
    nodes = len(GRAPHS["karate club"])
    counts = [
        {
            "kind": kind,
            "k": k,
            "heads": k if kind == "mha" else root(k),
            "parameters": used_parameters(kind, nodes, FEATURES, k),
            "theorem": theorem_parameters(kind, nodes, FEATURES, k),
        }
        for kind in ("mha", "iha")
        for k in FILTERS
    ]
    write(study, plot, features=FEATURES, dtype="float64", seeds=args.seeds, exactness=exactness, counts=counts)


if __name__ == "__main__":
    run_cli(main)
