"""Train on more than one device: refuse launches, share the sequence among devices, make checkpoints whole."""

import os
from importlib.util import find_spec

import torch
from accelerate import ParallelismConfig, init_empty_weights
from accelerate.utils import DistributedType
from peft import PeftModel, get_peft_model
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from iha_io.checkpoint_io import load_config
from iha_io.command_io import UserError, refusing
from kind_facts import is_interleaved
from sft.arguments import RunArguments


# Kinds whose core sees all heads of the whole sequence at once, as Ulysses gives them.
SHARED_SEQUENCE_KINDS = {"iha", "mha"}
CONFIGS = "sft/accelerate_configs"


# Before a model is loaded --------------------------------------------------------------------------------------------


def check_launch(run: RunArguments, args: TrainingArguments) -> None:
    """Refuse, before a model is loaded, a launch that would train something else than it says. Raise `UserError`.

    What a launcher asks for stands in environment variables, and what came of it in `args.distributed_state`: where
    the two differ, accelerate says nothing and trains without sharding, or in one process.
    """
    _check_processes(args)
    _check_sharding(args)
    if args.mixed_precision != "no" and not (args.bf16 or args.fp16):
        raise UserError(
            f"the accelerate config asks for mixed_precision: {args.mixed_precision}, and the recipe has neither bf16 "
            "nor fp16: give --mixed_precision no to accelerate launch, or set bf16 or fp16 in the recipe."
        )
    parallelism = args.parallelism_config
    if parallelism is None:
        sizes = {} if _flag("ACCELERATE_USE_PARALLELISM_CONFIG") else {"tp_size": 1, "cp_size": 1, "sp_size": 1}
        with refusing("parallelism_config", ValueError):  # sizes that exclude each other
            parallelism = ParallelismConfig(**sizes)
    if parallelism.cp_size > 1:
        raise UserError(
            f"context parallelism (parallelism_config_cp_size: {parallelism.cp_size}) drops windows and the "
            f"boundaries of packed documents: use sequence parallelism, {CONFIGS}/fsdp2_ulysses.yaml."
        )
    if parallelism.tp_size > 1:
        raise UserError(
            f"tensor parallelism (parallelism_config_tp_size: {parallelism.tp_size}) could share only the FFN, "
            f"because attention mixes all heads, and such a run cannot be resumed: use {CONFIGS}/fsdp2.yaml."
        )
    if parallelism.sp_size > 1:
        _check_shared_sequence(run, args, parallelism)


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1")


def asks_for_fsdp(args: TrainingArguments) -> bool:
    """Return whether the recipe or the launcher asks for FSDP."""
    return bool(args.fsdp) or _flag("ACCELERATE_USE_FSDP")


def _asks_for_deepspeed(args: TrainingArguments) -> bool:
    return bool(args.deepspeed) or _flag("ACCELERATE_USE_DEEPSPEED")


def sharding(args: TrainingArguments) -> str | None:
    """Return what shards the run, which decides on the files of its optimiser, or None."""
    if asks_for_fsdp(args):
        return f"FSDP {os.environ.get('FSDP_STATE_DICT_TYPE', '')}".strip()
    return "DeepSpeed" if _asks_for_deepspeed(args) else None


def _check_processes(args: TrainingArguments) -> None:
    if args.n_gpu > 1:
        raise UserError(
            f"one process sees {args.n_gpu} GPUs, and TRL trains on one GPU a process: start it by accelerate launch, "
            "or set CUDA_VISIBLE_DEVICES to one GPU."
        )
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != args.world_size:
        raise UserError(
            f"{started} processes were started, and each would train alone, as one of {args.world_size}: there is no "
            f"accelerator. Pass --use_cpu true to train on the CPU."
        )
    # What accelerate's launcher sets when it was asked for several processes and starts one.
    if "WORLD_SIZE" not in os.environ and {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= os.environ.keys():
        raise UserError(
            "the accelerate config asks for several processes, and accelerate has started one, as it does for "
            f"'distributed_type: MULTI_CPU' and 'use_cpu: true': use {CONFIGS}/ddp.yaml, with --use_cpu true for the "
            "CPU (if one process is what you want, unset MASTER_ADDR)."
        )


def _check_sharding(args: TrainingArguments) -> None:
    resolved = args.distributed_state.distributed_type
    on_cpu = resolved in (DistributedType.NO, DistributedType.MULTI_CPU)
    if on_cpu and _asks_for_deepspeed(args):
        raise UserError(f"DeepSpeed would silently train unsharded on the CPU ({resolved}): use {CONFIGS}/ddp.yaml.")
    if asks_for_fsdp(args):
        if on_cpu:
            raise UserError(
                f"FSDP would silently train unsharded, because accelerate shards on accelerators only ({resolved}): "
                f"use {CONFIGS}/ddp.yaml on the CPU and single.yaml for one process."
            )
        version = (args.fsdp_plugin_args or {}).get("fsdp_version") or int(os.environ.get("FSDP_VERSION", 1))
        if version != 2:
            raise UserError(f"FSDP version {version}: expected 'fsdp_version: 2', as in {CONFIGS}/fsdp2.yaml.")


def _check_shared_sequence(run: RunArguments, args: TrainingArguments, parallelism: ParallelismConfig) -> None:
    size = parallelism.sp_size
    what = f"sequence parallelism (parallelism_config_sp_size: {size})"
    if sharding(args) is None:
        raise UserError(f"{what} needs FSDP2 or DeepSpeed: see {CONFIGS}/fsdp2_ulysses.yaml.")
    if find_spec("deepspeed") is None:
        raise UserError(f"{what} needs the package deepspeed: pip install deepspeed")
    if args.world_size % size:
        raise UserError(f"{what} does not divide the {args.world_size} processes.")
    if not parallelism.sp_handler.sp_seq_length_is_variable:
        raise UserError(f"{what}: set parallelism_config_sp_seq_length_is_variable to true; batches differ in length.")
    config = load_config(run.model_name_or_path)
    core = run.attn_implementation
    # A core that is not a flash kernel takes windows and documents from a mask, and Ulysses drops masks.
    if core is None or not is_flash_attention_requested(requested_attention_implementation=core):
        raise UserError(
            f"{what} drops the windows and the boundaries of packed documents under "
            f"attn_implementation={core or 'sdpa'}: set attn_implementation to flash_attention_2 or flash_attention_3."
        )
    if parallelism.sp_handler.sp_attn_implementation != core:
        raise UserError(
            f"{what}: parallelism_config_sp_attn_implementation is "
            f"{parallelism.sp_handler.sp_attn_implementation}; expected the recipe's attn_implementation, {core}."
        )
    if is_interleaved(config) or run.num_pseudo_heads and not hasattr(config, "attention_kinds"):
        raise UserError(f"{what} is not tested with a decoder of interleaved heads: use fsdp2.yaml.")
    if others := set(getattr(config, "attention_kinds", ())) - SHARED_SEQUENCE_KINDS:
        raise UserError(f"{what} is not tested with attention of kind {', '.join(sorted(others))}: use fsdp2.yaml.")


# In the trainer ------------------------------------------------------------------------------------------------------


class DistributedTrainer(Trainer):
    """Serve as the base of a trainer that shards the model or shares sequences: it keeps what other libraries lose.

    Under sequence parallelism (Ulysses) each process holds a piece of every row, and attention exchanges pieces of
    the sequence for heads. Checkpoints of a sharded model load like any other.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        parallelism = self.accelerator.parallelism_config
        self.sequence_pieces = parallelism.sp_size if parallelism is not None else 1
        if self.sequence_pieces > 1:
            self.data_collator.pad_to_multiple_of = self.args.pad_to_multiple_of or self.sequence_pieces
            self.data_collator = SharedSequenceCollator(self.data_collator)

    def _prepare_for_training(self, *args, **kwargs):
        if self.sequence_pieces > 1:
            attend_by_position(self.model)
            if self.accelerator.is_fsdp2:
                register_ulysses(self)
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.sequence_pieces > 1:
            keep_heads_apart(self.accelerator.parallelism_config.sp_handler.sp_attn_implementation)
        wrapped = isinstance(self.model_wrapped, FSDPModule if self.is_fsdp_enabled else DistributedDataParallel)
        if self.accelerator.num_processes > 1 and not (wrapped or self.is_deepspeed_enabled):
            raise UserError(f"each process would train by itself: the model is a plain {type(self.model).__name__}.")
        return prepared

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            return super().save_model(output_dir, _internal_call)
        model = whole_model(self)
        if self.args.should_save:
            model.save_pretrained(output_dir or self.args.output_dir)
            self.processing_class.save_pretrained(output_dir or self.args.output_dir)


class SharedSequenceCollator:
    """Give the batches of `collator` as Ulysses can cut them along the sequence: tensors [batch, N] only.

    The lengths of packed documents (`cu_seq_lens_q` and others) go; `position_ids` say the same.
    """

    def __init__(self, collator) -> None:
        self.collator = collator

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        batch = self.collator(rows)
        shape = batch["input_ids"].shape
        return {name: value for name, value in batch.items() if getattr(value, "shape", None) == shape}


def attend_by_position(model: PreTrainedModel) -> None:
    """Have the decoder of an IHA model make no masks of its own while it trains.

    It sees one piece of the sequence; the flash core sees all of it, and finds documents by `position_ids`.
    """
    decoder = model.get_base_model().base_model if isinstance(model, PeftModel) else model.base_model
    if decoder.config.model_type != "iha":
        return
    no_masks = dict.fromkeys(decoder.config.layer_types)
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": no_masks} if module.training else kwargs),
        with_kwargs=True,
    )


def register_ulysses(trainer: Trainer) -> None:
    """Put DeepSpeed's Ulysses around the attention core, as accelerate does under DeepSpeed and not under FSDP2."""
    from deepspeed import init_distributed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import groups

    init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    handler = trainer.accelerator.parallelism_config.sp_handler
    groups.mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=trainer.model,
        core_attn_implementation=handler.sp_attn_implementation,
        sequence_parallel_size=trainer.sequence_pieces,
        micro_batch_size=1
        if trainer.data_collator.collator.padding_free
        else trainer.args.per_device_train_batch_size,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )


def keep_heads_apart(core: str) -> None:
    """Have Ulysses return [batch, queries, heads, head_dim], as every core does.

    It returns [batch, queries, heads * head_dim], and the collapse of pseudo-heads needs the heads.
    """
    shared = ALL_ATTENTION_FUNCTIONS[core]

    def attention(module: torch.nn.Module, query: torch.Tensor, *args, **kwargs):
        output, weights = shared(module, query, *args, **kwargs)
        return output.view(*output.shape[:2], -1, query.shape[-1]), weights

    ALL_ATTENTION_FUNCTIONS[core] = attention


# After training ------------------------------------------------------------------------------------------------------


def whole_model(trainer: Trainer) -> PreTrainedModel | None:
    """Return the trained model with its whole weights, adapters included, in the class it was loaded as.

    Every process must call this; of a sharded model, process 0 gets a copy on its CPU and the others None.

    FSDP2 puts a class of its own in place of the model's, and saving that class writes the code of PyTorch's FSDP
    into the checkpoint in place of the model's.
    """
    accelerator, model = trainer.accelerator, trainer.model
    if accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        return accelerator.unwrap_model(model)
    weights = accelerator.get_state_dict(trainer.model_wrapped)
    if not accelerator.is_main_process:
        return None
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    with init_empty_weights():
        whole = type(base)(base.config)  # FSDP2's class makes an object of the class that it stands for
        whole.generation_config = base.generation_config
        if isinstance(model, PeftModel):
            whole = get_peft_model(whole, model.active_peft_config)
    whole.load_state_dict(weights, assign=True)
    whole.tie_weights()
    return whole
