"""Compare how well attention kinds find the pairs that two or three steps of a relation connect.

"Interleaved Head Attention", Appendix D. A random boolean m x m matrix R is read as m^2 tokens in one sequence;
at entry (i, j) the model says whether R o R, or R o R o R, holds there. The paper's model is one layer that is not
causal, with H = P = 8, 40,000 training examples, learning rates 1e-3 and 1e-4, and a patience of 10 epochs. The paper
claims that IHA has the highest test accuracy on both tasks at both rates, by up to 4.7 (binary) and 3.3 points
(ternary) over 2-simplicial attention, which comes second (Figure 3).

The paper does not give width, FFN, positions, batch, optimiser, seeds and the longest run. Here: a width of 16 per
head, a two-matrix FFN of 4 widths, learned embeddings of an entry's row and column and no RoPE, batches of 64, AdamW
without weight decay, and the epoch with the lowest validation loss. A seed draws the data and their order, the same
for every kind, and the weights, which differ between kinds.

The default is a small size for a CPU: smaller matrices, fewer heads and examples, rates of 4e-3 and 1e-3. `--full`
is the published size.

example: python -m research.experiments.relation_composition --full --device cuda --seeds 0 1 2 3 4
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.command_io import run_cli, sole_writer
from research.experiments.options import study_parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return study_parser(__doc__, "relation_composition", seeds=5, has_sizes=True).parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure
from torch import nn

from common import plots
from modeling_iha import IHAConfig, IHAModel
from modeling_iha.virtual_core import virtual_tokens
from research.experiments.study import begin, correct_by_holm, differences, interval, points, run_once, write


# A task is how often R is applied, the smallest and the largest m, and the probability of an entry. The probabilities
# balance the labels, as the paper's do.
FULL = {
    "tasks": {"binary": (2, 6, 10, 0.325), "ternary": (3, 5, 8, 0.264)},
    "heads": 8,
    "head_dim": 16,
    "train": 40000,
    "test": 5000,
    "epochs": 1000,
    "rates": [1e-3, 1e-4],
}
SMALL = {
    "tasks": {"binary": (2, 4, 5, 0.4), "ternary": (3, 4, 5, 0.34)},
    "heads": 2,
    "head_dim": 8,
    "train": 2500,
    "test": 500,
    "epochs": 30,
    "rates": [4e-3, 1e-3],
}
KINDS = ("mha", "iha", "simplicial")
BATCH, PATIENCE = 64, 10


class Examples(NamedTuple):
    """Hold relations as sequences, padded on the right to the largest m^2: int64 and bool, [examples, length]."""

    entries: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    is_real: torch.Tensor
    targets: torch.Tensor

    def batches(self, order: torch.Tensor) -> Iterator["Examples"]:
        """Yield batches of the examples in `order`, padded to their own longest sequence."""
        for chosen in order.split(BATCH):
            length = int(self.is_real[chosen].sum(dim=1).max())
            yield Examples(*(part[chosen, :length] for part in self))


def draw(task: tuple, count: int, generator: torch.Generator) -> Examples:
    """Draw `count` random relations and what they compose to."""
    steps, smallest, largest, probability = task
    size = torch.randint(smallest, largest + 1, (count, 1, 1), generator=generator)
    place = torch.arange(largest)
    is_real = (place[:, None] < size) & (place < size)
    relation = (torch.rand(count, largest, largest, generator=generator) < probability) & is_real
    composed = relation.float()
    for _ in range(steps - 1):
        composed = (composed @ relation.float() > 0).float()
    rows, columns = (index.expand(count, -1, -1) for index in torch.meshgrid(place, place, indexing="ij"))
    order = is_real.flatten(1).logical_not().sort(dim=1, stable=True).indices
    parts = (relation.long(), rows, columns, is_real, composed.bool())
    return Examples(*(part.flatten(1).gather(1, order) for part in parts))


class RelationModel(nn.Module):
    """Compute a logit for every entry of a relation by one layer in which every entry sees every entry."""

    def __init__(self, kind: str, heads: int, head_dim: int, largest: int):
        super().__init__()
        width = heads * head_dim
        config = IHAConfig(
            attention_kinds=kind,
            num_hidden_layers=1,
            hidden_size=width,
            intermediate_size=4 * width,
            gated_mlp=False,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_pseudo_heads=heads,
            pseudo_positions="shared",
            initializer_range=width**-0.5,
            vocab_size=1,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model = IHAModel(config)
        self.entry, self.row, self.column = (nn.Embedding(size, width) for size in (2, largest, largest))
        self.head = nn.Linear(width, 1)

    def forward(self, batch: Examples) -> torch.Tensor:
        """Return logits [batch, length]."""
        states = self.entry(batch.entries) + self.row(batch.rows) + self.column(batch.columns)
        visible = batch.is_real.repeat_interleave(virtual_tokens(self.model.config), dim=1)
        mask = visible[:, None, None, :].expand(-1, 1, visible.shape[1], -1)
        positions = torch.zeros_like(batch.entries[:1])  # RoPE turns nothing
        states = self.model(
            inputs_embeds=states, attention_mask={"full_attention": mask}, position_ids=positions, use_cache=False
        )
        return self.head(states.last_hidden_state).squeeze(-1)


def errors(model: RelationModel, batch: Examples) -> tuple[torch.Tensor, int]:
    """Return the mean cross-entropy of the real entries, and how many are right."""
    logits, targets = model(batch)[batch.is_real], batch.targets[batch.is_real]
    loss = nn.functional.binary_cross_entropy_with_logits(logits, targets.float())
    return loss, int(((logits > 0) == targets).sum())


@torch.no_grad()
def score(model: RelationModel, examples: Examples) -> tuple[float, float]:
    """Return loss and accuracy of all entries."""
    loss, right, entries = 0.0, 0, int(examples.is_real.sum())
    for batch in examples.batches(torch.arange(len(examples.entries))):
        mean, correct = errors(model, batch)
        loss, right = loss + mean.item() * int(batch.is_real.sum()), right + correct
    return loss / entries, right / entries


def train(task: tuple, size: dict, kind: str, rate: float, seed: int, device: str, name: str) -> dict:
    """Train until the validation loss has not fallen for PATIENCE epochs.

    Returns:
        the curves, and the figures of the best epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = (size["train"], size["test"], size["test"])
    splits = [Examples(*(part.to(device) for part in draw(task, count, generator))) for count in counts]
    torch.manual_seed(seed)
    model = RelationModel(kind, size["heads"], size["head_dim"], largest=task[2]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    curves, best, start = [], None, time.monotonic()
    for epoch in range(1, size["epochs"] + 1):
        right = 0
        for batch in splits[0].batches(torch.randperm(size["train"], generator=generator)):
            loss, correct = errors(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += correct
        (validation_loss, validation), (_, test) = (score(model, split) for split in splits[1:])
        curves.append([epoch, right / int(splits[0].is_real.sum()), validation, test])
        if best is None or validation_loss < best["validation_loss"]:
            best = {"epoch": epoch, "validation_loss": validation_loss, "validation": validation, "test": test}
        print(
            f"{name}: epoch {epoch}, accuracy {curves[-1][1]:.4f} in training, {validation:.4f} in validation",
            flush=True,
        )
        if epoch - best["epoch"] >= PATIENCE:
            break
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    return {**best, "parameters": parameters, "seconds": round(time.monotonic() - start), "curves": curves}


def one_run(size: dict, task: str, kind: str, rate: float, seed: int, output: Path, device: str) -> dict:
    """Return a run, from its file where it is done."""
    name = f"{task}-{kind}-{rate:g}-{seed}"
    setting = {**size, "tasks": [task, *size["tasks"][task]], "rates": [rate], "device": device, "batch": BATCH}
    training = partial(train, size["tasks"][task], size, kind, rate, seed, device, name)
    run = run_once(output / f"{name}.json", training, setting)
    return {"task": task, "rate": rate, "kind": kind, "seed": seed, **run}


def summary(task: str, rate: float, runs: list[dict]) -> list[dict]:
    """Return the rows of a task and rate: test accuracies, and by how much IHA's is higher on the same seeds."""
    rows = []
    for kind in KINDS:
        chosen = [run for run in runs if (run["task"], run["rate"], run["kind"]) == (task, rate, kind)]
        row = {"task": task, "rate": rate, "kind": kind, "parameters": chosen[0]["parameters"]}
        rows.append({**row, "accuracy": interval([run["test"] for run in chosen])})
    (iha,) = (row["accuracy"]["values"] for row in rows if row["kind"] == "iha")
    for row in rows:
        if row["kind"] != "iha":
            row["iha_is_higher_by"] = differences(iha, row["accuracy"]["values"])
    return rows


def plot(table: dict) -> Figure:
    """Plot test accuracies with their intervals (Figure 3)."""
    rows = table["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    cells = list(dict.fromkeys((row["task"], row["rate"]) for row in rows))
    accuracy = {(row["task"], row["rate"], row["kind"]): row["accuracy"] for row in rows}
    best = [max(kinds, key=lambda kind, cell=cell: accuracy[*cell, kind]["mean"]) for cell in cells]
    counts = ", ".join(f"{kind} in {best.count(kind)}" for kind in kinds)
    message = f"Highest mean accuracy in {len(cells)} settings: {counts}"
    names = [f"{task}, rate {rate:g}" for task, rate in cells]
    series = {kind: points([accuracy[*cell, kind] for cell in cells]) for kind in kinds}
    label = "test accuracy, 95% interval (higher is better)"
    return plots.dot_panels(message, names, {label: series})[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args)
    size = FULL if args.full else SMALL

    # By seed, so that a study that is stopped has compared all kinds on the seeds it has.
    planned = itertools.product(args.seeds, size["tasks"], size["rates"], KINDS)
    with sole_writer(args.output):
        runs = [one_run(size, task, kind, rate, seed, args.output, args.device) for seed, task, rate, kind in planned]
    rows = [row for task in size["tasks"] for rate in size["rates"] for row in summary(task, rate, runs)]
    correct_by_holm([row["iha_is_higher_by"] for row in rows if "iha_is_higher_by" in row])
    write(args, plot, **size, batch=BATCH, patience=PATIENCE, rows=rows, runs=runs)


if __name__ == "__main__":
    run_cli(main)
