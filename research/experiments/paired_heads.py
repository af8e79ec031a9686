"""Train small language models whose heads share their virtual sequence, windows alone and the paper's schedule.

"paired_heads" makes one virtual sequence of the heads that are there. It has no more parameters than "mha", and with
a window of as many virtual tokens it attends to as many pairs. Four layers in five have a window here, and the fifth
is global. language_models.py trains the models under the protocol of protocol.py. The first variant is windows alone,
and the smallest difference worth having is 0.01 nats per byte. By default a run takes one core about a minute, and
one of the paper's schedule two. The table of ten variants and six seeds took about two hours, tuning included.

- `wide_P_W` has ordinary attention in windows of N / W tokens, with positions times P in these layers. It is the
  control for the shorter windows and the wider positions of `paired_P`.
- `paired_P` has windows of N / 16 virtual tokens, N / (16 P) tokens. `_shared` gives the heads of a token
  one position.
- `iha_P` is the paper's schedule.

After all variants have been trained, their training steps are timed in turn. The machine should be quiet then. The
times are kept with the runs: remove `seconds-*.json` to take them again. The text is the source of Python's standard
library, the topics of its manual (`--text prose`), or a file of your own (`--text train.txt`); the last tenth is held
out. On a GPU (`--device cuda`) models are compiled and learn in bfloat16 autocast. Runs of several commands, a variant
each and at once, can be copied into one directory: the command that names it and all of them writes the table.

example: python -m research.experiments.paired_heads --tokens 512 --kinds global_local wide_4_64 paired_4
"""

import os
import pydoc_data.topics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure

from iha import plots
from iha.errors import UserError, run_cli
from iha.files import sole_writer
from modeling_iha import IHAForCausalLM
from research.benchmarks.harness import processor
from research.experiments import language_models
from research.experiments.language_models import (
    EVALUATIONS,
    SCHEDULE,
    build,
    by_budget,
    comparisons,
    config_of,
    losses_of,
    rows_of,
    size_of,
    sized,
    text_sha256,
)
from research.experiments.options import protocol_parser
from research.experiments.protocol import compare_tuned, new_model
from research.experiments.study import begin, plot_losses, run_once, write
from research.experiments.value_residual import add_value_residual


def wide(windows: int, factor: int) -> dict:
    """Return the fields of windows of N / `windows` tokens whose positions are times `factor`."""
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    local = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 1 / factor}
    return {"windows": windows, "rope_parameters": {"full_attention": plain, "sliding_attention": local}}


PAIRED_2 = {"attention_kinds": "paired_heads", "num_pseudo_heads": 2, "windows": 32, "control": "wide_2_32"}
PAIRED_4 = {"attention_kinds": "paired_heads", "num_pseudo_heads": 4, "windows": 64, "control": "wide_4_64"}
PAIRED_8 = {"attention_kinds": "paired_heads", "num_pseudo_heads": 8, "windows": 128, "control": "wide_4_64"}
# See `VARIANTS` of language_models.py.
VARIANTS: dict[str, dict] = {
    "global_local": {"windows": 16},
    "mha": {},
    "wide_4_16": wide(16, 4),
    "wide_2_32": wide(32, 2),
    "wide_4_64": wide(64, 4),
    "paired_2": PAIRED_2,
    "paired_4": PAIRED_4,
    "paired_4_shared": {**PAIRED_4, "pseudo_positions": "shared", "control": "paired_4"},
    "paired_8": PAIRED_8,  # for models with 8 heads
    "iha_2": {**SCHEDULE, "num_pseudo_heads": 2, "windows": 8, "control": "paired_2"},
    "iha_4": {**SCHEDULE, "num_pseudo_heads": 4, "windows": 32, "control": "paired_4"},
}
USUAL = [name for name in VARIANTS if name != "paired_8"]
# The names that research/compare.py gives to variants
ARMS: dict[str, dict] = {
    "windows": VARIANTS["global_local"],
    "short_windows": VARIANTS["wide_4_64"],
    "mha": VARIANTS["mha"],
    "paired": {**PAIRED_4, "control": "short_windows"},
    "iha": {**VARIANTS["iha_4"], "control": "paired"},
}
# The additions that an arm may name for all its layers: `paired+xsa`. The last two are for stacking.py only.
ADDITIONS: dict[str, dict] = {"xsa": {"exclusive_attention": True}, "gate": {"output_gate": "elementwise"}}
ADDITIONS["xsa+gate"] = ADDITIONS["xsa"] | ADDITIONS["gate"]
STACKS = ADDITIONS | {"residual": {"value_residual": True}}
STACKS["all"] = STACKS["xsa+gate"] | STACKS["residual"]


def with_additions(arms: dict[str, dict], additions: dict[str, dict]) -> dict[str, dict]:
    """Return the variants of arms with additions, by names such as "paired+xsa". The control of each is its arm."""
    return {
        f"{arm}+{name}": {**fields, **added, "control": arm}
        for arm, fields in arms.items()
        for name, added in additions.items()
    }


UNSTACKED = {name: ARMS[name] for name in ("windows", "paired", "mha")} | {
    "schedule": VARIANTS["iha_2"],
    "mixed": {"attention_kinds": "iha", "num_pseudo_heads": 1, "windows": 16},
}
STACKED = UNSTACKED | with_additions(UNSTACKED, STACKS)
ARMS |= with_additions(ARMS, ADDITIONS)
VARIANTS |= ARMS | STACKED
SIZES = {
    # For `--size seconds` of research/compare.py, which shows what it would print.
    32: sized(width=32, ffn=88, layers=5, heads=4, tokens_per_step=512, steps=60, held_out_rows=16),
    64: language_models.SMALL,
    128: sized(width=128, ffn=352, layers=5, heads=8, tokens_per_step=2048, steps=600),
    256: sized(width=256, ffn=704, layers=5, heads=8, tokens_per_step=2048, steps=800),
    512: sized(width=512, ffn=1408, layers=5, heads=8, tokens_per_step=32768, steps=400),  # for a GPU
    768: sized(width=768, ffn=2048, layers=15, heads=12, tokens_per_step=32768, steps=800),  # 107 million, the same
}
# The rate at which the tuning of a size begins, where it is not FIRST_RATE.
BEGIN_AT = {32: 8e-3, 256: 1e-3, 512: 1e-3, 768: 1e-3}
EFFECT = 0.01  # nats per byte
WARM_STEPS = 3
TIMED_STEPS = 10
TIMED_ROUNDS = 11
LINES = {  # of the plot by time
    "mha": "mha: global attention",
    "global_local": "windows alone (4 of 5 layers)",
    "wide_4_64": "short windows with wide positions",
    "paired_4": "paired heads in the windows, P = 4",
    "paired_8": "paired heads in the windows, P = 8",
    "iha_4": "the paper's schedule, P = 4",
}
LINES |= {name: name for name in ARMS if name not in LINES}
HIGHEST_LOSS = 2.7  # of the axis: all lines fall alike before. Losses that end above it are shown from the start.


def given_text(name: str) -> str:
    """Return the name of a text, or the absolute path of a file: the study runs in another directory."""
    return name if name in ("python", "prose") else os.path.abspath(os.path.expanduser(name))


def read_text(name: str, tokens: int) -> torch.Tensor:
    """Return the bytes of a text, as uint8. Raise `UserError` for a file that is not there, or too short for rows."""
    if name == "python":
        return language_models.read_text()
    if name == "prose":
        content = "\n".join(pydoc_data.topics.topics.values()).encode()
    else:
        try:
            with open(name, "rb") as file:
                content = file.read()
        except OSError as error:
            raise UserError(f"--text {name}: {error.strerror}; expected a file, or python or prose.") from error
    if len(content) < (least := 20 * (tokens + 1)):  # two rows in the held-out tenth
        raise UserError(f"--text {name} has {len(content):,} bytes: expected at least {least:,}.")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def model_of(size: dict, name: str, seed: int) -> IHAForCausalLM:
    """Build the model of a variant, with the common weights of a seed."""
    model = new_model(config_of(size, **VARIANTS[name]), build(size), seed)
    return add_value_residual(model) if VARIANTS[name].get("value_residual") else model


def model_on(device: torch.device, size: dict, name: str, seed: int) -> IHAForCausalLM:
    """Build the model of a variant on a device. Compile it on a GPU; models of one variant share what is compiled."""
    model = model_of(size, name, seed).to(device)
    if device.type == "cuda":
        model.compile()
    return model


def one_run(size: dict, text: torch.Tensor, name: str, seed: int, rate: float, mixing: float) -> dict:
    """Train a new model of a variant."""
    return language_models.train(name, model_on(text.device, size, name, seed), seed, size, text, rate, mixing)


def now(device: torch.device) -> float:
    """Return the seconds that this process took on the CPU, or with a GPU those of a clock, once its work is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def step_seconds(size: dict, text: torch.Tensor, names: Sequence[str]) -> dict[str, float]:
    """Return the seconds of a training step of each variant, as `now` counts them.

    They are the median of rounds that take all variants in turn. Every round builds the models anew, because their
    places in memory change the time by some percent.
    """
    starts = torch.arange(size["batch"]) * size["tokens"] % (len(text) - size["tokens"])
    rows = rows_of(text, starts, size["tokens"])
    seconds = {name: [] for name in names}
    for _ in range(TIMED_ROUNDS):
        for name in names:
            model = model_on(text.device, size, name, 0)
            optimizer = torch.optim.AdamW(model.parameters())
            for step in range(WARM_STEPS + TIMED_STEPS):
                if step == WARM_STEPS:
                    start = now(text.device)
                optimizer.zero_grad()
                losses_of(model, rows).mean().backward()
                optimizer.step()
            seconds[name].append((now(text.device) - start) / TIMED_STEPS)
    return {name: median(values) for name, values in seconds.items()}


def plot(table: dict) -> Figure:
    """Plot the losses by time, and the differences from windows alone, from controls and from "mha" by budget."""
    compared = comparisons(table["rows"])
    size = f"rows of {table['tokens']} bytes, width {table['fields']['hidden_size']}"
    message = f"Losses in nats per byte by time, and their differences with 95% intervals: {size}"
    figure, (by_time, differences) = plots.panels(message, 2, 2, height=1.5 + 0.3 * len(compared))
    for name, label in LINES.items():
        if name not in table["step_seconds"]:  # not run, or not timed next to the others
            continue
        seconds = [point[0] * table["step_seconds"][name] for point in table["runs"][name][0]]
        plot_losses(by_time, seconds, table["runs"][name], label=label)
    lowest = min(row["loss"]["mean"] for row in table["rows"])
    clock = f"seconds on {table['gpu']}" if table.get("gpu") else "CPU seconds, one thread"
    by_time.set(xlabel=f"training {clock}", ylabel="held-out loss")
    by_time.set(ylim=(lowest - 0.05, HIGHEST_LOSS if lowest < HIGHEST_LOSS - 0.3 else None))
    plots.dots(differences, list(compared), by_budget(compared), (-0.32, 0.32), mark=0)
    differences.set(xlabel="difference (below 0 the first is better)")
    return figure


def run(
    args: Namespace, report: Callable[[dict[str, dict], dict[str, list[dict]]], None] = lambda tuning, runs: None
) -> Path:
    """Run the study and write its results. Return the path of its table. Raise `UserError`.

    `report` is called after each run: see `compare_tuned`."""
    usual = {"tokens": 256, "width": 64, "steps": None, "text": "python", "device": "cpu"}
    others = (getattr(args, name) for name, value in usual.items() if getattr(args, name) != value)
    args.study += "".join(f"_{Path(str(value)).stem}" for value in others)
    begin(args)
    if args.steps is not None and args.steps < EVALUATIONS:
        raise UserError(f"--steps {args.steps}: expected at least {EVALUATIONS}.")
    size = size_of(SIZES[args.width], args.tokens)
    text = read_text(args.text, args.tokens)
    size |= {} if args.steps is None else {"steps": args.steps}
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no CUDA device here.")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    setting = {**size, "gpu": gpu, "text": Path(args.text).name, "text_sha256": text_sha256(text)}
    setting |= {"compiled": True} if args.device == "cuda" else {}
    text = text.to(args.device)
    first = BEGIN_AT.get(args.width)
    train = partial(one_run, size, text)
    rates, runs = compare_tuned(args, setting, train, lambda name: config_of(size, **VARIANTS[name]), first, report)
    timed = args.output / f"seconds-{'-'.join(args.kinds)}.json"
    kept = {**setting, "machine": processor()}
    with sole_writer(args.output):  # another command that trains there would disturb the times
        seconds = run_once(timed, lambda: step_seconds(size, text, args.kinds), kept)
    for name, of_variant in runs.items():
        for each in of_variant:
            each["seconds"] = seconds[name] * size["steps"]
    rows = language_models.summaries(size, VARIANTS, rates, runs)
    curves = {name: [each["curve"] for each in of_variant] for name, of_variant in runs.items()}
    return write(args, plot, **setting, step_seconds=seconds, rows=rows, runs=curves)


def main(argv: Sequence[str] | None = None) -> None:
    parser = protocol_parser(__doc__, "paired_heads", EFFECT, VARIANTS)
    parser.set_defaults(kinds=USUAL)
    parser.add_argument("--tokens", type=int, default=256, help="length of rows (default: 256)")
    parser.add_argument("--width", type=int, default=64, choices=SIZES, help="width of the model (default: 64)")
    parser.add_argument("--steps", type=int, help="training steps (default: those of the width)")
    parser.add_argument("--text", default="python", type=given_text, help="python, prose or a file (default: python)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    parser.add_argument("--untuned", action="store_true", help="learn at the first rate, without tuning")
    run(parser.parse_args(argv))


if __name__ == "__main__":
    run_cli(main)
