"""Measure one slice of `python -m benchmarks.gpu` in this process: the paper's layers, training steps or decoding.

A form is checked, timed and written to NAME.json before the next one begins, and not repeated: the same command goes
on from there. A form that raises, or ends the process, is recorded and left out until the commit is another.

Everything is in bfloat16. On a CPU the sizes are tiny, the model takes its own forms for a CPU, and figures mean
nothing: such a run shows that a slice is sound.

example: python -m benchmarks.gpu_slices paper_layer --dry --out outputs/gpu_dry/cpu
"""

import argparse
import faulthandler
import gc
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from common.command_io import UserError, current_commit, one_line, read_json, run_cli, write_json


PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("slice", choices=("paper_layer", "paper_train", "paper_decode"))
PARSER.add_argument("--out", type=Path, required=True, help="directory of the results")
PARSER.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU too")
PARSER.add_argument("--commit", help="of a copy that has no git (what git says)")
if __name__ == "__main__":
    run_cli(PARSER.parse_args)  # before the imports below, which take seconds

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import is_flash_attn_4_available

from benchmarks import harness
from benchmarks.harness import Attention, inference, training
from benchmarks.schedule import schedules
from gpu_kernels import mix_heads_triton
from gpu_kernels.decode_triton import decode_attention
from kinds import model_cost as cost
from kinds.cost import score_products
from modeling_iha import IHAConfig, IHAForCausalLM, IHAModel, attention_iha, interleaving, masks, window_blocks
from modeling_iha.interleaving import absorbed_attention
from modeling_iha.package import flop_matched_window


DTYPE = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# TFLOP of dense bfloat16 products and GB of memory traffic per second, by the data sheets.
PEAKS = {"NVIDIA H100 80GB HBM3": {"TFLOP": 989, "GB": 3350}, "NVIDIA H200": {"TFLOP": 989, "GB": 4800}}
# Each backend of SDPA runs by itself, because PyTorch's own choice among them depends on its version.
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION}
if DEVICE == "cuda":
    BACKENDS |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
else:
    BACKENDS |= {"math": SDPBackend.MATH}
# Global attention over more virtual tokens takes seconds per run.
LONGEST = 131072
# Blocks of queries that need more memory are left out.
MAX_BLOCKS_BYTES = 40e9
CHECK_TOKENS = 256
# The error may be this many times that of the stock form in bfloat16, both against float32.
TOLERANCE = 2
ENDED = "ended the process, or was stopped"
# The longest that a form may take, with the compilation of its kernels.
FORM_SECONDS = 90
# Seconds that the timed runs of a form take, of which there are 3 to 20.
TIMED_SECONDS = 0.5 if DEVICE == "cuda" else 0
# About 10 ms on a GPU.
SLEEP_CYCLES = 20_000_000


class Work(NamedTuple):
    """Hold a function to time and its computed amounts: "TFLOP", "GB" that it reads, "tokens"."""

    run: Callable[[], None]
    amounts: dict[str, float]


Prepare = Callable[[], Work]  # builds what a form needs, on the device


def within(context: Callable[[], AbstractContextManager], prepare: Prepare) -> Prepare:
    """Put a form into a context, while it is built and whenever it runs."""

    def build() -> Work:
        with context():
            work = prepare()

        def run() -> None:
            with context():
                work.run()

        return Work(run, work.amounts)

    return build


@contextmanager
def in_blocks() -> Iterator[None]:
    """Compute windows in blocks, as without `varlen_attn`."""
    with (
        mock.patch.object(masks, "has_varlen", return_value=False),
        mock.patch.object(window_blocks, "has_varlen", return_value=False),
    ):
        yield


@contextmanager
def mixing_by(expand: Callable, collapse: Callable) -> Iterator[None]:
    """Make "iha" layers expand and collapse by these functions."""
    with mock.patch.multiple(interleaving, expand=expand, collapse=collapse):
        yield


by_torch = partial(mixing_by, interleaving.expand, interleaving.collapse)
# A CPU has no kernels.
by_mix_heads = partial(mixing_by, mix_heads_triton.expand, mix_heads_triton.collapse) if DEVICE == "cuda" else by_torch


def fastest(row: dict, group: str) -> str | None:
    """Return the name of the fastest form of a group so far."""
    seconds = {name: value for name, value in row["seconds"].items() if name.partition(":")[0] == group}
    return min(seconds, key=seconds.get, default=None)


def best_backend(row: dict) -> AbstractContextManager:
    """Prefer the SDPA backend that was the fastest for the "mha" layers of this row, where it takes the inputs."""
    best = (fastest(row, row["base"]) or "flash").rpartition(" ")[2]
    order = sorted(BACKENDS, key=lambda name: name != best)
    return sdpa_kernel([*map(BACKENDS.get, order), SDPBackend.MATH], set_priority=True)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def sizes(case: dict) -> dict:
    heads = case["heads"]
    return {"hidden_size": heads * case["head_dim"], "num_attention_heads": heads, "num_key_value_heads": heads}


def sliding(window: int | None) -> dict:
    return {} if window is None else {"layer_types": "sliding_attention", "sliding_window": window}


def modules(case: dict, **fields) -> Attention:
    with torch.device(DEVICE):
        return Attention(dtype=DTYPE, **sizes(case), **fields)


def work(function: Callable, inputs: list[torch.Tensor], parameters: list, backward: bool, products: float) -> Work:
    run = training(function, inputs, parameters) if backward else inference(function, *inputs)
    return Work(run, {"TFLOP": 2e-12 * products})


def layers(case: dict, check: str | None = None, **fields) -> Work:
    """Build attention modules on random hidden states, one layer unless `fields` say otherwise.

    The modules are checked if `check` names them. A model makes masks and rotary tables once for all of its layers, so
    they are made here and not timed."""
    if check is not None:
        check_layer(check, case["heads"], case["head_dim"], fields["num_pseudo_heads"], "sliding_window" in fields)
    attention, tokens, backward = modules(case, **fields), case["tokens"], case["backward"]
    config = attention.model.config
    costs = [cost.attention(config, *kind, tokens, "sdpa") for kind in zip(config.attention_kinds, config.layer_types)]
    products = sum(one.training if backward else one.prefill for one in costs)
    states = draw(1, tokens, config.hidden_size)
    return work(attention.attend(states), [states], attention.leaves(), backward, products)


def expanded(case: dict, virtual: int, window: int | None) -> Work:
    """Build attention alone, on random queries, keys and values of the virtual sequence."""
    tokens, heads, head_dim, backward = (case[key] for key in ("tokens", "heads", "head_dim", "backward"))
    attention = modules(case, attention_kinds="mha", **sliding(window and window * virtual))
    states = [draw(1, tokens * virtual, heads, head_dim).transpose(1, 2) for _ in range(3)]
    products = heads * head_dim * score_products("sdpa", tokens, virtual, window, backward)
    return work(attention.bare(tokens * virtual, DEVICE), states, [], backward, products)


@cache
def check_layer(form: str, heads: int, head_dim: int, virtual: int, windowed: bool) -> None:
    """Raise a RuntimeError where a layer's output or a gradient is less exact than bfloat16 explains.

    The layer runs in the current context and is compared with eager attention in float32. `form` names it."""
    case, fields = {"heads": heads, "head_dim": head_dim}, sliding(CHECK_TOKENS // 16 if windowed else None)
    attention = modules(case, num_pseudo_heads=virtual, **fields)
    states, upstream = draw(2, 1, CHECK_TOKENS, heads * head_dim)

    def results(core: str, dtype: torch.dtype) -> list[torch.Tensor]:
        attention.to(dtype).model.set_attn_implementation(core)
        inputs = states.to(dtype).requires_grad_()
        output = attention(inputs)
        return [output, *torch.autograd.grad(output, [inputs, *attention.leaves()], upstream.to(dtype))]

    with by_mix_heads() if form.endswith("mix_heads") else nullcontext():
        actual = results("flash_attention_4" if form.endswith("flash_attention_4") else "sdpa", DTYPE)
    with by_torch():  # whatever context a form is built in
        compare(form, actual, results("eager", DTYPE), results("eager", torch.float32))


def compare(form: str, *results: list[torch.Tensor]) -> None:
    """Raise a RuntimeError where the first results are too far off the last ones, the exact ones.

    Their error may be at most TOLERANCE times that of the stock results between."""
    for actual, stock, exact in zip(*results):
        error, usual = (((states - exact).norm() / exact.norm()).item() for states in (actual, stock))
        if not error <= TOLERANCE * max(usual, torch.finfo(DTYPE).eps):
            raise RuntimeError(f"{form} is off a float32 computation by {error:.1%}, the stock form by {usual:.1%}.")


def blocks_bytes(case: dict, virtual: int, window: int) -> float:
    """Count the bytes of a layer in blocks as long as its window.

    It holds queries, output, keys and values three times, in training their gradients, and the mask in two dtypes."""
    length = case["tokens"] * virtual
    states = 8 * length * case["heads"] * case["head_dim"] * DTYPE.itemsize
    mask = length * 2 * window * virtual * (1 + DTYPE.itemsize)
    return (1 + case["backward"]) * states + mask


def schedule_forms(row: dict) -> dict[str, Prepare]:
    """Compare the paper's schedule with five global "mha" layers, on the two backends that are fast.

    In training the layers keep their virtual tokens for the backward pass: more than 100 GB at 65536 tokens, P = 20.
    The form "base" expands them again instead."""
    mha = partial(layers, row, attention_kinds="mha", num_hidden_layers=5)
    forms = {f"5 mha: {name}": within(partial(sdpa_kernel, BACKENDS[name]), mha) for name in list(BACKENDS)[:2]}
    best, attention_forms = partial(best_backend, row), [None, "base"] if row["backward"] else [None]
    for virtual, form in product(row["pseudo_heads"], attention_forms):
        name = f"4 iha + 1 mha: P = {virtual}{', base' if form else ''}"
        schedule = partial(layers, row, form=form, **schedules(row["tokens"], virtual)["4 iha + 1 mha"])
        forms[name] = within(best, schedule)
        forms[f"{name}, mix_heads"] = within(by_mix_heads, within(best, partial(schedule, "mix_heads")))
    return forms


def layer_forms(row: dict) -> dict[str, Prepare]:
    if row["base"] == "5 mha":
        return schedule_forms(row)
    mha = partial(layers, row, attention_kinds="mha")
    forms = {f"mha: {name}": within(partial(sdpa_kernel, backend), mha) for name, backend in BACKENDS.items()}
    best = partial(best_backend, row)
    for virtual, windowed in product(row["pseudo_heads"], (True, False)):
        window = flop_matched_window(row["tokens"], virtual) if windowed else None
        if window is None and row["tokens"] * virtual > LONGEST:
            continue
        group = f"P = {virtual}, {'window' if windowed else 'global'}"
        iha = partial(layers, row, num_pseudo_heads=virtual, **sliding(window))
        forms[f"{group}: expanded"] = within(best, partial(expanded, row, virtual, window))
        forms[f"{group}: iha"] = partial(iha, "iha")
        forms[f"{group}: mix_heads"] = within(by_mix_heads, partial(iha, "mix_heads"))
        if not windowed:
            forms[f"{group}: best backend"] = within(best, partial(iha, "best backend"))
        elif blocks_bytes(row, virtual, window) < MAX_BLOCKS_BYTES:
            forms[f"{group}: in blocks"] = within(in_blocks, partial(iha, "in blocks"))
        if is_flash_attn_4_available():
            core = "flash_attention_4"
            forms[f"{group}: {core}"] = partial(iha, core, attn_implementation=core)
    return forms


def layer_cases(dry: bool) -> list[dict]:
    size = {"heads": 4, "head_dim": 8} if dry else {"heads": 20, "head_dim": 128}
    parts = {"mha": ([2048, 8192, 65536], [2, 4, 20]), "5 mha": ([8192, 32768, 65536], [4, 20])}
    cases = [
        {"tokens": 64 if dry else tokens, "backward": backward, "pseudo_heads": [2] if dry else virtual, "base": base}
        for base, (lengths, virtual) in parts.items()
        for tokens, backward in product(lengths[:1] if dry else lengths, (False, True))
    ]
    return sorted([case | size for case in cases], key=lambda case: case["tokens"])


def compile_ahead() -> None:
    """Compile the Triton kernels of the layers for all P at the same time, into Triton's cache on disk.

    A form whose kernels fail here is recorded when it runs."""
    case = layer_cases(False)[0]
    check = partial(check_layer, "mix_heads", case["heads"], case["head_dim"], windowed=True)
    pool = ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=end_after, initargs=[FORM_SECONDS])
    with suppress(Exception), pool:
        list(pool.map(check, case["pseudo_heads"]))


def paper_model(case: dict, preset: str) -> IHAForCausalLM:
    """Build the preset at the length and depth of the case, with random weights."""
    fields = {"num_hidden_layers": case["layers"], "max_position_embeddings": case["tokens"], **sizes(case)}
    if case["heads"] == 4:
        fields |= {"vocab_size": 64, "intermediate_size": 32}
    if preset == "iha":
        fields["num_pseudo_heads"] = case["pseudo_heads"]
    with torch.device(DEVICE):
        return IHAForCausalLM._from_config(IHAConfig.from_preset(f"paper-2.4b-{preset}", **fields), dtype=DTYPE)


def model_case(dry: bool, tokens: int, **fields) -> dict:
    size = {"heads": 4, "head_dim": 8, "layers": 5, "tokens": 64, "pseudo_heads": 2}
    full = {"heads": 20, "head_dim": 128, "layers": 26, "tokens": tokens, "pseudo_heads": 20}
    return {**(size if dry else full), "base": "global", **fields}


def train_step(case: dict, preset: str) -> Work:
    """Build a whole training step of AdamW on random tokens, with activation checkpointing."""
    model = paper_model(case, preset).train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    input_ids = torch.randint(model.config.vocab_size, (1, case["tokens"]), device=DEVICE)

    def step() -> None:
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    products = cost.model(model.config, case["tokens"], "sdpa").training
    return Work(step, {"tokens": case["tokens"], "TFLOP": 2e-12 * products})


def global_forms(work_of: Callable[[dict, str], Work], case: dict) -> dict[str, Prepare]:
    """Return the global model on the two backends that are fast; the other models take the faster one."""
    model = partial(work_of, case, "global")
    return {f"global: mha, {name}": within(partial(sdpa_kernel, BACKENDS[name]), model) for name in list(BACKENDS)[:2]}


def train_forms(case: dict) -> dict[str, Prepare]:
    best = partial(best_backend, case)
    iha = within(best, partial(train_step, case, "iha"))
    return global_forms(train_step, case) | {
        "schedule: iha": iha,
        "global-local: mha": within(best, partial(train_step, case, "global-local")),
        "schedule: mix_heads": within(by_mix_heads, iha),
        "schedule: in blocks": within(in_blocks, iha),
    }


def train_cases(dry: bool) -> list[dict]:
    """Return two periods of the schedule, then all layers."""
    return [model_case(dry, 8192, layers=layers) for layers in ([5] if dry else [10, 26])]


# Decoding


class InPlaceLayer(DynamicLayer):
    """Cache `tokens` random tokens and write each new one into the last place.

    A full static ring does the same, without a mask. A window keeps what its layer sees."""

    def __init__(self, model: IHAModel, index: int, batch: int, tokens: int, dtype: torch.dtype):
        super().__init__()
        config, key = model.config, model.layers[index].mask_key
        self.tokens, self.is_sliding, self.is_initialized = tokens, key.is_sliding, True
        self.sliding_window = config.sliding_window + (key.num_pseudo_heads > 1) if key.is_sliding else tokens + 1
        shape = (batch, config.num_key_value_heads, self.sliding_window, config.head_dim)
        self.keys, self.values = draw(*shape).to(dtype), draw(*shape).to(dtype)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple:
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.sliding_window, self.tokens + 1 - self.sliding_window


def in_place_cache(model: IHAModel, batch: int, tokens: int, dtype: torch.dtype = DTYPE) -> tuple[Cache, float]:
    """Build a cache of random tokens, and count the gigabytes of it and of the weights, each read once a token."""
    layers = [InPlaceLayer(model, index, batch, tokens, dtype) for index in range(len(model.layers))]
    read = [*model.parameters(), *(states for layer in layers for states in (layer.keys, layer.values))]
    return Cache(layers=layers), sum(tensor.nbytes for tensor in read) / 1e9


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


def decode_model(case: dict, preset: str) -> Work:
    model, batch = paper_model(case, preset).eval(), case["batch"]
    past_key_values, gigabytes = in_place_cache(model.model, batch, case["tokens"])
    position_ids = torch.full((1, 1), case["tokens"], device=DEVICE)
    prepared = model.model.create_masks(draw(batch, 1, 1), None, past_key_values, position_ids)
    # Transformers takes the capture of a graph for tracing, under which masks are dense.
    model.model.create_masks = lambda *_, **__: prepared
    step = partial(model, position_ids=position_ids, past_key_values=past_key_values)
    run = inference(step, torch.zeros(batch, 1, dtype=torch.int, device=DEVICE))
    return Work(replayed(run), {"tokens": batch, "GB": gigabytes})


def decode_layer(case: dict, form: str) -> Work:
    """Build one layer, and check its form against rebuilding in float32."""
    attention = modules(case, num_pseudo_heads=case["pseudo_heads"]).requires_grad_(False)

    def step(tokens: int, form: str, dtype: torch.dtype = DTYPE) -> tuple[Callable[[], torch.Tensor], float]:
        torch.manual_seed(0)
        attention.to(dtype).model.attention_form = form
        states = draw(case["batch"], 1, sizes(case)["hidden_size"]).to(dtype)
        past_key_values, gigabytes = in_place_cache(attention.model, case["batch"], tokens, dtype)
        return partial(attention.attend(states, past_key_values), states), gigabytes

    compared = ((form, DTYPE), ("virtual", DTYPE), ("virtual", torch.float32))
    compare(form, *([step(CHECK_TOKENS, *each)[0]()] for each in compared))
    function, gigabytes = step(case["tokens"], form)
    return Work(replayed(inference(function)), {"GB": gigabytes})


def decode_forms(case: dict) -> dict[str, Prepare]:
    if case["base"] == "global":
        token, best = partial(decode_model, case), partial(best_backend, case)
        presets = {"global-local: mha": "global-local", "schedule: iha": "iha"}
        others = {name: within(best, partial(token, preset)) for name, preset in presets.items()}
        return global_forms(decode_model, case) | others

    def kernel(*inputs, attention_mask: None, product_dtype: torch.dtype, **where) -> torch.Tensor:
        # A CPU has no kernel and runs the form that the kernel replaces.
        return (decode_attention if DEVICE == "cuda" else absorbed_attention)(*inputs, **where)

    instead = partial(mock.patch.object, attention_iha, "absorbed_attention", kernel)
    absorbed = partial(decode_layer, case, "base")
    return {
        "rebuilt": partial(decode_layer, case, "virtual"),
        "absorbed": absorbed,
        "decode kernel": within(instead, absorbed),
    }


def decode_cases(dry: bool) -> list[dict]:
    """Return cases of whole models, and of a global layer by itself."""
    batches, heads = ([2], [4]) if dry else ([1, 4], [20, 8])
    cases = [model_case(dry, 65536, batch=batch) for batch in batches]
    return cases + [
        model_case(dry, 65536, batch=batch, layers=1, heads=count, pseudo_heads=virtual, base="rebuilt")
        for batch, count in product(batches, heads)
        for virtual in ([2] if dry else [4, count])
    ]


# For each slice: the cases, cheapest first and tiny in a dry run, and the forms of a case, named "group: form" or
# "form". Ratios are to the fastest form of the group that is the base of the case.
BENCHMARKS: dict[str, tuple[Callable[[bool], list[dict]], Callable[[dict], dict[str, Prepare]]]] = {
    "paper_layer": (layer_cases, layer_forms),
    "paper_train": (train_cases, train_forms),
    "paper_decode": (decode_cases, decode_forms),
}


# Measuring


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else harness.processor()


def environment(dry: bool) -> dict:
    """Return what all rows of a table share."""
    return {
        "dry": dry,
        "device": device_name(),
        "peaks by the data sheet, a second": PEAKS.get(device_name(), {}),
        "dtype": str(DTYPE).removeprefix("torch."),
        "triton": getattr(mix_heads_triton.triton, "__version__", None),
        **harness.versions(),
    }


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


def end_after(seconds: float) -> None:
    """End this process when the seconds are over, also where a kernel or a compiler hangs and hears no signal."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


@contextmanager
def attempt(name: str, failed: dict[str, str], save: Callable[[], None]) -> Iterator[None]:
    """Record in `failed` what a form raises here, or that it ended the process, as it does when it hangs.

    A run that is stopped records nothing. An error that leaves the GPU unusable ends the process."""
    failed[name] = ENDED
    save()
    end_after(FORM_SECONDS)
    try:
        yield
        synchronize()
    except KeyboardInterrupt:
        del failed[name]
        raise
    except Exception as error:  # of a compiler, a kernel, the allocator: the other forms go on
        failed[name] = one_line(error)[:300]
    else:
        del failed[name]
    finally:
        faulthandler.cancel_dump_traceback_later()
        save()
    synchronize()


def measure(name: str, prepare: Prepare, row: dict) -> None:
    """Write the figures of a form into the row: the median of its runs, and their peak of memory.

    One run before them warms up. The peak includes weights and inputs."""
    work = prepare()
    work.run()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [seconds_of(work.run)]
    repeats = max(3, min(20, int(TIMED_SECONDS / times[0])))
    times += [seconds_of(work.run) for _ in range(repeats - 1)]
    figures = {"seconds": statistics.median(times), "peak_bytes": torch.cuda.max_memory_allocated()}
    for unit, amount in work.amounts.items():
        figures[f"{unit} per second"] = amount / figures["seconds"]
        if peak := PEAKS.get(device_name(), {}).get(unit):
            figures[f"% of {unit} peak"] = 100 * figures[f"{unit} per second"] / peak
    for figure, value in figures.items():
        row.setdefault(figure, {})[name] = value
    base = row["seconds"].get(fastest(row, row["base"]))
    row["ratios"] = {} if base is None else {form: value / base for form, value in row["seconds"].items()}
    print(f"  {name}: " + ", ".join(f"{value:.4g} {figure}" for figure, value in figures.items()), flush=True)


def measure_case(forms: dict[str, Prepare], row: dict, commit: str, save: Callable[[], None]) -> None:
    """Measure the forms that have no figures yet and have not failed at this commit."""
    for name, prepare in forms.items():
        if name in row["seconds"] or (name in row["failed"] and row["commit"][name] == commit):
            continue
        row["commit"][name] = commit
        with attempt(name, row["failed"], save):
            measure(name, prepare, row)
        if name in row["failed"]:
            print(f"  {name}: left out: {row['failed'][name]}", flush=True)
        if DEVICE == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def run_benchmark(name: str, out: Path, dry: bool, commit: str) -> None:
    """Measure what a slice lacks, or raise a `UserError`."""
    (cases, forms), path, shared = BENCHMARKS[name], out / f"{name}.json", environment(dry)
    table = read_json(path) if path.exists() else {**shared, "rows": []}
    for key, value in shared.items():
        if table.get(key) != value:
            raise UserError(f"{path} was measured with {key} {table.get(key)}, and this is {value}: remove the file.")
    if name == "paper_layer" and DEVICE == "cuda" and not dry:
        compile_ahead()
    for case in cases(dry):
        row = next((row for row in table["rows"] if case.items() <= row.items()), None)
        if row is None:
            row = {**case, "commit": {}, "failed": {}, "seconds": {}, "ratios": {}}
            table["rows"].append(row)
        print(", ".join(f"{key} {value}" for key, value in case.items()), flush=True)
        measure_case(forms(row), row, commit, partial(write_json, path, table))
    write_json(path, {**table, "complete": commit})


def main() -> None:
    """Run the slice of the command line, or raise a `UserError`."""
    args = PARSER.parse_args()
    if DEVICE == "cpu" and not args.dry:
        raise UserError("PyTorch sees no CUDA device here: --dry runs a slice in tiny sizes on a CPU.")
    run_benchmark(args.slice, args.out, args.dry, args.commit or current_commit())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_cli(main)
