"""Compare an interleaved decoder with a given window with one without, for rows that are whole, padded and packed.

The models have 12 layers of width 256 with 8 heads in 4 groups, and P = 2. A padded row begins with eight padded
tokens, and a packed row holds two documents. The window is an eighth of the row. Measured are the time of a forward
pass and the peak of memory in a training step.

example: python -m research.benchmarks.any_decoder_rows --tokens 2048
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from iha_io.command_io import run_cli
from modeling_iha import interleave_heads
from research.benchmarks.any_decoder import PSEUDO_HEADS, SIZES
from research.benchmarks.harness import extra_bytes, medians, reported, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [2048], repeats=2)


# By what they hold.
ROWS: dict[str, Callable[[int], dict[str, torch.Tensor]]] = {
    "whole": lambda tokens: {},
    "padded": lambda tokens: {"attention_mask": (torch.arange(tokens) >= 8)[None].long()},
    "packed": lambda tokens: {"position_ids": torch.arange(tokens)[None] % (tokens // 2)},
}


def deep(window: int | None) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {name: SIZES[name] // 2 for name in ("hidden_size", "intermediate_size")}
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes, "num_hidden_layers": 12})).eval()
    return interleave_heads(model, PSEUDO_HEADS, sliding_window=window)


def run_row(model: torch.nn.Module, row: str, tokens: int) -> None:
    """Run a forward pass, and a backward one where gradients are on."""
    input_ids = torch.arange(tokens)[None] % SIZES["vocab_size"]
    output = model(input_ids=input_ids, labels=input_ids, use_cache=False, **ROWS[row](tokens))
    if torch.is_grad_enabled():
        output.loss.backward()


def training_step(window: int | None, row: str, tokens: int) -> Callable[[], None]:
    model = deep(window)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    return partial(run_row, model, row, tokens)


def rows_forward(tokens: int, repeats: int) -> dict:
    models = {"none": deep(None), "window": deep(tokens // 8)}
    forms = {
        f"{name}, {row}": partial(torch.no_grad()(run_row), models[name], row, tokens)
        for name in models
        for row in ROWS
    }
    return {"pass": "forward", "tokens": tokens, "seconds": medians(forms, repeats)}


def rows_training(tokens: int) -> dict:
    windows = {"none": None, "window": tokens // 8}
    forms = {f"{name}, {row}": (windows[name], row) for name in windows for row in ROWS}
    peaks = {form: extra_bytes(training_step, (*one, tokens), (*one, 64)) for form, one in forms.items()}
    return {"pass": "training", "tokens": tokens, "seconds": {}, "extra_bytes": peaks}


def with_ratios(row: dict) -> dict:
    """Add what a window costs beside none, and what padding and documents cost beside a whole row."""
    values, what = row.get("extra_bytes") or row["seconds"], "memory: " if "extra_bytes" in row else ""
    found = {f"{what}window, {one} / none, {one}": values[f"window, {one}"] / values[f"none, {one}"] for one in ROWS}
    for name, one in product(("none", "window"), ("padded", "packed")):
        found[f"{what}{name}, {one} / {name}, whole"] = values[f"{name}, {one}"] / values[f"{name}, whole"]
    return {**row, "ratios": found}


def main() -> None:
    args = PARSER.parse_args()
    tokens = max(args.tokens)
    parts = (lambda: rows_forward(tokens, args.repeats), lambda: rows_training(tokens))
    rows = reported(with_ratios(part()) for part in parts)
    predicted = "at most 1, and in memory one more output"
    setting = {"pseudo_heads": PSEUDO_HEADS, "window": tokens // 8, "predicted_by": predicted}
    write(args.out, "any_decoder_rows", rows, **setting)


if __name__ == "__main__":
    run_cli(main)
