"""Convert SmolLM2-135M-Instruct to Interleaved Head Attention and follow it to the end, with a user's commands.

Verify that no logit changed, fine-tune, save, reload in a process that has never seen this package, and generate.
Every finished step leaves its result in outputs/demo and is not repeated: the demo can be stopped and started again.
"""

import argparse
import json
import os
import platform
import shutil
import time
from pathlib import Path

from common.command_io import ROOT, UserError, run_cli, run_module


OUTPUT = Path("outputs/demo")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, epilog="example: python demo.py")
    parser.add_argument("--restart", action="store_true", help=f"remove {OUTPUT} first")
    return parser.parse_args()


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from common.checkpoint_io import load_in_clean_process, smollm2_gguf


# Sums of three digits with the running sums as reasoning: SmolLM2 answers few of them before the fine-tuning.
DATA = ["--generator", "chain_sum", "--options", "min_terms=3", "max_terms=3", "min_digits=1", "max_digits=1"]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def step(title: str, result: Path, *command: str | Path) -> None:
    print(f"\n== {title}", flush=True)
    run_module(result, *command)


def score(title: str, model: Path, result: Path) -> float:
    """Return the accuracy of `model` on the held-out questions, by the verifier of reasoning-gym."""
    step(title, result, "sft.score_reasoning", model, OUTPUT / "test.jsonl", "--json", result)
    return json.loads(result.read_text())["accuracy"]


def main() -> None:
    args = parse_arguments()
    os.chdir(ROOT)
    if args.restart:
        shutil.rmtree(OUTPUT, ignore_errors=True)
    start = time.monotonic()
    source, converted, final = smollm2_gguf(), OUTPUT / "converted", OUTPUT / "sft/final"
    train, test, checks = OUTPUT / "train.jsonl", OUTPUT / "test.jsonl", OUTPUT / "verify.json"

    convert = ("conversion_scripts.convert_llama_to_iha", source, converted, "--num-pseudo-heads", "2")
    step("Convert to IHA with P = 2", converted, *convert)
    verify = ("conversion_scripts.verify_conversion", source, converted, "--json", checks)
    step("Verify against the source", checks, *verify)
    figures, control = (json.loads(checks.read_text())[name] for name in ("converted", "control"))
    if not figures["passed"] or control["passed"]:
        raise UserError(f"The conversion was not verified, see {checks}. Remove it to verify again.")
    make_data = "sft.make_reasoning_data"
    step("Make training questions", train, make_data, train, "--rows", "256", *DATA)
    step("Make held-out questions", test, make_data, test, "--rows", "48", "--seed", "1", "--exclude", train, *DATA)
    before = score("Answer before fine-tuning", converted, OUTPUT / "before.json")
    step("Fine-tune", final, "sft.train", "--config", "sft/recipes/demo/sft.yaml")
    after = score("Answer after fine-tuning", final, OUTPUT / "after.json")

    print("\n== Reload in a process that cannot import this package, and generate", flush=True)
    with test.open() as rows:
        row = json.loads(next(rows))
    sum_ = [
        {"role": "system", "content": row["system"]},
        {"role": "user", "content": row["conversations"][0]["value"]},
    ]
    unchanged, tuned = load_in_clean_process(converted, CAPITAL, 32), load_in_clean_process(final, sum_, 96)
    same = tuned["text"] == json.loads((OUTPUT / "after.json").read_text())["replies"][0]

    losses = json.loads((OUTPUT / "sft/loss.json").read_text())["eval"]
    print(f"""
Report (Python {platform.python_version()}, {os.cpu_count()} cores, {time.monotonic() - start:.0f} s in this call)
  conversion    max |dlogit| {figures["max_logit_difference"]:.1e}, KL {figures["mean_kl"]:.1e} nats per token, \
greedy {figures["greedy_agreement"]}/{figures["greedy_tokens"]}; \
broken control {control["max_logit_difference"]:.1e}
  held-out loss {losses[0][1]:.3f} -> {losses[-1][1]:.3f} nats per token in {losses[-1][0]} steps
  accuracy      {before:.0%} -> {after:.0%} of the held-out questions
  converted     {CAPITAL[-1]["content"]} -> {unchanged["text"]}
  fine-tuned    {sum_[-1]["content"]} -> {" ".join(tuned["text"].split())}
                ({"the same" if same else "NOT the same"} reply as before the reload)
  checkpoint    {final} (loaded as {tuned["module"].partition(".")[0]}, not from this package)
  loss curve    {OUTPUT / "sft/loss.png"}""")


if __name__ == "__main__":
    run_cli(main)
