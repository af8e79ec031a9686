"""Train language models of every attention kind from scratch, and compare their losses on real text.

DCMHA claims a lower validation loss and perplexity than Llama's attention (its Figure 4 and Table 4), HyperAttention a
lower perplexity at GPT3-small's size (Section 7.2); "Interleaved Head Attention" compares 2.4B models by benchmarks
(Tables 1 and 2) and gives no perplexity. Here every kind is trained on the bytes of one text, with the same number of
parameters (a kind with more of them has a narrower FFN), the same rows in the same order for each seed, and AdamW with
a constant rate after 50 steps of warm-up. The rate being constant, one run gives the loss after equal steps and at
equal FLOPs, those that "mha" spends in all steps (multiply-adds by benchmarks/cost.py; IHA on the virtual sequence).

The default is a tiny size for a CPU, on a text that every Python carries: its language reference (pydoc_data.topics).
`--text` takes another one, `--full` a larger size, for a GPU. The last tenth of the text is held out. Speed is in
tokens for a second of the process's own CPU time, or of the clock on a GPU.

example: python -m experiments.language_models --text state_union.txt --seeds 0 1 2
"""

import argparse
import hashlib
import math
import pydoc_data.topics
from collections.abc import Callable, Sequence
from pathlib import Path

from common.command_io import UserError, one_line, run_cli
from experiments.options import add_text_option, comparison_parser


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = comparison_parser(__doc__, "language_models", 3)
    add_text_option(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.study import (
    begin,
    compare,
    correct_by_holm,
    differences,
    fit,
    interval,
    legend_below,
    plot_bars,
    write,
)
from kinds.model_cost import model as cost_of
from modeling_iha import IHAConfig, IHAForCausalLM


SMALL = {
    "fields": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
    "tokens": 32,
    "batch": 16,
    "steps": 600,
    "rate": 2e-3,
}
FULL = {
    "fields": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8},
    "tokens": 256,
    "batch": 64,
    "steps": 10000,
    "rate": 6e-4,
}
WARM_UP, EVALUATIONS, HELD_OUT_ROWS = 50, 12, 128
# What a row compares with "mha", and where.
COMPARED = {"loss_minus_mha": "equal steps", "loss_minus_mha_at_equal_flops": "equal FLOPs"}


def read_text(path: Path | None) -> torch.Tensor:
    """Return the bytes of a file, or of Python's language reference, as int64. Raise `UserError`."""
    if path is None:
        topics = pydoc_data.topics.topics
        content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"--text {path} cannot be read: {one_line(error)}") from error
    return torch.tensor(list(content), dtype=torch.long)


def text_and_setting(args: argparse.Namespace, size: dict) -> tuple[torch.Tensor, dict]:
    """Return the text of --text, and all that a run depends on besides its config and seed. Raise `UserError`."""
    text = read_text(args.text)
    if len(text) < (shortest := 20 * size["tokens"]):
        raise UserError(
            f"--text {args.text} has {len(text)} bytes: expected at least {shortest}; choose a longer one."
        )
    hashed = hashlib.sha256(text.to(torch.uint8).numpy().tobytes()).hexdigest()
    return text, {**size, "text_sha256": hashed, "device": args.device}


def build(kind: str, size: dict, **fields) -> IHAConfig:
    """Return the config of a kind at a size, with `fields` of its own and as many pseudo-heads as heads."""
    fields = {**size["fields"], **fields}
    heads = {"num_key_value_heads": fields["num_attention_heads"], "num_pseudo_heads": fields["num_attention_heads"]}
    special = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
    every = {"attention_kinds": kind, "max_position_embeddings": size["tokens"]}
    return IHAConfig(**{**special, **every, **heads, **fields})


def as_large_as(target: IHAConfig, kind: str, size: dict) -> IHAConfig:
    """Return the config of a kind at a size, whose FFN is as wide as the parameters of `target` allow."""
    more = cost_of(build(kind, size), 1).parameters - cost_of(target, 1).parameters
    per_channel = 3 * size["fields"]["hidden_size"] * size["fields"]["num_hidden_layers"]
    return build(kind, size, intermediate_size=size["fields"]["intermediate_size"] - round(more / per_channel))


def config_of(kind: str, size: dict) -> IHAConfig:
    """Return the config of a kind with the parameters of "mha"."""
    return as_large_as(build("mha", size), kind, size)


def rows_of(text: torch.Tensor, starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return rows of `tokens` and the one after them, [rows, tokens + 1]."""
    return text[starts[:, None] + torch.arange(tokens + 1, device=text.device)]


def loss_of(model: IHAForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Return the loss in nats per byte."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def warm_up(step: int) -> float:
    """Return the share of the learning rate at a step: all of it after WARM_UP steps."""
    return min(1.0, (step + 1) / WARM_UP)


def train(
    name: str,
    model: IHAForCausalLM,
    seed: int,
    size: dict,
    text: torch.Tensor,
    schedule: Callable[[int], float] = warm_up,
) -> dict:
    """Train a model, where it is, on the rows of a seed; return its held-out losses and its speed."""
    held_out, generator = len(text) // 10, torch.Generator().manual_seed(seed)
    device = model.device.type
    text, tokens, steps = text.to(device), size["tokens"], size["steps"]
    starts = torch.linspace(len(text) - held_out, len(text) - tokens - 1, HELD_OUT_ROWS, device=device).long()
    validation = rows_of(text, starts, tokens)

    def loss() -> torch.Tensor:
        chosen = torch.randint(len(text) - held_out - tokens, (size["batch"],), generator=generator)
        return loss_of(model, rows_of(text, chosen.to(device), tokens))

    def evaluate(step: int) -> list[float]:
        loss = sum(loss_of(model, rows).item() for rows in validation.chunk(8)) / 8
        print(f"{name}, seed {seed}: step {step} of {steps}, held-out loss {loss:.4f}", flush=True)
        return [loss]

    curve, seconds = fit(model, loss, evaluate, size, schedule, EVALUATIONS)
    return {"curve": curve, "tokens_per_second": round(steps * size["batch"] * tokens / seconds)}


def one_run(kind: str, seed: int, size: dict, text: torch.Tensor, device: str) -> dict:
    """Train a new model of a kind."""
    torch.manual_seed(seed)
    return train(kind, IHAForCausalLM(config_of(kind, size)).to(device), seed, size, text)


def loss_at(curve: list, step: float) -> float:
    """Return the held-out loss at a step, on a line between the evaluations around it."""
    return float(np.interp(step, *zip(*curve)))


def summary(kind: str, size: dict, runs: dict[str, list[dict]]) -> dict:
    """Return a row of the table."""
    config, base = config_of(kind, size), config_of("mha", size)
    cost, base_cost = (cost_of(each, size["tokens"], "sdpa") for each in (config, base))
    affordable = size["steps"] * min(1.0, base_cost.training / cost.training)
    losses = [run["curve"][-1][1] for run in runs[kind]]
    affordable_losses = [loss_at(run["curve"], affordable) for run in runs[kind]]
    row = {
        "kind": kind,
        "parameters": cost.parameters,
        "intermediate_size": config.intermediate_size,
        "flops": cost.training / base_cost.training,
        "loss": interval(losses),
        "perplexity": math.exp(interval(losses)["mean"]),
        "loss_at_equal_flops": interval(affordable_losses),
        "tokens_per_second": interval([run["tokens_per_second"] for run in runs[kind]]),
    }
    if "mha" in runs and kind != "mha":
        ends = [run["curve"][-1][1] for run in runs["mha"]]
        row["loss_minus_mha"] = differences(losses, ends)
        row["loss_minus_mha_at_equal_flops"] = differences(affordable_losses, ends)
    return row


def plot(table: dict) -> Figure:
    """Plot the loss of every run by steps and by FLOPs, and its difference from that of "mha"."""
    rows, runs = table["rows"], table["runs"]
    figure = Figure(figsize=(16, 5.5))
    by_step, by_flops, apart = figure.subplots(1, 3)
    for index, row in enumerate(rows):
        for run in runs[row["kind"]]:
            steps, losses = zip(*run["curve"][1:])
            label = row["kind"] if run is runs[row["kind"]][0] else None
            by_step.plot(steps, losses, color=f"C{index}", linewidth=0.8, label=label)
            by_flops.plot([step * row["flops"] for step in steps], losses, color=f"C{index}", linewidth=0.8)
    by_step.set(xlabel="step", ylabel="held-out loss (nats per byte)", xscale="log")
    by_flops.set(xlabel='FLOPs, in steps of "mha"', xscale="log")
    legend_below(by_step)
    compared = [row for row in rows if "loss_minus_mha" in row]
    for offset, (name, label) in enumerate(COMPARED.items()):
        plot_bars(apart, [row[name] for row in compared], offset, 2, label=label)
    apart.axhline(0, color="black", linewidth=0.5)
    apart.set_xticks(range(len(compared)), [row["kind"] for row in compared], rotation=30, ha="right")
    apart.set(ylabel='loss minus that of "mha", 95% interval')
    legend_below(apart)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study and write its results. Raise `UserError`."""
    args = parse_arguments(argv)
    begin(args)
    size = FULL if args.full else SMALL
    text, setting = text_and_setting(args, size)
    runs = compare(args, setting, lambda kind, seed: one_run(kind, seed, size, text, args.device))
    rows = [summary(kind, size, runs) for kind in args.kinds]
    correct_by_holm([row[name] for row in rows for name in COMPARED if name in row])
    write(args, plot, **setting, seeds=args.seeds, rows=rows, runs=runs)


if __name__ == "__main__":
    run_cli(main)
