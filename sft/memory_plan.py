"""Plan the memory of a training run, and refuse a run that cannot fit before it starts.

The plan runs a step on a copy of the model without data (iha/step_memory.py). research/benchmarks/training_plan.py
compares it with the peaks of real processes.
"""

import copy
import os
from collections.abc import Sequence

from iha.errors import UserError, check_packages, one_line, run_cli


if __name__ == "__main__":
    run_cli(lambda: check_packages("datasets", "peft", "trl"))

import psutil
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from transformers import PreTrainedModel, Trainer
from trl import SFTConfig
from trl.trainer.utils import add_fused_lm_head

from iha.step_memory import StepMemory, count_step
from sft.arguments import RecipeParser, RunArguments
from sft.base_model import lora_config, prepare_model, run_config
from sft.distributed import asks_for_fsdp


USAGE = """python -m sft.memory_plan --config sft/recipes/NAME/sft.yaml [--key value ...]

Print the memory that a step of a recipe takes. This loads the model, but no rows.

example:
  python -m sft.memory_plan --config sft/recipes/demo/sft.yaml --model_name_or_path smollm2-iha --use_cpu true
"""
# An upper bound of the measured peaks of sft/train.py on a CPU over the planned size of its tensors (docs/LOG.md at
# 443b1c9). The allocator takes the difference.
ALLOCATOR = 1.25
LOSS_OUTPUTS = ("log_probs", "entropy", "is_top1")  # outputs of TRL's loss


def copied(model: PreTrainedModel, adapters: LoraConfig | None, mode: FakeTensorMode) -> torch.nn.Module:
    """Return a copy of the model without data, with adapters if there are any, in training mode."""
    if adapters is None:
        with FakeCopyMode(mode):
            return copy.deepcopy(model).train()
    adapted = get_peft_model(model, adapters)  # PEFT cannot adapt a model without data
    try:
        with FakeCopyMode(mode):
            return copy.deepcopy(adapted).train()
    finally:
        adapted.unload()


def plan(model: PreTrainedModel, adapters: LoraConfig | None, args: SFTConfig) -> StepMemory:
    """Count a step of `sft/train.py` on `model` and a row that is one document, with the kernels of a CPU.

    A model or an optimizer that reads data raises an exception of its own here.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = copied(model, adapters, mode)
    with mode:
        add_fused_lm_head(model.get_base_model() if adapters else model, outputs=LOSS_OUTPUTS)
        if args.gradient_checkpointing:
            model.activation_checkpointing_enable()
            model.enable_input_require_grads()
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        optimizer = optimizer_class([weight for weight in model.parameters() if weight.requires_grad], **options)
        ids = torch.zeros(args.per_device_train_batch_size, args.max_length, dtype=torch.long)
        half = torch.bfloat16 if args.bf16 else torch.float16

        def backward() -> None:
            with torch.autocast("cpu", half, enabled=args.bf16 or args.fp16):
                loss = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).loss
            loss.backward()

        return count_step(model, optimizer, backward, min(2, args.gradient_accumulation_steps))


def check_memory(model: PreTrainedModel, run: RunArguments, args: SFTConfig) -> None:
    """Print the memory that a step takes on each device and what there is. Raise `UserError` if it does not fit."""
    say = args.distributed_state.print
    adapters = lora_config(run, model)
    try:
        planned = plan(model, adapters, args)
    except Exception as error:  # from routed experts, optimizers with kernels of their own, rows without a length
        say(f"Note: what this run takes in memory is not planned ({one_line(error):.200}).")
        return
    needed = planned.peak
    kept = planned.weights + planned.gradients + planned.optimizer
    if args.world_size > 1 and asks_for_fsdp(args):  # it shards what is kept between steps
        replicas = args.parallelism_config.dp_replicate_size if args.parallelism_config else 1
        needed += kept // (args.world_size // replicas) - kept
    elif args.world_size > 1:  # DDP has buckets of gradients
        needed += planned.gradients
    if args.device.type == "cuda":
        limit = torch.cuda.get_device_properties(args.device).total_memory
    else:  # on a CPU the weights are loaded already
        needed *= ALLOCATOR
        limit = psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) + planned.weights
    parts = ", ".join(f"{name} {getattr(planned, name) / 1e9:.2f}" for name in ("weights", "gradients", "optimizer"))
    say(f"A step takes {needed / 1e9:.2f} GB on each device ({parts}); {limit / 1e9:.2f} GB are available.")
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
