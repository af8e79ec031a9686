"""Train small language models on the bytes of a text, and time their training steps."""

import hashlib
import os
import pydoc_data.topics
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import cross_entropy

from iha.errors import UserError
from modeling_iha import IHAForCausalLM
from research.experiments.arms import Arm, Size, build, config_of
from research.experiments.protocol import fit, new_model


EVALUATIONS = 10
WARM_STEPS = 3
TIMED_STEPS = 10
TIMED_ROUNDS = 11


# Texts


def given_text(name: str) -> str:
    """Return the name of a text, or the absolute path of a file: the study runs in another directory."""
    return name if name in ("python", "prose") else os.path.abspath(os.path.expanduser(name))


def read_text(name: str, tokens: int) -> torch.Tensor:
    """Return the bytes of a text, as uint8. Raise `UserError` for a file that is not there, or too short for rows."""
    if name == "python":
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        content = b"".join(module.read_bytes() for module in modules)
    elif name == "prose":
        content = "\n".join(pydoc_data.topics.topics.values()).encode()
    else:
        try:
            with open(name, "rb") as file:
                content = file.read()
        except OSError as error:
            raise UserError(f"--text {name}: {error.strerror}; expected a file, or python or prose.") from error
    if len(content) < (least := 20 * (tokens + 1)):  # two rows in the held-out tenth
        raise UserError(f"--text {name} has {len(content):,} bytes: expected at least {least:,}.")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def text_sha256(text: torch.Tensor) -> str:
    """Return the SHA-256 of a text's bytes, in hexadecimal: runs on another text are not reused."""
    return hashlib.sha256(text.cpu().numpy().tobytes()).hexdigest()


def rows_of(text: torch.Tensor, starts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return rows of `tokens` and the one after them, int64 [rows, tokens + 1]."""
    return text[starts[:, None] + torch.arange(tokens + 1)].long()


# Training


def losses_of(model: IHAForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Return the losses in nats per byte, [rows, tokens]. On a GPU the model computes in bfloat16 autocast."""
    with torch.autocast("cuda", torch.bfloat16, enabled=rows.is_cuda):
        logits = model(rows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.transpose(1, 2).float(), rows[:, 1:], reduction="none")


def model_on(device: torch.device, size: Size, arm: Arm, seed: int) -> IHAForCausalLM:
    """Build the model of an arm, with the common weights of a seed. On a GPU it is compiled."""
    model = new_model(config_of(size, arm), build(size, Arm()), seed).to(device)
    if device.type == "cuda":
        model.compile()
    return model


def train(size: Size, text: torch.Tensor, name: str, arm: Arm, seed: int, rate: float, mixing: float) -> dict:
    """Train a new model of an arm on the rows of a seed, with a rate and a multiple of it for the mixing.

    Return the seconds, and a curve of the step and the held-out loss.
    """
    model = model_on(text.device, size, arm, seed)
    held_out = len(text) // 10
    generator = torch.Generator().manual_seed(seed)
    # In float32 the places in a long text would be rounded.
    ends = (len(text) - held_out, len(text) - size.tokens - 1)
    starts = torch.linspace(*ends, size.held_out_rows, dtype=torch.float64).long()
    validation = rows_of(text, starts, size.tokens)

    def loss() -> torch.Tensor:
        chosen = torch.randint(len(text) - held_out - size.tokens, (size.batch,), generator=generator)
        return losses_of(model, rows_of(text, chosen, size.tokens)).mean()

    def evaluate(averaged: torch.nn.Module, step: int) -> list[float]:
        mean = torch.cat([losses_of(averaged, rows) for rows in validation.chunk(4)]).mean(dim=0).mean().item()
        print(f"{name}, seed {seed}: step {step} of {size.steps}, held-out loss {mean:.4f}", flush=True)
        return [mean]

    curve, seconds = fit(model, loss, evaluate, size.steps, rate, mixing, EVALUATIONS)
    return {"curve": curve, "seconds": seconds}


# Times


def now(device: torch.device) -> float:
    """Return the seconds that this process took on the CPU, or with a GPU those of a clock, once its work is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def step_seconds(size: Size, text: torch.Tensor, arms: Mapping[str, Arm]) -> dict[str, float]:
    """Return the seconds of a training step of each arm, as `now` counts them.

    They are the median of rounds that take all arms in turn. Every round builds the models anew, because their places
    in memory change the time by some percent.
    """
    starts = torch.arange(size.batch) * size.tokens % (len(text) - size.tokens)
    rows = rows_of(text, starts, size.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(TIMED_ROUNDS):
        for name, arm in arms.items():
            model = model_on(text.device, size, arm, 0)
            optimizer = torch.optim.AdamW(model.parameters())
            for step in range(WARM_STEPS + TIMED_STEPS):
                if step == WARM_STEPS:
                    start = now(text.device)
                optimizer.zero_grad()
                losses_of(model, rows).mean().backward()
                optimizer.step()
            seconds[name].append((now(text.device) - start) / TIMED_STEPS)
    return {name: median(values) for name, values in seconds.items()}
