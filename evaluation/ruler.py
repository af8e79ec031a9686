"""Make lm-eval's RULER tasks (Hsieh et al., 2024) for one length each, and score them.

The documents are lm-eval's own. This file gives each length a separate figure, and seeds the random state by run,
task and length, because lm-eval draws needles from the global state. `niah_single_1`, `niah_multikey_2`,
`niah_multikey_3`, `ruler_vt`, `ruler_cwe` and `ruler_fwe` need no network. lm-eval gets the essays and the questions
of the other tasks from the Hub.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lm_eval.tasks
import numpy as np
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.ruler import cwe_utils
from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

from iha.errors import UserError


STOCK = Path(lm_eval.tasks.__file__).parent / "ruler"
# Below this length, in tokens, lm-eval may never finish making these tasks.
SHORTEST = {"ruler_vt": 1024, "ruler_cwe": 1024, "ruler_fwe": 1024}


def config(task: str, length: int, tokenizer: str) -> dict:
    """Return lm-eval's configuration of a task for one length, in tokens, with this module's score.

    Args:
        tokenizer: the directory of the tokenizer that measures the documents. lm-eval would run code in it.

    Raise `UserError` for a length that is too short.
    """
    if length < SHORTEST.get(task, 0):
        raise UserError(f"{task} needs at least {SHORTEST[task]} tokens, --lengths says {length}: choose more.")
    stock = load_yaml(STOCK / f"{task.removeprefix('ruler_')}.yaml")
    stock = {key: value for key, value in stock.items() if key not in ("tag", "metric_list")}
    score = score_any if task.startswith("ruler_qa") else score_all
    metadata = {**stock["metadata"], "max_seq_lengths": [length], "tokenizer": tokenizer}
    return stock | {"num_fewshot": 0, "process_results": score, "metadata": metadata}


@contextmanager
def seeded(title: str, seed: int) -> Iterator[None]:
    """Let the block draw the documents of a task, NAME@LENGTH, by `seed`, and restore the random state after it."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    number = random.Random(f"{seed}/{title}").getrandbits(32)
    words_state = cwe_utils.RNG.getstate()  # of `cwe` alone
    random.seed(number)
    np.random.seed(number)
    cwe_utils.RNG.seed(number)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        cwe_utils.RNG.setstate(words_state)


def score_all(document: dict, replies: list[str]) -> dict[str, float]:
    """Score the share of the references that the reply contains (RULER's string_match_all)."""
    return {"string_match": string_match_all(postprocess_pred(replies), [document["outputs"]])}


def score_any(document: dict, replies: list[str]) -> dict[str, float]:
    """Score whether the reply contains any reference (RULER's string_match_part). lm-eval takes their mean."""
    each = [score_all({"outputs": [reference]}, replies)["string_match"] for reference in document["outputs"]]
    return {"string_match": max(each)}
