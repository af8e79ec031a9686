"""Time on a CPU what a user has to decide, and write the page of the results: one table of cases, one command.

Each case times some forms in turn, on one thread in float32, and divides their medians by that of the first. The cases
"default" compare an "iha" layer with SDPA on the same virtual sequence under a dense mask, which it must not lose to:
the command fails if it takes more than LIMIT times as long. It takes about ten minutes; leave the machine alone.

example: python -m research.benchmarks.cpu --cases training decoding
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from iha.errors import UserError, run_cli
from iha.files import expanded, read_json, whole_file, write_json
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, pair_heads, virtual_tokens
from modeling_iha.transformers_versions import CACHE
from research.benchmarks.arms import arms
from research.benchmarks.harness import Attention, environment, inference, training
from research.benchmarks.options import OUTPUTS


LIMIT = 1.05
REPEATS = 3
# An uncompiled and a compiled form of a model are told apart by this ending.
COMPILED = ", compiled"

Runs = dict[str, Callable[[], object]]  # forms by name; the first is what the others are divided by


@dataclass(frozen=True)
class Case:
    """Hold what is timed together: a title, what builds its forms, and how many runs each form has."""

    title: str
    build: Callable[[], Runs]
    repeats: int = REPEATS
    most: float | None = None  # times the first form, or it is an error


# Models that are trained from random weights


def own_model(tokens: int, fields: dict, width: int, heads: int) -> IHAForCausalLM:
    """Build a small `IHAForCausalLM`."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": heads, "vocab_size": 512, "max_position_embeddings": tokens}
    torch.manual_seed(0)
    return IHAForCausalLM(IHAConfig(**sizes, **fields))


def step_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass."""

    def run() -> None:
        model(**inputs, use_cache=False).loss.backward()
        model.zero_grad()

    return run


def rows(count: int, tokens: int, padded: bool) -> dict[str, torch.Tensor]:
    """Return the arguments of a training step; if `padded`, an eighth of every second row is hidden on the left."""
    input_ids = torch.randint(512, (count, tokens))
    if not padded:
        return {"input_ids": input_ids, "labels": input_ids}
    real = torch.ones_like(input_ids)
    real[::2, : tokens // 8] = 0
    return {"input_ids": input_ids, "labels": input_ids.masked_fill(real == 0, -100), "attention_mask": real}


def own_training(count: int, tokens: int, padded: bool, names: Sequence[str]) -> Runs:
    inputs = rows(count, tokens, padded)
    return {name: step_of(own_model(tokens, arms(tokens)[name], 512, 8), inputs) for name in names}


def compiled_training() -> Runs:
    """Build uncompiled and compiled steps of small models, each compiled before it is timed."""
    inputs = rows(8, 256, False)
    runs: Runs = {}
    for name in ("mha", "iha, P = 4"):
        for ending in ("", COMPILED):
            model = own_model(256, arms(256)[name], 64, 4)
            if ending:
                model.compile(dynamic=False)
            runs[name + ending] = step_of(model, inputs)
            runs[name + ending]()
    return runs


def attention_forward(tokens: int) -> Runs:
    """Build the attention of five layers, without masks and rotary tables, which a model makes once for all layers."""
    states = torch.randn(1, tokens, 512)
    modules = {name: Attention(**fields) for name, fields in arms(tokens).items()}
    return {name: inference(module.attend(states), states) for name, module in modules.items()}


# Decoders in place

LLAMA = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def decoders(tokens: int) -> dict[str, LlamaForCausalLM]:
    """Return a small Llama, and the same with interleaved and with paired heads, for a context of so many tokens."""
    windows = {"layers": "paper", "sliding_window": tokens // 8}
    forms: dict[str, Callable] = {
        "plain": lambda model: model,
        "interleaved, P = 2": lambda model: interleave_heads(model, 2),
        "interleaved, P = 2, windows": lambda model: interleave_heads(model, 2, **windows),
        "paired, P = 4, windows": lambda model: pair_heads(model, 4, layers="paper", sliding_window=tokens // 64),
    }
    models = {}
    for name, change in forms.items():
        torch.manual_seed(0)
        models[name] = change(LlamaForCausalLM(LlamaConfig(**LLAMA, max_position_embeddings=tokens)).eval())
    return models


def forward_in_place(tokens: int) -> Runs:
    ids = torch.randint(512, (1, tokens))
    runs = {}
    for name, model in decoders(tokens).items():
        runs[name] = inference(partial(model, use_cache=False, logits_to_keep=1), ids)
    return runs


def training_in_place(tokens: int) -> Runs:
    inputs = rows(1, tokens, False)
    return {name: step_of(model.train(), inputs) for name, model in decoders(tokens).items()}


def decoding_in_place(tokens: int) -> Runs:
    """Build eight new tokens after so many cached ones."""
    runs: Runs = {}
    for name, model in decoders(tokens + 8).items():
        cache = DynamicCache(config=model.config)
        token = torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            model(torch.randint(512, (1, tokens)), **{CACHE: cache}, logits_to_keep=1)
        runs[name] = partial(decode, model, token, cache)
    return runs


@torch.no_grad()
def decode(model: LlamaForCausalLM, token: torch.Tensor, cache: DynamicCache) -> None:
    """Compute eight new tokens after a cache, which grows by them."""
    for _ in range(8):
        model(token, **{CACHE: cache})


# The rule of the default


@contextlib.contextmanager
def plain_sdpa() -> Iterator[None]:
    """Make dense masks for windows, and virtual tokens of all cached tokens for a new one."""
    with (
        mock.patch.object(virtual_tokens, "takes_new_token", lambda *_: False),
        mock.patch.object(virtual_tokens, "needs_no_dense_mask", lambda **_: False),
    ):
        yield


def one_layer(what: str, module: Attention, states: torch.Tensor) -> Callable[[], None]:
    if what == "training":
        return training(module, [states.clone()], module.leaves())
    if what == "forward":
        return inference(module, states)
    cache = DynamicCache()
    token = states[:, :1]
    cache.update(*torch.randn(2, len(states), 8, states.shape[1], 64), 0)

    @torch.no_grad()
    def step() -> None:
        module.attend(token, cache)(token)
        cache.crop(-1)

    return step


def default_and_sdpa(what: str, count: int, tokens: int, window: int | None) -> Runs:
    """Build an "iha" layer with P = 4, and the same layer on SDPA with dense masks."""
    fields = {"attention_kinds": "iha", "num_pseudo_heads": 4}
    if window is not None:
        fields |= {"layer_types": "sliding_attention", "sliding_window": window}
    modules = {name: Attention(**fields) for name in ("SDPA", "default")}
    modules["default"].load_state_dict(modules["SDPA"].state_dict())
    states = torch.randn(count, tokens, 512)
    runs = {name: one_layer(what, module, states) for name, module in modules.items()}
    return {"SDPA": plain_sdpa()(runs["SDPA"]), "default": runs["default"]}


ALL = ("mha", "windows", "paired", "iha, P = 2", "iha, P = 4")
CASES = {
    "training": [
        Case(
            "training step, 5 layers of width 512, a row of 1,024 tokens", partial(own_training, 1, 1024, False, ALL)
        ),
        Case(
            "the same, two rows of 512 tokens, one of them padded",
            partial(own_training, 2, 512, True, ("mha", "paired", "iha, P = 4")),
        ),
    ],
    "compiled": [Case("training step, width 64, 8 rows of 256 tokens, compiled or not", compiled_training)],
    "attention": [
        Case("attention of 5 layers, forward, 8,192 tokens", partial(attention_forward, 8192), repeats=2),
    ],
    "in place": [
        Case("Llama of 5 layers, forward, 2,048 tokens", partial(forward_in_place, 2048)),
        Case("the same, training step, 1,024 tokens", partial(training_in_place, 1024)),
    ],
    "decoding": [
        Case("the same, 8 new tokens after 512", partial(decoding_in_place, 512), repeats=9),
        Case("the same, 8 new tokens after 4,096", partial(decoding_in_place, 4096), repeats=9),
    ],
    "default": [
        Case(f"default, {title}", partial(default_and_sdpa, *given), repeats=9, most=LIMIT)
        for title, given in (
            ("forward, 1,024 tokens, a window of 64", ("forward", 1, 1024, 64)),
            ("training step, 1,024 tokens, a window of 64", ("training", 1, 1024, 64)),
            ("one new token after 512", ("decoding", 1, 512, None)),
            ("one new token of 16 rows after 64", ("decoding", 16, 64, None)),
            ("one new token of 16 rows after 512", ("decoding", 16, 512, None)),
        )
    ],
}


# The command


def medians(runs: Runs, repeats: int) -> dict[str, float]:
    """Return the median of the seconds of each form, in runs that take all forms in turn, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def page(record: dict) -> str:
    """Return the page of the results as Markdown."""
    lines = [
        "# Benchmarks on a CPU",
        "",
        f"`{record['command']}` wrote this page: {record['machine']}, {record['threads']} thread, float32, torch",
        f"{record['torch']}, Transformers {record['transformers']}, commit {record['commit'][:8]}. A time is the",
        "median of runs that take all forms of a case in turn, divided by that of the first form.",
        "[Figures](cpu.json). [GPUs have a page of their own](gpu/README.md).",
    ]
    for title, seconds in record["cases"].items():
        base = next(iter(seconds.values()))
        lines += [
            "",
            f"**{title[0].upper()}{title[1:]}**",
            "",
            "| form | seconds | divided by the first |",
            "|---|---|---|",
        ]
        lines += [f"| {name} | {value:.4g} | {value / base:.2f} |" for name, value in seconds.items()]
    return "\n".join(lines) + "\n"


def losses(record: dict) -> list[str]:
    """Return what takes longer than its case allows, compared with the first form."""
    found = []
    for case in (case for cases in CASES.values() for case in cases if case.most is not None):
        for name, value in record["cases"].get(case.title, {}).items():
            base = next(iter(record["cases"][case.title].values()))
            if value > case.most * base:
                found.append(f"{case.title}: {name} takes {value / base:.2f} times as long")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the cases, and write the figures and the page. Raise `UserError` if the default loses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what to measure (all)")
    where = "directory of the results (outputs/benchmarks; git tracks those of research/benchmarks/results)"
    parser.add_argument("--out", type=expanded, default=OUTPUTS, help=where)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    record = {**environment("research.benchmarks.cpu"), "cases": {}}
    for case in (case for name in args.cases for case in CASES[name]):
        torch.manual_seed(0)
        record["cases"][case.title] = medians(case.build(), case.repeats)
        base, *_ = record["cases"][case.title].values()
        shown = ", ".join(f"{name} {value / base:.2f}" for name, value in record["cases"][case.title].items())
        print(f"{case.title}: {shown}", flush=True)
    write(args.out, record)
    if lost := losses(record):
        raise UserError(f"The default may take {LIMIT} times as long as SDPA with dense masks. {'; '.join(lost)}.")


def write(out: Path, record: dict) -> None:
    """Write cpu.json, and the page from it."""
    write_json(out / "cpu.json", record)
    with whole_file(out / "README.md") as path:
        path.write_text(page(read_json(out / "cpu.json")), encoding="utf-8")
    print(f"Wrote {out / 'cpu.json'} and README.md", flush=True)


if __name__ == "__main__":
    run_cli(main)
