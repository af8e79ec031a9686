"""Test on DCMHA's 74 synthetic tasks if composing heads helps to find a word and to transform another.

"Improving Transformers with Dynamically Composable Multi-Head Attention", Section 4.3, Table 5 and Appendix F. In
"John has an apple. Mary has a dog. So John has a kind of ..." a model must attend to the word that an attention
pattern selects (same person) and transform it (object to class). 74 combinations are put to Pythia-6.9B and
DCPythia-6.9B after 2 to 7 shots; 31.9% and 39.0% of the answers are right. The paper conjectures that heads whose QK
and OV circuits are fixed have difficulty in combining them. Its models are trained on text only.

Here small models are trained on the tasks themselves. The paper shows eight examples and does not say how they were
made; the 74 combinations are those of the file its authors released (Caiyun-AI/DCFormer,
data/synthetic_dataset.jsonl), in its order: 7 transformations by 4 patterns about persons by 2 orders of the facts,
and 9 transformations by 2 patterns about sets. Chosen here: a word or name is one token, articles and frame are left
out, verbs do not vary; three members in each of ten groups; no years, whose order has ends; no shots, since the
question says which task it is; the loss is that of the answer. Each of the three facts and the question is one
position, the sum of its words: that a name stands beside a word takes longer to learn than this study runs.

In each task an eighth of the words are never the source of an answer in training, though they are in other tasks:
"new" examples are those, "seen" ones combine a task and a source that training has combined, among other facts. The
kinds are compared under the protocol of protocol.py, at equal steps and parameters (a kind with more of them
has a narrower FFN). The rate of each is the best for the seen examples.

example: python -m research.experiments.dcmha_tasks --kinds mha dcmha
"""

import argparse
import random
from collections.abc import Sequence
from functools import partial
from itertools import permutations, product
from statistics import mean
from typing import NamedTuple

from iha_io.command_io import run_cli
from research.experiments.options import protocol_parser


KINDS = ["mha", "dcmha", "talking_heads", "iha", "diff_v2", "gated", "knocking_heads", "multi_token"]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return protocol_parser(__doc__, "dcmha_tasks", 0.05, KINDS).parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure

from iha_io import plots
from modeling_iha import IHAConfig, IHAForCausalLM
from research.experiments.language_models import config_of, sized
from research.experiments.protocol import Rates, compare_tuned, fit, new_model
from research.experiments.study import begin, correct_by_holm, differences, interval, points, write


SMALL = sized(width=64, ffn=192, layers=2, heads=4, tokens=4, batch=64, steps=2000, test=32)
EVALUATIONS, HELD_OUT = 10, 8

NAMES = (
    "Ruth Carol Ronald Deborah Daniel Edward Maria Kenneth Nancy Jeff Laura Joseph Helen John Susan Steven Mark Sarah "
    "Paul Lisa"
).split()
CLASSES = {
    "clothing": "shirt jacket sweater",
    "fruit": "apple banana mango",
    "animal": "wolf rabbit elephant",
    "food": "bread pizza steak",
    "drink": "tea juice wine",
    "weapon": "rifle pistol grenade",
    "insect": "bee beetle mosquito",
    "vehicle": "taxi bus jeep",
    "sport": "baseball basketball football",
    "instrument": "guitar piano violin",
}
COUNTRIES = {
    "India": "Mumbai Bangalore New-Delhi",
    "Spain": "Madrid Barcelona Valencia",
    "Canada": "Ottawa Toronto Vancouver",
    "Japan": "Tokyo Kyoto Osaka",
    "Switzerland": "Bern Geneva Zurich",
    "Italy": "Rome Milan Venice",
    "France": "Paris Lyon Marseille",
    "China": "Beijing Shanghai Guangzhou",
    "Thailand": "Bangkok Pattaya Chiang-Mai",
    "Germany": "Berlin Hamburg Munich",
}
CAPABILITIES = {
    "swim": "goggles swimsuit swim-fins",
    "write": "pen chalk biro",
    "ride": "motorcycle bicycle horse",
    "paint": "brush palette roller",
    "drive": "car truck jeep",
    "cook": "oven pan pot",
    "clean": "broom mop vacuum-cleaner",
    "communicate": "radio phone telegraph",
    "fly": "helicopter plane glider",
    "play": "guitar piano violin",
}
OPPOSITES = (
    "happy sad, rich poor, tall short, fast slow, strong weak, brave cowardly, loyal disloyal, safe dangerous, good "
    "bad, honest dishonest, lucky unlucky, active passive"
).split(", ")
ORDINALS = [
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "January February March April May June July August September October November December".split(),
    [f"{hour}:00" for hour in range(1, 13)],
    "spring summer autumn winter".split(),
]


def by_member(groups: dict[str, str]) -> dict[str, str]:
    return {member: group for group, members in groups.items() for member in members.split()}


def shifted(places: int) -> dict[str, str]:
    """Return the neighbour of each ordinal; the last one's neighbour is the first."""
    return {word: unit[(index + places) % len(unit)] for unit in ORDINALS for index, word in enumerate(unit)}


def itself(words: dict[str, str]) -> dict[str, str]:
    return {word: word for word in words}


# Transformation -> what each word becomes that can be the source of an answer.
ANSWERS = {
    "class": by_member(CLASSES),
    "object": itself(by_member(CLASSES)),
    "country": by_member(COUNTRIES),
    "city": itself(by_member(COUNTRIES)),
    "capability": by_member(CAPABILITIES),
    "tool": itself(by_member(CAPABILITIES)),
    "opposite": {word: other for pair in OPPOSITES for word, other in permutations(pair.split())},
    "next": shifted(1),
    "previous": shifted(-1),
}
HAS = ("{name} has {word}", "{word} is {name} 's")
LIKES = ("{name} likes {word}", "{word} attracts {name}")
IS = ("{name} is {word}", "{word} {name}")
ARRIVED = ("{name} arrived on {word}", "On {word} arrived {name}")
# Transformation -> a fact in two orders; what a question says of a person, and what it denies of one.
OF_PERSONS = {
    "class": (HAS, "has a kind of", "does not have a kind of"),
    "object": (HAS, "has", "does not have"),
    "country": (LIKES, "yearns for the city in", "does not yearn for the city in"),
    "city": (LIKES, "yearns for", "does not yearn for"),
    "capability": (HAS, "has the thing that can", "does not have the thing that can"),
    "opposite": (IS, "is the opposite of", "is not the opposite of"),
    "next": (ARRIVED, "arrived just before", "did not arrive just before"),
}
# Transformation -> what a question says of a word in a set.
OF_SETS = {
    "object": "the",
    "class": "a kind of",
    "city": "",
    "country": "the city in",
    "tool": "the",
    "capability": "the thing that can",
    "opposite": "the opposite of",
    "next": "just before",
    "previous": "just after",
}
# Of three facts one holds the source of the answer. Of the words of the others `first` is one, and `iha_io` what it
# becomes.
PERSON_PATTERNS = {
    "other person": "{other} {denies}",
    "same person": "{owner} {asks}",
    "who not": "who {denies} {common} ?",
    "who": "who {asks} {answer} ?",
}
SET_PATTERNS = {"not the named": "which is not {first} ? {asks}", "different": "which is different ? {asks}"}


class Task(NamedTuple):
    """Hold the parts of a task's examples: three facts by the template `fact`, and the question."""

    pattern: str
    transformation: str
    fact: str
    question: str
    asks: str
    denies: str = ""


TASKS = [
    Task(pattern, transformation, fact, question, asks, denies)
    for transformation, (facts, asks, denies) in OF_PERSONS.items()
    for pattern, question in PERSON_PATTERNS.items()
    for fact in facts
] + [
    Task(pattern, transformation, "{word}", question, asks)
    for transformation, asks in OF_SETS.items()
    for pattern, question in SET_PATTERNS.items()
]


def vocabulary() -> dict[str, int]:
    """Return the number of every token, from 1; 0 pads."""
    texts = [" ".join((*task.fact.split(), *task.question.split(), task.asks, task.denies)) for task in TASKS]
    words = {word for text in texts for word in text.split() if "{" not in word}
    words.update(NAMES, *(part for answers in ANSWERS.values() for part in (answers, answers.values())))
    return {word: number for number, word in enumerate(sorted(words), start=1)}


TOKENS = vocabulary()


def sources(index: int, new: bool) -> list[str]:
    """Return the words that can be the source of an answer in a task, in training or in "new" examples."""
    words = ANSWERS[TASKS[index].transformation]
    return [word for place, word in enumerate(words) if ((place + index) % HELD_OUT == 0) == new]


def draw(index: int, new: bool, generator: random.Random) -> tuple[list[str], str]:
    """Draw an example of a task: three facts and a question, and the answer."""
    task, choose = TASKS[index], generator.choice
    answers = ANSWERS[task.transformation]
    source = choose(sources(index, new))
    unit = next((unit for unit in ORDINALS if source in unit), answers)
    # The answers of the facts tell them apart, but for two that are wanted alike.
    first = choose([word for word in unit if answers[word] != answers[source]])
    alike = [word for word in unit if answers[word] == answers[first] and word != first]
    if task.pattern in SET_PATTERNS:
        second = first
    elif task.pattern == "who not":
        second = choose(alike or [first])
    else:
        second = choose([word for word in unit if answers[word] not in (answers[source], answers[first])])
    owner, other, third = generator.sample(NAMES, 3)
    facts = [(owner, source), (other, first), (other if task.pattern == "other person" else third, second)]
    generator.shuffle(facts)
    question = task.question.format(
        owner=owner,
        other=other,
        first=first,
        common=answers[first],
        answer=answers[source],
        asks=task.asks,
        denies=task.denies,
    )
    lines = [task.fact.format(name=name, word=word) for name, word in facts]
    return [*lines, question], owner if task.pattern in ("who", "who not") else answers[source]


def encode(examples: list[tuple[list[str], str]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token numbers: inputs int64 [examples, 4, words], padded with 0, and answers [examples]."""
    lines = [[TOKENS[word] for word in line.split()] for facts, _ in examples for line in facts]
    longest = max(map(len, lines))
    inputs = torch.tensor([line + [0] * (longest - len(line)) for line in lines]).unflatten(0, (-1, 4))
    answers = torch.tensor([TOKENS[answer] for _, answer in examples])
    return inputs.to(device), answers.to(device)


def logits_of(model: IHAForCausalLM, inputs: torch.Tensor) -> torch.Tensor:
    """Return the model's logits after the question, [examples, vocabulary]."""
    words = model.model.embed_tokens(inputs) * (inputs != 0).unsqueeze(-1)
    states = model.model(inputs_embeds=words.sum(dim=2), use_cache=False).last_hidden_state
    return model.lm_head(states[:, -1])


def right_by_task(model: IHAForCausalLM, batches: list[tuple]) -> list[float]:
    """Return the share of right answers in each batch, which is one task's."""
    return [(logits_of(model, x).argmax(dim=-1) == answers).double().mean().item() for x, answers in batches]


def config_of_kind(size: dict, kind: str) -> IHAConfig:
    """Return the config of a kind, with the parameters of "mha"."""
    width = size["fields"]["hidden_size"]
    own = {"num_pseudo_heads": 2, "initializer_range": width**-0.5, "vocab_size": len(TOKENS) + 1}
    return config_of({**size, "fields": {**size["fields"], **own}}, attention_kinds=kind)


def train(size: dict, device: str, kind: str, seed: int, rate: float, mixing: float) -> dict:
    """Train a model; return its shares of wrong answers as they fall and, at the end, of right ones by task."""
    generator = random.Random(seed)
    tests = {
        name: [
            encode([draw(index, name == "new", generator) for _ in range(size["test"])], device)
            for index in range(len(TASKS))
        ]
        for name in ("seen", "new")
    }
    model = new_model(config_of_kind(size, kind), config_of_kind(size, "mha"), seed).to(device)
    right, steps = {}, size["steps"]

    def loss() -> torch.Tensor:
        chosen = [generator.randrange(len(TASKS)) for _ in range(size["batch"])]
        inputs, answers = encode([draw(index, False, generator) for index in chosen], device)
        return torch.nn.functional.cross_entropy(logits_of(model, inputs).float(), answers)

    def evaluate(trained: torch.nn.Module, step: int) -> list[float]:
        right.update({name: right_by_task(trained, batches) for name, batches in tests.items()})
        wrong = [1 - mean(values) for values in right.values()]
        print(f"{kind}, seed {seed}: step {step} of {steps}, {wrong[0]:.3f} of seen examples wrong", flush=True)
        return wrong

    curve, seconds = fit(model, loss, evaluate, steps, rate, mixing, EVALUATIONS)
    return {
        "curve": curve,
        "right": right,
        "seconds": seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def groups() -> dict[str, list[int]]:
    """Return the numbers of all tasks, of those of each pattern, and of each transformation."""
    named = {"all": list(range(len(TASKS)))}
    for part in ("pattern", "transformation"):
        for index, task in enumerate(TASKS):
            named.setdefault(getattr(task, part), []).append(index)
    return named


def summary(kind: str, rates: dict[str, Rates], runs: dict[str, list[dict]]) -> dict:
    """Return a kind's share of right answers in each group of tasks.

    The row also has the difference from "mha" on the same seeds.
    """
    row = {
        "kind": kind,
        "parameters": runs[kind][0]["parameters"],
        **rates[kind]._asdict(),
        "seconds": interval([run["seconds"] for run in runs[kind]]),
        "groups": {},
    }
    for name, (group, indices) in product(("seen", "new"), groups().items()):
        shares = {each: [mean(run["right"][name][i] for i in indices) for run in runs[each]] for each in runs}
        row["groups"].setdefault(group, {})[name] = interval(shares[kind])
        if "mha" in runs and kind != "mha":
            row["groups"][group][f"{name}_more_than_mha"] = differences(shares[kind], shares["mha"])
    return row


def plot(table: dict) -> Figure:
    """Plot the mean shares of wrong answers by step, and at the end of right ones by pattern."""
    rows, runs = table["rows"], table["runs"]
    ranked = sorted(rows, key=lambda row: -row["groups"]["all"]["seen"]["mean"])
    named = ", ".join(f"{row['kind']} {row['groups']['all']['seen']['mean']:.2f}" for row in ranked)
    figure, all_axes = plots.panels(f"Seen pairs right: {named}", 4, 2, 3.6)
    for axes, part, name in zip(all_axes, (1, 2), ("seen", "new")):
        for index, (kind, of_kind) in enumerate(runs.items()):
            steps = [point[0] for point in of_kind[0]["curve"]]
            means = [mean(point[part] for point in at_step) for at_step in zip(*(run["curve"] for run in of_kind))]
            axes.plot(steps, means, f"C{index}", label=kind)
        axes.set(
            xlabel="step", title=f"{name} pairs", ylabel="wrong answers, mean of seeds\n(lower is better)", ylim=(0, 1)
        )
    patterns = [name for name in rows[0]["groups"] if name == "all" or name in {task.pattern for task in TASKS}]
    for axes, name in zip(all_axes[2:], ("seen", "new")):
        plots.dots(
            axes, patterns, {row["kind"]: points([row["groups"][each][name] for each in patterns]) for row in rows}
        )
        axes.set(title=f"{name} pairs", xlabel="right answers, 95% interval\n(higher is better)", xlim=(0, 1.02))
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args)
    setting = {**SMALL, "device": args.device}
    rates, runs = compare_tuned(args, setting, partial(train, SMALL, args.device), partial(config_of_kind, SMALL))
    rows = [summary(kind, rates, runs) for kind in args.kinds]
    groups_of = [group for row in rows for group in row["groups"].values()]
    correct_by_holm([each for group in groups_of for key, each in group.items() if key.endswith("_more_than_mha")])
    curves = {kind: [{"curve": run["curve"]} for run in of_kind] for kind, of_kind in runs.items()}
    write(args, plot, **setting, rows=rows, runs=curves)


if __name__ == "__main__":
    run_cli(main)
