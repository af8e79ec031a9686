"""Compare an "iha" layer (width 512, 8 heads, fp32) with bare SDPA on its virtual sequence and with a Llama layer.

The form "bare SDPA" runs on random queries, keys and values of the N * P virtual tokens. "layer" is the whole layer
with projections, RoPE, mixing and collapse. "mha layer" is Llama's.

example: python -m research.benchmarks.layer --tokens 512 2048 --pseudo-heads 4 8
"""

import math
from itertools import product

import torch

from iha.errors import run_cli
from iha.layer_cost import score_products
from iha.model_cost import attention
from research.benchmarks.harness import Attention, inference, medians, reported, training, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [512, 2048])
PARSER.add_argument("--pseudo-heads", type=int, nargs="+", default=[4, 8], help="numbers of pseudo-heads ([4, 8])")


RATIO = "layer / bare SDPA"
LONGEST_BACKWARD = 8192  # in virtual tokens


def bare_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def measure(tokens: int, pseudo_heads: int, backward: bool, repeats: int) -> dict:
    iha = Attention(num_pseudo_heads=pseudo_heads)
    mha = Attention(attention_kinds="mha")
    forms = {
        "bare SDPA": (bare_sdpa, [torch.randn(1, 8, tokens * pseudo_heads, 64) for _ in range(3)], []),
        "layer": (iha, [torch.randn(1, tokens, 512)], iha.leaves()),
        "mha layer": (mha, [torch.randn(1, tokens, 512)], mha.leaves()),
    }
    prepared = {
        name: training(function, inputs, parameters) if backward else inference(function, *inputs)
        for name, (function, inputs, parameters) in forms.items()
    }
    seconds = medians(prepared, repeats)

    def products(model: Attention, kind: str) -> float:
        cost = attention(model.model.config, kind, "full_attention", tokens)
        return cost.training if backward else cost.prefill

    predicted = {
        "bare SDPA": 512 * score_products("sdpa", tokens, pseudo_heads, training=backward),
        "layer": products(iha, "iha"),
        "mha layer": products(mha, "mha"),
    }
    return {
        "tokens": tokens,
        "pseudo_heads": pseudo_heads,
        "pass": "forward + backward" if backward else "forward",
        "seconds": seconds,
        "ratios": {f"layer / {base}": seconds["layer"] / seconds[base] for base in ("bare SDPA", "mha layer")},
        "predicted": {f"layer / {base}": predicted["layer"] / predicted[base] for base in ("bare SDPA", "mha layer")},
    }


def main() -> None:
    args = PARSER.parse_args()
    sizes = list(product(args.tokens, args.pseudo_heads))
    sizes_of_backward = [size for size in sizes if math.prod(size) <= LONGEST_BACKWARD]
    settings = [(*size, False) for size in sizes] + [(*size, True) for size in sizes_of_backward]
    rows = reported(measure(*setting, args.repeats) for setting in settings)

    write(args.out, "layer", rows, dtype="float32", predicted_by="multiply-adds")


if __name__ == "__main__":
    run_cli(main)
