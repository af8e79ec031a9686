"""Compare how a pretrained model goes on learning with how it does once its heads are interleaved.

A decoder with multi-head attention ("mha") is pretrained on the source of Python's standard library. From its weights
every arm goes on with the same rows in the same order: on the same text ("python"), on other text ("prose", the topics
of Python's manual), and on a task that combines two letters of a row ("lookup").

- `mha` goes on as it is, for as much more time as the dearest arm takes. Its curve has the losses of both budgets.
- `iha_1` has P = 1: no function that `mha` has not, but the mixing's weights and their rate.
- `iha_2` and `iha_4` are `interleave_heads` with P = 2 and P = 4, in all layers.
- `mha_window` has the windows of the paper's schedule for P = 2, and `iha_2_paper` the schedule (IHA, Appendix C).
- `iha_2_shared` starts with a collapse that is the mean of the pseudo-heads. This start is not exact.
- `iha_2_rolled` starts exact, with query pseudo-heads that differ: all but the last begin as other heads' queries.
- `iha_2_scratch` was interleaved before it was pretrained, on the same rows from the same weights. Its mixing has the
  best of the multiples of SCRATCH. What it has over `iha_2` a warm start leaves on the table.

Every arm learns at the best rate, and its mixing at the best multiple of the default rate, found on TUNING_SEEDS; the
arms of BORROWED take those of `iha_2`, because to tune them costs more than to run them. Texts are judged by the loss
at the end. Lookup is judged by the share of right answers, averaged over the continuation: at the end it tells how
far a run is in a sudden rise, and spreads over seeds by 8 points. The smallest effects worth having are EFFECTS. An
interval within them says "does not matter", one on one side of zero "helps" or "hurts", and any other "undecided". All
intervals are of differences from `mha`, or from the arm that ARMS names, on the same seed. By the times of their
steps, the continuations of the three tables took half an hour of one core; pretraining and tuning take longer.

example: python -m research.experiments.warm_start --texts python prose lookup
"""

import argparse
import copy
import math
import pydoc_data.topics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import MinistralConfig, MinistralForCausalLM, PreTrainedModel

from conversion_scripts.convert_llama_to_iha import convert_model
from iha import plots
from iha.errors import UserError, run_cli
from iha.files import file_sha256, sole_writer, whole_file
from modeling_iha import interleave_heads
from modeling_iha.flop_matched_window import flop_matched_window
from modeling_iha.mixing import HeadCollapse
from research.experiments.language_models import read_text, rows_of, text_sha256
from research.experiments.options import study_parser
from research.experiments.protocol import MIXING_FACTOR, RATE_FACTOR, Rates, end, fit, loss_at, tune, walk
from research.experiments.study import (
    begin,
    correct_by_holm,
    detectable,
    differences,
    interval,
    points,
    run_once,
    write,
)


TOKENS = 512
LAYERS = 5
HEADS = 4
SIZE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": LAYERS}
WINDOW = flop_matched_window(TOKENS, 2)
PRETRAINING = {"steps": 3000, "rows": 4, "rate": 2e-3, "seed": 2000}
SCRATCH = (0.25, 0.0625, 0.015625)
STEPS = {"python": 120, "prose": 160, "lookup": 240}  # of a continuation
ROWS = 1  # of a step
EVERY = 40  # steps between two evaluations
HELD_OUT_ROWS = 32
TUNING_SEEDS = (1000, 1001)
FIRST_RATES = {"python": 2.5e-4, "prose": 2e-3, "lookup": 4e-3}
EFFECTS = {"python": 0.005, "prose": 0.005, "lookup": 0.02}  # nats for each byte, share of the answers
# Arm -> the arm that it is compared with, besides `mha`.
ARMS = {
    "mha": None,
    "iha_1": None,
    "iha_2": "iha_1",
    "iha_4": "iha_1",
    "mha_window": None,
    "iha_2_paper": "mha_window",
    "iha_2_shared": "iha_2",
    "iha_2_rolled": "iha_2",
    "iha_2_scratch": "iha_2",
}
# Arms that take the rates of another.
BORROWED = dict.fromkeys(("iha_4", "iha_2_shared", "iha_2_rolled", "iha_2_scratch"), "iha_2")
Batch = tuple[torch.Tensor, torch.Tensor]  # rows and labels, int64 [rows, TOKENS]; -100 counts for nothing


# Data


class Text:
    """Draw rows of a text, whose last tenth is held out."""

    def __init__(self, text: torch.Tensor):
        self.text = text
        self.end = len(text) - len(text) // 10

    def train(self, rows: int, generator: torch.Generator) -> Batch:
        """Return rows of the first nine tenths, and the byte after each byte."""
        return self._batch(torch.randint(self.end - TOKENS, (rows,), generator=generator))

    def held_out(self) -> Batch:
        """Return HELD_OUT_ROWS rows of the last tenth, evenly apart."""
        return self._batch(torch.linspace(self.end, len(self.text) - TOKENS - 1, HELD_OUT_ROWS).long())

    def _batch(self, starts: torch.Tensor) -> Batch:
        rows = rows_of(self.text, starts, TOKENS)
        return rows[:, :-1], rows[:, 1:]


class Lookup:
    """Draw rows of letters, each followed by what it and the letter `back` places before it mean together.

    The meaning of a pair is one of `letters` values, drawn once for all rows and seeds: the model learns the table,
    and has to look up two keys at once."""

    letters = 28
    back = 3

    def __init__(self):
        self.table = torch.randint(self.letters, (self.letters, self.letters), generator=self._generator(3000))

    def train(self, rows: int, generator: torch.Generator) -> Batch:
        """Return rows, and as labels the meanings alone."""
        keys = torch.randint(self.letters, (rows, TOKENS // 2), generator=generator)
        meaning = self.table[keys, keys.roll(self.back, dims=1)]
        row = torch.stack([keys + ord("a"), meaning + ord("A")], dim=-1).flatten(1)
        labels = row.clone()
        labels[:, ::2] = -100
        labels[:, : 2 * self.back] = -100
        return row, labels.roll(-1, dims=1)

    def held_out(self) -> Batch:
        """Return HELD_OUT_ROWS rows that do not depend on the seed of a run."""
        return self.train(HELD_OUT_ROWS, self._generator(3001))

    @staticmethod
    def _generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)


def data_of(text: str) -> Text | Lookup:
    """Return what draws the rows of a continuation."""
    if text == "lookup":
        return Lookup()
    manual = "\n".join(pydoc_data.topics.topics.values()).encode()
    return Text(read_text() if text == "python" else torch.frombuffer(bytearray(manual), dtype=torch.uint8))


def data_setting(text: str) -> dict:
    """Return what the rows of a continuation depend on, besides the seed of a run."""
    if text == "lookup":
        return {"letters": Lookup.letters, "back": Lookup.back}
    return {"text_sha256": text_sha256(data_of(text).text)}


def loss_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the mean loss in nats over the labels that count."""
    rows, labels = batch
    return cross_entropy(model(rows, use_cache=False).logits.transpose(1, 2).float(), labels)


@torch.no_grad()
def score(model: PreTrainedModel, batch: Batch) -> list[float]:
    """Return the mean loss in nats and the share of labels that are the likeliest."""
    losses = []
    right = []
    for rows, labels in zip(*(part.split(4) for part in batch), strict=True):
        logits = model(rows, use_cache=False).logits.float()
        counts = labels != -100
        losses.append(cross_entropy(logits[counts], labels[counts], reduction="none"))
        right.append(logits[counts].argmax(-1) == labels[counts])
    return [torch.cat(losses).mean().item(), torch.cat(right).float().mean().item()]


# Arms


def new_model(windows: bool = False) -> MinistralForCausalLM:
    """Return a decoder as Llama's, with random weights; with `windows`, four layers of five have WINDOW."""
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": SIZE["hidden_size"] // HEADS}
    types = ["sliding_attention"] * 4 + ["full_attention"] if windows else ["full_attention"] * LAYERS
    fields = {"max_position_embeddings": TOKENS, "tie_word_embeddings": True, "layer_types": types}
    special = {"bos_token_id": None, "eos_token_id": None, "sliding_window": WINDOW}
    return MinistralForCausalLM(MinistralConfig(**SIZE, **heads, **fields, **special))


def share(model: PreTrainedModel) -> PreTrainedModel:
    """Have each collapse begin as the mean of the pseudo-heads."""
    for module in model.modules():
        if isinstance(module, HeadCollapse):
            module.weight_start.fill_(1 / module.num_pseudo_heads)
    return model


def roll(model: PreTrainedModel) -> PreTrainedModel:
    """Have query pseudo-head p of head h begin with head h + p + 1. The last one, which counts, stays with head h."""
    for module in model.modules():
        if (mix := getattr(module, "q_mix", None)) is not None:
            start = mix.weight_start  # [M, M, P]
            for p in range(start.shape[-1] - 1):
                start[..., p] = torch.eye(len(start)).roll(p + 1, dims=0)
    return model


def build(arm: str, weights: dict[str, torch.Tensor], seed: int) -> PreTrainedModel:
    """Return the model of an arm, from the pretrained weights."""
    model = new_model(windows=arm == "mha_window")
    if arm == "iha_2_scratch":
        model = interleave_heads(model, 2, seed=PRETRAINING["seed"])
    model.load_state_dict(weights, strict=False)  # the embedding is the head, too
    model.tie_weights()
    if arm.startswith("mha") or arm == "iha_2_scratch":
        return model
    if arm == "iha_1":
        return convert_model(model, 1)
    paper = {"layers": "paper", "sliding_window": WINDOW} if arm == "iha_2_paper" else {}
    model = interleave_heads(model, int(arm[4]), seed=seed, **paper)
    change = {"shared": share, "rolled": roll}.get(arm[6:])
    return change(model) if change else model


@torch.no_grad()
def alone(model: PreTrainedModel) -> tuple[PreTrainedModel, float]:
    """Return a copy whose collapse leaves out all query pseudo-heads but the last, and what share of weight it keeps.

    The copy can be computed with one query for each token, for P pseudo-heads of keys and values.
    """
    model = copy.deepcopy(model)
    kept = []
    for module in model.modules():
        if isinstance(module, HeadCollapse):
            value = module.value().abs()
            kept.append((value[:, -1].sum() / value.sum()).item())
            module.weight[:, :-1] = 0
            module.weight_start[:, :-1] = 0
    return model, fmean(kept)


# Runs


def pretrain(directory: Path, mixing: float | None = None) -> dict:
    """Train a model that arms start from; write its weights and return its curve.

    With a multiple of the rate for its mixing, the model is interleaved first."""
    torch.manual_seed(PRETRAINING["seed"])
    model = new_model()
    data = data_of("python")
    if mixing:
        model = interleave_heads(model, 2, seed=PRETRAINING["seed"])
    held_out = data.held_out()
    generator = torch.Generator().manual_seed(PRETRAINING["seed"])

    def loss() -> torch.Tensor:
        return loss_of(model, data.train(PRETRAINING["rows"], generator))

    def evaluate(averaged: torch.nn.Module, step: int) -> list[float]:
        if step == PRETRAINING["steps"]:
            with whole_file(directory / "model.safetensors") as path:
                save_file({name: value.clone() for name, value in averaged.named_parameters()}, path)
        scores = score(averaged, held_out)
        print(f"{directory.name}: step {step}, held-out loss {scores[0]:.4f}", flush=True)
        return scores

    curve, seconds = fit(model, loss, evaluate, PRETRAINING["steps"], PRETRAINING["rate"], mixing or 1.0, 30)
    return {"curve": curve, "seconds": seconds}


def pretrained(directory: Path, mixing: float | None = None) -> tuple[Path, list]:
    """Return the file of the weights, and the curve, of a model that is pretrained once."""
    with sole_writer(directory):
        setting = {**PRETRAINING, **SIZE, **data_setting("python")}
        run = run_once(directory / "curve.json", partial(pretrain, directory, mixing), setting)
    return directory / "model.safetensors", run["curve"]


def continuation(text: str, arm: str, steps: int, pretrained: Path, seed: int, rate: float, mixing: float) -> dict:
    """Train an arm from the pretrained weights; return its curve, the seconds, and the loss with one query."""
    model = build(arm, load_file(pretrained), seed)
    data = data_of(text)
    held_out = data.held_out()
    generator = torch.Generator().manual_seed(seed)
    record: dict = {}

    def loss() -> torch.Tensor:
        return loss_of(model, data.train(ROWS, generator))

    def evaluate(averaged: torch.nn.Module, step: int) -> list[float]:
        if step == steps and arm.startswith("iha") and arm != "iha_1":
            one_query, record["kept"] = alone(averaged)
            record["one_query"] = score(one_query, held_out)
        return score(averaged, held_out)

    curve, seconds = fit(model, loss, evaluate, steps, rate, mixing, steps // EVERY)
    print(f"{text}, {arm}, rate {rate:g}, {mixing:g}, seed {seed}: {curve[-1][1]:.4f}, {seconds:.0f} s", flush=True)
    return {"curve": curve, "seconds": seconds / steps, **record}


def tuned(text: str, arm: str, run: Callable[..., dict]) -> Rates:
    """Return the best rate and multiple for the mixing by the mean loss over TUNING_SEEDS.

    The best rate beside the default multiple is too low beside a smaller one. So the rate is sought again, with the
    mixing's own rate as it was, and the multiple after it, until neither changes."""
    tried = []

    def end_of(rate: float, mixing: float) -> float:
        tried.append([rate, mixing, fmean(end(run(arm, STEPS[text], seed, rate, mixing)) for seed in TUNING_SEEDS)])
        return tried[-1][-1]

    mixes = arm.startswith("iha")
    rate, mixing, _ = tune(end_of, mixes, FIRST_RATES[text])
    before = None
    while mixes and before != (rate, mixing):
        before = (rate, mixing)
        of_mixing = rate * mixing
        rate = walk(lambda rate: end_of(rate, of_mixing / rate), rate, RATE_FACTOR)
        mixing = walk(partial(end_of, rate), of_mixing / rate, MIXING_FACTOR)
    return Rates(rate, mixing, tried)


def dearest(seconds: dict[str, float], steps: int) -> int:
    """Return for how many steps `mha` must run to last as long as the dearest arm, by the seconds of a step of each.

    The number is rounded up to a multiple of `steps`, so that a second timing gives the same one."""
    return math.ceil(max(seconds.values()) / seconds["mha"]) * steps


def run_text(args: argparse.Namespace, text: str, weights: dict[str, Path]) -> dict:
    """Tune and run all arms on a text, from the weights of each; return their rates and runs."""
    directory = args.output / text
    steps = STEPS[text]
    rows = {"tokens": TOKENS, "rows_of_a_step": ROWS, "held_out_rows": HELD_OUT_ROWS, "every": EVERY}
    setting = {**SIZE, "pretraining": PRETRAINING, "window": WINDOW, **rows, **data_setting(text)}
    starts = {arm: {"start_sha256": file_sha256(path)} for arm, path in weights.items()}

    def run(arm: str, length: int, seed: int, rate: float, mixing: float) -> dict:
        path = directory / f"{arm}-{length}-{rate:g}-{mixing:g}-{seed}.json"
        compute = partial(continuation, text, arm, length, weights[arm], seed, rate, mixing)
        return run_once(path, compute, setting | starts[arm])

    with sole_writer(directory):
        rates = {arm: tuned(text, BORROWED.get(arm, arm), run) for arm in args.arms}
        first = {arm: run(arm, steps, TUNING_SEEDS[0], *rates[arm][:2])["seconds"] for arm in args.arms}
        length = {arm: dearest(first, steps) if arm == "mha" else steps for arm in args.arms}
        runs: dict[str, list[dict]] = {arm: [] for arm in args.arms}
        for seed in args.seeds:
            for arm, of_arm in runs.items():
                of_arm.append(run(arm, length[arm], seed, *rates[arm][:2]))
    return {"rates": rates, "runs": runs}


# Results


def verdict(difference: dict, effect: float, better: int) -> str:
    """Say what an interval means; `better` is the sign of a gain."""
    if difference["half_width"] is None:
        return "undecided"
    low, high = (difference["mean"] + sign * difference["half_width"] for sign in (-1, 1))
    if -effect < low and high < effect:
        return "does not matter"
    if low > 0 or high < 0:
        return "helps" if difference["mean"] * better > 0 else "hurts"
    return "undecided"


def outcome(text: str, run: dict, step: float) -> float:
    """Return what a run is judged by after `step` steps: the loss, or in lookup the mean share of right answers."""
    if text != "lookup":
        return loss_at(run["curve"], step)
    steps, _, shares = zip(*run["curve"])
    places = [place for place in steps if place < step] + [step]
    return float(np.trapezoid(np.interp(places, steps, shares), places) / step)


def compared(text: str, arm: list[dict], base: list[dict], budgets: dict[str, float]) -> dict:
    """Return how much an arm is above the base, after as many steps of the base as each budget gives."""
    better = 1 if text == "lookup" else -1
    found = {}
    for budget, step in budgets.items():
        ours = [outcome(text, run, STEPS[text]) for run in arm]
        difference = differences(ours, [outcome(text, run, step) for run in base])
        found[budget] = {
            **difference,
            "base_steps": step,
            "verdict": verdict(difference, EFFECTS[text], better),
            "found_in_80_percent": detectable(difference) if len(arm) > 1 else None,
        }
    return found


def row_of(text: str, arm: str, of_text: dict) -> dict:
    """Return a row of the table."""
    runs = of_text["runs"]
    rates = of_text["rates"][arm]
    steps = STEPS[text]
    seconds = {name: median(run["seconds"] for run in of_arm) for name, of_arm in runs.items()}
    row = {"arm": arm, **rates._asdict(), "start": runs[arm][0]["curve"][0][1:]}
    row["cost"] = seconds[arm] / seconds["mha"]
    row["outcome"] = interval([outcome(text, run, steps) for run in runs[arm]])
    for base in dict.fromkeys(("mha", ARMS[arm])):
        if base in runs and base != arm:
            # `mha` may have run too few steps if the times have changed since: then its last step is taken.
            longest = runs[base][0]["curve"][-1][0]
            budgets = {"steps": steps} | ({"time": min(steps * row["cost"], longest)} if base == "mha" else {})
            row[f"minus_{base}"] = compared(text, runs[arm], runs[base], budgets)
    if "kept" in runs[arm][0]:
        row["kept_by_the_last"] = interval([run["kept"] for run in runs[arm]])
        ends = [score_of(text, run["curve"][-1][1:]) for run in runs[arm]]
        row["one_query_minus_all"] = differences([score_of(text, run["one_query"]) for run in runs[arm]], ends)
    return row


def score_of(text: str, scores: list[float]) -> float:
    """Return of a loss and a share of right answers the one that counts on a text."""
    return scores[1 if text == "lookup" else 0]


def plot(table: dict) -> Figure:
    """Plot the loss of each arm by steps and by time, and the differences from `mha`."""
    rows = table["rows"]
    text = table["text"]
    is_task = text == "lookup"
    (said,) = [row["minus_mha"]["steps"]["verdict"] for row in rows if row["arm"] == "iha_2"] or ["not run"]
    message = f'Interleaving a pretrained model before it learns "{text}" (P = 2), at equal steps: {said}'
    figure, (steps, time, dots) = plots.panels(message, 3, 2, 3.4)
    for index, row in enumerate(rows):
        runs = table["runs"][row["arm"]]
        places = [point[0] for point in runs[0]["curve"]]
        bands = [interval([run["curve"][i][1] for run in runs]) for i in range(len(places))]
        for axes, scale in ((steps, 1.0), (time, median(run["seconds"] for run in runs))):
            shown = places if axes is time else [place for place in places if place <= table["steps"]]
            x = [place * scale for place in shown]
            low, mean, high = (
                [band["mean"] + sign * (band["half_width"] or 0.0) for band in bands][: len(x)] for sign in (-1, 0, 1)
            )
            axes.plot(x, mean, f"C{index}", marker=".", label=row["arm"])
            axes.fill_between(x, low, high, color=f"C{index}", alpha=0.2)
    of_what = "answer" if is_task else "byte"
    steps.set(xlabel="step", ylabel=f"held-out loss, nats per {of_what}\n(lower is better)")
    time.set(xlabel="seconds of training on one core")
    others = [row for row in rows if "minus_mha" in row]
    series = {f"equal {budget}": points([row["minus_mha"][budget] for row in others]) for budget in ("steps", "time")}
    plots.dots(dots, [row["arm"] for row in others], series, mark=0)
    dots.axvspan(-table["effect"], table["effect"], color="grey", alpha=0.2)
    unit = "mean share of right answers\n(above 0 is better)" if is_task else "nats per byte\n(below 0 is better)"
    dots.set(xlabel=f"minus mha, 95% interval, {unit}")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write a table for each text. Raise `UserError`."""
    parser = study_parser(__doc__, "warm_start", seeds=10)
    parser.add_argument("--texts", nargs="+", choices=list(STEPS), default=list(STEPS), help="(all)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help="(all)")
    args = parser.parse_args(argv)
    args.arms = list(dict.fromkeys(["mha", *args.arms]))
    if tuned_on := sorted(set(args.seeds) & set(TUNING_SEEDS)):
        raise UserError(f"--seeds {tuned_on[0]}: rates are tuned on this seed; choose others.")
    begin(args)
    path, curve = pretrained(args.output / "pretrained")
    weights = dict.fromkeys(args.arms, path)
    interleaved = {}
    if "iha_2_scratch" in args.arms:
        tried = {mixing: pretrained(args.output / f"pretrained_{mixing:g}", mixing) for mixing in SCRATCH}
        interleaved = {mixing: curve for mixing, (_, curve) in tried.items()}
        weights["iha_2_scratch"], _ = min(tried.values(), key=lambda each: end({"curve": each[1]}))
    before = curve[-7]  # [step, loss, accuracy]
    after = curve[-1]
    setting = {
        **SIZE,
        "tokens": TOKENS,
        "window": WINDOW,
        "rows_of_a_step": ROWS,
        "pretraining": {**PRETRAINING, "curve": curve, "interleaved": interleaved},
        # nats for 1,000 steps, over the last ones
        "slope_of_pretraining": 1000 * (after[1] - before[1]) / (after[0] - before[0]),
    }
    for text in args.texts:
        of_text = run_text(args, text, weights)
        rows = [row_of(text, arm, of_text) for arm in of_text["runs"]]
        correct_by_holm([row["minus_mha"]["steps"] for row in rows if "minus_mha" in row])
        args.study = f"warm_start_{text}"
        write(
            args, plot, text=text, steps=STEPS[text], effect=EFFECTS[text], **setting, rows=rows, runs=of_text["runs"]
        )


if __name__ == "__main__":
    run_cli(main)
