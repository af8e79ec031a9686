"""Train small models to recall pairs, and compare forms of windows and of heads that share their virtual sequence.

A row lists pairs of a key and a value, and then asks for the value of every key, in another order. A key is one
letter, or with `--grid` two letters, neither of which tells the value alone. Multi-query recall is the task by which
attention is judged since Zoology (Arora et al., 2023); IHA claims multi-key retrieval with fewer heads.

The models are those of paired_heads.py: four layers with a window, and a global one. `_near` has windows of N / 8
tokens, `_far` of N / 2. `two_global` has two global layers among the five, the third and the last.

The protocol is that of protocol.py. The study compares the share of wrong answers, averaged over the evaluations of a
run, because at the end a run may be in the middle of a sudden rise. The smallest difference worth having is 0.02.

example: python -m research.experiments.recall --pairs 8 --grid
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from iha_io import plots
from iha_io.command_io import UserError, run_cli
from modeling_iha import IHAConfig, IHAForCausalLM
from research.experiments.language_models import build, sized
from research.experiments.options import protocol_parser
from research.experiments.protocol import compare_tuned, differences, end, fit, new_model
from research.experiments.study import begin, correct_by_holm, interval, points, write


PAIRED_2 = {"attention_kinds": "paired_heads", "num_pseudo_heads": 2}
PAIRED_4 = {"attention_kinds": "paired_heads", "num_pseudo_heads": 4}
VARIANTS: dict[str, dict] = {
    "mha": {},
    "windows_far": {"windows": 2},
    "windows_near": {"windows": 8},
    "paired_2_far": {**PAIRED_2, "windows": 2},
    "paired_4_far": {**PAIRED_4, "windows": 2},
    "paired_4_near": {**PAIRED_4, "windows": 8},
    "paired_4_near_two_global": {**PAIRED_4, "windows": 8, "two_global": True},
    "windows_near_two_global": {"windows": 8, "two_global": True},
    "iha_2_far": {"attention_kinds": "iha", "num_pseudo_heads": 2, "windows": 2},
}
SMALL = sized(width=64, ffn=176, layers=5, heads=4, rows_per_step=64, steps=1200)
EVALUATIONS, HELD_OUT_ROWS = 20, 256
EFFECT = 0.02  # share of answers
LETTERS = 8  # on each side of the grid
VALUES = 32


class Task(NamedTuple):
    """Say how many pairs a row lists, and if a key is two letters of a grid."""

    pairs: int
    grid: bool

    @property
    def tokens(self) -> int:
        """Return the length N of a row."""
        return 2 * self.pairs * (3 if self.grid else 2)

    def rows(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows [count, N] and labels [count, N], which are -100 but where the next token is an answer."""
        keys = torch.rand(count, LETTERS**2, generator=generator).argsort(dim=-1)[:, : self.pairs]
        values = torch.randint(VALUES, keys.shape, generator=generator) + LETTERS**2
        letters = (keys // LETTERS, LETTERS + keys % LETTERS) if self.grid else (keys,)
        listed = torch.stack((*letters, values), dim=-1)  # [count, pairs, 2 or 3]
        order = torch.rand(keys.shape, generator=generator).argsort(dim=-1)
        asked = listed.gather(1, order[..., None].expand_as(listed))
        labels = torch.full_like(torch.cat((listed, asked), dim=1), -100)
        labels[:, self.pairs :, -2] = asked[..., -1]
        return torch.cat((listed, asked), dim=1).flatten(1), labels.flatten(1)


def config_of(task: Task, **fields) -> IHAConfig:
    """Return the config of a variant."""
    two_global = fields.pop("two_global", False)
    config = build({**SMALL, "tokens": task.tokens}, **fields)
    if two_global:
        config.attention_kinds[2], config.layer_types[2] = "mha", "full_attention"
    return config


def train(
    name: str, model: IHAForCausalLM, seed: int, task: Task, rate: float, mixing: float, steps: int, batch: int
) -> dict:
    """Train a model on new rows of a seed.

    Return the seconds, and a curve of the step, the share of wrong answers averaged over the run so far, and the share
    at the step."""
    generator = torch.Generator().manual_seed(seed)
    held_out, labels = task.rows(HELD_OUT_ROWS, torch.Generator().manual_seed(3001))
    asked, wrong = labels != -100, []

    def loss() -> torch.Tensor:
        rows, answers = task.rows(batch, generator)
        return cross_entropy(model(rows, use_cache=False).logits.transpose(1, 2), answers)

    def evaluate(averaged: torch.nn.Module, step: int) -> list[float]:
        chosen = averaged(held_out, use_cache=False).logits.argmax(dim=-1)
        wrong.append((chosen != labels)[asked].float().mean().item())
        print(f"{name}, seed {seed}: step {step} of {steps}, {wrong[-1]:.3f} wrong", flush=True)
        return [sum(wrong) / len(wrong), wrong[-1]]

    curve, seconds = fit(model, loss, evaluate, steps, rate, mixing, EVALUATIONS)
    return {"curve": curve, "seconds": seconds}


def one_run(task: Task, name: str, seed: int, rate: float, mixing: float) -> dict:
    """Train a new model of a variant, `name`."""
    model = new_model(config_of(task, **VARIANTS[name]), config_of(task), seed)
    return train(name, model, seed, task, rate, mixing, SMALL["steps"], SMALL["rows_per_step"])


def summary(name: str, rates: dict, runs: dict[str, list[dict]]) -> dict:
    """Return a row of the table, with the difference from the first variant."""
    base, ends = next(iter(runs)), [end(run) for run in runs[name]]
    row = {
        "variant": name,
        **rates[name]._asdict(),
        "wrong": interval(ends),
        "wrong_at_end": interval([run["curve"][-1][2] for run in runs[name]]),
        "seconds": interval([run["seconds"] for run in runs[name]]),
    }
    if name != base:
        row["minus_base"] = differences(ends, [end(run) for run in runs[base]])
    return row


def plot(table: dict) -> Figure:
    """Plot the share of right answers by step, and its mean over the run."""
    pairs, spelled = table["pairs"], "two letters" if table["grid"] else "one letter"
    figure, (by_step, by_variant) = plots.panels(f"Recall of {pairs} pairs, keys of {spelled}", 2, 2, height=4)
    for name, curves in table["runs"].items():
        steps = [point[0] for point in curves[0]]
        by_step.plot(steps, [1 - sum(p[2] for p in at) / len(at) for at in zip(*curves)], label=name)
    by_step.set(xlabel="step", ylabel="right answers, mean over seeds", ylim=(0, 1))
    by_step.legend(fontsize="small")
    names = [row["variant"] for row in table["rows"]]
    plots.dots(by_variant, names, {"mean over the run": points([row["wrong"] for row in table["rows"]])}, (0, 1))
    by_variant.set(xlabel="wrong answers, averaged over the run, 95% interval")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    parser = protocol_parser(__doc__, "recall", EFFECT, VARIANTS)
    parser.add_argument("--pairs", type=int, default=8, help="listed in a row (8)")
    parser.add_argument("--grid", action="store_true", help="keys of two letters")
    args = parser.parse_args(argv)
    if not (4 <= args.pairs <= LETTERS**2 and args.pairs % 4 == 0):
        raise UserError(f"--pairs {args.pairs}: expected a multiple of 4, from 4 to {LETTERS**2}.")
    args.study += f"_{args.pairs}" * (args.pairs != 8) + "_grid" * args.grid
    begin(args)
    task = Task(args.pairs, args.grid)
    setting = {**SMALL, "evaluations": EVALUATIONS, "pairs": args.pairs, "grid": args.grid, "tokens": task.tokens}
    rates, runs = compare_tuned(args, setting, partial(one_run, task), lambda name: config_of(task, **VARIANTS[name]))
    rows = [summary(name, rates, runs) for name in runs]
    correct_by_holm([row["minus_base"] for row in rows if "minus_base" in row])
    curves = {name: [run["curve"] for run in of_variant] for name, of_variant in runs.items()}
    write(args, plot, **setting, rows=rows, runs=curves)


if __name__ == "__main__":
    run_cli(main)
