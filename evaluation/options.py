"""Name the suites, and read the command line of `evaluation.run` before lm-eval and PyTorch are imported."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.run_code import FLAG, FLAG_HELP
from iha.errors import UserError
from iha.files import expanded
from iha.sources import locate


# Packages that `evaluation.run` needs besides those of the extra "scripts".
PACKAGES = ("lm_eval", "datasets", "markdown_it", "math_verify", "wonderwords")
# A few hand-made rows of each benchmark, in the layout of a data directory, which are part of the repository.
SMOKE = Path(__file__).with_name("smoke_data")
# RULER's tasks: multi-key retrieval comes first, because the paper sees the largest difference there.
RULER = (
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multivalue",
    "niah_multiquery",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
    "ruler_qa_squad",
    "ruler_qa_hotpot",
)
TABLE_1 = ("gsm8k", "math500", "mbpp", "humaneval")
TABLE_2 = ("gsm8k_5shot", "gsm8k_5shot_maj5", "math500_4shot", "mbpp_5shot", "humaneval_completion")
# Tasks that run programs that the model writes.
CODE = ("mbpp", "humaneval", "mbpp_5shot", "humaneval_completion")
# Tasks that are made anew for each of `--lengths`.
BY_POSITION = "perplexity_by_position"
BY_LENGTH = (*RULER, BY_POSITION)
SUITES = {
    "smoke": (*TABLE_1, *TABLE_2, "dcformer_synthetic", "niah_multikey_2", "niah_single_1", BY_POSITION),
    "ruler": BY_LENGTH,
    "reasoning": TABLE_1,
    "paper": (*TABLE_1, *TABLE_2, "dcformer_synthetic", *BY_LENGTH),
}
LENGTHS = [4096, 8192, 16384]
SMOKE_DEFAULTS: dict[str, Any] = {"lengths": [512], "limit": 2, "samples": 2, "max_new_tokens": 8, "data": SMOKE}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Hold the options of `evaluation.run`. The task decides on one that is `None`."""

    model: str
    suite: str
    tasks: list[str]
    output: Path
    lengths: list[int]
    data: Path | None = None
    text: Path | None = None
    limit: int | None = None
    samples: int | None = None
    max_new_tokens: int | None = None
    batch_size: int = 8
    tokenizer: str | None = None
    dtype: str = "auto"
    seed: int = 0
    no_chat: bool = False
    confirm_run_unsafe_code: bool = False


def parse(argv: Sequence[str] | None = None, description: str | None = None) -> Options:
    """Return the options in a command line, with the defaults of the suite. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint directory, GGUF file or id on the Hub")
    parser.add_argument("--suite", choices=SUITES, help="tasks to run (default: those of --tasks, of any suite)")
    parser.add_argument("--tasks", nargs="+", help="only these tasks of the suite")
    parser.add_argument("--data", type=expanded, help="directory of files as in data_manifest.json (default: the Hub)")
    parser.add_argument("--text", type=expanded, help=f"text file for {BY_POSITION}, read to its end")
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths of RULER's prompts with replies, in tokens")
    parser.add_argument("--limit", type=int, help="only the first LIMIT examples of each task and length")
    parser.add_argument("--samples", type=int, help="replies to each question of the tasks of Table 1 (default 16)")
    parser.add_argument("--max-new-tokens", type=int, help="longest reply (default: the task's)")
    where = (
        "directory for results (default: outputs/evaluation/MODEL); give no stranger's, because its cache holds "
        "pickles, which can run any code"
    )
    parser.add_argument("--output", type=expanded, help=where)
    parser.add_argument("--batch-size", type=int, default=8, help="rows in a batch (default: 8)")
    parser.add_argument("--tokenizer", help="directory or id on the Hub (default: the model's)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="default: auto, that of the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    parser.add_argument("--no-chat", action="store_true", help="never apply the chat template")
    parser.add_argument(FLAG, action="store_true", help=FLAG_HELP)
    given = vars(parser.parse_args(argv))
    _check_values(given)
    given["tasks"] = _tasks(given)
    given["suite"] = given["suite"] or "paper"  # which has all tasks
    defaults = SMOKE_DEFAULTS if given["suite"] == "smoke" else {"lengths": LENGTHS}
    given |= {name: value for name, value in defaults.items() if given[name] is None}
    given["lengths"] = sorted(set(given["lengths"]))
    # The path in full: the model may be "." or "..".
    given["output"] = given["output"] or Path("outputs/evaluation") / Path(os.path.abspath(given["model"])).name
    return Options(**given)


def _check_values(given: dict[str, Any]) -> None:
    """Reject numbers that are too small, and paths that lead nowhere. Raise `UserError`."""
    for name in ("limit", "samples", "max_new_tokens", "batch_size"):
        if given[name] is not None and given[name] < 1:
            raise UserError(f"--{name.replace('_', '-')} {given[name]}: expected at least 1.")
    if given["lengths"] and min(given["lengths"]) < 64:
        raise UserError(f"--lengths {min(given['lengths'])}: expected at least 64.")
    if given["text"] is not None and not given["text"].is_file():
        raise UserError(f"--text {given['text']}: expected a text file.")
    locate(given["model"])


def _tasks(given: dict[str, Any]) -> list[str]:
    """Return the tasks that a command line asks for, in the order of the suite. Raise `UserError`."""
    asked = given["tasks"]
    if given["suite"] is None and asked is None:
        if given["text"] is None:
            raise UserError(f"--suite: give one of {', '.join(SUITES)}, or tasks with --tasks.")
        asked = [BY_POSITION]
    suite = given["suite"] or "paper"
    known = SUITES[suite]
    for name in asked or ():
        if name not in known:
            raise UserError(f"--tasks {name}: not a task of the suite {suite}: it has {', '.join(known)}.")
    tasks = [task for task in known if task in (asked or known)]
    if given["text"] is not None and BY_POSITION not in tasks:
        raise UserError(f"--text is read by {BY_POSITION}, which --tasks leaves out.")
    runs_code = [task for task in tasks if task in CODE]
    if runs_code and not given["confirm_run_unsafe_code"]:
        raise UserError(
            f"{', '.join(runs_code)} would run programs that the model writes: give {FLAG}, in a container or with "
            "bubblewrap installed, or name the other tasks with --tasks."
        )
    return tasks
