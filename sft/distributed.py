"""Train on more than one device: reject launches that would train something else, and gather sharded weights."""

import os

from accelerate import ParallelismConfig, init_empty_weights
from accelerate.utils import DistributedType
from peft import PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from trl import SFTConfig

from iha.checkpoints import check_finite
from iha.errors import UserError, refusing


CONFIGS = "sft/accelerate_configs"


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1")


def check_launch(args: TrainingArguments) -> None:
    """Reject, before a model is loaded, a launch that would train something else than it says. Raise `UserError`.

    The launcher's request is in environment variables, and the state that resulted in `args.distributed_state`. If
    the two differ, accelerate prints no warning and trains without sharding, or in one process.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    resolved = args.distributed_state.distributed_type
    if started != args.world_size:
        raise UserError(
            f"{started} processes were started, and each would train alone, as one of {args.world_size}: there is no "
            "accelerator. Pass --use_cpu true to train on the CPU."
        )
    # Accelerate's launcher sets these variables if it was asked for several processes and starts one.
    if "WORLD_SIZE" not in os.environ and {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys():
        raise UserError(
            "the accelerate config asks for several processes, and accelerate has started one, as it does for "
            f"'distributed_type: MULTI_CPU' and 'use_cpu: true': use {CONFIGS}/ddp.yaml, with --use_cpu true for the "
            "CPU (if one process is what you want, unset MASTER_ADDR)."
        )
    if args.deepspeed or _flag("ACCELERATE_USE_DEEPSPEED"):
        raise UserError(f"DeepSpeed is not supported: use FSDP2, which shards the same things ({CONFIGS}/fsdp2.yaml).")
    asks_for_fsdp = args.fsdp or _flag("ACCELERATE_USE_FSDP")
    if asks_for_fsdp and resolved in (DistributedType.NO, DistributedType.MULTI_CPU):
        raise UserError(
            f"FSDP would silently train unsharded without accelerators ({resolved}): use {CONFIGS}/ddp.yaml on the "
            "CPU and single.yaml for one process."
        )
    version = (args.fsdp_plugin_args or {}).get("fsdp_version") or int(os.environ.get("FSDP_VERSION", 1))
    if asks_for_fsdp and version != 2:
        raise UserError(f"FSDP version {version}: expected 'fsdp_version: 2', as in {CONFIGS}/fsdp2.yaml.")
    if asks_for_fsdp and _flag("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise UserError(
            "fsdp_cpu_ram_efficient_loading: accelerate then shares no buffers, and the mixing has some: set it to "
            f"false, as in {CONFIGS}/fsdp2.yaml."
        )
    if args.mixed_precision != "no" and not (args.bf16 or args.fp16):
        raise UserError(
            f"the accelerate config asks for mixed_precision: {args.mixed_precision}, and the recipe has neither bf16 "
            "nor fp16: give --mixed_precision no to accelerate launch, or set bf16 or fp16 in the recipe."
        )
    with refusing("parallelism_config", ValueError):  # for sizes that exclude each other
        sizes = args.parallelism_config or ParallelismConfig()  # it reads the launcher's environment variables
    if max(sizes.tp_size, sizes.sp_size) > 1:
        raise UserError(
            "sequence parallelism of DeepSpeed drops windows and the boundaries of packed documents, and tensor "
            "parallelism cannot share attention that mixes all heads: set sp_size and tp_size to 1. Processes share "
            f"rows by cp_size ({CONFIGS}/fsdp2_shared_rows.yaml)."
        )
    if sizes.cp_size > 1 and not asks_for_fsdp:
        raise UserError(f"cp_size={sizes.cp_size} needs FSDP2: use {CONFIGS}/fsdp2_shared_rows.yaml.")
    if sizes.cp_size > 1:
        check_shared_rows(args)


def processes_of_a_row(args: TrainingArguments) -> int:
    """Return how many processes share each row, as accelerate's launcher tells it; 1 without it."""
    return (args.parallelism_config or ParallelismConfig()).cp_size


def check_shared_rows(args: SFTConfig) -> None:
    """Raise `UserError` for keys with which a row that processes share would be trained in another way."""
    size = processes_of_a_row(args)
    if args.world_size % size:
        raise UserError(f"{args.world_size} processes are no groups of {size}: change num_processes or cp_size.")
    if not (args.packing or args.padding_free):
        raise UserError("Processes share rows without padding: set packing or padding_free to true.")
    if (args.pad_to_multiple_of or 1) % size:
        raise UserError(f"{size} processes share each row: set pad_to_multiple_of to a multiple of {size}.")
    if args.loss_type not in ("nll", "chunked_nll") or args.label_smoothing_factor:
        raise UserError("Shared rows take the plain loss: leave out loss_type and label_smoothing_factor.")
    if args.eval_strategy != "no" and args.per_device_eval_batch_size > 1:
        raise UserError("Shared rows are evaluated one by one: set per_device_eval_batch_size to 1.")
    if args.neftune_noise_alpha:
        raise UserError("Each process would add the same noise to its piece: leave out neftune_noise_alpha.")


def whole_model(trainer: Trainer) -> PreTrainedModel | None:
    """Return the trained model with its whole weights, adapters included, in the class it was loaded as.

    Every process must call this. If the model is sharded, process 0 gets a copy on its CPU and the others get None.
    Raise `UserError` if a weight is NaN or infinite.

    FSDP2 replaces the model's class by another. To save that class would write the code of PyTorch's FSDP into
    the checkpoint in place of the model's code.
    """
    accelerator = trainer.accelerator
    model = trainer.model
    local = (
        (name, value.to_local() if isinstance(value, DTensor) else value) for name, value in model.named_parameters()
    )
    check_finite(local, f"the model at step {trainer.state.global_step}")
    if accelerator.distributed_type != DistributedType.FSDP:
        return accelerator.unwrap_model(model)
    weights = accelerator.get_state_dict(trainer.model_wrapped)
    if not accelerator.is_main_process:
        return None
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    with init_empty_weights():
        whole = type(base)(base.config)  # FSDP2's class makes an object of the class that it replaced
        whole.generation_config = base.generation_config
        if isinstance(model, PeftModel):
            whole = get_peft_model(whole, model.active_peft_config)
    whole.load_state_dict(weights, assign=True)
    whole.tie_weights()
    return whole
