"""Notice that other processes use the cores of a CPU that trains, which can make a run fifty times as slow."""

import os
import time

import psutil
import torch
from accelerate import PartialState
from transformers import TrainerCallback


# The time over which cores are watched, and how much of them others use if a note is printed.
SECONDS = 2.0
CORES = 0.5


class WatchCores(TrainerCallback):
    """Print a note if other processes use the cores for which PyTorch's threads wait.

    Each thread waits busily for the others at every operation, and one without a core keeps all of them waiting.
    """

    begun: tuple[float, float, float] | None = None  # of the time that is watched: see `_times`

    def on_train_begin(self, args, state, control, **kwargs):
        if args.device.type == "cpu" and args.world_size == 1 and torch.get_num_threads() > 1:
            self.begun = _times()

    def on_step_end(self, args, state, control, **kwargs):
        if self.begun is None:
            return
        passed, busy, own = (now - then for now, then in zip(_times(), self.begun))
        if passed < SECONDS:
            return
        self.begun = None
        threads = torch.get_num_threads()
        others = (busy - own) / passed
        if others > CORES and others + threads > psutil.cpu_count():
            PartialState().print(
                f"Note: other processes use {others:.1f} of {psutil.cpu_count()} cores, and this run has {threads} "
                "threads, which wait for each other: set OMP_NUM_THREADS=1. (docs/SPEED.md says more.)"
            )


def _times() -> tuple[float, float, float]:
    """Return the time, and the CPU time of all processes and of this one, in seconds."""
    of_all = psutil.cpu_times()
    busy = sum(of_all) - of_all.idle - getattr(of_all, "iowait", 0.0) - getattr(of_all, "guest", 0.0)
    return time.monotonic(), busy, sum(os.times()[:4])
