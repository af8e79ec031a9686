"""Run recipes for a GPU at their length, by their own commands, each next to a run that leaves its base plain.

Bases have random weights: `llama` has the shape of Llama 3.2 1B, and `qwen` eight layers of that of Qwen2.5-7B. The
text is the source of Python's standard library, a token to each byte. `sft.train` trains three steps of one batch
each. A new process, which does not import this package, then loads `final` in bfloat16, reads a prompt as long as the
rows, and generates.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from iha.errors import ROOT, UserError
from iha.files import new_directory, read_json, write_jsonl
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
        **{"model_type": "qwen2", "vocab_size": 152_064, "num_hidden_layers": 8, "tie_word_embeddings": False},
        **{"hidden_size": 3584, "intermediate_size": 18_944, "max_position_embeddings": 32_768},
        **{"num_attention_heads": 28, "num_key_value_heads": 4},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    },
}
DRY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "vocab_size": 512}
DRY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TEXTS = 60  # about 1.5 MB, more than four steps read
SHORTER = 64  # times, of the rows and the prompts of a dry run
STEPS = 3  # the first one is not timed
NEW_TOKENS = 64
FORMS = {
    "plain": {"num_pseudo_heads": "null"},
    "interleaved, P = 2, windows": {
        "num_pseudo_heads": 2,
        "interleaved_layers": "paper",
        "interleaved_window": "paper",
    },
}
GENERATE = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM

directory, device, prompt, more = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=torch.bfloat16).to(device).eval()
ids = torch.arange(prompt, device=device)[None] % 250 + 3

def seconds(tokens):
    start = time.perf_counter()
    keys = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    assert model.generate(ids, attention_mask=torch.ones_like(ids), **keys).shape == (1, prompt + tokens)
    return time.perf_counter() - start

seconds(1 + more)  # warms up
prefill, whole = (seconds(tokens) for tokens in (1, 1 + more))
print(json.dumps({"prefill seconds": prefill, "new tokens per second": more / (whole - prefill)}))
"""


@dataclass(frozen=True)
class Run:
    """Name a run: its recipe, its base, its form, and the tokens of a row."""

    recipe: str
    base: str
    form: str
    tokens: int

    @property
    def case(self) -> str:
        return f"{self.recipe}, {self.base}, rows of {self.tokens:,} tokens"


RUNS = [
    Run(recipe, base, form, tokens)
    for recipe, base, tokens in (
        ("long_context_64k/continued", "llama", 65_536),
        ("long_context_64k/continued", "qwen", 65_536),
        ("lora/sft", "qwen", 16_384),
    )
    for form in FORMS
]


def write_base(name: str, directory: Path, dry: bool) -> None:
    """Write a base with random weights in bfloat16, and a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    fields = {**BASES[name], "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, **(DRY if dry else {})}
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


def training(run: Run, work: Path, dry: bool) -> list[str]:
    """Return the command line of a run."""
    rows = "texts.jsonl" if run.recipe.endswith("continued") else "chats.jsonl"
    keys = {"model_name_or_path": work / run.base, "dataset_name": work / rows, "output_dir": work / "run"}
    keys |= {"max_length": run.tokens // SHORTER if dry else run.tokens, "max_steps": STEPS, "logging_steps": 1}
    keys |= {"gradient_accumulation_steps": 1, "warmup_steps": 0, "save_strategy": "no"}
    keys |= {"eval_strategy": "no", "eval_size": 0, **FORMS[run.form]}
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
        lines = ended.stderr.strip().splitlines() or ended.stdout.strip().splitlines()
        raise UserError(lines[-1][:300] if lines else f"exit code {ended.returncode}")
    return ended.stdout


def measure(run: Run, work: Path, dry: bool, until: float) -> dict[str, float]:
    """Train, load and generate. Return the figures of a run. Raise `UserError`."""
    if not (work / "chats.jsonl").exists():
        write_rows(work)
    if not (work / run.base).exists():
        write_base(run.base, work / run.base, dry)
    shutil.rmtree(work / "run", ignore_errors=True)
    output_of(training(run, work, dry), ROOT, until)
    curves = read_json(work / "run" / "loss.json")
    prompt = run.tokens // SHORTER if dry else run.tokens
    device = "cpu" if dry else "cuda"
    words = [sys.executable, "-c", GENERATE, str(work / "run" / "final"), device, str(prompt), str(NEW_TOKENS)]
    generated = json.loads(output_of(words, work, until).splitlines()[-1])
    shutil.rmtree(work / "run")
    return {
        "tokens per second": median(rate for _, rate in curves["tokens_per_second"][1:]),
        "GB": curves["peak_memory_gb"][-1][1],
        **generated,
    }
