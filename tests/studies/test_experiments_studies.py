"""Test the studies that train from scratch: their data, their tables, and that they go on where they stopped."""

import itertools
import json
import math
import os
import random
import re
from pathlib import Path
from statistics import mean

import pytest
import torch
from helpers import random_model, small_config

from evaluation import data
from modeling_iha import IHAForCausalLM
from research.experiments import (
    dcmha_ablation,
    dcmha_tasks,
    head_diversity,
    language_models,
    relation_composition,
    study,
)
from research.experiments.dcmha_tasks import ANSWERS, NAMES, SET_PATTERNS, TASKS, TOKENS


# The full data files are no part of the repository.
DATA = Path(os.environ.get("EVALUATION_DATA", Path(__file__).parents[3] / "shared" / "data"))
TINY_TEXT = language_models.sized(width=16, ffn=48, layers=1, heads=2, tokens=32, batch=2, steps=4)
TINY_TASKS = {**TINY_TEXT, "tokens": 4, "test": 1}
TINY_TASK = {"binary": (2, 2, 3, 0.5)}
TINY_RELATIONS = {"tasks": TINY_TASK, "heads": 2, "head_dim": 4, "train": 70, "test": 10, "epochs": 2, "rates": [1e-2]}


def ends(runs: list[dict]) -> float:
    return mean(run["curve"][-1][1] for run in runs)


@pytest.mark.parametrize("task", [(2, 2, 4, 0.4), (3, 1, 3, 0.5)], ids=["binary", "ternary"])
def test_a_relation_is_read_in_order_and_composed_as_by_hand(task):
    steps, smallest, largest, _ = task
    examples = relation_composition.draw(task, 40, torch.Generator().manual_seed(0))
    sizes = set()
    for entries, rows, columns, is_real, targets in zip(*examples):
        count = int(is_real.sum())
        size = round(count**0.5)
        sizes.add(size)
        assert is_real.tolist() == [True] * count + [False] * (largest**2 - count)
        assert list(zip(rows[:count].tolist(), columns[:count].tolist())) == [
            (i, j) for i in range(size) for j in range(size)
        ]
        holds = [[bool(entries[i * size + j]) for j in range(size)] for i in range(size)]

        def reached(i: int, j: int, left: int) -> bool:
            if left == 1:
                return holds[i][j]
            return any(holds[i][k] and reached(k, j, left - 1) for k in range(size))

        expected = [reached(i, j, steps) for i in range(size) for j in range(size)]
        assert targets[:count].tolist() == expected
    assert sizes == set(range(smallest, largest + 1))


@pytest.mark.parametrize("kind", ["mha", "iha", "simplicial", "diff"])
def test_every_entry_sees_every_entry_and_no_padding(kind):
    examples = relation_composition.draw((2, 2, 3, 0.5), 20, torch.Generator().manual_seed(0))
    small = next(index for index, real in enumerate(examples.is_real) if real.sum() == 4)
    large = next(index for index, real in enumerate(examples.is_real) if real.sum() == 9)
    torch.manual_seed(0)
    model = relation_composition.RelationModel(kind, heads=2, head_dim=4, largest=3)
    padded, alone = (next(examples.batches(torch.tensor(chosen))) for chosen in ([small, large], [small]))
    assert alone.entries.shape == (1, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(padded)[:1, :4], model(alone))
        for entry in range(4):
            flipped = alone._replace(entries=alone.entries.clone())
            flipped.entries[0, entry] ^= 1
            assert ((model(flipped) - model(alone)).abs() > 1e-6).all()


def test_relation_composition_compares_on_equal_seeds_and_goes_on_where_it_stopped(run_study):
    small, changed = {"SMALL": TINY_RELATIONS}, {"SMALL": {**TINY_RELATIONS, "heads": 1}}
    table, made = run_study(relation_composition, ["--seeds", "0"], small, changed, ["--seeds", "0", "1", "1"])
    assert made == [3, 3] and len(table["runs"]) == 6 and len(table["rows"]) == 3
    means = [mean(run["test"] for run in table["runs"] if run["kind"] == row["kind"]) for row in table["rows"]]
    assert [row["accuracy"]["mean"] for row in table["rows"]] == pytest.approx(means)
    assert table["rows"][0]["iha_is_higher_by"]["mean"] == pytest.approx(means[1] - means[0])


def test_training_stops_when_the_validation_loss_no_longer_falls(monkeypatch):
    """Expect the test accuracy of the best epoch, not of the last."""
    validation = [(loss, 0.0) for loss in (0.5, 0.4, 0.6, 0.3, 0.9, 0.9, 0.9)]
    scores = iter([pair for epoch, loss in enumerate(validation, 1) for pair in (loss, (0.0, epoch / 100))])
    monkeypatch.setattr(relation_composition, "score", lambda *args: next(scores))
    monkeypatch.setattr(relation_composition, "PATIENCE", 3)
    size = {**TINY_RELATIONS, "epochs": 50}
    run = relation_composition.train((2, 2, 3, 0.5), size, "mha", 1e-3, 0, "cpu", "run")
    assert len(run["curves"]) == 7 and run["epoch"] == 4 and run["test"] == 0.04


def test_a_study_writes_to_its_outputs_unless_told_where(tmp_path, monkeypatch):
    for words, results in (
        ([], "outputs/relation_composition"),
        (["--full"], "outputs/relation_composition_full"),
        (["--results", "mine"], "mine"),
    ):
        monkeypatch.chdir(tmp_path)
        args = relation_composition.parse_arguments(words)
        study.begin(args)
        assert args.results == (tmp_path / results if "--results" in words else Path(results))


def test_intervals_over_seeds():
    """Expect Student's t for the mean of 1, 2, 3, 4, 5: 3 ± 2.776 * sqrt(2.5 / 5)."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    half_width = pytest.approx(1.96324, abs=1e-4)
    assert study.interval(values) == {"mean": 3.0, "half_width": half_width, "values": values}
    assert study.interval([7.0]) == {"mean": 7.0, "half_width": None, "values": [7.0]}
    # (4.3027 + 1.0607) standard errors for three seeds
    assert study.detectable(study.interval([-1.0, 0.0, 1.0])) == pytest.approx(5.3633 / 3**0.5, abs=1e-4)
    wide = {"mean": 0.25, "half_width": 0.5, "values": []}
    assert study.points([wide, study.spread([0.0, 1.0, 0.5]), None]) == [(0.25, 0.5, 0.5), (0.5, 0.5, 0.5), None]


def test_p_values_are_corrected_for_their_number():
    """Take t of 2.0 standard errors with one degree of freedom, p = 0.2952, and of 20, p = 0.0318."""
    compared = [study.interval([centre - 1, centre + 1]) for centre in (2.0, 20.0, 2.0)]
    compared += [study.interval([1.0]), study.interval([math.nan, 1.0])]  # the last with a run that diverged
    study.correct_by_holm(compared)
    assert [each.get("p_holm") for each in compared] == pytest.approx([0.5903, 0.0954, 0.5903, None, None], abs=1e-4)
    study.correct_by_holm(equal := [study.interval([-1.0, 1.0]) for _ in range(2)])
    assert [each["p_holm"] for each in equal] == [1.0, 1.0]


@pytest.mark.parametrize("geometry", ["mha", "iha", "iha, all heads"])
def test_head_diversity_is_that_of_every_circuit_written_out(geometry):
    """Write each circuit as a matrix [width, width], for all pairs of pseudo-heads."""
    collapse = "all_heads" if "all" in geometry else "per_head"
    groups = 2 if geometry == "iha" else 4
    config = small_config(
        attention_kinds=geometry.split(",")[0],
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=groups,
        num_pseudo_heads=3,
        pseudo_collapse=collapse,
    )
    attention = random_model(config).model.layers[0].self_attn
    size, per_group = config.head_dim, 4 // groups

    def heads(projection, count):
        return [projection.weight[size * m : size * (m + 1)] for m in range(count)]

    query, key, value = (heads(attention.q_proj, 4), heads(attention.k_proj, groups), heads(attention.v_proj, groups))
    output = [attention.o_proj.weight[:, size * h : size * (h + 1)] for h in range(4)]
    if geometry == "mha":
        looks = [query[h].T @ key[h] for h in range(4)]
        moves = [output[h] @ value[h] for h in range(4)]
    else:

        def pseudo(sources, mixing, h, p):
            return sum(mixing.weight[m, h, p] * source for m, source in enumerate(sources))

        pairs = list(itertools.product(range(4), range(3), range(3)))
        looks = [
            pseudo(query, attention.q_mix, h, p).T @ pseudo(key, attention.k_mix, h // per_group, q)
            for h, p, q in pairs
        ]
        weight = attention.collapse.weight
        moves = []
        for h, p, q in pairs:
            moved = pseudo(value, attention.v_mix, h // per_group, q)
            if collapse == "per_head":
                moves.append(weight[h, p] * output[h] @ moved)
            else:
                moves += [weight[g, 3 * h + p] * output[g] @ moved for g in range(4)]
    measured = head_diversity.grams(attention, 4, groups)
    for name, circuits in (("QK", looks), ("OV", moves)):
        variance = torch.linalg.svdvals(torch.cat(circuits).double()).square()
        expected = variance.cumsum(0) / variance.sum()
        torch.testing.assert_close(head_diversity.captured(measured[name]), expected, atol=1e-5, rtol=0)


def test_equal_heads_are_less_diverse(tmp_path):
    model = random_model(small_config(attention_kinds="mha", num_attention_heads=4, num_key_value_heads=4))
    model.save_pretrained(tmp_path / "diverse")
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                weight = getattr(layer.self_attn, name).weight
                weight.copy_(weight[: len(weight) // 4].repeat(4, 1))
    model.save_pretrained(tmp_path / "equal")
    head_diversity.main([str(tmp_path / "diverse"), str(tmp_path / "equal"), "--results", str(tmp_path)])
    assert (tmp_path / "head_diversity.png").read_bytes().startswith(b"\x89PNG")
    diverse, equal = json.loads((tmp_path / "head_diversity.json").read_text())["rows"]
    assert (diverse["model"], equal["model"]) == ("diverse", "equal")
    assert equal["QK"]["mean"] > diverse["QK"]["mean"] and equal["OV"] == diverse["OV"]


# The ablation


def test_the_ablation_compares_on_equal_seeds_and_goes_on_where_it_stopped(run_protocol):
    table, runs = run_protocol(dcmha_ablation, {"SMALL": TINY_TEXT}, ["mha", "pre", "post"])
    loss = {name: ends(of_name) for name, of_name in runs.items()}
    mha, pre, post = table["rows"]
    assert [row["loss"]["mean"] for row in (mha, pre, post)] == pytest.approx(list(loss.values()))
    assert pre["lower_than_mha"]["by"]["mean"] == pytest.approx(loss["mha"] - loss["pre"])
    assert pre["lower_than_mha"]["paper_by"] == pytest.approx(0.01206, abs=1e-5)  # ln(11.68 / 11.54)
    (claim,) = table["claims"]
    assert (claim["lower"], claim["than"]) == ("post", "pre")
    assert claim["by"]["mean"] == pytest.approx(loss["pre"] - loss["post"])
    assert claim["paper_by"] == pytest.approx(0.04338, abs=1e-5)  # ln(11.54 / 11.05)
    captured = {name: mean(run["QK"] for run in runs[name]) for name in ("mha", "post")}
    assert post["QK_minus_mha"]["mean"] == pytest.approx(captured["post"] - captured["mha"])


# The tasks


def kind_of(question: str) -> tuple[str, str]:
    patterns = {
        r"Which is not": "not the named",
        r"Which is different": "different",
        r"Who (does|did|is) not": "who not",
        r"Who": "who",
        r"(does|did|is) not": "other person",
        r"": "same person",
    }
    transformations = {
        r"kind of": "class",
        r"city in": "country",
        r"that can": "capability",
        r"opposite of": "opposite",
        r"just before": "next",
        r"just after": "previous",
        r"": "copy",
    }
    return tuple(
        next(names[text] for text in names if re.search(text, question)) for names in (patterns, transformations)
    )


@pytest.mark.skipif(not DATA.is_dir(), reason="no data files: see test_evaluation.py")
def test_the_tasks_are_the_released_ones_in_their_order():
    assert len(TASKS) == 74
    rows = data.rows("dcformer/synthetic_dataset.jsonl", DATA)
    assert {entry["task_id"] for entry in rows} == {f"task{index}" for index in range(74)}
    for entry in rows:
        task = TASKS[int(entry["task_id"].removeprefix("task"))]
        copies = all(word == answer for word, answer in ANSWERS[task.transformation].items())
        for line in entry["texts"].strip().split("\n"):
            facts, question = re.fullmatch(r"(.*?\.) (?:>\. )?((?:Which|(?<=>\. )).*)", line).groups()
            expected = (task.pattern, "copy" if copies else task.transformation)
            assert kind_of(question) == expected, line
            name_first = re.match(r"< \w+ (has|likes|arrived|is [\w-]+\.)", facts) is not None
            assert name_first == task.fact.startswith("{name}"), line


@pytest.mark.parametrize("new", [False, True], ids=["seen", "new"])
def test_an_example_has_one_right_answer(new):
    generator = random.Random(0)
    for index, task in [*enumerate(TASKS)] * 5:
        answers = ANSWERS[task.transformation]
        lines, given = dcmha_tasks.draw(index, new, generator)
        assert {*" ".join(lines).split(), given} <= set(TOKENS)
        *facts, question = lines
        words = [next(word for word in fact.split() if word in answers) for fact in facts]
        owners = [next((word for word in fact.split() if word in NAMES), None) for fact in facts]
        asked = [word for word in question.split() if word in {*NAMES, *answers, *answers.values()}]
        right = {
            "same person": [answers[word] for word, owner in zip(words, owners) if owner in asked],
            "other person": [answers[word] for word, owner in zip(words, owners) if owner not in asked],
            "who": [owner for word, owner in zip(words, owners) if answers[word] in asked],
            "who not": [owner for word, owner in zip(words, owners) if answers[word] not in asked],
            "not the named": [answers[word] for word in words if word not in asked],
            "different": [answers[word] for word in words if words.count(word) == 1],
        }[task.pattern]
        assert right == [given], lines
        alike = task.pattern in ("who not", *SET_PATTERNS)
        assert len({answers[word] for word in words}) == (2 if alike else 3), lines


def test_new_examples_combine_a_task_with_words_of_other_tasks():
    for index, task in enumerate(TASKS):
        seen, new = (set(dcmha_tasks.sources(index, held_out)) for held_out in (False, True))
        assert new and not seen & new and seen | new == set(ANSWERS[task.transformation])
        elsewhere = [i for i, other in enumerate(TASKS) if other.transformation == task.transformation and i != index]
        assert new <= {word for i in elsewhere for word in dcmha_tasks.sources(i, False)}


def test_a_line_is_the_sum_of_its_words():
    """Expect the same whatever the other examples of the batch are."""
    torch.manual_seed(0)
    model = IHAForCausalLM(dcmha_tasks.config_of_kind(TINY_TASKS, "dcmha")).eval()
    examples = [dcmha_tasks.draw(index, False, random.Random(index)) for index in (0, 61)]
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        together = dcmha_tasks.logits_of(model, dcmha_tasks.encode(examples, "cpu")[0])
        for logits, (lines, _) in zip(together, examples):
            sums = torch.stack([sum(table[TOKENS[word]] for word in line.split()) for line in lines])
            torch.testing.assert_close(logits, model(inputs_embeds=sums[None]).logits[0, -1])


def test_kinds_learn_the_same_examples_and_no_new_ones(monkeypatch):
    drawn, draw = [], dcmha_tasks.draw

    def watch(index, new, generator):
        drawn.append((index, new, draw(index, new, generator), torch.is_grad_enabled()))
        return drawn[-1][2]

    monkeypatch.setattr(dcmha_tasks, "draw", watch)
    by_kind = {}
    for kind in ("mha", "talking_heads"):
        drawn.clear()
        dcmha_tasks.train(TINY_TASKS, "cpu", kind, 0, 1e-2, 1.0)
        by_kind[kind] = list(drawn)
    assert by_kind["mha"] == by_kind["talking_heads"]
    tested, trained = drawn[: 2 * 74], drawn[2 * 74 :]
    assert len(trained) == 4 * 2 and not any(new for _, new, *_ in trained)
    assert [(index, new) for index, new, *_ in tested] == [(i, new) for new in (False, True) for i in range(74)]


def test_the_tasks_compare_on_equal_seeds_and_go_on_where_they_stopped(run_protocol, monkeypatch):
    shares = random.Random(0)
    monkeypatch.setattr(dcmha_tasks, "right_by_task", lambda model, batches: [shares.random() for _ in batches])
    table, runs = run_protocol(dcmha_tasks, {"SMALL": TINY_TASKS}, ["mha", "iha"])
    mha, iha = table["rows"]
    assert abs(mha["parameters"] - iha["parameters"]) <= 3 * 16 / 2
    for group, indices in {
        "all": range(74),
        "who": [i for i, task in enumerate(TASKS) if task.pattern == "who"],
        "tool": [64, 65],
    }.items():
        right = {kind: mean(run["right"]["new"][i] for run in runs[kind] for i in indices) for kind in runs}
        assert mha["groups"][group]["new"]["mean"] == pytest.approx(right["mha"])
        more = iha["groups"][group]["new_more_than_mha"]["mean"]
        assert more == pytest.approx(right["iha"] - right["mha"])
