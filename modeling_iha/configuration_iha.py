# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Configure the IHA model: Llama's fields, and each layer's mechanism."""

from copy import deepcopy
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from .transformers_versions import OLDEST  # noqa: F401  # first, so that the error of another version comes first


# isort: split
from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .options_dcmha import CompositionOptions
from .options_diff import DifferentialOptions
from .options_hyper import HyperOptions
from .options_hyper_feature import FeatureOptions
from .options_knocking_heads import KnockingOptions
from .options_paired_heads import PairedHeadsOptions
from .options_pairs import PairOptions


if TYPE_CHECKING:
    # Transformers copies the files of imports, so a configuration that is saved alone brings the model's code too.
    from .modeling_iha import IHAModel  # noqa: F401


# The options of each kind, one to a line. A checkpoint ships the lines of its own kinds.
OPTIONS_CLASSES: dict[str, Any] = {
    "mha": None,
    "iha": None,
    "talking_heads": None,
    "diff": DifferentialOptions,
    "diff_v2": None,
    "knocking_heads": KnockingOptions,
    "hyper_feature": FeatureOptions,
    "hyper": HyperOptions,
    "simplicial": PairOptions,
    "dcmha": CompositionOptions,
    "paired_heads": PairedHeadsOptions,
}
# The classes a checkpoint can be loaded as. Every saved config.json names all of them, whichever class saved it.
AUTO_MAP = {
    "AutoConfig": "configuration_iha.IHAConfig",
    "AutoModel": "modeling_iha.IHAModel",
    "AutoModelForCausalLM": "modeling_iha.IHAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_iha.IHAForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_iha.IHAForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_iha.IHAForQuestionAnswering",
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def expand_pattern(pattern: str | list, num_layers: int) -> list:
    """Repeat one name, or a pattern that fits at least twice. A model of one layer takes the first entry."""
    pattern = [pattern] if isinstance(pattern, str) else list(pattern)
    if pattern and (2 * len(pattern) <= num_layers or num_layers == 1):
        return [pattern[i % len(pattern)] for i in range(num_layers)]
    return pattern  # a list of another length is an error, which `validate_architecture` raises


@strict
class IHAConfig(LlamaConfig):
    r"""
    Configure [`IHAModel`] by the fields of [`LlamaConfig`] and these.

    Args:
        attention_kinds (`str` or `list[str]`, *optional*, defaults to `"iha"`):
            Mechanism of each layer (`OPTIONS_CLASSES` has all): one name, a short repeating pattern, or a list.
        layer_types (`str` or `list[str]`, *optional*, defaults to `"full_attention"`):
            Mask and cache of each layer, `"full_attention"` or `"sliding_attention"`, given as `attention_kinds` is.
        sliding_window (`int`, *optional*):
            Window W of the sliding layers in tokens, the current one included (W * P virtual tokens).
        num_pseudo_heads (`int`, *optional*, defaults to `num_attention_heads`):
            P, the pseudo-heads of each head in `"iha"` layers, and the heads of each group in `"paired_heads"` layers.
        pseudo_positions (`str`, *optional*, defaults to `"interleaved"`):
            RoPE position of pseudo-head p (from 0) of token n: `"interleaved"` is n * P + p, as in the paper, and
            `"shared"` is n, for models that were pretrained with it.
        pseudo_collapse (`str`, *optional*, defaults to `"per_head"`):
            Map R to heads: `"per_head"` is [H, P] (Algorithm 1), `"all_heads"` is [H, H * P] (Definition 3).
        mixing_scale (`float`, *optional*, defaults to 1.0):
            Factor on the optimizer's rate for the mixing of a new model (mixing.py). A checkpoint keeps its own.
        recompute_virtual_tokens (`bool`, *optional*):
            `True` makes virtual tokens again in the backward pass, `False` keeps them. By default they are made again
            on a GPU where those of all layers would take a quarter of the memory.
        gated_mlp (`bool`, *optional*, defaults to `True`):
            `True` for Llama's gated three-matrix FFN, `False` for the paper's two-matrix FFN.
        mlp_gate_groups (`int`, *optional*):
            Number of groups of FFN channels that a softmax over the groups scales, as in released DCFormers.
        use_qk_norm (`bool`, *optional*, defaults to `False`):
            `True` for an RMSNorm over each head's query and key, before RoPE and the mixing (as in Qwen3).
        output_gate (`str`, *optional*):
            Sigmoid gates of the layer's input on the output of heads, `"elementwise"` or `"per_head"`.
        exclusive_attention (`bool`, *optional*, defaults to `False`):
            `True` leaves out of the output of each head what is along its value of the same token (XSA).
        rope_parameters (`dict`, *optional*):
            RoPE of all layers, or `{"full_attention": {...}, "sliding_attention": {...}}`, as in Gemma 3.
        no_rope_layers (`list[int]`, *optional*):
            One entry per layer, or a short repeating pattern such as `[1, 1, 1, 0]`: 0 for a layer without RoPE.
        attention_options (`dict[str, dict]`, *optional*):
            Options of single mechanisms, `{kind: {option: value}}`, the fields of the class in `OPTIONS_CLASSES`.
    """

    model_type = "iha"
    # Only the FFN: a column shard of q, k or v would hold some heads, and the mixing needs all of them.
    base_model_tp_plan = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    # A checkpoint may ship without "iha", and Transformers sometimes builds a config of nothing but defaults.
    attention_kinds: str | list[str] = "iha" if "iha" in OPTIONS_CLASSES else next(iter(OPTIONS_CLASSES))
    layer_types: str | list[str] | None = None
    num_pseudo_heads: int | None = None
    sliding_window: int | None = None
    pseudo_positions: Literal["interleaved", "shared"] = "interleaved"
    pseudo_collapse: Literal["per_head", "all_heads"] = "per_head"
    mixing_scale: float | int = 1.0
    recompute_virtual_tokens: bool | None = None
    gated_mlp: bool = True
    mlp_gate_groups: int | None = None
    use_qk_norm: bool = False
    output_gate: Literal["elementwise", "per_head"] | None = None
    exclusive_attention: bool = False
    rope_parameters: dict | None = None
    no_rope_layers: list[int] | None = None
    attention_options: dict | None = None

    def __post_init__(self, **kwargs):
        for name in kwargs.keys() - self.__dataclass_fields__ - {"use_sliding_window"}:  # unknown, but for Qwen2's
            if nearest := get_close_matches(name, self.__dataclass_fields__, n=1, cutoff=0.85):
                raise ValueError(f"There is no field {name!r}; did you mean {nearest[0]!r}?")
        self.attention_kinds = expand_pattern(self.attention_kinds, self.num_hidden_layers)
        self.layer_types = expand_pattern(self.layer_types or "full_attention", self.num_hidden_layers)
        self.no_rope_layers = expand_pattern(self.no_rope_layers or [1], self.num_hidden_layers)
        self.num_pseudo_heads = self.num_attention_heads if self.num_pseudo_heads is None else self.num_pseudo_heads
        self.attention_options = {} if self.attention_options is None else self.attention_options
        self.rope_parameters = deepcopy(self.rope_parameters)  # Transformers completes it in place
        super().__post_init__(**kwargs)
        if self.mlp_gate_groups is not None:
            self.base_model_tp_plan = {}  # a gate scales whole groups of channels, which a column shard would cut
        if self.has_sliding_rope:  # to which Transformers 5.17 adds a `rope_theta` that nothing would read
            self.rope_parameters.pop("rope_theta", None)

    def validate_architecture(self):
        """Raise a ValueError for fields from which no model can be built, or that would silently have no effect."""
        if self.num_pseudo_heads < 1 or not self.mixing_scale > 0:
            given = f"num_pseudo_heads={self.num_pseudo_heads} and mixing_scale={self.mixing_scale}"
            raise ValueError(f"{given} must be above 0.")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads="
                f"{self.num_attention_heads}."
            )
        if self.head_dim % 2 != 0:
            raise ValueError(
                f"head_dim={self.head_dim} must be even. By default it is hidden_size={self.hidden_size} over "
                f"num_attention_heads={self.num_attention_heads}."
            )
        lists = {"attention_kinds": OPTIONS_CLASSES, "layer_types": LAYER_TYPES, "no_rope_layers": (0, 1)}
        for field, allowed in lists.items():
            entries = getattr(self, field)
            if len(entries) != self.num_hidden_layers or any(entry not in allowed for entry in entries):
                raise ValueError(
                    f"{field} has {len(entries)} entries, of {', '.join(map(repr, dict.fromkeys(entries)))}: expected "
                    f"one per layer ({self.num_hidden_layers}), or a pattern that repeats at least twice, of "
                    f"{', '.join(map(repr, allowed))}."
                )
        slides = "sliding_attention" in self.layer_types
        if slides != (self.sliding_window is not None) or (slides and self.sliding_window < 2):
            raise ValueError(
                f"sliding_window={self.sliding_window} with the layer_types {sorted(set(self.layer_types))}: expected "
                "at least 2 tokens where a layer is of type 'sliding_attention', and None elsewhere."
            )
        if self.has_sliding_rope and not set(self.rope_parameters) == set(self.layer_types) == set(LAYER_TYPES):
            raise ValueError(
                f"rope_parameters={self.rope_parameters}: expected one set of parameters or, in a model with both "
                f"layer types, one set for each of {', '.join(map(repr, LAYER_TYPES))} and no other key."
            )
        for kind in dict.fromkeys((*self.attention_options, *self.attention_kinds)):
            if OPTIONS_CLASSES.get(kind) is not None:
                options = self.options_of(kind)
                if kind in self.attention_kinds:
                    options.check(self, kind)
            elif self.attention_options.get(kind):
                raise ValueError(f"attention_options has {self.attention_options}: {kind!r} has no options.")

    @property
    def has_sliding_rope(self) -> bool:
        """Return whether the layers with a window have RoPE parameters of their own."""
        return any(name in LAYER_TYPES for name in self.rope_parameters or ())

    def rope_of(self, layer_type: str) -> dict:
        """Return the RoPE parameters of the layers of a type."""
        return self.rope_parameters[layer_type] if self.has_sliding_rope else self.rope_parameters

    def options_of(self, kind: str) -> Any:
        """Return the options of an attention kind, an instance of its class in `OPTIONS_CLASSES`."""
        return OPTIONS_CLASSES[kind](**self.attention_options.get(kind, {}))

    def to_dict(self) -> dict:
        # Keep a user's entries, but not those of a repository of the Hub, whose names have "--".
        given = getattr(self, "auto_map", None) or {}
        others = {auto: name for auto, name in given.items() if "--" not in name and name not in AUTO_MAP.values()}
        return {**super().to_dict(), "auto_map": AUTO_MAP | others}


IHAConfig.register_for_auto_class()
