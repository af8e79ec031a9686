"""Describe the architectures that are Llama up to a fold of their weights, one row each, and the folds."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    ArceeForCausalLM,
    Ernie4_5ForCausalLM,
    GraniteForCausalLM,
    HeliumForCausalLM,
    LlamaForCausalLM,
    MinistralForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SeedOssForCausalLM,
    SmolLM3ForCausalLM,
)

from common.command_io import UserError
from conversion_scripts.conversion import check_fields
from modeling_iha import IHAConfig


Weights = dict[str, torch.Tensor]


def _fold_multipliers(weights: Weights, config: IHAConfig, source: PreTrainedConfig) -> None:
    """Multiply Granite's four multipliers into the weights.

    The final norm takes the scale of the logits, and that of a tied embedding, which therefore stays tied.
    """
    tied = source.embedding_multiplier if source.tie_word_embeddings else 1
    factors = {
        "embed_tokens": source.embedding_multiplier,
        "q_proj": source.attention_multiplier * math.sqrt(config.head_dim),
        "o_proj": source.residual_multiplier,
        "down_proj": source.residual_multiplier,
        "norm": 1 / (source.logits_scaling * tied),
    }
    for name, tensor in weights.items():
        if (factor := factors.get(name.split(".")[-2])) is not None:
            weights[name] = (tensor.double() * factor).to(tensor.dtype)
    if source.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    dtype = weights["model.norm.weight"].dtype
    if dtype.itemsize < 4 and any(abs(math.frexp(factor)[0]) != 0.5 for factor in factors.values()):
        print(
            f"Multipliers that are no powers of two round the weights in {dtype}: convert with --dtype float32 for a "
            "conversion that is exact.",
            file=sys.stderr,
        )


def _split_fused_projections(weights: Weights, config: IHAConfig, source: PreTrainedConfig) -> None:
    """Split Phi-3's fused projections into views of their rows."""
    keys = config.num_key_value_heads * config.head_dim
    fused = {
        "qkv_proj": {"q_proj": config.num_attention_heads * config.head_dim, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }
    for name in list(weights):
        module = name.split(".")[-2]
        if (parts := fused.get(module)) is not None:
            for part, rows in zip(parts, weights.pop(name).split(list(parts.values()))):
                weights[name.replace(module, part)] = rows


def _rotate_halves(weights: Weights, config: IHAConfig, source: PreTrainedConfig) -> None:
    """Reorder each head's rows of q_proj and k_proj, which RoPE rotates in pairs (2i, 2i + 1), to Llama's halves."""
    for name, tensor in weights.items():
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            weights[name] = tensor.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Architecture:
    """Say how a Transformers architecture differs from Llama.

    Attributes:
        attention_bias, mlp_bias (`bool` or `tuple[str, ...]`): what the architecture fixes, or the config fields of
            which any one adds the biases. A bias that only the converted model has is zero.
        use_qk_norm, gated_mlp (`bool`): as in `IHAConfig`.
        lacks (`tuple[str, ...]`): parameters of a layer that this architecture never has.
        fields (`tuple[str, ...]`): further config fields that the conversion carries over or folds, or that act in
            training only.
        fold: changes a dict of weights, given the new and the source config, until Llama computes the same from them.
            `None` if the architecture has Llama's parameters.
    """

    model_class: type[PreTrainedModel]
    attention_bias: bool | tuple[str, ...] = False
    mlp_bias: bool | tuple[str, ...] = False
    use_qk_norm: bool = False
    gated_mlp: bool = True
    lacks: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    fold: Callable[[Weights, IHAConfig, PreTrainedConfig], None] | None = None

    @property
    def known_fields(self) -> tuple[str, ...]:
        """Return the config fields, beside the shared ones, that may be set."""
        return sum((names for names in (self.attention_bias, self.mlp_bias) if isinstance(names, tuple)), self.fields)

    def settings(self, config: PreTrainedConfig) -> dict[str, bool]:
        """Return the fields of the converted model's config in which architectures differ."""

        def decide(value: bool | tuple[str, ...]) -> bool:
            return any(getattr(config, name, False) for name in value) if isinstance(value, tuple) else value

        return {
            "attention_bias": decide(self.attention_bias),
            "mlp_bias": decide(self.mlp_bias),
            "use_qk_norm": self.use_qk_norm,
            "gated_mlp": self.gated_mlp,
        }


_LLAMA_BIASES: dict[str, Any] = {"attention_bias": ("attention_bias",), "mlp_bias": ("mlp_bias",)}
_QWEN_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")

# By model_type. `convert_iha_to_llama.py` takes the first row without a fold that fits.
ARCHITECTURES = {
    "qwen2": Architecture(
        Qwen2ForCausalLM, attention_bias=True, lacks=("self_attn.o_proj.bias",), fields=_QWEN_WINDOWS
    ),
    "llama": Architecture(LlamaForCausalLM, **_LLAMA_BIASES),
    "mistral": Architecture(MistralForCausalLM, fields=("sliding_window",)),
    "ministral": Architecture(MinistralForCausalLM, fields=("sliding_window", "layer_types")),
    "qwen3": Architecture(
        Qwen3ForCausalLM, attention_bias=("attention_bias",), use_qk_norm=True, fields=_QWEN_WINDOWS
    ),
    "smollm3": Architecture(
        SmolLM3ForCausalLM, **_LLAMA_BIASES, fields=(*_QWEN_WINDOWS, "no_rope_layers", "no_rope_layer_interval")
    ),
    # After the others that the way back may give, because its config refuses some that they allow.
    "arcee": Architecture(ArceeForCausalLM, **_LLAMA_BIASES, gated_mlp=False),
    "seed_oss": Architecture(
        SeedOssForCausalLM,
        attention_bias=("attention_bias", "attention_out_bias"),
        mlp_bias=("mlp_bias",),
        fields=("residual_dropout",),
    ),
    "granite": Architecture(GraniteForCausalLM, **_LLAMA_BIASES, fields=_MULTIPLIERS, fold=_fold_multipliers),
    "phi3": Architecture(
        Phi3ForCausalLM,
        # `rope_parameters` repeats two of them, and the released `auto_map` names an older copy of this class.
        fields=(
            *("sliding_window", "resid_pdrop", "embd_pdrop"),
            *("partial_rotary_factor", "original_max_position_embeddings", "auto_map"),
        ),
        fold=_split_fused_projections,
    ),
    "ernie4_5": Architecture(
        Ernie4_5ForCausalLM, attention_bias=("use_bias",), mlp_bias=("use_bias",), fold=_rotate_halves
    ),
    "helium": Architecture(HeliumForCausalLM, **_LLAMA_BIASES, fold=_rotate_halves),
}

# Start of a model_type -> why no fold makes it a Llama.
REFUSED = {
    "olmo2": "its norms follow the sublayers, and its QK-norm spans all heads",
    "olmo3": "its norms follow the sublayers, and its QK-norm spans all heads",
    "gemma": "its norms scale by 1 + weight, and from Gemma 2 on more norms follow the sublayers",
    "cohere": "attention and FFN of a layer run side by side on one LayerNorm",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_source(config: PreTrainedConfig) -> Architecture:
    """Return the row of `ARCHITECTURES` for a source config.

    Raise a `UserError` that names a field which could change what the model computes and is not carried over.
    """
    if config.model_type not in ARCHITECTURES:
        reasons = [reason for start, reason in REFUSED.items() if config.model_type.startswith(start)]
        if any(getattr(config, name, None) for name in _EXPERTS):
            reasons = ["its FFN is a mixture of experts"]
        raise UserError(
            f"The architecture {config.model_type!r} cannot be converted{': '.join(['', *reasons])}. Supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    architecture = ARCHITECTURES[config.model_type]
    check_fields(config, architecture.known_fields)
    for name in architecture.fields:
        if name in _MULTIPLIERS and not 0 < abs(getattr(config, name)) < math.inf:
            raise UserError(
                f"The source config has {name}={getattr(config, name)!r}; it must be a finite number other than 0."
            )
    return architecture


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the window of each layer in tokens, or `None` for a layer over all tokens."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) is None:
        return [window] * config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": window}
    for layer_type in config.layer_types:
        if layer_type not in windows:
            raise UserError(
                f"layer_types holds {layer_type!r}; this conversion knows {', '.join(map(repr, windows))}."
            )
    return [windows[layer_type] for layer_type in config.layer_types]


def rope_layers(config: PreTrainedConfig) -> list[int]:
    """Return 1 for each layer with RoPE and 0 for each without."""
    layers = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    return [int(layer != 0) for layer in layers[: config.num_hidden_layers]]


def caveat(config: PreTrainedConfig) -> str:
    """Return a sentence on what a conversion does not keep, or an empty string."""
    if config.model_type != "phi3" or config.rope_parameters["rope_type"] != "longrope":
        return ""
    length = config.rope_parameters["original_max_position_embeddings"]
    return (
        f" Where `generate` crosses {length} tokens, Transformers' Phi-3 fills its cache again for the frequencies of "
        "long texts; the converted model keeps the cached keys, as a Llama with longrope does."
    )


def fold(weights: Weights, config: IHAConfig, source: PreTrainedConfig) -> Weights:
    """Return the weights under Llama's names from which Llama computes what the source does.

    Args:
        weights: the source's tensors by name; the result shares those that no fold changes.
        config: of the converted model.
        source: config of the source.
    """
    weights = dict(weights)
    if (change := ARCHITECTURES[source.model_type].fold) is not None:
        change(weights, config, source)
    if config.attention_bias:
        for name in [name for name in weights if ".self_attn." in name and name.endswith("_proj.weight")]:
            weight = weights[name]
            weights.setdefault(f"{name.removesuffix('weight')}bias", torch.zeros(len(weight), dtype=weight.dtype))
    return weights
