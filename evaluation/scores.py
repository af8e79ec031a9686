"""Score the replies to one document, one reply for each sample, in each metric. The tasks name these functions."""

import ast
import math
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

from evaluation.replies import equal_answers, math_answer, names_needed, program
from evaluation.run_code import passes_each


# Several samples


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased chance that at least one of `k` samples passes, for k <= `samples`.

    It is 1 - C(n-c, k) / C(n, k), if c of n samples passed: Chen et al., "Evaluating Large Language Models
    Trained on Code" (2021), equation 1.
    """
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def majority(answers: Sequence, equal: Callable[[object, object], bool]):
    """Return the answer that most of `answers` are equal to, or the first of several equally frequent answers.

    `None` stands for a reply without an answer and never wins. Without any answer the result is `None`. Each answer is
    compared with every other one, because 0.18 and 18 are equal to 18% and not to each other.
    """
    votes = [answer for answer in answers if answer is not None]
    distinct = [answer for index, answer in enumerate(votes) if answer not in votes[:index]]

    def agree(answer, other) -> bool:
        return other == answer or equal(answer, other)

    def count(answer) -> int:
        return sum(votes.count(other) for other in distinct if agree(answer, other))

    return max(distinct, key=count, default=None)


# Mathematics


def _math_metrics(gold: tuple, replies: list[str]) -> dict[str, float]:
    """Return P@1, the mean over the samples, and Maj@k of `k` samples, or the exact match of a single sample."""
    answers = [math_answer(reply) for reply in replies]
    right = [answer is not None and equal_answers(gold, answer) for answer in answers]
    if len(replies) == 1:
        return {"exact_match": float(right[0])}
    winner = majority(answers, equal_answers)
    return {
        "pass@1": sum(right) / len(right),
        f"maj@{len(replies)}": float(winner is not None and equal_answers(gold, winner)),
    }


def gsm8k(document: dict, replies: list[str]) -> dict[str, float]:
    """Score replies to a row with "answer", the worked answer that ends in "#### 18"."""
    return _math_metrics(math_answer(document["answer"]), replies)


def math500(document: dict, replies: list[str]) -> dict[str, float]:
    """Score replies to a row with "answer", in LaTeX."""
    return _math_metrics(math_answer(rf"\boxed{{{document['answer']}}}"), replies)


def minerva_shots() -> list[dict]:
    """Return the four worked problems of Lewkowycz et al. (2022)."""
    # lm-eval's file is read and not imported, because to import it requires antlr 4.11 for its comparison by sympy.
    file = Path(find_spec("lm_eval.tasks").submodule_search_locations[0], "minerva_math", "utils.py")
    functions = [each for each in ast.parse(file.read_text("utf-8")).body if isinstance(each, ast.FunctionDef)]
    samples = next(each for each in functions if each.name == "list_fewshot_samples")
    return ast.literal_eval(samples.body[-1].value)


# Code

# These lines must come before a prompt.
_FUTURES = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


def _code_metrics(solutions: list[str], tests: str) -> dict[str, float]:
    """Return P@1, the mean over the samples, and P@10 if there are at least 10 samples."""
    programs = []
    for code in solutions:
        programs.append("".join([*_FUTURES.findall(code), _FUTURES.sub("", code), "\n", tests]))
    passed = passes_each(programs)
    count = len(passed)
    return {f"pass@{k}": pass_at_k(count, sum(passed), k) for k in (1, 10) if k <= count}


def mbpp_completion(document: dict, replies: list[str]) -> dict[str, float]:
    """Score completions after [BEGIN], which are code."""
    # The set-up of a test comes after the solution, because it uses the solution's names.
    return _code_metrics(replies, "\n".join([document["test_setup_code"], *document["test_list"]]))


def mbpp(document: dict, replies: list[str]) -> dict[str, float]:
    """Score replies of a chat model."""
    tests = "\n".join(document["test_list"])
    # A task may ask for a function with the name of a builtin.
    names = names_needed(tests) | set(re.findall(r"assert[\s(]+(\w+)\(", tests))
    return mbpp_completion(document, [program(reply, names) for reply in replies])


def humaneval_completion(document: dict, replies: list[str]) -> dict[str, float]:
    """Score completions of the prompt, which are code."""
    tests = f"{document['test']}\ncheck({document['entry_point']})"
    return _code_metrics([document["prompt"] + reply for reply in replies], tests)


def humaneval(document: dict, replies: list[str]) -> dict[str, float]:
    """Score replies of a chat model.

    The prompt comes before the reply's code, because the code may need its imports and helpers. The code continues the
    prompt's function or defines it again.
    """
    return humaneval_completion(document, [program(reply, {document["entry_point"]}) for reply in replies])


# RULER


def string_match(document: dict, replies: list[str]) -> dict[str, float]:
    """Score the share of the references that the reply contains (RULER's string_match_all)."""
    return {"string_match": string_match_all(postprocess_pred(replies), [document["outputs"]])}


def string_match_any(document: dict, replies: list[str]) -> dict[str, float]:
    """Score whether the reply contains any reference (RULER's string_match_part). lm-eval takes their mean."""
    each = [string_match({"outputs": [reference]}, replies)["string_match"] for reference in document["outputs"]]
    return {"string_match": max(each)}


# Likelihoods


def next_word(document: dict, results: list[tuple[float, bool]]) -> dict[str, float]:
    """Score a target by its log-likelihood in nats and by whether greedy decoding gives it."""
    ((log_likelihood, is_greedy),) = results
    return {"acc": float(is_greedy), "loss": -log_likelihood}


def loss_by_position(document: dict, results: list[list[float]]) -> dict[str, float]:
    """Return the mean loss in nats a token over the positions 1 to 63, 64 to 127, 128 to 255, and so on.

    Each mean is named for its first position. A range of positions is left out unless the text fills more than half of
    it. "bits_per_byte" is the loss in bits over the mean number of bytes of all texts, so its mean holds for all.
    """
    (log_probs,) = results
    metrics = {"bits_per_byte": -sum(log_probs) / math.log(2) / document["mean_bytes"]}
    first = 1
    end = 64
    while len(log_probs) >= first + (end - first) / 2:
        part = log_probs[first - 1 : end - 1]
        metrics[f"loss@{first}"] = -sum(part) / len(part)
        first = end
        end = 2 * end
    return metrics
