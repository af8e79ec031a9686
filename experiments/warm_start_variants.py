"""Compare the ways to interleave a pretrained model's heads by what they learn in the same few steps.

SmolLM2-135M-Instruct learns to apply a relation once, twice or three times, the composition of "Interleaved Head
Attention", Appendix D, in words: "Who is the boss of the boss of Ann?" after five shuffled facts, and the answer
"Ann's boss is Tom. Tom's boss is Kim." It is fine-tuned as it is ("mha") and as IHA in these ways, "iha_2" being the
one that the others differ from:

- iha_2, iha_4, iha_9: P = 2, 4, 9, the conversion's start "balanced", the mixing at 40 times the backbone's rate;
- zero: without value offsets, so that the pseudo-heads start equal;
- noise: as "zero", and normal noise of 0.02 on every entry of mixing and collapse, so that the start is not exact;
- x1, x10, x200: the mixing at 1, 10, 200 times the backbone's rate;
- mixing_only: the backbone's rate is too low to change a weight, and that of the mixing as in iha_2;
- mha_x2: a control, "mha" at twice the rate: is there more in the mixing than a higher rate?

A seed draws the rows of training and test, the same for all variants. An answer is right when greedy decoding gives
these sentences and nothing else. `--full` is 20 million tokens, and has never run. The seeds come one after another.
The table also has how far each entry of the mixing went, and which pseudo-heads the collapse and the attention use.

example: python -m experiments.warm_start_variants --seeds 0 1 2
"""

import argparse
import itertools
import json
import random
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from common.command_io import new_directory, read_json, run_cli, sole_writer, whole_file, write_json
from experiments.options import study_parser


RATE, NOISE = 5e-5, 0.02


class Variant(NamedTuple):
    """Hold one way to start and train.

    Attributes:
        pseudo_heads: P; `None` leaves the model as it is.
        start: "balanced", "zero" or "noise", see above.
        multiplier: the learning rate of the mixing, in units of RATE.
        rate: the learning rate of the backbone.

    The mixing learns at `mixing_scale` times the backbone's rate.
    """

    pseudo_heads: int | None = 2
    start: str = "balanced"
    multiplier: float = 40
    rate: float = RATE

    @property
    def mixing_scale(self) -> float:
        """Return the learning rate of the mixing, in units of the backbone's."""
        return RATE * self.multiplier / self.rate


VARIANTS = {
    "mha": Variant(pseudo_heads=None),
    "mha_x2": Variant(pseudo_heads=None, rate=2 * RATE),
    "iha_2": Variant(),
    "iha_4": Variant(pseudo_heads=4),
    "mixing_only": Variant(rate=1e-20 * RATE),  # too little to change a float32 weight that is not zero
    "x1": Variant(multiplier=1),
    "x10": Variant(multiplier=10),
    "x200": Variant(multiplier=200),
    "zero": Variant(start="zero"),
    "noise": Variant(start="noise"),
    "iha_9": Variant(pseudo_heads=9),
}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = study_parser(__doc__, "warm_start_variants", seeds=3, has_sizes=True)
    parser.add_argument("--variants", dest="kinds", nargs="+", choices=list(VARIANTS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from datasets import Dataset
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from common import plots
from common.checkpoint_io import load_model, load_tokenizer, smollm2_gguf
from conversion_scripts.convert_llama_to_iha import convert
from experiments.study import begin, correct_by_holm, differences, interval, points, run_once, write
from experiments.warm_start import RECIPE, train
from sft.arguments import read_chat_template
from sft.data import to_messages


SAVE_STEPS = 500
IGNORED_LABEL = -100
MIXING = ("q_mix", "k_mix", "v_mix", "collapse")
SMALL = {"variants": [name for name in VARIANTS if name != "iha_9"], "steps": 16, "batch": 4, "test_rows": 150}
FULL = {"variants": list(VARIANTS), "steps": 4280, "batch": 64, "test_rows": 1500}
TEMPLATE = "sft/chat_templates/smollm2.jinja"

# One token each, at the start of a text and within it.
NAMES = "Ann Bob Tom Kim Sam Max Dan Ben Jim Ray Lee Val Ken Don Ed May".split()
PEOPLE = 5
RELATIONS = (1, 2, 3)


# Rows


def problems(count: int, generator: random.Random, seen: set[str]) -> list[dict]:
    """Draw `count` rows of sft/make_reasoning_data.py's form, as many of each number of relations.

    Their questions are not in `seen`, where they are added. Everybody has one boss, in one circle of PEOPLE.
    """
    rows = []
    while len(rows) < count:
        relations = RELATIONS[len(rows) % len(RELATIONS)]
        people = generator.sample(NAMES, PEOPLE)
        facts = [f"{name}'s boss is {boss}." for name, boss in zip(people, people[1:] + people[:1])]
        steps = " ".join(facts[:relations])
        generator.shuffle(facts)
        question = f"{' '.join(facts)} Who is {'the boss of ' * relations}{people[0]}?"
        if question in seen:
            continue
        seen.add(question)
        turns = [{"from": "user", "value": question}, {"from": "assistant", "value": steps}]
        entry = {"question": question, "answer": people[relations], "relations": relations}
        rows.append({"system": "Go step by step.", "conversations": turns, "entry": entry})
    return rows


def draw(size: dict, seed: int) -> tuple[list[dict], list[dict]]:
    """Draw the rows of training and test."""
    generator, seen = random.Random(seed), set()
    test = problems(size["test_rows"], generator, seen)
    return problems(size["steps"] * size["batch"], generator, seen), test


# Runs


def mixing(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the mixing weights [layers, source head, head, P] and the collapse [layers, H, P] of an "iha" model."""
    layers = [layer.self_attn for layer in model.base_model.layers]
    return {name: torch.stack([layer.get_submodule(name).value().detach() for layer in layers]) for name in MIXING}


def base_model(variant: Variant, output: Path) -> Path:
    """Return the checkpoint that the variant starts from, and make it unless it is there."""
    kind = f"{variant.pseudo_heads}-{variant.start}-{variant.mixing_scale:g}" if variant.pseudo_heads else "mha"
    directory = output / "bases" / kind
    if directory.exists():
        return directory
    model = load_model(smollm2_gguf())
    tokenizer = load_tokenizer(smollm2_gguf(), model.config.vocab_size)
    if variant.pseudo_heads:
        offsets = "balanced" if variant.start == "balanced" else "none"
        scale = variant.mixing_scale
        model = convert(model, variant.pseudo_heads, value_offsets=offsets, mixing_scale=scale)
    if variant.start == "noise":
        generator = torch.Generator().manual_seed(0)
        for layer in model.base_model.layers:
            for name in MIXING:
                weight = layer.self_attn.get_submodule(name).weight.data
                weight += NOISE / scale * torch.randn(weight.shape, generator=generator)
    with new_directory(directory) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return directory


def token_rows(source: Path, vocab_size: int, rows: list[dict]) -> Dataset:
    """Return the rows as the training of `source` sees them."""
    tokenizer = load_tokenizer(source, vocab_size)
    tokenizer.chat_template = read_chat_template(TEMPLATE)
    tokens = []
    for number, row in enumerate(rows, 1):
        messages = to_messages(row, f"row {number}")
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        learned = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        labels = [token if kept else IGNORED_LABEL for token, kept in learned]
        tokens.append({"input_ids": encoded["input_ids"], "labels": labels})
    return Dataset.from_list(tokens)


@torch.inference_mode()
def answers(model: PreTrainedModel, tokens: Dataset, batch_size: int = 20) -> list[tuple[float, bool]]:
    """Return for each row the loss in nats per learned token, and if greedy decoding gives the learned tokens.

    One pass tells, because the tokens before a wrong one are those of the right answer.
    """
    results = []
    for start in range(0, len(tokens), batch_size):
        batch = tokens[start : start + batch_size]
        length = max(map(len, batch["input_ids"]))
        ids, labels = (
            torch.tensor([row + [fill] * (length - len(row)) for row in batch[name]], device=model.device)
            for name, fill in (("input_ids", 0), ("labels", IGNORED_LABEL))
        )
        # Padding stands after all that is learned, where a causal model does not see it.
        with torch.autocast(model.device.type, torch.bfloat16):
            states = model.base_model(ids, use_cache=False).last_hidden_state[:, :-1]
            is_learned = labels[:, 1:] != IGNORED_LABEL
            logits = model.lm_head(states[is_learned]).float()
        targets = labels[:, 1:][is_learned]
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        counts = is_learned.sum(dim=1).tolist()
        for loss, is_right in zip(losses.split(counts), (logits.argmax(-1) == targets).split(counts), strict=True):
            results.append((loss.mean().item(), bool(is_right.all())))
    return results


def by_relations(results: list[tuple[float, bool]], rows: list[dict]) -> dict:
    """Return loss and right answers for each number of composed relations."""
    table = {}
    for relations in RELATIONS:
        chosen = [result for result, row in zip(results, rows) if row["entry"]["relations"] == relations]
        losses, right = zip(*chosen)
        table[str(relations)] = {"loss": fmean(losses), "correct": sum(right), "rows": len(chosen)}
    return table


@torch.inference_mode()
def pseudo_head_use(model: PreTrainedModel, tokens: Dataset) -> dict[str, torch.Tensor]:
    """Return which pseudo-heads each layer uses, [layers, P], on a few rows.

    "collapse" is the share of the collapse in absolute value. "attention" is the share of the attention that the
    collapsed output gives to the keys of each pseudo-head.
    """
    model.set_attn_implementation("eager")
    pseudo_heads = model.config.num_pseudo_heads
    share = mixing(model)["collapse"].abs()
    share = share / share.sum(dim=-1, keepdim=True)
    mass = []
    for ids in tokens["input_ids"][: len(RELATIONS)]:
        output = model(torch.tensor([ids], device=model.device), output_attentions=True, use_cache=False)
        # [layers, H, N P, N P] to [layers, H, N, P queries, P keys]
        patterns = torch.cat(output.attentions).unflatten(3, (-1, pseudo_heads)).sum(dim=3)
        by_query = patterns.unflatten(2, (-1, pseudo_heads)).mean(dim=2)
        mass.append(torch.einsum("lhp,lhpq->lq", share, by_query) / share.shape[1])
    return {"collapse": share.mean(dim=1), "attention": torch.stack(mass).mean(dim=0)}


def measure(variant: Variant, source: Path, base: Path, rows: list[dict], device: str) -> dict:
    """Measure what the model in `source` has learned since `base`.

    For an IHA the result also has the mean distance of each entry of the mixing from its start over the layers, and
    which pseudo-heads the model uses.
    """
    model = load_model(source).to(device)
    tokens = token_rows(source, model.config.vocab_size, rows)
    result = {"test": by_relations(answers(model, tokens), rows)}
    if variant.pseudo_heads:
        start = mixing(load_model(base).to(device))
        moved = {name: (value - start[name]).abs().mean(dim=0) for name, value in mixing(model).items()}
        result["moved"] = {name: value.tolist() for name, value in moved.items()}
        result["use"] = {name: value.tolist() for name, value in pseudo_head_use(model, tokens).items()}
    return result


def run(name: str, seed: int, size: dict, output: Path, device: str) -> dict:
    """Train and measure one variant, without keeping its weights.

    A training that was stopped goes on from its last checkpoint.
    """
    variant, directory = VARIANTS[name], output / f"{name}-{seed}"
    train_rows, test_rows = draw(size, seed)
    data = output / f"train-{seed}.jsonl"
    with whole_file(data) as path:
        path.write_text("".join(json.dumps(row) + "\n" for row in train_rows), encoding="utf-8")
    base = base_model(variant, output)
    setting, begun = {**size, **variant._asdict()}, directory / "setting.json"
    if not begun.exists() or read_json(begun) != setting:
        shutil.rmtree(directory, ignore_errors=True)  # of a run of another setting that was stopped
        directory.mkdir(parents=True)
        write_json(begun, setting)
    train(
        directory,
        model_name_or_path=base,
        dataset_name=data,
        seed=seed,
        learning_rate=variant.rate,
        per_device_train_batch_size=size["batch"],
        max_steps=size["steps"],
        eval_size=0,
        eval_strategy="no",
        eval_on_start=False,
        logging_steps=max(1, size["steps"] // 100),
        save_strategy="steps" if size["steps"] > SAVE_STEPS else "no",
        save_steps=SAVE_STEPS,
        save_total_limit=1,
        use_cpu=device == "cpu",
    )
    curve = read_json(directory / "loss.json")["train"]
    result = {"train": curve, **measure(variant, directory / "final", base, test_rows, device)}
    shutil.rmtree(directory)
    return result


# Results


def mean_of(values: list) -> list | float:
    """Return the mean of nested lists of one shape, entry by entry, to four digits."""
    if isinstance(values[0], list):
        return [mean_of(list(parts)) for parts in zip(*values, strict=True)]
    return float(f"{fmean(values):.4g}")


def share_right(parts: Iterable[dict]) -> float:
    """Return the share of right answers in parts of a seed's test."""
    correct, rows = zip(*((part["correct"], part["rows"]) for part in parts))
    return sum(correct) / sum(rows)


def summary(name: str, runs: dict[tuple[str, int], dict]) -> dict:
    """Return a row of the table.

    It has the held-out loss of all questions, its difference from that of "mha" and "mha_x2" on the same seeds, and
    the accuracy of all answers and by number of relations. All have intervals over the seeds, because the answers of
    one seed depend on one another.
    """
    losses = {key: fmean(part["loss"] for part in run["test"].values()) for key, run in runs.items()}
    own = [run for (variant, _), run in runs.items() if variant == name]
    seeds = [seed for variant, seed in runs if variant == name]
    row = {"variant": name, "seeds": seeds, "loss": interval([losses[name, seed] for seed in seeds])}
    for base in ("mha", "mha_x2"):
        if name not in ("mha", base) and (shared := [seed for seed in seeds if (base, seed) in runs]):
            row[f"minus_{base}"] = differences(*([losses[each, seed] for seed in shared] for each in (name, base)))
    row["accuracy"] = interval([share_right(run["test"].values()) for run in own])
    row["relations"] = {}
    for relations in map(str, RELATIONS):
        parts = [run["test"][relations] for run in own]
        row["relations"][relations] = {
            "loss": interval([part["loss"] for part in parts]),
            "accuracy": interval([share_right([part]) for part in parts]),
        }
    for key in ("moved", "use"):
        if key in own[0]:
            row[key] = {part: mean_of([run[key][part] for run in own]) for part in own[0][key]}
    return row


def plot(table: dict) -> Figure:
    """Plot the losses minus that of "mha", and the accuracy by the number of relations."""
    rows = table["rows"]
    names, compared = [row["variant"] for row in rows], [row.get("minus_mha") for row in rows]
    decided = [row["variant"] for row in rows if row.get("minus_mha", {}).get("p_holm", 1) < 0.05]
    message = f"Decided differences from the loss of 'mha', corrected for all: {', '.join(decided) or 'none'}"
    figure, (loss, accuracy) = plots.panels(message, 2, 2, 1 + 0.36 * len(rows), sharey=True)
    plots.dots(loss, names, {"_": points(compared)}, (-0.15, 0.15), mark=0)
    loss.set(xlabel="loss minus that of mha, nats per token,\n95% interval (lower is better)")
    right = {
        f"{n} relation{'s' * (n > 1)}": points([row["relations"][str(n)]["accuracy"] for row in rows])
        for n in RELATIONS
    }
    plots.dots(accuracy, names, right)
    accuracy.set(xlabel="right answers, 95% interval\n(higher is better)", xlim=(0, 1))
    return figure


def write_results(args: argparse.Namespace, runs: dict[tuple[str, int], dict], **content) -> None:
    """Write the table and the plot of the runs that have finished."""
    rows = [summary(name, runs) for name in dict.fromkeys(name for name, _ in runs)]
    correct_by_holm([row[key] for row in rows for key in ("minus_mha", "minus_mha_x2") if key in row])
    kept = [
        {"variant": name, "seed": seed, **{key: run[key] for key in ("test", "train")}}
        for (name, seed), run in runs.items()
    ]
    write(args, plot, **content, rows=rows, runs=kept)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    size = FULL if args.full else SMALL
    args.kinds = args.kinds or size["variants"]
    begin(args, threads=None)

    sizes = {key: value for key, value in size.items() if key != "variants"}
    setting = {**sizes, "noise": NOISE, "device": args.device}
    runs = {}
    with sole_writer(args.output):
        base, test = base_model(VARIANTS["mha"], args.output), draw(size, seed=0)[1]
        measured = partial(measure, VARIANTS["mha"], base, base, test, args.device)
        before = run_once(args.output / "before.json", measured, setting)
        try:
            for seed, name in itertools.product(args.seeds, args.kinds):
                training = partial(run, name, seed, size, args.output, args.device)
                path = args.output / f"{name}-{seed}.json"
                runs[name, seed] = run_once(path, training, {**setting, **VARIANTS[name]._asdict()})
        finally:
            # A study that is stopped leaves the table of what it has.
            if runs:
                described = {"trl": version("trl"), "recipe": RECIPE, "rate": RATE, **setting}
                is_complete = len(runs) == len(args.seeds) * len(args.kinds)
                write_results(args, runs, **described, before=before["test"], complete=is_complete)


if __name__ == "__main__":
    run_cli(main)
