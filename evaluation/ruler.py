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
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import datasets
import lm_eval.tasks
import numpy as np
from lm_eval.tasks._yaml_loader import load_yaml

from common.command_io import UserError
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
QA_FILES = {
    "ruler_qa_squad": "ruler/squad_dev_v2.json",
    "ruler_qa_hotpot": "ruler/hotpot_dev_distractor_v1.json",
}
NOT_COMPARABLE = "not comparable with published RULER: the haystack is another text than the essays"
STOCK = Path(lm_eval.tasks.__file__).parent / "ruler"
STOCK_SAMPLES = 500


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
def _generators() -> tuple[ModuleType, ...]:
    """Import lm-eval's modules niah_utils, vt_utils, cwe_utils, fwe_utils and qa_utils.

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
    words = wonderwords.RandomWord()._categories
    prepare_niah.WORDS = _Words(words["adjectives"], words["nouns"])
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, qa_utils, vt_utils

    return niah_utils, vt_utils, cwe_utils, fwe_utils, qa_utils


@cache
def split_sentences(text: str) -> list[str]:
    """Return the sentences of `text`, between which needles go, without nltk's punkt, which has to be downloaded."""
    return re.split(r"(?<=[.!?])\s+", text)


def haystack_file(directory: Path | None) -> str:
    """Return the manifest's name of the text that hides the needles: the essays if they are there."""
    return ESSAYS if directory is not None and (Path(directory) / ESSAYS).is_file() else SUBSTITUTE


def stock_config(task: str) -> dict:
    """Return lm-eval's YAML of a RULER task, without its functions."""
    config = load_yaml(STOCK / f"{task.removeprefix('ruler_')}.yaml", resolve_func=False)
    return {key: value for key, value in config.items() if key not in ("tag", "custom_dataset", "process_results")}


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


@contextmanager
def _settled(task: str, length: int, samples: int, seed: int, directory, tokenizer) -> Iterator[None]:
    """Give lm-eval's generators their own random state, `samples` samples, this tokenizer and local texts."""
    niah, vt, cwe, fwe, qa = _generators()
    from lm_eval.tasks.ruler import prepare_niah

    def fewer(generator: Callable, **changes) -> Callable:
        def call(*args, **kwargs):
            if kwargs.get("num_samples", STOCK_SAMPLES) == STOCK_SAMPLES:  # not vt's single worked example
                kwargs["num_samples"] = samples
            return generator(*args, **kwargs, **changes)

        return call

    def haystack(type_haystack: str):
        if type_haystack != "essay":
            return original_haystack(type_haystack=type_haystack)
        return re.sub(r"\s+", " ", data.text(haystack_file(directory), directory)).split(" ")

    def frequent_words(*, max_seq_length: int, **kwargs):  # the stock one fills the length and then adds the answer
        rows = fewer(original_fwe)(max_seq_length=max_seq_length - 50, **kwargs)
        return [{**row, "max_length": max_seq_length} for row in rows]

    def with_example(*args):
        example, prompt, answer = original_cwe(*args)
        return "", f"{example}\n{prompt}", answer

    def measured(text: str):  # with the answer's beginning, which the stock ones do not count
        asked = re.search(r"^What (is|are)(?: all)? t(he special magic [^?]*)\?", text, re.MULTILINE)
        return tokenizer(f"{text} T{asked[2]} {asked[1]}" if asked else f"{text} Answer:")

    original_haystack, original_fwe, original_cwe = niah.get_haystack, fwe.sys_kwext, cwe.generate_input_output
    states = random.getstate(), np.random.get_state(), cwe.RNG.getstate()
    number = random.Random(f"{seed}/{task}/{length}").getrandbits(32)
    random.seed(number), np.random.seed(number), cwe.RNG.seed(number)
    try:
        with ExitStack() as stack:
            for module in (niah, vt, cwe, fwe, qa):
                measure = measured if module in (niah, qa) else tokenizer
                stack.enter_context(mock.patch.object(module, "get_tokenizer", lambda *_, m=measure, **__: m))
            for target, name, replacement in (
                (niah, "generate_samples", fewer(niah.generate_samples)),
                (niah, "get_haystack", haystack),
                (prepare_niah, "cached_sent_tokenize", split_sentences),
                (vt, "sys_vartrack_w_noise_random", fewer(vt.sys_vartrack_w_noise_random)),
                (cwe, "generate_input_output", with_example),
                (cwe, "sys_word_pair_random", fewer(cwe.sys_word_pair_random)),
                (fwe, "sys_kwext", frequent_words),
                (qa, "generate_samples", fewer(qa.generate_samples)),
                (qa, "download_json", _read),
            ):
                stack.enter_context(mock.patch.object(target, name, replacement))
            stack.enter_context(redirect_stdout(sys.stderr if sys.stderr.isatty() else io.StringIO()))
            yield
    finally:
        random.setstate(states[0]), np.random.set_state(states[1]), cwe.RNG.setstate(states[2])


def _read(path: str):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from error


def samples(task: str, length: int, count: int, seed: int = 0, data_directory=None, tokenizer=None) -> list[dict]:
    """Return `count` documents of a RULER task: {"input", "outputs", "gen_prefix", "max_length", "length", ...}.

    Args:
        length: nominal, in tokens, of prompt and answer; "length" of a document is the real one.
        seed: the same seed gives the same documents whatever else is made, and fewer are the first of more.
        tokenizer: the `PreTrainedTokenizerBase` that measures them.

    Raise `UserError` for a length that is too short, a haystack that is, a missing file, and a skipped sample.
    """
    niah, vt, cwe, fwe, qa = _generators()
    makers = {"ruler_vt": vt.get_vt_dataset, "ruler_cwe": cwe.get_cw_dataset, "ruler_fwe": fwe.fwe_download}

    def tokens(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    if task in ESSAY_TASKS:
        text = data.text(name := haystack_file(data_directory), data_directory)
        if len(text) < 16 * length and tokens(text) < length:
            raise UserError(f"{name} has {tokens(text)} tokens: too short a haystack for --lengths {length}.")
    with _settled(task, length, count, seed, data_directory, tokenizer):
        _check_length(task, length, tokens)
        try:
            if task in QA_FILES:
                path = str(data.locate(QA_FILES[task], data_directory or "."))
                qas, documents = (qa.read_squad if task == "ruler_qa_squad" else qa.read_hotpotqa)(path)
                rows = qa.get_dataset(qa.get_tokenizer(), documents, qas[:count], max_seq_length=length)
            else:
                maker = makers.get(task) or getattr(niah, task)
                rows = list(maker(max_seq_lengths=[length], tokenizer="given")["test"])
        except ValueError as error:  # not one sample fits
            raise UserError(f"{task} at --lengths {length}: {error}") from error
    if len(rows) < count:
        raise UserError(
            f"{task} at --lengths {length}: {count - len(rows)} of {count} samples cannot be made to fit. Choose a "
            f"larger length, or leave the task out with --tasks."
        )
    return rows


def documents(task: str, length: int, count: int, seed=0, data_directory=None, tokenizer=None, **_) -> dict:
    """Return `samples` as lm-eval's `custom_dataset`."""
    rows = samples(task, length, count, seed, data_directory, tokenizer)
    return {"test": datasets.Dataset.from_list(rows)}


# Scores


def answer_first(reply: str, references: list[str]) -> float:
    """Return the share of the references that the reply begins with, in any order.

    Nothing but punctuation, "and" and list numbers may stand between them. A string match also counts an answer in a
    reply that lists everything it has seen.
    """
    left, rest = sorted(references, key=len, reverse=True), reply
    while left:
        rest = rest.lstrip(" \t\n\r.,;:*_`'\"()[]-")
        found = next((r for r in left if re.match(rf"{re.escape(r)}(?!\w)", rest, re.IGNORECASE)), None)
        if found is not None:
            left.remove(found)
            rest = rest[len(found) :]
        elif separator := re.match(r"(and\b|\d{1,2}[.)])\s*", rest):
            rest = rest[separator.end() :]
        else:
            break
    return 1 - len(left) / len(references)


def _contained(reply: str, references: list[str]) -> list[bool]:
    # RULER's own treatment of replies: control characters to line breaks, no difference between cases.
    reply = re.sub(r"[\x00-\x1f]", "\n", reply.strip()).lower()
    return [reference.lower() in reply for reference in references]


def score_all(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score the share of the references that the reply contains (RULER's string_match_all)."""
    ((reply,),) = results
    found = _contained(reply, document["outputs"])
    return {
        "string_match": sum(found) / len(found),
        "answer_first": answer_first(reply, document["outputs"]),
        "lm_eval": sum(found) / len(found),
    }


def score_any(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score whether one reference is there (RULER's string_match_part); lm-eval takes the mean over them."""
    ((reply,),) = results
    found = _contained(reply, document["outputs"])
    return {
        "string_match": float(any(found)),
        "answer_first": max(answer_first(reply, [reference]) for reference in document["outputs"]),
        "lm_eval": sum(found) / len(found),
    }
