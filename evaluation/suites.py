"""Build the tasks of a suite as tasks of lm-eval: those of the folder `tasks`, and RULER's (Hsieh et al., 2024).

RULER's documents are lm-eval's own. Here each length has a separate figure, and needles are drawn by run, task and
length, because lm-eval draws them from the global random state. `niah_single_1`, `niah_multikey_2`, `niah_multikey_3`,
`ruler_vt`, `ruler_cwe` and `ruler_fwe` need no network. lm-eval gets the essays and the questions of the other tasks
from the Hub.
"""

import logging
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval.tasks
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.ruler import cwe_utils
from transformers import PreTrainedTokenizerBase

from evaluation import scores
from evaluation.options import BY_LENGTH, BY_POSITION, RULER, SMOKE, TABLE_1, Options
from iha.errors import UserError, refusing
from iha.thoughts import opened_thought


TASKS = Path(__file__).with_name("tasks")
RULERS_TASKS = Path(lm_eval.tasks.__file__).parent / "ruler"
# Below this length, in tokens, lm-eval may never finish making these tasks.
SHORTEST = {"ruler_vt": 1024, "ruler_cwe": 1024, "ruler_fwe": 1024}


class Task(ConfigurableTask):
    """Ask a model the questions as the task's metadata says, as a chat or as text, with a request for each sample.

    So each sample has its own place in lm-eval's cache. (lm-eval itself repeats one request and caches no sampled
    reply. If processes have unequal shares, it gives the last document the replies to other documents.)
    """

    model: Any = None  # the `Model`, which sees every prompt before it generates
    note = ""  # the options with which figures cannot be compared with published ones
    thought = ""  # the marker with which the chat template opens a thought at the end of each prompt

    def build_all_requests(self, **options) -> None:
        if not self.config.metadata["chat"]:
            options |= {"apply_chat_template": False, "chat_template": None}
        self.set_fewshot_seed(0)
        super().build_all_requests(**options)
        self.model.check_prompts(self.config.task, self.instances)

    def construct_requests(self, doc: dict, ctx: str, **options) -> list[Instance]:
        request = super().construct_requests(doc, ctx, **options)
        if self.OUTPUT_TYPE != "generate_until":
            return [request]
        self.thought = opened_thought(ctx)
        prompt, settings = request.arguments
        name, index, samples = options["metadata"]
        is_sampled = bool(settings.get("temperature"))
        requests = []
        for number in range(samples):
            of_sample = settings | {"sample": number} if is_sampled else settings
            requests.append(Instance(request.request_type, doc, (prompt, of_sample), number, (name, index, 1)))
        return requests

    def process_results(self, doc: dict, results: list) -> dict:
        """Score the replies, each of which begins with the thought that its prompt opens."""
        return super().process_results(doc, [self.thought + reply for reply in results] if self.thought else results)


def build_tasks(options: Options, tokenizer: PreTrainedTokenizerBase) -> dict[str, Task]:
    """Return lm-eval's tasks with their rows, named NAME, or NAME@LENGTH for each length. Raise `UserError`."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every task that names functions
    tasks = {}
    # RULER gets a copy of the tokenizer, because a checkpoint may contain code, and a GGUF file is no directory.
    with tempfile.TemporaryDirectory() as copy:
        tokenizer.save_pretrained(copy)
        for name in options.tasks:
            if name not in BY_LENGTH:
                tasks[name] = _build(name, name, task_config(name, None, options, tokenizer), options)
                continue
            for length in options.lengths:
                title = f"{name}@{length}"
                if name == BY_POSITION:
                    tasks[title] = _build(title, name, task_config(name, length, options, tokenizer), options)
                    continue
                # Without a network the Hub's clients raise many types of exceptions.
                what = f"{title} cannot be made (name the others with --tasks)"
                with seeded(title, options.seed), refusing(what, Exception):
                    tasks[title] = _build(title, name, ruler_config(name, length, copy), options)
    return tasks


def task_config(name: str, length: int | None, options: Options, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return lm-eval's configuration of a task of the folder `tasks`. Its metadata go to its `custom_dataset`."""
    config = load_yaml(TASKS / f"{name}.yaml")
    config["metadata"] |= {"data_directory": options.data, "text_file": options.text, "limit": options.limit}
    config["metadata"] |= {"length": length, "tokenizer": tokenizer}
    return config


def ruler_config(name: str, length: int, tokenizer: str) -> dict:
    """Return lm-eval's configuration of a task of RULER for one length, in tokens, with our score.

    `tokenizer` is the directory of the tokenizer that measures the documents. lm-eval would run code in it. Raise
    `UserError` for a length that is too short.
    """
    if length < SHORTEST.get(name, 0):
        raise UserError(f"{name} needs at least {SHORTEST[name]} tokens, --lengths says {length}: choose more.")
    stock = load_yaml(RULERS_TASKS / f"{name.removeprefix('ruler_')}.yaml")
    stock = {key: value for key, value in stock.items() if key not in ("tag", "metric_list")}
    score = scores.string_match_any if name.startswith("ruler_qa") else scores.string_match
    metadata = {**stock["metadata"], "max_seq_lengths": [length], "tokenizer": tokenizer}
    return stock | {"num_fewshot": 0, "process_results": score, "metadata": metadata}


@contextmanager
def seeded(title: str, seed: int) -> Iterator[None]:
    """Let the block draw the documents of a task, NAME@LENGTH, by `seed`, and restore the random states after it."""
    number = random.Random(f"{seed}/{title}").getrandbits(32)
    python_state = random.getstate()
    numpy_state = np.random.get_state()
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


def _build(title: str, name: str, config: dict, options: Options) -> Task:
    """Return the task of an lm-eval configuration, as the options change it."""
    may_chat = config["metadata"].pop("chat", False)
    is_chat = may_chat and not options.no_chat
    task = Task(config=config | {"task": title})
    task.config.metadata = {"chat": is_chat}  # lm-eval copies them, a tokenizer too, into its results
    settings = task.config.generation_kwargs
    changed = []
    if options.limit is not None:
        changed.append(f"--limit {options.limit}")
    if is_chat != may_chat:
        changed.append("--no-chat")
    if settings is not None and options.max_new_tokens not in (None, settings.get("max_gen_toks")):
        changed.append(f"--max-new-tokens {options.max_new_tokens}")
        settings["max_gen_toks"] = options.max_new_tokens
    if name in TABLE_1 and options.samples not in (None, task.config.repeats):
        changed.append(f"--samples {options.samples}")
        task.config.repeats = options.samples
    if name == BY_POSITION and options.text is not None:
        changed.append(f"--text {options.text.name}")
    elif name not in RULER and options.data is not None and options.data.resolve() == SMOKE:
        changed.append(f"--data {options.data}")
    if changed and options.suite != "smoke":  # which says what it is
        task.note = f"measured with {' '.join(changed)}"
    return task
