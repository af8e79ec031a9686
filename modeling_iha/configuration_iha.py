# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Configure the IHA model: Llama's fields, and each layer's mechanism. The folder `configuration_iha` has presets."""

from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers.models.llama.configuration_llama import LlamaConfig

from .options import KindOptions
from .options_dcmha import CompositionOptions
from .options_diff import DifferentialOptions
from .options_gated import GateOptions
from .options_hyper import HyperOptions
from .options_hyper_feature import FeatureOptions
from .options_knocking_heads import KnockingOptions
from .options_paired_heads import PairedHeadsOptions
from .options_pairs import PairOptions
from .transformers_versions import OLDEST  # noqa: F401  # before other imports, so that its error comes first


if TYPE_CHECKING:
    # Transformers copies every file that an import names, also here. A configuration that is saved without a model, as
    # mergekit does, then brings the model's code too.
    from .modeling_iha import IHAModel  # noqa: F401


# The options of each kind, one to a line. A checkpoint ships the lines of its own kinds.
OPTIONS_CLASSES = {
    "mha": KindOptions,
    "iha": KindOptions,
    "talking_heads": KindOptions,
    "diff": DifferentialOptions,
    "diff_v2": KindOptions,
    "gated": GateOptions,
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
# Fields that hold one of a few words.
CHOICES = {"pseudo_positions": ("interleaved", "shared"), "pseudo_collapse": ("per_head", "all_heads")}


def expand_pattern(pattern: str | list, num_layers: int) -> list:
    """Return one entry per layer for a single name or a short repeating pattern.

    Any other list is returned unchanged, and its length is checked later. A model of one layer gets the first entry of
    any list, so that a preset's pattern can be used."""
    pattern = [pattern] if isinstance(pattern, str) else list(pattern)
    # A pattern that repeats less than twice is more likely a list of the wrong length.
    if pattern and (2 * len(pattern) <= num_layers or num_layers == 1):
        return [pattern[i % len(pattern)] for i in range(num_layers)]
    return pattern


@strict
class IHAConfig(LlamaConfig):
    r"""
    Configure [`IHAModel`] by the fields of [`LlamaConfig`] and these.

    Args:
        attention_kinds (`str` or `list[str]`, *optional*, defaults to `"iha"`):
            Attention mechanism of each layer, such as `"iha"` or `"mha"` (Llama's attention); `OPTIONS_CLASSES`
            lists all. It is one name for all layers, a short repeating pattern, or one name per layer,
            and is stored as a list.
        layer_types (`str` or `list[str]`, *optional*, defaults to `"full_attention"`):
            Mask and cache geometry of each layer, `"full_attention"` or `"sliding_attention"`, given and stored as
            `attention_kinds` is.
        sliding_window (`int`, *optional*):
            Window W of the sliding layers in tokens, the current one included. In layers of kind `"iha"` and
            `"paired_heads"` virtual query v sees the virtual keys u with `v - W * P < u <= v`.
        num_pseudo_heads (`int`, *optional*, defaults to `num_attention_heads`):
            P, the pseudo-heads of each head in `"iha"` layers, the heads of each group in `"paired_heads"` layers, and
            the virtual tokens of each token in both.
        pseudo_positions (`str`, *optional*, defaults to `"interleaved"`):
            RoPE position of pseudo-head p (from 0) of token n. `"interleaved"` is n * P + p, as in the paper, for
            training from scratch. `"shared"` is n, which keeps a pretrained model's positions when it is converted.
        pseudo_collapse (`str`, *optional*, defaults to `"per_head"`):
            Map R from pseudo-heads back to heads: `"per_head"` is [H, P] (Algorithm 1), `"all_heads"` is [H, H * P]
            (Definition 3).
        mixing_scale (`float`, *optional*, defaults to 1.0):
            The weights that mix heads are stored as start + s * change, and this is s: they learn at s times the
            optimizer's rate (see `Mixing` of mixing.py). A new model with 1 stores the weights themselves, because
            its start is 0. Converters take 40. A saved checkpoint keeps its own scale, which only `set_mixing_scale`
            may change.
        gated_mlp (`bool`, *optional*, defaults to `True`):
            `True` for Llama's gated three-matrix FFN, `False` for the paper's two-matrix FFN.
        mlp_gate_groups (`int`, *optional*):
            Number of groups of channels of the gated FFN, which a softmax over the groups scales, as in released
            DCFormers (44). `None` leaves that gate out.
        use_qk_norm (`bool`, *optional*, defaults to `False`):
            `True` for an RMSNorm over each head's query and key, before RoPE and the mixing (as in Qwen3).
        rope_parameters (`dict`, *optional*):
            RoPE of all layers, or `{"full_attention": {...}, "sliding_attention": {...}}` for a RoPE of its own for
            the layers with a window, as in Gemma 3.
        no_rope_layers (`list[int]`, *optional*):
            One entry per layer, or a short repeating pattern such as `[1, 1, 1, 0]`: 1 for a layer with RoPE
            (default), 0 for one in which neither a token nor a pseudo-head has a position.
        attention_options (`dict[str, dict]`, *optional*):
            Options of single mechanisms, `{kind: {option: value}}`. `OPTIONS_CLASSES` names the class that describes
            the options of each kind.

    As in every configuration of Transformers, other keywords (`num_layers`) are stored and have no effect;
    `from_preset` raises an error for them.

    ```python
    >>> from modeling_iha import IHAConfig, IHAForCausalLM

    >>> config = IHAConfig.from_preset("tiny", num_pseudo_heads=4)
    >>> model = IHAForCausalLM(config)
    ```
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
    pseudo_positions: str = "interleaved"
    pseudo_collapse: str = "per_head"
    mixing_scale: float | int = 1.0
    gated_mlp: bool = True
    mlp_gate_groups: int | None = None
    use_qk_norm: bool = False
    rope_parameters: dict | None = None
    no_rope_layers: list[int] | None = None
    attention_options: dict | None = None

    def __post_init__(self, **kwargs):
        self.attention_kinds = expand_pattern(self.attention_kinds, self.num_hidden_layers)
        self.layer_types = expand_pattern(self.layer_types or "full_attention", self.num_hidden_layers)
        self.no_rope_layers = expand_pattern(self.no_rope_layers or [1], self.num_hidden_layers)
        self.num_pseudo_heads = self.num_attention_heads if self.num_pseudo_heads is None else self.num_pseudo_heads
        self.attention_options = {} if self.attention_options is None else self.attention_options
        self.rope_parameters = deepcopy(self.rope_parameters)  # Transformers completes it in place
        super().__post_init__(**kwargs)
        if self.mlp_gate_groups is not None:
            self.base_model_tp_plan = {}  # a gate scales whole groups of channels, which a column shard would cut
        if self.has_sliding_rope:
            # Transformers 5.17 adds a `rope_theta` next to the parameters of the layer types; nothing would read it.
            self.rope_parameters.pop("rope_theta", None)

    def validate_architecture(self):
        """Raise a ValueError for fields from which no model can be built, or that would silently have no effect.

        The error names the field, its value and what is allowed."""
        for field in ("num_attention_heads", "num_key_value_heads", "num_pseudo_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}; it must be at least 1.")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_attention_heads="
                f"{self.num_attention_heads}; each key/value head serves the same number of query heads."
            )
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs, so it must be even.")
        if not self.mixing_scale > 0:
            raise ValueError(f"mixing_scale={self.mixing_scale}; it must be above 0.")
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r}; allowed are {', '.join(map(repr, allowed))}.")
        self._validate_layer_list("attention_kinds", tuple(OPTIONS_CLASSES))
        self._validate_layer_list("layer_types", LAYER_TYPES)
        self._validate_layer_list("no_rope_layers", (0, 1))
        self._validate_window()
        if self.has_sliding_rope and not set(self.rope_parameters) == set(self.layer_types) == set(LAYER_TYPES):
            raise ValueError(
                f"rope_parameters={self.rope_parameters} with layers of {', '.join(sorted(set(self.layer_types)))}; "
                "it must be one set of parameters for all layers or, in a model with both layer types, one set for "
                f"each of {', '.join(map(repr, LAYER_TYPES))} and no other key."
            )
        groups = self.mlp_gate_groups
        if groups is not None and (not self.gated_mlp or groups < 1 or self.intermediate_size % groups != 0):
            raise ValueError(
                f"mlp_gate_groups={groups} with intermediate_size={self.intermediate_size} and "
                f"gated_mlp={self.gated_mlp}; it must be a divisor of intermediate_size, with gated_mlp=True, or None."
            )
        for kind in dict.fromkeys((*self.attention_options, *self.attention_kinds)):
            options = self.options_of(kind)
            if kind in self.attention_kinds:
                options.check(self, kind)

    def _validate_layer_list(self, field: str, allowed: tuple):
        entries = getattr(self, field)
        if isinstance(entries, str):  # assigned after the configuration was built
            raise ValueError(f"{field}={entries!r} was assigned: assign a list with one entry per layer.")
        for entry in entries:
            if entry not in allowed:
                raise ValueError(f"{field} holds {entry!r}; allowed are {', '.join(map(repr, allowed))}.")
        if len(entries) != self.num_hidden_layers:
            one_name = "one name, " if isinstance(allowed[0], str) else ""
            raise ValueError(
                f"{field} has {len(entries)} entries for num_hidden_layers={self.num_hidden_layers}: give {one_name}"
                "one entry per layer, or a pattern short enough to repeat at least twice."
            )

    def _validate_window(self):
        if "sliding_attention" not in self.layer_types:
            if self.sliding_window is not None:
                raise ValueError(
                    f"sliding_window={self.sliding_window} would have no effect: no entry of layer_types is "
                    "'sliding_attention'. Add sliding layers, or leave sliding_window at None."
                )
        elif self.sliding_window is None or self.sliding_window < 2:
            raise ValueError(
                f"sliding_window={self.sliding_window} with 'sliding_attention' in layer_types; it must be a number "
                "of tokens, at least 2."
            )

    @property
    def has_sliding_rope(self) -> bool:
        """Return whether the layers with a window have RoPE parameters of their own."""
        return any(name in LAYER_TYPES for name in self.rope_parameters or ())

    def rope_of(self, layer_type: str) -> dict:
        """Return the RoPE parameters of the layers of a type."""
        return self.rope_parameters[layer_type] if self.has_sliding_rope else self.rope_parameters

    def options_of(self, kind: str) -> Any:
        """Return the options of an attention kind, an instance of its class in `OPTIONS_CLASSES`.

        Raise a ValueError that names option, value, and what is allowed."""
        if kind not in OPTIONS_CLASSES:
            raise ValueError(
                f"attention_options names the kind {kind!r}; allowed are {', '.join(map(repr, OPTIONS_CLASSES))}."
            )
        options = self.attention_options.get(kind, {})
        known = {field.name: field for field in fields(OPTIONS_CLASSES[kind])}
        for name, value in options.items():
            if name not in known:
                allowed = ", ".join(map(repr, known)) or "none"
                raise ValueError(f"attention_options[{kind!r}] has the option {name!r}; allowed are: {allowed}.")
            try:
                OPTIONS_CLASSES[kind](**{name: value})
            except StrictDataclassFieldValidationError as error:
                raise ValueError(
                    f"attention_options[{kind!r}] has {name}={value!r}; it must be {known[name].metadata['expected']}."
                ) from error
        return OPTIONS_CLASSES[kind](**options)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """Build a config as Transformers does, which reads every config.json through this method.

        Fields among `kwargs` replace those of the file before the config is checked. Raise a ValueError for another
        `mixing_scale`, because the stored weights depend on it."""
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in cls.__dataclass_fields__}
        own = config_dict.get("mixing_scale", 1)
        if given.get("mixing_scale", own) != own:
            raise ValueError(
                f"mixing_scale={given['mixing_scale']}, and the checkpoint has {own}, which its weights depend on: "
                "load it without the argument, and call set_mixing_scale of modeling_iha."
            )
        return super().from_dict(config_dict | given, **kwargs)

    def to_dict(self) -> dict:
        # Keep a user's entries. A name with "--" is of a repository of the Hub.
        given = getattr(self, "auto_map", None) or {}
        others = {auto: name for auto, name in given.items() if "--" not in name and "iha." not in name}
        return {**super().to_dict(), "auto_map": AUTO_MAP | others}


IHAConfig.register_for_auto_class()
