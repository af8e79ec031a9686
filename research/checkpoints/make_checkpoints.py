"""Make the checkpoints of model_cards/ and compare each with its record there, or record one that has none.

Every finished step is kept in outputs/checkpoints and not repeated: the command can be stopped and started again. All
runs on one CPU thread, because the number of threads changes the last bits of a sum. Weights agree bit for bit, or, on
a processor that rounds otherwise, the losses that were measured agree to within TOLERANCE.

examples:
  python -m research.checkpoints.make_checkpoints
  python -m research.checkpoints.make_checkpoints tiny-iha
"""

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from typing_extensions import TypedDict

from iha.cards import read_results, source_name, update
from iha.checkpoints import load_config, smollm2_gguf
from iha.errors import ROOT, UserError, run_cli
from iha.files import file_sha256, new_directory, read_json, write_json
from iha.processes import run_command
from iha.sources import find_source
from modeling_iha import IHAConfig
from research.benchmarks.harness import processor


INDEX = ROOT / "model_cards"
OUTPUT = Path("outputs/checkpoints")
# Nats a token, of each loss in results.json.
TOLERANCE = 0.05
LIBRARIES = ("torch", "transformers", "trl", "safetensors", "tokenizers", "gguf", "lm_eval", "reasoning-gym")
CURVES = "![Curves of the run](curves.png)"


@dataclass
class Made:
    """Hold what a recipe leaves."""

    checkpoint: Path
    results: dict  # of its evaluation, as `python -m evaluation.run` writes them
    record: dict = field(default_factory=dict)  # what its record holds besides weights, config and versions


# Recipes


def evaluated(checkpoint: Path, directory: Path, length: int) -> dict:
    """Measure the loss on another text by position, and return the results."""
    names = ("--suite", "ruler", "--tasks", "perplexity_by_position", "--lengths", length)
    how = ("--limit", 8, "--data", "evaluation/smoke_data", "--output", directory)
    run_command(directory / "results.json", "evaluation.run", checkpoint, *names, *how)
    return read_results(directory)


def convert(output: Path) -> Made:
    """Convert SmolLM2-135M-Instruct to IHA with two pseudo-heads, verify it against its source and evaluate it."""
    source = smollm2_gguf()
    checkpoint = output / "checkpoint"
    verified = output / "verify.json"
    command = ("conversion_scripts.convert_llama_to_iha", source, checkpoint, "--num-pseudo-heads", 2)
    if not checkpoint.exists():
        verified.unlink(missing_ok=True)  # the figures of a former checkpoint
    run_command(checkpoint, *command)
    run_command(verified, "conversion_scripts.verify_conversion", source, checkpoint, "--json", verified)
    results = evaluated(checkpoint, output / "evaluation", 512)
    return Made(checkpoint, results, {"verified": read_json(verified)})


def train_tiny(output: Path) -> Made:
    """Train a tiny model of "iha" layers from scratch on the bytes of a story."""
    run = output / "run"
    # In the Year 2889, a short story by Jules Verne.
    story = Path(find_spec("reasoning_gym").origin).parent / "data" / "in_the_year_2889.txt"
    what = ("--dataset_name", story, "--output_dir", run)
    run_command(run / "final", "sft.train", "--config", "model_cards/tiny.yaml", *what)
    results = evaluated(run / "final", output / "evaluation", 256)
    return Made(run / "final", results, {"training": training(run)})


def training(run: Path) -> dict:
    """Return the record of a run, with no path of this machine, and its losses."""
    made_of = read_json(run / "run.json")
    for section in ("data", "base_model"):
        made_of[section]["name"] = source_name(made_of[section]["name"])
    return {"losses": read_json(run / "loss.json"), **made_of}


# One that is trained, and one that is converted.
RECIPES = {"tiny-iha": train_tiny, "smollm2-135m-iha-p2": convert}


# The records


class Record(TypedDict):
    weights_sha256: dict[str, str]
    config: dict


def weights_sha256(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of weights."""
    return {file.name: file_sha256(file) for file in sorted(checkpoint.glob("*.safetensors"))}


def losses(results: dict) -> dict[tuple[str, str], float]:
    """Return each loss in a results.json, by task and metric."""
    return {
        (name, metric): figure["value"]
        for name, task in results["tasks"].items()
        for metric, figure in task["metrics"].items()
        if "loss" in metric
    }


def compare(name: str, made: Made, folder: Path) -> str:
    """Say how well a checkpoint agrees with its record in `folder`, or raise `UserError` if it does not."""
    if weights_sha256(made.checkpoint) == read_json(folder / "record.json", Record)["weights_sha256"]:
        return "the recorded weights, bit for bit"
    found = losses(made.results)
    recorded = losses(read_results(folder))
    apart = float(np.max([abs(found.get(key, math.inf) - loss) for key, loss in recorded.items()] or [math.inf]))
    if apart <= TOLERANCE:  # false for NaN
        return f"other bits than recorded; the losses differ by up to {apart:.4f} nats, within {TOLERANCE}"
    raise UserError(
        f"{name} has other weights than recorded, and losses that differ by up to {apart:.4f} nats: expected at most "
        f"{TOLERANCE}. Compare machine and versions with those of {folder / 'record.json'}; remove that folder to "
        "record it anew."
    )


def record(made: Made, folder: Path) -> None:
    """Write the folder of a checkpoint: card, results and record."""
    with new_directory(folder) as temporary:
        card = (made.checkpoint / "README.md").read_text(encoding="utf-8")
        card = card.replace(CURVES, "The losses are in [record.json](record.json).")
        (temporary / "README.md").write_text(card, encoding="utf-8")
        write_json(temporary / "results.json", made.results)
        found = {
            "weights_sha256": weights_sha256(made.checkpoint),
            "config": IHAConfig.to_diff_dict(load_config(find_source(made.checkpoint))),
            "machine": processor(),
            "versions": {library: version(library) for library in LIBRARIES},
        }
        write_json(temporary / "record.json", found | made.record)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"checkpoints to make (default: all): {', '.join(RECIPES)}")
    names = parser.parse_args(argv).names or list(RECIPES)
    if unknown := [name for name in names if name not in RECIPES]:
        raise UserError(f"{unknown[0]}: no checkpoint of this repository; expected one of {', '.join(RECIPES)}.")
    os.chdir(ROOT)
    torch.set_num_threads(1)
    for number, name in enumerate(names, 1):
        print(f"\n== {number} of {len(names)}: {name}", flush=True)
        made = RECIPES[name](OUTPUT / name)
        update(made.checkpoint, name, made.results)
        if (folder := INDEX / name).is_dir():
            print(f"{name}: {compare(name, made, folder)}", flush=True)
        else:
            record(made, folder)
            print(f"{name}: recorded in {folder}; add it to {INDEX / 'README.md'}", flush=True)


if __name__ == "__main__":
    run_cli(main)
