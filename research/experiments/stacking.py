"""Ask whether paired heads still lead over windows alone on top of three cheap additions to attention.

Whoever pre-trains stacks an output gate (arXiv 2505.06708), exclusive self attention (XSA, arXiv 2603.09078) and a
value residual (arXiv 2410.17897). Five arms are trained plain, with each addition, with XSA and the gate
(`IHAConfig` has both), and with all three. The additions are in all layers, also in the global ones. The models,
the text, the rows, the budgets and the smallest difference worth having, 0.01 nats per byte, are those of
paired_heads.py; the FFN pays for the parameters of the gate.

- `windows`: four layers in five have windows of N / 16 tokens, the fifth is global.
- `paired`: paired heads (P = 4) with windows of N / 16 virtual tokens.
- `schedule`: the paper's schedule with P = 2.
- `mha`: ordinary attention in every layer.
- `mixed`: windows alone whose heads are mixed, but not interleaved (IHA with P = 1).

Rates are tuned for each variant on another seed, from 0.002 on (0.001 at widths from 256 on). A run of 1,600 steps
at width 64 takes one core three minutes, and a variant needs at least nine runs. A finished run is kept in `--output`.
Git tracks the runs of width 64 in results/stacking, and a command with this `--output` goes on from them. On a GPU
(`--device cuda`, never run so far) models are compiled and learn in bfloat16 autocast.

example: python -m research.experiments.stacking --kinds windows paired windows+all paired+all --most-seeds 6
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from iha import plots
from iha.errors import UserError, run_cli
from iha.files import sole_writer
from iha.model_cost import model as cost_of
from research.benchmarks.harness import processor
from research.experiments.language_models import EVALUATIONS, config_of, size_of, text_sha256
from research.experiments.options import protocol_parser
from research.experiments.paired_heads import (
    BEGIN_AT,
    EFFECT,
    SIZES,
    STACKED,
    given_text,
    one_run,
    read_text,
    step_seconds,
)
from research.experiments.protocol import COUNTS, budgets, compare_tuned, end, loss_at
from research.experiments.study import begin, correct_by_holm, interval, points, run_once, verdict, write


FIRST_RATE = 2e-3


def parts_of(name: str) -> tuple[str, str]:
    """Return the arm of a variant and what is added to it, "" for nothing."""
    arm, _, added = name.partition("+")
    return arm, added


def compared_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of variants that are compared.

    They are each arm and windows alone with the same additions, each arm with additions and without, and windows with
    all three and plain paired heads."""
    pairs = []
    for name in names:
        arm, added = parts_of(name)
        base = "windows" + (f"+{added}" if added else "")
        pairs += [(name, other) for other in (base, arm) if other != name and other in names]
    return [pair for pair in dict.fromkeys([*pairs, ("windows+all", "paired")]) if set(pair) <= set(names)]


def compare(size: dict, runs: dict[str, list[dict]], first: str, second: str) -> dict:
    """Return how two variants differ at equal steps and at equal time, and how the difference develops."""
    costs = [
        [cost_of(config_of(size, **STACKED[name]), size["tokens"], form).training for name in (first, second)]
        for form in COUNTS
    ]
    by_budget = budgets(runs, first, second, (ours / theirs for ours, theirs in costs))
    steps = size["steps"]
    on_the_way = {}
    for share in (0.25, 0.5, 0.75):
        losses = [[loss_at(run["curve"], share * steps) for run in runs[name]] for name in (first, second)]
        on_the_way[f"{share:.0%}"] = interval([ours - theirs for ours, theirs in zip(*losses)])
    kept = {budget: by_budget[budget] for budget in ("steps", "time")}
    for each in kept.values():
        each["verdict"] = verdict(each["difference"], EFFECT, -1)
    return {"first": first, "second": second, **kept, "on_the_way": on_the_way}


def change_of_lead(runs: dict[str, list[dict]], arm: str, added: str) -> dict | None:
    """Return by how much an addition changes the difference of an arm from windows alone, at equal steps."""
    names = (f"{arm}+{added}", f"windows+{added}", arm, "windows")
    if arm == "windows" or not added or not set(names) <= set(runs):
        return None
    ends = [[end(run) for run in runs[name]] for name in names]
    change = interval([(a - b) - (c - d) for a, b, c, d in zip(*ends)])
    return {"arm": arm, "added": added, "change": change, "verdict": verdict(change, EFFECT, -1)}


def plot(table: dict) -> Figure:
    """Plot the differences at equal steps and at equal time."""
    compared = {f"{each['first']} - {each['second']}": each for each in table["comparisons"]}
    message = f"Losses in nats per byte, 95% intervals: width {table['fields']['hidden_size']}, {table['steps']} steps"
    figure, (axes,) = plots.panels(message, height=1.5 + 0.35 * len(compared))
    dots = {
        f"equal {budget}": points([each[budget]["difference"] for each in compared.values()])
        for budget in ("steps", "time")
    }
    plots.dots(axes, list(compared), dots, (-0.15, 0.15), mark=0)
    axes.set(xlabel="difference (below 0 the first is better)")
    return figure


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the study and write its results. Return the path of its table. Raise `UserError`."""
    parser = protocol_parser(__doc__, "stacking", EFFECT, STACKED)
    parser.add_argument("--tokens", type=int, default=256, help="length of rows (default: 256)")
    parser.add_argument("--width", type=int, default=64, choices=SIZES, help="width of the model (default: 64)")
    parser.add_argument("--steps", type=int, default=1600, help="training steps (default: 1600)")
    parser.add_argument("--text", default="python", type=given_text, help="python, prose or a file (default: python)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    args = parser.parse_args(argv)
    usual = {"tokens": 256, "width": 64, "steps": 1600, "text": "python", "device": "cpu"}
    others = (getattr(args, name) for name, value in usual.items() if getattr(args, name) != value)
    args.study += "".join(f"_{Path(str(value)).stem}" for value in others)
    begin(args)
    if args.steps < EVALUATIONS:
        raise UserError(f"--steps {args.steps}: expected at least {EVALUATIONS}.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no CUDA device here.")
    size = size_of(SIZES[args.width], args.tokens) | {"steps": args.steps}
    text = read_text(args.text, args.tokens)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    setting = {**size, "gpu": gpu, "text": Path(args.text).name, "text_sha256": text_sha256(text)}
    text = text.to(args.device)
    first = BEGIN_AT.get(args.width, FIRST_RATE)
    rates, runs = compare_tuned(
        args, setting, partial(one_run, size, text), lambda name: config_of(size, **STACKED[name]), first
    )
    kept = {**setting, "machine": processor()}
    timed = args.output / f"seconds-{'-'.join(args.kinds)}.json"
    with sole_writer(args.output):  # another command that trains there would disturb the times
        seconds = run_once(timed, lambda: step_seconds(size, text, args.kinds), kept)
    for name, of_variant in runs.items():
        for each in of_variant:
            each["seconds"] = seconds[name] * size["steps"]
    rows = []
    for name, of_variant in runs.items():
        config = config_of(size, **STACKED[name])
        losses = interval([end(run) for run in of_variant])
        parameters = cost_of(config, 1).parameters
        rows.append({"variant": name, "parameters": parameters, **rates[name]._asdict(), "loss": losses})
    comparisons = [compare(size, runs, *pair) for pair in compared_pairs(args.kinds)]
    correct_by_holm([each[budget]["difference"] for each in comparisons for budget in ("steps", "time")])
    changes = [change_of_lead(runs, *parts_of(name)) for name in runs]
    return write(
        args,
        plot,
        **setting,
        step_seconds=seconds,
        rows=rows,
        comparisons=comparisons,
        changes_of_lead=[change for change in changes if change],
        runs={name: [each["curve"] for each in of_variant] for name, of_variant in runs.items()},
    )


if __name__ == "__main__":
    run_cli(main)
