"""Train small models to recall pairs, and compare attention kinds in the layer that recalls.

This study is also the example of how to write one: variants, one run, a row of the table, a plot, and `main`.

Multi-query recall is the task by which attention is judged since Zoology (Arora et al., 2023); IHA claims multi-key
retrieval with fewer heads. A row lists pairs of a key and a value, from two to `--pairs`, and then asks for keys until
the row of 4 tokens for each of `--pairs` is full. A filler follows each asked key, because the value is not told.

The models have two layers. In every variant but `mha_global` the first has a window of a key and its value, 2 tokens,
and so joins a value to the key before it, as the short convolutions of Zoology's later models do. The second is
global. A variant's kind stands in the second layer, and the first is "mha"; in `paired_heads_window` and `iha_window`
it stands in the first, and the second is "mha", as in the models that docs/FROM_SCRATCH.md trains. At the size of
SHAPE "mha" learns the task in half a minute of one core; `mha_global` and 64 keys or more take longer than the two
minutes that were tried (docs/LOG.md).

The protocol is that of protocol.py. The study compares the share of wrong answers with `--pairs` pairs, averaged over
the evaluations of a run, because at the end a run may be in the middle of a sudden rise. The smallest difference worth
having is 0.02. All variants take about an hour of one core.

example: python -m research.experiments.recall --pairs 8
"""

from collections.abc import Sequence
from functools import partial

import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from iha import plots
from iha.errors import UserError, run_cli
from modeling_iha import IHAConfig
from research.experiments.arms import PLAIN_ROPE
from research.experiments.options import protocol_parser
from research.experiments.protocol import Plan, compare_tuned, differences, end, fit, new_model
from research.experiments.study import begin, correct_by_holm, interval, points, write


WIDE = {**PLAIN_ROPE, "rope_type": "linear", "factor": 0.5}  # positions times 2
VARIANTS: dict[str, dict] = {
    "mha": {},
    "mha_global": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    **{kind: {"attention_kinds": ["mha", kind]} for kind in ("paired_heads", "iha", "talking_heads", "dcmha")},
    "paired_heads_window": {"attention_kinds": ["paired_heads", "mha"]},
    "iha_window": {"attention_kinds": ["iha", "mha"]},
    # Controls of these two: ordinary heads whose positions lie as far apart, and paired heads at the plain positions
    "wide_window": {"rope_parameters": {"full_attention": PLAIN_ROPE, "sliding_attention": WIDE}},
    "paired_heads_shared_window": {"attention_kinds": ["paired_heads", "mha"], "pseudo_positions": "shared"},
}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = 2
ROWS_PER_STEP = 64
STEPS = 1000
EVALUATIONS = 20
HELD_OUT_ROWS = 256
EFFECT = 0.02  # share of answers
FIRST_RATE = 2e-3
KEYS = 36
FILLER = 0
VALUES = 32


def tokens_of(most_pairs: int) -> int:
    """Return the length N of rows that list at most so many pairs."""
    return 4 * most_pairs


def draw(count: int, pairs: int, most_pairs: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [count, N] that list so many pairs, and labels [count, N].

    A label is the answer at a key that is asked for, and -100 elsewhere.
    """
    keys = torch.rand(count, KEYS, generator=generator).argsort(dim=-1)[:, :pairs] + 1
    values = torch.randint(VALUES, keys.shape, generator=generator) + 1 + KEYS
    listed = torch.stack((keys, values), dim=-1)  # [count, pairs, 2]
    which = torch.randint(pairs, (count, 2 * most_pairs - pairs), generator=generator)
    asked = listed.gather(1, which[..., None].expand(-1, -1, 2))
    labels = torch.full_like(torch.cat((listed, asked), dim=1), -100)
    labels[:, pairs:, 0] = asked[..., 1]
    asked[..., 1] = FILLER
    return torch.cat((listed, asked), dim=1).flatten(1), labels.flatten(1)


def config_of(most_pairs: int, **fields) -> IHAConfig:
    """Return the config of a variant."""
    usual = {
        **SHAPE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": tokens_of(most_pairs),
        "vocab_size": 1 + KEYS + VALUES,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.125,
        "attention_kinds": "mha",
        "num_pseudo_heads": 2,
        "sliding_window": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return IHAConfig(**{**usual, **fields})


def one_run(most_pairs: int, name: str, seed: int, rate: float, mixing: float) -> dict:
    """Train a new model of a variant, `name`, on new rows of a seed.

    Return the seconds, and a curve of the step, the share of wrong answers averaged over the run so far, and the share
    at the step."""
    generator = torch.Generator().manual_seed(seed)
    model = new_model(config_of(most_pairs, **VARIANTS[name]), config_of(most_pairs), seed)
    held_out, labels = draw(HELD_OUT_ROWS, most_pairs, most_pairs, torch.Generator().manual_seed(3001))
    asked = labels != -100
    steps = STEPS
    wrong = []

    def loss() -> torch.Tensor:
        pairs = int(torch.randint(2, most_pairs + 1, (), generator=generator))
        rows, answers = draw(ROWS_PER_STEP, pairs, most_pairs, generator)
        return cross_entropy(model(rows, use_cache=False).logits.transpose(1, 2), answers)

    def evaluate(averaged: torch.nn.Module, step: int) -> list[float]:
        chosen = averaged(held_out, use_cache=False).logits.argmax(dim=-1)
        wrong.append((chosen != labels)[asked].float().mean().item())
        print(f"{name}, seed {seed}: step {step} of {steps}, {wrong[-1]:.3f} wrong", flush=True)
        return [sum(wrong) / len(wrong), wrong[-1]]

    curve, seconds = fit(model, loss, evaluate, steps, rate, mixing, EVALUATIONS)
    return {"curve": curve, "seconds": seconds}


def summary(name: str, rates: dict, runs: dict[str, list[dict]]) -> dict:
    """Return a row of the table, with the difference from the first variant."""
    base = next(iter(runs))
    ends = [end(run) for run in runs[name]]
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
    figure, (by_step, by_variant) = plots.panels(f"Recall of {table['pairs']} pairs", 2, 2, height=5)
    for name, curves in table["runs"].items():
        steps = [point[0] for point in curves[0]]
        by_step.plot(steps, [1 - sum(p[2] for p in at) / len(at) for at in zip(*curves)], label=name)
    by_step.set(xlabel="step", ylabel="right answers, mean over seeds", ylim=(0, 1))
    by_step.legend(fontsize="x-small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    names = [row["variant"] for row in table["rows"]]
    plots.dots(by_variant, names, {"mean over the run": points([row["wrong"] for row in table["rows"]])}, (0, 1))
    by_variant.set(xlabel="wrong over the run, 95% interval")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    parser = protocol_parser(__doc__, "recall", EFFECT, VARIANTS)
    parser.add_argument("--pairs", type=int, default=4, help="listed in a row at most (4)")
    args = parser.parse_args(argv)
    if not 2 <= args.pairs <= KEYS:
        raise UserError(f"--pairs {args.pairs}: expected 2 to {KEYS}.")
    if args.pairs != 4:
        args.study += f"_{args.pairs}"
    study = begin(args)
    setting = {**SHAPE, "heads": HEADS, "rows_per_step": ROWS_PER_STEP, "steps": STEPS, "evaluations": EVALUATIONS}
    setting |= {"pairs": args.pairs, "tokens": tokens_of(args.pairs)}
    plan = Plan(args.kinds, args.most_seeds, EFFECT, FIRST_RATE)

    def config_of_variant(name: str) -> IHAConfig:
        return config_of(args.pairs, **VARIANTS[name])

    rates, runs = compare_tuned(plan, study.runs, setting, partial(one_run, args.pairs), config_of_variant)
    rows = [summary(name, rates, runs) for name in runs]
    correct_by_holm([row["minus_base"] for row in rows if "minus_base" in row])
    curves = {name: [run["curve"] for run in of_variant] for name, of_variant in runs.items()}
    write(study, plot, **setting, rows=rows, runs=curves)


if __name__ == "__main__":
    run_cli(main)
