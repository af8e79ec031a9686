"""Compare Muon with AdamW: each at the best of several learning rates, for two forms of attention, over three seeds.

Muon trains the matrices, and AdamW the rest: embeddings, the head, norms, and what mixes heads. The text is read as
bytes, and its last tenth is held out. Each run leaves its loss in OUT, so the same command goes on after a stop.

Predicted before any run: Muon ends 0.02 to 0.08 nats per byte below AdamW in both forms. docs/FROM_SCRATCH.md has what
was measured.

example: OMP_NUM_THREADS=1 nice -n 15 python examples/muon.py train.txt outputs/muon
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a launcher by path does not find the checkout

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from iha.cards import markdown_table
from iha.errors import run_cli
from iha.files import read_json, write_json
from modeling_iha import IHAConfig, IHAForCausalLM, mixing_parameters


PRESETS = {"small-1m-paired-heads": {}, "small-1m-iha": {"num_pseudo_heads": 4}}
# Rates in factors of two around the best of each optimizer at this size.
RATES = {"adamw": (5e-4, 1e-3, 2e-3, 4e-3), "muon": (2e-3, 4e-3, 8e-3, 16e-3)}
SEEDS = (0, 1, 2)
SEED_OF_RATES = 100  # on which the rates are compared, and nothing else
TOKENS, ROWS = 256, 8


class Together(torch.optim.Optimizer):
    """Step several optimizers as one, which Trainer takes: schedules, checkpoints and clipping see all groups."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Let the parts read the rates that a schedule writes."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def adamw(model: PreTrainedModel, rate: float) -> torch.optim.Optimizer:
    """Return AdamW for all weights, without decay for those that mix heads."""
    mixing = {id(weight) for weight in mixing_parameters(model)}
    others = [weight for weight in model.parameters() if id(weight) not in mixing]
    groups = [{"params": others}, {"params": list(mixing_parameters(model)), "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate)


def muon(model: PreTrainedModel, rate: float) -> torch.optim.Optimizer:
    """Return Muon for the matrices, with the size of AdamW's steps, and AdamW for the rest."""
    mixing = {id(weight) for weight in mixing_parameters(model)}
    vocabulary = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = []
    others = []
    for weight in model.parameters():
        is_matrix = weight.ndim == 2 and id(weight) not in mixing | vocabulary
        (matrices if is_matrix else others).append(weight)
    of_matrices = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return Together(of_matrices, torch.optim.AdamW(others, lr=rate, weight_decay=0.0))


OPTIMIZERS = {"adamw": adamw, "muon": muon}


def train(preset: str, optimizer: str, rate: float, seed: int, text: Path, out: Path, steps: int) -> float:
    """Return the held-out loss of a run in nats per byte, from its file in `out` if it has run before."""
    file = out / f"{preset}-{optimizer}-{rate:g}-{seed}-{steps}.json"
    if not file.exists():
        torch.manual_seed(seed)
        model = IHAForCausalLM(IHAConfig.from_preset(preset, **PRESETS[preset]))
        tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
        rows = [{"input_ids": row, "labels": row} for row in tokens.split(TOKENS) if len(row) == TOKENS]
        held = max(1, len(rows) // 10)
        options = TrainingArguments(
            str(out),
            max_steps=steps,
            per_device_train_batch_size=ROWS,
            warmup_steps=max(1, steps // 20),
            lr_scheduler_type="cosine",
            logging_steps=max(1, steps // 5),
            save_strategy="no",
            seed=seed,
            report_to="none",
        )
        optimizers = (OPTIMIZERS[optimizer](model, rate), None)
        trainer = Trainer(model, options, train_dataset=rows[:-held], optimizers=optimizers)
        trainer.train()
        write_json(file, {"loss": trainer.evaluate(rows[-held:][: 16 * ROWS])["eval_loss"]})
    loss = read_json(file)["loss"]
    print(f"{file.stem}: {loss:.4f}", flush=True)
    return loss


def compare(text: Path, out: Path, steps: int) -> str:
    """Find the best rate of each form and optimizer with a separate seed, and return a table of all others."""
    out.mkdir(parents=True, exist_ok=True)
    table = []
    for preset in PRESETS:
        losses = {}
        for optimizer in OPTIMIZERS:
            tried = {
                rate: train(preset, optimizer, rate, SEED_OF_RATES, text, out, steps) for rate in RATES[optimizer]
            }
            best = min(tried, key=tried.__getitem__)
            losses[optimizer] = [train(preset, optimizer, best, seed, text, out, steps) for seed in SEEDS]
            edge = ", at the edge of the rates" if best in (min(tried), max(tried)) else ""
            table.append([preset, optimizer, f"{best:g}{edge}", with_error(losses[optimizer])])
        differences = [one - other for one, other in zip(losses["muon"], losses["adamw"])]
        table.append([preset, "muon - adamw", "", with_error(differences)])
    return markdown_table(["form", "optimizer", "rate", f"nats per byte, {len(SEEDS)} seeds"], table)


def with_error(values: list[float]) -> str:
    """Return the mean over seeds with its standard error."""
    return f"{mean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("out", type=Path, help="directory of the losses")
    parser.add_argument("--steps", type=int, default=300, help=f"of {ROWS * TOKENS} bytes (default: 300)")
    args = parser.parse_args()
    print(compare(args.text, args.out, args.steps))


if __name__ == "__main__":
    run_cli(main)
