"""Describe the architectures that are a Llama with other settings and the same weights, one row each.

Check the fields of a source config, and read its windows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import (
    LlamaForCausalLM,
    MinistralForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)

from iha.errors import UserError
from iha.kinds import is_interleaved


# Config fields that have the same name and meaning in IHA and in all architectures that are converted by them.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
)
# Fields that no forward pass reads: those of Transformers' base class, and others that published checkpoints have.
FIELDS_WITHOUT_EFFECT = {
    *PreTrainedConfig().to_dict(),
    "head_dim",
    "is_llama_config",
    "model_max_length",
    "pretraining_tp",
    "transformers.js_config",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
}


@dataclass(frozen=True)
class Architecture:
    """Say how a Transformers architecture differs from Llama.

    Attributes:
        attention_bias, mlp_bias (`bool` or `str`): what the architecture fixes, or the config field that adds the
            biases. A bias that only the converted model has is zero.
        use_qk_norm (`bool`): as in `IHAConfig`.
        lacks (`tuple[str, ...]`): biases of the attention that this architecture never has.
        fields (`tuple[str, ...]`): further config fields that the conversion carries over.
    """

    model_class: type[PreTrainedModel]
    attention_bias: bool | str = False
    mlp_bias: bool | str = False
    use_qk_norm: bool = False
    lacks: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    @property
    def known_fields(self) -> tuple[str, ...]:
        """Return the config fields, besides the shared ones, that may be set."""
        return (*(name for name in (self.attention_bias, self.mlp_bias) if isinstance(name, str)), *self.fields)

    def settings(self, config: PreTrainedConfig) -> dict[str, bool]:
        """Return the fields of the converted model's config in which architectures differ."""
        fields = {name: getattr(self, name) for name in ("attention_bias", "mlp_bias", "use_qk_norm")}
        return {name: getattr(config, value) if isinstance(value, str) else value for name, value in fields.items()}


_LLAMA_BIASES: dict[str, Any] = {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_QWEN_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

# By model_type. `convert_iha_to_llama.py` takes the first row that fits.
ARCHITECTURES = {
    "qwen2": Architecture(Qwen2ForCausalLM, attention_bias=True, lacks=("o_proj.bias",), fields=_QWEN_WINDOWS),
    "llama": Architecture(LlamaForCausalLM, **_LLAMA_BIASES),
    "mistral": Architecture(MistralForCausalLM, fields=("sliding_window",)),
    "ministral": Architecture(MinistralForCausalLM, fields=("sliding_window", "layer_types")),
    "qwen3": Architecture(Qwen3ForCausalLM, attention_bias="attention_bias", use_qk_norm=True, fields=_QWEN_WINDOWS),
    "smollm3": Architecture(
        SmolLM3ForCausalLM, **_LLAMA_BIASES, fields=(*_QWEN_WINDOWS, "no_rope_layers", "no_rope_layer_interval")
    ),
}


def check_fields(config: PreTrainedConfig, fields: Iterable[str]) -> None:
    """Reject a source config that sets a field which is neither shared nor one of its architecture's `fields`.

    Such a field could change what the model computes. Raise a `UserError` that names it.
    """
    check_known(config.to_dict(), {*SHARED_FIELDS, *fields, *FIELDS_WITHOUT_EFFECT})


def check_known(entries: dict, known: set[str]) -> None:
    """Raise a `UserError` that names the first field of a source config that is set and not `known`."""
    if entries.get("quantization_config"):
        raise UserError("The weights of the source are quantized: convert the checkpoint from which they were made.")
    for field, value in entries.items():
        is_set = bool(value)  # an extension that is switched off changes nothing
        if field == "is_causal":
            is_set = value is False  # which takes the causal mask away
        if is_set and field not in known and not field.startswith("_"):
            advice = "If it does not change the model's output, remove it from config.json"
            raise UserError(f"The source config sets {field}={value!r}, which no conversion here knows. {advice}.")


def architecture_of(config: PreTrainedConfig) -> Architecture:
    """Return the row of `ARCHITECTURES` for a source config.

    Raise a `UserError` that names a field which could change what the model computes and is not carried over.
    """
    if is_interleaved(config):
        raise UserError("The heads of the source are interleaved already: convert its base (remove_interleaving).")
    if config.model_type == "iha":
        raise UserError("The source is an 'iha' checkpoint already: convert the model that it was made from.")
    if config.model_type == "diffllama":
        raise UserError(
            "The source is a 'diffllama': use `python -m conversion_scripts.convert_diffllama_to_iha` in a checkout."
        )
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"The architecture {config.model_type!r} cannot be converted: its weights are not those of Llama, as "
            f"those of {', '.join(ARCHITECTURES)} are. `interleave_heads` (from modeling_iha import interleave_heads) "
            "interleaves the heads of most decoders and keeps their own class (docs/MODEL_TYPES.md)."
        )
    architecture = ARCHITECTURES[config.model_type]
    check_fields(config, architecture.known_fields)
    return architecture


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the window of each layer in tokens, or `None` for a layer over all tokens."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None) is None:
        return [window] * config.num_hidden_layers
    windows = {"full_attention": None, "sliding_attention": window}
    for layer_type in config.layer_types:
        if layer_type not in windows:
            raise UserError(f"layer_types holds {layer_type!r}; expected {' or '.join(map(repr, windows))}.")
    return [windows[layer_type] for layer_type in config.layer_types]


def rope_layers(config: PreTrainedConfig) -> list[int]:
    """Return 1 for each layer with RoPE and 0 for each without."""
    layers = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    return [int(layer != 0) for layer in layers[: config.num_hidden_layers]]


def exact_length(source_config: PreTrainedConfig, config: PreTrainedConfig) -> int | None:
    """Return the longest sequence, in tokens, for which a conversion is exact, or `None` for any length.

    A layer agrees with its source while the smaller of the two windows covers the sequence: in a sliding "iha" layer
    the last pseudo-head of token n sees all pseudo-heads of the tokens n - W + 1 .. n and nothing else.
    """
    pairs = (
        windows_in_place(source_config, config) if is_interleaved(config) else windows_of_both(source_config, config)
    )
    limits = [min(window for window in pair if window) for pair in pairs if pair[0] != pair[1]]
    return min(limits, default=None)


def windows_of_both(source_config: PreTrainedConfig, config: PreTrainedConfig) -> list[tuple[int | None, int | None]]:
    """Return the windows of each layer before and after a conversion."""
    return list(zip(layer_windows(source_config), layer_windows(config)))


def windows_in_place(source_config: PreTrainedConfig, config: PreTrainedConfig) -> list[tuple[int | None, int | None]]:
    """Return the windows before and after `interleave_heads`: the base's own, and that of the interleaved layers."""
    before, after = (each.get_text_config(decoder=True) for each in (source_config, config))
    own = getattr(before, "sliding_window", None), getattr(after, "sliding_window", None)
    return [own, (None, after.interleaved_window)]
