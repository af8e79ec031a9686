"""Train small language models on a short text for many epochs, and ask which form of interleaving learns it best.

Where data is scarce a form may learn better, or only sooner. So each form has the learning rate, the weight decay and
the number of epochs that are best for it. They are chosen on TUNING_SEED, which is not used again, by the loss on a
second text. The results are losses on a third text, which no choice has seen. The three texts are different modules.

- `windows` has ordinary attention, with windows of N / 16 tokens in four layers of five. It is what the other forms
  are compared with, and their tuning begins where its own has ended.
- `schedule` is the paper's: "iha" with P = 2 and windows of N / 8 tokens. `mixing` is "iha" with P = 1 in windows of
  N / 16, and `paired_4` has paired heads, P = 4, in windows of N / 64.
- Controls: `no_decay` is `windows` without decay on queries, keys and values, because the mixing has none either.
  `wider` is `windows` at 1.5 times the width, and `two_models` averages the probabilities of two models of `windows`,
  which are trained for three quarters of its epochs. Both take about as long as the schedule.

All models but the wider one have as many parameters. The learning rate falls to zero over the second half of a run,
and what is evaluated is a running mean of the weights. The table of 100 kB takes one core about two hours. A later
command can add forms and seeds: finished runs are not repeated. With `--longer` runs have 24 epochs, all at one rate
and decay: the forms differ in the epoch at which they are judged. `--bytes 1000000 --given 0.004 1 8` trains on 1 MB,
at the rate and decay that windows alone, the schedule and paired heads chose for 100 kB.

On a GPU (`--device cuda`) models are compiled and learn in bfloat16 autocast. Texts of more than 1 MB are the code of
PyTorch's package, because the standard library is too short. With 2 MB every epoch has whole batches, so that a form
is compiled once: `--device cuda --width 512 --bytes 2000000 --kinds windows schedule paired_4 two_models`. Predicted
before the first run: the schedule and paired heads end 0.01 to 0.03 below windows alone, and two averaged models 0.03
to 0.05.

example: python -m research.experiments.scarce_data --kinds windows schedule --seeds 0 1 2
"""

import math
import random
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from iha import plots
from iha.errors import UserError, run_cli
from iha.files import sole_writer
from iha.model_cost import model as cost_of
from modeling_iha import IHAConfig
from modeling_iha.mixing_weights import trained_mixing
from research.experiments.language_models import build, losses_of, rows_of, size_of, sized, text_sha256
from research.experiments.language_models import config_of as config_of_variant
from research.experiments.options import study_parser
from research.experiments.protocol import TUNING_SEED, WARM_UP, new_model
from research.experiments.study import (
    begin,
    correct_by_holm,
    detectable,
    differences,
    interval,
    points,
    run_once,
    verdict,
    write,
)


FORMS: dict[str, dict] = {
    "windows": {"windows": 16},
    "schedule": {"attention_kinds": "iha", "num_pseudo_heads": 2, "windows": 8},
    "mixing": {"attention_kinds": "iha", "num_pseudo_heads": 1, "windows": 16},
    "paired_4": {"attention_kinds": "paired_heads", "num_pseudo_heads": 4, "windows": 64},
    "no_decay": {"windows": 16},
    "wider": {"windows": 16},
    "two_models": {"windows": 16},
}
CONTROLS = ("no_decay", "wider", "two_models")
LABELS = {
    "windows": "windows alone",
    "schedule": "the paper's schedule, P = 2",
    "mixing": "mixing alone, P = 1",
    "paired_4": "paired heads, P = 4",
    "no_decay": "windows alone, no decay on q, k, v",
    "wider": "windows alone, 1.5 times the width",
    "two_models": "windows alone, two averaged models",
}
SIZES = {
    64: sized(width=64, ffn=176, layers=5, heads=4, tokens_per_step=1024),
    512: sized(width=512, ffn=1408, layers=5, heads=8, tokens_per_step=32768),  # for a GPU
}
TOKENS = {64: 256, 512: 1024}  # of a row
EFFECT = 0.01  # nats per byte, the smallest difference worth having
SEEDS = 6
# Rate, decay and epochs of the runs of the tuning. A form is judged at the epoch that is best on the second text. Less
# decay (0.3 and 0.6) was worse in a first search, of windows alone and on the same seed.
GRIDS = {
    64: [(4e-3, 1.0, 12), (2e-3, 1.0, 12), (4e-3, 2.0, 12), (2e-3, 2.0, 12)],
    512: [(2e-3, 1.0, 12), (1e-3, 1.0, 12), (2e-3, 2.0, 12), (1e-3, 2.0, 12)],
}
LONGER = [(2e-3, 2.0, 24)]  # the form is free in its epoch alone
AVERAGE = 0.99  # of the running mean of the weights, by step: about an epoch of 100 kB
MIXING = 4.0  # the multiple of the rate with which the mixing learns, as in the pilot
ROWS = {"choice": 64, "third": 128}  # that are evaluated
LARGEST_OF_A_FILE = 20_000  # bytes, so that no module is most of a text
SHORT = 1_000_000  # bytes of training up to which the standard library has enough modules
HELD_OUT = 200_000  # bytes of the second text, and of the third


class Setting(NamedTuple):
    """Hold the learning rate, the weight decay and the length of a run, over which the rate falls."""

    rate: float
    decay: float
    epochs: int


# Texts


def texts_of(training_bytes: int) -> dict[str, torch.Tensor]:
    """Return the text of training, that of the choices and the third, as uint8. No module is in two of them."""
    if training_bytes <= SHORT:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    else:
        files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    random.Random(0).shuffle(files)
    lengths = {"training": training_bytes, "choice": HELD_OUT, "third": HELD_OUT}
    texts = {}
    for name, length in lengths.items():
        text = bytearray()
        while len(text) < length:
            if not files:
                raise UserError(f"--bytes {training_bytes:,}: the installed modules are too short for it.")
            text += files.pop(0).read_bytes()[:LARGEST_OF_A_FILE]
        texts[name] = torch.frombuffer(text[:length], dtype=torch.uint8)
    return texts


def held_out_rows(text: torch.Tensor, count: int, tokens: int) -> torch.Tensor:
    """Return rows that are spread evenly over a text."""
    return rows_of(text, torch.linspace(0, len(text) - tokens - 1, count, dtype=torch.float64).long(), tokens)


def epoch_of(text: torch.Tensor, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Return the rows of an epoch in random order. They start at a random place, so that epochs cut the text anew."""
    shift = torch.randint(tokens, (1,), generator=generator)
    starts = torch.arange(0, len(text) - 2 * tokens, tokens) + shift
    return rows_of(text, starts[torch.randperm(len(starts), generator=generator)], tokens)


# Models


def config_of(size: dict, form: str) -> IHAConfig:
    """Return the config of a form, with as many parameters as "mha" of that size; the wider model has more."""
    if form != "wider":
        return config_of_variant(size, **FORMS[form])
    names = ("hidden_size", "intermediate_size", "num_attention_heads")
    return build(size, **FORMS[form], **{name: size["fields"][name] * 3 // 2 for name in names})


def optimizer_of(form: str, model: nn.Module, setting: Setting) -> torch.optim.AdamW:
    """Return AdamW that decays matrices, but neither the mixing nor, for `no_decay`, queries, keys and values."""
    mixes = trained_mixing(model)
    free = ("q_proj", "k_proj", "v_proj") if form == "no_decay" else ()
    decayed = [
        weight
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and not any(part in name for part in free) and all(weight is not mix for mix in mixes)
    ]
    known = {id(weight) for weight in (*decayed, *mixes)}
    others = [weight for weight in model.parameters() if id(weight) not in known]
    groups = [
        {"params": decayed, "lr": setting.rate, "weight_decay": setting.decay},
        {"params": others, "lr": setting.rate, "weight_decay": 0.0},
        {"params": mixes, "lr": setting.rate * MIXING, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def share_of_rate(step: int, steps: int) -> float:
    """Return the share of the rate at a step: it rises over WARM_UP steps and falls to zero over the second half."""
    return min(1.0, (step + 1) / WARM_UP, 2 * (1 - step / steps))


class Learner:
    """Train one model, and keep a running mean of its weights."""

    def __init__(self, size: dict, form: str, seed: int, setting: Setting, steps: int, device: str):
        self.model = new_model(config_of(size, form), build(size), seed).to(device)
        if device == "cuda":
            self.model.compile()
        self.optimizer = optimizer_of(form, self.model, setting)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial(share_of_rate, steps=steps))
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE))

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        """Take a step, and return the loss before it."""
        self.optimizer.zero_grad()
        loss = losses_of(self.model, rows).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.average.update_parameters(self.model)
        return loss.detach()


def loss_of_mean(learners: list[Learner], rows: torch.Tensor, batch: int) -> float:
    """Return the loss of the mean of the learners' probabilities; that of one is its own."""
    with torch.no_grad():
        each = [torch.cat([losses_of(one.average.module, part) for part in rows.split(batch)]) for one in learners]
    return (math.log(len(each)) - torch.logsumexp(-torch.stack(each), dim=0)).mean().item()


def train(
    size: dict,
    texts: dict[str, torch.Tensor],
    device: str,
    form: str,
    seed: int,
    setting: Setting,
    evaluated: str,
    best: float = math.inf,
) -> dict:
    """Train a form.

    Args:
        evaluated: the name of the text on which the model is evaluated after each epoch.
        best: the lowest loss of earlier runs of the tuning; a run that cannot reach it is stopped.

    Returns:
        the "curve", of each epoch its number, the loss of training and that of the text, and the "seconds" of
        training, on the CPU or by the clock of a GPU.
    """
    tokens, batch = size["tokens"], size["batch"]
    generator = torch.Generator().manual_seed(seed)
    held_out = held_out_rows(texts[evaluated], ROWS[evaluated], tokens).to(device)
    epochs = [epoch_of(texts["training"], tokens, generator).split(batch) for _ in range(setting.epochs)]
    steps = sum(map(len, epochs))
    seeds = [seed, seed + 500] if form == "two_models" else [seed]
    learners = [Learner(size, form, each, setting, steps, device) for each in seeds]
    if device == "cuda":  # compile outside of what is timed; the last batch of an epoch may be smaller
        for learner, rows in product(learners, (epochs[0][0], epochs[0][-1])):
            losses_of(learner.model, rows.to(device)).mean().backward()
    clock = time.perf_counter if device == "cuda" else time.process_time
    curve, seconds = [], 0.0
    for number, batches in enumerate(epochs, start=1):
        start = clock()
        losses = [learner.step(rows.to(device)) for rows in batches for learner in learners]
        training = torch.stack(losses).mean().item()
        seconds += clock() - start
        curve.append([number, training, loss_of_mean(learners, held_out, batch)])
        shown = f"epoch {number} of {setting.epochs}, losses {training:.4f} and {curve[-1][2]:.4f}"
        print(f"{form}, seed {seed}, rate {setting.rate:g}, decay {setting.decay:g}: {shown}", flush=True)
        if evaluated == "choice" and is_hopeless(curve, setting, best):
            break
    return {"curve": curve, "seconds": seconds}


# Choices and results


class Choice(NamedTuple):
    """Hold the setting of a form and the epoch at which it is judged, with the runs that led to it.

    `tried` lists of each run its rate, decay and length, the epoch with the lowest loss on the second text, that loss,
    and after how many epochs the run was stopped.
    """

    setting: Setting
    epoch: int
    tried: list[list[float]]


def is_hopeless(curve: list[list[float]], setting: Setting, best: float) -> bool:
    """Return if a run of the tuning may end: its loss is infinite, well above its own lowest, or far above `best`."""
    losses = [point[2] for point in curve]
    if not math.isfinite(losses[-1]) or losses[-1] > min(losses) + 0.03:
        return True
    return len(losses) >= 0.75 * setting.epochs and losses[-1] > best + 0.06


def tune(run_of: Callable[[Setting, float], dict], grid: list[tuple]) -> Choice:
    """Return the best of a grid and its best epoch, by the loss on the second text in `run_of(setting, best)`."""
    tried = []
    for setting in map(Setting._make, grid):
        best = min((each[4] for each in tried), default=math.inf)
        losses = [point[2] if math.isfinite(point[2]) else math.inf for point in run_of(setting, best)["curve"]]
        tried.append([*setting, losses.index(min(losses)) + 1, min(losses), len(losses)])
    rate, decay, epochs, epoch, *_ = min(tried, key=lambda each: each[4])
    return Choice(Setting(rate, decay, epochs), epoch, tried)


def third(run: dict, epoch: int) -> float:
    """Return the loss on the third text after an epoch of a run that was evaluated on it."""
    return run["curve"][epoch - 1][2]


def summary(size: dict, form: str, choices: dict[str, Choice], runs: dict[str, list[dict]]) -> dict:
    """Return a row of the table. Losses are of the third text at the chosen epoch, unless they are named otherwise."""

    def seconds(of_form: str) -> float:
        return median(run["seconds"] / len(run["curve"]) for run in runs[of_form])

    def losses(of_form: str) -> list[float]:
        return [third(run, choices[of_form].epoch) for run in runs[of_form]]

    choice, base = choices[form], "windows"
    row = {
        "form": form,
        "parameters": cost_of(config_of(size, form), 1).parameters * (2 if form == "two_models" else 1),
        **choice.setting._asdict(),
        "judged_at": choice.epoch,
        "tried": choice.tried,
        "loss": interval(losses(form)),
        "training_loss": interval([run["curve"][choice.epoch - 1][1] for run in runs[form]]),
        "epoch_seconds": seconds(form),
    }
    if form != base and base in runs:
        difference = differences(losses(form), losses(base))
        row |= {
            "minus_windows": difference,
            "epoch_cost": seconds(form) / seconds(base),
            "cost": seconds(form) / seconds(base) * choice.epoch / choices[base].epoch,
        }
        if choice.setting == choices[base].setting:
            curves = [zip(*([point[2] for point in run["curve"]] for run in runs[each])) for each in (form, base)]
            row["minus_windows_by_epoch"] = [differences(*at) for at in zip(*curves)]
        if difference["half_width"] is not None:
            row["detectable"] = detectable(difference)
            row["verdict"] = verdict(difference, EFFECT, better=-1)
    if "schedule" in runs and form in ("paired_4", "wider", "two_models"):  # what else its time can buy
        row["minus_schedule"] = differences(losses(form), losses("schedule"))
    return row


def plot(table: dict) -> Figure:
    """Plot the losses by epoch and by time, and the differences from windows alone at each form's best."""
    rows = table["rows"]
    size = f"{table['bytes'] / 1000:,.0f} kB of Python, width {table['fields']['hidden_size']}"
    message = f"Losses in nats per byte by epoch and by time, and the differences at the dots: {size}"
    figure, (by_epoch, training, by_time, best) = plots.panels(message, 4, 2, height=3.2)
    for row in rows:
        curves = table["runs"][row["form"]]
        epochs = [point[0] for point in curves[0]]
        train_mean, third_mean = (
            [interval([point[place] for point in at])["mean"] for at in zip(*curves)] for place in (1, 2)
        )
        seconds = [epoch * row["epoch_seconds"] for epoch in epochs]
        for axes, places, losses in (
            (by_epoch, epochs, third_mean),
            (training, epochs, train_mean),
            (by_time, seconds, third_mean),
        ):
            (line,) = axes.plot(places, losses, linewidth=1.2, label=LABELS[row["form"]])
            if axes is not training:
                at = row["judged_at"] - 1
                axes.plot(places[at], losses[at], marker="o", markersize=4, color=line.get_color())
    lowest = min(min(line.get_ydata()) for line in by_epoch.get_lines())
    by_epoch.set(xlabel="epochs", ylabel="loss on the third text", ylim=(lowest - 0.02, lowest + 0.4))
    by_time.set(xlabel=f"training seconds on {table['gpu'] or 'a CPU, one thread'}")
    by_time.set(ylabel="loss on the third text", ylim=(lowest - 0.02, lowest + 0.4))
    training.set(xlabel="epochs", ylabel="loss in training", ylim=(None, lowest + 0.4))
    others = [row for row in rows if "minus_windows" in row]
    series = {"at the dots": points([row["minus_windows"] for row in others])}
    plots.dots(best, [row["form"] for row in others], series, mark=0)
    best.set(xlabel="loss minus that of windows alone")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    parser = study_parser(__doc__, "scarce_data", SEEDS)
    parser.add_argument("--kinds", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM")
    parser.add_argument("--control-seeds", type=int, help="how many of the seeds the controls have (all)")
    parser.add_argument("--bytes", type=int, default=100_000, help="length of the text of training (100000)")
    parser.add_argument("--width", type=int, default=64, choices=SIZES, help="width of the model (64)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(cpu)")
    parser.add_argument("--longer", action="store_true", help="runs of 24 epochs, all with the same rate and decay")
    parser.add_argument("--given", nargs=3, type=float, metavar=("RATE", "DECAY", "EPOCHS"), help="tune nothing")
    args = parser.parse_args(argv)
    args.kinds = [form for form in FORMS if form in args.kinds]
    usual = {"bytes": 100_000, "width": 64, "device": "cpu"}
    args.study += "".join(f"_{getattr(args, name)}" for name, value in usual.items() if getattr(args, name) != value)
    grid = LONGER if args.longer else GRIDS[args.width]
    args.study += "_longer" * args.longer
    args.study += "".join(f"_{value:g}" for value in args.given or ())
    begin(args)
    if TUNING_SEED in args.seeds:
        raise UserError(f"--seeds {TUNING_SEED}: this seed chooses the settings, and has no part in the results.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no CUDA device here.")
    size = size_of(SIZES[args.width], TOKENS[args.width])
    if args.bytes < (least := 4 * size["tokens"]):
        raise UserError(f"--bytes {args.bytes}: expected at least {least}.")
    texts = texts_of(args.bytes)
    hashes = {f"{name}_sha256": text_sha256(text) for name, text in texts.items()}
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    setting = {**size, "bytes": args.bytes, **hashes, "gpu": gpu}

    def result(form: str, seed: int, chosen: Setting, evaluated: str, best: float = math.inf) -> dict:
        path = args.output / f"{form}-{chosen.rate:g}-{chosen.decay:g}-{chosen.epochs}-{seed}.json"
        return run_once(path, partial(train, size, texts, args.device, form, seed, chosen, evaluated, best), setting)

    def choose(form: str) -> Choice:
        if args.given:
            rate, decay, epochs = args.given
            return Choice(Setting(rate, decay, int(epochs)), int(epochs), [])
        if form == "two_models":
            epochs = round(0.75 * choices["windows"].epoch)
            return Choice(choices["windows"].setting._replace(epochs=epochs), epochs, [])
        if form in CONTROLS:
            return choices["windows"]._replace(tried=[])
        return tune(lambda chosen, best: result(form, TUNING_SEED, chosen, "choice", best), grid)

    if missing := [form for form in args.kinds if form in CONTROLS and "windows" not in args.kinds]:
        raise UserError(f"--kinds {missing[0]}: this control takes the setting of windows, which is missing.")

    choices: dict[str, Choice] = {}
    runs: dict[str, list[dict]] = {form: [] for form in args.kinds}
    with sole_writer(args.output):
        for form in args.kinds:
            choices[form] = choose(form)
        for number, seed in enumerate(args.seeds):
            for form in args.kinds:
                if form not in CONTROLS or args.control_seeds is None or number < args.control_seeds:
                    runs[form].append(result(form, seed, choices[form].setting, "third"))
    rows = [summary(size, form, choices, runs) for form in args.kinds]
    correct_by_holm([row["minus_windows"] for row in rows if "minus_windows" in row])
    curves = {form: [run["curve"] for run in of_form] for form, of_form in runs.items()}
    write(args, plot, **setting, rows=rows, runs=curves)


if __name__ == "__main__":
    run_cli(main)
