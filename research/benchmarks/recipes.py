"""Run the recipes for a GPU at their length, by their own commands, each next to a run that leaves its base plain.

Bases have random weights: `llama` has the shape of Llama 3.2 1B, and `qwen` some layers of that of Qwen2.5-7B. The
text is the source of Python's standard library, a token to each byte. `sft.train` trains a few steps of one batch
each. A new process, which cannot import this package, then loads `final` in bfloat16, reads a prompt as long as the
rows and generates with a dynamic cache, in the first runs with a static one too. After that the weights are removed.

recipes.json has a row for each run. A run that failed stays in it, with the last line of its error, until `--retry`.
The same command goes on after a stop. `--dry` trains small models on short rows, on a CPU.

example: python -m research.benchmarks.recipes --out research/benchmarks/results/gpu/nvidia-h200 --seconds 540
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from iha.errors import ROOT, UserError, run_cli
from iha.files import current_commit, expanded, new_directory, read_json, sole_writer, write_json, write_jsonl
from research.benchmarks.harness import processor, versions
from research.benchmarks.options import OUTPUTS
from sft.make_text import modules
from sft.make_tokenizer import byte_tokenizer


BASES = {
    "llama": {
        **{"model_type": "llama", "vocab_size": 128_256, "num_hidden_layers": 16, "tie_word_embeddings": True},
        **{"hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131_072},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    },
    "qwen": {
        **{"model_type": "qwen2", "vocab_size": 152_064, "num_hidden_layers": 28, "tie_word_embeddings": False},
        **{"hidden_size": 3584, "intermediate_size": 18_944, "max_position_embeddings": 32_768},
        **{"num_attention_heads": 28, "num_key_value_heads": 4},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    },
}
DRY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "vocab_size": 512}
DRY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TEXTS = 60  # about 1.5 MB, more than four steps read
SHORTER = 64  # times, of the rows and the prompts of --dry
FORMS = {
    "plain": {"num_pseudo_heads": "null"},
    "schedule": {"num_pseudo_heads": 2, "interleaved_layers": "paper", "interleaved_window": "paper"},
    "global": {"num_pseudo_heads": 2},
    "continued": {},  # of a model that is interleaved
}


class Run(NamedTuple):
    """Name a run: its recipe, what it starts from, its form, and the keys that it changes."""

    recipe: str
    start: str  # one of BASES, or the name of a run before
    form: str
    tokens: int  # of a row
    keys: dict = {}
    caches: tuple[str, ...] = ("dynamic",)

    @property
    def name(self) -> str:
        start = [self.start] if self.start in BASES else []
        return "-".join([self.recipe.replace("/", "-"), *start, self.form, *self.keys])


CACHES = ("dynamic", "static")  # Transformers compiles the model for the second
PADDED = {"per_device_train_batch_size": 4}  # rows of several lengths in a batch
# The most important ones first.
RUNS = [
    *(Run("long_context_64k/continued", "llama", form, 65_536, {}, CACHES) for form in ("plain", "schedule")),
    Run("long_context_64k/sft", "long_context_64k-continued-llama-schedule", "continued", 65_536),
    *(Run("long_context_64k/continued", "qwen", form, 65_536) for form in ("plain", "schedule")),
    *(Run("openthoughts/sft", "llama", form, 16_384, {"packing": True}) for form in ("plain", "global")),
    *(Run("lora/sft", "qwen", form, 16_384) for form in ("plain", "global")),
    # Rows of several lengths, padded to one batch
    *(
        Run("openthoughts/sft", "llama", form, 16_384, {"per_device_train_batch_size": 4})
        for form in ("plain", "global")
    ),
]
GENERATE = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM

directory, device, prompt, *caches = sys.argv[1:]
prompt, more = int(prompt), 64
model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.bfloat16).to(device).eval()
ids = torch.arange(prompt, device=device)[None] % 250 + 3

def seconds(tokens, cache):
    start = time.perf_counter()
    keys = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "cache_implementation": cache}
    assert model.generate(ids, attention_mask=torch.ones_like(ids), **keys).shape == (1, prompt + tokens)
    return time.perf_counter() - start

figures = {}
for cache in caches:
    seconds(1 + more, cache)  # warms up
    prefill, whole = (seconds(tokens, cache) for tokens in (1, 1 + more))
    figures[cache] = {"prefill_seconds": prefill, "tokens_per_second": more / (whole - prefill)}
print(json.dumps(figures))
"""


def write_base(name: str, layers: int, directory: Path, dry: bool) -> None:
    """Write a base with random weights in bfloat16, and a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    fields = {**BASES[name], "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    if dry:
        fields |= DRY
    elif name == "qwen":
        fields["num_hidden_layers"] = layers
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    with torch.device("cpu" if dry else "cuda"), new_directory(directory) as new:
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(new)
        tokenizer.save_pretrained(new)


def write_rows(directory: Path) -> None:
    """Write texts as documents, texts.jsonl, and as answers of chats, chats.jsonl."""
    texts = [text for text in modules() if len(text) > 1000][:TEXTS]
    turns = [[{"from": "user", "value": "Write a module."}, {"from": "assistant", "value": text}] for text in texts]
    write_jsonl(directory / "texts.jsonl", [{"text": text} for text in texts])
    write_jsonl(directory / "chats.jsonl", [{"system": "You write Python.", "conversations": each} for each in turns])


def training(run: Run, work: Path, steps: int, dry: bool) -> list[str]:
    """Return the command line of a run."""
    rows = "texts.jsonl" if run.recipe.endswith("continued") else "chats.jsonl"
    start = work / run.start if run.start in BASES else work / run.start / "final"
    keys = {"model_name_or_path": start, "dataset_name": work / rows, "output_dir": work / run.name}
    keys |= {"max_length": run.tokens // SHORTER if dry else run.tokens, "max_steps": steps, "logging_steps": 1}
    keys |= {"gradient_accumulation_steps": 1, "warmup_steps": 0, "save_strategy": "no"}
    keys |= {"eval_strategy": "no", "eval_size": 0, **FORMS[run.form], **run.keys}
    words = [word for name, value in keys.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "sft.train", "--config", f"sft/recipes/{run.recipe}.yaml", *words]


def output_of(command: Sequence[str], directory: Path, until: float) -> str:
    """Run a command in a directory and return what it prints. Raise `UserError` if it fails or is not done in time."""
    left = max(1, until - time.monotonic())
    try:
        ended = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"not done after {left:.0f} s") from error
    if ended.returncode:
        raise UserError(ended.stderr.strip().splitlines()[-1][:300] if ended.stderr.strip() else str(ended.returncode))
    return ended.stdout


def measure(run: Run, work: Path, layers: int, steps: int, dry: bool, until: float) -> dict:
    """Train, load and generate. Return the figures of a run. Raise `UserError`."""
    if run.start in BASES and not (work / run.start).exists():
        write_base(run.start, layers, work / run.start, dry)
    shutil.rmtree(work / run.name, ignore_errors=True)
    begin = time.monotonic()
    output_of(training(run, work, steps, dry), ROOT, until)
    seconds = time.monotonic() - begin
    curves = read_json(work / run.name / "loss.json")
    device, prompt = ("cpu", run.tokens // SHORTER) if dry else ("cuda", run.tokens)
    words = [sys.executable, "-c", GENERATE, str(work / run.name / "final"), device, str(prompt), *run.caches]
    generated = json.loads(output_of(words, work, until).splitlines()[-1])
    return {
        "tokens_per_second": median(rate for _, rate in curves["tokens_per_second"][1:]),  # the first step warms up
        "peak_memory_gb": curves["peak_memory_gb"][-1][1],
        "losses": [loss for _, loss in curves["train"]],
        "seconds of the command": seconds,
        "generate": generated,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the runs that have no figures yet. Raise `UserError`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", metavar="WORD", default=[""], help="runs whose names hold a word (all)")
    parser.add_argument("--layers", type=int, default=8, help="layers of qwen (8)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a run, at least 2 (3)")
    parser.add_argument("--seconds", type=float, default=86_400, help="stop after so many (a day)")
    parser.add_argument("--retry", action="store_true", help="try again what failed")
    parser.add_argument("--dry", action="store_true", help="small models and short rows, on a CPU")
    parser.add_argument("--work", type=expanded, default=OUTPUTS / "recipes", help="directory of rows and weights")
    parser.add_argument("--out", type=expanded, default=OUTPUTS, help="directory of the results (outputs/benchmarks)")
    args = parser.parse_args(argv)
    until = time.monotonic() + args.seconds
    if not args.dry and not torch.cuda.is_available():
        raise UserError("PyTorch sees no CUDA device here: --dry runs small models on a CPU.")
    if args.steps < 2:
        raise UserError(f"--steps {args.steps}: expected at least 2, as the first one is not timed.")
    path = args.out / "recipes.json"
    device = processor() if args.dry else torch.cuda.get_device_name()
    setting = {"dry": args.dry, "layers": args.layers, "steps": args.steps, "device": device, **versions()}
    work = args.work / ("dry" if args.dry else f"{args.layers}-layers")  # no run takes the bases of another size
    with sole_writer(args.work):
        table = read_json(path) if path.exists() else {**setting, "rows": {}}
        for name, value in setting.items():
            if table[name] != value:
                raise UserError(f"{path} was measured with {name} {table[name]}, not {value}: give another --out.")
        if not (work / "chats.jsonl").exists():
            write_rows(work)
        for run in RUNS:
            done = table["rows"].get(run.name, {})
            chosen = any(word in run.name for word in args.runs) and (not done or args.retry and "failed" in done)
            if not chosen or time.monotonic() > until:
                continue
            print(f"{run.name}, rows of {run.tokens:,} tokens", flush=True)
            try:
                figures = measure(run, work, args.layers, args.steps, args.dry, until)
            except UserError as error:
                figures = {"failed": str(error)}
            table["rows"][run.name] = {"tokens": run.tokens, "commit": current_commit(), **figures}
            write_json(path, table)
            print(f"  {figures}", flush=True)
            if all(run.name != other.start for other in RUNS):
                shutil.rmtree(work / run.name, ignore_errors=True)


if __name__ == "__main__":
    run_cli(main)
