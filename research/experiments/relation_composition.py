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

The smallest difference worth having is one point of accuracy. By default a seed takes 50 minutes of one core, most of
them for "iha". "simplicial" takes about two hours more, and is left out.

example: python -m research.experiments.relation_composition --task binary --kinds mha iha --epochs 100
"""

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from statistics import fmean

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from iha import plots
from iha.errors import UserError, run_cli
from iha.files import sole_writer
from modeling_iha import IHAModel
from modeling_iha.modeling_iha import mask_name
from research.experiments.language_models import build, sized
from research.experiments.options import study_parser
from research.experiments.protocol import start_like
from research.experiments.study import begin, correct_by_holm, differences, interval, run_once, write


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


def from_degrees(task: str) -> float:
    """Return the share of right answers of a model that knows m and counts row i and column j, but follows no path."""
    right = 0.0
    count = 0.0
    for entries, targets in draw(task, SIZE["examples"], torch.Generator().manual_seed(0)):
        m = math.isqrt(entries.shape[1])
        relations = entries.unflatten(1, (m, m))
        degrees = relations.sum(dim=2)[:, :, None] * (m + 1) + relations.sum(dim=1)[:, None]
        examples = degrees.flatten().bincount()
        paths = degrees.flatten().bincount(targets.flatten())
        right += torch.maximum(paths, examples - paths).sum().item()
        count += targets.numel()
    return right / count


class RelationModel(nn.Module):
    """Answer each entry of a relation by one layer of a kind in which every entry sees every entry."""

    def __init__(self, kind: str):
        super().__init__()
        width = SIZE["width"]
        largest = max(largest for _, _, largest, _ in TASKS.values())
        size = sized(width=width, ffn=4 * width, layers=1, heads=SIZE["heads"], tokens=largest**2)
        fields = {"gated_mlp": False, "no_rope_layers": [0], "initializer_range": width**-0.5, "vocab_size": 1}
        self.layer = IHAModel(build(size, attention_kinds=kind, **fields))
        self.entry, self.row, self.column = (nn.Embedding(count, width) for count in (2, largest, largest))
        self.readout = nn.Linear(width, 1)

    def forward(self, entries: torch.Tensor) -> torch.Tensor:
        """Return logits [examples, m^2] of entries [examples, m^2]."""
        place = torch.arange(math.isqrt(entries.shape[1]))
        places = self.row(place)[:, None] + self.column(place)  # [m, m, width]
        attention = self.layer.layers[0].self_attn
        length = entries.shape[1] * attention.num_pseudo_heads
        masks = {mask_name(attention): torch.ones(1, 1, length, length, dtype=torch.bool)}
        states = self.entry(entries) + places.flatten(0, 1)
        output = self.layer(inputs_embeds=states, attention_mask=masks, use_cache=False).last_hidden_state
        return self.readout(output).squeeze(-1)


def new_model(kind: str, seed: int) -> RelationModel:
    """Build a kind's model of a seed, with the weights that it shares with the model of "mha"."""
    torch.manual_seed(seed)
    base = RelationModel("mha")
    torch.manual_seed(seed)
    model = RelationModel(kind)
    start_like(model, base)
    return model


@torch.no_grad()
def score(model: RelationModel, groups: list[Group]) -> tuple[float, float]:
    """Return the mean loss of all entries, and the share of right answers."""
    loss = 0.0
    right = 0.0
    count = 0.0
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
    curve = []
    seconds = 0.0
    lowest = math.inf
    best = 1
    weights = model.state_dict()
    for epoch in range(1, epochs + 1):
        losses = []
        start = time.process_time()
        for entries, targets in batches(training, generator):
            loss = binary_cross_entropy_with_logits(model(entries), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seconds += time.process_time() - start
        held_out, right = score(model, validation)
        curve.append([epoch, fmean(losses), held_out, right])
        print(f"{task}, {kind}, rate {rate:g}, seed {seed}: epoch {epoch}, {right:.4f} right", flush=True)
        if held_out < lowest:
            lowest = held_out
            best = epoch
            weights = deepcopy(model.state_dict())
        if epoch - best >= SIZE["patience"]:
            break
    model.load_state_dict(weights)
    record = {"test": score(model, test)[1], "best": curve[best - 1], "seconds": seconds, "curve": curve}
    return {**record, "parameters": sum(weight.numel() for weight in model.parameters())}


def summary(kind: str, runs: dict[str, list[dict]]) -> dict:
    """Return a row of the table, with the difference from the first kind on the same seeds."""
    right = {each: [run["test"] for run in of_kind] for each, of_kind in runs.items()}
    row = {
        "kind": kind,
        "right": interval(right[kind]),
        "best_epoch": interval([run["best"][0] for run in runs[kind]]),
        "parameters": runs[kind][0]["parameters"],
        "seconds": interval([run["seconds"] for run in runs[kind]]),
    }
    base = next(iter(runs))
    if kind != base:
        row["minus_base"] = differences(right[kind], right[base])
    return row


def plot(table: dict) -> Figure:
    """Plot the share of right answers in validation by epoch."""
    message = f"Right entries of {table['task']} relations at the rate {table['rate']:g}, seeds: {len(table['seeds'])}"
    figure, (axes,) = plots.panels(message, height=4)
    for place, (kind, curves) in enumerate(table["runs"].items()):
        for seed, curve in enumerate(curves):  # a line each, because they may stop at different epochs
            epochs = [point[0] for point in curve]
            right = [point[3] for point in curve]
            axes.plot(epochs, right, f"C{place}", marker=".", label=kind if seed == 0 else None)
    axes.axhline(table["from_degrees"], color="black", linewidth=0.8, label="counts of row and column alone")
    axes.set(xlabel="epoch", ylabel="right in validation (higher is better)")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    parser = study_parser(__doc__, "relation_composition", seeds=1)
    parser.add_argument("--task", choices=TASKS, default="ternary", help="default: ternary")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:-1], metavar="KIND")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of Adam (default: 0.001)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of a run at most (default: 8)")
    args = parser.parse_args(argv)
    args.study += f"_{args.task}" * (args.task != "ternary") + f"_{args.rate:g}" * (args.rate != 1e-3)
    if args.epochs < 1:
        raise UserError(f"--epochs {args.epochs}: expected at least 1.")
    begin(args)
    setting = {**SIZE, "epochs": args.epochs}
    runs = {kind: [] for kind in args.kinds}
    with sole_writer(args.output):
        for seed, kind in product(args.seeds, args.kinds):
            path = args.output / f"{args.task}-{kind}-{args.rate:g}-{seed}.json"
            compute = partial(train, args.task, args.rate, kind, seed, args.epochs)
            runs[kind].append(run_once(path, compute, setting))
    rows = [summary(kind, runs) for kind in runs]
    correct_by_holm([row["minus_base"] for row in rows if "minus_base" in row])
    curves = {kind: [run["curve"] for run in of_kind] for kind, of_kind in runs.items()}
    more = {
        "task": args.task,
        "rate": args.rate,
        "seeds": args.seeds,
        "effect": EFFECT,
        "from_degrees": from_degrees(args.task),
    }
    write(args, plot, **setting, **more, rows=rows, runs=curves)


if __name__ == "__main__":
    run_cli(main)
