"""Measure the time and the extra memory of the forward of a sliding "iha" layer, which goes in blocks of queries.

The same layer runs under a dense mask, at width 512 with 8 heads in fp32. "bare SDPA, dense mask" is SDPA on virtual
queries, keys and values, without projections, mixing and RoPE. The time of each form includes that of its mask.

example: python -m benchmarks.window_layer --tokens 1024 2048 4096
"""

from collections.abc import Callable
from unittest import mock

import torch
from matplotlib.figure import Figure

from benchmarks.harness import (
    Attention,
    arguments,
    draw,
    extra_bytes,
    inference,
    medians,
    ratios,
    reported,
    span,
    write,
)
from kinds.cost import score_products
from kinds.model_cost import attention
from modeling_iha import masks
from modeling_iha.interleaving import block_size


LAYERS = {"layer": "blocks", "layer, dense mask": "dense mask"}
BASE = "layer, dense mask"
PSEUDO_HEADS, WINDOW = 4, 128
FORMS = (*LAYERS, "bare SDPA, dense mask")


def window_attention(pseudo_heads: int, window: int) -> Attention:
    sizes = {"num_pseudo_heads": pseudo_heads, "layer_types": "sliding_attention", "sliding_window": window}
    return Attention(**sizes)


def dense_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril_().triu_(1 - window)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def prepare(form: str, tokens: int, pseudo_heads: int, window: int) -> Callable[[], None]:
    """Return a function of no arguments that runs the forward of a new layer."""
    if form == "bare SDPA, dense mask":
        return inference(dense_mask, *torch.randn(3, 1, 8, tokens * pseudo_heads, 64), window * pseudo_heads)
    run = inference(window_attention(pseudo_heads, window), torch.randn(1, tokens, 512))
    if form == "layer, dense mask":
        # This leaves the mask that Transformers makes.
        run = mock.patch.object(masks, "_maskless", lambda *_: None)(run)
    return run


def products(form: str, tokens: int, pseudo_heads: int, window: int) -> float:
    """Return the multiply-adds of a form."""
    if form == "bare SDPA, dense mask":
        return 512 * score_products("dense mask", tokens, pseudo_heads, window)
    config = window_attention(pseudo_heads, window).model.config
    return attention(config, "iha", "sliding_attention", tokens, LAYERS[form]).prefill


def extra(form: str, tokens: int, pseudo_heads: int, window: int) -> int:
    """Return the bytes of the tensors that a form holds at its peak. SDPA turns a boolean mask into a float32 one."""
    virtual_states, states = tokens * pseudo_heads * 512, tokens * 512
    if form == "layer":
        # These are queries, keys and values, and those of the blocks; the blocks of one row are views.
        block, span = block_size(window * pseudo_heads), window * pseudo_heads
        return 4 * (3 * states + 6 * virtual_states) + 5 * block * (block + span)
    projections = 0 if form == "bare SDPA, dense mask" else 3 * states
    return 4 * (projections + 4 * virtual_states) + 5 * (tokens * pseudo_heads) ** 2


def both_ratios(time: dict[str, float], memory: dict[str, float]) -> dict[str, float]:
    """Return the ratio of each form to the layer with a dense mask."""
    return {**ratios(time, BASE), **ratios(memory, BASE, "memory: ")}


def measure(tokens: int, repeats: int) -> dict:
    sizes = (tokens, PSEUDO_HEADS, WINDOW)
    small = (tokens // 8, PSEUDO_HEADS, WINDOW // 8)
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


def plot(table: dict) -> Figure:
    """Plot the time and the extra memory of each form."""
    found = span(row["ratios"][f"layer / {BASE}"] for row in table["rows"])
    message = f"In blocks a window layer takes {found} of the time that it takes under a dense mask"
    panels = {
        "seconds (lower is better)": lambda row: row["seconds"],
        "extra GB (lower is better)": lambda row: {form: size / 1e9 for form, size in row["extra_bytes"].items()},
    }
    return draw(message, table, panels)


def main() -> None:
    args = arguments(__doc__, [1024, 2048, 4096]).parse_args()
    rows = reported(measure(tokens, args.repeats) for tokens in args.tokens)
    setting = {"pseudo_heads": PSEUDO_HEADS, "window": WINDOW, "dtype": "float32"}
    predicted_by = "multiply-adds; memory: the largest tensors"
    write(args.out, "window_layer", rows, plot, **setting, predicted_by=predicted_by)


if __name__ == "__main__":
    main()
