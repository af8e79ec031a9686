"""Measure SDPA on a packed row of documents of one length against the dense mask that it replaces.

It takes one document after the other: 8 heads of 64, fp32, forward and forward + backward, the mask's time included.

example: python -m benchmarks.packed_rows --tokens 512 2048
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from matplotlib.figure import Figure
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.harness import arguments, draw, inference, medians, ratios, reported, span, training, write
from modeling_iha import IHAConfig
from modeling_iha.mask_inputs import find_document_bounds
from modeling_iha.window_blocks import maskless_attention


DOCUMENTS = (4, 32, 256)  # tokens of a document
PASSES = {"forward": lambda form, states: inference(form, *states), "forward + backward": training}


class Heads(torch.nn.Module):
    """Hold what Transformers' SDPA asks of an attention module."""

    config = IHAConfig()
    num_key_value_groups = 1
    is_causal = True


def by_document(documents: torch.Tensor) -> Callable[..., torch.Tensor]:
    bounds = find_document_bounds(documents)
    return lambda *states: maskless_attention(sdpa_attention_forward, bounds, Heads(), *states)[0]


def dense_mask(documents: torch.Tensor) -> Callable[..., torch.Tensor]:
    def attend(*states: torch.Tensor) -> torch.Tensor:
        mask = (documents[:, :, None] == documents[:, None]).tril_()
        return sdpa_attention_forward(Heads(), *states, mask[:, None])[0]

    return attend


def measure(tokens: int, length: int, repeats: int) -> Iterator[dict]:
    """Yield one row for the forward and one for forward + backward of documents of `length` tokens."""
    documents = torch.arange(tokens)[None] // length
    forms = {"by document": by_document(documents), "dense mask": dense_mask(documents)}
    states = list(torch.randn(3, 1, 8, tokens, 64))
    for name, run in PASSES.items():
        seconds = medians({form: run(function, states) for form, function in forms.items()}, repeats)
        setting = {"tokens": tokens, "document_tokens": length, "pass": name}
        predicted = {"by document / dense mask": length / tokens}
        yield {**setting, "seconds": seconds, "ratios": ratios(seconds, "dense mask"), "predicted": predicted}


def plot(table: dict) -> Figure:
    """Plot the time by document over that of a dense mask, by the length of the documents."""
    ratio = "by document / dense mask"
    message = (
        f"Packed documents take {span(row['ratios'][ratio] for row in table['rows'])} of the time under a dense mask"
    )

    def panel(name: str) -> Callable:
        return lambda row: (
            {f"documents of {row['document_tokens']} tokens": row["ratios"][ratio]} if row["pass"] == name else {}
        )

    return draw(message, table, {f"{name}, time ratio (lower is better)": panel(name) for name in PASSES})


def main() -> None:
    args = arguments(__doc__, [512, 2048, 8192], repeats=7).parse_args()
    rows = reported(
        row for tokens, length in product(args.tokens, DOCUMENTS) for row in measure(tokens, length, args.repeats)
    )
    write(args.out, "packed_rows", rows, plot, dtype="float32", predicted_by="products of queries and keys")


if __name__ == "__main__":
    main()
