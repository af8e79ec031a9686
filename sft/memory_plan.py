"""Plan what a training run takes in memory, and refuse one that cannot fit before it starts.

PyTorch counts: a step runs on a copy of the model without data (FakeTensorMode), and the bytes of each tensor count
from when it is made until it is freed. research/benchmarks/training_plan.py compares the plan with the peaks of real
processes.
"""

import copy
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Trainer, masking_utils
from trl import SFTConfig
from trl.trainer.utils import add_fused_lm_head

from iha_io.command_io import UserError, one_line, run_cli
from sft.arguments import RecipeParser, RunArguments
from sft.base_model import lora_config, prepare_model, run_config
from sft.distributed import asks_for_fsdp


USAGE = """python -m sft.memory_plan --config sft/recipes/NAME/sft.yaml [--key value ...]

Print what a step of a recipe takes in memory. The model is loaded, and no rows are.

example:
  python -m sft.memory_plan --config sft/recipes/demo/sft.yaml --model_name_or_path smollm2-iha --use_cpu true
"""
# What the allocator of a CPU takes at most beyond the tensors, by peaks of sft/train.py (docs/LOG.md at 443b1c9).
ALLOCATOR = 1.25
LOSS_OUTPUTS = ("log_probs", "entropy", "is_top1")  # of TRL's loss


class Counter(TorchDispatchMode):
    """Count the bytes of the tensors that are alive, `now`, and the most that ever were, `peak`.

    PyTorch's MemTracker counts the same to the byte, and each module apart: 30 layers take it a minute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return result


@contextmanager
def one_document() -> Iterator[None]:
    """Have Transformers take a row without data for one document.

    It takes each for a packed one, and would build its mask [N, N]; nothing public tells it that there is no packing.
    Rows with data, such as another thread's, are asked as before."""
    find = masking_utils.find_packed_sequence_indices

    def find_in_data(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if isinstance(position_ids, FakeTensor) else find(position_ids)

    masking_utils.find_packed_sequence_indices = find_in_data
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


class Plan(NamedTuple):
    """Hold the bytes of what stays from step to step, and of a step at its peak, in one process."""

    weights: int
    gradients: int
    optimizer: int
    peak: int


def plan(model: PreTrainedModel, adapters: LoraConfig | None, args: SFTConfig) -> Plan:
    """Count a step of `sft/train.py` on `model` and a row that is one document, with the kernels of a CPU.

    Raise whatever a model or an optimizer raises that looks at data.
    """
    mode, counter = FakeTensorMode(allow_non_fake_inputs=True), Counter()
    adapted = get_peft_model(model, adapters) if adapters else None  # PEFT cannot adapt a model without data
    with FakeCopyMode(mode):
        model = copy.deepcopy(model if adapted is None else adapted).train()
    if adapted is not None:
        adapted.unload()
    with mode:
        add_fused_lm_head(model if adapted is None else model.get_base_model(), outputs=LOSS_OUTPUTS)
        if args.gradient_checkpointing:
            model.activation_checkpointing_enable()
            model.enable_input_require_grads()
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        optimizer = optimizer_class([weight for weight in model.parameters() if weight.requires_grad], **options)
        for tensor in (*model.parameters(), *model.buffers()):
            counter.add(tensor)
        weights, ids = counter.now, torch.zeros(args.per_device_train_batch_size, args.max_length, dtype=torch.long)
        half = torch.bfloat16 if args.bf16 else torch.float16

        def backward() -> None:
            with torch.autocast("cpu", half, enabled=args.bf16 or args.fp16):
                loss = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).loss
            loss.backward()

        with counter, one_document():
            backward()
            optimizer.step()
            whole = counter.now
            optimizer.zero_grad()
            kept = counter.now
            for _ in range(min(2, args.gradient_accumulation_steps)):
                backward()
    return Plan(weights, whole - kept, kept - weights, counter.peak)


def check_memory(model: PreTrainedModel, run: RunArguments, args: SFTConfig) -> None:
    """Print what a step takes on each device and what there is. Raise `UserError` for a run that needs more."""
    say, adapters = args.distributed_state.print, lora_config(run, model)
    try:
        planned = plan(model, adapters, args)
    except Exception as error:  # routed experts, optimizers with kernels of their own, rows without a length
        say(f"Note: what this run takes in memory is not planned ({one_line(error):.200}).")
        return
    needed, kept = planned.peak, planned.weights + planned.gradients + planned.optimizer
    if args.world_size > 1:  # arithmetic: FSDP shards what stays, and DDP has buckets of gradients
        needed += kept // args.world_size - kept if asks_for_fsdp(args) else planned.gradients
    if args.device.type == "cuda":
        limit = torch.cuda.get_device_properties(args.device).total_memory
    else:  # the weights of a CPU's run are there already
        needed *= ALLOCATOR
        limit = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) + planned.weights
    parts = ", ".join(f"{name} {getattr(planned, name) / 1e9:.2f}" for name in ("weights", "gradients", "optimizer"))
    say(f"A step takes {needed / 1e9:.2f} GB on each device ({parts}), and there are {limit / 1e9:.2f} GB.")
    if needed > limit:
        raise UserError(
            f"The run needs {needed / 1e9:.1f} GB on each device and there are {limit / 1e9:.1f} GB: set "
            "gradient_checkpointing, a smaller per_device_train_batch_size, use_peft or a shorter max_length, or "
            "shard over devices (sft/accelerate_configs/fsdp2.yaml)."
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of the recipe in `argv` or the command line. Raise `UserError`."""
    run, args = RecipeParser(SFTConfig, USAGE).parse(argv)
    model, _ = prepare_model(run, args, run_config(run, args))
    check_memory(model, run, args)


if __name__ == "__main__":
    run_cli(main)
