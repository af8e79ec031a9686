"""Score the sampled replies to one document: one number per metric.

The tasks name these functions as `process_results`. Beside each figure of ours stands lm-eval's own, computed by
lm-eval's code where it can be imported, from the same replies; its names begin with "lm_eval".
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import lm_eval.tasks
from lm_eval.api.metrics import exact_match_fn
from lm_eval.filters.extraction import RegexFilter
from lm_eval.filters.selection import MajorityVoteFilter
from lm_eval.tasks._yaml_loader import load_yaml

from evaluation.replies import equal_answers, math_answer, names_needed, program
from evaluation.run_code import passes_each


STOCK_GSM8K = load_yaml(Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml")


# Several samples


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased chance that at least one of `k` samples passes, for k <= `samples`.

    It is 1 - C(n-c, k) / C(n, k) for c of n samples that passed: Chen et al., "Evaluating Large Language Models
    Trained on Code" (2021), equation 1.
    """
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def majority(answers: Sequence, equal: Callable[[object, object], bool]):
    """Return the answer that most of `answers` are equal to; among equally frequent ones that which came first.

    `None` stands for a reply without an answer and never wins; without any answer the result is `None`. Each answer is
    compared with every other one, because 0.18 and 18 are equal to 18% and not to each other.
    """
    votes = [answer for answer in answers if answer is not None]
    distinct = [answer for index, answer in enumerate(votes) if answer not in votes[:index]]

    def count(answer) -> int:
        return sum(votes.count(other) for other in distinct if other == answer or equal(answer, other))

    return max(distinct, key=count, default=None)


# Mathematics


def _math_metrics(gold: tuple, replies: list[str]) -> dict[str, float]:
    """Return P@1, the mean over the samples, and Maj@k of `k` samples; with one sample its exact match."""
    answers = [math_answer(reply) for reply in replies]
    right = [answer is not None and equal_answers(gold, answer) for answer in answers]
    if len(replies) == 1:
        return {"exact_match": float(right[0])}
    winner = majority(answers, equal_answers)
    return {
        "pass@1": sum(right) / len(right),
        f"maj@{len(replies)}": float(winner is not None and equal_answers(gold, winner)),
    }


def gsm8k(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score replies to a row with "answer", the worked answer that ends in "#### 18"."""
    (replies,) = results
    return _math_metrics(math_answer(document["answer"]), replies) | _lm_eval_gsm8k(document, replies)


def _lm_eval_gsm8k(document: dict, replies: list[str]) -> dict[str, float]:
    """Score as the stock task gsm8k does: the first sample by its two filters, and the majority of raw strings."""
    options = {name: STOCK_GSM8K["metric_list"][0][name] for name in ("ignore_case", "regexes_to_ignore")}

    def matches(answer: str) -> float:
        found = exact_match_fn(predictions=[answer], references=[document["answer"]], **options)
        return float(found["exact_match"])

    metrics = {}
    for pipeline in STOCK_GSM8K["filter_list"]:
        name, (regex, _) = pipeline["name"].partition("-")[0], pipeline["filter"]
        extract = RegexFilter(**{key: value for key, value in regex.items() if key != "function"})
        ((*answers,),) = extract.apply([replies], [document])
        metrics[f"lm_eval_{name}"] = matches(answers[0])
    if len(replies) > 1:  # of the flexible filter, the last of the two
        ((winner,),) = MajorityVoteFilter().apply([answers], [document])
        metrics[f"lm_eval_maj@{len(replies)}"] = matches(winner)
    return metrics


def math500(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score replies to a row with "answer", in LaTeX, and "solution"."""
    (replies,) = results
    gold = math_answer(rf"\boxed{{{document['answer']}}}")
    return _math_metrics(gold, replies) | _lm_eval_math(document, replies)


@cache
def minerva():
    """Import lm-eval's module of the stock task minerva_math500.

    The import demands antlr 4.11, which only its comparison of unequal strings needs: it gets a false answer.
    """
    with mock.patch("importlib.metadata.version", lambda name: "4.11"):
        from lm_eval.tasks.minerva_math import utils
    return utils


def minerva_shots() -> list[dict]:
    """Return the four worked problems of Lewkowycz et al. (2022)."""
    return minerva().list_fewshot_samples()


def _lm_eval_math(document: dict, replies: list[str]) -> dict[str, float]:
    """Score the first sample as the stock task minerva_math500 does, which wants "Final Answer: The final answer is".

    Equal strings alone count: its comparison by sympy needs antlr 4.11, and math_verify has 4.13.
    """
    stock = minerva()
    gold = stock.normalize_final_answer(document["answer"])
    answer = stock.normalize_final_answer(stock.get_unnormalized_answer(replies[0]))
    return {"lm_eval_same_string": float(answer == gold)}


# Code


def _first_block(reply: str) -> str:
    """Return what lm-eval's instruct tasks run: the first fenced block, whatever it is."""
    found = re.search(r"```(?:\w+)?\n?(.*?)\n?```", reply, re.DOTALL)
    return found.group(1) if found else ""


def _with_futures_first(code: str) -> str:
    """Return `code` with its imports from __future__, which Python wants first, before a prompt."""
    futures = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
    return "".join([*futures.findall(code), futures.sub("", code)])


def _code_metrics(solutions: list[str], tests: str, stock_program: str) -> dict[str, float]:
    """Return P@1, the mean over the samples, P@10 when there are as many, and whether lm-eval's program passes."""
    programs = [f"{_with_futures_first(code)}\n{tests}" for code in solutions]
    # As the benchmarks' own harnesses run them: not as `__main__`.
    *passed, stock_passed = passes_each([f"exec({text!r}, {{}})" for text in [*programs, stock_program]])
    count = len(passed)
    metrics = {f"pass@{k}": pass_at_k(count, sum(passed), k) for k in (1, 10) if k <= count}
    return metrics | {"lm_eval_pass@1": float(stock_passed)}


def _mbpp(document: dict, solutions: list[str], stock_solution: str) -> dict[str, float]:
    # The set-up of a test uses what the solution defines.
    tests = "\n".join([document["test_setup_code"], *document["test_list"]])
    stock_tests = "\n".join(document["test_list"][:3])
    return _code_metrics(solutions, tests, f"{stock_solution}\n{stock_tests}")


def mbpp(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score replies of a chat model."""
    (replies,) = results
    tests = "\n".join(document["test_list"])
    # A task may ask for a function with the name of one of Python's own.
    names = names_needed(tests) | set(re.findall(r"assert[\s(]+(\w+)\(", tests))
    return _mbpp(document, [program(reply, names) for reply in replies], _first_block(replies[0]))


def mbpp_completion(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score completions after [BEGIN], which are code."""
    (replies,) = results
    return _mbpp(document, replies, replies[0])


def _humaneval(document: dict, solutions: list[str], stock_solution: str) -> dict[str, float]:
    tests = f"{document['test']}\ncheck({document['entry_point']})"
    return _code_metrics(solutions, tests, f"{stock_solution}\n{tests}")


def humaneval(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score replies of a chat model.

    The prompt stands before the reply's code, for its imports and helpers: what follows continues its function or
    defines it again.
    """
    (replies,) = results
    solutions = [document["prompt"] + program(reply, {document["entry_point"]}) for reply in replies]
    return _humaneval(document, solutions, document["prompt"] + _first_block(replies[0]))


def humaneval_completion(document: dict, results: list[list[str]]) -> dict[str, float]:
    """Score completions of the prompt, which are code."""
    (replies,) = results
    solutions = [document["prompt"] + reply for reply in replies]
    return _humaneval(document, solutions, solutions[0])


# Likelihoods


def next_word(document: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
    """Score a target by its log-likelihood in nats and by whether greedy decoding gives it."""
    ((log_likelihood, is_greedy),) = results
    return {"acc": float(is_greedy), "loss": -log_likelihood}


def loss_by_position(document: dict, results: list[list[float]]) -> dict[str, float]:
    """Return the mean loss in nats a token over the positions 1 to 63, 64 to 127, 128 to 255, and so on.

    Each mean has the name of its first position. A stretch is left out unless the text fills more than half of it.
    """
    (log_probs,) = results
    metrics, first, end = {}, 1, 64
    while len(log_probs) >= first + (end - first) / 2:
        part = log_probs[first - 1 : end - 1]
        metrics[f"loss@{first}"] = -sum(part) / len(part)
        first, end = end, 2 * end
    return metrics
