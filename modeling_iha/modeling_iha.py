# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Define Llama with an attention mechanism chosen per layer, by default Interleaved Head Attention (IHA)."""

import sys
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching import PagedAttentionCache
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

from .attention_kinds import ATTENTION_CLASSES
from .attention_mha import MultiHeadAttention
from .cache_names import CACHE, takes_cache
from .configuration_iha import IHAConfig
from .interleaving import token_attentions
from .masks import check_inputs, make_masks
from .mixing import set_initial_scale
from .mixing_scale import note_scale
from .paged_requests import PagedRequests, init_requests
from .virtual_masks import check_causal


# Trainer's label smoothing and `pipeline` look up causal models here, and no public function adds one. Two copies of
# this code write the same entry.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["iha"] = "IHAForCausalLM"


class IHARotaryEmbedding(LlamaRotaryEmbedding):
    """Compute Llama's rotary tables and those of interleaved virtual positions, for the layers of one type."""

    def __init__(self, config: IHAConfig, layer_type: str = "full_attention"):
        # CODEPATH: layers with a window may have RoPE parameters of their own, and Llama's table knows one set.
        if config.has_sliding_rope:
            rope_parameters = config.rope_of(layer_type)
            config = copy(config)  # the caller's keeps the parameters of both layer types
            config.rope_parameters = rope_parameters
        super().__init__(config)
        self.num_pseudo_heads = config.num_pseudo_heads
        interleaved = config.pseudo_positions == "interleaved"
        # The plugin for vLLM reads and sets these two, also in an older copy of this code.
        self.mixed = interleaved and "iha" in config.attention_kinds
        self.paired = interleaved and "paired_heads" in config.attention_kinds

    def _apply(self, fn, recurse=True):
        """Move the frequencies and keep them in float32.

        `model.to(torch.bfloat16)` would round them, and the angles at position 1000 would be off by radians."""

        def move(buffer: torch.Tensor) -> torch.Tensor:
            moved = fn(buffer)
            return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)

        return super()._apply(move, recurse)

    def tables(self, x: torch.Tensor, position_ids: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the (cos, sin) tables for token positions n, `position_ids` [batch, N], in the dtype of `x`.

        - `"token"` is at n, [batch, N, head_dim].
        - `"interleaved"` is at n * P, [batch, N, head_dim], and `"pseudo_head"` at p, [P, head_dim]. "iha" layers with
          interleaved positions rotate by both, one after the other.
        - `"paired"` is at n * P + p, [batch, P, N, head_dim], for layers of paired heads with interleaved positions.

        All but `"pseudo_head"` include `attention_scaling`. RoPE types that depend on the length count it in
        tokens."""
        # First, because such types update inv_freq in this call, and `_table` reads it.
        tables = {"token": self(x, position_ids)}
        first = position_ids * self.num_pseudo_heads  # n * P
        pseudo_heads = torch.arange(self.num_pseudo_heads, device=x.device)  # p
        if self.mixed:
            tables["interleaved"] = self._table(first, x, self.attention_scaling)
            tables["pseudo_head"] = self._table(pseudo_heads, x)
        if self.paired:
            tables["paired"] = self._table(first[:, None] + pseudo_heads[:, None], x, self.attention_scaling)
        return tables

    @torch.no_grad()
    def _table(
        self, positions: torch.Tensor, x: torch.Tensor, scaling: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) for positions of any shape, each [*positions.shape, head_dim], times `scaling`."""
        # At n * P near a million a float32 angle is off by 0.03 rad. (MPS has no float64.)
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        angles = positions[..., None].to(dtype) * self.inv_freq.to(x.device, dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)


class IHAMLP(LlamaMLP):
    """Apply Llama's FFN or, without `gated_mlp`, the two-matrix FFN of the paper's models (IHA, Section 5.1).

    With `mlp_gate_groups` a softmax over groups of channels scales each group, as in the "mgate" FFN of the released
    DCFormers."""

    def __init__(self, config: IHAConfig):
        super().__init__(config)
        # CODEPATH: the paper's 2.4B models and GPT-3 small have two matrices; converted Llamas and DCFormers have
        # three.
        if not config.gated_mlp:
            del self.gate_proj
        # CODEPATH: released DCFormers ("mgate").
        if config.mlp_gate_groups is not None:
            self.group_gate = nn.Linear(config.hidden_size, config.mlp_gate_groups, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        channels = self.up_proj(x)
        # CODEPATH: as in __init__.
        if self.config.gated_mlp:
            channels = self.act_fn(self.gate_proj(x)) * channels
        else:
            channels = self.act_fn(channels)
        # CODEPATH: released DCFormers ("mgate").
        if self.config.mlp_gate_groups is not None:
            scores = self.group_gate(x)
            gate = torch.softmax(scores.float(), dim=-1).to(scores.dtype)
            channels = (channels.unflatten(-1, (gate.shape[-1], -1)) * gate.unsqueeze(-1)).flatten(-2)
        return self.down_proj(channels)


class IHADecoderLayer(LlamaDecoderLayer):
    """Run Llama's decoder layer with this layer's kind of attention and the config's FFN."""

    self_attn: MultiHeadAttention

    def __init__(self, config: IHAConfig, layer_idx: int):
        nn.Module.__init__(self)  # Llama's would first build the attention and FFN that are replaced here
        self.hidden_size = config.hidden_size

        self.self_attn = ATTENTION_CLASSES[config.attention_kinds[layer_idx]].for_layer(config, layer_idx)
        self.mlp = IHAMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class IHAPreTrainedModel(LlamaPreTrainedModel):
    """Hold what all IHA models share: initialization, saving, and attention maps over tokens."""

    config_class = IHAConfig
    config: IHAConfig
    _no_split_modules = ["IHADecoderLayer"]
    _can_record_outputs = {"hidden_states": IHADecoderLayer, "attentions": MultiHeadAttention}

    # Checkpoints of earlier versions lack what `Mixing.init_weight` then sets.
    _keys_to_ignore_on_load_missing = [r"\.(weight|up|gate|down)_(start|scale)$"]

    def token_attentions(self, attentions: tuple[torch.Tensor, ...], num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Return attention maps over tokens, [batch, H, N, K], of a call with `num_tokens` tokens N.

        Maps over virtual tokens are summed over the P of a key and averaged over the P of a query. In a layer of
        paired heads each virtual query belongs to one head, so the rows are returned to their heads and not averaged.
        Other maps stay as they are."""
        layers = [module for module in self.modules() if isinstance(module, MultiHeadAttention)]
        # Transformers leaves out layers that give no weights.
        kinds = [self.config.attention_kinds[layer.layer_idx] for layer in layers if layer.gives_weights]
        kinds = kinds[: len(attentions)]  # more if `num_hidden_layers` was lowered
        paired = [kind == "paired_heads" for kind in kinds]
        return token_attentions(attentions, num_tokens, paired)

    @classmethod
    def is_backend_compatible(cls) -> bool:
        """Return False, so that vLLM and SGLang do not run the model on their own attention and paged cache.

        Their cache holds one key per token. An "iha" layer has P pseudo-keys per token and caches none of them."""
        return False

    def save_pretrained(self, *args, **kwargs):
        note_scale(self, [self.config])
        return super().save_pretrained(*args, **kwargs)

    def _init_weights(self, module: nn.Module):
        """Initialize as Llama does, and call `init_mechanism` of a mechanism's own modules.

        Matrices are normal with `initializer_range`, norms are 1 and biases 0. In an "iha" layer the mixing starts as
        the identity with noise of `initializer_range` on each entry (`HeadMixing`), and the collapse as the mean over
        pseudo-heads (`HeadCollapse`). The files of the other kinds say how those start."""
        super()._init_weights(module)
        init_mechanism = getattr(module, "init_mechanism", None)
        if init_mechanism is not None:
            init_mechanism(self.config)


class IHAModel(IHAPreTrainedModel):
    """Run the decoder: token embedding, layers and final norm."""

    def __init__(self, config: IHAConfig):
        if not hasattr(config, "attention_kinds"):
            raise ValueError(
                f"{type(config).__name__} is not an IHAConfig: build one, or convert the model (`iha convert`)."
            )
        config.validate_architecture()  # fields may have been set since the config was built
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([IHADecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = IHARotaryEmbedding(config=config)
        # CODEPATH: layers with a window may have RoPE parameters of their own, as in Gemma 3.
        self.rotary_emb_sliding = IHARotaryEmbedding(config, "sliding_attention") if config.has_sliding_rope else None
        self.gradient_checkpointing = False
        set_initial_scale(self, config.mixing_scale)
        self.post_init()

    @property
    def runs_on_paged_cores(self) -> bool:
        """Return whether Transformers' paged cores compute this model: all layers are "mha" with full attention."""
        return set(zip(self.config.attention_kinds, self.config.layer_types)) == {("mha", "full_attention")}

    def create_masks(
        self, inputs_embeds, attention_mask, cache, position_ids, default_positions=False, **kwargs
    ) -> dict[str, Any]:
        """Return the mask of each layer type, after `check_inputs`. `kwargs` of the forward may declare documents."""
        given_positions = None if default_positions else position_ids
        check_inputs(self.config, inputs_embeds, attention_mask, cache, given_positions, **kwargs)
        convolving = next((layer for layer in self.layers if layer.self_attn.convolves), None)
        if convolving is not None:
            convolving.self_attn.check_holes(attention_mask)
        return make_masks(self.config, inputs_embeds, attention_mask, cache, position_ids, default_positions)

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | PagedAttentionCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        r"""Run as [`LlamaModel.forward`] does, with every argument in tokens.

        `attention_mask` is [batch, cached + N], [batch, heads or 1, N, K] (see `make_masks`), or a mask of
        `create_masks` for each layer type. Layers with virtual heads give `attentions` over virtual tokens: see
        `token_attentions`."""
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")

        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)

        default_positions = position_ids is None
        if default_positions:
            past_seen_tokens = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        has_pages = isinstance(cache, PagedAttentionCache)  # those of continuous batching
        # With pages Transformers sets is_causal=False, because the packed row is not causal (paged_requests.py).
        if not has_pages:
            check_causal(self.config, **kwargs)
        if has_pages and not self.runs_on_paged_cores:
            requests = PagedRequests(self, cache, position_ids=position_ids, **kwargs)
            masks = dict.fromkeys(self.config.layer_types, requests.attention_mask)
            kwargs["paged_requests"] = requests
            cache = None  # the requests hold the pages
        elif isinstance(attention_mask, dict):  # `generate` prepares the masks itself for compilable caches.
            masks = attention_mask
        else:
            past = None if has_pages else cache  # pages have no length to ask for
            masks = self.create_masks(inputs_embeds, attention_mask, past, position_ids, default_positions, **kwargs)

        hidden_states = inputs_embeds
        tables = self.rotary_emb.tables(hidden_states, position_ids)
        position_embeddings = {"full_attention": tables, "sliding_attention": tables}
        if self.rotary_emb_sliding is not None:
            position_embeddings["sliding_attention"] = self.rotary_emb_sliding.tables(hidden_states, position_ids)

        for decoder_layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=masks[decoder_layer.self_attn.layer_type],
                position_embeddings=position_embeddings[decoder_layer.self_attn.layer_type],
                position_ids=position_ids,
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
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def init_continuous_batching(self, *args, **kwargs):
        """Start continuous batching as [`GenerationMixin`] does (see `init_requests`).

        Raise a NotImplementedError for a kind that caches more than Llama. A model that runs on Transformers' paged
        cores takes CUDA graphs and compilation too."""
        if self.model.runs_on_paged_cores:
            return super().init_continuous_batching(*args, **kwargs)
        others = [layer.self_attn for layer in self.model.layers if not layer.self_attn.caches_like_llama]
        if others:
            kinds = sorted({repr(self.config.attention_kinds[attention.layer_idx]) for attention in others})
            raise NotImplementedError(
                "Continuous batching (generate_batch, transformers serve --continuous-batching) keeps one key and one "
                f"value per token and head, and layers of kind {' and '.join(kinds)} cache more. Use generate, which "
                "takes batches too."
            )
        return init_requests(super().init_continuous_batching.__func__, self, self.model, *args, **kwargs)

    def _get_static_cache_init_shape(self):
        """Return the shape in which [`GenerationMixin`] allocates static caches before a chunked prefill.

        It is `None` for a kind that caches more than Llama: the cache then waits for the first keys and values."""
        if not all(layer.self_attn.caches_like_llama for layer in self.model.layers):
            return None
        return super()._get_static_cache_init_shape()

    @takes_cache
    def create_masks_for_generate(
        self, config, inputs_embeds, attention_mask, cache=None, position_ids=None, **kwargs
    ):
        """Return the masks for a forward with a compilable cache; `generate` calls this before the forward.

        For one token the masks are made here, because the compiled forward must receive tensors. For a prompt the
        forward makes them."""
        if inputs_embeds.shape[1] > 1:
            return attention_mask
        return self.model.create_masks(inputs_embeds, attention_mask, cache, position_ids)


class IHATaskHead:
    """Let the generic heads of Transformers find [`IHAModel`] where this file is remote code.

    The heads build their decoder with `AutoModel.from_config`. A config loaded from a directory is of another class
    than the one imported above."""

    def __init__(self, config: IHAConfig):
        # `register` replaces what is there, without a word. No public name says if a user has registered a class.
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
# Transformers adds modules of remote code to `sys.modules`, but not to their package. dill, which `datasets` uses,
# looks them up there.
for name in ("configuration_iha", "modeling_iha"):
    setattr(sys.modules[__package__], name, sys.modules[f"{__package__}.{name}"])
