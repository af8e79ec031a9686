"""Compare the paper's schedule with five global "mha" layers, which take about as many multiply-adds.

The schedule is four sliding "iha" layers with W = N / (2 P^2) and a global "mha" layer (IHA, Appendix C). Attention
modules run alone, and whole models with a gated FFN, at width 512 with 8 heads in fp32. It takes about seven minutes
of one core.

recompute.json has a training step of the schedule's attention modules whose backward pass makes virtual tokens again,
over one that keeps them: time, and memory beyond the weights. iha/step_memory.py predicts the memory.

example: python -m research.benchmarks.schedule --tokens 4096 8192
"""

import time
from collections.abc import Callable
from itertools import product

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from iha.errors import run_cli
from iha.model_cost import attention, model
from iha.step_memory import Counter
from modeling_iha import IHAConfig
from modeling_iha.flop_matched_window import flop_matched_window
from research.benchmarks.harness import (
    CONTEXT,
    Attention,
    causal_lm,
    extra_bytes,
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
HEADS = 8
SCHEDULE = "4 iha + 1 mha"
KEPT = "kept"
RECOMPUTED = {KEPT: False, "recomputed": True}
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
        SCHEDULE: {**schedule, "num_hidden_layers": 5},
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


def training_step(fields: dict, tokens: int) -> Callable[[], None]:
    return attention_modules(fields, tokens, backward=True)[0]


def cpu_seconds(function: Callable[[], None]) -> float:
    """Return the time that the process computes, which other processes change less than the wall clock."""
    start = time.process_time()
    function()
    return time.process_time() - start


def counted_bytes(fields: dict, tokens: int) -> int:
    """Return the peak of the tensors that a training step makes, without computing it."""
    with FakeTensorMode():
        step = training_step(fields, tokens)
        with Counter() as counter:
            step()
    return counter.peak


def measure_recomputation(tokens: int, pseudo_heads: int, repeats: int) -> dict:
    schedule = schedules(tokens, pseudo_heads)[SCHEDULE]
    forms = {name: schedule | {"recompute_virtual_tokens": choice} for name, choice in RECOMPUTED.items()}
    seconds = medians({name: training_step(form, tokens) for name, form in forms.items()}, repeats, cpu_seconds)
    extra = {name: extra_bytes(training_step, (form, tokens), (form, tokens // 8)) for name, form in forms.items()}
    counted = {name: counted_bytes(form, tokens) for name, form in forms.items()}
    return {
        "tokens": tokens,
        "pseudo_heads": pseudo_heads,
        "seconds": seconds,
        "extra_bytes": extra,
        "ratios": {**ratios(seconds, KEPT), **ratios(extra, KEPT, "memory: ")},
        "predicted": ratios(counted, KEPT, "memory: "),
    }


def main() -> None:
    args = PARSER.parse_args()
    rows = reported(measure(tokens, part, args.repeats) for tokens, part in product(args.tokens, PARTS))
    setting = {"pseudo_heads": PSEUDO_HEADS, "window": "N / (2 P^2)", "dtype": "float32"}
    write(args.out, "schedule", rows, **setting, predicted_by="multiply-adds")
    tokens = args.tokens[0]
    sizes = [size for size in (PSEUDO_HEADS, HEADS) if tokens >= 4 * size**2]  # shorter rows leave no window
    rows = reported(measure_recomputation(tokens, size, args.repeats) for size in sizes)
    write(args.out, "recompute", rows, "schedule", dtype="float32", predicted_by="iha/step_memory.py")


if __name__ == "__main__":
    run_cli(main)
