"""Compare the paper's schedule with five global "mha" layers, which take about as many multiply-adds.

The schedule is four sliding "iha" layers with W = N / (2 P^2) and a global "mha" layer (IHA, Appendix C). Attention
modules run alone, and whole models with a gated FFN, at width 512 with 8 heads in fp32. It takes about five minutes
of one core.

example: python -m research.benchmarks.schedule --tokens 4096 8192
"""

from collections.abc import Callable
from itertools import product

import torch

from iha.errors import run_cli
from iha.model_cost import attention, model
from modeling_iha import IHAConfig
from modeling_iha.flop_matched_window import flop_matched_window
from research.benchmarks.harness import (
    CONTEXT,
    Attention,
    causal_lm,
    inference,
    medians,
    ratios,
    reported,
    training,
    write,
)
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [4096, 8192])


BASE = "5 mha"
PSEUDO_HEADS = 4
PARTS = ("attention, forward", "attention, forward + backward", "model, forward")


def schedules(tokens: int, pseudo_heads: int) -> dict[str, dict]:
    """Return the config fields of both schedules."""
    schedule = {
        "attention_kinds": ["iha"] * 4 + ["mha"],
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "num_pseudo_heads": pseudo_heads,
        "sliding_window": flop_matched_window(tokens, pseudo_heads),
    }
    return {
        "4 iha + 1 mha": {**schedule, "num_hidden_layers": 5},
        BASE: {"attention_kinds": "mha", "num_hidden_layers": 5},
    }


def attention_modules(fields: dict, tokens: int, backward: bool) -> tuple[Callable[[], None], float]:
    """Return a function that runs five attention modules, and its multiply-adds."""
    modules = Attention(**fields)
    states = torch.randn(1, tokens, 512)
    config = modules.model.config
    costs = [attention(config, *layer, tokens) for layer in zip(config.attention_kinds, config.layer_types)]
    if backward:
        return training(modules, [states], modules.leaves()), sum(cost.training for cost in costs)
    return inference(modules, states), sum(cost.prefill for cost in costs)


def whole_model(fields: dict, tokens: int) -> tuple[Callable[[], None], float]:
    """Return a function that runs the forward of a model of five layers, and its multiply-adds."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2048}
    config = IHAConfig.from_preset("tiny", max_position_embeddings=CONTEXT, **sizes, **fields)
    return inference(causal_lm(config), torch.randint(256, (1, tokens))), model(config, tokens).prefill


def measure(tokens: int, part: str, repeats: int) -> dict:
    runs = {}
    products = {}
    for name, fields in schedules(tokens, PSEUDO_HEADS).items():
        if part == "model, forward":
            runs[name], products[name] = whole_model(fields, tokens)
        else:
            runs[name], products[name] = attention_modules(fields, tokens, part.endswith("backward"))
    # A backward over more than 4096 tokens takes most of a minute.
    seconds = medians(runs, 1 if part.endswith("backward") and tokens > 4096 else repeats)
    return {
        "tokens": tokens,
        "part": part,
        "seconds": seconds,
        "ratios": ratios(seconds, BASE),
        "predicted": ratios(products, BASE),
    }


def main() -> None:
    args = PARSER.parse_args()
    rows = reported(measure(tokens, part, args.repeats) for tokens, part in product(args.tokens, PARTS))
    setting = {"pseudo_heads": PSEUDO_HEADS, "window": "N / (2 P^2)", "dtype": "float32"}
    write(args.out, "schedule", rows, **setting, predicted_by="multiply-adds")


if __name__ == "__main__":
    run_cli(main)
