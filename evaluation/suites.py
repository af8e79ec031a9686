"""Name the tasks of each suite, and build lm-eval's tasks of them."""

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Suite:
    """Hold tasks and the defaults of the command line's options; `None` leaves an option to the task."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    limit: int | None = None
    samples: int | None = None
    max_new_tokens: int | None = None
    data: Path | None = None


SUITES = {
    "smoke": Suite(
        (*TABLE_1, *TABLE_2, "dcformer_synthetic", "niah_multikey_1", "niah_single_1", "perplexity_by_position"),
        lengths=(512,),
        limit=2,
        samples=2,
        max_new_tokens=8,
        data=data.SMOKE,
    ),
    "ruler": Suite(BY_LENGTH, lengths=(4096, 8192, 16384)),
    "reasoning": Suite(TABLE_1),
    "paper": Suite((*TABLE_1, *TABLE_2, "dcformer_synthetic", *BY_LENGTH), lengths=(4096, 8192, 16384)),
}


def choose_tasks(suite: str, names: list[str] | None) -> list[str]:
    """Return the tasks of a suite, or those of them that are named. Raise `UserError` for any other task."""
    tasks = SUITES[suite].tasks
    for name in names or ():
        if name not in tasks:
            raise UserError(f"--tasks {name}: not a task of the suite {suite}, whose tasks are {', '.join(tasks)}.")
    return [task for task in tasks if not names or task in names]


def build_tasks(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, ConfigurableTask]:
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
            task = ConfigurableTask(config={**config, "task": title, "metadata": metadata | run})
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
