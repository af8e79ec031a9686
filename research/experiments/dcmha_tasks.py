"""Test on DCMHA's 74 synthetic tasks if composing heads helps to find a word and to transform another.

"Improving Transformers with Dynamically Composable Multi-Head Attention", Section 4.3, Table 5 and Appendix F. In
"John has an apple. Mary has a dog. So John has a kind of ..." a model must attend to the word that an attention
pattern selects (same person) and transform it (object to class). The paper puts the 74 combinations to models that
are trained on text. It conjectures that heads whose QK and OV circuits are fixed have difficulty in combining them.

Here small models are trained on the tasks themselves: 7 transformations by 4 patterns about persons by 2 orders of
the facts, and 9 transformations by 2 patterns about sets, as in the file that the authors released. The words are
numbered and not English. A fact or the question is one position, the sum of its words, because a name that stands
next to its word takes longer to learn than this study runs. The loss is that of the answer.

In each task an eighth of the words are never the source of an answer in training, though they are in other tasks:
"new" examples ask for those. The arms are compared at equal steps and parameters under the protocol of protocol.py,
whose loss here is the share of wrong answers. It takes about 15 minutes of one core.

example: python -m research.experiments.dcmha_tasks --kinds mha dcmha
"""

import random
from collections.abc import Sequence
from itertools import product
from statistics import mean
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from iha import plots
from iha.errors import run_cli
from modeling_iha import IHAConfig, IHAForCausalLM
from research.experiments.language_models import config_of, sized
from research.experiments.options import protocol_parser
from research.experiments.protocol import Rates, compare_tuned, fit, new_model
from research.experiments.study import begin, correct_by_holm, differences, interval, points, write


KINDS = ("mha", "paired_heads", "iha", "talking_heads", "dcmha")
SMALL = sized(width=64, ffn=192, layers=2, heads=4, tokens=4, batch=64, steps=600, test=16)
EVALUATIONS = 5
HELD_OUT = 8
EFFECT = 0.05  # share of answers
FIRST_RATE = 2e-3

NAMES = [f"name {index}" for index in range(20)]
# Days, months, hours and seasons: the next of the last word is the first one.
UNITS = [[f"unit {unit}, {index}" for index in range(size)] for unit, size in enumerate((7, 12, 12, 4))]


def grouped(words: str, groups: int = 10, members: int = 3) -> dict[str, str]:
    """Return the group of each word."""
    return {f"{words} {index}": f"group {index // members} of {words}" for index in range(groups * members)}


def shifted(places: int) -> dict[str, str]:
    """Return the neighbour of each word of the units."""
    return {word: unit[(index + places) % len(unit)] for unit in UNITS for index, word in enumerate(unit)}


# Transformation -> the answer of each word that can be the source of one.
ANSWERS = {
    "class": grouped("object"),
    "object": {word: word for word in grouped("object")},
    "country": grouped("city"),
    "city": {word: word for word in grouped("city")},
    "capability": grouped("tool"),
    "tool": {word: word for word in grouped("tool")},
    "opposite": {f"quality {index}": f"quality {index ^ 1}" for index in range(24)},
    "next": shifted(1),
    "previous": shifted(-1),
}
OF_PERSONS = ("class", "object", "country", "city", "capability", "opposite", "next")
PERSON_PATTERNS = ("same person", "other person", "who", "who not")
SET_PATTERNS = ("not the named", "different")


class Task(NamedTuple):
    """Say how a task finds the source of the answer, what the answer is, and in which order its facts are told."""

    pattern: str
    transformation: str
    order: str


TASKS = [Task(*parts) for parts in product(PERSON_PATTERNS, OF_PERSONS, ("name first", "word first"))] + [
    Task(*parts, "no name") for parts in product(SET_PATTERNS, ANSWERS)
]
WORDS = [word for answers in ANSWERS.values() for pair in answers.items() for word in pair]
FRAME = [part for task in TASKS for part in (task.pattern, task.order, f"to {task.transformation}")]
TOKENS = {word: number for number, word in enumerate(dict.fromkeys([*NAMES, *WORDS, *FRAME]), start=1)}  # 0 pads


def sources(index: int, new: bool) -> list[str]:
    """Return the words that can be the source of an answer in a task, in training or in "new" examples."""
    words = ANSWERS[TASKS[index].transformation]
    return [word for place, word in enumerate(words) if ((place + index) % HELD_OUT == 0) == new]


def draw(index: int, new: bool, generator: random.Random) -> tuple[list[list[str]], str]:
    """Draw an example of a task: three facts and the question, as lists of words, and the answer.

    The source's answer differs from those of the other two words. These differ too, except where a pattern asks for
    the odd one.
    """
    pattern, transformation, order = TASKS[index]
    answers = ANSWERS[transformation]
    source = generator.choice(sources(index, new))
    unit = next((unit for unit in UNITS if source in unit), list(answers))
    first = generator.choice([word for word in unit if answers[word] != answers[source]])
    alike = [word for word in unit if answers[word] == answers[first]]
    apart = [word for word in unit if answers[word] not in (answers[source], answers[first])]
    second = generator.choice({"who not": alike, "not the named": [first], "different": [first]}.get(pattern, apart))
    owner, other, third = generator.sample(NAMES, 3)
    # The word of the same person is asked for by its owner's name; "other person" names the owner of both others.
    facts = [[owner, source], [other, first], [other if pattern == "other person" else third, second]]
    facts = [[order, *(fact[1:] if pattern in SET_PATTERNS else fact)] for fact in facts]
    generator.shuffle(facts)
    named = {"same person": [owner], "other person": [other], "who": [answers[source]], "who not": [answers[first]]}
    question = [pattern, f"to {transformation}", *named.get(pattern, [first] if pattern == "not the named" else [])]
    return [*facts, question], owner if pattern in ("who", "who not") else answers[source]


def encode(examples: list[tuple[list[list[str]], str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token numbers: inputs int64 [examples, 4, 3], padded with 0, and answers [examples]."""
    inputs = [[([TOKENS[word] for word in line] + [0, 0])[:3] for line in lines] for lines, _ in examples]
    return torch.tensor(inputs), torch.tensor([TOKENS[answer] for _, answer in examples])


def logits_of(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the model's logits after the question, [examples, vocabulary]."""
    words = model.model.embed_tokens(inputs) * (inputs != 0).unsqueeze(-1)
    states = model.model(inputs_embeds=words.sum(dim=2), use_cache=False).last_hidden_state
    return model.lm_head(states[:, -1])


def config_of_kind(kind: str) -> IHAConfig:
    """Return the config of a kind, with the parameters of "mha"."""
    own = {"num_pseudo_heads": 2, "initializer_range": SMALL["fields"]["hidden_size"] ** -0.5}
    size = {**SMALL, "fields": {**SMALL["fields"], **own, "vocab_size": len(TOKENS) + 1}}
    return config_of(size, attention_kinds=kind)


def train(kind: str, seed: int, rate: float, mixing: float) -> dict:
    """Train a model. Return its share of wrong answers as it falls and, at the end, that of right ones by task."""
    generator = random.Random(seed)
    model = new_model(config_of_kind(kind), config_of_kind("mha"), seed)
    per_task = SMALL["test"]
    held_out = random.Random(3001)
    tests = {
        name: encode([draw(i, name == "new", held_out) for i in range(len(TASKS)) for _ in range(per_task)])
        for name in ("seen", "new")
    }
    right: dict[str, list[float]] = {}

    def loss() -> torch.Tensor:
        chosen = [generator.randrange(len(TASKS)) for _ in range(SMALL["batch"])]
        inputs, answers = encode([draw(index, False, generator) for index in chosen])
        return cross_entropy(logits_of(model, inputs), answers)

    def evaluate(averaged: IHAForCausalLM, step: int) -> list[float]:
        for name, (inputs, answers) in tests.items():
            found = logits_of(averaged, inputs).argmax(dim=-1) == answers
            right[name] = found.unflatten(0, (-1, per_task)).double().mean(dim=1).tolist()
        wrong = [1 - mean(shares) for shares in right.values()]
        print(f"{kind}, seed {seed}: step {step}, {wrong[0]:.3f} of seen and {wrong[1]:.3f} of new wrong", flush=True)
        return wrong

    curve, seconds = fit(model, loss, evaluate, SMALL["steps"], rate, mixing, EVALUATIONS)
    return {"curve": curve, "seconds": seconds, "right": right}


def summary(kind: str, rates: dict[str, Rates], runs: dict[str, list[dict]]) -> dict:
    """Return an arm's share of right answers in all tasks and by pattern, with the difference from the first arm."""
    row = {"kind": kind, **rates[kind]._asdict(), "seconds": interval([run["seconds"] for run in runs[kind]])}
    base = next(iter(runs))
    for group, name in product(("all", *PERSON_PATTERNS, *SET_PATTERNS), ("seen", "new")):
        tasks = [index for index, task in enumerate(TASKS) if group in ("all", task.pattern)]
        shares = {each: [mean(run["right"][name][i] for i in tasks) for run in runs[each]] for each in (kind, base)}
        row.setdefault(group, {})[name] = interval(shares[kind])
        if kind != base:
            row[group][f"{name}_minus_base"] = differences(shares[kind], shares[base])
    return row


def plot(table: dict) -> Figure:
    """Plot the mean shares of right answers by step, and at the end by pattern."""
    message = "Share of right answers on DCMHA's tasks, pairs of task and word that training has asked for"
    figure, (by_step, by_pattern) = plots.panels(message, 2, 2, 4)
    for kind, curves in table["runs"].items():
        steps = [point[0] for point in curves[0]]
        by_step.plot(steps, [1 - mean(point[1] for point in at) for at in zip(*curves)], label=kind)
    by_step.set(xlabel="step", ylabel="right answers, mean of seeds (higher is better)", ylim=(0, 1))
    patterns = ("all", *PERSON_PATTERNS, *SET_PATTERNS)
    shown = {row["kind"]: points([row[each]["seen"] for each in patterns]) for row in table["rows"]}
    plots.dots(by_pattern, patterns, shown, (0, 1.02))
    by_pattern.set(xlabel="right answers, 95% interval")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = protocol_parser(__doc__, "dcmha_tasks", EFFECT, KINDS).parse_args(argv)
    begin(args)
    rates, runs = compare_tuned(args, SMALL, train, config_of_kind, FIRST_RATE)
    rows = [summary(kind, rates, runs) for kind in runs]
    groups = [row[group] for row in rows for group in ("all", *PERSON_PATTERNS, *SET_PATTERNS)]
    correct_by_holm([each for group in groups for name, each in group.items() if name.endswith("minus_base")])
    curves = {kind: [run["curve"] for run in of_kind] for kind, of_kind in runs.items()}
    write(args, plot, **SMALL, rows=rows, runs=curves)


if __name__ == "__main__":
    run_cli(main)
