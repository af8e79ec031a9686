"""Measure the time and the extra memory of the forward of a sliding "iha" layer: collapse-first ("layer"), on SDPA in
blocks of queries, and on SDPA with a dense mask. Width 512, 8 heads, fp32. "attention" is collapse-first attention on
base queries, keys and values, and "bare SDPA, dense mask" is SDPA on virtual ones, both without projections and RoPE.
The time of each form includes that of its mask.

example: python -m benchmarks.window_layer --tokens 1024 2048 4096
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from benchmarks.cost import attention, linear
from benchmarks.harness import Attention, arguments, extra_bytes, inference, medians, report, write
from mechanisms.cost import score_products
from modeling_iha import virtual_sequence
from modeling_iha.collapse_first import BLOCK_BYTES
from modeling_iha.window_blocks import BLOCK


LAYERS = {"layer": "collapse_first", "layer, blocks": "blocks", "layer, dense mask": "dense mask"}
BASES = {"layer": "layer, dense mask", "layer, blocks": "layer, dense mask", "attention": "bare SDPA, dense mask"}
FORMS = (*LAYERS, "attention", "bare SDPA, dense mask")


def window_attention(form: str, pseudo_heads: int, window: int) -> Attention:
    attention_form = "base" if form in ("layer", "attention") else "virtual"
    sizes = {"num_pseudo_heads": pseudo_heads, "layer_types": "sliding_attention", "sliding_window": window}
    return Attention(attention_form, **sizes)


def dense_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril_().triu_(1 - window)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def prepare(form: str, tokens: int, pseudo_heads: int, window: int) -> Callable[[], None]:
    """A function of no arguments that runs the forward of a new layer."""
    if form == "bare SDPA, dense mask":
        return inference(dense_mask, *torch.randn(3, 1, 8, tokens * pseudo_heads, 64), window * pseudo_heads)
    module = window_attention(form, pseudo_heads, window)
    if form == "attention":
        return inference(module.from_base(), *torch.randn(3, 1, 8, tokens, 64))
    run = inference(module, torch.randn(1, tokens, 512))
    if form == "layer, dense mask":
        # Transformers' own mask.
        run = mock.patch.object(virtual_sequence, "_mask_free", lambda *_: None)(run)
    return run


def products(form: str, tokens: int, pseudo_heads: int, window: int) -> float:
    """Multiply-adds of a form."""
    if form == "bare SDPA, dense mask":
        return 512 * score_products("dense mask", tokens, pseudo_heads, window)
    config = window_attention(form, pseudo_heads, window).model.config
    layer = attention(config, "iha", "sliding_attention", tokens).prefill
    if form == "attention":
        return layer - linear(tokens, 512, 4 * 512).prefill
    difference = score_products(LAYERS[form], tokens, pseudo_heads, window)
    difference -= score_products("collapse_first", tokens, pseudo_heads, window)
    return layer + 512 * difference


def extra(form: str, tokens: int, pseudo_heads: int, window: int) -> int:
    """Bytes of the tensors that a form holds at its peak. SDPA turns a boolean mask into a float32 one."""
    virtual_states, states = tokens * pseudo_heads * 512, tokens * 512
    if form == "bare SDPA, dense mask":
        return 4 * virtual_states + 5 * (tokens * pseudo_heads) ** 2
    if form == "attention":
        # The output, virtual keys, values and queries of one head, and scores.
        return 4 * (states + 3 * virtual_states // 8) + BLOCK_BYTES
    if form == "layer":
        # In addition queries, keys and values, and a second copy of one of them while its memory order changes.
        return 4 * (5 * states + 3 * virtual_states // 8) + BLOCK_BYTES
    if form == "layer, dense mask":
        return 4 * (3 * states + 4 * virtual_states) + 5 * (tokens * pseudo_heads) ** 2
    blocks, span = -(-tokens * pseudo_heads // BLOCK), BLOCK + window * pseudo_heads - 1
    # Padded queries, keys and values; the blocks of one sequence are views of them.
    return 4 * (3 * states + 6 * virtual_states) + 5 * BLOCK * blocks * span


def both_ratios(time: dict[str, float], memory: dict[str, float]) -> dict[str, float]:
    """The ratio of each form to the one with a dense mask."""
    return {
        f"{kind}{form} / {base}": values[form] / values[base]
        for kind, values in (("", time), ("memory: ", memory))
        for form, base in BASES.items()
    }


def measure(tokens: int, pseudo_heads: int, window: int, repeats: int) -> dict:
    sizes = (tokens, pseudo_heads, window)
    small = (tokens // 8, pseudo_heads, max(1, window // 8))
    measured = {form: extra_bytes(prepare, (form, *sizes), (form, *small)) for form in FORMS}
    seconds = medians({form: prepare(form, *sizes) for form in FORMS}, repeats)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "extra_bytes": measured,
        "ratios": both_ratios(seconds, measured),
        "predicted": both_ratios(
            {form: products(form, *sizes) for form in FORMS}, {form: extra(form, *sizes) for form in FORMS}
        ),
    }


def main() -> None:
    parser = arguments(__doc__, [1024, 2048, 4096])
    parser.add_argument("--pseudo-heads", type=int, default=4, help="number of pseudo-heads (4)")
    parser.add_argument("--window", type=int, default=128, help="window in tokens (128)")
    args = parser.parse_args()
    rows = []
    for tokens in args.tokens:
        rows.append(measure(tokens, args.pseudo_heads, args.window, args.repeats))
        report(rows[-1])
    panels = {"seconds": lambda row: row["seconds"], "extra bytes": lambda row: row["extra_bytes"]}
    setting = {"pseudo_heads": args.pseudo_heads, "window": args.window, "dtype": "float32"}
    predicted_by = "multiply-adds; memory: the largest tensors"
    write(args.out, "window_layer", rows, "tokens", panels, **setting, predicted_by=predicted_by)


if __name__ == "__main__":
    main()
