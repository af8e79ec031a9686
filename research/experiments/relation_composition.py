"""Train one layer of each attention kind to compose a relation with itself (IHA, Appendix D).

"Interleaved Head Attention" reads a random boolean m x m matrix R as a row of m^2 tokens. For each entry (i, j) the
model answers if a path of two steps ("binary", R o R) or of three ("ternary", R o R o R) leads from i to j. The paper
claims that one layer of IHA, with H = P = 8, answers more entries correctly than 2-simplicial attention, by up to 4.7
points on the binary and 3.3 on the ternary task, and that MHA comes last. It trains on 40,000 examples, with 5,000
for validation and 5,000 for the test, at the rates 1e-3 and 1e-4, and stops 10 epochs after the best one. All this is
the same here, except that a run has at most `--epochs` epochs.

The paper does not say which entries see which, but an answer needs entries on both sides of its own: here each sees
all, and so do the pseudo-heads of a token. It also leaves open what follows, chosen before the runs: width 128, an FFN
of two matrices and four times that width, learned embeddings of the entry, its row and its column, no RoPE, batches
of 32 examples, Adam at a constant rate, no dropout, and the test at the epoch of the lowest validation loss. Each
batch holds one m, so no row is padded. The kinds start from the weights that they share with "mha" and read the same
batches. Their parameters differ by 1%, those of "simplicial" by 17%.

The smallest difference worth having is one point of accuracy. By default a seed takes about an hour of one core;
"simplicial" alone takes another 3.6 hours, and is left out.

example: python -m research.experiments.relation_composition --tasks binary --kinds mha iha --epochs 100
"""

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import product

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from iha import plots
from iha.errors import run_cli
from iha.files import sole_writer
from modeling_iha import IHAConfig, IHAModel
from modeling_iha.virtual_masks import virtual_tokens
from research.experiments.options import study_parser
from research.experiments.protocol import start_like
from research.experiments.study import begin, correct_by_holm, differences, interval, points, run_once, write


# Task -> the steps of a path, the smallest and the largest m, and the probability of an entry.
TASKS = {"ternary": (3, 5, 8, 0.264), "binary": (2, 6, 10, 0.325)}
KINDS = ("mha", "iha", "paired_heads", "talking_heads", "simplicial")
SIZE = {"examples": 40_000, "held_out": 5_000, "width": 128, "heads": 8, "batch": 32, "patience": 10}
EFFECT = 0.01  # share of entries
# The entries of relations of one m, int64 [examples, m^2], and those of what they compose to, float32.
Group = tuple[torch.Tensor, torch.Tensor]


def draw(task: str, count: int, generator: torch.Generator) -> list[Group]:
    """Draw random relations, one group for each m."""
    steps, smallest, largest, probability = TASKS[task]
    counts = torch.randint(smallest, largest + 1, (count,), generator=generator).bincount(minlength=largest + 1)
    groups = []
    for m in range(smallest, largest + 1):
        relations = (torch.rand(int(counts[m]), m, m, generator=generator) < probability).float()
        composed = relations
        for _ in range(steps - 1):
            composed = (composed @ relations).clamp(max=1)
        groups.append((relations.long().flatten(1), composed.flatten(1)))
    return groups


def batches(groups: list[Group], generator: torch.Generator) -> list[Group]:
    """Return an epoch of batches in random order, each of random examples of one m."""
    found = []
    for entries, targets in groups:
        for chosen in torch.randperm(len(entries), generator=generator).split(SIZE["batch"]):
            found.append((entries[chosen], targets[chosen]))
    return [found[index] for index in torch.randperm(len(found), generator=generator)]


class RelationModel(nn.Module):
    """Answer each entry of a relation by one layer of a kind in which every entry sees every entry."""

    def __init__(self, kind: str):
        super().__init__()
        width, heads = SIZE["width"], SIZE["heads"]
        self.config = IHAConfig(
            attention_kinds=kind,
            num_hidden_layers=1,
            hidden_size=width,
            intermediate_size=4 * width,
            gated_mlp=False,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_pseudo_heads=heads,
            no_rope_layers=[0],
            initializer_range=width**-0.5,
            vocab_size=1,  # unused, as the model is given embeddings
            bos_token_id=None,
            eos_token_id=None,
        )
        self.layer = IHAModel(self.config)
        largest = max(largest for _, _, largest, _ in TASKS.values())
        self.entry, self.row, self.column = (nn.Embedding(count, width) for count in (2, largest, largest))
        self.readout = nn.Linear(width, 1)

    def forward(self, entries: torch.Tensor) -> torch.Tensor:
        """Return logits [examples, m^2] of entries [examples, m^2]."""
        place = torch.arange(math.isqrt(entries.shape[1]))
        places = self.row(place)[:, None] + self.column(place)  # [m, m, width]
        length = entries.shape[1] * virtual_tokens(self.config)
        masks = {"full_attention": torch.ones(1, 1, length, length, dtype=torch.bool)}
        states = self.entry(entries) + places.flatten(0, 1)
        return self.readout(self.layer(inputs_embeds=states, attention_mask=masks).last_hidden_state).squeeze(-1)


def new_model(kind: str, seed: int) -> RelationModel:
    """Build a kind's model of a seed, with the weights that it shares with the model of "mha"."""
    models = []
    for each in ("mha", kind):
        torch.manual_seed(seed)
        models.append(RelationModel(each))
    base, model = models
    start_like(model, base)
    return model


@torch.no_grad()
def score(model: RelationModel, groups: list[Group]) -> tuple[float, float]:
    """Return the mean loss of all entries, and the share of right answers."""
    loss = right = count = 0.0
    for entries, targets in groups:
        for inputs, answers in zip(entries.split(SIZE["batch"]), targets.split(SIZE["batch"])):
            logits = model(inputs)
            loss += binary_cross_entropy_with_logits(logits, answers, reduction="sum").item()
            right += ((logits > 0) == (answers > 0)).sum().item()
            count += answers.numel()
    return loss / count, right / count


def train(task: str, rate: float, kind: str, seed: int, epochs: int) -> dict:
    """Train a model, and test it at the epoch of the lowest validation loss.

    The curve has the epoch, the loss in training, and the loss and the share of right answers in validation. `seconds`
    are those that this process took on the CPU for the training, without evaluations.
    """
    generator = torch.Generator().manual_seed(seed)
    training, validation, test = (draw(task, SIZE[split], generator) for split in ("examples", "held_out", "held_out"))
    model = new_model(kind, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    curve, seconds, best, weights = [], 0.0, None, {}
    for epoch in range(1, epochs + 1):
        losses, start = [], time.process_time()
        for entries, targets in batches(training, generator):
            loss = binary_cross_entropy_with_logits(model(entries), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seconds += time.process_time() - start
        curve.append([epoch, sum(losses) / len(losses), *score(model, validation)])
        print(f"{task}, {kind}, rate {rate:g}, seed {seed}: epoch {epoch}, {curve[-1][3]:.4f} right", flush=True)
        if best is None or curve[-1][2] < best[2]:
            best, weights = curve[-1], deepcopy(model.state_dict())
        if epoch - best[0] >= SIZE["patience"]:
            break
    model.load_state_dict(weights)
    parameters = sum(weight.numel() for weight in model.parameters())
    return {"test": score(model, test)[1], "best": best, "parameters": parameters, "seconds": seconds, "curve": curve}


def summary(task: str, rate: float, runs: dict[str, list[dict]]) -> list[dict]:
    """Return a row for each kind, with the differences from the first one on the same seeds."""
    rows = []
    base = None
    for kind, of_kind in runs.items():
        right = [run["test"] for run in of_kind]
        row = {"task": task, "rate": rate, "kind": kind, "parameters": of_kind[0]["parameters"]}
        row["right"] = interval(right)
        row["seconds"] = interval([run["seconds"] for run in of_kind])
        row["best_epochs"] = [run["best"][0] for run in of_kind]
        if base is None:
            base = right
        else:
            row["minus_base"] = differences(right, base)
        rows.append(row)
    return rows


def plot(table: dict) -> Figure:
    """Plot the share of right answers in validation by epoch, and in the test."""
    cells = list(dict.fromkeys((row["task"], row["rate"]) for row in table["rows"]))
    kinds = list(dict.fromkeys(row["kind"] for row in table["rows"]))
    message = f"Entries of composed relations answered correctly, mean of {len(table['seeds'])} seeds"
    figure, (*by_epoch, by_kind) = plots.panels(message, len(cells) + 1, 2, 4)
    for axes, (task, rate) in zip(by_epoch, cells):
        for kind in kinds:
            runs = [run for run in table["runs"] if (run["task"], run["rate"], run["kind"]) == (task, rate, kind)]
            shares = [[point[3] for point in run["curve"]] for run in runs]
            means = [sum(at) / len(at) for at in zip(*shares)]
            axes.plot(range(1, len(means) + 1), means, label=kind)
        axes.set(title=f"{task}, rate {rate:g}", xlabel="epoch", ylabel="right in validation (higher is better)")
    right = {(row["task"], row["rate"], row["kind"]): row["right"] for row in table["rows"]}
    shown = {kind: points([right[(*cell, kind)] for cell in cells]) for kind in kinds}
    plots.dots(by_kind, [f"{task}\n{rate:g}" for task, rate in cells], shown)
    by_kind.set(xlabel="right in the test, 95% interval where there are seeds")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    parser = study_parser(__doc__, "relation_composition", seeds=1)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["ternary"], metavar="TASK")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS[:-1]), metavar="KIND")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3], help="of Adam (0.001)")
    parser.add_argument("--epochs", type=int, default=8, help="of a run at most (8)")
    args = parser.parse_args(argv)
    begin(args)
    setting = {**SIZE, "epochs": args.epochs}
    runs = []
    with sole_writer(args.output):
        for seed, task, rate, kind in product(args.seeds, args.tasks, args.rates, args.kinds):
            path = args.output / f"{task}-{kind}-{rate:g}-{seed}.json"
            run = run_once(path, partial(train, task, rate, kind, seed, args.epochs), setting)
            runs.append({"task": task, "rate": rate, "kind": kind, "seed": seed, **run})
    rows = []
    for cell in product(args.tasks, args.rates):
        of_cell = {
            kind: [run for run in runs if (run["task"], run["rate"], run["kind"]) == (*cell, kind)]
            for kind in args.kinds
        }
        rows += summary(*cell, of_cell)
    correct_by_holm([row["minus_base"] for row in rows if "minus_base" in row])
    write(args, plot, **setting, effect=EFFECT, seeds=args.seeds, rows=rows, runs=runs)


if __name__ == "__main__":
    run_cli(main)
