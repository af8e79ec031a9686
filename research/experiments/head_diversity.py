"""Measure how many directions the heads of a layer use between them.

DCMHA, Section 4.3 and Figure 5 (after Cordonnier et al., 2020): the heads' circuits W_Q W_K^T (where a head looks) and
W_O W_V (what it moves) are each concatenated over a layer, and the variance that their first principal components
capture is averaged over the layers. A lower curve means more diverse heads. The paper finds DCPythia's below Pythia's,
clearly for QK and moderately for OV.

Reads any number of checkpoints: of this repository, or of any model with Llama's projections (a directory, a Hub id or
a GGUF file). An "iha" layer has the circuits of all pairs of its pseudo-heads. The paper does not say how it
concatenates: here the circuits, [width, width] each, stand below one another, are not centred, and leave out biases,
norms and RoPE. Kinds that compose heads dynamically, such as "dcmha", are measured by their projections alone, as in
the paper.

example: python -m research.experiments.head_diversity HuggingFaceTB/SmolLM2-135M-Instruct outputs/my_iha_model
"""

import argparse
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from common.command_io import UserError, path_from_root, run_cli
from research.experiments.options import study_parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_parser(__doc__, "head_diversity", keeps_runs=False)
    parser.add_argument(
        "models", nargs="+", type=model_source, metavar="MODEL", help="a directory, a Hub id or a GGUF file"
    )
    return parser.parse_args(argv)


def model_source(text: str) -> str:
    """Return a Hub id as it is, and a path as a study needs it, which runs in the root of the checkout."""
    return str(path_from_root(text)) if Path(text).exists() else text


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure
from torch import nn
from transformers import PreTrainedModel

from common import plots
from common.checkpoint_io import load_model
from model_cards.render import source_name
from research.experiments.study import begin, write


CIRCUITS = ("QK", "OV")


def grams(attention: nn.Module, heads: int, groups: int) -> dict[str, torch.Tensor]:
    """Return C^T C of each concatenation C of a layer's circuits, [width, width]."""

    def by_head(name: str, count: int) -> torch.Tensor:
        return getattr(attention, name).weight.detach().float().unflatten(0, (count, -1))

    # By head and pseudo-head, [H or G, P, head_dim, width]. P is 1 for all kinds but "iha".
    query = by_head("q_proj", heads).unsqueeze(1)
    key, value = (by_head(name, groups).unsqueeze(1) for name in ("k_proj", "v_proj"))
    output = attention.o_proj.weight.detach().float().unflatten(1, (heads, -1)).transpose(0, 1)  # [H, width, head_dim]
    # How much of head g's circuit is in the output of head h, [H, H], as a sum of squares.
    share = torch.eye(heads)
    if hasattr(attention, "q_mix"):
        query, key, value = (
            torch.einsum("mhp,mdi->hpdi", getattr(attention, name).value().detach().float(), states.squeeze(1))
            for states, name in ((query, "q_mix"), (key, "k_mix"), (value, "v_mix"))
        )
        squares = attention.collapse.value().detach().float().square()
        by_source = squares.unflatten(1, (-1, query.shape[1])).sum(dim=-1)
        share = by_source if by_source.shape[1] > 1 else by_source * share
    key, value = (states.repeat_interleave(heads // groups, dim=0) for states in (key, value))
    queries = torch.einsum("hpdi,hpei->hde", query, query)
    outputs = torch.einsum("hg,hde->gde", share, torch.einsum("hid,hie->hde", output, output))
    return {
        name: torch.einsum("hpdi,hpdj->ij", states, torch.einsum("hde,hpei->hpdi", inner, states))
        for name, states, inner in (("QK", key, queries), ("OV", value, outputs))
    }


def captured(gram: torch.Tensor) -> torch.Tensor:
    """Return the share of the variance in the first 1, 2, ... principal components, [width]."""
    variance = torch.linalg.eigvalsh(gram.double()).flip(0).clamp_min(0)
    return variance.cumsum(0) / variance.sum()


def curves_of(model: PreTrainedModel, source: str) -> dict[str, torch.Tensor]:
    """Return the mean over the layers of what the components capture, [width] for each circuit.

    Raise `UserError`, in which the model is called `source`.
    """
    config, layers = model.config, model.base_model.layers
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    per_layer = {name: [] for name in CIRCUITS}
    for index, layer in enumerate(layers):
        attention = layer.self_attn
        if len(attention.k_proj.weight) * heads != len(attention.q_proj.weight) * groups:
            raise UserError(
                f"{source}: layer {index} has several keys for each token; expected heads with one query and one key."
            )
        for name, gram in grams(attention, heads, groups).items():
            per_layer[name].append(captured(gram))
    return {name: torch.stack(curves).mean(dim=0) for name, curves in per_layer.items()}


def summary(source: str, curves: dict[str, torch.Tensor]) -> dict:
    """Return each curve, its mean, and the share of the width whose components capture 90%."""
    row = {"model": source_name(source)}
    for name, curve in curves.items():
        reached = int((curve < 0.9).sum() + 1) / len(curve)
        row[name] = {"mean": curve.mean().item(), "for_90_percent": reached, "curve": curve.tolist()}
    return row


def plot(table: dict) -> Figure:
    """Plot the captured variance by the share of the principal components."""
    found = ", ".join(f"{row['model']} {row['QK']['mean']:.3f}" for row in table["rows"])
    message = f"Variance that the components of QK capture on average, less is more diverse: {found}"
    figure, all_axes = plots.panels(message, len(CIRCUITS), len(CIRCUITS), sharey=True)
    for axes, name in zip(all_axes, CIRCUITS):
        for style, row in zip(cycle(("-", "--", ":")), table["rows"]):
            curve = row[name]["curve"]
            shares = [(index + 1) / len(curve) for index in range(len(curve))]
            axes.plot(shares, curve, style, label=row["model"])
        axes.set(title=f"{name} circuits", xlabel="principal components / width", ylabel="captured variance")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models and write the results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args, threads=None)
    curves = {}
    for source in dict.fromkeys(args.models):
        print(f"Measuring {source}", flush=True)
        curves[source] = curves_of(load_model(source), source)
    write(args, plot, rows=[summary(source, of_model) for source, of_model in curves.items()])


if __name__ == "__main__":
    run_cli(main)
