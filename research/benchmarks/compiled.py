"""Compare compiled training steps with uncompiled ones.

The models are those of research/experiments/language_models.py: five layers of width 64 with 4 heads, and 2,048 bytes
a step. Models with windows are the paper's schedule with P = 4, and paired heads in groups of 4. In padded rows, half
of the rows begin with padding. The decoder is a Mistral of this size with a window of a sixteenth of a row, plain and
after `interleave_heads` with P = 2. Its calls have an `attention_mask`, without which compiled masks are dense.
It takes about ten minutes of one core, most of them for PyTorch's compiler, which needs a C++ compiler.

example: python -m research.benchmarks.compiled --tokens 256 512
"""

import copy
from collections.abc import Callable
from itertools import product

import torch
from transformers import MistralConfig, MistralForCausalLM

from iha.errors import run_cli
from modeling_iha import IHAForCausalLM, interleave_heads
from research.benchmarks.harness import medians, ratios, reported, write
from research.benchmarks.options import arguments
from research.experiments import language_models, paired_heads


PARSER = arguments(__doc__, [256, 512], repeats=7)

TOKENS_PER_STEP = language_models.SMALL["tokens_per_step"]
BASE, PSEUDO_HEADS = "mha", 2
PAIRED = "paired heads"
FORMS = {
    BASE: language_models.VARIANTS["mha"],
    "schedule, P = 4": language_models.VARIANTS["iha_4"],
    PAIRED: paired_heads.VARIANTS["paired_4"],
}
PLAIN_DECODER, DECODER = "Mistral", "interleaved Mistral"
COMPILED = " compiled"


def models(family: str, tokens: int) -> dict[str, torch.nn.Module]:
    """Return the models of a family by name, with weights of their own."""
    torch.manual_seed(0)
    size = {**language_models.SMALL, "tokens": tokens}
    if family == "IHAForCausalLM":
        return {name: IHAForCausalLM(language_models.config_of(size, **fields)) for name, fields in FORMS.items()}
    heads = size["fields"]["num_attention_heads"]
    sizes = {"vocab_size": 256, "num_key_value_heads": heads, "sliding_window": tokens // 16, **size["fields"]}
    plain = MistralForCausalLM(MistralConfig(**sizes))
    return {PLAIN_DECODER: plain, DECODER: interleave_heads(copy.deepcopy(plain), PSEUDO_HEADS)}


def inputs(family: str, tokens: int, padded: bool) -> dict[str, torch.Tensor]:
    """Return the arguments of a training step."""
    input_ids = torch.randint(256, (TOKENS_PER_STEP // tokens, tokens))
    real = torch.ones_like(input_ids)
    if padded:
        real[: len(real) // 2, : tokens // 8] = 0
    given = {"input_ids": input_ids, "labels": input_ids.masked_fill(real == 0, -100), "use_cache": False}
    if padded or family != "IHAForCausalLM":
        given["attention_mask"] = real
    return given


def step(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Return a function that runs a forward and a backward."""

    def run() -> None:
        model(**given).loss.backward()
        model.zero_grad()

    return run


def measure(family: str, tokens: int, padded: bool, repeats: int) -> dict:
    """Return the row of a family of models. Compiled and uncompiled steps take turns."""
    given = inputs(family, tokens, padded)
    runs = {}
    torch.compiler.reset()
    for name, model in models(family, tokens).items():
        runs[name] = step(model, given)
        runs[name + COMPILED] = step(torch.compile(copy.deepcopy(model), dynamic=False), given)
        runs[name + COMPILED]()  # compile before anything is timed
    seconds = medians(runs, repeats)
    first = next(iter(runs))
    compared = {}
    for name in runs:
        if not name.endswith(COMPILED):
            compared |= ratios({name + COMPILED: seconds[name + COMPILED], name: seconds[name]}, name)
        base = first + COMPILED if name.endswith(COMPILED) else first
        compared |= ratios({name: seconds[name], base: seconds[base]}, base)
    return {
        "family": family,
        "tokens": tokens,
        "padding": "in half of the rows" if padded else None,
        "seconds": seconds,
        "ratios": compared,
    }


def main() -> None:
    args = PARSER.parse_args()
    cases = [("IHAForCausalLM", tokens, padded) for tokens, padded in product(args.tokens, (False, True))]
    cases += [("Mistral", tokens, True) for tokens in args.tokens]
    write(args.out, "compiled", reported(measure(*case, args.repeats) for case in cases), dtype="float32")


if __name__ == "__main__":
    run_cli(main)
