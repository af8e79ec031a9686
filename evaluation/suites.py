"""Build the tasks of a suite as tasks of lm-eval."""

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import PreTrainedTokenizerBase

from evaluation import ruler
from evaluation.names import BY_LENGTH, BY_POSITION, RULER, SMOKE, TABLE_1
from iha.errors import refusing
from iha.thoughts import opened_thought


TASKS = Path(__file__).with_name("tasks")


class Task(ConfigurableTask):
    """Ask a model the questions as the task's metadata says, as a chat or as text, with a request for each sample.

    So each sample has its own place in lm-eval's cache. (lm-eval itself repeats one request and caches no sampled
    reply. If processes have unequal shares, it gives the last document the replies to other documents.)
    """

    model: Any = None  # the `Model`, which sees every prompt before it generates
    options = ""  # those of the command line with which figures cannot be compared with published ones
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


def build_tasks(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> dict[str, Task]:
    """Return lm-eval's tasks with their rows, named NAME, or NAME@LENGTH for each length. Raise `UserError`.

    Args:
        args: the options of `evaluation.run`, with the suite's tasks and defaults filled in.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every task that names functions
    tasks = {}
    # RULER gets a copy of the tokenizer, because a checkpoint may contain code, and a GGUF file is no directory.
    with tempfile.TemporaryDirectory() as copy:
        tokenizer.save_pretrained(copy)
        for name in args.tasks:
            for length in args.lengths if name in BY_LENGTH else [None]:
                title = name if length is None else f"{name}@{length}"
                if name in RULER:
                    config = ruler.config(name, length, copy)
                    # Without a network the Hub's clients raise many types of exceptions.
                    with (
                        ruler.seeded(title, args.seed),
                        refusing(f"{title} cannot be made (name the others with --tasks)", Exception),
                    ):
                        tasks[title] = _build(title, name, config, args)
                else:
                    config = load_yaml(TASKS / f"{name}.yaml")
                    config["metadata"] |= {"length": length, "data_directory": args.data, "tokenizer": tokenizer}
                    config["metadata"] |= {"text_file": args.text, "limit": args.limit}
                    tasks[title] = _build(title, name, config, args)
    return tasks


def _build(title: str, name: str, config: dict, args: argparse.Namespace) -> Task:
    """Return the task of an lm-eval configuration, whose metadata go to its `custom_dataset`."""
    may_chat = config["metadata"].pop("chat", False)
    is_chat = may_chat and not args.no_chat
    task = Task(config=config | {"task": title})
    task.config.metadata = {"chat": is_chat}  # lm-eval copies them, a tokenizer too, into its results
    settings = task.config.generation_kwargs
    options = []
    if args.limit is not None:
        options.append(f"--limit {args.limit}")
    if is_chat != may_chat:
        options.append("--no-chat")
    if settings is not None and args.max_new_tokens not in (None, settings.get("max_gen_toks")):
        options.append(f"--max-new-tokens {args.max_new_tokens}")
        settings["max_gen_toks"] = args.max_new_tokens
    if name in TABLE_1 and args.samples not in (None, task.config.repeats):
        options.append(f"--samples {args.samples}")
        task.config.repeats = args.samples
    if name == BY_POSITION and args.text is not None:
        options.append(f"--text {args.text.name}")
    elif name not in RULER and args.data is not None and args.data.resolve() == SMOKE:
        options.append(f"--data {args.data}")
    if args.suite != "smoke":  # which says what it is
        task.options = " ".join(options)
    return task
