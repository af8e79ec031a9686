"""Make RULER (Hsieh et al., 2024) at any length with lm-eval's own generators, and score it.

This mends what lm-eval 0.4.13 leaves to chance or passes over:
- The random state is seeded by run, task and length.
- The haystack is a local text.
- A length at which a task cannot be made, an endless loop for some generators, is refused, as are skipped samples.
- "fwe" leaves room for its answer, "niah" and "qa" for the answer's beginning.
- "cwe" begins with its worked example, which lm-eval makes, counts and drops.
- No more samples are made than are asked for.
"""

import io
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import lm_eval.tasks
import numpy as np
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

from common.command_io import UserError, read_json
from evaluation import data


# Multi-key retrieval first: it is where the paper sees the largest difference.
TASKS = (
    *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multivalue", "niah_multiquery"),
    *("ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot"),
)
ESSAY_TASKS = {"niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"}
ESSAYS = "ruler/paul_graham_essays.txt"
SUBSTITUTE = "text/state_union.txt"
QA_FILES = {"ruler_qa_squad": "ruler/squad_dev_v2.json", "ruler_qa_hotpot": "ruler/hotpot_dev_distractor_v1.json"}
NOT_COMPARABLE = "not comparable with published RULER: the haystack is another text than the essays"
STOCK = Path(lm_eval.tasks.__file__).parent / "ruler"
STOCK_SAMPLES = 500


def stock_config(task: str) -> dict:
    """Return lm-eval's YAML of a RULER task, without its functions."""
    config = load_yaml(STOCK / f"{task.removeprefix('ruler_')}.yaml", resolve_func=False)
    return {key: value for key, value in config.items() if key not in ("tag", "custom_dataset", "process_results")}


def documents(**metadata) -> dict:
    """Return `samples` as lm-eval's `custom_dataset`."""
    return {"test": datasets.Dataset.from_list(samples(**metadata))}


def samples(task: str, length: int, count: int, seed=0, data_directory=None, tokenizer=None, **_) -> list[dict]:
    """Return `count` documents of a RULER task: {"input", "outputs", "gen_prefix", "max_length", "length", ...}.

    Args:
        length: nominal, in tokens, of prompt and answer; "length" of a document is the real one.
        seed: the same seed gives the same documents whatever else is made, and fewer are the first of more.
        tokenizer: the `PreTrainedTokenizerBase` that measures them.

    Raise `UserError` for a length that is too short, a haystack that is, a missing file, and a skipped sample.
    """

    def tokens(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    if task in ESSAY_TASKS:
        text = data.text(name := haystack_file(data_directory), data_directory)
        if len(text) < 16 * length and tokens(text) < length:
            raise UserError(f"{name} has {tokens(text)} tokens: too short a haystack for --lengths {length}.")
    output = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with _seeded(task, length, seed), redirect_stdout(output):
        _check_length(task, length, tokens)
        try:
            rows = _generate(task, length, count, data_directory, tokenizer)
        except ValueError as error:  # not one sample fits
            raise UserError(f"{task} at --lengths {length}: {error}") from error
    if len(rows) < count:
        raise UserError(
            f"{task} at --lengths {length}: {count - len(rows)} of {count} samples cannot be made to fit. Choose a "
            f"larger length, or leave the task out with --tasks."
        )
    return rows


@contextmanager
def _seeded(task: str, length: int, seed: int) -> Iterator[None]:
    """Give lm-eval's generators a random state of their own."""
    *_, cwe, _, _ = _generators()
    states = random.getstate(), np.random.get_state(), cwe.RNG.getstate()
    number = random.Random(f"{seed}/{task}/{length}").getrandbits(32)
    random.seed(number), np.random.seed(number), cwe.RNG.seed(number)
    try:
        yield
    finally:
        random.setstate(states[0]), np.random.set_state(states[1]), cwe.RNG.setstate(states[2])


def _check_length(task: str, length: int, tokens: Callable[[str], int]) -> None:
    """Raise `UserError` for a length at which the generators of vt, cwe and fwe would never end."""
    _, vt, cwe, fwe, _ = _generators()
    if task == "ruler_vt":
        example = tokens(vt.generate_input_output(5, 1, 4, is_icl=True)[0])
        if example * 1.1 + 30 > 500:
            raise UserError(f"{task}: its worked example has {example} tokens, and the task allows it 470.")
        needed = example + tokens(vt.generate_input_output(10, 1, 4)[0]) + 30
    elif task == "ruler_cwe":
        needed = max(tokens(cwe.generate_input_output(10, length)[1]) for _ in range(5)) + 120
    elif task == "ruler_fwe":
        needed = max(tokens(fwe.TEMPLATE) + 50, 200)
    else:
        return
    if needed * 1.1 > length:
        raise UserError(f"{task} needs about {int(needed * 1.1)} tokens, --lengths says {length}: choose more.")


def _generate(task: str, length: int, count: int, directory, tokenizer) -> list[dict]:
    """Ask the generator of lm-eval's task, which makes 500 samples, for `count` of them."""
    niah, vt, cwe, fwe, qa = _generators()
    if task == "ruler_vt":
        (example,) = vt.sys_vartrack_w_noise_random(tokenizer, 1, 500, incremental=5)
        return vt.sys_vartrack_w_noise_random(tokenizer, count, length, icl_example=example)
    if task == "ruler_cwe":
        return cwe.sys_word_pair_random(count, length, tokenizer)
    if task == "ruler_fwe":  # it fills the length and then adds the answer
        return [{**row, "max_length": length} for row in fwe.sys_kwext(tokenizer, length - 50, count)]

    # The generators of "qa" and "niah" measure prompts without the answer's beginning.
    if task in QA_FILES:
        path = str(data.locate(QA_FILES[task], directory or "."))
        questions, texts = (qa.read_squad if task == "ruler_qa_squad" else qa.read_hotpotqa)(path)
        return qa.generate_samples(lambda text: tokenizer(f"{text} Answer:"), texts, questions, length, count)

    def with_beginning(text: str):
        question = r"^What (is|are)(?: all)? t(he special magic [^?]*)\?"
        verb, subject = re.search(question, text, re.MULTILINE).groups()
        return tokenizer(f"{text} T{subject} {verb}")

    stock_generator, stock_haystack = niah.generate_samples, niah.get_haystack

    def haystack(type_haystack: str):
        if type_haystack != "essay":
            return stock_haystack(type_haystack=type_haystack)
        return re.sub(r"\s+", " ", data.text(haystack_file(directory), directory)).split(" ")

    def generator(*args, **kwargs):
        return stock_generator(*args, **{**kwargs, "num_samples": count})

    # Only the task's own function knows its number and types of needles.
    ours = {"get_tokenizer": lambda _: with_beginning, "get_haystack": haystack, "generate_samples": generator}
    with mock.patch.multiple(niah, **ours):
        return list(getattr(niah, task)(max_seq_lengths=[length])["test"])


def haystack_file(directory: Path | None) -> str:
    """Return the manifest's name of the text that hides the needles: the essays if they are there."""
    return ESSAYS if directory is not None and (Path(directory) / ESSAYS).is_file() else SUBSTITUTE


@cache
def _generators() -> tuple[ModuleType, ...]:
    """Import lm-eval's modules niah_utils, vt_utils, cwe_utils, fwe_utils and qa_utils, and mend them for good.

    The first would download nltk's model of sentences, which `split_sentences` replaces.
    """
    import nltk
    import wonderwords

    no_words = SimpleNamespace(_categories={"nouns": [], "adjectives": [], "verbs": []})
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nltk, "download", lambda *_, **__: False))
        stack.enter_context(mock.patch.object(wonderwords, "RandomWord", lambda: no_words))
        stack.enter_context(redirect_stdout(io.StringIO()))
        from lm_eval.tasks.ruler import prepare_niah
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, qa_utils, vt_utils

    words = wonderwords.RandomWord()._categories
    prepare_niah.WORDS = _Words(words["adjectives"], words["nouns"])
    prepare_niah.cached_sent_tokenize = split_sentences
    qa_utils.download_json = partial(read_json, shape=Any)
    stock_words = cwe_utils.generate_input_output

    def with_example(*args):
        example, prompt, answer = stock_words(*args)
        return "", f"{example}\n{prompt}", answer

    cwe_utils.generate_input_output = with_example
    return niah_utils, vt_utils, cwe_utils, fwe_utils, qa_utils


class _Words(Sequence):
    """Hold every "adjective-noun", the keys and values of needles.

    lm-eval builds the list of all when it is imported, which takes a minute and a gigabyte.
    """

    def __init__(self, adjectives: list[str], nouns: list[str]):
        self.adjectives, self.nouns = sorted(set(adjectives)), sorted(set(nouns))

    def __len__(self) -> int:
        return len(self.adjectives) * len(self.nouns)

    def __getitem__(self, index: int) -> str:
        adjective, noun = divmod(index, len(self.nouns))
        return f"{self.adjectives[adjective]}-{self.nouns[noun]}"


@cache
def split_sentences(text: str) -> list[str]:
    """Return the sentences of `text`, between which needles go, without nltk's punkt, which has to be downloaded."""
    return re.split(r"(?<=[.!?])\s+", text)


# Scores


def answer_first(reply: str, references: list[str]) -> float:
    """Return the share of the references that the reply begins with, word for word, in any order and either case.

    A word keeps its hyphens, apostrophes, points and minus: "red-car" and "1.5" are no "red" and no "1". Between the
    references may stand other signs, "and", and list numbers that count from 1. A string match also counts an answer
    in a reply that lists everything it has seen.
    """
    left, rest, number = sorted(references, key=len, reverse=True), reply, 1
    while left:
        rest = re.sub(r"^(?:(?!-\d)[\W_])+", "", rest.replace("\N{MINUS SIGN}", "-"))
        found = next((r for r in left if re.match(rf"{re.escape(r)}(?![-.'’]?[^\W_])", rest, re.IGNORECASE)), None)
        if found is not None:
            left.remove(found)
            rest = rest[len(found) :]
        elif between := re.match(rf"and\b|{number}[.)](?!\w)", rest, re.IGNORECASE):
            number += between[0].lower() != "and"
            rest = rest[between.end() :]
        else:
            break
    return 1 - len(left) / len(references)


def score_all(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score the share of the references that the reply contains (RULER's string_match_all)."""
    ((reply,),) = results
    share = string_match_all(postprocess_pred([reply]), [document["outputs"]])
    return {"string_match": share, "answer_first": answer_first(reply, document["outputs"])}


def score_any(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score whether one reference is there (RULER's string_match_part); lm-eval takes the mean over them."""
    each = [score_all({"outputs": [reference]}, results) for reference in document["outputs"]]
    return {metric: max(scores[metric] for scores in each) for metric in each[0]}
