"""Run a visit to a GPU in one piece of 13 minutes, in bfloat16: one table of cases, one command.

The pieces, in this order, with the seconds that each may take:

- `kernels` (120): the tests of the Triton kernels and of the attention cores.
- `recipes` (300): `long_context_64k` and `lora` at their length, each next to its control (recipe_runs.py).
- `layers` (240): attention layers, training steps and whole decoders, with the kernels and without.
- `decoding` (120): one new token after 65,536.

Each figure is written to gpu.json and gpu.md, in a directory named after the device, before the next one begins. The
same command goes on where the last one stopped. A form that fails or ends the process stays in the table as "failed"
until --retry. `--dry` runs tiny sizes on a CPU, whose figures mean nothing, in about ten minutes.

example: python -m research.benchmarks.gpu --pieces layers decoding --out outputs/gpu
"""

import argparse
import faulthandler
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch.nn import attention as attention_kernels
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from iha.errors import ROOT, UserError, one_line, run_cli
from iha.files import current_commit, expanded, signals_as_interrupts, sole_writer, write_json
from iha.kinds import virtual_tokens_per_token
from modeling_iha import IHAConfig, IHAForCausalLM, IHAModel, interleave_heads, interleaving, pairing, triton_kernels
from modeling_iha.transformers_versions import CACHE
from research.benchmarks import harness, recipe_runs
from research.benchmarks.arms import arms
from research.benchmarks.harness import Attention, inference, training
from research.benchmarks.options import OUTPUTS


SECONDS = {"kernels": 120, "recipes": 300, "layers": 240, "decoding": 120}
TESTS = {
    "kernels": ["tests/gpu/test_kernels.py", "tests/modeling/test_triton_kernels.py"],
    "decoding kernels": ["tests/modeling/test_decoding_kernels.py"],
    "cores": ["tests/gpu/test_gpu.py", "-k", "not flex"],
}
DTYPE = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILER = "inductor" if DEVICE == "cuda" else "eager"
WITHOUT = ", without kernels"
ENDED = "ended the process, or was stopped"
# A kernel or a compiler that hangs hears no signal: the process ends.
FORM_SECONDS = 90
# Seconds that the timed runs of a form take, and their fewest and most.
TIMED_SECONDS, FEWEST_RUNS, MOST_RUNS = (0.5, 3, 20) if DEVICE == "cuda" else (0, 1, 1)
SLEEP_CYCLES = 20_000_000  # about 10 ms on a GPU


# The table


@dataclass
class Table:
    """Hold the figures of a device: by case and form, what was measured, at which commit, or "failed" and why."""

    directory: Path
    retry: bool
    content: dict
    commit: str = field(default_factory=current_commit)

    @classmethod
    def open(cls, directory: Path, setting: dict, retry: bool) -> "Table":
        """Read the table of a directory, or begin one. Raise `UserError` if it has another setting."""
        path = directory / "gpu.json"
        # `read_json` needs pydantic, which a machine with a GPU may lack.
        content = json.loads(path.read_text()) if path.exists() else {**setting, "cases": {}}
        for name, value in setting.items():
            if content.get(name) != value:
                raise UserError(
                    f"{path} was measured with {name} {content.get(name)}, not {value}: name another --out."
                )
        return cls(directory, retry, content)

    def needs(self, case: str, form: str) -> bool:
        """Return if a form has no figures at this commit, and has not failed."""
        found = self.content["cases"].get(case, {}).get(form, {})
        if found.get("commit") != self.commit:
            return True
        return self.retry and "failed" in found

    def keep(self, case: str, form: str, figures: dict) -> None:
        """Write the figures of a form."""
        self.content["cases"].setdefault(case, {})[form] = {"commit": self.commit, **figures}
        write_json(self.directory / "gpu.json", self.content)
        (self.directory / "gpu.md").write_text(page(self.content), encoding="utf-8")


def page(content: dict) -> str:
    """Return the table as Markdown. A ratio is to the first form of its case."""
    versions = f"torch {content['torch']}, Transformers {content['transformers']}, bfloat16."
    lines = [f"# {content['device']}", "", versions]
    for case, forms in content["cases"].items():
        base = next(iter(forms.values())).get("ms")
        lines += ["", f"**{case}**", "", "| form | ms | divided by the first | other figures | commit |"]
        lines += ["|---|---|---|---|---|"]
        for form, figures in forms.items():
            ms = figures.get("ms")
            others = [shown(name, value) for name, value in figures.items() if name not in ("ms", "commit")]
            cells = [form, f"{ms:.3f}" if ms else "", f"{ms / base:.2f}" if ms and base else "", ", ".join(others)]
            lines.append(f"| {' | '.join(cells)} | {figures['commit'][:8]} |")
    return "\n".join(lines) + "\n"


def shown(name: str, value: float | str) -> str:
    """Return a figure, or why a form failed, as text for a cell of a table."""
    return f"{value:.4g} {name}" if isinstance(value, float) else f"{name}: {value.replace('|', '/')}"


# Measuring


@dataclass(frozen=True)
class Case:
    """Hold forms that are compared: their names, and what builds the function that is timed."""

    title: str
    forms: dict[str, Callable[[], Callable[[], None]]]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], None]) -> float:
    """Time a run by CUDA events, or on a CPU by the wall clock."""
    if DEVICE == "cpu":
        return harness.wall_seconds(run)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CYCLES)  # meanwhile Python runs ahead, so that its launches are not timed
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def measure(run: Callable[[], None]) -> dict[str, float]:
    """Return the median time of a form, and the peak of memory with weights and inputs."""
    run()  # warms up
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [seconds_of(run)]
    repeats = max(FEWEST_RUNS, min(MOST_RUNS, int(TIMED_SECONDS / times[0])))
    times += [seconds_of(run) for _ in range(repeats - 1)]
    return {"ms": 1000 * statistics.median(times), "GB": torch.cuda.max_memory_allocated() / 1e9}


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """End the process if what is done here takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def kernels_of(form: str) -> Iterator[None]:
    """Take all Triton kernels at any size, or none if the form is named so."""
    with ExitStack() as patches:
        if WITHOUT in form:
            patches.enter_context(mock.patch.object(triton_kernels, "WANTED", "0"))
        for module, name, value in (
            (triton_kernels, "LEAST_TOKENS", 0),
            (triton_kernels, "LEAST_TOKENS_WITH_GRADIENTS", 0),
            (triton_kernels, "DECODES_COMPILED", True),
            (interleaving, "DECODES_MIXED_HEADS", True),
            (pairing, "DECODES_PAIRED_HEADS", True),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def run_case(case: Case, table: Table, until: float) -> None:
    """Measure the forms of a case that have no figures yet."""
    print(case.title, flush=True)
    for form, build in case.forms.items():
        if not table.needs(case.title, form) or time.monotonic() > until:
            continue
        table.keep(case.title, form, {"failed": ENDED})
        try:
            with stopped_after(FORM_SECONDS), kernels_of(form):
                figures = measure(build())
        except Exception as error:  # of a compiler, a kernel, the allocator: the other forms go on
            figures = {"failed": one_line(error)[:300]}
        table.keep(case.title, form, figures)
        print(f"  {form}: {figures}", flush=True)
        torch.compiler.reset()  # or the forms would share a limit of recompilations
        gc.collect()
        torch.cuda.empty_cache()
        synchronize()  # an error that leaves the GPU unusable ends the command


# Tests and recipes


def run_tests(table: Table, dry: bool, until: float) -> None:
    """Run the tests of the kernels, and keep how many passed. A dry run only collects them."""
    for name, words in TESTS.items():
        if table.needs("tests", name) and time.monotonic() < until:
            command = [sys.executable, "-m", "pytest", "-q", *words, *(["--collect-only"] if dry else [])]
            environment = {**os.environ, "IHA_TRITON_KERNELS": "all"}  # also those that no GPU has run
            left = max(1, until - time.monotonic())
            try:
                ended = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=left
                )
            except subprocess.TimeoutExpired:
                table.keep("tests", name, {"failed": f"not done after {left:.0f} s"})
                continue
            *_, last = ended.stdout.strip().splitlines() or [ended.stderr.strip()]
            table.keep("tests", name, {"failed" if ended.returncode else "passed": last})


def run_recipes(table: Table, dry: bool, until: float) -> None:
    """Run the recipes, and keep what they took."""
    work = OUTPUTS / "recipes" / ("dry" if dry else "full")
    work.mkdir(parents=True, exist_ok=True)
    for run in recipe_runs.RUNS:
        if table.needs(run.case, run.form) and time.monotonic() < until:
            print(run.case, flush=True)
            try:
                figures: dict = recipe_runs.measure(run, work, dry, until)
            except UserError as error:
                figures = {"failed": str(error)}
            table.keep(run.case, run.form, figures)
            print(f"  {run.form}: {figures}", flush=True)


# Attention layers, training steps and decoders


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def attention(tokens: int, heads: int, backward: bool, fields: dict) -> Callable[[], None]:
    """Build the attention of five layers; masks and rotary tables are made once, and not timed."""
    sizes = {"hidden_size": 128 * heads, "num_attention_heads": heads, "num_key_value_heads": heads}
    with torch.device(DEVICE):
        modules = Attention(dtype=DTYPE, **sizes, **fields)
    states = draw(1, tokens, 128 * heads)
    run = modules.attend(states)
    return training(run, [states], modules.leaves()) if backward else inference(run, states)


def attention_case(tokens: int, heads: int, backward: bool) -> Case:
    forms = {}
    for name, fields in arms(tokens).items():
        kept = fields | {"recompute_virtual_tokens": False}
        forms[name] = partial(attention, tokens, heads, backward, kept)
        if name.startswith("iha"):
            forms[name + WITHOUT] = forms[name]
            if backward:
                again = fields | {"recompute_virtual_tokens": True}
                forms[name + ", recomputed"] = partial(attention, tokens, heads, True, again)
    passes = "forward and backward" if backward else "forward"
    return Case(f"attention of 5 layers of {heads} heads, {tokens:,} tokens, {passes}", forms)


def paper_model(tokens: int, layers: int, dry: bool, preset: str, **overrides) -> IHAForCausalLM:
    """Build a model of the paper at a length and depth, with random weights."""
    fields = {"num_hidden_layers": layers, "max_position_embeddings": tokens}
    if dry:
        fields |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
        fields |= {"vocab_size": 64, "intermediate_size": 32}
    config = IHAConfig.from_preset(f"paper-2.4b-{preset}", **fields, **overrides)
    with torch.device(DEVICE):
        return IHAForCausalLM._from_config(config, dtype=DTYPE)


# Arm -> its preset, and the fields that it changes.
PRESETS: dict[str, tuple[str, dict]] = {
    "mha": ("global", {}),
    "windows": ("global-local", {}),
    "paired": ("paired-heads", {}),
    "iha, P = 2": ("iha", {"num_pseudo_heads": 2}),
    "iha, P = 4": ("iha", {"num_pseudo_heads": 4}),
}


def with_and_without(build: Callable, kernels: Sequence[str] = ("iha",)) -> dict[str, Callable]:
    """Return the forms of the paper's models, those with kernels also without."""
    forms = {}
    for name, (preset, overrides) in PRESETS.items():
        forms[name] = partial(build, preset, overrides)
        if name.startswith(tuple(kernels)):
            forms[name + WITHOUT] = forms[name]
    return forms


def train_step(tokens: int, dry: bool, compiled: bool, preset: str, overrides: dict) -> Callable[[], None]:
    """Build a whole training step of AdamW on random tokens, of five layers."""
    model = paper_model(tokens, 5, dry, preset, **overrides).train()
    if compiled:
        model.compile(backend=COMPILER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    input_ids = torch.randint(model.config.vocab_size, (1, tokens), device=DEVICE)

    def step() -> None:
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


LLAMA = {
    **{"model_type": "llama", "vocab_size": 1024, "num_hidden_layers": 16, "hidden_size": 2048},
    **{"intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
}


def decoder(tokens: int, dry: bool, padded: bool, compiled: bool, virtual: int, windows: bool) -> Callable[[], None]:
    """Build a forward and a backward pass of a Llama of 1B, interleaved unless `virtual` is 1."""
    fields = {**LLAMA, "max_position_embeddings": tokens, **(recipe_runs.DRY if dry else {})}
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=DTYPE)
    if virtual > 1:
        interleave_heads(model, virtual, **({"layers": "paper", "sliding_window": "paper"} if windows else {}))
    if compiled:
        model.compile(backend=COMPILER)
    states = draw(2 if padded else 1, tokens, model.config.hidden_size)
    mask = None
    if padded:
        mask = torch.ones(2, tokens, dtype=torch.long, device=DEVICE)
        mask[0, : tokens // 4] = 0

    def run(hidden_states: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=hidden_states, attention_mask=mask, use_cache=False, logits_to_keep=1).logits

    return training(run, [states], list(model.base_model.layers.parameters()))


def decoder_case(tokens: int, dry: bool, padded: bool = False, compiled: bool = False) -> Case:
    build = partial(decoder, tokens, dry, padded, compiled)
    forms = {
        "plain": partial(build, 1, False),
        "interleaved, P = 2": partial(build, 2, False),
        "interleaved, P = 2" + WITHOUT: partial(build, 2, False),
        "interleaved, P = 2, windows": partial(build, 2, True),
    }
    how = ", compiled" * compiled + ", two rows, one of them padded" * padded
    return Case(f"Llama of 1B, forward and backward, {tokens:,} tokens{how}", forms)


def layer_cases(dry: bool) -> list[Case]:
    heads = 4 if dry else 20
    short, long = (128, 256) if dry else (8192, 65536)
    few = 128 if dry else 4096
    return [
        attention_case(short, heads, backward=True),
        decoder_case(few, dry),
        decoder_case(few, dry, padded=True),
        Case(
            f"training step of the 2.4B model, 5 layers, {short:,} tokens",
            with_and_without(partial(train_step, short, dry, False)),
        ),
        attention_case(long, heads, backward=True),
        decoder_case(few, dry, compiled=True),
        Case(
            f"training step of the 2.4B model, 5 layers, {short:,} tokens, compiled",
            with_and_without(partial(train_step, short, dry, True)),
        ),
    ]


# Decoding


class InPlaceLayer(DynamicLayer):
    """Cache `tokens` random tokens and write each new one into the last place.

    A full static ring does the same, without a mask. A window keeps what its layer sees."""

    def __init__(self, model: IHAModel, index: int, tokens: int):
        super().__init__()
        config = model.config
        self.tokens = tokens
        self.is_initialized = True
        self.is_sliding = config.layer_types[index] == "sliding_attention"
        self.sliding_window = tokens + 1
        if self.is_sliding:
            self.sliding_window = config.sliding_window + (virtual_tokens_per_token(config) > 1)
        shape = (1, config.num_key_value_heads, self.sliding_window, config.head_dim)
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

    replay.reads = function  # type: ignore[attr-defined]  # the graph holds addresses only, so this must live as long
    return replay


def decode_step(tokens: int, dry: bool, preset: str, overrides: dict) -> Callable[[], None]:
    """Build one new token of the 2.4B model after so many cached ones."""
    model = paper_model(tokens, 5 if dry else 26, dry, preset, **overrides).eval()
    cache = Cache(layers=[InPlaceLayer(model.model, index, tokens) for index in range(len(model.model.layers))])
    position_ids = torch.full((1, 1), tokens, device=DEVICE)
    # Transformers takes the capture of a graph for tracing, under which masks are dense.
    masks = model.model.create_masks(draw(1, 1, 1), None, cache, position_ids)
    step = partial(model, attention_mask=masks, position_ids=position_ids, **{CACHE: cache})
    return replayed(inference(step, torch.zeros(1, 1, dtype=torch.int, device=DEVICE)))


def decoding_cases(dry: bool) -> list[Case]:
    tokens = 512 if dry else 65536
    forms = with_and_without(partial(decode_step, tokens, dry), ("iha", "paired"))
    return [Case(f"one new token of the 2.4B model after {tokens:,}", forms)]


# The command


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else harness.processor()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the pieces that are left. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", nargs="+", choices=SECONDS, default=list(SECONDS), help="what to run (all)")
    parser.add_argument("--retry", action="store_true", help="try again what failed")
    parser.add_argument("--flash", choices=("FA3",), help="put this FlashAttention under SDPA (docs/SUPPORT.md)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU")
    where = "directory of the results (outputs/benchmarks/gpu)"
    parser.add_argument("--out", type=expanded, default=OUTPUTS / "gpu", help=where)
    args = parser.parse_args(argv)
    if DEVICE == "cpu" and not args.dry:
        raise UserError("PyTorch sees no CUDA device here: --dry runs tiny sizes on a CPU.")
    directory = args.out / re.sub("[^a-z0-9]+", "-", device_name().lower()).strip("-")
    if args.flash:
        attention_kernels.activate_flash_attention_impl(args.flash)
    # A process that this one has started ends with it, and does not keep the GPU.
    with signals_as_interrupts(), sole_writer(directory):
        setting = {"dry": args.dry, "device": device_name(), "flash": args.flash, **harness.versions()}
        table = Table.open(directory, setting, args.retry)
        for piece in args.pieces:
            print(f"== {piece}", flush=True)
            until = time.monotonic() + (SECONDS[piece] if not args.dry else 10 * SECONDS[piece])
            if piece == "kernels":
                run_tests(table, args.dry, until)
            elif piece == "recipes":
                run_recipes(table, args.dry, until)
            else:
                for case in layer_cases(args.dry) if piece == "layers" else decoding_cases(args.dry):
                    run_case(case, table, until)
    print(f"Wrote {directory / 'gpu.json'} and gpu.md", flush=True)


if __name__ == "__main__":
    run_cli(main)
