"""Measure on a GPU, in bfloat16: mixing, layers, schedules, whole decoders, training steps and decoded tokens.

A form is timed and written to gpu.json, in a directory named after the device, before the next one begins, and is not
repeated: the same command goes on. A form that raises, or ends the process, stays in `failed` until --retry. On a CPU
`--dry` runs tiny sizes, whose figures mean nothing.

example: python -m research.benchmarks.gpu --parts layer schedule --seconds 540 --out outputs/gpu
"""

import argparse
import faulthandler
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn import attention
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import is_flash_attn_4_available

from iha import model_cost as cost
from iha.errors import UserError, one_line, run_cli
from iha.files import current_commit, expanded, sole_writer, write_json
from iha.kinds import virtual_tokens_per_token
from modeling_iha import IHAConfig, IHAForCausalLM, IHAModel, interleave_heads, interleaving, triton_kernels
from modeling_iha.flop_matched_window import flop_matched_window
from modeling_iha.interleaving import MixedHeads
from modeling_iha.transformers_versions import CACHE
from research.benchmarks import harness
from research.benchmarks.harness import Attention, inference, training
from research.benchmarks.options import OUTPUTS
from research.benchmarks.schedule import SCHEDULE, schedules


# Parts of the measurement; users look for the first ones first. If "expand" is wrong or slow, so are the others.
PARTS = ("expand", "schedule", "decoder", "training", "decoding", "compiled training", "compiled decoder", "layer")
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
PARSER.add_argument("--seconds", type=float, default=float("inf"), help="begin no form after so many (no limit)")
PARSER.add_argument("--cases", type=int, help="measure so many cases of each part, the first ones (all)")
PARSER.add_argument("--retry", action="store_true", help="try again what failed")
PARSER.add_argument("--commit", help="the commit that is measured, for a copy without git")
PARSER.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU too")
where = "directory of the results (outputs/benchmarks/gpu)"
PARSER.add_argument("--out", type=expanded, default=OUTPUTS / "gpu", help=where)

DTYPE = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILER = "inductor" if DEVICE == "cuda" else "eager"
# Not FlashAttention 4: PyTorch up to 2.13 raises an error for what its package returns (docs/SUPPORT.md).
FLASH_PACKAGES = {"FA3": "flash_attn_interface"}


def flash_kernels() -> list[str]:
    """Return the FlashAttentions that PyTorch can put under SDPA and `varlen_attn` here."""
    if DEVICE == "cpu" or not hasattr(attention, "activate_flash_attention_impl"):
        return []
    return [name for name, package in FLASH_PACKAGES.items() if is_installed(package)]


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that holds it
        return False


# "sdpa, FA3" is "sdpa" on that kernel (`flash_kernel`).
CORES = ["sdpa", *(f"sdpa, {name}" for name in flash_kernels())]
CORES += ["flash_attention_4"] * (DEVICE == "cuda" and is_flash_attn_4_available())
# Global attention over more virtual tokens takes seconds per run.
LONGEST = 131072
ENDED = "ended the process, or was stopped"
# The longest that a form may take. A kernel or a compiler that hangs hears no signal: the process ends. (Dynamo alone
# traces a decoder of 28 interleaved layers with gradients for a minute.)
FORM_SECONDS = 90
COMPILED_FORM_SECONDS = 240
# Seconds that the timed runs of a form take, and their fewest and most.
TIMED_SECONDS, FEWEST_RUNS, MOST_RUNS = (0.5, 3, 20) if DEVICE == "cuda" else (0, 1, 1)
# About 10 ms on a GPU.
SLEEP_CYCLES = 20_000_000


class Work(NamedTuple):
    """Hold a function to time and its computed amounts: "TFLOP", "GB" that it reads, "tokens".

    `error` is that of its results in bfloat16, relative to float64."""

    run: Callable[[], None]
    amounts: dict[str, float]
    error: float | None = None


Forms = dict[str, Callable[[], Work]]  # by name; each builds what it needs, on the device. The first is the base.


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def sizes(case: dict) -> dict:
    heads = case["heads"]
    return {"hidden_size": heads * case["head_dim"], "num_attention_heads": heads, "num_key_value_heads": heads}


# Mixing


# Several times what rounding to bfloat16 (2^-9) leaves. A kernel that is wrong is off by about 1.
MOST_ERROR = 0.02
STEPS = ("expand", "expand without rotation", "collapse")
# An H200's bandwidth, in bytes per second, and the shares of it that kernels are predicted to reach: KERNEL_SHARE
# forward, and backward in "expand" and in "collapse".
BANDWIDTH = 4.8e12
KERNEL_SHARE = 0.75
BACKWARD_SHARES = {"expand": 0.6, "expand without rotation": 0.6, "collapse": 0.7}


def in_pytorch(function: Callable) -> Callable:
    """Return the function, run without Triton kernels."""
    return mock.patch.object(interleaving, "kernels_take", lambda *_: False)(function)


def collapse_heads(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return MixedHeads(weight[None], None, None, weight, None).collapse_output(output)


def expand_heads(rotation, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return virtual queries, keys and values, of the three and the alphas of the three."""
    return MixedHeads(*inputs[3:], None, rotation).make_virtual_tokens(*inputs[:3])


def expand_by_kernels(rotation, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return triton_kernels.expand(inputs[:3], inputs[3:], rotation)


def mixing(case: dict, form: str) -> Work:
    """Build one step around attention of one layer (`expand` takes queries, keys and values), and check it.

    Raise a ValueError if it is further from its definition in float64 than rounding explains, on the first tokens."""
    tokens, heads, size = case["tokens"], case["heads"], case["pseudo_heads"][0]
    dtype = getattr(torch, case["dtype"])
    options = {"device": DEVICE, "requires_grad": True}
    if case["step"] == "collapse":
        states = [torch.randn(1, tokens * size, heads, case["head_dim"], dtype=dtype, **options)]
        weights = [torch.randn(heads, size, **options)]
        few = [each[:, : 37 * size] for each in states]
        definition, kernel = collapse_heads, triton_kernels.collapse
    else:
        shape = (1, tokens, heads, case["head_dim"])
        states = [torch.randn(shape, dtype=dtype, **options).transpose(1, 2) for _ in range(3)]
        weights = [torch.randn(heads, heads, size, **options) for _ in range(3)]
        few = [each[:, :, :37] for each in states]
        angles = torch.randn(size, case["head_dim"] // 2, device=DEVICE).repeat(1, 2)
        rotation = None if "without" in case["step"] else (angles.cos(), angles.sin())
        definition, kernel = partial(expand_heads, rotation), partial(expand_by_kernels, rotation)
    function = {
        "eager": in_pytorch(definition),
        "compiled": in_pytorch(torch.compile(definition, backend=COMPILER, dynamic=False)),
        "kernels": kernel,
    }[form]
    error = error_of(function, definition, *(each.detach() for each in (*few, *weights)))
    if not error < MOST_ERROR:
        raise ValueError(f"{case['step']} is off by {error:.1e} of its norm: expected less than {MOST_ERROR}.")
    inputs = [each.detach().requires_grad_() for each in (*states, *weights)]
    seeds = [torch.randn_like(each) for each in as_tuple(function(*inputs))]

    def run() -> None:
        torch.autograd.grad(as_tuple(function(*inputs)), inputs, seeds)

    gigabytes = sum(passes(case)) * base_bytes(case) / 1e9
    return Work(run if case["backward"] else inference(function, *inputs), {"GB": gigabytes}, error)


def as_tuple(result: torch.Tensor | tuple) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result


def error_of(function: Callable, definition: Callable, *inputs: torch.Tensor) -> float:
    """Return the largest relative error of a result and its gradients, compared with the definition in float64."""
    inputs = [tensor.requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    results, expected = as_tuple(function(*inputs)), as_tuple(definition(*exact))
    seeds = [torch.randn_like(result) for result in results]
    found = (*results, *torch.autograd.grad(results, inputs, seeds))
    wanted = (*expected, *torch.autograd.grad(expected, exact, [seed.double() for seed in seeds]))
    return max(((one.double() - two).norm() / two.norm()).item() for one, two in zip(found, wanted, strict=True))


def base_bytes(case: dict) -> int:
    """Return the bytes of the heads of all tokens."""
    return case["tokens"] * case["heads"] * case["head_dim"] * 2


def passes(case: dict) -> tuple[int, int]:
    """Return how often the kernels read or write such heads, forward and backward (0 if it is not run).

    `expand` does so for queries, keys and values."""
    size = case["pseudo_heads"][0]
    if case["step"] == "collapse":
        forward, backward = size + 1, 2 * size + 1
    else:
        forward, backward = 3 * (size + 1), 6 * (size + 1)
    return forward, backward if case["backward"] else 0


def mixing_forms(case: dict) -> Forms:
    """Compare the PyTorch code with what Inductor makes of it and with the Triton kernels.

    A dry run has the kernels where Triton's interpreter can run them."""
    forms = ["eager", "compiled"]
    if triton_kernels.triton and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
        forms.append("kernels")
    return {form: partial(mixing, case, form) for form in forms}


def predicted_mixing(case: dict) -> dict[str, dict[str, float]]:
    """Return the seconds of the kernels on an H200: predicted, and at its bandwidth."""
    forward, backward = (count * base_bytes(case) / BANDWIDTH for count in passes(case))
    seconds = forward / KERNEL_SHARE + backward / BACKWARD_SHARES[case["step"]]
    return {"predicted seconds": {"kernels": seconds}, "bound seconds": {"kernels": forward + backward}}


# Attention layers


def layers(case: dict, core: str, **fields) -> Work:
    """Build attention modules on random hidden states, one layer unless `fields` say otherwise.

    A model makes masks and rotary tables once for all of its layers, so they are made here and not timed."""
    with torch.device(DEVICE):
        modules = Attention(dtype=DTYPE, attn_implementation=core.partition(",")[0], **sizes(case), **fields)
    config = modules.model.config
    tokens = case["tokens"]
    costs = [cost.attention(config, *kind, tokens, "sdpa") for kind in zip(config.attention_kinds, config.layer_types)]
    products = sum(one.training if case["backward"] else one.prefill for one in costs)
    states = draw(1, tokens, config.hidden_size)
    return Work(timed(case, modules.attend(states), states, modules.leaves()), {"TFLOP": 2e-12 * products})


def timed(case: dict, function: Callable, states: torch.Tensor, parameters: list) -> Callable[[], None]:
    return training(function, [states], parameters) if case["backward"] else inference(function, states)


def layer_forms(case: dict) -> Forms:
    """Compare one layer of each kind and core."""
    forms = {f"mha: {core}": partial(layers, case, core, attention_kinds="mha") for core in CORES}
    for virtual in case["pseudo_heads"]:
        window = flop_matched_window(case["tokens"], virtual)
        sliding = {"layer_types": "sliding_attention", "sliding_window": window, "num_pseudo_heads": virtual}
        for core in CORES:
            forms[f"iha, P = {virtual}, window {window}: {core}"] = partial(layers, case, core, **sliding)
            if case["tokens"] * virtual <= LONGEST:
                forms[f"iha, P = {virtual}: {core}"] = partial(layers, case, core, num_pseudo_heads=virtual)
    return forms


def arms(tokens: int, pseudo_heads: list[int]) -> dict[str, dict]:
    """Return the fields of five layers: global, with windows alone, with paired heads, and of the paper's schedule.

    Windows are as long as those of the presets of the 2.4B models, for the number of tokens."""
    windows = {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"]}
    paired = {"attention_kinds": ["paired_heads"] * 4 + ["mha"], "num_pseudo_heads": 4}
    fields = {
        "mha": {"attention_kinds": "mha", "num_hidden_layers": 5},
        "windows alone": {**windows, "attention_kinds": "mha", "sliding_window": tokens // 16},
        "paired heads": {**windows, **paired, "sliding_window": tokens // 64},
    }
    for virtual in pseudo_heads:
        fields[f"schedule, P = {virtual}"] = schedules(tokens, virtual)[SCHEDULE]
    return fields


def schedule_forms(case: dict) -> Forms:
    """Compare attention of five layers.

    In training a schedule's layers keep their virtual tokens: more than 100 GB at 65536 tokens and P = 20. Else the
    backward pass makes these again ("recomputed"), or with gradient checkpointing all of a layer."""
    forms = {}
    for (name, fields), core in product(arms(case["tokens"], case["pseudo_heads"]).items(), CORES):
        kept = fields | {"recompute_virtual_tokens": False}
        forms[f"{name}: {core}"] = partial(layers, case, core, **kept)
        if core == "sdpa" and "iha" in fields["attention_kinds"]:
            forms[f"{name}: {core}, without kernels"] = partial(without_kernels, layers, case, core, **kept)
        if case["backward"] and "iha" in fields["attention_kinds"]:
            recomputed = fields | {"recompute_virtual_tokens": True}
            forms[f"{name}: {core}, recomputed"] = partial(layers, case, core, **recomputed)
            forms[f"{name}: {core}, checkpointed"] = partial(layers, case, core, checkpointing=True, **kept)
    return forms


def without_kernels(build: Callable[..., Work], *args, **fields) -> Work:
    work = build(*args, **fields)
    return work._replace(run=in_pytorch(work.run))


# By tokens and P, for SDPA and FlashAttention 2 on an H200: five layers, forward, and with backward, in times the time
# of five "mha" layers. Of 65,536 tokens, on an H100.
PREDICTED_SCHEDULES = {
    **{(8192, 2): (1.25, 1.41), (8192, 4): (1.37, 1.57), (8192, 20): (2.18, 2.52)},
    **{(65536, 2): (1.57, 1.63), (65536, 4): (1.66, 1.72), (65536, 20): (1.91, 1.97)},
}


def predicted_schedules(case: dict) -> dict[str, dict[str, float]]:
    """Return the predicted ratios, for sizes that have one."""
    found = {size: PREDICTED_SCHEDULES.get((case["tokens"], size)) for size in case["pseudo_heads"]}
    ratios = {f"schedule, P = {size}: sdpa": pair[case["backward"]] for size, pair in found.items() if pair}
    return {"predicted ratios": ratios}


# Any decoder


# Llama-3.2-1B, OLMo-2-1B and Qwen3-1.7B.
DECODERS = {
    "llama": {"heads": 32, "groups": 8, "head_dim": 64, "layers": 16, "intermediate_size": 8192},
    "olmo2": {"heads": 16, "groups": 16, "head_dim": 128, "layers": 16, "intermediate_size": 8192},
    "qwen3": {"heads": 16, "groups": 8, "head_dim": 128, "layers": 28, "intermediate_size": 6144},
}


def decoder(case: dict, core: str, virtual: int, window: str | None) -> Work:
    """Build a decoder of Transformers with random weights, interleaved unless `virtual` is 1."""
    config = AutoConfig.for_model(
        case["family"],
        vocab_size=1024,
        intermediate_size=case["intermediate_size"],
        num_hidden_layers=case["layers"],
        max_position_embeddings=case["tokens"],
        head_dim=case["head_dim"],
        **{**sizes(case), "num_key_value_heads": case["groups"]},
    )
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation=core.partition(",")[0])
    if virtual > 1:
        interleave_heads(model, virtual, sliding_window=window, layers="paper" if window else None)
    if case["compiled"]:
        model.compile(backend=COMPILER)
    states = draw(1, case["tokens"], config.hidden_size)

    def run(hidden_states: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=hidden_states, use_cache=False, logits_to_keep=1).logits

    return Work(timed(case, run, states, list(model.base_model.layers.parameters())), {"tokens": case["tokens"]})


def decoder_forms(case: dict) -> Forms:
    """Compare a decoder of 1B parameters with itself, interleaved."""
    forms = {}
    for name, *arguments in (
        ("plain", 1, None),
        ("interleaved, P = 2", 2, None),
        ("interleaved, P = 2, schedule", 2, "paper"),
    ):
        for core in CORES:
            forms[f"{name}: {core}"] = partial(decoder, case, core, *arguments)
        if name != "plain":
            forms[f"{name}: sdpa, without kernels"] = partial(without_kernels, decoder, case, "sdpa", *arguments)
    return forms


# The paper's models


def paper_model(case: dict, preset: str, **overrides) -> IHAForCausalLM:
    """Build the preset at the length and depth of the case, with random weights."""
    fields = {"num_hidden_layers": case["layers"], "max_position_embeddings": case["tokens"], **sizes(case)}
    if case["heads"] == 4:
        fields |= {"vocab_size": 64, "intermediate_size": 32}
    config = IHAConfig.from_preset(f"paper-2.4b-{preset}", **fields, **overrides)
    with torch.device(DEVICE):
        return IHAForCausalLM._from_config(config, dtype=DTYPE)


def train_step(case: dict, preset: str, **overrides) -> Work:
    """Build a whole training step of AdamW on random tokens."""
    model = paper_model(case, preset, **overrides).train()
    if case["checkpointing"]:
        model.gradient_checkpointing_enable()
    if case["compiled"]:
        model.compile(backend=COMPILER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    input_ids = torch.randint(model.config.vocab_size, (1, case["tokens"]), device=DEVICE)

    def step() -> None:
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    products = cost.model(model.config, case["tokens"], "sdpa").training
    return Work(step, {"tokens": case["tokens"], "TFLOP": 2e-12 * products})


class InPlaceLayer(DynamicLayer):
    """Cache `tokens` random tokens and write each new one into the last place.

    A full static ring does the same, without a mask. A window keeps what its layer sees."""

    def __init__(self, model: IHAModel, index: int, batch: int, tokens: int):
        super().__init__()
        config = model.config
        self.tokens = tokens
        self.is_initialized = True
        self.is_sliding = config.layer_types[index] == "sliding_attention"
        self.sliding_window = tokens + 1
        if self.is_sliding:
            self.sliding_window = config.sliding_window + (virtual_tokens_per_token(config) > 1)
        shape = (batch, config.num_key_value_heads, self.sliding_window, config.head_dim)
        self.keys = draw(*shape)
        self.values = draw(*shape)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple:
        self.keys[:, :, -1:] = key_states
        self.values[:, :, -1:] = value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.sliding_window, self.tokens + 1 - self.sliding_window


def replayed(function: Callable[[], None]) -> Callable[[], None]:
    """Capture the function as a CUDA graph, which takes no time in Python. On a CPU return the function itself."""
    if DEVICE == "cpu":
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()

    def replay() -> None:
        graph.replay()

    replay.reads = function  # the graph holds addresses only, so what it reads must live as long
    return replay


def decode_step(case: dict, preset: str, **overrides) -> Work:
    """Build one new token after `tokens` cached ones."""
    model = paper_model(case, preset, **overrides).eval()
    batch = case["batch"]
    layers = [InPlaceLayer(model.model, index, batch, case["tokens"]) for index in range(len(model.model.layers))]
    cache = Cache(layers=layers)
    read = [*model.parameters(), *(states for layer in layers for states in (layer.keys, layer.values))]
    position_ids = torch.full((1, 1), case["tokens"], device=DEVICE)
    # Transformers takes the capture of a graph for tracing, under which masks are dense.
    masks = model.model.create_masks(draw(batch, 1, 1), None, cache, position_ids)
    step = partial(model, attention_mask=masks, position_ids=position_ids, **{CACHE: cache})
    run = inference(step, torch.zeros(batch, 1, dtype=torch.int, device=DEVICE))
    return Work(replayed(run), {"tokens": batch, "GB": sum(tensor.nbytes for tensor in read) / 1e9})


def plain_decode_step(case: dict, preset: str, **overrides) -> Work:
    """Build the same without Triton's kernels. The graph holds what it captures here."""
    with mock.patch.object(interleaving, "kernels_decode", lambda *_: False):
        return decode_step(case, preset, **overrides)


def paper_forms(work: Callable[..., Work], case: dict) -> Forms:
    """Compare the paper's models, windows alone and paired heads."""
    forms = {name: partial(work, case, name) for name in ("global", "global-local", "paired-heads")}
    for virtual in case["pseudo_heads"]:
        forms[f"iha, P = {virtual}"] = partial(work, case, "iha", num_pseudo_heads=virtual)
    return forms


def training_forms(case: dict) -> Forms:
    """Compare the paper's models, with and without Triton's kernels."""
    forms = paper_forms(train_step, case)
    for virtual in case["pseudo_heads"]:
        plain = partial(without_kernels, train_step, case, "iha", num_pseudo_heads=virtual)
        forms[f"iha, P = {virtual}, without kernels"] = plain
    return forms


def decoding_forms(case: dict) -> Forms:
    """Compare the paper's models, with and without Triton's kernels."""
    forms = paper_forms(decode_step, case)
    for virtual in case["pseudo_heads"]:
        plain = partial(plain_decode_step, case, "iha", num_pseudo_heads=virtual)
        forms[f"iha, P = {virtual}, without kernels"] = plain
    return forms


# By P, after 65,536 tokens on an H200: the bytes that are read, and in each "iha" layer two launches and products at
# 40% of 990 TFLOP/s.
PREDICTED_DECODING = {2: 0.72, 4: 0.69, 20: 0.77}


def predicted_decoding(case: dict) -> dict[str, dict[str, float]]:
    """Return the predicted ratios of one row, if it has some."""
    is_predicted = (case["tokens"], case["batch"]) == (65536, 1)
    sizes = case["pseudo_heads"] if is_predicted else []
    return {"predicted ratios": {f"iha, P = {size}": PREDICTED_DECODING[size] for size in sizes}}


# Cases


FORMS: dict[str, Callable[[dict], Forms]] = {
    "expand": mixing_forms,
    "layer": layer_forms,
    "schedule": schedule_forms,
    "decoder": decoder_forms,
    "training": training_forms,
    "decoding": decoding_forms,
    "compiled training": training_forms,
    "compiled decoder": decoder_forms,
}

# Functions that predict figures of a case, which a row keeps by their names.
PREDICTIONS: dict[str, Callable[[dict], dict]] = {
    "expand": predicted_mixing,
    "schedule": predicted_schedules,
    "decoding": predicted_decoding,
}


def cases(part: str, dry: bool) -> list[dict]:
    """Return the cases of a part, the cheapest first; in a dry run tiny ones."""
    paper = {"heads": 20, "head_dim": 128}
    three = {"pseudo_heads": [2, 4, 20]}
    tiny = {"tokens": 128, "heads": 4, "head_dim": 8, "layers": 5}
    backward = [{"backward": False}, {"backward": True}]
    full = {
        "expand": [
            {"tokens": 8192, "step": step, "pseudo_heads": [size], **each, "dtype": "bfloat16"}
            for size, step, each in product((4, 2, 20), STEPS, backward)
        ],
        "layer": [{"tokens": tokens, **three, **each} for tokens, each in product((2048, 8192, 65536), backward)],
        "schedule": [{"tokens": tokens, **three, **each} for tokens, each in product((8192, 32768, 65536), backward)],
        "decoder": [
            {"tokens": 4096, "family": family, **shape, **each, "compiled": False}
            for (family, shape), each in product(DECODERS.items(), backward)
        ],
        "training": [
            {"tokens": 8192, "layers": layers, **three, "checkpointing": layers > 5, "compiled": False}
            for layers in (5, 26)
        ],
        "decoding": [{"tokens": 65536, "layers": 26, **three, "batch": batch} for batch in (1, 2)],
        "compiled training": [{"tokens": 8192, "layers": 5, **three, "checkpointing": False, "compiled": True}],
        "compiled decoder": [
            {"tokens": 4096, "family": family, **shape, "backward": True, "compiled": True}
            for family, shape in DECODERS.items()
        ],
    }[part]
    if dry:
        tiny |= {"pseudo_heads": [2]} if "pseudo_heads" in full[0] else {"groups": 2, "intermediate_size": 32}
        if part == "expand":  # each step; in float32, because Triton's interpreter multiplies the bits of bfloat16
            return [{**case, **tiny, "dtype": "float32"} for case in full[-1 : -2 * len(STEPS) : -2]]
        return [{**full[-1], **tiny}]
    return [{**paper, **each} for each in full]


# Measuring


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else harness.processor()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(function: Callable[[], None]) -> float:
    """Time a run by CUDA events, or on a CPU by the wall clock."""
    if DEVICE == "cpu":
        return harness.wall_seconds(function)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)  # meanwhile Python runs ahead, so that its launches are not timed
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def measure(work: Work) -> dict[str, float]:
    """Return the median time of a form, the peak of memory with weights and inputs, and what follows from them."""
    work.run()  # warms up
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [seconds_of(work.run)]
    repeats = max(FEWEST_RUNS, min(MOST_RUNS, int(TIMED_SECONDS / times[0])))
    times += [seconds_of(work.run) for _ in range(repeats - 1)]
    figures = {"seconds": statistics.median(times), "peak_bytes": torch.cuda.max_memory_allocated()}
    for unit, amount in work.amounts.items():
        figures[f"{unit} per second"] = amount / figures["seconds"]
    return figures if work.error is None else {**figures, "error": work.error}


@contextmanager
def attempt(name: str, failed: dict[str, str], save: Callable[[], None], seconds: float) -> Iterator[None]:
    """Record in `failed` what a form raises here, or that it ended the process after so many seconds."""
    failed[name] = ENDED
    save()
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
        synchronize()
        del failed[name]
    except KeyboardInterrupt:
        del failed[name]
        raise
    except Exception as error:  # of a compiler, a kernel, the allocator: the other forms go on
        failed[name] = one_line(error)[:300]
    finally:
        faulthandler.cancel_dump_traceback_later()
        save()
    synchronize()  # an error that leaves the GPU unusable ends the command


@contextmanager
def flash_kernel(form: str) -> Iterator[None]:
    """Put the FlashAttention that a form names under SDPA and `varlen_attn`, if it names one."""
    named = [name for name in FLASH_PACKAGES if f"sdpa, {name}" in form]
    if not named:
        yield
        return
    attention.activate_flash_attention_impl(named[0])
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def run_case(row: dict, forms: Forms, until: float, save: Callable[[], None], retries: bool = False) -> None:
    """Measure the forms of a case that have no figures and have not failed, or if `retries` have."""
    row["base"] = next(iter(forms))
    seconds = COMPILED_FORM_SECONDS if row.get("compiled") else FORM_SECONDS
    for name, prepare in forms.items():
        has_failed = name in row["failed"] and not retries
        if name in row["seconds"] or has_failed or time.monotonic() > until:
            continue
        with attempt(name, row["failed"], save, seconds), flash_kernel(name):
            for figure, value in measure(prepare()).items():
                row.setdefault(figure, {})[name] = value
            base = row["seconds"].get(row["base"])
            row["ratios"] = {form: value / base for form, value in row["seconds"].items()} if base else {}
        print(f"  {name}: {row['seconds'].get(name, row['failed'].get(name))}", flush=True)
        torch.compiler.reset()  # or the forms would share a limit of recompilations
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    """Measure what is left of the parts of the command line, or raise a `UserError`."""
    args = PARSER.parse_args()
    until = time.monotonic() + args.seconds
    if DEVICE == "cpu" and not args.dry:
        raise UserError("PyTorch sees no CUDA device here: --dry runs tiny sizes on a CPU.")
    commit = args.commit or current_commit()
    shared = {"dry": args.dry, "device": device_name(), **harness.versions()}
    directory = args.out / re.sub("[^a-z0-9]+", "-", device_name().lower()).strip("-")
    path = directory / "gpu.json"
    with sole_writer(directory):
        # `read_json` needs pydantic, which a machine with a GPU may lack.
        table = json.loads(path.read_text()) if path.exists() else {**shared, "rows": []}
        for key, value in shared.items():
            if table.get(key) != value:
                raise UserError(
                    f"{path} was measured with {key} {table.get(key)}, and this is {value}: name another --out."
                )
        save = partial(write_json, path, table)
        for part in args.parts:
            for case in cases(part, args.dry)[: args.cases]:
                case = {"part": part, **case}
                # Forms of two commits do not stand in one row.
                found = [row for row in table["rows"] if {**case, "commit": commit}.items() <= row.items()]
                row = found[0] if found else None
                if row is None:
                    row = {**case, "commit": commit, "failed": {}, "seconds": {}, "ratios": {}}
                    row |= PREDICTIONS[part](case) if part in PREDICTIONS else {}
                    table["rows"].append(row)
                print(", ".join(f"{key} {value}" for key, value in case.items()), flush=True)
                run_case(row, FORMS[part](case), until, save, args.retry)
        save()
    print(f"Wrote {path}", flush=True)


if __name__ == "__main__":
    run_cli(main)
