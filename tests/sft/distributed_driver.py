"""Run what the launches of test_distributed.py have in each of their processes.

`forked` starts the processes in tests, and accelerate's launcher does in slow ones: python
tests/sft/distributed_driver.py PLANS, a JSON list of the plans of `train_run` and `tensor_parallel_step`. FSDP runs on
the CPU here, where accelerate alone would train under DDP in silence.
"""

import gc
import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path


sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]
gc.disable()  # as conftest.py does
if __name__ == "__main__":
    sys.modules["bitsandbytes"] = None  # PEFT would import it, and it Inductor, for seconds

import pytest  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator, PartialState  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from tiny_training import hasten_runs  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

from modeling_iha import IHAForCausalLM  # noqa: E402
from sft import train  # noqa: E402
from sft.trainer import SFTRecipeTrainer  # noqa: E402


def whole_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in gradients.items()
    }


def sharded_names(model: torch.nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if isinstance(value, DTensor)}


class Recorder(TrainerCallback):
    """Record the wrapped model and the gradients of the first step, and stop a run as Ctrl-C does."""

    def __init__(self, plan: dict) -> None:
        self.plan = plan

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.plan.get("interrupted_at"):
            raise KeyboardInterrupt

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step > 0:
            return
        names = {id(value): name for name, value in model.named_parameters()}
        record = {
            "class": type(model).__name__,
            "sharded": sharded_names(model),
            "gradients": whole_gradients(model),
            "groups": [
                ([names[id(value)] for value in group["params"]], group["initial_lr"], group["weight_decay"])
                for group in optimizer.param_groups
            ],
        }
        if args.process_index == 0:
            torch.save(record, self.plan["record"])


def train_run(plan: dict) -> None:
    """Call sft/train.py with {"arguments": [...], "record": file}.

    The plan may also hold "environment" and "interrupted_at" (a step); "last" is for a run that ends the process
    group, as the command does. What a process prints is in a file next to the record.
    """
    make = SFTRecipeTrainer.__init__

    def make_with_recorder(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.add_callback(Recorder(plan))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in plan.get("environment", {}).items():
            patch.setenv(name, value)
        hasten_runs(patch)
        patch.setattr(SFTRecipeTrainer, "__init__", make_with_recorder)
        if "last" not in plan:  # the next plan needs the process group
            patch.setattr(Accelerator, "end_training", lambda self: None)
        with suppress(KeyboardInterrupt), open(f"{plan['record']}.{os.environ.get('RANK', 0)}", "w") as printed:
            with redirect_stdout(printed):
                train.main(plan["arguments"])
    AcceleratorState._reset_state()
    GradientState._reset_state()


def tensor_parallel_step(plan: dict) -> None:
    """Record loss and gradients of {"model", "ids", "record"} under tensor parallelism."""
    size = torch.distributed.get_world_size()
    model = IHAForCausalLM.from_pretrained(plan["model"], distributed_config=DistributedConfig(tp_size=size))
    ids = torch.tensor(plan["ids"])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    record = {"loss": loss.item(), "sharded": sharded_names(model), "gradients": whole_gradients(model)}
    if torch.distributed.get_rank() == 0:
        torch.save(record, plan["record"])


def shard_on_cpu() -> None:
    """Have accelerate take gloo processes under FSDP for those of an accelerator, which it can shard over."""
    start = PartialState.__init__

    def start_as_accelerator(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = start_as_accelerator


def run_plans(plans: list[dict]) -> None:
    shard_on_cpu()
    for plan in plans:
        (train_run if "arguments" in plan else tensor_parallel_step)(plan)
    assert not torch.distributed.is_initialized()


def forked(work: Callable[[list[dict]], None], plans: list[dict], environment: dict[str, str]) -> None:
    """Run plans in two forks of this process, which have its imports, with the variables of a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    environment = {**environment, **address, "WORLD_SIZE": "2"}
    arguments = (work, plans, environment)
    torch.multiprocessing.start_processes(_run_in_fork, arguments, nprocs=2, start_method="fork")


def _run_in_fork(rank: int, work: Callable[[list[dict]], None], plans: list[dict], environment: dict[str, str]):
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    work(plans)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    run_plans(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
