"""Test scorers, recorded and seeded samples, RULER, the commands of `evaluation`, and their one-line errors."""

import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SLOW
from lm_eval.api.instance import Instance
from tiny_sources import edit_config, save_tiny_source, tiny_source, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast


pytest.importorskip("math_verify", reason='the extra "evaluation" is not installed')

from math_verify import parse, verify

from common.command_io import UserError, read_json, read_jsonl, run_cli, sole_writer, write_json, write_jsonl
from evaluation import compare, data, replay_gold, replies, report, ruler, run, run_code, scores, suites
from evaluation.recorded_model import RecordedModel, SeededSampling, sample_seed
from evaluation.records import Records, sample_key
from modeling_iha import cpu_precision


# The full data files are no part of the repository.
DATA = Path(os.environ.get("EVALUATION_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "gsm8k").is_dir(), reason="no data files: set EVALUATION_DATA to a directory as in data_manifest.json"
)


@pytest.fixture(autouse=True)
def confirmed(monkeypatch):
    """Let the few programs of these tests run where the system isolates none."""
    monkeypatch.setattr(run_code, "_confirmed", True)


# Scorers


@pytest.mark.parametrize("name", replay_gold.REPLAYS)
@pytest.mark.parametrize(("directory", "rows"), [(data.SMOKE, None), pytest.param(DATA, 5, marks=needs_data)])
def test_gold_scores_1_and_broken_0(name, directory, rows):
    result = replay_gold.replay(name, directory, limit=rows)
    assert result["gold_right"] == result["rows"] == (rows or result["rows"]) > 1 and result["broken_right"] == 0


def test_majority_counts_equal_answers_together_and_none_never():
    def voted(*replies):
        return scores.gsm8k({"answer": "#### 1000"}, [list(replies)])[f"maj@{len(replies)}"]

    assert voted("1,000", "7", "7", r"\boxed{10^3}", r"\boxed{\frac{2000}{2}}") == 1  # three equal ones
    assert voted("none", "none", "none", "1000") == 1
    assert voted("1000", "7") == 1 and voted("7", "1000") == 0  # of equally many the first
    assert voted("none", "") == 0
    shares = [r"\boxed{0.18}", r"\boxed{18\%}", r"\boxed{18\%}", r"\boxed{18}"]  # the middle ones equal all
    gold = {"answer": "#### 18"}
    assert [scores.gsm8k(gold, [order])["maj@4"] for order in (shares, shares[::-1])] == [1, 1]
    row = scores.gsm8k({"answer": "#### 1000"}, [["#### 1,000", "#### 7", "#### 7", "#### 1000", "#### 1000.0"]])
    assert row["pass@1"] == 3 / 5 and row["maj@5"] == 1


@pytest.mark.parametrize(
    ("samples", "passed", "k"), [(5, 0, 1), (5, 2, 1), (5, 2, 3), (5, 5, 5), (6, 1, 4), (4, 3, 2)]
)
def test_pass_at_k_is_the_mean_over_all_choices(samples, passed, k):
    outcomes = [1] * passed + [0] * (samples - passed)
    choices = list(itertools.combinations(outcomes, k))
    assert scores.pass_at_k(samples, passed, k) == pytest.approx(sum(map(max, choices)) / len(choices))


def test_code_of_several_samples(monkeypatch):
    row = data.rows("mbpp/test.jsonl", data.SMOKE)[0]
    right, wrong = fenced(row["code"]), fenced("def add(a, b): return 0")
    # A task may ask for a function with the name of one of Python's own.
    own = {"test_setup_code": "", "test_list": ["assert sum(10,15) == 6"]}
    assert scores.mbpp(own, [[fenced("def sum(a, b): return 6", "print(sum(10, 15))")]]) == {"pass@1": 1}
    monkeypatch.setattr(scores, "passes_each", lambda programs: ["return 0" not in program for program in programs])
    assert scores.mbpp(row, [[wrong] * 9 + [right]]) == pytest.approx({"pass@1": 0.1, "pass@10": 1.0})
    assert scores.mbpp(row, [[right] * 9]) == {"pass@1": 1.0}


def fenced(*blocks):
    return "\nText:\n".join(f"```python\n{block}\n```" for block in blocks)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (fenced("def f(): a", "def f(): b"), "def f(): b\n"),
        (fenced("def f(): a", "def f(): (b"), "def f(): (b\n"),
        (fenced("def f(): a", "from answer import f\nprint(f())"), "def f(): a\n"),
        (
            fenced("import g", "def f(): return g.h(x)", "x = 1", "f()"),
            "import g\n\ndef f(): return g.h(x)\n\nx = 1\n",
        ),
        (fenced("def f(x): return x", "x = input()"), "def f(x): return x\n"),
        (fenced("    return a"), "    return a\n"),
        ("```\ndef f(): a\n```", "def f(): a\n"),
        ("```\nf() == 1\n```\n~~~py\ndef f(): a\n~~~\n```\n1\n```", "def f(): a\n"),
        ("Here is the code: ```python\ndef f(): a\n```\nIt adds.", "def f(): a\n"),
        ("- f:\n\n      ```{.Python3}\n      def f():\n        a\n      ```", "def f():\n  a\n"),
        ("```python\nunclosed", "unclosed"),
        (fenced("    return a", "f()", ""), "    return a\n"),
        ("```pycon\n>>> f()\n```", "```pycon\n>>> f()\n```"),
        ("<think>\n```python\ndef f(): a\n```\n", ""),
    ],
)
def test_the_program_in_a_reply(reply, code):
    assert replies.program(reply, {"f"}) == code


REPLIES = list(read_jsonl(Path(__file__).with_name("replies.jsonl")))


@pytest.mark.parametrize("group", REPLIES)
def test_scorers_agree_with_a_reader(group):
    """Score {"task", "part", "document", "right": [reply], "missed", "wrong"}, as evaluation/README.md describes.

    The reader takes the "missed" ones for right, the scorer does not: four of 470.
    """
    for verdict in ("right", "missed", "wrong"):
        for reply in group[verdict]:
            (figure,) = getattr(scores, group["task"])(group["document"], [[reply]]).values()
            assert figure == (verdict == "right"), reply


def is_right(reply, gold):
    answer = replies.math_answer(reply)
    return answer is not None and replies.equal_answers(gold, answer)


def last_number(text):
    return float(re.findall(r"-?\d*\.?\d+", text.replace(",", ""))[-1])


@needs_data
@pytest.mark.parametrize(
    ("step", "gsm8k", "math500"),
    [(20, (65, 65, 65), (25, 18, 15)), pytest.param(1, (1283, 1280, 1280), (500, 420, 343), marks=pytest.mark.slow)],
)
def test_solutions_without_a_box_are_read_at_least_as_often_as_by_math_verify(step, gsm8k, math500):
    """Count people's solutions, those read, and those that math_verify reads; cut before the last line none passes.

    They are GSM8K's whose last number is the answer, and MATH-500's with their boxes taken off.
    """
    worked = (re.sub("<<.*?>>", "", row["answer"]).split("\n#### ") for row in data.rows("gsm8k/test.jsonl", DATA))
    worked = [(text, gold) for text, gold in worked if last_number(text) == last_number(gold)]
    proofs = [(replies._BOX.sub(r"\1", r["solution"]), r["answer"]) for r in data.rows("math500/test.jsonl", DATA)]
    for solutions, expected in ((worked[::step], gsm8k), (proofs[::step], math500)):
        ours = stock = 0
        for text, written in solutions:
            gold, rest = replies.math_answer(rf"\boxed{{{written}}}"), text.strip().rpartition("\n")[0]
            ours, stock = ours + is_right(text, gold), stock + verify(list(gold), parse(text))
            assert written in rest or not is_right(rest, gold), rest
        assert (len(solutions), ours, stock) == expected


def test_loss_by_position():
    log_probs = [-float(position) for position in range(1, 228)]
    assert scores.loss_by_position({}, [log_probs]) == {"loss@1": 32.0, "loss@64": 95.5, "loss@128": 177.5}
    assert list(scores.loss_by_position({}, [log_probs[:150]])) == ["loss@1", "loss@64"]


# RULER


@pytest.mark.parametrize(
    ("reply", "references", "first"),
    [
        ("**123**", ["123"], 1),
        ("1234", ["123"], 0),
        ("1. tree 2. Car", ["car", "tree"], 1),
        ("4, 5, and 6.", ["6", "5", "4", "7"], 3 / 4),
        ("4 and then 5", ["4", "5"], 1 / 2),
        ("ABC, ABCD", ["ABC", "ABCD"], 1),
        ("• “123”", ["123"], 1),
        ("_A_ & _B_", ["a", "b"], 1),
        ("-123", ["123"], 0),
        ("- 123", ["123"], 1),
        ("123.5 or red-car", ["123", "red"], 0),
        ("1.5", ["5"], 0),
        ("7. 123", ["123"], 0),
        ("1) 12 2) 34", ["34", "12"], 1),
    ],
)
def test_answer_first(reply, references, first):
    assert ruler.answer_first(reply, references) == pytest.approx(first)


def test_scores_of_ruler():
    document = {"outputs": ["Rome", "the city of Rome"]}
    assert ruler.score_any(document, [["rome"]]) == {"string_match": 1.0, "answer_first": 1.0}
    document = {"outputs": ["12", "34"]}
    every = " ".join(map(str, range(100)))
    assert ruler.score_all(document, [[every]]) == {"string_match": 1.0, "answer_first": 0.0}
    assert ruler.score_all(document, [["34"]])["string_match"] == 0.5


LOCAL_TASKS = [task for task in ruler.TASKS if task not in ruler.QA_FILES]


# At 425 and 820 only the answer's beginning does not fit beside the next larger haystack.
@pytest.mark.parametrize(
    ("task", "length"), [*((task, 1024) for task in LOCAL_TASKS), ("niah_single_1", 425), ("niah_multiquery", 820)]
)
def test_ruler_is_the_same_every_time(task, length):
    def make(count, seed=0):
        return ruler.samples(task, length, count, seed, data.SMOKE, tiny_tokenizer())

    *_, cwe, _, _ = ruler._generators()  # imports draw from the random state, too
    random.seed(1)
    state = random.getstate()
    two = make(2)
    assert random.getstate() == state
    random.seed(2), np.random.seed(2), cwe.RNG.seed(2)
    make(1, seed=5)
    assert make(1) == two[:1] != make(1, seed=1)
    for document in two:
        prompt = f"{document['input']} {document['gen_prefix']}"
        room = ruler.stock_config(task)["generation_kwargs"]["max_gen_toks"]
        assert len(tiny_tokenizer()(prompt)["input_ids"]) + room <= length == document["max_length"]
        assert all(answer in prompt for answer in document["outputs"])


def test_common_words_are_asked_for_after_a_worked_example():
    (document,) = ruler.samples("ruler_cwe", 1024, 1, 0, data.SMOKE, tiny_tokenizer())
    example, prompt = document["input"].split("\nBelow is")
    question = "What are the 10 most common words in the above list?"
    assert f"{question} {document['gen_prefix']}1. " in example and prompt.endswith(question)
    assert 0.95 * 1024 < document["length"] <= 1024
    assert suites._config("ruler_cwe")["target_delimiter"] == " "


def test_ruler_questions_from_a_local_file(tmp_path):
    """Read the two files of questions in the layout of their benchmarks."""

    def squad(i):
        answers = [{"text": f"river {i}"}, {"text": f"on river {i}"}]
        question = {"question": f"Where does town {i} lie?", "is_impossible": False, "answers": answers}
        return {"context": f"Town {i} lies on river {i}.", "qas": [question]}

    def hotpot(i):
        context = [[f"Title {i}.{j}", [f"Text {i}.{j}. ", "More."]] for j in range(10)]
        return {"question": f"Who knows {i}?", "answer": f"name {i}", "context": context}

    articles = [{"paragraphs": [squad(i) for i in part]} for part in (range(15), range(15, 30))]
    for task, content in (("squad", {"data": articles}), ("hotpot", [hotpot(i) for i in range(12)])):
        path = tmp_path / ruler.QA_FILES[f"ruler_qa_{task}"]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    documents = ruler.samples("ruler_qa_squad", 256, 3, 0, tmp_path, tiny_tokenizer())
    assert [document["outputs"] for document in documents] == [[f"river {i}", f"on river {i}"] for i in range(3)]
    assert all(f"Town {i} lies" in document["input"] for i, document in enumerate(documents))
    with pytest.raises(UserError, match="qa_squad at --lengths 100: "):  # but for "Answer:" they would fit
        ruler.samples("ruler_qa_squad", 100, 3, 0, tmp_path, tiny_tokenizer())
    documents = ruler.samples("ruler_qa_hotpot", 512, 2, 0, tmp_path, tiny_tokenizer())
    assert [document["outputs"] for document in documents] == [["name 0"], ["name 1"]]
    assert all(f"Title 1.{j}\nText 1.{j}. More." in documents[1]["input"] for j in range(10))


@pytest.mark.parametrize(
    ("task", "length", "message"),
    [
        ("ruler_vt", 128, "ruler_vt needs about .* --lengths says 128"),
        ("ruler_fwe", 64, "ruler_fwe needs about .* --lengths says 64"),
        ("niah_single_1", 128, "niah_single_1 at --lengths 128: "),
        ("niah_single_2", 100_000, "too short a haystack for --lengths 100000"),
        ("ruler_qa_squad", 512, "squad_dev_v2.json is missing"),
    ],
)
def test_ruler_refuses_what_it_cannot_make(task, length, message):
    with pytest.raises(UserError, match=message):
        ruler.samples(task, length, 2, 0, data.SMOKE, tiny_tokenizer())


def test_skipped_samples_are_refused(monkeypatch):
    niah, *_ = ruler._generators()
    monkeypatch.setattr(niah, "generate_samples", lambda *_, num_samples, **__: [{"input": "a"}] * (num_samples - 1))
    with pytest.raises(UserError, match="1 of 4 samples cannot be made to fit"):
        ruler.samples("niah_single_1", 512, 4, 0, data.SMOKE, tiny_tokenizer())


# Rows


def test_targets_of_dcformers_task():
    rows = list(data.dcformer_synthetic(data.SMOKE)["test"])
    assert [row["target"] for row in rows] == [" fruit", " vehicle"] and [row["shots"] for row in rows] == [2, 3]
    assert rows[1]["context"].endswith("Ann has a kind of fruit\n< Eve has a bus. Bob has a fig. >. Eve has a kind of")
    assert "[" not in rows[1]["context"]


def test_windows_of_text_are_disjoint_and_of_the_asked_length():
    rows = [row["text"] for row in data.text_windows(data.SMOKE, 100, 4, tiny_tokenizer())["test"]]
    assert [len(tiny_tokenizer()(row)["input_ids"]) for row in rows] == [100] * 4
    assert data.text("text/state_union.txt", data.SMOKE).startswith("".join(rows))
    with pytest.raises(UserError, match="a tokenizer in Python, does not: leave the task out"):
        data.text_windows(data.SMOKE, 100, tokenizer=SimpleNamespace(is_fast=False))


def test_files_are_checked_against_the_manifest(tmp_path):
    with pytest.raises(UserError, match=r"gsm8k/test.jsonl is missing \(github.com/openai/grade-school-math\)"):
        data.rows("gsm8k/test.jsonl", tmp_path)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="has SHA-256 ca3d163bab05..., expected 3730d312f6e3"):
        data.rows("gsm8k/test.jsonl", tmp_path)


# Records


WHOLE = {"unfinished": False}


def test_records_survive_a_kill_and_are_shared(tmp_path):
    first, second = sample_key("t", "d", "p", {}, 0), sample_key("t", "d", "p", {}, 1)
    records = Records(tmp_path)
    records.add(first, text="é\n", **WHOLE)
    assert (tmp_path / "rank0.jsonl").read_bytes().endswith(b"\n")  # before the process ends in whatever way
    records.close()
    with open(tmp_path / "rank0.jsonl", "ab") as file:
        file.write(b'{"task": "t", "hash": "')
    records = Records(tmp_path)
    assert len(records) == 1 and records[first]["text"] == "é\n"
    records.add(second, text="b", **WHOLE)
    records.close()
    other = Records(tmp_path, rank=1)
    assert len(other) == 2 and other[second]["text"] == "b"
    with open(tmp_path / "rank0.jsonl", "ab") as file:
        file.write(b"{}\n")
    with pytest.raises(UserError, match="rank0.jsonl, line 3, which to go on remove: task is missing"):
        Records(tmp_path, rank=2)


def test_a_sample_belongs_to_what_was_asked():
    settings = [{"temperature": 1}, {"temperature": 2}]
    keys = {sample_key(*asked) for asked in itertools.product("ab", "ab", "ab", settings, (0, 1))}
    assert len(keys) == 32 and len({sample_seed(0, key) for key in keys}) == 32


# Sampling


def test_samples_follow_the_softmax_and_their_own_seed():
    logits, count = torch.tensor([1.0, 0.0, -torch.inf, 2.0]), 20_000
    scores_in = logits.expand(count, -1)
    tokens = SeededSampling(list(range(count)), 0.6, 3, 5)(torch.zeros(count, 4, dtype=torch.long), scores_in)
    tokens = tokens.argmax(-1)
    expected = (logits / 0.6).softmax(-1)
    assert (tokens.bincount(minlength=4) / count - expected).abs().max() < 4 * 0.5 / count**0.5
    some = SeededSampling([7, 3], 0.6, 3, 9)(torch.zeros(2, 4, dtype=torch.long), scores_in[:2]).argmax(-1)
    assert some.tolist() == tokens[[7, 3]].tolist()
    steps = [SeededSampling([7], 0.6, 3, 9)(torch.zeros(1, 3 + i, dtype=torch.long), scores_in[:1]) for i in range(9)]
    assert len({step.argmax().item() for step in steps}) > 1


# The words of the tiny tokenizer, so that prompts differ for the model.
WORDS = sorted(word for word in tiny_tokenizer().get_vocab() if word.isalpha())
SETTINGS = {"do_sample": True, "temperature": 0.6, "max_gen_toks": 6, "until": []}


def requests(count=3, repeats=2, settings=SETTINGS, words=8):
    """Repeat each request as often as it has samples, as lm-eval does."""
    prompts = [" ".join(WORDS[i : i + words + i]) for i in range(count)]
    instances = [
        Instance("generate_until", {"id": i}, (prompt, settings), 0, ("task", i, repeats))
        for i, prompt in enumerate(prompts)
    ]
    return [instance for instance in instances for _ in range(repeats)]


def fails(error):
    """Return a function of any arguments that raises `error`."""

    def fail(*_, **__):
        raise error

    return fail


def recorded(directory, model=None, **options):
    model = model or tiny_source()
    return RecordedModel(model, tiny_tokenizer(), Records(directory), **options)


def generated(directory, asked, **options):
    model = recorded(directory, **options)
    replies = model.generate_until(asked, disable_tqdm=True)
    model.records.close()
    return replies


def test_samples_do_not_depend_on_batch_order_or_number(tmp_path):
    replies = generated(tmp_path / "a", requests(), batch_size=1)
    assert len(set(replies)) == len(replies)  # no two samples, not even of one question
    assert generated(tmp_path / "b", requests(), batch_size=4) == replies
    assert generated(tmp_path / "c", requests()[::-1], batch_size=2)[::-1] == [
        replies[i] for pair in ((1, 0), (3, 2), (5, 4)) for i in pair
    ]
    assert generated(tmp_path / "d", requests(repeats=4), batch_size=3)[4:6] == replies[2:4]
    assert generated(tmp_path / "e", requests(), batch_size=3, seed=1) != replies


def test_a_killed_run_continues(tmp_path, monkeypatch):
    replies = generated(tmp_path / "whole", requests(), batch_size=2)
    model = recorded(tmp_path / "killed", batch_size=2)
    generate, calls = model._replies, []

    def killed(batch):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(len(batch))
        return generate(batch)

    monkeypatch.setattr(model, "_replies", killed)
    with pytest.raises(KeyboardInterrupt):
        model.generate_until(requests(), disable_tqdm=True)
    model.records.close()

    model = recorded(tmp_path / "killed", batch_size=2)
    generate, rest = model._replies, []
    monkeypatch.setattr(model, "_replies", lambda batch: rest.extend(batch) or generate(batch))
    assert model.generate_until(requests(), disable_tqdm=True) == replies
    assert len(rest) == 6 - 4
    rest.clear()
    more = model.generate_until(requests(repeats=3), disable_tqdm=True)  # one more sample of each
    assert len(rest) == 3 and [more[i] for i in (0, 1, 3, 4, 6, 7)] == replies


def test_greedy_replies_are_generates_and_the_checkpoints_settings_are_put_aside(tmp_path):
    settings = {"do_sample": False, "max_gen_toks": 6, "until": []}
    model = tiny_source()
    inputs = [tiny_tokenizer()(request.args[0], return_tensors="pt")["input_ids"] for request in requests(3, 1)]
    outputs = [model.generate(ids, max_new_tokens=6, do_sample=False)[0] for ids in inputs]
    texts = [tiny_tokenizer().decode(output, skip_special_tokens=True) for output in outputs]
    expected = [text.removeprefix(request.args[0]) for text, request in zip(texts, requests(3, 1), strict=True)]
    model.generation_config.update(repetition_penalty=5.0, max_new_tokens=1, do_sample=True, temperature=9.0)
    assert generated(tmp_path, requests(3, 1, settings), model=model) == expected and len(set(expected)) == 3


def test_a_thought_that_the_prompt_opens_is_a_part_of_the_reply(tmp_path):
    (asked,) = requests(1, 1)
    asked.arguments = (f"{asked.args[0]} <think>\n", SETTINGS)
    (reply,) = generated(tmp_path, [asked])
    (row,) = read_jsonl(tmp_path / "rank0.jsonl")
    assert reply == f"<think>{row['text']}" and replies.final_part(reply) == "" != row["text"]


def test_a_reply_ends_at_a_stop_or_an_end_token_or_is_unfinished(tmp_path):
    model = recorded(tmp_path)
    words = tiny_tokenizer().decode([10, 11, 12]).split()
    ids = [10, 11, 12]
    assert model._reply([], [*ids, 2, 0, 0], [], 6) == {"text": " ".join(words), "tokens": 3, "unfinished": False}
    assert model._reply([], ids, [], 3)["unfinished"]
    assert model._reply([], ids, [words[1]], 3) == {"text": f"{words[0]} ", "tokens": 3, "unfinished": False}
    assert model._reply([], [3, *ids], [], 9)["text"] == ""  # the generation config's second end token


def test_a_reply_keeps_the_blanks_that_it_begins_with(tmp_path):
    model = recorded(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({"def": 0, ":\n": 1, "▁▁▁▁": 4, "return": 5}, unk_token="def"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert model._reply([0, 1], [4, 5], [], 9)["text"] == "    return"


def test_prompts_that_do_not_fit_are_refused_or_counted(tmp_path):
    model = tiny_source(max_position_embeddings=16)
    strict, cutting = recorded(tmp_path / "a", model), recorded(tmp_path / "b", model, truncate=True)
    strict.check_prompts("task", requests(2, 1, words=8))
    assert strict.lengths == {"task": [8, 9]}
    long = requests(3, 2, {"do_sample": False, "max_gen_toks": 6}, words=9)
    with pytest.raises(UserError, match="task: 1 prompts do not fit: .* up to 17 tokens, 6 of .* context has 16"):
        strict.check_prompts("task", long[::2])
    cutting.check_prompts("task", long[::2])
    assert cutting.counts["task"]["truncated_prompts"] == 1
    reply = cutting.generate_until(long, disable_tqdm=True)[4]
    ids = tiny_tokenizer()(long[4].args[0], return_tensors="pt")["input_ids"][:, -10:]  # the question is at the end
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=[2, 3])[0, 10:]
    assert reply == " " + tiny_tokenizer().decode(expected, skip_special_tokens=True)
    for limit in (16, 20):  # a cut prompt makes no room for a reply as long as the context
        with pytest.raises(UserError, match=f"1 prompts do not fit: .* {limit} of them the reply's"):
            cutting.check_prompts("task", requests(1, 1, {"do_sample": False, "max_gen_toks": limit}))


def test_likelihoods_that_do_not_fit_are_refused_or_counted(tmp_path):
    """Take 16 tokens and the one that they predict, of which lm-eval would cut the first ones without a word."""
    model, texts = tiny_source(max_position_embeddings=16), [" ".join(WORDS[:n]) for n in (16, 17, 18)]
    strict, cutting = recorded(tmp_path / "a", model), recorded(tmp_path / "b", model, truncate=True)
    words = [Instance("loglikelihood", {}, (text, f" {WORDS[0]}"), 0, ("t", 0, 1)) for text in texts[:2]]
    whole = [Instance("loglikelihood_rolling", {}, (text,), 0, ("t", 0, 1)) for text in texts[1:]]
    for fitting, long in (words, whole):
        strict.check_prompts("t", [fitting])
        with pytest.raises(UserError, match="t: 1 prompts do not fit: .* up to 17 tokens, .* the context has 16"):
            strict.check_prompts("t", [fitting, long])
        cutting.check_prompts("t", [fitting, long])
    assert cutting.counts["t"]["truncated_prompts"] == 2
    losses = cutting.loglikelihood_rolling(whole, disable_tqdm=True)
    assert losses[0] == losses[1] and len(losses[0]) == 16


def test_losses_of_a_text_are_those_of_a_direct_call(tmp_path):
    model = tiny_source()
    text = " ".join(WORDS[:20])
    request = Instance("loglikelihood_rolling", {}, (text,), 0, ("t", 0, 1))
    ids = tiny_tokenizer()(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = -torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    (found,) = recorded(tmp_path, model).loglikelihood_rolling([request], disable_tqdm=True)
    assert torch.tensor(found).sub(expected).abs().max() < 1e-5


# The command


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tiny_source(directory, max_position_embeddings=2048)
    return directory


@pytest.fixture
def offline(monkeypatch):
    refuse = fails(AssertionError("something wants a network"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def smoke(tiny, tmp_path_factory):
    """Run the smoke suite offline, and return its results and its output directory."""
    output = tmp_path_factory.mktemp("smoke") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_code, "_confirmed", True)
        for owner, name in ((socket.socket, "connect"), (socket, "getaddrinfo")):
            patch.setattr(owner, name, fails(AssertionError("something wants a network")))
        return run.main([str(tiny), "--suite", "smoke", "--output", str(output)]), output


def test_the_smoke_suite_offline_and_again(smoke, tiny, tmp_path, offline, monkeypatch):
    results, output = smoke[0], shutil.copytree(smoke[1], tmp_path / "out")
    assert set(results["tasks"]) == {
        *(name for name in suites.SUITES["smoke"] if name not in suites.BY_LENGTH),
        *("niah_multikey_1@512", "niah_single_1@512", "perplexity_by_position@512"),
    }
    for name, task in results["tasks"].items():
        assert task["examples"] == 2 and task["metrics"], name
        assert all(figure["stderr"] is not None for figure in task["metrics"].values())
        assert task["truncated_prompts"] == 0
    assert results["tasks"]["gsm8k"]["metrics"].keys() == {"pass@1", "maj@2"}
    assert "maj@5" in results["tasks"]["gsm8k_5shot_maj5"]["metrics"]
    assert results["tasks"]["niah_multikey_1@512"]["note"] == ruler.NOT_COMPARABLE
    assert "note" not in results["tasks"]["niah_single_1@512"]
    assert read_json(output / "results.json") == results
    text = (output / "report.md").read_text()
    assert "gsm8k: 4 of 4 replies were still going" in text and "not comparable" in text
    assert "Beside the paper" not in text and "| **ours** |" not in text  # the examples are hand-made
    assert "The replies were made at" not in text
    assert {path.name for path in output.glob("*.png")} == {"ruler.png", "loss_by_position.png"}
    rows = list(read_jsonl(output / "samples_gsm8k.jsonl"))
    assert [len(row["replies"]) for row in rows] == [2, 2] and rows[0]["target"].endswith("#### 7")

    monkeypatch.setattr(RecordedModel, "_replies", fails(AssertionError("a recorded sample is generated again")))
    record = output / "samples" / "rank0.jsonl"
    assert results["sample_commits"] == [results["commit"]]
    older = {"gsm8k": {"commit": "0" * 40}}
    write_jsonl(record, [sample | older.get(sample["task"], {}) for sample in read_jsonl(record)])
    tasks = ["gsm8k", "niah_single_1", "dcformer_synthetic"]
    again = run.main([str(tiny), "--suite", "smoke", "--tasks", *tasks, "--output", str(output)])
    assert len(again["tasks"]) == 3 and all(entry == results["tasks"][name] for name, entry in again["tasks"].items())
    assert again["sample_commits"] == sorted(["0" * 40, results["commit"]])
    assert f"The replies were made at commit {'0' * 40}" in (output / "report.md").read_text()
    with sole_writer(output), pytest.raises(UserError, match="Another run is writing"):
        run.main([str(tiny), "--suite", "smoke", "--output", str(output)])
    with pytest.raises(UserError, match="holds samples of another seed"):
        run.main([str(tiny), "--suite", "smoke", "--output", str(output), "--seed", "1"])


@pytest.fixture
def two_runs(smoke, tmp_path) -> list[Path]:
    """Copy an evaluation, and make one of two answers right by hand."""
    runs = [shutil.copytree(smoke[1], tmp_path / name) for name in ("base", "tuned")]
    first, second = read_jsonl(runs[1] / "samples_niah_single_1@512.jsonl")
    second |= {"replies": ["7"], "string_match": 1.0}
    write_jsonl(runs[1] / "samples_niah_single_1@512.jsonl", [first, second])
    results = read_json(runs[1] / "results.json")
    results["tasks"]["niah_single_1@512"]["metrics"]["string_match"] = {"value": 0.5, "stderr": 0.5}
    results["tasks"]["gsm8k"]["metrics"]["other"] = results["tasks"]["gsm8k"]["metrics"].pop("maj@2")
    write_json(runs[1] / "results.json", results)
    return runs


def test_two_evaluations_are_compared_example_by_example(two_runs, tmp_path):
    compare.main([*map(str, two_runs), "--output", str(tmp_path / "comparison.md")])
    text = (tmp_path / "comparison.md").read_text()
    assert "| niah_single_1@512 | string_match | 2 | 0.0 ± 0.0 | 50.0 ± 50.0 | 50.0 ± 50.0 | 1 |" in text
    assert "| gsm8k | pass@1 | 2 | 0.0 ± 0.0 | 0.0 ± 0.0 | 0.0 ± 0.0 | 0 |" in text
    assert re.search(r"\| dcformer_synthetic \| acc \| 2 \|.*\| – \|$", text, re.MULTILINE)  # it has no replies
    assert "| gsm8k | maj@2 |" not in text and "| other |" not in text
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_evaluations_that_are_not_alike_are_not_compared(two_runs, tmp_path):
    def refused(*runs) -> str:
        with pytest.raises(UserError) as error:
            compare.main([*map(str, runs), "--output", str(tmp_path / "comparison.md")])
        assert not (tmp_path / "comparison.md").exists()
        return str(error.value)

    base, tuned = two_runs
    assert "two or more directories" in refused(base, base)
    file = tuned / "samples_gsm8k.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n")
    message = refused(base, tuned)
    assert "gsm8k has other examples in tuned than in base" in message and "--seed and on the tokenizer" in message
    file, results = tuned / "results.json", read_json(base / "results.json")
    gsm8k = results["tasks"]["gsm8k"]
    for what, value in (("generation", {}), ("chat", not gsm8k["chat"])):
        write_json(file, results | {"tasks": results["tasks"] | {"gsm8k": gsm8k | {what: value}}})
        assert f"gsm8k has another {what} in tuned than in base" in refused(base, tuned)
    write_json(file, results | {"tasks": {}})
    assert "no task in common" in refused(base, tuned)


def test_cut_prompts_are_reported(tmp_path, offline, monkeypatch, capsys):
    monkeypatch.setattr(cpu_precision, "SLOW_DTYPES", [torch.bfloat16])
    save_tiny_source(tmp_path / "short", max_position_embeddings=128)
    arguments = [str(tmp_path / "short"), "--suite", "smoke", "--tasks", "niah_single_1", "--truncate-prompts"]
    results = run.main([*arguments, "--dtype", "bfloat16", "--output", str(tmp_path / "out")])
    assert results["tasks"]["niah_single_1@512"]["truncated_prompts"] == 2
    assert "niah_single_1@512: 2 prompts were cut to fit" in (tmp_path / "out" / "report.md").read_text()
    if results["device"] == "cpu":
        assert SLOW in capsys.readouterr().err


def test_a_checkpoint_is_told_by_what_it_is_loaded_from(tmp_path):
    save_tiny_source(tmp_path / "a")
    before = run.fingerprint(tmp_path / "a")
    (tmp_path / "a" / "README.md").write_text("changed")
    assert run.fingerprint(tmp_path / "a") == before
    edit_config(tmp_path / "a", rope_theta=1.0)
    data.file_sha256.cache_clear()
    assert run.fingerprint(tmp_path / "a") != before


def test_tasks_are_told_by_the_files_that_they_include(tmp_path, monkeypatch):
    before = run.task_hash()
    monkeypatch.setattr(suites, "TASKS", shutil.copytree(suites.TASKS, tmp_path / "tasks"))
    assert run.task_hash() == before
    with open(tmp_path / "tasks" / "gsm8k_5shot.yaml", "a") as file:  # gsm8k_5shot_maj5 includes it
        file.write("num_fewshot: 4\n")
    assert run.task_hash() != before


@pytest.mark.slow
def test_two_processes_give_the_samples_of_one(tiny, tmp_path):
    """Give two processes three examples: different numbers of them. The imports take half a minute."""
    tasks = ["gsm8k", "gsm8k_5shot", "niah_single_1", "dcformer_synthetic", "perplexity_by_position"]
    arguments = [str(tiny), "--suite", "smoke", "--tasks", *tasks, "--output"]
    run.main([*arguments, str(tmp_path / "one"), "--limit", "3"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", run.__file__]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}

    def start(*options):
        return subprocess.run(
            [*command, *arguments, str(tmp_path / "two"), *options], env=environment, capture_output=True, text=True
        )

    assert "has 1 examples for 2 processes" in start("--limit", "1").stderr
    process = start("--limit", "3")
    assert process.returncode == 0, process.stderr
    # The processes put other documents together into a batch, which changes the last digits of losses in float32.
    one, two = (
        json.loads((tmp_path / number / "results.json").read_text(), parse_float=lambda text: round(float(text), 4))
        for number in ("one", "two")
    )
    assert two["processes"] == 2 and two["tasks"] == one["tasks"]
    for name in ("gsm8k", "niah_single_1@512"):
        files = [(tmp_path / number / f"samples_{name}.jsonl").read_text() for number in ("one", "two")]
        assert files[0] == files[1]
    assert all((tmp_path / "two" / "samples" / f"rank{rank}.jsonl").stat().st_size for rank in (0, 1))


def test_chat_tasks_see_a_chat_and_others_do_not(tiny, tmp_path, offline, monkeypatch):
    prompts = {}

    def watch(self, batch):
        prompts.update({key[0]: prompt for key, (prompt, _) in batch})
        return [{"text": "", "unfinished": False}] * len(batch)

    monkeypatch.setattr(RecordedModel, "_replies", watch)
    arguments = [str(tiny), "--suite", "smoke", "--tasks", "gsm8k", "gsm8k_5shot", "mbpp_5shot", "--limit", "1"]
    run.main([*arguments, "--output", str(tmp_path / "a")])
    assert prompts["gsm8k"].startswith("<s> Ann has 3") and prompts["gsm8k"].endswith(r"\boxed{}. </s><s>")
    assert prompts["gsm8k_5shot"].startswith("Question: What is 1 + 2?\nAnswer: 1 + 2 =")
    assert prompts["gsm8k_5shot"].count("####") == 5 and prompts["gsm8k_5shot"].endswith("has she?\nAnswer:")
    assert prompts["mbpp_5shot"].count("[DONE]") == 5 and prompts["mbpp_5shot"].endswith("[BEGIN]\n")
    run.main([*arguments, "--output", str(tmp_path / "b"), "--no-chat"])
    assert prompts["gsm8k"].startswith("Ann has 3")


def test_a_chat_template_says_the_same_day_and_ends(tmp_path, monkeypatch):
    model, chat = recorded(tmp_path), [{"role": "user", "content": "Hello"}]
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ strftime_now('%d %b %Y') }}")
    assert model.apply_chat_template(chat) == "26 Jul 2024"
    monkeypatch.setattr("evaluation.recorded_model.TEMPLATE_SECONDS", 0.2)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", endless)
    with pytest.raises(UserError, match="chat: it takes more than"):
        model.apply_chat_template(chat)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("TINY smoke --tasks chess", "--tasks chess: not a task of the suite smoke"),
        ("TINY smoke --limit 0", "--limit 0: expected at least 1"),
        ("TINY ruler --lengths 8", "--lengths 8: expected at least 64"),
        ("TINY ruler --tasks niah_single_2", "text/state_union.txt is not on the Hub .* --data"),
        ("MUTE smoke", "mute holds no tokenizer: save one beside the weights"),
        ("PLAIN smoke", "writes no chat, as gsm8k, math500, mbpp, humaneval need: add a template"),
        ("ENDED smoke", "puts its end token </s> behind every text"),
        ("SHORT smoke", "gsm8k_5shot: 2 prompts do not fit: .* the context has 128"),
        ("TINY smoke --output FILES", "is no output of this command: choose another --output"),
    ],
)
def test_mistakes_get_one_line_before_anything_is_generated(
    arguments, message, tiny, tmp_path, offline, monkeypatch, capsys
):
    monkeypatch.setattr(RecordedModel, "_replies", fails(AssertionError("something is generated")))
    mute, plain, ended, short, files = (tmp_path / name for name in ("mute", "plain", "ended", "short", "files"))
    tiny_source().save_pretrained(mute)
    save_tiny_source(ended)
    ends = Tokenizer.from_file(str(ended / "tokenizer.json"))
    ends.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    ends.save(str(ended / "tokenizer.json"))
    save_tiny_source(plain)
    edit_config(plain, "tokenizer_config.json", chat_template=None)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    save_tiny_source(short, max_position_embeddings=128)
    files.mkdir()
    (files / "notes.txt").write_text("mine")
    places = {"TINY": tiny, "MUTE": mute, "PLAIN": plain, "ENDED": ended, "SHORT": short, "FILES": files}
    model, suite, *options = [str(places.get(argument, argument)) for argument in arguments.split()]
    output = ["--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["run", model, "--suite", suite, *output, *options])
    with pytest.raises(SystemExit) as stopped:
        run_cli(run.main)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert stopped.value.code == 1 and len(errors) == 1
    assert re.search(message, errors[0]), errors[0]
    assert (files / "notes.txt").read_text() == "mine" and not (tmp_path / "out" / "results.json").exists()


def test_code_that_cannot_be_isolated_is_not_run_unasked(tiny, tmp_path, offline, monkeypatch):
    monkeypatch.setattr(run_code, "_confirmed", False)
    monkeypatch.setattr(run_code, "isolates", lambda: False)
    smoke = [str(tiny), "--suite", "smoke", "--limit", "1", "--output", str(tmp_path / "out"), "--tasks"]
    for task in ("mbpp", "humaneval", "mbpp_5shot", "humaneval_completion"):
        with pytest.raises(UserError, match="leave their tasks out, or give --confirm-run-unsafe-code"):
            run.main([*smoke, task])
    assert not (tmp_path / "out").exists()
    results = run.main([*smoke, "humaneval_completion", "--confirm-run-unsafe-code"])
    assert "humaneval_completion" in results["tasks"] and not results["isolated_code"]


# The report


def ruler_entry(value):
    return {"metrics": {name: {"value": value, "stderr": 0.1} for name in ("string_match", "answer_first")}}


def test_means_of_ruler_are_over_the_lengths_that_were_run():
    values = {"niah_single_1@512": 1.0, "niah_single_1@1024": 0.5, "ruler_vt@1024": 0.0}
    means = report.ruler_means({name: ruler_entry(value) for name, value in values.items()} | {"gsm8k": {}})
    assert means["by_length"]["512"]["string_match"]["value"] == 1.0
    assert means["by_length"]["1024"]["string_match"] == {"value": 0.25, "stderr": pytest.approx(0.02**0.5 / 2)}
    assert means["all"]["string_match"]["value"] == 0.5 and means["tasks"] == ["niah_single_1", "ruler_vt"]
    assert report.ruler_means({"gsm8k": {}}) == {}


@pytest.mark.parametrize(
    ("left_out", "note", "suite", "beside"),
    [
        (0, {}, "ruler", True),
        (1, {}, "ruler", False),
        (0, {"note": ruler.NOT_COMPARABLE}, "ruler", False),
        (0, {}, "smoke", False),
    ],
)
def test_only_a_mean_of_rulers_own_tasks_stands_beside_the_papers(left_out, note, suite, beside):
    counts = {"examples": 50, "samples_each": 1, "truncated_prompts": 0, "unfinished_replies": 0}
    entry = {**ruler_entry(0.5), **counts, "prompt_tokens": {"min": 1, "max": 2}}
    tasks = {f"{name}@512": dict(entry) for name in ruler.TASKS[left_out:]}
    tasks["niah_single_2@512"] |= note
    about = {"model": "m", "suite": suite, "parameters": 1, "model_dtype": "float32", "seed": 0, "seconds": 1}
    about |= {"commit": "0", "sample_commits": ["0"], "checkpoint": "0", "processes": 1, "device": "cpu"}
    text = report.markdown({**about, "versions": {}, "tasks": tasks, "ruler": report.ruler_means(tasks)}, [])
    assert ("| **ours** | 50.0" in text) == ("Beside the paper" in text) == beside
    assert "ruler_cwe begins with its worked example" in text


def test_every_figure_of_the_paper_belongs_to_a_task_and_metric():
    for table in ("table_1", "table_2"):
        for column in report.PAPER[table]["columns"]:
            assert column["task"] in suites.SUITES["paper"] and len(column["paper"]) == 5
    assert len(suites.SUITES["ruler"]) == 13 + 1 and suites.SUITES["ruler"][0] == "niah_multikey_1"
