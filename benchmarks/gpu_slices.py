"""What each slice of `python -m benchmarks.gpu` measures: its cases, cheapest first, and the forms of a case, which
run interleaved. Everything is in bfloat16. On a CPU the cases are tiny, SDPA is the only core, and collapse-first
attention stands in for the fused kernels: such a run shows that a slice is sound, and its figures mean nothing."""

import gc
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import NamedTuple
from unittest import mock

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_4_available

from benchmarks import decode, harness
from benchmarks.harness import Attention, inference, training
from benchmarks.schedule import schedules
from gpu_kernels import fused_triton
from gpu_kernels.attention import attention, stock_attention
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.collapse_first import IHAWeights, collapse_first_attention
from modeling_iha.package import flop_matched_window


DTYPE = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PASSES = ("forward", "forward + backward")
# Longer global attention takes seconds a run: (N P)^2 d H multiply-adds.
LONGEST = 131072
# FlexAttention is compiled anew for each length, up to a minute: at one P only.
FLEX_PSEUDO_HEADS = 4
# Of the norm of the float32 result; bfloat16 keeps 8 bits.
TOLERANCE = 0.03

Prepare = Callable[[], Callable[[], None]]  # builds the tensors of a form and gives the function that is timed


class Benchmark(NamedTuple):
    """A slice that measures."""

    cases: Callable[[bool], list[dict]]  # settings, of the dry size if so asked
    forms: Callable[[dict], dict[str, Prepare]]
    bases: tuple[str, ...]  # forms to which the others are ratios
    x: str  # the key of a case on the plot's horizontal axis
    panel: tuple[str, ...]  # keys of a case whose values have a panel of the plot each
    peaks: bool = False  # whether memory is measured
    together: bool = True  # whether all forms of a case are on the GPU at the same time


def missing_cores() -> dict[str, str]:
    """The attention cores that cannot run here, and why."""
    missing = {}
    if DEVICE == "cpu":
        missing["flex_attention"] = "it needs a GPU for its backward"
    if not is_flash_attn_2_available():
        missing["flash_attention_2"] = "the flash-attn package is not installed, or there is no GPU"
    if not is_flash_attn_4_available():
        missing["flash_attention_4"] = "the flash-attn-4 package is not installed, or there is no GPU"
    if DEVICE != "cpu" and fused_triton.triton is None:
        missing["fused"] = "triton is not installed"
    return missing


def cores(pseudo_heads: int) -> list[str]:
    """The cores that take tensors of the virtual sequence here."""
    there = ["sdpa", "flash_attention_2", "flash_attention_4"]
    there += ["flex_attention"] if pseudo_heads == FLEX_PSEUDO_HEADS else []
    return [core for core in there if core not in missing_cores()]


def fused_forms() -> dict[str, Callable]:
    """The fused kernels as an `attention_form`, where they can run."""
    if DEVICE == "cpu":
        return {"fused": collapse_first_attention}
    return {} if "fused" in missing_cores() else {"fused": fused_triton.fused_attention}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def run(function: Callable, inputs: list[torch.Tensor], parameters: list[torch.Tensor], part: str) -> Callable:
    return inference(function, *inputs) if part == "forward" else training(function, inputs, parameters)


# Layers


def sizes(case: dict) -> dict:
    return {
        "hidden_size": case["heads"] * case["head_dim"],
        "num_attention_heads": case["heads"],
        "num_key_value_heads": case["groups"],
    }


def sliding(window: int | None, length: int) -> dict:
    """Config fields of layers with a window; one of the whole length or more hides nothing."""
    if window is None or window >= length:
        return {}
    return {"layer_types": "sliding_attention", "sliding_window": window}


def module(case: dict, core: str, form: Callable | None = None, **fields) -> Prepare:
    """Attention modules, one layer unless `fields` say otherwise, on random hidden states."""
    attention = Attention(form, DTYPE, attn_implementation=core, **sizes(case), **fields).to(DEVICE)
    return run(attention, [draw(1, case["tokens"], sizes(case)["hidden_size"])], attention.leaves(), case["pass"])


def expanded(case: dict, core: str) -> Callable[[], None]:
    """The core alone, on queries, keys and values of the virtual sequence that are there already."""
    length, virtual_window = case["tokens"] * case["pseudo_heads"], (case["window"] or 0) * case["pseudo_heads"]
    fields = sliding(virtual_window or None, length)
    attention = Attention(None, DTYPE, attention_kinds="mha", attn_implementation=core, **sizes(case), **fields)
    attention = attention.to(DEVICE)
    states = [draw(1, heads, length, case["head_dim"]) for heads in (case["heads"], case["groups"], case["groups"])]
    return run(attention.bare(length, DEVICE), states, [], case["pass"])


def layer_forms(case: dict) -> dict[str, Prepare]:
    pseudo_heads = case["pseudo_heads"]
    fields = {"num_pseudo_heads": pseudo_heads, **sliding(case["window"], case["tokens"])}
    forms = {f"expanded, {core}": partial(expanded, case, core) for core in cores(pseudo_heads)}
    mha = [core for core in cores(pseudo_heads) if core != "flex_attention"]
    forms |= {f"mha layer, {core}": partial(module, case, core, attention_kinds="mha") for core in mha}
    forms |= {f"iha layer, {core}": partial(module, case, core, **fields) for core in cores(pseudo_heads)}
    return forms | {
        f"iha layer, {name}": partial(module, case, "sdpa", form, **fields) for name, form in fused_forms().items()
    }


def schedule_forms(case: dict) -> dict[str, Prepare]:
    """The paper's schedule against five global "mha" layers."""
    iha, mha = schedules(case["tokens"], case["pseudo_heads"]).values()
    forms = {f"5 mha, {core}": partial(module, case, core, **mha) for core in cores(1)}
    forms |= {f"4 iha + 1 mha, {core}": partial(module, case, core, **iha) for core in cores(case["pseudo_heads"])}
    return forms | {
        f"4 iha + 1 mha, {name}": partial(module, case, "sdpa", form, **iha) for name, form in fused_forms().items()
    }


def layer_or_schedule_forms(case: dict) -> dict[str, Prepare]:
    return (schedule_forms if case["part"] == "schedule" else layer_forms)(case)


def paper_heads(dry: bool) -> dict:
    """Those of the paper's 2.4B model."""
    return {"heads": 4, "groups": 4, "head_dim": 8} if dry else {"heads": 20, "groups": 20, "head_dim": 128}


def layer_cases(dry: bool) -> list[dict]:
    lengths, pseudo_heads = ([64], [2]) if dry else ([1024, 4096, 16384, 65536], [2, 4, 8, 20])
    cases = []
    for tokens, virtual, part in product(lengths, pseudo_heads, PASSES):
        for window in (None, flop_matched_window(tokens, virtual)):
            reach = tokens if window is None else window
            if virtual**2 * tokens * reach <= LONGEST**2:
                setting = {"tokens": tokens, "pseudo_heads": virtual, "window": window, "pass": part}
                cases.append({"part": "layer", **setting, **paper_heads(dry)})
    for tokens, part in product([64] if dry else [8192, 16384, 32768, 65536], PASSES):
        virtual = 2 if dry else 4
        setting = {"tokens": tokens, "pseudo_heads": virtual, "window": flop_matched_window(tokens, virtual)}
        cases.append({"part": "schedule", **setting, "pass": part, **paper_heads(dry)})
    return sorted(cases, key=lambda case: case["tokens"] * case["pseudo_heads"])


def memory_cases(dry: bool) -> list[dict]:
    """Training steps of a global layer."""
    lengths, pseudo_heads = ([64], [2]) if dry else ([2048, 8192], [2, 4, 8])
    return [
        {"tokens": tokens, "pseudo_heads": virtual, "window": None, "pass": PASSES[1], **paper_heads(dry)}
        for tokens, virtual in product(lengths, pseudo_heads)
    ]


# The kernels by themselves


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def check_kernels(kernel: Callable, inputs: list[torch.Tensor], rotation: tuple, window: int | None) -> None:
    """Raises a RuntimeError where output or gradients of the kernels are further off a float32 computation than
    bfloat16's rounding explains."""
    results = []
    for form, dtype in ((kernel, DTYPE), (stock_attention, torch.float32)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        output = form(*leaves[:3], IHAWeights(*leaves[3:], rotation), 0.1, window)
        results.append([output, *torch.autograd.grad(output, leaves, torch.ones_like(output))])
    worst = max(map(error, *results))
    if not worst <= TOLERANCE:
        raise RuntimeError(f"The kernels are off by {worst:.1%} of a float32 computation.")


def in_tiles(rows: int, kernel: Callable) -> Callable:
    """The kernel with at most `rows` rows to a tile of queries; the backward keeps the tiles of the forward."""

    def kernel_in_tiles(*arguments):
        with mock.patch.object(fused_triton, "QUERY_TILE", (rows, rows // 4)):
            return kernel(*arguments)

    return kernel_in_tiles


def kernel(case: dict, rows: int, fused: Callable) -> Callable[[], None]:
    """The fused attention on base states, compared at 200 tokens first."""
    fused, heads, groups, virtual = in_tiles(rows, fused), case["heads"], case["groups"], case["pseudo_heads"]

    def inputs(tokens: int) -> list[torch.Tensor]:
        states = [draw(1, count, tokens, case["head_dim"]) for count in (heads, groups, groups)]
        mixing = [draw(count, count, virtual) / count**0.5 for count in (heads, groups, groups)]
        return [*states, *mixing, draw(heads, virtual) / virtual]

    angles = draw(virtual, case["head_dim"] // 2).float()
    rotation, short = (angles.cos(), angles.sin()), min(200, case["tokens"])
    check_kernels(fused, inputs(short), rotation, case["window"] and min(case["window"], short))

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return fused(*tensors[:3], IHAWeights(*tensors[3:], rotation), case["head_dim"] ** -0.5, case["window"])

    return run(attend, inputs(case["tokens"]), [], case["pass"])


def kernel_forms(case: dict) -> dict[str, Prepare]:
    forms = {f"expanded, {core}": partial(expanded, case, core) for core in cores(0)}
    for rows, (name, fused) in product((32, 64, 128), fused_forms().items()):
        forms[f"{name}, tiles of {rows}"] = partial(kernel, case, rows, fused)
    return forms


def kernel_cases(dry: bool) -> list[dict]:
    """16384 virtual tokens each, as the dense products' time depends on these alone."""
    pseudo_heads, head_dims, length = ([2], [8], 64) if dry else ([1, 2, 4, 8, 16, 32], [64, 128], 16384)
    heads = 4 if dry else 16
    cases = []
    # Triton compiles anew for each number of groups, size of a head and P.
    for groups, part, windowed in product((heads, heads // 4), PASSES, (True, False)):
        for head_dim, virtual in product(head_dims, pseudo_heads):
            tokens = length // virtual
            setting = {"tokens": tokens, "pseudo_heads": virtual, "window": tokens // 16 if windowed else None}
            cases.append({**setting, "pass": part, "heads": heads, "groups": groups, "head_dim": head_dim})
    return cases


# Decoding


def decode_cases(dry: bool) -> list[dict]:
    lengths, batches, pseudo_heads = ([64], [2], [2]) if dry else ([1024, 4096, 16384, 65536], [1, 8, 32], [2, 4])
    cases = product(lengths, batches, pseudo_heads)
    cases = [{"tokens": tokens, "batch": batch, "pseudo_heads": virtual} for tokens, batch, virtual in cases]
    return sorted(cases, key=lambda case: case["tokens"] * case["batch"] * case["pseudo_heads"])


def decode_forms(case: dict) -> dict[str, Prepare]:
    """Those of `benchmarks.decode` and the decoding kernel, in whose place `attention` takes the absorbed form on a
    CPU."""
    kernel = dict.fromkeys(fused_forms(), attention)
    where = {"batch": case["batch"], "device": DEVICE}
    steps = cache(partial(decode.agreeing_forms, case["tokens"], case["pseudo_heads"], DTYPE, **where, **kernel))
    names = (*decode.BASE_CACHES, *kernel, *decode.PSEUDO_CACHES)
    return {name: lambda name=name: inference(steps()[name]) for name in names}


# Whole models

SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}


def train_cases(dry: bool) -> list[dict]:
    """SmolLM2-135M with every layer global, and the paper's schedule for one and for five periods of layers."""
    small, paper = {"model": "SmolLM2-135M", "layers": 30}, {"model": "paper-2.4b-iha"}
    if dry:
        size = {"batch": 1, "tokens": 64, "pseudo_heads": 2}
        return [{**small, **size, "layers": 2}, {**paper, **size, "layers": 5}]
    cases = [{**small, "batch": 8, "tokens": 2048, "pseudo_heads": virtual} for virtual in (2, 4, 9)]
    return cases + [{**paper, "layers": layers, "batch": 1, "tokens": 8192, "pseudo_heads": 20} for layers in (5, 25)]


def model_config(case: dict, kind: str, core: str) -> IHAConfig:
    """Of the model of a case, or with kind "mha" of its twin."""
    fields = {"num_hidden_layers": case["layers"], "attn_implementation": core}
    if DEVICE == "cpu":
        fields |= TINY | {"num_key_value_heads": 4}
    if case["model"] == "SmolLM2-135M":
        iha = {"num_pseudo_heads": case["pseudo_heads"]}
        return IHAConfig(**{**SMOLLM2_135M, "attention_kinds": kind, **fields, **(iha if kind == "iha" else {})})
    if kind == "mha":
        return IHAConfig.from_preset("paper-2.4b-global", **fields)
    sequence = {"num_pseudo_heads": case["pseudo_heads"], "max_position_embeddings": case["tokens"]}
    return IHAConfig.from_preset(case["model"], **sequence, **fields)


def train_step(case: dict, kind: str, core: str, form: Callable | None = None) -> Callable[[], None]:
    """A whole step of AdamW on a batch of random tokens, with random weights."""
    config = model_config(case, kind, core)
    with torch.device(DEVICE):
        model = IHAForCausalLM._from_config(config, dtype=DTYPE).train()
    model.base_model.attention_form = form
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    input_ids = torch.randint(config.vocab_size, (case["batch"], case["tokens"]), device=DEVICE)

    def step() -> None:
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train_forms(case: dict) -> dict[str, Prepare]:
    forms = {f"{kind}, {core}": partial(train_step, case, kind, core) for kind in ("mha", "iha") for core in cores(0)}
    return forms | {
        f"iha, {name}": partial(train_step, case, "iha", "sdpa", form) for name, form in fused_forms().items()
    }


EXPANDED = ("expanded, sdpa", "expanded, flash_attention_4")
BENCHMARKS = {
    "kernels": Benchmark(kernel_cases, kernel_forms, EXPANDED, "pseudo_heads", ("pass", "head_dim", "groups")),
    "layer": Benchmark(
        layer_cases,
        layer_or_schedule_forms,
        ("mha layer, sdpa", *EXPANDED, "5 mha, sdpa", "5 mha, flash_attention_4"),
        "tokens",
        ("pass", "part", "pseudo_heads"),
    ),
    "memory": Benchmark(memory_cases, layer_forms, ("mha layer, sdpa",), "tokens", ("pseudo_heads",), peaks=True),
    "decode": Benchmark(decode_cases, decode_forms, decode.PSEUDO_CACHES, "tokens", ("pseudo_heads", "batch")),
    "train": Benchmark(
        train_cases, train_forms, ("mha, sdpa",), "pseudo_heads", ("model", "layers"), peaks=True, together=False
    ),
}


# Time and memory


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], None]) -> float:
    """By CUDA events; the wall clock on a CPU."""
    if DEVICE == "cpu":
        return harness.wall_seconds(function)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def held_bytes() -> int:
    """What the allocator, or on a CPU the process, holds; its peak starts here."""
    if DEVICE == "cpu":
        return harness.resident_bytes()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_bytes() -> int:
    synchronize()
    return harness.peak_resident_bytes() if DEVICE == "cpu" else torch.cuda.max_memory_allocated()


def groups(benchmark: Benchmark, forms: dict[str, Prepare]) -> Iterator[dict[str, Prepare]]:
    """The forms that are on the GPU at the same time; what they held is given back after each."""
    for group in [forms] if benchmark.together else [{name: prepare} for name, prepare in forms.items()]:
        yield group
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
