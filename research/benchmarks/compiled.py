"""Compare compiled training steps with uncompiled ones.

The models are as small as those of the study `language_models`: five layers of width 64 with 4 heads, and 2,048 tokens
a step. Those with windows are the paper's schedule and paired heads, both with P = 4. In padded rows, half of the rows
begin with padding. The Mistral is of this size, with a window of a sixteenth of a row, plain and after
`interleave_heads` with P = 2. The Llama is plain, interleaved with P = 2, and the same with a window of an eighth of a
row. Its calls have no mask, and one row of 2,048 tokens.
It takes about ten minutes of one core, most of them for PyTorch's compiler, which needs a C++ compiler.

example: python -m research.benchmarks.compiled --tokens 256 512
"""

import copy
from collections.abc import Callable
from itertools import product

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from iha.errors import run_cli
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads
from research.benchmarks.harness import medians, ratios, reported, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [256, 512], repeats=7)

TOKENS_PER_STEP = 2048
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# Form -> the kind of the layers with a window, and how many windows a row has
FORMS = {"mha": ("mha", None), "schedule, P = 4": ("iha", 32), "paired heads, P = 4": ("paired_heads", 64)}
DECODER_WINDOWS = 16
COMPILED = " compiled"


def config_of(kind: str, windows: int | None, tokens: int) -> IHAConfig:
    """Return the config of a form: four layers of a kind with windows and an ordinary one, or five ordinary ones."""
    fields = {**SIZES, "num_pseudo_heads": 4, "max_position_embeddings": tokens}
    if windows is None:
        return IHAConfig(**fields, attention_kinds=kind)
    layer_types = ["sliding_attention"] * 4 + ["full_attention"]
    kinds = [kind] * 4 + ["mha"]
    return IHAConfig(**fields, attention_kinds=kinds, layer_types=layer_types, sliding_window=tokens // windows)


def models(family: str, tokens: int) -> dict[str, torch.nn.Module]:
    """Return the models of a family by name, each with separate weights."""
    torch.manual_seed(0)
    if family == "IHAForCausalLM":
        return {name: IHAForCausalLM(config_of(*form, tokens)) for name, form in FORMS.items()}
    if family == "Llama":
        plain = LlamaForCausalLM(LlamaConfig(**SIZES))
        windows = interleave_heads(copy.deepcopy(plain), 2, sliding_window=tokens // 8)
        return {
            "Llama": plain,
            "interleaved Llama": interleave_heads(copy.deepcopy(plain), 2),
            "with windows": windows,
        }
    plain = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=tokens // DECODER_WINDOWS))
    return {"Mistral": plain, "interleaved Mistral": interleave_heads(copy.deepcopy(plain), 2)}


def inputs(family: str, tokens: int, padded: bool) -> dict[str, torch.Tensor]:
    """Return the arguments of a training step."""
    input_ids = torch.randint(256, (TOKENS_PER_STEP // tokens, tokens))
    real = torch.ones_like(input_ids)
    if padded:
        real[: len(real) // 2, : tokens // 8] = 0
    given = {"input_ids": input_ids, "labels": input_ids.masked_fill(real == 0, -100), "use_cache": False}
    if padded:
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
    cases.append(("Llama", TOKENS_PER_STEP, False))
    write(args.out, "compiled", reported(measure(*case, args.repeats) for case in cases), dtype="float32")


if __name__ == "__main__":
    run_cli(main)
