"""Train on rows that processes share (sequence_parallel.py), through what Trainer, TRL and accelerate make public.

`parallelism_config_cp_size: S` of accelerate's launcher gives a mesh of groups of S processes, the same row to all
processes of a group, weights that FSDP2 shards over all processes, and a count of tokens that is divided by S. What
accelerate, TRL and Trainer would add, each asks for by the property `cp_enabled`: hooks that refuse windows and drop
masks, the refusal of packing, and a cut that wants the core "sdpa".
"""

from math import lcm

import torch.distributed as dist
from accelerate import ParallelismConfig
from datasets import IterableDataset
from transformers import PreTrainedModel

from iha.errors import UserError
from iha.without_data import check_can_share_rows
from modeling_iha.attention_mha import MultiHeadAttention
from modeling_iha.attention_paired_heads import PairedHeadsAttention
from modeling_iha.interleaved_attention import PREFIX, has_virtual_heads, implementation_of_user
from modeling_iha.sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from sft.sequence_parallel import AttendInPieces, piece, shared_rows
from sft.trainer import SFTRecipeTrainer


def check_core(model: PreTrainedModel) -> str:
    """Return the attention function by which a model can attend to shared rows. Raise `UserError` if it has none."""
    check_can_share_rows(model)  # other layers would silently attend within a piece
    config = model.config.get_text_config()
    core = config._attn_implementation
    if config.model_type == "iha":
        core = SDPA_IN_BLOCKS if core == "sdpa" else core
    elif core == PREFIX + SDPA_IN_BLOCKS:
        core = SDPA_IN_BLOCKS
    else:
        core = implementation_of_user(core)
    if core != SDPA_IN_BLOCKS and "flash" not in core:
        raise UserError(
            f"attn_implementation={core!r} of this model cannot attend to shared rows: give "
            "--attn_implementation flash_attention_2."
        )
    return core


def check_heads(model: PreTrainedModel, size: int) -> None:
    """Raise `UserError` if so many processes cannot share the heads of one of our layers without a window.

    Other layers tell at the first step."""
    for module in model.modules():
        if not isinstance(module, MultiHeadAttention) and not has_virtual_heads(module):
            continue
        config = module.config
        window = getattr(module, "sliding_window", None)
        if has_virtual_heads(module):  # in a decoder these may have a window that the others lack
            window = window or getattr(config, "interleaved_window", None)
        pairs = 1  # P paired heads are one head of P times as many tokens
        if isinstance(module, PairedHeadsAttention):
            pairs = module.num_pseudo_heads
        elif hasattr(module, "paired_heads"):
            pairs = module.paired_heads.num_pseudo_heads
        heads, groups = config.num_attention_heads // pairs, config.num_key_value_heads // pairs
        if window is None and heads % lcm(size, groups):
            raise UserError(
                f"{size} processes cannot share the {heads} heads of layer {module.layer_idx}, of {groups} key heads: "
                "change cp_size, or give the layer a window."
            )


class SharedRows(ParallelismConfig):
    """Keep the mesh of context parallelism, and switch off the attention that accelerate brings."""

    cp_enabled = False  # a property of the base: see the head of this file
    dp_shard_enabled = True  # FSDP asks for this dimension, of size 1 too

    @property
    def non_dp_dim_names(self) -> list[str]:
        return [*super().non_dp_dim_names, "cp"]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return [*super().dp_shard_cp_dim_names, "cp"]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [*super().dp_cp_dim_names, "cp"]


class SharedRowTrainer(SFTRecipeTrainer):
    """Train as `SFTRecipeTrainer` does, with each row shared by the processes of a group.

    The loss of a piece is its sum over the tokens of the step's rows, times the number of processes, of which FSDP
    takes the mean. Raise `UserError` for a model whose layers cannot all exchange."""

    def __init__(self, *args, **kwargs) -> None:
        config = kwargs["args"]
        sizes = config.parallelism_config or ParallelismConfig()  # the launcher's
        groups = config.world_size // sizes.cp_size
        shards = groups // sizes.dp_replicate_size
        config.parallelism_config = SharedRows(sizes.dp_replicate_size, shards, cp_size=sizes.cp_size)
        self.core = check_core(kwargs["model"])
        check_heads(kwargs["model"], sizes.cp_size)
        super().__init__(*args, **kwargs)
        if self.aux_loss_enabled:
            raise UserError(
                "The auxiliary loss of a mixture of experts is that of whole rows: set router_aux_loss_coef to 0."
            )
        rows = self.eval_dataset
        if rows is not None and not isinstance(rows, IterableDataset) and len(rows) % groups:
            # Accelerate drops what it repeats at the end of an evaluation by processes, and not by groups of them.
            raise UserError(f"{groups} groups cannot share {len(rows)} packed rows to evaluate on: change eval_size.")
        self.group = self.accelerator.torch_device_mesh["cp"].get_group()
        self.attention: AttendInPieces | None = None

    def train(self, *args, **kwargs):
        # Until the end: the backward pass of a layer under checkpointing attends again.
        with shared_rows(self.core, self.group) as self.attention:
            return super().train(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        size = self.group.size()
        if num_items_in_batch is None:  # in an evaluation: the mean over the row, and not one of means of pieces
            predicted = (inputs["labels"][:, 1:] != -100).sum()
            num_items_in_batch = predicted * self.accelerator.num_processes / size
        own = piece(inputs, self.group.rank(), size)
        result = super().compute_loss(model, own, return_outputs, num_items_in_batch)
        self.check_layers()
        if not model.training:  # a mean over all processes may leave out some at the end of an evaluation
            loss = result[0] if return_outputs else result
            dist.all_reduce(loss, group=self.group)
            loss.div_(size)
        return result

    def check_layers(self) -> None:
        """Raise `UserError` if a layer has not exchanged, because it attended, or mixed tokens, within its piece."""
        layers = range(self.model.config.get_text_config().num_hidden_layers)
        alone = sorted(set(layers) - self.attention.layers)
        if alone:
            raise UserError(
                f"Layers {', '.join(map(str, alone))} do not attend by {self.core!r}, and would see nothing but "
                "their process's piece of a row: train this model without shared rows."
            )
