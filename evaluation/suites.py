"""Name the tasks of each suite, and build lm-eval's tasks of them."""

import argparse
import logging
from pathlib import Path
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import PreTrainedTokenizerBase

from common.command_io import UserError
from evaluation import data, ruler


TASKS = Path(__file__).with_name("tasks")

TABLE_1 = ("gsm8k", "math500", "mbpp", "humaneval")
TABLE_2 = ("gsm8k_5shot", "gsm8k_5shot_maj5", "math500_4shot", "mbpp_5shot", "humaneval_completion")
# Tasks that are made anew for each of `--lengths`.
BY_LENGTH = (*ruler.TASKS, "perplexity_by_position")
SUITES = {
    "smoke": (*TABLE_1, *TABLE_2, "dcformer_synthetic", "niah_multikey_1", "niah_single_1", "perplexity_by_position"),
    "ruler": BY_LENGTH,
    "reasoning": TABLE_1,
    "paper": (*TABLE_1, *TABLE_2, "dcformer_synthetic", *BY_LENGTH),
}
# Of the command line's options; `None` leaves one to the task.
DEFAULTS: dict[str, Any] = {"lengths": [4096, 8192, 16384]}
SMOKE_DEFAULTS = {"lengths": [512], "limit": 2, "samples": 2, "max_new_tokens": 8, "data": data.SMOKE}


class Task(ConfigurableTask):
    """Put the questions to a model as the task's metadata says: as a chat or as text."""

    model: Any = None  # the `RecordedModel`, which sees every prompt before it generates

    def build_all_requests(self, **options) -> None:
        if (count := min(len(self.eval_docs), options["limit"] or len(self.eval_docs))) < options["world_size"]:
            raise UserError(
                f"{self.config.task} has {count} examples for {options['world_size']} processes: start fewer of them."
            )
        if not self.config.metadata["chat"]:
            options |= {"apply_chat_template": False, "chat_template": None}
        self.set_fewshot_seed(0)
        super().build_all_requests(**options)
        self.model.check_prompts(self.config.task, self.instances)


def build_tasks(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Task]:
    """Return lm-eval's tasks with their rows, named NAME, or NAME@LENGTH for each length. Raise `UserError`.

    Args:
        args: the options of `evaluation.run`, with the suite's tasks and defaults filled in.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every task that has functions of its own
    tasks = {}
    for name in args.tasks:
        for length in args.lengths if name in BY_LENGTH else [None]:
            config = _config(name)
            run = {"task": name, "length": length, "count": args.limit or ruler.STOCK_SAMPLES, "seed": args.seed}
            run |= {"data_directory": args.data, "tokenizer": tokenizer}
            metadata = config.pop("metadata")
            metadata["chat"] = metadata.get("chat", False) and not args.no_chat
            title = name if length is None else f"{name}@{length}"
            task = Task(config={**config, "task": title, "metadata": metadata | run})
            task.config.metadata = metadata
            if (settings := task.config.generation_kwargs) is not None and args.max_new_tokens:
                settings["max_gen_toks"] = args.max_new_tokens
            if name in TABLE_1 and args.samples:
                task.config.repeats = args.samples
            tasks[title] = task
    return tasks


def _config(name: str) -> dict:
    if name not in ruler.TASKS:
        return load_yaml(TASKS / f"{name}.yaml")
    ours = load_yaml(TASKS / "_ruler.yaml")
    if name in ruler.QA_FILES:
        ours["process_results"] = ruler.score_any
    return ruler.stock_config(name) | ours
