"""Compare an "iha" layer (width 512, 8 heads) with the implementation that comes to mind first.

The obvious implementation is Algorithm 1 in a dozen lines: an einsum mixes, the virtual tokens of each head are copied
into one sequence, SDPA attends, with a window under a dense mask over virtual tokens, and an einsum collapses. Public
implementations do exactly that. It has no cache. Both have the same weights and outputs. The window is the paper's,
N / (2 P^2).

example: python -m research.benchmarks.obvious --tokens 512 2048 --pseudo-heads 2 4
"""

import os
from itertools import product

import torch
from torch.nn.functional import scaled_dot_product_attention

from iha.errors import run_cli
from research.benchmarks.harness import Attention, inference, medians, reported, training, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [512, 2048])
PARSER.add_argument("--pseudo-heads", type=int, nargs="+", default=[2, 4], help="numbers of pseudo-heads ([2, 4])")
PARSER.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count()], help="numbers of threads")
PARSER.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(float32 bfloat16)")

RATIO = "layer / obvious"
LONGEST_DENSE = 8192  # in virtual tokens: a mask of 64 MiB


class Obvious(torch.nn.Module):
    """Compute the attention of a layer as Algorithm 1 of the paper is written."""

    def __init__(self, module: Attention, tokens: int) -> None:
        super().__init__()
        self.attention = module.model.layers[0].self_attn
        config = module.model.config
        self.virtual = config.num_pseudo_heads
        window = self.attention.sliding_window
        positions = torch.arange(tokens * self.virtual)
        angles = torch.outer(positions, module.model.rotary_emb.inv_freq).repeat(1, 2)
        dtype = self.attention.q_proj.weight.dtype
        self.cos = angles.cos().to(dtype)
        self.sin = angles.sin().to(dtype)
        distance = positions[:, None] - positions
        self.mask = None if window is None else (distance >= 0) & (distance < window * self.virtual)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the output [batch, N, 512] of hidden states."""
        layer = self.attention
        mixed = []
        for name in ("q", "k", "v"):
            heads = getattr(layer, f"{name}_proj")(states).unflatten(-1, (8, 64))
            alpha = getattr(layer, f"{name}_mix").weight
            mixed.append(torch.einsum("bnmd,mhp->bhnpd", heads, alpha).flatten(2, 3))
        query, key, value = mixed
        query = self.rotate(query)
        key = self.rotate(key)
        output = scaled_dot_product_attention(query, key, value, self.mask, is_causal=self.mask is None)
        output = torch.einsum("bhnpd,hp->bnhd", output.unflatten(2, (-1, self.virtual)), layer.collapse.weight)
        return layer.o_proj(output.flatten(2))

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        first, second = states.chunk(2, dim=-1)
        return states * self.cos + torch.cat([-second, first], dim=-1) * self.sin


def measure(tokens: int, virtual: int, windowed: bool, part: str, dtype: str, threads: int, repeats: int) -> dict:
    torch.set_num_threads(threads)
    window = tokens // (2 * virtual**2) if windowed else None
    fields = {"layer_types": "sliding_attention", "sliding_window": window} if windowed else {}
    module = Attention(getattr(torch, dtype), num_pseudo_heads=virtual, **fields)
    obvious = Obvious(module, tokens)
    states = torch.randn(1, tokens, 512, dtype=getattr(torch, dtype))
    with torch.no_grad():
        torch.testing.assert_close(
            module(states), obvious(states), rtol=0.05, atol=1e-3 if dtype == "float32" else 0.05
        )
    forms = {"layer": module, "obvious": obvious}
    if part == "training":
        runs = {name: training(form, [states.clone()], module.leaves()) for name, form in forms.items()}
    else:
        runs = {name: inference(form, states) for name, form in forms.items()}
    seconds = medians(runs, repeats)
    setting = {"pass": part, "tokens": tokens, "pseudo_heads": virtual, "window": window and "N / (2 P^2)"}
    setting |= {"dtype": dtype, "threads": threads}
    return {**setting, "seconds": seconds, "ratios": {RATIO: seconds["layer"] / seconds["obvious"]}, "predicted": {}}


def main() -> None:
    args = PARSER.parse_args()
    cases = product(args.tokens, args.pseudo_heads, (False, True), ("forward", "training"), args.dtypes, args.threads)
    rows = reported(measure(*case, args.repeats) for case in cases if case[0] * case[1] <= LONGEST_DENSE)
    write(args.out, "obvious", rows)


if __name__ == "__main__":
    run_cli(main)
