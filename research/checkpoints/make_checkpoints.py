"""Make the checkpoints of model_cards/ and compare each with its record there, or record one that has none.

Every finished step is kept in outputs/checkpoints and not repeated: the command can be stopped and started again. All
runs on one CPU thread, because the number of threads changes the last bits of a sum. Weights agree bit for bit, or, on
a processor that rounds otherwise, the losses that were measured agree to within TOLERANCE.

The fine-tuned SmolLM2 takes hours: the study warm_start makes it (seed 1), and no recipe here.

examples:
  python -m research.checkpoints.make_checkpoints
  python -m research.checkpoints.make_checkpoints tiny-iha
"""

import argparse
import importlib
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from iha_io.command_io import (
    ROOT,
    UserError,
    file_sha256,
    new_directory,
    path_from_root,
    read_json,
    run_cli,
    whole_file,
    write_json,
)


INDEX = ROOT / "model_cards"
OUTPUT = Path("outputs/checkpoints")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="checkpoints to make (default: all)")
    parser.add_argument(
        "--output",
        type=path_from_root,
        default=OUTPUT,
        help=f"where they are made (default: {OUTPUT} of the checkout)",
    )
    parser.add_argument(
        "--index", type=path_from_root, default=INDEX, help="where the records are (default: model_cards)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from typing_extensions import TypedDict

from iha_io.checkpoint_io import load_config, smollm2_gguf
from model_cards.render import markdown_table, read_results, source_name, update
from modeling_iha import IHAConfig
from research.benchmarks.harness import processor


# Nats a token, of each loss in results.json.
TOLERANCE = 0.05
LIBRARIES = ("torch", "transformers", "trl", "safetensors", "tokenizers", "gguf", "lm_eval", "reasoning-gym")
# Ordinary attention, the paper's, and a kind that changes the scores and caches more.
TINY = ("mha", "iha", "dcmha")
CURVES = "![Curves of the run](curves.png)"


@dataclass
class Made:
    """Hold what a recipe leaves."""

    checkpoint: Path | None = None
    results: dict | None = None  # of its evaluation, as `python -m evaluation.run` writes them
    run: Path | None = None  # output directory of its training
    checks: dict = field(default_factory=dict)  # further figures for the record

    def step(self, result: Path, *command: str | Path) -> None:
        """Run a command of this repository unless its `result` is there already.

        It runs in this process, because the imports take longer than a tiny model's training.
        """
        if result.exists():
            print(f"{result} is there: done before", flush=True)
            return
        module, *arguments = map(str, command)
        print(f"$ python -m {shlex.join([module, *arguments])}", flush=True)
        before, sys.argv = sys.argv, [module, *arguments]
        try:
            importlib.import_module(module).main()
        finally:
            sys.argv = before

    def evaluate(self, directory: Path, length: int, *tasks: str) -> None:
        """Measure the loss on another text by position, and further `tasks` of RULER."""
        names = ("--suite", "ruler", "--tasks", *tasks, "perplexity_by_position", "--lengths", str(length))
        how = ("--limit", "8", "--data", "evaluation/smoke_data", "--output", directory)
        self.step(directory / "results.json", "evaluation.run", self.checkpoint, *names, *how)
        self.results = read_results(directory)


# Recipes


def convert(pseudo_heads: int, output: Path, name: str) -> Made:
    """Convert SmolLM2-135M-Instruct to IHA with P pseudo-heads, verify it against its source and evaluate it."""
    made, source, verified = Made(output / name / "checkpoint"), smollm2_gguf(), output / name / "verify.json"
    command = ("conversion_scripts.convert_llama_to_iha", source, made.checkpoint)
    made.step(made.checkpoint, *command, "--num-pseudo-heads", str(pseudo_heads))
    made.step(verified, "conversion_scripts.verify_conversion", source, made.checkpoint, "--json", verified)
    made.checks = {"verified": read_json(verified)}
    made.evaluate(output / name / "evaluation", 512, "niah_single_1", "niah_multikey_2")
    return made


def train_tiny(kind: str, output: Path, name: str) -> Made:
    """Train a tiny model of one mechanism from scratch on the bytes of a story."""
    untrained, run = output / name / "untrained", output / name / "run"
    made = Made(run / "final", run=run)
    made.step(untrained, "research.checkpoints.untrained", kind, untrained)
    what = ("--model_name_or_path", untrained, "--dataset_name", story(), "--output_dir", run)
    made.step(made.checkpoint, "sft.train", "--config", "model_cards/tiny.yaml", *what)
    made.evaluate(output / name / "evaluation", 256)
    return made


def story() -> Path:
    """Return the path of reasoning-gym's copy of In the Year 2889, a short story by Jules Verne."""
    return Path(find_spec("reasoning_gym").origin).parent / "data" / "in_the_year_2889.txt"


# The index


def weights_sha256(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of weights."""
    return {file.name: file_sha256(file) for file in sorted(checkpoint.glob("*.safetensors"))}


class Record(TypedDict):
    weights_sha256: dict[str, str]
    config: dict


def read_record(folder: Path) -> tuple[dict, dict]:
    """Return what record.json and results.json of a `folder` of the index hold, or raise `UserError`."""
    return read_json(folder / "record.json", Record), read_results(folder)


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
    record, results = read_record(folder)
    if weights_sha256(made.checkpoint) == record["weights_sha256"]:
        return "the recorded weights, bit for bit"
    found, recorded = losses(made.results), losses(results)
    differences = [abs(found.get(key, math.inf) - loss) for key, loss in recorded.items()]
    apart = (
        torch.tensor(differences or [math.inf], dtype=torch.float64).max().item()
    )  # Python's `max` may pass over NaN
    if apart <= TOLERANCE:
        return f"other bits than recorded; the losses differ by up to {apart:.4f} nats, within {TOLERANCE}"
    raise UserError(
        f"{name} has other weights than recorded, and losses that differ by up to {apart:.4f} nats: expected at most "
        f"{TOLERANCE}. Compare machine and versions with those of {folder / 'record.json'}; remove that folder to "
        "record it anew."
    )


def training(run: Path) -> dict:
    """Return the record of a run, with no path of this machine, and its losses."""
    made_of = read_json(run / "run.json")
    for section in ("data", "base_model"):
        made_of[section]["name"] = source_name(made_of[section]["name"])
    return {"losses": read_json(run / "loss.json"), **made_of}


def record(name: str, made: Made, index: Path) -> None:
    """Write the folder of a checkpoint: card, results and record."""
    with new_directory(index / name) as folder:
        card = (made.checkpoint / "README.md").read_text(encoding="utf-8")
        card = card.replace(CURVES, "The losses are in [record.json](record.json).")
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_json(folder / "results.json", made.results)
        found = {
            "weights_sha256": weights_sha256(made.checkpoint),
            "config": IHAConfig.to_diff_dict(load_config(made.checkpoint)),
            "machine": processor(),
            "versions": {library: version(library) for library in LIBRARIES},
        }
        write_json(
            folder / "record.json", found | ({"training": training(made.run)} if made.run else {}) | made.checks
        )


def index_table(index: Path) -> str:
    """Return the table of the index, with a row for each folder."""
    rows = []
    for path in sorted(index.glob("*/record.json")):
        found, _ = read_record(path.parent)
        config = IHAConfig(**found["config"])
        kinds = ", ".join(dict.fromkeys(config.attention_kinds))
        weights = ", ".join(sha[:12] for sha in found["weights_sha256"].values())
        heads = str(config.num_pseudo_heads) if "iha" in config.attention_kinds else "–"
        name = f"[{path.parent.name}]({path.parent.name}/README.md)"
        rows.append([name, kinds, heads, f"`{weights}`"])
    return markdown_table(["checkpoint", "mechanism", "P", "SHA-256 of the weights"], rows)


def write_index(index: Path) -> None:
    """Renew the table in the index's README.md, between its heading and the next one."""
    path = index / "README.md"
    before, heading, rest = path.read_text(encoding="utf-8").partition("## The checkpoints\n")
    _, following, after = rest.partition("\n## ")
    with whole_file(path) as temporary:
        temporary.write_text(f"{before}{heading}\n{index_table(index)}{following}{after}", encoding="utf-8")


def recipes() -> dict[str, partial]:
    """Return the recipe of each checkpoint, from the cheapest to the dearest."""
    tiny = {f"tiny-{kind}": partial(train_tiny, kind) for kind in TINY}
    converted = {f"smollm2-135m-iha-p{heads}": partial(convert, heads) for heads in (2, 4)}
    return {**tiny, **converted}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    known = recipes()
    for name in args.names:
        if name not in known:
            raise UserError(f"{name}: no checkpoint of this repository; expected one of {', '.join(known)}.")
    index_table(args.index)  # a damaged record shows before the work
    os.chdir(ROOT)
    torch.set_num_threads(1)
    names = args.names or list(known)
    for number, name in enumerate(names, 1):
        print(f"\n== {number} of {len(names)}: {name}", flush=True)
        made = known[name](args.output, name)
        update(made.checkpoint, name, made.results)
        if (folder := args.index / name).is_dir():
            print(f"{name}: {compare(name, made, folder)}", flush=True)
        else:
            record(name, made, args.index)
            print(f"{name}: recorded in {folder}", flush=True)
    # Last: a changed file of the repository would stand in the later records.
    write_index(args.index)


if __name__ == "__main__":
    run_cli(main)
