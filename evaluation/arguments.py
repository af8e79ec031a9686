"""Read and check the command line of `evaluation.run` before lm-eval and PyTorch are imported, which takes long."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from evaluation import names, run_code
from iha.errors import UserError
from iha.files import expanded
from iha.sources import locate


def parse(argv: Sequence[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """Return the command line with the suite's tasks and defaults filled in. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint directory, GGUF file or id on the Hub")
    parser.add_argument("--suite", choices=names.SUITES, help="tasks to run (default: a suite that has --tasks)")
    parser.add_argument("--tasks", nargs="+", help="only these tasks of the suite")
    parser.add_argument(
        "--data", type=expanded, help="directory of data files as in data_manifest.json (default: the Hub)"
    )
    parser.add_argument("--text", type=expanded, help="text file for perplexity_by_position, read to its end")
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="lengths of RULER's prompts with their replies, in tokens"
    )
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
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="default: auto, that of the checkpoint",
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    parser.add_argument("--no-chat", action="store_true", help="never apply the chat template")
    parser.add_argument(run_code.FLAG, action="store_true", help=run_code.FLAG_HELP)
    return complete(parser.parse_args(argv))


def suite_of(tasks: Sequence[str] | None) -> str:
    """Return the smallest suite that has all of these tasks, where none is given. Raise `UserError`."""
    if not tasks:
        raise UserError(f"--suite: give one of {', '.join(names.SUITES)}, or tasks with --tasks.")
    suites = [suite for suite in ("ruler", "reasoning", "paper") if set(tasks) <= set(names.SUITES[suite])]
    return suites[0] if suites else "paper"  # whose check names the task that there is not


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Return the command line with the suite's tasks and defaults filled in. Raise `UserError`."""
    for name in ("limit", "samples", "max_new_tokens", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected at least 1.")
    if args.text is not None and not args.text.is_file():
        raise UserError(f"--text {args.text}: expected a text file.")
    locate(args.model)
    if args.text is not None and args.suite is None:
        args.tasks = args.tasks or [names.BY_POSITION]
    args.suite = args.suite or suite_of(args.tasks)
    for name, value in (names.SMOKE_DEFAULTS if args.suite == "smoke" else names.DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.lengths = sorted(set(args.lengths))
    if args.lengths[0] < 64:
        raise UserError(f"--lengths {args.lengths[0]}: expected at least 64.")
    known = names.SUITES[args.suite]
    for name in args.tasks or ():
        if name not in known:
            raise UserError(f"--tasks {name}: not a task of the suite {args.suite}: it has {', '.join(known)}.")
    asked = args.tasks or known
    args.tasks = [task for task in known if task in asked]
    if args.text is not None and names.BY_POSITION not in args.tasks:
        raise UserError(f"--text is read by {names.BY_POSITION}, which --tasks leaves out.")
    runs_code = [task for task in args.tasks if task in names.CODE]
    if runs_code and not args.confirm_run_unsafe_code:
        raise UserError(
            f"{', '.join(runs_code)} would run programs that the model writes: give {run_code.FLAG}, in a container "
            f"or with bubblewrap installed, or name the other tasks with --tasks."
        )
    # The path in full: the model may be "." or "..".
    args.output = args.output or Path("outputs/evaluation") / Path(os.path.abspath(args.model)).name
    return args
