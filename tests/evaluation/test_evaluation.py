"""Test scorers, what is mended of lm-eval, the commands of `evaluation`, and their one-line errors."""

import importlib
import itertools
import math
import os
import random
import re
import runpy
import shutil
import socket
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_sources import edit_config, save_tiny_source, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast


pytest.importorskip("math_verify", reason='the extra "evaluation" is not installed')

import nltk
import wonderwords
from lm_eval.api.instance import Instance
from lm_eval.tasks.ruler import cwe_utils
from math_verify import parse, verify

from evaluation import compare, data, options, replies, report, run, scores, suites
from evaluation.model import Model, on_one_day
from iha.checkpoints import load_model
from iha.errors import ROOT, UserError
from iha.files import read_json, read_jsonl, sole_writer, write_json, write_jsonl
from iha.sources import find_source


# The full data files are no part of the repository.
DATA = Path(os.environ.get("EVALUATION_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "gsm8k").is_dir(), reason="no data files: set EVALUATION_DATA to a directory as in data_manifest.json"
)


# Scorers


# Each of these functions returns a gold reply and a broken reply to a row.


def _gsm8k(row: dict) -> tuple[str, str]:
    worked, _, answer = row["answer"].rpartition("####")
    return row["answer"], f"{worked}#### {int(answer.replace(',', '')) + 1}"


def _math500(row: dict) -> tuple[str, str]:
    return row["solution"], "The answer is $\\boxed{-987654321.5}$."


def _mbpp(row: dict) -> tuple[str, str]:
    name = re.search(r"(\w+)\s*\(", row["test_list"][0].removeprefix("assert")).group(1)
    broken = f"{row['code']}\ndef {name}(*arguments): raise NotImplementedError"
    return f"Some thoughts.\n```python\n{row['code']}\n```\nDone.", f"```python\n{broken}\n```"


def _humaneval(row: dict) -> tuple[str, str]:
    whole = f"{row['prompt']}{row['canonical_solution']}"
    return f"```python\n{whole}\n```", f"```python\n{row['prompt']}    return None\n```"


# A benchmark -> its file of rows, its scorer, and the function that makes replies.
REPLAYS: dict[str, tuple[str, Callable, Callable]] = {
    "gsm8k": ("gsm8k/test.jsonl", scores.gsm8k, _gsm8k),
    "math500": ("math500/test.jsonl", scores.math500, _math500),
    "mbpp": ("mbpp/test.jsonl", scores.mbpp, _mbpp),
    "humaneval": ("humaneval/HumanEval.jsonl", scores.humaneval, _humaneval),
}


@pytest.mark.parametrize("name", REPLAYS)
@pytest.mark.parametrize(
    ("directory", "limit"),
    [
        (data.SMOKE, None),
        pytest.param(DATA, 5, marks=needs_data),
        pytest.param(DATA, None, marks=[needs_data, pytest.mark.slow]),
    ],
)
def test_gold_scores_1_and_broken_0(name, directory, limit):
    """Give each scorer its benchmark's own answers and broken ones: with another number, or a program that fails."""
    file, scorer, replies_to = REPLAYS[name]
    rows = data.rows(file, directory)[:limit]
    figures = [[figure for reply in replies_to(row) for figure in scorer(row, [reply]).values()] for row in rows]
    assert len(rows) > 1 and figures == [[1, 0]] * len(rows)


def test_majority_counts_equal_answers_together_and_none_never():
    def voted(*replies):
        return scores.gsm8k({"answer": "#### 1000"}, list(replies))[f"maj@{len(replies)}"]

    assert voted("1,000", "7", "7", r"\boxed{10^3}", r"\boxed{\frac{2000}{2}}") == 1  # three equal ones
    assert voted("none", "none", "none", "1000") == 1
    assert voted("1000", "7") == 1 and voted("7", "1000") == 0  # of equally many the first
    assert voted("none", "") == 0
    empty = [r"I put it in \boxed{}.", r"\boxed{ }", r"\boxed{\text{}}", r"\boxed{\ldots}"]
    assert voted("1000", "1000", *empty) == 1  # a box that holds nothing has no vote
    shares = [r"\boxed{0.18}", r"\boxed{18\%}", r"\boxed{18\%}", r"\boxed{18}"]  # the middle ones equal all
    gold = {"answer": "#### 18"}
    assert [scores.gsm8k(gold, order)["maj@4"] for order in (shares, shares[::-1])] == [1, 1]
    row = scores.gsm8k({"answer": "#### 1000"}, ["#### 1,000", "#### 7", "#### 7", "#### 1000", "#### 1000.0"])
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
    assert scores.mbpp(own, [fenced("def sum(a, b): return 6", "print(sum(10, 15))")]) == {"pass@1": 1}
    monkeypatch.setattr(scores, "passes_each", lambda programs: ["return 0" not in program for program in programs])
    assert scores.mbpp(row, [wrong] * 9 + [right]) == pytest.approx({"pass@1": 0.1, "pass@10": 1.0})
    assert scores.mbpp(row, [right] * 9) == {"pass@1": 1.0}


def fenced(*blocks):
    return "\nText:\n".join(f"```python\n{block}\n```" for block in blocks)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (fenced("def f(): a", "def f(): (b"), "def f(): (b\n"),
        (fenced("def f(): a", "from answer import f\nprint(f())"), "def f(): a\n"),
        (
            fenced("import g", "def f(): return g.h(x)", "x = 1", "f()"),
            "import g\n\ndef f(): return g.h(x)\n\nx = 1\n",
        ),
        (fenced("def f(x): return x", "x = input()"), "def f(x): return x\n"),
        (fenced("    return a"), "    return a\n"),
        ("```\nf() == 1\n```\n~~~py\ndef f(): a\n~~~\n```\n1\n```", "def f(): a\n"),
        ("Here is the code: ```python\ndef f(): a\n```\nIt adds.", "def f(): a\n"),
        ("- f:\n\n      ```{.Python3}\n      def f():\n        a\n      ```", "def f():\n  a\n"),
        ("```\ndef f(): a\n```\nUse:\n```python\nprint(f())\n```", "def f(): a\n"),
        ("```pycon\n>>> f()\n```", "```pycon\n>>> f()\n```"),
        ("<think>\n```python\ndef f(): a\n```\n", ""),
    ],
)
def test_the_program_in_a_reply(reply, code):
    assert replies.program(reply, {"f"}) == code


@pytest.mark.parametrize(
    "reply",
    [
        "####" + 400 * "\n" + "x",
        "#### " + 20_000 * "1" + "x",
        r"\boxed{3}" + 20_000 * " " + r"\boxed{4}",
        r"\boxed{3} and" + 20_000 * " " + r"x\boxed{4}",
        20_000 * r"\boxed{",
    ],
    ids=["blank lines", "digits", "blanks between boxes", "blanks after a word", "boxes without end"],
)
def test_the_time_to_find_an_answer_grows_with_the_reply(reply):
    start = time.process_time()
    found, _ = replies.boxes(reply)
    assert not replies._MARKER.findall(reply)
    assert len(found) < 2 or not replies._JOINT.fullmatch(reply, found[0].end, found[1].start)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", "18"),
        ("####18.", "18"),
        ("#### $ 18", "$ 18"),
        ("#### -$5", "-$5"),
        ("#### \\$-1,000.50", "\\$-1,000.50"),
        ("#### 18 %", "18 %"),
        ("#### .5\\%", ".5\\%"),
        ("#### 18.\r\n", "18"),
        ("####\n\n18\nmore", "18"),
        ("#### 18 apples", None),
        ("##### 18", None),
        ("#### 18,", None),
    ],
)
def test_the_number_after_the_marker(text, number):
    found = [each.strip() for each in replies._MARKER.findall(text)]
    assert found == ([] if number is None else [number])


def test_boxes_are_found_in_their_order():
    text = r"a} \boxed{1}, \fbox {\boxed{2} b}, \boxed{ {3} \boxed{4}"
    found, is_open = replies.boxes(text)
    assert [box.content for box in found] == ["1", r"\boxed{2} b", "4"] and not is_open
    assert all(text[box.start : box.end].endswith(f"{box.content}}}") for box in found)
    assert replies.boxes(r"\boxed{1} \boxed{2")[1]


def test_ranges_that_sympy_does_not_solve_are_read_as_math_verify_reads_them():
    answer = r"\boxed{\sin x < \frac12 \text{ or } x > 3}"
    assert is_right(answer, replies.math_answer(answer))


def test_a_program_that_the_parser_takes_no_more_is_no_program():
    prose = fenced("the " * 2000)
    assert replies.program(prose, {"f"}) == "the " * 2000 + "\n"
    assert replies.names_needed("the " * 2000) == set()


REPLIES = list(read_jsonl(Path(__file__).with_name("replies.jsonl")))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("group", REPLIES)
def test_scorers_agree_with_a_reader(group):
    """Score {"task", "part", "document", "right": [reply], "missed", "wrong"}, as evaluation/README.md describes.

    The reader takes the "missed" ones for right, the scorer does not: four of 470.
    """
    for verdict in ("right", "missed", "wrong"):
        for reply in group[verdict]:
            (figure,) = getattr(scores, group["task"])(group["document"], [reply]).values()
            assert figure == (verdict == "right"), reply


def is_right(reply, gold):
    answer = replies.math_answer(reply)
    return answer is not None and replies.equal_answers(gold, answer)


def unboxed(text):
    """Return `text` with the content of its boxes in their place."""
    for box in reversed(replies.boxes(text)[0]):
        text = text[: box.start] + box.content + text[box.end :]
    return text


def last_number(text):
    return float(re.findall(r"-?\d*\.?\d+", text.replace(",", ""))[-1])


@needs_data
@pytest.mark.parametrize(
    ("step", "gsm8k", "math500"),
    [(40, (33, 33, 33), (13, 10, 8)), pytest.param(1, (1283, 1280, 1280), (500, 420, 343), marks=pytest.mark.slow)],
)
def test_solutions_without_a_box_are_read_at_least_as_often_as_by_math_verify(step, gsm8k, math500):
    """Count people's solutions, those read, and those that math_verify reads; cut before the last line none passes.

    They are GSM8K's whose last number is the answer, and MATH-500's with their boxes taken off.
    """
    worked = (re.sub("<<.*?>>", "", row["answer"]).split("\n#### ") for row in data.rows("gsm8k/test.jsonl", DATA))
    worked = [(text, gold) for text, gold in worked if last_number(text) == last_number(gold)]
    proofs = [(unboxed(r["solution"]), r["answer"]) for r in data.rows("math500/test.jsonl", DATA)]
    for solutions, expected in ((worked[::step], gsm8k), (proofs[::step], math500)):
        ours = stock = 0
        for text, written in solutions:
            gold, rest = replies.math_answer(rf"\boxed{{{written}}}"), text.strip().rpartition("\n")[0]
            ours, stock = ours + is_right(text, gold), stock + verify(list(gold), parse(text))
            assert written in rest or not is_right(rest, gold), rest
        assert (len(solutions), ours, stock) == expected


def test_loss_by_position():
    log_probs = [-float(position) for position in range(1, 228)]
    found = scores.loss_by_position({"mean_bytes": 900}, [log_probs])
    assert found.pop("bits_per_byte") == pytest.approx(25_878 / 900 / math.log(2))
    assert found == {"loss@1": 32.0, "loss@64": 95.5, "loss@128": 177.5}
    assert "loss@128" not in scores.loss_by_position({"mean_bytes": 1}, [log_probs[:150]])


def test_bits_per_byte_and_loss_by_position_of_any_text(tiny, tmp_path):
    (tmp_path / "text.txt").write_text("All that glisters is not gold. " * 20)
    arguments = ["--text", tmp_path / "text.txt", "--lengths", 64, "--output", tmp_path / "out"]
    task = run.main([str(word) for word in (tiny, *arguments)])["tasks"]["perplexity_by_position@64"]
    rows = data.text_windows(None, 64, tokenizer=tiny_tokenizer(), text_file=tmp_path / "text.txt")["test"]
    tokens = len(tiny_tokenizer()((tmp_path / "text.txt").read_text())["input_ids"])
    assert task["examples"] == len(rows) == tokens // 64 > 1 and "--text text.txt" in task["note"]
    loss = task["metrics"]["loss@1"]["value"]  # of all tokens but the first
    bits = len(rows) * 63 * loss / math.log(2) / sum(rows["mean_bytes"])
    assert task["metrics"]["bits_per_byte"]["value"] == pytest.approx(bits)
    with pytest.raises(UserError, match="--text .*absent: expected a text file"):
        run.parse([str(tiny), "--text", str(tmp_path / "absent")])


# RULER


@pytest.fixture(autouse=True, scope="module")
def quick_ruler():
    """Import lm-eval's RULER without a network and without its list of all pairs of words, which takes a gigabyte."""
    words = {"nouns": ["car", "tree", "sea", "hat"], "adjectives": ["red", "old", "wide", "new"], "verbs": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk, "download", lambda name: False)
        patch.setattr(wonderwords, "RandomWord", lambda: SimpleNamespace(_categories=words))
        importlib.import_module("lm_eval.tasks.ruler.prepare_niah")


def test_scores_of_ruler():
    document = {"outputs": ["Rome", "the city of Rome"]}
    assert scores.string_match_any(document, ["rome"]) == {"string_match": 1.0}
    assert scores.string_match({"outputs": ["12", "34"]}, ["34"]) == {"string_match": 0.5}


def build(*tasks, lengths=(512,), suite="smoke", **changes):
    settings = {"model": "", "output": Path(), "data": data.SMOKE, **changes}
    chosen = options.Options(tasks=list(tasks), lengths=list(lengths), suite=suite, **settings)
    return suites.build_tasks(chosen, tiny_tokenizer())


OFFLINE = ("niah_single_1", "niah_multikey_2")


def test_rulers_documents_are_the_same_whatever_else_is_made():
    random.seed(1)
    state = random.getstate()
    both = build(*OFFLINE)
    assert random.getstate() == state
    random.seed(2)
    for name in OFFLINE:
        (title, task), *_ = build(name).items()
        documents = list(task.dataset["test"])
        length = len(tiny_tokenizer()(documents[0]["input"]).input_ids)
        assert title == f"{name}@512" and documents == list(both[title].dataset["test"])
        assert length + task.config.generation_kwargs["max_gen_toks"] <= 512
        for document in documents[:5]:
            assert document["outputs"][0] in document["input"] and document["max_length"] == 512
    other = build("niah_single_1", seed=1)["niah_single_1@512"]
    assert list(other.dataset["test"]) != list(both["niah_single_1@512"].dataset["test"])


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


def beginning_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Return `tiny_tokenizer`, which puts `<s>` before every text, with a chat template that writes none."""
    tokenizer = deepcopy(tiny_tokenizer())
    post = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = post
    tokenizer.chat_template = (ROOT / "sft" / "chat_templates" / "chatml.jinja").read_text()
    tokenizer.save_pretrained(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


def test_a_token_before_a_text_makes_the_first_one_predicted(tmp_path):
    (tmp_path / "text.txt").write_text("All that glisters is not gold. " * 20)
    plain, with_first = tiny_tokenizer(), beginning_tokenizer(tmp_path)
    assert with_first("All")["input_ids"] == [1, *plain("All")["input_ids"]]
    windows = partial(data.text_windows, None, 64, text_file=tmp_path / "text.txt")
    without, behind = (windows(tokenizer=each)["test"] for each in (plain, with_first))
    assert without["text"] == behind["text"]
    assert without["mean_bytes"][0] < behind["mean_bytes"][0] == sum(map(len, behind["text"])) / len(behind)


def test_a_text_that_is_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("Brief.")
    with pytest.raises(UserError, match=r"text.txt has \d+ tokens: lower --lengths from 64"):
        data.text_windows(None, 64, tokenizer=tiny_tokenizer(), text_file=tmp_path / "text.txt")


def test_a_chat_is_encoded_as_in_training_and_other_text_as_by_the_tokenizer(tiny, tmp_path):
    tokenizer = beginning_tokenizer(tmp_path)
    model = Model(find_source(str(tiny)), tokenizer)
    chats = [[{"role": "user", "content": content}] for content in ("How many?", "Why?")]
    texts = [model.apply_chat_template(chat) for chat in chats]
    rows = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    ids, mask = model.tok_batch_encode([*texts, "All that"])
    assert [row[kept == 1].tolist() for row, kept in zip(ids, mask)] == [*rows, tokenizer("All that")["input_ids"]]
    assert mask[:, -1].all() and ids[2][mask[2] == 1][0] == 1 and model.tok_encode(texts[0]) == rows[0] != []


def test_files_are_checked_against_the_manifest(tmp_path):
    with pytest.raises(UserError, match=r"gsm8k/test.jsonl is missing \(github.com/openai/grade-school-math\)"):
        data.rows("gsm8k/test.jsonl", tmp_path)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="has SHA-256 ca3d163bab05..., expected 3730d312f6e3"):
        data.rows("gsm8k/test.jsonl", tmp_path)


# The model


# The words of the tiny tokenizer, so that prompts differ for the model.
WORDS = sorted(word for word in tiny_tokenizer().get_vocab() if word.isalpha())


def request(kind, *arguments):
    return Instance(kind, {}, arguments, 0, ("t", 0, 1))


def fails(error):
    """Return a function of any arguments that raises `error`."""

    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tiny_source(directory, max_position_embeddings=2048)
    return directory


def test_greedy_replies_are_generates_and_the_checkpoints_settings_are_put_aside(tiny, tmp_path):
    network, prompts = load_model(find_source(tiny)), [" ".join(WORDS[i : i + 8 + i]) for i in range(3)]
    expected = []
    for prompt in prompts:
        ids = tiny_tokenizer()(prompt, return_tensors="pt")["input_ids"]
        output = network.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        expected.append(tiny_tokenizer().decode(output, skip_special_tokens=True))
    network.generation_config.update(repetition_penalty=5.0, max_new_tokens=1, do_sample=True, temperature=9.0)
    network.save_pretrained(tmp_path)
    settings = {"do_sample": False, "max_gen_toks": 6, "until": []}
    model = Model(find_source(tmp_path), tiny_tokenizer(), batch_size=2)
    found = model.generate_until([request("generate_until", prompt, settings) for prompt in prompts], True)
    assert [reply.strip() for reply in found] == [reply.strip() for reply in expected] and len(set(found)) == 3


def test_a_reply_keeps_the_blanks_that_it_begins_with(tiny):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, ":\n": 1, "▁▁▁▁": 2, "return": 3}, unk_token="a"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    model = Model(
        find_source(tiny), PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
    )
    assert model.tok_decode([2, 3]) == "    return"


def test_the_end_of_thoughts_is_read_where_it_is_a_special_token(tiny):
    """Keep it in the reply: without it the thoughts would be taken for the answer."""
    words = {"a": 0, "b": 1, "</think>": 2, "<pad>": 3, "</s>": 4}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    decoded = Model(find_source(tiny), tokenizer).tok_decode([0, 2, 1, 4, 3])
    assert "</think>" in decoded and "</s>" not in decoded and "<pad>" not in decoded


def test_what_does_not_fit_is_refused_before_lm_eval_cuts_it(tmp_path):
    """Take 16 tokens and the one that they predict."""
    save_tiny_source(tmp_path, max_position_embeddings=16)
    model, texts = Model(find_source(tmp_path), tiny_tokenizer()), [" ".join(WORDS[:n]) for n in (10, 11, 16, 17, 18)]
    replies = [request("generate_until", text, {"max_gen_toks": 6}) for text in texts[:2]]
    words = [request("loglikelihood", text, f" {WORDS[0]}") for text in texts[2:4]]
    whole = [request("loglikelihood_rolling", text) for text in texts[3:]]
    for fitting, long in (replies, words, whole):
        model.check_prompts("t", [fitting])
        with pytest.raises(UserError, match="t: 1 prompts do not fit: .* up to 17 tokens, .* the context has 16"):
            model.check_prompts("t", [fitting, long])


# The command


@pytest.fixture(autouse=True, scope="module")
def offline():
    refuse = fails(AssertionError("something wants a network"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


SMOKE = ("--suite", "smoke", "--confirm-run-unsafe-code")


@pytest.fixture(scope="module")
def smoke(tiny, tmp_path_factory):
    """Run the smoke suite, and return its results and its output directory."""
    output = tmp_path_factory.mktemp("smoke") / "out"
    return run.main([str(tiny), *SMOKE, "--output", str(output)]), output


def test_the_smoke_suite_offline_and_again(smoke, tiny, tmp_path, monkeypatch):
    results, output = smoke[0], shutil.copytree(smoke[1], tmp_path / "out")
    assert set(results["tasks"]) == {
        *(name for name in options.SUITES["smoke"] if name not in options.BY_LENGTH),
        *("niah_multikey_2@512", "niah_single_1@512", "perplexity_by_position@512"),
    }
    for name, task in results["tasks"].items():
        assert task["examples"] == 2 and task["metrics"], name
        assert all(figure["stderr"] is not None for figure in task["metrics"].values())
    assert results["tasks"]["gsm8k"]["metrics"].keys() == {"pass@1", "maj@2"}
    assert "maj@5" in results["tasks"]["gsm8k_5shot_maj5"]["metrics"]
    assert read_json(output / "results.json") == results
    text = (output / "report.md").read_text()
    assert "math500: 4 of 4 replies were still going" in text
    rows = list(read_jsonl(output / "samples_gsm8k.jsonl"))
    assert [len(row["replies"]) for row in rows] == [2, 2] and rows[0]["target"].endswith("#### 7")

    monkeypatch.setattr(Model, "_model_generate", fails(AssertionError("a reply in the cache is generated again")))
    tasks = ["gsm8k", "niah_single_1", "dcformer_synthetic", "perplexity_by_position"]
    again = run.main([str(tiny), *SMOKE, "--tasks", *tasks, "--output", str(output)])
    assert len(again["tasks"]) == 4 and all(entry == results["tasks"][name] for name, entry in again["tasks"].items())
    with sole_writer(output), pytest.raises(UserError, match="Another run is writing"):
        run.main([str(tiny), *SMOKE, "--output", str(output)])
    with pytest.raises(UserError, match="holds replies of another seed"):
        run.main([str(tiny), *SMOKE, "--output", str(output), "--seed", "1"])
    monkeypatch.setattr(run, "hash_of", lambda _: "0" * 16)
    with pytest.raises(UserError, match="holds replies of another model_code"):
        run.main([str(tiny), *SMOKE, "--output", str(output)])


def replies_of(output, task="gsm8k"):
    return [row["replies"] for row in read_jsonl(output / f"samples_{task}.jsonl")]


def test_a_killed_run_goes_on_and_more_samples_are_others(tiny, tmp_path, monkeypatch):
    """Give each sample separate random numbers: a run that goes on would else repeat those of its beginning."""
    arguments = [str(tiny), "--suite", "smoke", "--tasks", "gsm8k", "--max-new-tokens", "12", "--samples"]
    run.main([*arguments, "4", "--output", str(tmp_path / "whole")])
    whole = replies_of(tmp_path / "whole")
    assert all(len(set(samples)) == 4 for samples in whole)

    generate, left = Model._model_generate, 1

    def killed(*options, **settings):
        nonlocal left
        left -= 1
        return generate(*options, **settings) if left >= 0 else fails(KeyboardInterrupt)()

    monkeypatch.setattr(Model, "_model_generate", killed)
    with pytest.raises(KeyboardInterrupt):
        run.main([*arguments, "2", "--output", str(tmp_path / "killed")])
    for samples, calls in (("2", 1), ("4", 2)):  # a batch of both questions for each sample
        left = calls
        run.main([*arguments, samples, "--output", str(tmp_path / "killed")])
        assert left == 0 and replies_of(tmp_path / "killed") == [replies[: int(samples)] for replies in whole]
    left = 4
    run.main([*arguments, "4", "--seed", "1", "--output", str(tmp_path / "other")])
    assert replies_of(tmp_path / "other") != whole


def test_a_thought_that_the_prompt_opens_is_a_part_of_the_reply(tmp_path, monkeypatch):
    """Score a reply whose thoughts do not end as one without an answer, whatever it says."""
    save_tiny_source(tmp_path / "thinker", max_position_embeddings=2048)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}<think>\n"
    (tmp_path / "thinker" / "chat_template.jinja").write_text(template)
    said = iter([r"I think of \boxed{7}", r"So </think> \boxed{7}"])
    monkeypatch.setattr(Model, "generate_until", lambda self, requests: [next(said) for _ in requests])
    arguments = ["--suite", "smoke", "--tasks", "gsm8k", "--samples", "2", "--limit", "1"]
    results = run.main([str(tmp_path / "thinker"), *arguments, "--output", str(tmp_path / "out")])
    assert results["tasks"]["gsm8k"]["metrics"]["pass@1"]["value"] == 0.5


def test_a_chat_template_that_asks_for_the_date_gets_a_fixed_one(tiny):
    """Give every template the same day, by Llama's variable or by the function of Transformers."""
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        "\n{% set day = strftime_now('%-d %B %Y') if strftime_now is defined %}{{ date_string }}, {{ day }}, "
        "{{ strftime_now('%Y-%m-%d') }}: {{ messages[0]['content'] }}"
    )
    written = Model(find_source(tiny), tokenizer).apply_chat_template([{"role": "user", "content": "100%d"}])
    assert written == "\n26 Jul 2024, 26 July 2024, 2024-07-26: 100%d"
    # The blanks before a block at the beginning of a line are not the prompt's.
    tokenizer.chat_template = "  {% if strftime_now is defined %}\n{{ strftime_now('%d') }}{% endif %}"
    turns = [{"role": "user", "content": "hi"}]
    written = tokenizer.apply_chat_template(turns, tokenize=False, **on_one_day(tokenizer))
    assert written == "26"
    tokenizer.chat_template = {"rag": "{{ strftime_now('%d') }}"}
    assert "chat_template" not in on_one_day(tokenizer)


@pytest.fixture
def two_runs(smoke, tmp_path) -> list[Path]:
    """Copy an evaluation, and make one of two answers right by hand."""
    runs = [shutil.copytree(smoke[1], tmp_path / name) for name in ("base", "tuned")]
    first, second = read_jsonl(runs[1] / "samples_niah_single_1@512.jsonl")
    second |= {"replies": ["7"], "string_match": 1.0}
    write_jsonl(runs[1] / "samples_niah_single_1@512.jsonl", [first, second])
    results = read_json(runs[1] / "results.json")
    results["tasks"]["niah_single_1@512"]["metrics"]["string_match"] = {"value": 0.5, "stderr": 0.5}
    write_json(runs[1] / "results.json", results)
    return runs


def test_two_evaluations_are_compared_example_by_example(two_runs, capsys):
    compare.main([str(run) for run in two_runs])
    text = capsys.readouterr().out
    assert "| niah_single_1@512 | string_match | 2 | 0.0 ± 0.0 | 50.0 ± 50.0 | 50.0 ± 50.0 | 1 |" in text
    assert "| gsm8k | pass@1 | 2 | 0.0 ± 0.0 | 0.0 ± 0.0 | 0.0 ± 0.0 | 0 |" in text
    assert re.search(r"\| dcformer_synthetic \| acc \| 2 \|.*\| – \|$", text, re.MULTILINE)  # it has no replies
    assert "other prompts" not in text and "had another" not in text


def test_a_comparison_names_other_prompts_and_machines(two_runs):
    base, tuned = two_runs
    file = tuned / "samples_gsm8k.jsonl"
    write_jsonl(file, [row | {"prompt_hash": "0"} for row in read_jsonl(file)])
    write_json(tuned / "results.json", read_json(tuned / "results.json") | {"batch_size": 3})
    text = compare.compare(base, tuned)
    assert f"gsm8k had other prompts in {tuned} than in {base}.\n" in text
    assert f"{tuned} had another batch_size than {base}.\n" in text


def test_evaluations_that_are_not_alike_are_not_compared(two_runs):
    base, tuned = two_runs
    file = tuned / "samples_gsm8k.jsonl"
    file.write_text(file.read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match="gsm8k has other examples in .*: give both one --limit and one --data"):
        compare.compare(base, tuned)
    results = read_json(base / "results.json")
    gsm8k = results["tasks"]["gsm8k"]
    for what, value in (("generation", {}), ("chat", not gsm8k["chat"]), ("task_hash", "0")):
        changed = results | {"tasks": results["tasks"] | {"gsm8k": gsm8k | {what: value}}}
        write_json(tuned / "results.json", changed)
        with pytest.raises(UserError, match=f"gsm8k has another {what} in .*: evaluate both alike"):
            compare.compare(base, tuned)
    write_json(tuned / "results.json", results | {"tasks": {}})
    with pytest.raises(UserError, match="no task in common"):
        compare.compare(base, tuned)


@pytest.mark.parametrize("isolates", [True, False])
def test_programs_that_nothing_isolates_are_announced(isolates, monkeypatch, capsys):
    monkeypatch.setattr(run.run_code, "isolates", lambda: isolates)
    run.note_missing_isolation(["gsm8k"])
    run.note_missing_isolation(["gsm8k", "mbpp", "humaneval"])
    note = "" if isolates else "so the programs of mbpp, humaneval can do all that you can: run them in a container.\n"
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(note) and err.count("Note: bubblewrap") == (not isolates)


def test_tasks_are_told_by_the_files_that_they_include(tmp_path, monkeypatch):
    before = run.task_hash()
    monkeypatch.setattr(suites, "TASKS", shutil.copytree(suites.TASKS, tmp_path / "tasks"))
    assert run.task_hash() == before
    with open(tmp_path / "tasks" / "gsm8k_5shot.yaml", "a") as file:  # gsm8k_5shot_maj5 includes it
        file.write("num_fewshot: 4\n")
    assert run.task_hash() != before


def test_chat_tasks_see_a_chat_and_others_do_not(tiny, tmp_path, monkeypatch):
    prompts = {}

    def watch(self, requests):
        prompts.update({request.task_name: request.args[0] for request in requests})
        return [""] * len(requests)

    monkeypatch.setattr(Model, "generate_until", watch)
    arguments = [str(tiny), *SMOKE, "--tasks", "gsm8k", "gsm8k_5shot", "mbpp_5shot", "--limit", "1"]
    run.main([*arguments, "--output", str(tmp_path / "a")])
    assert prompts["gsm8k"].startswith("<s> Ann has 3") and prompts["gsm8k"].endswith(r"\boxed{}. </s><s>")
    assert prompts["gsm8k_5shot"].startswith("Question: What is 1 + 2?\nAnswer: 1 + 2 =")
    assert prompts["gsm8k_5shot"].count("####") == 5 and prompts["gsm8k_5shot"].endswith("has she?\nAnswer:")
    assert prompts["mbpp_5shot"].count("[DONE]") == 5 and prompts["mbpp_5shot"].endswith("[BEGIN]\n")
    run.main([*arguments, "--output", str(tmp_path / "b"), "--no-chat"])
    assert prompts["gsm8k"].startswith("Ann has 3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("TINY smoke", "mbpp, humaneval, .* would run programs .* give --confirm-run-unsafe-code"),
        ("ENDLESS smoke --tasks gsm8k", "The tokenizer has no end token"),
        ("ENDED smoke --tasks gsm8k", "puts its end token </s> behind every text"),
        ("TINY smoke --tasks gsm8k --output FILES", "is no output of this command: choose another --output"),
    ],
)
def test_mistakes_get_one_line_before_anything_is_generated(arguments, message, tiny, tmp_path, monkeypatch, cli):
    monkeypatch.setattr(Model, "_model_generate", fails(AssertionError("something is generated")))
    places = {name: tmp_path / name.lower() for name in ("ENDED", "ENDLESS", "FILES")}
    ended, endless, files = places.values()
    save_tiny_source(ended)
    ends = Tokenizer.from_file(str(ended / "tokenizer.json"))
    ends.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    ends.save(str(ended / "tokenizer.json"))
    save_tiny_source(endless)
    edit_config(endless, "tokenizer_config.json", eos_token=None)
    files.mkdir()
    (files / "notes.txt").write_text("mine")
    model, suite, *options = [{**places, "TINY": tiny}.get(argument, argument) for argument in arguments.split()]
    code, _, err = cli(run, model, "--suite", suite, "--output", tmp_path / "out", *options)
    errors = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert code == 1 and len(errors) == 1 and re.search(message, errors[0]), errors
    assert (files / "notes.txt").read_text() == "mine" and not (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["TINY"], "--suite: give one of smoke, ruler, reasoning, paper, or tasks with --tasks"),
        (["TINY", "--tasks", "gsm9k"], "--tasks gsm9k: not a task of the suite paper: it has gsm8k, "),
        (["TINY", "--suite", "smoke", "--limit", "0"], "--limit 0: expected at least 1"),
        (["/nowhere/model", "--suite", "smoke"], "/nowhere/model is neither a directory, nor a GGUF file"),
    ],
)
def test_a_usage_error_comes_before_the_imports(words, message, tiny, monkeypatch, capsys):
    """They take up to a minute. Here PyTorch's fails."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["evaluation.run", *(str(tiny) if word == "TINY" else word for word in words)])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_module("evaluation.run", run_name="__main__")
    assert capsys.readouterr().err.startswith(f"Error: {message}")


def test_tasks_need_no_suite(tiny):
    chosen = options.parse([str(tiny), "--tasks", "niah_single_1", "gsm8k"])
    assert (chosen.suite, chosen.tasks, chosen.lengths) == ("paper", ["gsm8k", "niah_single_1"], options.LENGTHS)


# The report


def ruler_entry(value):
    return {"metrics": {"string_match": {"value": value, "stderr": 0.1}}}


def test_means_of_ruler_are_over_the_lengths_that_were_run():
    values = {"niah_single_1@512": 1.0, "niah_single_1@1024": 0.5, "ruler_vt@1024": 0.0}
    means = report.ruler_means({name: ruler_entry(value) for name, value in values.items()} | {"gsm8k": {}})
    assert means["by_length"]["512"]["value"] == 1.0
    assert means["by_length"]["1024"] == {"value": 0.25, "stderr": pytest.approx(0.02**0.5 / 2)}
    assert means["all"]["value"] == 0.5 and means["tasks"] == ["niah_single_1", "ruler_vt"]
    assert report.ruler_means({"gsm8k": {}}) == {}


@pytest.mark.parametrize(
    ("suite", "changes", "expected"),
    [
        ("paper", {}, ["", "", ""]),
        ("smoke", {"limit": 5, "samples": 1}, ["", "", ""]),
        ("paper", {"limit": 5}, ["--limit 5", "--limit 5", "--limit 5"]),
        ("paper", {"samples": 1, "max_new_tokens": 9}, ["--max-new-tokens 9 --samples 1", "--max-new-tokens 9", ""]),
        (
            "paper",
            {"samples": 16, "max_new_tokens": 4096, "no_chat": True},
            ["--no-chat", "--max-new-tokens 4096", ""],
        ),
    ],
)
def test_figures_that_cannot_be_compared_are_noted(suite, changes, expected):
    """Build a task of Table 1, one of Table 2 and a loss."""
    tasks = build("math500", "gsm8k_5shot", "dcformer_synthetic", suite=suite, **changes)
    hand_made = f"--data {data.SMOKE}" if suite == "paper" else ""
    notes = [f"measured with {each} {hand_made}".replace("with  ", "with ").rstrip() for each in expected]
    assert [task.note or "measured with" for task in tasks.values()] == notes


def test_the_report_says_what_cannot_be_compared():
    task = ruler_entry(0.5) | {"examples": 50, "samples_each": 1, "unfinished_replies": 0}
    task |= {"prompt_tokens": {"min": 1, "max": 2}, "note": "measured with --limit 50"}
    about = {"model": "m", "suite": "ruler", "parameters": 1, "model_dtype": "float32", "seed": 0, "seconds": 1}
    about |= {"commit": "0", "checkpoint": "0", "processes": 1, "device": "cpu", "versions": {"torch": "2"}}
    tasks = {"niah_single_1@512": task}
    text = report.markdown({**about, "tasks": tasks, "ruler": report.ruler_means(tasks)})
    assert "- niah_single_1@512 was measured with --limit 50, so it cannot be compared with published" in text
    assert "Not run, and not in the means: niah_multikey_1, " in text


def test_an_answer_that_cannot_be_read_in_time_is_no_answer(monkeypatch):
    monkeypatch.setattr(replies, "parse", partial(parse, parsing_timeout=1))
    assert not replies.math_answer(r"\boxed{\binom{10000000}{5000000} or 3}")


def test_the_words_of_ruler_cwe_depend_on_the_seed_alone():
    drawn = []
    for seed in (0, 0, 1):
        with suites.seeded("ruler_cwe@512", seed):
            drawn.append(cwe_utils.RNG.sample(range(10**6), 5))
    assert drawn[0] == drawn[1] != drawn[2]
