"""Share a row among devices by Transformers' `parallelism_config` with `sp_size` (DeepSpeed's Ulysses), under FSDP2.

Each process holds a piece of every row, and attention exchanges pieces of the sequence for heads. Transformers shares
batches and losses. This file adds what Transformers does under DeepSpeed alone, and keeps what it would lose.
"""

import torch
from accelerate import ParallelismConfig
from peft import PeftModel
from transformers import Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from iha.errors import UserError, refusing
from sft.arguments import RunArguments
from sft.base_model import start_config


def check_shared_sequence(run: RunArguments, args: TrainingArguments) -> None:
    """Refuse ways to share a row that would compute something else. Raise `UserError`."""
    with refusing("parallelism_config", ValueError):  # for sizes that exclude each other
        sizes = args.parallelism_config or ParallelismConfig()
    if sizes.cp_size > 1 or sizes.tp_size > 1:
        raise UserError(
            "context parallelism drops windows and the boundaries of packed documents, and tensor parallelism cannot "
            "share attention that mixes all heads: set cp_size and tp_size to 1; sp_size shares rows."
        )
    if sizes.sp_size == 1:
        return
    # A core that is not a flash kernel takes windows and documents from a mask, and Ulysses drops masks.
    core = run.attn_implementation
    if not is_flash_attention_requested(requested_attention_implementation=core or "sdpa"):
        raise UserError(
            f"sp_size: {sizes.sp_size} drops windows and the boundaries of packed documents under "
            f"attn_implementation={core or 'sdpa'}: set attn_implementation to flash_attention_2."
        )
    if sizes.sp_handler.sp_attn_implementation != core:
        raise UserError(f"sp_attn_implementation: expected the recipe's attn_implementation, {core}.")
    kinds = set(getattr(start_config(run), "attention_kinds", ("a plain decoder",)))
    others = kinds - {"iha", "mha"}
    if others:
        raise UserError(f"sp_size: {sizes.sp_size} is tested with 'iha' and 'mha' only, not with {', '.join(others)}.")


def share_sequence(trainer: Trainer) -> None:
    """Have a trainer that is not prepared yet share rows if its `parallelism_config` asks for it."""
    sizes = trainer.accelerator.parallelism_config
    if sizes is None or sizes.sp_size == 1:
        return
    from deepspeed import init_distributed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import groups

    collate = trainer.data_collator
    core = sizes.sp_handler.sp_attn_implementation
    collate.pad_to_multiple_of = trainer.args.pad_to_multiple_of or sizes.sp_size

    def tensors_of_rows(rows: list[dict]) -> dict[str, torch.Tensor]:
        # Ulysses cuts tensors [batch, N]. The lengths of packed documents are dropped: `position_ids` tell them too.
        batch = collate(rows)
        shape = batch["input_ids"].shape
        return {name: value for name, value in batch.items() if getattr(value, "shape", None) == shape}

    trainer.data_collator = tensors_of_rows
    base = trainer.model.get_base_model() if isinstance(trainer.model, PeftModel) else trainer.model
    decoder = base.base_model
    if decoder.config.model_type == "iha":
        # No mask is made of a piece: the flash core gets the whole row, and finds its documents by `position_ids`.
        masks = dict.fromkeys(decoder.config.layer_types)
        decoder.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": masks} if module.training else kwargs),
            with_kwargs=True,
        )
    init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    groups.mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=trainer.model,
        core_attn_implementation=core,
        sequence_parallel_size=sizes.sp_size,
        micro_batch_size=1 if collate.padding_free else trainer.args.per_device_train_batch_size,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )
    shared = ALL_ATTENTION_FUNCTIONS[core]

    def attention(module: torch.nn.Module, query: torch.Tensor, *args, **kwargs):
        output, weights = shared(module, query, *args, **kwargs)
        return output.view(*output.shape[:2], -1, query.shape[-1]), weights  # the collapse needs an axis of heads

    ALL_ATTENTION_FUNCTIONS[core] = attention
