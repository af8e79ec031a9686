"""Add figures to what Trainer logs: the speed, the memory, and how far the mixing has moved.

Each callback here must come before those that print and report.
"""

import resource
import sys
import time

import torch
from torch import nn
from transformers import TrainerCallback

from modeling_iha.mixing_weights import mixing_change


def peak_memory(device: torch.device) -> int:
    """Return the most bytes so far of the tensors on a GPU, or elsewhere of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class CountTokens(TrainerCallback):
    """Log `tokens_per_second` since the last log, and continue the count of a resumed run, which TRL starts anew.

    Log too `minutes_left`, by the steps since the last log and without evaluations, `peak_memory_gb`, the most memory
    so far (`peak_memory`), and `model_flops_utilization`, if there is a peak to compare with.
    """

    peak_tokens_per_second: float | None = None  # of all devices together
    time = 0.0  # of the last log; an evaluation may come before training

    def on_train_begin(self, args, state, control, **kwargs):
        counts = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
        self.before = counts[-1] if counts else 0
        self.last = self.before
        self.step = state.global_step
        self.time = time.monotonic()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.time += metrics["eval_runtime"]

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "num_tokens" not in logs:
            return
        logs["num_tokens"] += self.before
        now = time.monotonic()
        rate = (logs["num_tokens"] - self.last) / (now - self.time)
        logs["tokens_per_second"] = rate
        steps = state.global_step - self.step
        if steps > 0:
            logs["minutes_left"] = round((now - self.time) / steps * (state.max_steps - state.global_step) / 60, 1)
        if self.peak_tokens_per_second is not None:
            logs["model_flops_utilization"] = rate / self.peak_tokens_per_second
        logs["peak_memory_gb"] = peak_memory(args.device) / 1e9
        self.last = logs["num_tokens"]
        self.step = state.global_step
        self.time = now
        state.log_history[-1].update(logs)


def mixes_heads(model: nn.Module) -> bool:
    """Return whether a model has layers whose mixing `mixing_change` measures."""
    return any("q_mix" in module._modules for module in model.modules())


class LogMixing(TrainerCallback):
    """Log with the loss how far the mixing has moved from its start: `mixing_change_queries` and so on.

    Each is a mean over layers and heads. At 1 a pseudo-head has lost its own head, or reads another in addition.
    """

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if not logs or "loss" not in logs:
            return
        for part, layers in mixing_change(model).items():
            logs[f"mixing_change_{part}"] = torch.cat(list(layers.values())).mean().item()
        state.log_history[-1].update(logs)
