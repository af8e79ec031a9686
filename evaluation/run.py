"""Measure a checkpoint as the paper does, through lm-eval with this directory's tasks.

The tasks are RULER, GSM8K, MATH-500, MBPP, HumanEval, DCFormer's synthetic task and loss by position. Everything is
checked before the first token is generated. lm-eval's cache keeps each answer, so the same command resumes a killed
run, and more --samples add to those in the cache. evaluation/README.md explains each figure.

examples:
  python -m evaluation.run outputs/smollm2-iha --suite smoke --confirm-run-unsafe-code
  python -m evaluation.run ORG/NAME --suite reasoning --confirm-run-unsafe-code --output outputs/evaluation/name
  python -m evaluation.run outputs/smollm2-iha --suite ruler --tasks niah_single_1 niah_multikey_2 \\
      --lengths 512 1024 --limit 50
  python -m evaluation.run outputs/smollm2-iha --text held_out.txt --lengths 1024
  accelerate launch --num_processes 8 evaluation/run.py ORG/NAME --suite ruler --data DATA
"""

import hashlib
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from statistics import median


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from evaluation.options import CODE, PACKAGES, Options, parse
from iha.errors import UserError, check_packages, refusing, run_cli


if __name__ == "__main__":
    run_cli(lambda: check_packages(*PACKAGES))
    OPTIONS = run_cli(lambda: parse(description=__doc__))  # before the imports below, which take long

import lm_eval
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from lm_eval.api.model import CachingLM
from transformers import PreTrainedTokenizerBase

from evaluation import data, report, run_code, suites
from evaluation.model import Model, device_type
from iha import thoughts
from iha.cards import source_name
from iha.checkpoints import fingerprint, load_config, load_tokenizer, note_slow_dtype, vocabulary_of
from iha.files import current_commit, read_json, sole_writer, write_json, write_jsonl
from iha.foreign_code import note_foreign_code
from iha.sources import find_source


# Packages whose versions decide on figures.
VERSIONS = ("torch", "transformers", "accelerate", "lm_eval", "math-verify", "sympy", "wonderwords", "datasets")
# The modules of this directory that determine a task's figures.
_DECIDING = ("data", "model", "options", "replies", "run", "run_code", "scores", "suites")


def main(argv: Sequence[str] | None = None) -> dict | None:
    """Run the command with the words of a command line. Raise `UserError`."""
    return evaluate(parse(argv, __doc__))


def evaluate(options: Options) -> dict | None:
    """Evaluate, write results.json, report.md and samples, and return the results.

    The result is `None` on every process but the first. Raise `UserError`.
    """
    # There is no timeout, because some processes finish hours before others.
    process = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(weeks=52))])
    # The main process holds the lock. The other processes of the run write next to it.
    with sole_writer(options.output) if process.is_main_process else nullcontext():
        source = find_source(options.model)
        of_tokenizer = find_source(options.tokenizer) if options.tokenizer else source
        vocabulary = vocabulary_of(load_config(source))
        note_foreign_code(source)
        tokenizer = load_tokenizer(of_tokenizer, vocabulary)
        tasks = suites.build_tasks(options, tokenizer)
        check_tokenizer(tokenizer, tasks)
        identity = {
            "checkpoint": fingerprint(source),
            "tokenizer": fingerprint(of_tokenizer),
            "seed": options.seed,
            "dtype": options.dtype,
            # This code decides replies, and no request names it. Other code of this folder scores kept replies anew.
            "model_code": hash_of([Path(__file__).with_name("model.py"), Path(thoughts.__file__)]),
        }
        # One process claims the directory: another might find the record incomplete.
        if process.is_main_process:
            claim_output(options.output, identity)
            note_missing_isolation(options.tasks)
        process.wait_for_everyone()

        started = time.monotonic()
        model = Model(source, tokenizer, options.dtype, options.batch_size, options.seed)
        if model.device.type == "cpu":
            note_slow_dtype(model.model.dtype)
        if (model.rank, model.world_size) != (process.process_index, process.num_processes):
            raise UserError("lm-eval shares the documents among the GPUs of one machine: start one process for each.")
        answer = ask(model, tasks, options)
        if answer is None:
            return None
        about = {"model": source_name(options.model), **identity, "seconds": round(time.monotonic() - started)}
        results = about | results_of(answer, tasks, model, options)
        write(results, answer["samples"], options.output)
        return results


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, tasks: dict[str, suites.Task]) -> None:
    """Raise `UserError` if the tokenizer has no end token, ends every prompt, or lacks a chat template for a task."""
    if tokenizer.eos_token_id is None:
        raise UserError("The tokenizer has no end token, where replies stop: set eos_token, or give --tokenizer.")
    if tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]:
        raise UserError(
            f"The tokenizer puts its end token {tokenizer.eos_token} behind every text, so that a reply would begin "
            f"after the end: give another --tokenizer, one without add_eos_token."
        )
    names = [name for name, task in tasks.items() if task.config.metadata["chat"]]
    if names:
        advice = "add a template (see sft/chat_templates), give another --tokenizer, or put plain text with --no-chat"
        with refusing(f"The tokenizer writes no chat, as {', '.join(names)} need: {advice}", ValueError):
            tokenizer.get_chat_template()


def hash_of(files: Iterable[Path]) -> str:
    """Return a hash of the contents of files, 16 hexadecimal digits."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def claim_output(directory: Path, identity: dict) -> None:
    """Record this run in `directory`, or check that the directory belongs to it.

    The check is needed because lm-eval's cache finds a reply by its prompt and settings, not by its model. Raise
    `UserError` if the directory holds something else, or replies of another checkpoint, tokenizer, seed or dtype.
    """
    path = directory / "run.json"
    if path.is_file():
        found = read_json(path)
        different = [name for name in identity if found.get(name) != identity[name]]
        if different:
            another = " and ".join(different)
            raise UserError(f"{directory} holds replies of another {another}: choose another --output, or remove it.")
        return
    if {entry.name for entry in directory.iterdir()} - {".lock"}:
        raise UserError(f"{directory} exists and is no output of this command: choose another --output.")
    write_json(path, identity | {"commit": current_commit(), "device": device_type(), "versions": versions()})


def note_missing_isolation(tasks: Iterable[str]) -> None:
    """Print a note on stderr if tasks run programs and nothing isolates these."""
    runs_code = [task for task in tasks if task in CODE]
    if runs_code and not run_code.isolates():
        print(
            f"Note: bubblewrap is not installed or does not work here, so the programs of {', '.join(runs_code)} can "
            "do all that you can: run them in a container.",
            file=sys.stderr,
        )


def ask(model: Model, tasks: dict[str, suites.Task], options: Options) -> dict | None:
    """Return the figures and samples of lm-eval, or `None` on every process but the first. Raise `UserError`."""
    for task in tasks.values():
        task.model = model
    cached = CachingLM(model, str(options.output / "cache" / f"rank{model.rank}.db"))
    print(f"{len(tasks)} tasks; {len(cached.dbdict)} answers are in {options.output / 'cache'}", flush=True)
    advice = "Give a smaller --batch-size and go on, what was generated is kept"
    with closing(cached.dbdict), refusing(advice, torch.OutOfMemoryError):
        return lm_eval.evaluate(
            cached,
            {"tasks": tasks},
            limit=options.limit,
            apply_chat_template=True,  # each task decides
            fewshot_as_multiturn=True,
            bootstrap_iters=1,
            confirm_run_unsafe_code=options.confirm_run_unsafe_code,
        )


def results_of(answer: dict, tasks: dict[str, suites.Task], model: Model, options: Options) -> dict:
    """Return the content of results.json but for what names the checkpoint."""
    of_tasks = {
        name: summarise(answer["results"][name], answer["samples"][name], task, model) for name, task in tasks.items()
    }
    return {
        "parameters": model.model.num_parameters(),
        "model_dtype": str(model.model.dtype).removeprefix("torch."),
        "suite": options.suite,
        "batch_size": options.batch_size,
        "processes": model.world_size,
        "device": model.device.type,
        "chat_template": not options.no_chat,
        "commit": current_commit(),
        "versions": versions(),
        "isolated_code": run_code.isolates(),
        "data_sha256": data.checksums(options.data, options.text),
        "tasks": of_tasks,
        "ruler": report.ruler_means(of_tasks),
    }


def summarise(figures: dict, rows: list[dict], task: suites.Task, model: Model) -> dict:
    """Return the metrics of a task with standard errors, and counts and settings of lm-eval's samples.

    Figures that cannot be compared with published ones because of options get a note.
    """
    metrics = {}
    for key, value in figures.items():
        metric, _, pipeline = key.partition(",")
        if pipeline and not metric.endswith("_stderr"):
            error = figures[f"{metric}_stderr,{pipeline}"]
            metrics[metric] = {"value": value, "stderr": error if isinstance(error, float) else None}
    tokens = [len(model.tok_encode(row["arguments"][0][0])) for row in rows]
    settings = task.config.generation_kwargs
    unfinished = 0
    if task.OUTPUT_TYPE == "generate_until":
        replies = [reply for row in rows for reply in row["filtered_resps"]]
        lengths = [len(model.tok_encode(reply, add_special_tokens=False)) for reply in replies]
        unfinished = sum(length >= settings["max_gen_toks"] for length in lengths)
    return {
        "metrics": metrics,
        "examples": figures["sample_len"],
        "samples_each": task.config.repeats,
        "shots": task.config.num_fewshot or 0,
        "generation": settings,
        "chat": task.config.metadata["chat"],
        "prompt_tokens": {"min": min(tokens), "median": median(tokens), "max": max(tokens)},
        "unfinished_replies": unfinished,
        "task_hash": task_hash(),
        **({"note": task.note} if task.note else {}),
    }


def task_hash() -> str:
    """Return a hash of all files of this repository that determine the tasks' prompts, replies and scores."""
    settings = sorted(suites.TASKS.glob("*.yaml"))  # all of them, because tasks include others
    modules = [*(Path(__file__).with_name(f"{module}.py") for module in _DECIDING), Path(thoughts.__file__)]
    return hash_of(settings + modules)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide on figures."""
    return {"python": platform.python_version(), **{name: version(name) for name in VERSIONS}}


def write(results: dict, samples: dict[str, list[dict]], output: Path) -> None:
    """Write results.json, report.md and the samples of each task, and print the report."""
    (output / "results.json").unlink(missing_ok=True)  # figures of earlier samples do not stand next to new ones
    for name, rows in samples.items():
        write_jsonl(output / f"samples_{name}.jsonl", kept_samples(rows))
    print(report.write(results, output))
    write_json(output / "results.json", results)


def kept_samples(rows: list[dict]) -> list[dict]:
    """Return one row for each document of lm-eval's samples: its hash, target, replies and scores."""
    kept = []
    for row in sorted(rows, key=lambda row: row["doc_id"]):
        kept.append({key: row[key] for key in ("doc_id", "doc_hash", "prompt_hash", "target", *row["metrics"])})
        if isinstance(row["filtered_resps"][0], str):
            kept[-1]["replies"] = row["filtered_resps"]
    return kept


if __name__ == "__main__":
    run_cli(lambda: evaluate(OPTIONS))
