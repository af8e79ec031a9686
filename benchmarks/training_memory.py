"""Measure the peak memory and the time of a forward and backward of one attention module.

The forms are "mha", "iha", and "iha, base", which keeps base states only and expands them once more. The module has
width 512 and 8 heads in fp32. Each peak is measured in a process of its own, and times in other runs. The peak lies in
the backward, where "base" holds the expanded states too: what it saves is kept between the layers of a model
(training_plan.py), as the prediction counts it.

example: python -m benchmarks.training_memory --tokens 1024 2048 4096
"""

from collections.abc import Callable

import torch
from matplotlib.figure import Figure

from benchmarks.harness import (
    Attention,
    arguments,
    draw,
    extra_bytes,
    medians,
    ratios,
    reported,
    span,
    training,
    write,
)
from kinds.model_cost import attention


PSEUDO_HEADS = 8
# Kind, `attention_form`, and the form's name in the cost model.
FORMS = {"mha": ("mha", None, "sdpa"), "iha": ("iha", None, "sdpa"), "iha, base": ("iha", "base", "base")}


def prepare(form: str, tokens: int) -> Callable[[], None]:
    kind, attention_form, _ = FORMS[form]
    module = Attention(attention_form, attention_kinds=kind, num_pseudo_heads=PSEUDO_HEADS)
    return training(module, [torch.randn(1, tokens, 512)], module.leaves())


def measure(tokens: int, repeats: int) -> dict:
    extra = {form: extra_bytes(prepare, (form, tokens), (form, tokens // 8)) for form in FORMS}
    # A run of more than 2048 tokens takes up to a minute.
    seconds = medians({form: prepare(form, tokens) for form in FORMS}, repeats if tokens <= 2048 else 1)
    config = Attention(num_pseudo_heads=PSEUDO_HEADS).model.config
    costs = {
        form: attention(config, kind, "full_attention", tokens, cost_form)
        for form, (kind, _, cost_form) in FORMS.items()
    }

    def all_ratios(memory: dict, time: dict) -> dict:
        return {**ratios(memory, "mha", "memory: "), **ratios(time, "iha"), **ratios(time, "mha")}

    kept = {form: cost.kept for form, cost in costs.items()}
    products = {form: cost.training for form, cost in costs.items()}
    return {
        "tokens": tokens,
        "seconds": seconds,
        "extra_bytes": extra,
        "ratios": all_ratios(extra, seconds),
        "predicted": all_ratios(kept, products),
    }


def plot(table: dict) -> Figure:
    """Plot the time and the peak memory of each form."""
    time, memory = (span(row["ratios"][f"{what}iha / mha"] for row in table["rows"]) for what in ("", "memory: "))
    message = (
        f"With P = {table['pseudo_heads']} a global 'iha' module takes {time} times the time and {memory} times the "
        "memory of 'mha'"
    )
    panels = {
        "seconds, forward and backward (lower is better)": lambda row: row["seconds"],
        "extra GB (lower is better)": lambda row: {form: size / 1e9 for form, size in row["extra_bytes"].items()},
    }
    return draw(message, table, panels)


def main() -> None:
    args = arguments(__doc__, [1024, 2048, 4096]).parse_args()
    rows = reported(measure(tokens, args.repeats) for tokens in args.tokens)
    setting = {"pseudo_heads": PSEUDO_HEADS, "dtype": "float32"}
    predicted_by = "multiply-adds; memory: values kept for the backward"
    write(args.out, "training_memory", rows, plot, **setting, predicted_by=predicted_by)


if __name__ == "__main__":
    main()
