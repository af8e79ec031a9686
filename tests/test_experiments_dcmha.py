"""Test the studies of DCMHA.

The ablation compares the paper's configurations and nothing else. The synthetic tasks are those that its authors
released, with one right answer each.
"""

import json
import os
import random
import re
from copy import deepcopy
from pathlib import Path
from statistics import mean

import pytest
import torch

from common.command_io import UserError
from evaluation import data
from experiments import dcmha_ablation, dcmha_tasks, head_diversity, language_models, study
from experiments.dcmha_tasks import ANSWERS, NAMES, SET_PATTERNS, TASKS, TOKENS
from modeling_iha import IHAForCausalLM


# The full data files are no part of the repository.
DATA = Path(os.environ.get("EVALUATION_DATA", Path(__file__).parents[2] / "shared" / "data"))
FIELDS = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY_TEXT = {"fields": FIELDS, "tokens": 8, "batch": 2, "steps": 4, "rate": 1e-2}
TINY_TASKS = {**TINY_TEXT, "fields": {**FIELDS, "num_pseudo_heads": 2}, "tokens": 4, "test": 2}


def results(directory: Path, name: str) -> dict:
    assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((directory / f"{name}.json").read_text())


# The ablation


@pytest.mark.parametrize("name", dcmha_ablation.CONFIGURATIONS)
def test_a_configuration_has_its_components_and_no_others(name):
    """By the names and shapes of the parameters; the FFN of the control alone has another width."""
    size = language_models.SMALL
    model = IHAForCausalLM(dcmha_ablation.config_of(name, size))
    found = {key: tuple(value.shape) for key, value in model.model.layers[0].named_parameters()}
    plain = {
        key: tuple(value.shape)
        for key, value in IHAForCausalLM(language_models.build("mha", size)).model.layers[0].named_parameters()
    }
    hidden, heads, rank = 64, 4, {"rank_1": 1, "rank_4": 4}.get(name, 2)
    stages = [name] if name in ("pre", "post") else ["pre", "post"]
    sides = [name] if name in ("query", "key") else ["query", "key"]
    added = {}
    for stage in stages:
        for side in sides:
            if name not in ("mha", "wider", "static", "gate"):
                added[f"{stage}_{side}.w1.weight"] = (2 * heads * rank, hidden)
                added[f"{stage}_{side}.w2"] = (1, 2 * rank, heads, 2 * heads * rank)
            if name not in ("mha", "wider", "static", "projection"):
                added[f"{stage}_{side}.gate.weight"] = (heads, hidden)
        if name in ("static", "all"):
            added[f"{stage}_base.weight"] = (1, heads, heads)
    added = {f"self_attn.{key}": shape for key, shape in added.items()}
    if name == "wider":
        inner = found["mlp.gate_proj.weight"][0]
        plain = {key: tuple(inner if side == 192 else side for side in shape) for key, shape in plain.items()}
        counts = [
            sum(parameter.numel() for parameter in each.parameters())
            for each in (model, IHAForCausalLM(dcmha_ablation.config_of("dcmha", size)))
        ]
        assert inner > 192 and abs(counts[0] - counts[1]) <= 3 * 64 * 2 / 2
    assert found == {**plain, **added}


def test_the_ablation_compares_on_equal_seeds_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dcmha_ablation, "SMALL", TINY_TEXT)
    where = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path), "--kinds", "mha", "pre", "post"]
    dcmha_ablation.main([*where, "--seeds", "0"])
    dcmha_ablation.main([*where, "--seeds", "0", "1"])
    assert capsys.readouterr().out.count("step 4 of 4") == 6
    table = results(tmp_path, "dcmha_ablation")

    def of_runs(name: str, value) -> list[float]:
        return [value(json.loads((tmp_path / "runs" / f"{name}-{seed}.json").read_text())) for seed in range(2)]

    loss = {name: of_runs(name, lambda run: run["curve"][-1][1]) for name in ("mha", "pre", "post")}
    mha, pre, post = table["rows"]
    assert [row["loss"]["mean"] for row in (mha, pre, post)] == pytest.approx([mean(each) for each in loss.values()])
    assert pre["lower_than_mha"]["by"]["mean"] == pytest.approx(mean(loss["mha"]) - mean(loss["pre"]))
    assert pre["lower_than_mha"]["paper_by"] == pytest.approx(0.01206, abs=1e-5)  # ln(11.68 / 11.54)
    (claim,) = table["claims"]
    assert (claim["lower"], claim["than"]) == ("post", "pre")
    assert claim["by"]["mean"] == pytest.approx(mean(loss["pre"]) - mean(loss["post"]))
    assert claim["paper_by"] == pytest.approx(0.04338, abs=1e-5)  # ln(11.54 / 11.05)
    captured = {name: of_runs(name, lambda run: run["QK"]) for name in ("mha", "post")}
    assert post["QK_minus_mha"]["mean"] == pytest.approx(mean(captured["post"]) - mean(captured["mha"]))

    monkeypatch.setattr(dcmha_ablation, "SMALL", {**TINY_TEXT, "rate": 1e-3})
    with pytest.raises(UserError, match="another setting"):
        dcmha_ablation.main([*where, "--seeds", "0"])


def test_all_configurations_start_from_the_same_weights(monkeypatch):
    """And the heads are measured after training."""
    models = {}

    def train(name, model, *args):
        models[name] = deepcopy(model.state_dict())
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight[8:] = 0
        return {"curve": []}

    monkeypatch.setattr(dcmha_ablation, "train", train)
    for name in ("mha", "wider", "all", "static"):
        run = dcmha_ablation.one_run(name, 0, TINY_TEXT, torch.zeros(1), "cpu")
        trained = IHAForCausalLM(language_models.build("mha", TINY_TEXT))
        trained.load_state_dict({**trained.state_dict(), **models["mha"]})
        trained.model.layers[0].self_attn.q_proj.weight.data[8:] = 0
        expected = head_diversity.curves_of(trained, name)
        assert run == {"curve": [], **{circuit: expected[circuit].mean().item() for circuit in ("QK", "OV")}}
    for name, weights in models.items():
        assert all(name == "wider" and "mlp" in key or weights[key].equal(models["mha"][key]) for key in models["mha"])


def test_the_rate_rises_and_falls():
    shares = [study.rise_and_fall(step, 40) for step in range(41)]
    assert shares[0] == 0.5 and shares[1] == max(shares) == 0.975 and shares[20] == 0.5 and shares[40] == 0


# The tasks


def kind_of(question: str) -> tuple[str, str]:
    """Pattern and transformation of a released question."""
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
@pytest.mark.parametrize("index", range(len(TASKS)))
def test_an_example_has_one_right_answer(index, new):
    """Found by reading the text."""
    task, generator = TASKS[index], random.Random(index)
    answers = ANSWERS[task.transformation]
    for _ in range(20):
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
    """Whatever the other examples of the batch."""
    torch.manual_seed(0)
    size = {**TINY_TASKS, "fields": {**TINY_TASKS["fields"], "vocab_size": len(TOKENS) + 1}}
    model = IHAForCausalLM(language_models.config_of("dcmha", size)).eval()
    examples = [dcmha_tasks.draw(index, False, random.Random(index)) for index in (0, 61)]
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        together = dcmha_tasks.logits_of(model, dcmha_tasks.encode(examples, "cpu").inputs)
        for logits, example in zip(together, examples):
            lines = torch.stack([sum(table[TOKENS[word]] for word in line.split()) for line in example.lines])
            torch.testing.assert_close(logits, model(inputs_embeds=lines[None]).logits[0, -1])


def test_kinds_learn_the_same_examples_and_no_new_ones(monkeypatch):
    drawn, draw = [], dcmha_tasks.draw

    def watch(index, new, generator):
        drawn.append((index, new, draw(index, new, generator), torch.is_grad_enabled()))
        return drawn[-1][2]

    monkeypatch.setattr(dcmha_tasks, "draw", watch)
    by_kind = {}
    for kind in ("mha", "talking_heads"):
        drawn.clear()
        dcmha_tasks.train(kind, 0, TINY_TASKS, "cpu")
        by_kind[kind] = list(drawn)
    assert by_kind["mha"] == by_kind["talking_heads"]
    tested, trained = drawn[: 2 * 74 * 2], drawn[2 * 74 * 2 :]
    assert len(trained) == 4 * 2 and not any(new for _, new, *_ in trained)
    assert [(index, new) for index, new, *_ in tested] == [
        (index, new) for new in (False, True) for index in range(74) for _ in range(2)
    ]


def test_the_tasks_compare_on_equal_seeds_and_go_on_where_they_stopped(tmp_path, monkeypatch, capsys):
    shares = random.Random(0)
    monkeypatch.setattr(dcmha_tasks, "right_by_task", lambda model, batches: [shares.random() for _ in batches])
    monkeypatch.setattr(dcmha_tasks, "SMALL", TINY_TASKS)
    where = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path), "--kinds", "mha", "iha"]
    dcmha_tasks.main([*where, "--seeds", "0"])
    dcmha_tasks.main([*where, "--seeds", "0", "1"])
    assert capsys.readouterr().out.count("step 4 of 4") == 4
    table = results(tmp_path, "dcmha_tasks")
    right = {
        kind: [
            json.loads((tmp_path / "runs" / f"{kind}-{seed}.json").read_text())["right"]["new"] for seed in range(2)
        ]
        for kind in ("mha", "iha")
    }
    mha, iha = table["rows"]
    assert abs(mha["parameters"] - iha["parameters"]) <= 3 * 16 / 2
    for group, indices in {
        "all": range(74),
        "who": [i for i, task in enumerate(TASKS) if task.pattern == "who"],
        "tool": [64, 65],
    }.items():
        shares = {kind: [mean(of_run[i] for i in indices) for of_run in right[kind]] for kind in right}
        assert mha["groups"][group]["new"]["mean"] == pytest.approx(mean(shares["mha"]))
        more = mean(shares["iha"]) - mean(shares["mha"])
        assert iha["groups"][group]["new_more_than_mha"]["mean"] == pytest.approx(more)

    with pytest.raises(UserError, match="another setting"):
        dcmha_tasks.main([*where, "--seeds", "0", "--steps", "5"])
    with pytest.raises(UserError, match="--steps 0: expected at least 1"):
        dcmha_tasks.main([*where, "--steps", "0"])


def test_a_model_that_knows_the_answers_is_right(monkeypatch):
    """Shares are those of each task."""
    tests = [
        dcmha_tasks.encode([dcmha_tasks.draw(index, False, random.Random(index)) for _ in range(4)], "cpu")
        for index in (3, 58)
    ]

    def knows_half(model, inputs):
        known, answers = next((4 - 2 * i, test.answers) for i, test in enumerate(tests) if test.inputs is inputs)
        logits = torch.zeros(4, len(TOKENS) + 1)
        logits[torch.arange(4), answers % len(TOKENS) + 1] = 1.0
        logits[torch.arange(known), answers[:known]] = 2.0
        return logits

    monkeypatch.setattr(dcmha_tasks, "logits_of", knows_half)
    assert dcmha_tasks.right_by_task(None, tests) == [1.0, 0.5]
