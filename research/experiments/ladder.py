"""Learn tasks that need k attention patterns at once, and see how many heads each attention kind needs for them.

"Interleaved Head Attention" proves that MHA needs k heads where ceil(sqrt(k)) interleaved heads with as many
pseudo-heads are enough (Theorems 3 and 4). Here small models of one layer learn two tasks by gradient descent, with k
as the difficulty:

- `offsets`: every token gives the symbols that are k distances behind it.
- `lookups`: 16 facts, a key and a value each, then 16 tokens that ask for the values of k keys each.

The answers of a token are k classifications of 8 classes. All models have as many parameters as "mha" with 2 heads (by
the width of the FFN) and heads that share the width of the model. On a seed all start from the same common weights and
learn the same examples. The learning rate of each variant is tuned for each k, on seeds that are not used again. By
the theory "mha" solves k = H, and "iha" with P = H pseudo-heads k = H^2. Composition and polynomial filters have
studies of their own, relation_composition and polynomial_filters.

example: python -m research.experiments.ladder --tasks offsets --seeds 0 1
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import fmean

from common.command_io import run_cli
from research.experiments.options import study_parser


TASKS = ("offsets", "lookups")
NUMBERS = (2, 4, 8)
APART = {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}
# Variant -> its kind, heads and pseudo-heads, and other fields of the config. The last three are controls of the
# distance between tokens: "iha" with P pseudo-heads puts them P positions apart, unless its positions are "shared".
VARIANTS: dict[str, tuple[str, int, int, dict]] = {
    **{f"mha {heads}": ("mha", heads, 1, {}) for heads in (2, 4, 8)},
    **{f"iha 2 x {pseudo}": ("iha", 2, pseudo, {}) for pseudo in (2, 4)},
    "dcmha 2": ("dcmha", 2, 1, {}),
    **{f"mha {heads} apart": ("mha", heads, 1, {"rope_parameters": APART}) for heads in (2, 4)},
    "iha 2 x 2 shared": ("iha", 2, 2, {"pseudo_positions": "shared"}),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_parser(__doc__, "ladder", 6)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import cross_entropy, pad

from common import plots
from common.command_io import sole_writer
from modeling_iha import IHAForCausalLM
from research.experiments.language_models import config_of, sized
from research.experiments.protocol import start_like, tune
from research.experiments.study import (
    begin,
    correct_by_holm,
    differences,
    interval,
    points,
    rise_and_fall,
    run_once,
    seeded,
    train,
    write,
)


SIZE = sized(width=32, ffn=96, layers=1, heads=2, tokens=32)
KEYS, VALUES = 16, 8
DISTANCES = (1, 2, 3, 5, 7, 9, 12, 15)
TUNING_SEEDS, FIRST_RATE = [1000, 1001], 8e-3
STEPS, ROWS, TEST_ROWS = 800, 32, 512
IGNORED = -100  # a target that is not asked for, as in PyTorch's cross entropy


def draw(task: str, k: int, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw examples.

    Returns:
        the words of each token, int64 [rows, tokens, words], -1 for none, and the targets, int64 [rows, tokens,
        answers], IGNORED for what is not asked.
    """

    def orders(*sizes: int) -> torch.Tensor:
        return torch.rand(rows, *sizes, generator=generator).argsort(dim=-1)

    if task == "offsets":
        symbols = torch.randint(VALUES, (rows, 32), generator=generator)
        behind = [pad(symbols, (distance, 0), value=IGNORED)[:, :32] for distance in DISTANCES[:k]]
        return symbols.unsqueeze(-1), torch.stack(behind, dim=-1)
    keys, values = orders(KEYS), torch.randint(VALUES, (rows, KEYS), generator=generator)
    facts = torch.stack([keys, KEYS + values.gather(1, keys)], dim=-1)
    asked = orders(KEYS, KEYS)[..., :k]
    questions = KEYS + VALUES + torch.arange(k) * KEYS + asked
    words = [pad(part, (0, max(2, k) - part.shape[2]), value=-1) for part in (facts, questions)]
    answers = values.gather(1, asked.flatten(1)).view_as(asked)
    return torch.cat(words, dim=1), pad(answers, (0, 0, KEYS, 0), value=IGNORED)


class Model(nn.Module):
    """Read tokens that are sums of words, and give `answers` classifications of VALUES classes at each token."""

    def __init__(self, variant: str, task: str, k: int):
        super().__init__()
        kind, heads, pseudo_heads, fields = VARIANTS[variant]
        self.answers = k
        words = KEYS + VALUES + k * KEYS if task == "lookups" else VALUES
        config = config_of(
            SIZE,
            attention_kinds=kind,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_pseudo_heads=pseudo_heads,
            vocab_size=max(words, k * VALUES),
            tie_word_embeddings=False,
            attn_implementation="eager",  # PyTorch's SDPA has no batching rule for several models at once
            **fields,
        )
        self.model = IHAForCausalLM(config)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits, [rows, tokens, answers, VALUES], for words int64 [rows, tokens, words]; -1 is no word."""
        vectors = self.model.model.embed_tokens(words.clamp(min=0)) * (words >= 0).unsqueeze(-1)
        states = self.model.model(inputs_embeds=vectors.sum(dim=2), use_cache=False).last_hidden_state
        return self.model.lm_head(states)[..., : self.answers * VALUES].unflatten(-1, (self.answers, VALUES))


def learned(variant: str, task: str, k: int, rate: float, seeds: list[int]) -> dict:
    """Train a model for each seed, and return their shares of right answers in new examples, and their parameters."""
    models = seeded(seeds, lambda: Model(variant, task, k))
    for model, base in zip(models, seeded(seeds, lambda: Model("mha 2", task, k))):
        start_like(model, base)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def examples(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
        words, targets = zip(*(draw(task, k, rows, generator) for generator in generators))
        return torch.stack(words), torch.stack(targets)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)

    outputs = train(models, examples, loss, STEPS, rate, rise_and_fall)
    words, targets = examples(TEST_ROWS)
    right, asked = outputs(words).argmax(dim=-1) == targets, targets != IGNORED
    shares = (right & asked).flatten(1).sum(dim=1) / asked.flatten(1).sum(dim=1)
    print(f"{task}, k = {k}, {variant}, rate {rate:g}: {shares.mean():.3f} right", flush=True)
    return {"right": shares.tolist(), "parameters": sum(weight.numel() for weight in models[0].parameters())}


def plot(table: dict) -> Figure:
    """Plot for each task the share of right answers by k."""
    tasks, variants, counts = (
        list(dict.fromkeys(row[key] for row in table["rows"])) for key in ("task", "variant", "k")
    )
    right = {(row["task"], row["variant"], row["k"]): row["right"] for row in table["rows"]}
    most = max(counts)
    best = max((right[tasks[0], variant, most]["mean"], variant) for variant in variants)
    message = (
        f"No variant learns {most} patterns at once: {best[1]} comes closest, with {best[0]:.0%} of the answers right"
    )
    if best[0] > 0.99:
        message = f"{best[1]} learns {most} patterns at once"
    figure, all_axes = plots.panels(message, len(tasks), height=1.2 + 0.38 * len(variants))
    for axes, task in zip(all_axes, tasks):
        series = {
            f"{k} patterns at once": points([right.get((task, variant, k)) for variant in variants]) for k in counts
        }
        plots.dots(axes, variants, series)
        axes.axvline(1 / VALUES, color="black", linewidth=0.8, linestyle="--", label="chance")
        axes.set(title=task, xlabel="share of right answers, 95% interval (higher is better)", xlim=(0, 1.02))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args)
    rows = []
    setting = {**SIZE, "steps": STEPS, "batch": ROWS}

    def run(task: str, variant: str, k: int, rate: float, seeds: list[int]) -> dict:
        path = args.output / f"{task}-{variant.replace(' ', '_')}-{k}-{rate:g}-{'_'.join(map(str, seeds))}.json"
        return run_once(path, partial(learned, variant, task, k, rate, seeds), setting)

    with sole_writer(args.output):
        for task, k, variant in product(args.tasks, NUMBERS, VARIANTS):

            def wrong(rate: float, _: float) -> float:
                return 1 - fmean(run(task, variant, k, rate, TUNING_SEEDS)["right"])

            rate, _, tried = tune(wrong, mixes=False, first_rate=FIRST_RATE)
            record = run(task, variant, k, rate, args.seeds)
            row = {"task": task, "k": k, "variant": variant, "parameters": record["parameters"], "rate": rate}
            row |= {"tried": [[rate, loss] for rate, _, loss in tried], "right": interval(record["right"])}
            if variant == "mha 2":  # the first
                base = record["right"]
            else:
                row["minus_mha_2"] = differences(record["right"], base)
            rows.append(row)
    correct_by_holm([row["minus_mha_2"] for row in rows if "minus_mha_2" in row])
    write(args, plot, **setting, seeds=args.seeds, rows=rows)


if __name__ == "__main__":
    run_cli(main)
