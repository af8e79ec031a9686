# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Configure the IHA model: Llama's fields, and each layer's mechanism. The folder `configuration_iha` has presets."""

from copy import deepcopy
from dataclasses import fields
from difflib import get_close_matches
from math import inf, nan
from typing import TYPE_CHECKING, Any

from .tested_versions import check_transformers


# This comes before the other imports, so that an unsupported Transformers gives this error and not an ImportError.
check_transformers()

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig

from .kind_options import OPTIONS_CLASSES
from .mixing_scale import check_scale


if TYPE_CHECKING:
    # Transformers copies every file that an import names, also here. A configuration that is saved without a model, as
    # mergekit does, then brings the model's code too.
    from .modeling_iha import IHAModel  # noqa: F401


# The classes a checkpoint can be loaded as. Every saved config.json names all of them, whichever class saved it.
AUTO_MAP = {
    "AutoConfig": "configuration_iha.IHAConfig",
    "AutoModel": "modeling_iha.IHAModel",
    "AutoModelForCausalLM": "modeling_iha.IHAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_iha.IHAForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_iha.IHAForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_iha.IHAForQuestionAnswering",
}
OUR_MODULES = {reference.split(".")[0] for reference in AUTO_MAP.values()}
LAYER_TYPES = ("full_attention", "sliding_attention")
# Fields that hold one of a few words.
CHOICES = {
    "pseudo_positions": ("interleaved", "shared"),
    "pseudo_collapse": ("per_head", "all_heads"),
    "hidden_act": tuple(ACT2FN),
}
MAX_LAYERS = 10_000  # a damaged config.json may ask for lists that fill the memory
# A saved config.json names all of them.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Numbers of the config and of its `rope_parameters`. Others have rules of their own.
ABOVE_ZERO = {
    "rms_norm_eps",
    "mixing_scale",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
}
LISTS = {"short_factor", "long_factor"}  # one number for each pair of dimensions
AT_LEAST_ZERO = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling")  # the last two are of older files


def _refuse_misspelt(fields: dict) -> None:
    """Raise a ValueError for a name that appears to mean a field of a config.

    Transformers keeps or ignores unknown fields, so a misspelt one would have no effect. We refuse names that are
    close to a field (`num_pseudo_head`), and names made of some words of one of ours (`pseudo_heads`). No library that
    we know adds such a field."""
    known = dict.fromkeys((*IHAConfig.__annotations__, *LlamaConfig.__annotations__))
    for name, value in fields.items():
        meant = get_close_matches(name, known, n=1, cutoff=0.9)
        words = set(name.split("_"))
        if not meant and any(words <= set(field.split("_")) for field in IHAConfig.__annotations__):
            meant = [field for field in known if words <= set(field.split("_"))]
        if meant:
            names = " or ".join(map(repr, meant))
            raise ValueError(f"There is no field {name!r} ({name}={value!r}); did you mean {names}?")


def _join_rope(overrides: dict, stored: dict) -> None:
    """Replace RoPE's overrides of a stored configuration by one, `rope_parameters`, with a `rope_theta`.

    Transformers would ignore a `rope_theta` beside `rope_parameters`, and take its default of 10,000 where an override
    states none. `stored` are the `rope_parameters` of the configuration. Raise a ValueError for overrides that
    contradict one another."""
    if "rope_scaling" in overrides:
        if "rope_parameters" in overrides:
            raise ValueError("rope_scaling beside rope_parameters: put both into rope_parameters.")
        overrides["rope_parameters"] = overrides.pop("rope_scaling")
    if "rope_parameters" in overrides:
        overrides["rope_parameters"] = overrides["rope_parameters"] or {"rope_type": "default"}
    if "rope_theta" in overrides:
        theta = overrides.pop("rope_theta")
        parameters = overrides.get("rope_parameters") or stored
        if any(name in parameters for name in LAYER_TYPES):
            raise ValueError("rope_theta: each layer type has a base of its own; give them in rope_parameters.")
        if "rope_parameters" in overrides:
            _refuse_another_base(theta, parameters)
        overrides["rope_parameters"] = parameters | {"rope_theta": theta}
    parameters = overrides.get("rope_parameters")
    if not isinstance(parameters, dict) or not stored:
        return
    if any(name in parameters for name in LAYER_TYPES):
        completed = {name: _with_theta(own, stored.get(name, stored)) for name, own in parameters.items()}
        overrides["rope_parameters"] = completed
    else:
        overrides["rope_parameters"] = _with_theta(parameters, stored)


def _with_rope_parameters(config_dict: dict) -> dict:
    """Return the fields of a file with those of older versions for RoPE joined into `rope_parameters`."""
    rope = {name: config_dict[name] for name in ROPE_FIELDS if config_dict.get(name) is not None}
    if rope.get("rope_scaling") == rope.get("rope_parameters"):
        rope.pop("rope_scaling", None)  # the file has both names, for older and newer versions
    _join_rope(rope, {})
    others = {name: value for name, value in config_dict.items() if name not in ROPE_FIELDS}
    return others | rope


def _refuse_another_base(rope_theta: float, parameters: dict) -> None:
    """Raise a ValueError for a `rope_theta` beside RoPE parameters that state another one."""
    stated = parameters.get("rope_theta", rope_theta)
    if stated != rope_theta or any(name in parameters for name in LAYER_TYPES):
        raise ValueError(f"rope_theta={rope_theta} beside rope_parameters={parameters}: give one base, in these.")


def _with_theta(parameters: Any, stored: dict) -> Any:
    """Return RoPE parameters with the `rope_theta` of the stored ones where they state none."""
    if not isinstance(parameters, dict) or "rope_theta" in parameters:
        return parameters
    if "rope_theta" not in stored:
        raise ValueError(
            f"rope_parameters={parameters} has no rope_theta, and the layer types of the configuration have a base "
            "each: state one."
        )
    return parameters | {"rope_theta": stored["rope_theta"]}


def _check_number(name: str, value: Any, where: str = "") -> None:
    """Raise a ValueError if a numeric field holds NaN, infinity, a number out of its range, or no number.

    Fields that are not numeric are ignored."""
    numbers = value if name in LISTS and isinstance(value, list) else [value]
    # No comparison with NaN is true.
    numbers = [number if type(number) in (int, float) else nan for number in numbers]
    if name in ABOVE_ZERO:
        expected = "a number above 0"
        are_valid = [0 < number < inf for number in numbers]
    elif name in AT_LEAST_ZERO:
        expected = "a number, at least 0"
        are_valid = [0 <= number < inf for number in numbers]
    elif name == "attention_dropout":
        expected = "a number, at least 0 and below 1"
        are_valid = [0 <= number < 1 for number in numbers]
    elif name == "partial_rotary_factor":
        expected = "a number from 0 to 1"
        are_valid = [0 <= number <= 1 for number in numbers]
    else:
        return
    if not all(are_valid):
        raise ValueError(f"{where}{name}={value!r}; it must be {expected}.")


def _fields_of_first_layers(config_dict: dict, given: dict) -> dict:
    """Return the fields of a config.json that change if only its first layers are kept, without those in `given`.

    If all kept layers have one type, its RoPE parameters become those of the model. If none has a window,
    `sliding_window` becomes `None`."""
    changed = {}
    for name in ("attention_kinds", "layer_types", "no_rope_layers"):
        if isinstance(config_dict.get(name), list):
            changed[name] = config_dict[name][: given["num_hidden_layers"]]
    kept_types = set(changed.get("layer_types", LAYER_TYPES))
    rope_parameters = config_dict.get("rope_parameters") or {}
    if len(kept_types) == 1 and kept_types <= rope_parameters.keys():
        (layer_type,) = kept_types
        changed["rope_parameters"] = rope_parameters[layer_type]
    if "sliding_attention" not in kept_types:
        changed["sliding_window"] = None
    return {name: value for name, value in changed.items() if name not in given}


def _expand_pattern(pattern: str | list, num_layers: int) -> list:
    """Return one entry per layer for a single name or a short repeating pattern.

    Any other list is returned unchanged, and `_validate_layer_list` checks its length. A model of one layer gets the
    first entry of any list, so that a preset's pattern can be used."""
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
            Attention mechanism of each layer, such as `"iha"` or `"mha"` (Llama's attention); `OPTIONS_CLASSES` of
            kind_options.py lists all. It is one name for all layers, a short repeating pattern, or one name per layer,
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
            Options of single mechanisms, `{kind: {option: value}}`. `OPTIONS_CLASSES` of kind_options.py names the
            class that describes the options of each kind.

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
        _refuse_misspelt(kwargs)
        if kwargs.get("per_layer_config"):
            raise ValueError("per_layer_config: IHAConfig states what layers differ in by lists, such as layer_types.")
        if self.head_dim is None and (self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                "choose one that is, or set head_dim."
            )
        if self.num_hidden_layers > MAX_LAYERS:
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers}; it must be at most {MAX_LAYERS}.")
        self.attention_kinds = _expand_pattern(self.attention_kinds, self.num_hidden_layers)
        self.layer_types = _expand_pattern(self.layer_types or "full_attention", self.num_hidden_layers)
        self.no_rope_layers = _expand_pattern(self.no_rope_layers or [1], self.num_hidden_layers)
        self.num_pseudo_heads = self.num_attention_heads if self.num_pseudo_heads is None else self.num_pseudo_heads
        self.attention_options = {} if self.attention_options is None else self.attention_options

        self._refuse_two_ropes(**kwargs)
        self.rope_parameters = deepcopy(self.rope_parameters)  # Transformers completes it in place
        self._validate_rope_types()
        super().__post_init__(**kwargs)
        if self.mlp_gate_groups is not None:
            self.base_model_tp_plan = {}  # a gate scales whole groups of channels, which a column shard would cut
        if self.has_sliding_rope:
            # Transformers 5.17 adds a `rope_theta` next to the parameters of the layer types; nothing would read it.
            self.rope_parameters.pop("rope_theta", None)

    def validate_architecture(self):
        """Raise a ValueError for fields from which no model can be built, or a window or an option without effect.

        The error names the field, its value and what is allowed. Options of a kind that the model does not have are
        checked by name and type, but not for whether they fit together."""
        for field in (*SIZES, "num_key_value_heads", "head_dim", "num_pseudo_heads", "max_position_embeddings"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}; it must be at least 1.")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_attention_heads="
                f"{self.num_attention_heads}; each key/value head serves the same number of query heads."
            )
        pad = self.pad_token_id
        size = self.vocab_size
        if pad is not None and not -size <= pad < size:
            raise ValueError(
                f"pad_token_id={pad}; allowed are {-size} to {size - 1}, for vocab_size={size}, and None."
            )
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs, so it must be even.")
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r}; allowed are {', '.join(map(repr, allowed))}.")
        for field in ("rms_norm_eps", "mixing_scale", "attention_dropout"):
            if getattr(self, field) is not None:
                _check_number(field, getattr(self, field))
        self._validate_layer_list("attention_kinds", tuple(OPTIONS_CLASSES))
        self._validate_layer_list("layer_types", LAYER_TYPES)
        self._validate_layer_list("no_rope_layers", (0, 1))
        self._validate_window()
        self._validate_mlp()
        self._validate_rope()
        for kind in self.attention_options:
            self.options_of(kind)
        for kind in dict.fromkeys(self.attention_kinds):
            self.options_of(kind).check(self, kind)

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

    def _validate_mlp(self):
        groups = self.mlp_gate_groups
        if groups is not None and (not self.gated_mlp or groups < 1 or self.intermediate_size % groups != 0):
            raise ValueError(
                f"mlp_gate_groups={groups} with intermediate_size={self.intermediate_size} and "
                f"gated_mlp={self.gated_mlp}; it must be a divisor of intermediate_size, with gated_mlp=True, or None."
            )

    @property
    def has_sliding_rope(self) -> bool:
        """Return whether the layers with a window have RoPE parameters of their own."""
        return any(name in LAYER_TYPES for name in self.rope_parameters or ())

    def rope_of(self, layer_type: str) -> dict:
        """Return the RoPE parameters of the layers of a type."""
        return self.rope_parameters[layer_type] if self.has_sliding_rope else self.rope_parameters

    def _validate_rope_types(self):
        if self.has_sliding_rope and not set(self.rope_parameters) == set(self.layer_types) == set(LAYER_TYPES):
            raise ValueError(
                f"rope_parameters={self.rope_parameters} with layers of {', '.join(sorted(set(self.layer_types)))}; "
                "it must be one set of parameters for all layers or, in a model with both layer types, one set for "
                f"each of {', '.join(map(repr, LAYER_TYPES))} and no other key."
            )

    def _refuse_two_ropes(self, rope_theta: float | None = None, rope_scaling: dict | None = None, **kwargs):
        """Raise a ValueError for older fields that contradict `rope_parameters`: Transformers would drop one value."""
        parameters = self.rope_parameters or {}
        if parameters and rope_scaling and rope_scaling != parameters:
            raise ValueError(
                f"rope_scaling={rope_scaling} beside rope_parameters={parameters}: put both into rope_parameters."
            )
        if rope_theta is not None:
            _refuse_another_base(rope_theta, parameters or rope_scaling or {})

    def _validate_rope(self):
        self._validate_rope_types()
        for layer_type in LAYER_TYPES:
            self._validate_rope_of(layer_type)

    def _validate_rope_of(self, layer_type: str):
        parameters = self.rope_of(layer_type)
        rope_types = ("default", *ROPE_INIT_FUNCTIONS)
        rope_type = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if rope_type not in rope_types:
            raise ValueError(
                f"rope_parameters={self.rope_parameters}; its rope_type must be one of "
                f"{', '.join(map(repr, rope_types))}."
            )
        if "rope_theta" not in parameters:
            raise ValueError(f"rope_parameters={self.rope_parameters} has no rope_theta for the {layer_type} layers.")
        # Yarn and longrope find a factor of None from the lengths; None anywhere else is an option that is not set.
        needed = ("rope_theta",) if rope_type in ("yarn", "longrope") else ("rope_theta", "factor")
        for name, value in parameters.items():
            if value is not None or name in needed:
                _check_number(name, value, "rope_parameters has ")
        if rope_type == "default" and parameters.get("factor") not in (None, 1.0):
            raise ValueError(
                f"rope_parameters has factor={parameters['factor']} with the rope_type 'default', which takes none: "
                "give the rope_type of the scaling, such as 'linear' or 'yarn', or leave the factor out."
            )
        factor = parameters.get("partial_rotary_factor", 1.0)
        if factor != 1.0 and rope_type != "proportional":
            raise ValueError(
                f"rope_parameters has partial_rotary_factor={factor}; the whole head is rotated, so it must be 1.0 "
                "(rope_type 'proportional' excepted, which pads its frequencies with zeros)."
            )

    def options_of(self, kind: str) -> Any:
        """Return the options of an attention kind, an instance of its class in `OPTIONS_CLASSES`.

        Raise a ValueError that names option, value, and what is allowed."""
        if kind not in OPTIONS_CLASSES:
            raise ValueError(
                f"attention_options names the kind {kind!r}; allowed are {', '.join(map(repr, OPTIONS_CLASSES))}."
            )
        options_class = OPTIONS_CLASSES[kind]
        options = self.attention_options.get(kind, {})
        where = f"attention_options[{kind!r}]"
        if not isinstance(options, dict):
            raise ValueError(f"{where}={options!r}; it must be a dict of options, perhaps empty.")
        known = {field.name: field for field in fields(options_class)}
        for name, value in options.items():
            if name not in known:
                allowed = ", ".join(map(repr, known)) or "none"
                raise ValueError(f"{where} has the option {name!r}; options of this kind: {allowed}.")
            try:
                options_class(**{name: value})
            except StrictDataclassFieldValidationError as error:
                raise ValueError(
                    f"{where} has {name}={value!r}; it must be {known[name].metadata['expected']}."
                ) from error
        return options_class(**options)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """Build a config as Transformers does, which reads every config.json through this method.

        Fields among `kwargs` replace those of the file before the config is checked. A smaller `num_hidden_layers`
        keeps the first layers. RoPE parameters without a `rope_theta` take that of the file.

        Raise a ValueError if a size is missing, because LlamaConfig would fill in that of Llama-7B, and if
        `mixing_scale` differs from that of the file, because the stored weights depend on it."""
        missing = [name for name in SIZES if name not in config_dict]
        if missing:
            raise ValueError(f"This config.json names no {', '.join(missing)}: copy it again, or add what is missing.")
        check_scale(config_dict, kwargs)
        if any(name in kwargs for name in ROPE_FIELDS):
            config_dict = _with_rope_parameters(config_dict)
            _join_rope(kwargs, config_dict.get("rope_parameters", {}))
        # A user's subclass may have fields of its own.
        classes = [LlamaConfig, *(each for each in cls.__mro__ if issubclass(each, IHAConfig))]
        ours = {name for each in classes for name in each.__annotations__}
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in ours}
        _refuse_misspelt(kwargs)
        config_dict = config_dict | given
        if "num_hidden_layers" in given:
            config_dict |= _fields_of_first_layers(config_dict, given)
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict:
        # Keep the entries of a user's own classes. A name with "--" is of a repository of the Hub, and FSDP's wrapper
        # adds an entry of its own.
        given = getattr(self, "auto_map", None) or {}
        known = {auto: name for auto, name in given.items() if auto in AUTO_MAP}
        local = {auto: name for auto, name in known.items() if "--" not in name}
        users = {auto: name for auto, name in local.items() if name.split(".")[0] not in OUR_MODULES}
        return {**super().to_dict(), "auto_map": AUTO_MAP | users}


IHAConfig.register_for_auto_class()
