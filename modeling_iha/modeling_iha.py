# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Define Llama with an attention mechanism chosen per layer, by default Interleaved Head Attention (IHA)."""

import math
import sys
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface, AutoModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_dcmha import DynamicallyComposableAttention
from .attention_diff import DifferentialAttention
from .attention_diff_v2 import DifferentialAttentionV2
from .attention_hyper import HyperAttention
from .attention_hyper_feature import HyperFeatureAttention
from .attention_iha import InterleavedHeadAttention
from .attention_knocking_heads import KnockingHeadsAttention
from .attention_mha import MultiHeadAttention, core_for
from .attention_paired_heads import PairedHeadsAttention
from .attention_simplicial import SimplicialAttention
from .attention_talking_heads import TalkingHeadsAttention
from .configuration_iha import IHAConfig
from .sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from .sdpa_in_blocks import Backend, Call, additive, read_call
from .transformers_versions import CACHE, pop_cache
from .virtual_tokens import View, keep_window_edge, mask_over_virtual_tokens, refuse_pages, virtual_mask


# The attention of each kind, one to a line. A checkpoint ships the lines of its kinds.
ATTENTION_CLASSES = {
    "mha": MultiHeadAttention,
    "iha": InterleavedHeadAttention,
    "talking_heads": TalkingHeadsAttention,
    "diff": DifferentialAttention,
    "diff_v2": DifferentialAttentionV2,
    "knocking_heads": KnockingHeadsAttention,
    "hyper_feature": HyperFeatureAttention,
    "hyper": HyperAttention,
    "simplicial": SimplicialAttention,
    "dcmha": DynamicallyComposableAttention,
    "paired_heads": PairedHeadsAttention,
}

CREATE_MASK = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
# The mask function of `IHAModel`, whose core `masks_of_call` gives as a field of the config. A second copy of this
# code, in a checkpoint, leaves what the first registered.
MASK = "virtual_tokens"
if MASK not in ALL_MASK_ATTENTION_FUNCTIONS:
    AttentionMaskInterface.register(MASK, lambda **kwargs: virtual_mask(kwargs["config"].core, **kwargs))

# Trainer's label smoothing and `pipeline` look up causal models here, and no public function adds one. Two copies of
# this code write the same entry.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["iha"] = "IHAForCausalLM"


class IHARotaryEmbedding(LlamaRotaryEmbedding):
    """Compute Llama's rotary tables and those of interleaved virtual positions, for the layers of one type."""

    def __init__(self, config: IHAConfig, layer_type: str = "full_attention"):
        of_layer_type = copy(config)
        of_layer_type.rope_parameters = config.rope_of(layer_type)
        super().__init__(of_layer_type)
        is_interleaved = config.pseudo_positions == "interleaved"
        self.mixed = is_interleaved and "iha" in config.attention_kinds
        self.paired = is_interleaved and "paired_heads" in config.attention_kinds

    def _apply(self, fn, recurse=True):
        """Keep the frequencies in float32: rounded to bfloat16 they turn position 1000 by radians."""

        def move(buffer: torch.Tensor) -> torch.Tensor:
            moved = fn(buffer)
            # `to_empty` starts from the meta device, which has no data to move.
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        return super()._apply(move, recurse)

    def tables(self, x: torch.Tensor, position_ids: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the (cos, sin) tables for token positions n, `position_ids` [batch, N], in the dtype of `x`.

        `"token"` is at n, [batch, N, head_dim]. "iha" layers rotate by two, one after the other: `"interleaved"` is at
        n * P, [batch, N, head_dim], and `"pseudo_head"` at p, [P, head_dim]. `"paired"` is at n * P + p, [batch, P, N,
        head_dim]. All but `"pseudo_head"` include `attention_scaling`. RoPE types see lengths in tokens."""
        # This call may update the inv_freq that `_table` reads, so it comes first.
        tables = {"token": self(x, position_ids)}
        first = position_ids * self.config.num_pseudo_heads  # n * P
        pseudo_heads = torch.arange(self.config.num_pseudo_heads, device=x.device)  # p
        if self.mixed:
            tables["interleaved"] = self._table(first, x, self.attention_scaling)
            tables["pseudo_head"] = self._table(pseudo_heads, x)
        if self.paired:
            tables["paired"] = self._table(first[:, None] + pseudo_heads[:, None], x, self.attention_scaling)
        return tables

    @torch.no_grad()
    def _table(self, positions, x: torch.Tensor, scaling: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) for positions of any shape, each [*positions.shape, head_dim], times `scaling`."""
        # At n * P near a million a float32 angle is off by 0.03 rad. (MPS has no float64.)
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        angles = positions[..., None].to(dtype) * self.inv_freq.to(x.device, dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)


class IHAMLP(LlamaMLP):
    """Apply Llama's FFN, or one of two others that the config names."""

    def __init__(self, config: IHAConfig):
        super().__init__(config)
        # CODEPATH: the two-matrix FFN of the paper's models (IHA, Section 5.1) and of GPT-3 small.
        if not config.gated_mlp:
            del self.gate_proj
        # CODEPATH: the "mgate" FFN of released DCFormers, in which a softmax over groups of channels scales each.
        if config.mlp_gate_groups is not None:
            self.group_gate = nn.Linear(config.hidden_size, config.mlp_gate_groups, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        channels = self.up_proj(x)
        # CODEPATH: as in __init__.
        channels = self.act_fn(self.gate_proj(x)) * channels if self.config.gated_mlp else self.act_fn(channels)
        # CODEPATH: as in __init__.
        if self.config.mlp_gate_groups is not None:
            scores = self.group_gate(x)
            gate = torch.softmax(scores.float(), dim=-1).to(scores.dtype)
            channels = (channels.unflatten(-1, (gate.shape[-1], -1)) * gate.unsqueeze(-1)).flatten(-2)
        return self.down_proj(channels)


class IHADecoderLayer(LlamaDecoderLayer):
    """Run Llama's decoder layer with this layer's kind of attention and the config's FFN."""

    def __init__(self, config: IHAConfig, layer_idx: int):
        nn.Module.__init__(self)  # Llama's would first build the attention and FFN that are replaced here
        self.self_attn = ATTENTION_CLASSES[config.attention_kinds[layer_idx]].for_layer(config, layer_idx)
        self.mlp = IHAMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class IHAPreTrainedModel(LlamaPreTrainedModel):
    """Hold what all IHA models share: their initialization, and what other programs may do with them."""

    config: IHAConfig
    _no_split_modules = ["IHADecoderLayer"]
    _can_record_outputs = {"hidden_states": IHADecoderLayer, "attentions": MultiHeadAttention}
    init_continuous_batching = is_backend_compatible = refuse_pages

    def _init_weights(self, module: nn.Module):
        """Initialize as Llama does, and each part of a mechanism as its `init_mechanism` says."""
        super()._init_weights(module)
        if hasattr(module, "init_mechanism"):
            module.init_mechanism(self.config)


class IHAModel(IHAPreTrainedModel):
    """Run the decoder: token embedding, layers and final norm."""

    def __init__(self, config: IHAConfig):
        config.validate_architecture()  # fields may have been set since the config was built
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([IHADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = IHARotaryEmbedding(config=config)
        # CODEPATH: layers with a window may have separate RoPE parameters, as in Gemma 3.
        self.rotary_emb_sliding = IHARotaryEmbedding(config, "sliding_attention") if config.has_sliding_rope else None
        self.gradient_checkpointing = False
        self.post_init()

    def create_masks(self, inputs_embeds, attention_mask, cache, position_ids=None) -> dict[str, Any]:
        """Return the masks of all layers by their names, for a call that passes them on.

        `position_ids` are those of a call that may be packed, or `None`. Its masks keep the documents apart."""
        rows, tokens = inputs_embeds.shape[:2]
        call = Call(rows, tokens, attention_mask, positions=position_ids)
        return self.masks_of_call(inputs_embeds, call, cache)

    def masks_of_call(self, inputs_embeds: torch.Tensor, call: Call, cache: Cache | None) -> dict[str, Any]:
        """Return the masks of all layers by their names (`mask_name` of their attention).

        `sdpa_in_blocks` needs no mask for documents that the call has as lengths."""
        if max(attention.num_pseudo_heads for attention in self.attention_modules()) > 1:
            keep_window_edge(cache, self.config.sliding_window)  # first, because masks depend on the cache's lengths
        masks: dict[str, Any] = {}
        for attention in self.attention_modules():
            core, num_pseudo_heads = attention.core, attention.num_pseudo_heads
            if attention.mask_name in masks:
                continue
            if call.dense is not None:
                dense = additive(call.dense, inputs_embeds.dtype)
                masks[attention.mask_name] = mask_over_virtual_tokens(dense, num_pseudo_heads)
                continue
            is_told = core == SDPA_IN_BLOCKS and call.documents is not None
            # Transformers makes the masks of tokens by the core's name, and none for a core like vLLM's.
            name = MASK if num_pseudo_heads > 1 or core == SDPA_IN_BLOCKS else core
            masks[attention.mask_name] = CREATE_MASK[attention.layer_type](
                config=View(self.config, _attn_implementation=name, core=core, num_pseudo_heads=num_pseudo_heads),
                inputs_embeds=inputs_embeds,
                attention_mask=call.padding,
                position_ids=None if is_told else call.positions,
                **{CACHE: cache},
            )
        return masks

    def attention_modules(self) -> list[MultiHeadAttention]:
        return [layer.self_attn for layer in self.layers]

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, use_cache=None, **kwargs
    ) -> BaseModelOutputWithPast:
        r"""Run as [`LlamaModel.forward`] does, with every argument in tokens.

        `attention_mask` is [batch, cached + N], a custom one [batch, heads or 1, N, K] that says all that a token
        sees, or the masks of `create_masks`. The `attentions` of "iha" layers are [batch, H, N * P, K * P]."""
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        cache = pop_cache(kwargs)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)

        if isinstance(attention_mask, dict):  # of `create_masks`, which `generate` calls for compilable caches
            masks, packed_positions = attention_mask, position_ids if cache is None else None
        else:
            core = core_for(self.config._attn_implementation)
            backend = Backend.of_model(core, inputs_embeds.dtype, inputs_embeds.device)
            window = self.config.sliding_window or math.inf
            bounds = kwargs.get("cu_seq_lens_q")
            if bounds is not None and position_ids is None:
                raise ValueError("cu_seq_lens_q needs position_ids that restart where documents begin.")
            call = read_call(backend, inputs_embeds, attention_mask, position_ids, cache, bounds, window)
            masks = self.masks_of_call(inputs_embeds, call, cache)
            packed_positions = call.positions
            kwargs |= call.keyword_arguments()
        if position_ids is None:
            past_seen_tokens = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        hidden_states = inputs_embeds
        tables = self.rotary_emb.tables(hidden_states, position_ids)
        position_embeddings = {"full_attention": tables, "sliding_attention": tables}
        if self.rotary_emb_sliding is not None:
            position_embeddings["sliding_attention"] = self.rotary_emb_sliding.tables(hidden_states, position_ids)

        for decoder_layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=masks[decoder_layer.self_attn.mask_name],
                position_embeddings=position_embeddings[decoder_layer.self_attn.layer_type],
                position_ids=packed_positions,
                use_cache=use_cache,
                **{CACHE: cache},
                **kwargs,
            )

        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE: cache})


class IHAForCausalLM(IHAPreTrainedModel, GenerationMixin):
    """Run the decoder with a language modeling head and the forward of [`LlamaForCausalLM`]."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # as in Llama
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    forward = LlamaForCausalLM.forward

    def __init__(self, config: IHAConfig):
        super().__init__(config)
        self.model = IHAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _get_static_cache_init_shape(self):
        """Return `None`: a static cache waits for the first keys and values, which some kinds make unlike Llama."""

    def create_masks_for_generate(self, config, inputs_embeds, attention_mask, position_ids=None, **kwargs):
        """Return the masks of one new token, which a compiled forward needs, and the padding mask of a prompt."""
        if inputs_embeds.shape[1] > 1:
            return attention_mask
        return self.model.create_masks(inputs_embeds, attention_mask, pop_cache(kwargs), position_ids)


class IHATaskHead:
    """Let the generic heads, which call `AutoModel.from_config`, find [`IHAModel`] where this file is remote code."""

    def __init__(self, config: IHAConfig):
        # `register` silently replaces what is there. No public name says if a user has registered a class.
        if type(config) not in AutoModel._model_mapping:
            AutoModel.register(type(config), IHAModel)
        super().__init__(config)  # type: ignore[call-arg]  # the next base class is the generic head


class IHAForSequenceClassification(IHATaskHead, GenericForSequenceClassification, IHAPreTrainedModel): ...


class IHAForTokenClassification(IHATaskHead, GenericForTokenClassification, IHAPreTrainedModel): ...


class IHAForQuestionAnswering(IHATaskHead, GenericForQuestionAnswering, IHAPreTrainedModel): ...


IHAModel.register_for_auto_class("AutoModel")
IHAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
IHAForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
IHAForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
IHAForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
# dill, which `datasets` uses, looks up modules in their package, to which Transformers does not add remote code.
for name in ("configuration_iha", "modeling_iha"):
    setattr(sys.modules[__package__], name, sys.modules[f"{__package__}.{name}"])
