"""Configuration of the IHA model: Llama's, plus the attention mechanism of each layer."""

from difflib import get_close_matches
from math import inf

from transformers.utils.versions import require_version


# First, so that an older or newer Transformers is named rather than some import that it lacks.
require_version("transformers>=5.17,<6")

from huggingface_hub.dataclasses import strict  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.llama.configuration_llama import LlamaConfig  # noqa: E402


# The classes a checkpoint can be loaded as. Every saved config.json names all of them, whichever class saved it.
AUTO_MAP = {
    "AutoConfig": "configuration_iha.IHAConfig",
    "AutoModel": "modeling_iha.IHAModel",
    "AutoModelForCausalLM": "modeling_iha.IHAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_iha.IHAForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_iha.IHAForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_iha.IHAForQuestionAnswering",
}


def _is_positive(value) -> bool:
    return type(value) is int and value >= 1


def _number(test, expected: str) -> tuple:
    """`test` of a finite number, which is false of NaN, and what it asks for, in words."""
    return lambda value: type(value) in (int, float) and test(value), expected


def _are_orders(value) -> bool:
    return _is_positive(value) or (isinstance(value, list) and all(map(_is_positive, value)))


def _are_windows(value) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(_is_positive, value)))


_POSITIVE = _number(lambda value: 0 < value < inf, "a number above 0")
_NOT_NEGATIVE = _number(lambda value: 0 <= value < inf, "a number, at least 0")
# Numbers of the config, and of its `rope_parameters` alone or in lists: (test of a value, what the test asks for).
_NUMBERS = {
    "rms_norm_eps": _POSITIVE,
    "attention_dropout": _number(lambda value: 0 <= value < 1, "a number, at least 0 and below 1"),
}
_ROPE_NUMBERS = {
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"), _POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _NOT_NEGATIVE),
    "partial_rotary_factor": _number(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
}
# A saved config.json names all of them.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SWITCH = (False, lambda value: type(value) is bool, "true or false")
_WINDOWS = (None, _are_windows, "a list of two numbers of tokens, at least 1, or null")
# Options that `attention_options` may hold, by attention kind: (default, test of a value, what the test asks for).
ATTENTION_OPTIONS: dict[str, dict[str, tuple]] = {
    "mha": {},
    "iha": {},
    "talking_heads": {},
    "diff": {
        "lambda_std_dev": (0.1, *_NOT_NEGATIVE),
    },
    "hyper_feature": {
        "orders": (2, _are_orders, "a whole number, at least 1, or a list of one for each head"),
        "value_product": _SWITCH,
        "linear": _SWITCH,
    },
    "hyper": {
        "order": (3, lambda value: _is_positive(value) and value >= 2, "a whole number, at least 2"),
        "sharing": (True, *_SWITCH[1:]),
        "strict_order": _SWITCH,
        "linear": _SWITCH,
        "windows": _WINDOWS,
    },
    "simplicial": {"windows": _WINDOWS},
    "dcmha": {
        "rank": (2, lambda value: type(value) is int and value >= 0, "a whole number, 0 for no projection"),
        "gate": (True, lambda value: type(value) is bool, "true or false"),
        "base_map": (False, lambda value: type(value) is bool, "true or false"),
        "stages": ("both", lambda value: value in ("both", "pre", "post"), "'both', 'pre' or 'post'"),
        "sides": ("both", lambda value: value in ("both", "query", "key"), "'both', 'query' or 'key'"),
        "num_groups": (1, lambda value: type(value) is int and value >= 1, "a whole number, at least 1"),
    },
}
# What a kind on another kind's core has for that kind's options: 2-simplicial attention is HyperAttention of order 3 (see `attention_simplicial.py`).
FIXED_OPTIONS: dict[str, dict] = {
    "simplicial": {"order": 3, "sharing": False, "strict_order": False, "linear": False},
}
LAYER_TYPES = ("full_attention", "sliding_attention")
PSEUDO_POSITIONS = ("interleaved", "shared")
PSEUDO_COLLAPSES = ("per_head", "all_heads")

# IHA, Section 5.1. Read from the parameter count: "2.4B" with these sizes is a two-matrix FFN with tied embeddings. The
# activation of that FFN, the norm's epsilon and P are not in the paper: GELU, Llama's epsilon, and P = H ("typically").
_PAPER_2_4B = {
    "vocab_size": 128256,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 26,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "gated_mlp": False,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
# The small model of GPT-3, whose sizes A Theoretical Study of (Hyper) Self-Attention (Section 7.2, Table 1) takes, with GPT-2's
# vocabulary. Positions (RoPE for learned ones) and norms (RMSNorm for LayerNorm) are this model's, and there are no biases.
_GPT3_SMALL = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu_new",
    "gated_mlp": False,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
# DCMHA, Section 4: untied embeddings, context 2048, a window of 256 in every other layer. What the paper does not say is as in the
# training configs that its authors released for 405M and 2.8B: GPT-2's vocabulary, RoPE base 10,000, norm epsilon 1e-5, and QK-norm,
# which 2.8B alone goes without.
_DCFORMER = {
    "vocab_size": 50257,
    "num_hidden_layers": 24,
    "attention_kinds": "dcmha",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 256,
    "use_qk_norm": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
_FOUR_LOCAL_ONE_GLOBAL = ["sliding_attention"] * 4 + ["full_attention"]

PRESETS = {
    "paper-2.4b-global": {**_PAPER_2_4B, "attention_kinds": "mha"},
    "paper-2.4b-global-local": {
        **_PAPER_2_4B,
        "attention_kinds": "mha",
        "layer_types": _FOUR_LOCAL_ONE_GLOBAL,
        "sliding_window": 512,
    },
    # The fifth layer is plain global attention: Appendix C counts its cost as H N^2 d, not P^2 times that.
    "paper-2.4b-iha": {
        **_PAPER_2_4B,
        "attention_kinds": ["iha"] * 4 + ["mha"],
        "layer_types": _FOUR_LOCAL_ONE_GLOBAL,
        "num_pseudo_heads": 20,
    },
    "paper-2.4b-talking-heads": {**_PAPER_2_4B, "attention_kinds": "talking_heads"},
    "paper-2.4b-diff": {**_PAPER_2_4B, "attention_kinds": "diff"},
    "gpt3-small": {**_GPT3_SMALL, "attention_kinds": "mha"},
    "gpt3-small-hyper-feature": {
        **_GPT3_SMALL,
        "attention_kinds": "hyper_feature",
        "attention_options": {"hyper_feature": {"orders": 4}},
    },
    # "HFA v2", half of the heads ordinary. The paper gives it for a three-layer model of four heads (Table 2); here at Table 1's size.
    "gpt3-small-hyper-feature-v2": {
        **_GPT3_SMALL,
        "attention_kinds": "hyper_feature",
        "attention_options": {"hyper_feature": {"orders": [1] * 6 + [4] * 6}},
    },
    "gpt3-small-hyper": {
        **_GPT3_SMALL,
        "attention_kinds": "hyper",
        "attention_options": {"hyper": {"order": 3, "sharing": True}},
    },
    "gpt3-small-hyper-no-sharing": {
        **_GPT3_SMALL,
        "attention_kinds": "hyper",
        "attention_options": {"hyper": {"order": 3, "sharing": False}},
    },
    # DCMHA, Table 3, with 8/3 hidden_size of SwiGLU rounded as in the released training configs and code; the "2.8B" and "6.9B" of
    # Section 4.4 are Pythia's sizes with Llama's architecture.
    "dcformer-405m": {**_DCFORMER, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16},
    "dcformer-834m": {**_DCFORMER, "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 24},
    "dcformer-1.4b": {**_DCFORMER, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32},
    "dcformer-2.8b": {
        **_DCFORMER,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "use_qk_norm": False,
    },
    "dcformer-6.9b": {
        **_DCFORMER,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_pseudo_heads": 2,
        "max_position_embeddings": 512,
    },
}


def flop_matched_window(sequence_length: int, num_pseudo_heads: int) -> int:
    """Window in tokens at which four sliding IHA layers and a global one cost about five global MHA layers:
    W = N / (2 P^2) (IHA, Appendix C)."""
    window = sequence_length // (2 * num_pseudo_heads**2)
    if window < 1:
        raise ValueError(
            f"num_pseudo_heads={num_pseudo_heads} leaves no window at {sequence_length} tokens: W = N / (2 P^2) < 1. "
            "Use fewer pseudo-heads, a longer context, or set sliding_window yourself."
        )
    return window


def _expand_pattern(field: str, pattern: str | list[str], num_layers: int, allowed: tuple[str, ...]) -> list[str]:
    """One entry per layer from a single name, a short repeating pattern, or a full list."""
    pattern = [pattern] if isinstance(pattern, str) else list(pattern)
    for entry in pattern:
        if entry not in allowed:
            raise ValueError(f"{field} holds {entry!r}; allowed are {', '.join(map(repr, allowed))}.")
    # A pattern that repeats less than twice is more likely a list of the wrong length.
    if not pattern or (len(pattern) != num_layers and 2 * len(pattern) > num_layers > 1):
        raise ValueError(
            f"{field} has {len(pattern)} entries for num_hidden_layers={num_layers}: give one name, one entry per layer, "
            "or a pattern short enough to repeat at least twice."
        )
    return [pattern[i % len(pattern)] for i in range(num_layers)]


@strict
class IHAConfig(LlamaConfig):
    r"""
    Configuration of [`IHAModel`]: [`LlamaConfig`]'s fields by Llama's names, and

    Args:
        attention_kinds (`str` or `list[str]`, *optional*, defaults to `"iha"`):
            Attention mechanism of each layer: one name for all, a short repeating pattern, or one name per layer; stored
            expanded. `"mha"` is Llama's attention, `"iha"` Interleaved Head Attention, `"talking_heads"` Talking-Heads Attention,
            `"diff"` the Differential Transformer's as in DiffLlama, which needs an even `num_key_value_heads` and no dropout,
            `"hyper_feature"` HyperFeatureAttention, `"hyper"` HyperAttention, `"simplicial"` 2-simplicial attention,
            `"dcmha"` Dynamically Composable Multi-Head Attention.
        layer_types (`str` or `list[str]`, *optional*, defaults to `"full_attention"`):
            Mask and cache geometry of each layer, `"full_attention"` or `"sliding_attention"`; expanded likewise.
        sliding_window (`int`, *optional*):
            Window of the sliding layers in tokens, the current one included. An `"iha"` layer spans `sliding_window * P`
            virtual tokens: virtual query v sees the virtual keys u with `v - sliding_window * P < u <= v`.
        num_pseudo_heads (`int`, *optional*, defaults to `num_attention_heads`):
            P, the pseudo-heads of each head and the virtual tokens of each token.
        pseudo_positions (`str`, *optional*, defaults to `"interleaved"`):
            RoPE position of pseudo-head p (from 0) of token n: `"interleaved"`, n * P + p as in the paper, for training from
            scratch; `"shared"`, n, which keeps a pretrained model's positions when it is converted.
        pseudo_collapse (`str`, *optional*, defaults to `"per_head"`):
            The map R from pseudo-heads back to heads: `"per_head"`, [H, P] (Algorithm 1), or `"all_heads"`, [H, H * P]
            (Definition 3).
        gated_mlp (`bool`, *optional*, defaults to `True`):
            Llama's gated three-matrix FFN; `False` for the paper's two-matrix FFN.
        mlp_gate_groups (`int`, *optional*):
            Groups of channels of the gated FFN that a softmax over the groups scales, as in released DCFormers (44); `None`
            for no such gate.
        use_qk_norm (`bool`, *optional*, defaults to `False`):
            RMSNorm over each head's query and key, before RoPE and before the mixing (as in Qwen3).
        attention_options (`dict[str, dict]`, *optional*):
            Options of single mechanisms, `{kind: {option: value}}`. `"mha"`, `"iha"` and `"talking_heads"` have none.
            `"diff"` has `lambda_std_dev` (0.1), the standard deviation from which its lambda vectors start.
            `"hyper_feature"` has `orders` (2; the number of scores that a head multiplies, or a list of one number for each
            head), `value_product` (`False`: multiply as many values, too) and `linear` (`False`: no softmax).
            `"hyper"` has `order` (3: from a token to pairs), `sharing` (`True`: one key and value for all tokens of a tuple),
            `strict_order` (`False`: j >= k; `True`: j > k), `linear` (`False`: no softmax; of any order) and `windows`
            (`None`: both `sliding_window`; else [w1, w2] for j and k in tokens, the larger being `sliding_window`).
            `"simplicial"` has `windows`.
            `"dcmha"` has `rank` (2; 0:
            gates only), `gate` (`True`), `base_map` (`False`: a skip connection in place of a learned map), `stages`
            (`"both"`, `"pre"` or `"post"`: compose before, after the softmax), `sides` (`"both"`, `"query"` or `"key"`:
            whose token computes weights), and `num_groups` (1), the groups that heads are composed within.

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

    attention_kinds: str | list[str] = "iha"
    layer_types: str | list[str] | None = None
    sliding_window: int | None = None
    num_pseudo_heads: int | None = None
    pseudo_positions: str = "interleaved"
    pseudo_collapse: str = "per_head"
    gated_mlp: bool = True
    mlp_gate_groups: int | None = None
    use_qk_norm: bool = False
    attention_options: dict | None = None

    def __post_init__(self, **kwargs):
        # Transformers keeps unknown fields: a misspelt one would be stored and never read. Those that other libraries add have
        # words of their own.
        fields = (*IHAConfig.__annotations__, *LlamaConfig.__annotations__)
        for name in kwargs:
            meant = get_close_matches(name, fields, n=1, cutoff=0.9)
            meant = meant or [field for field in fields if set(name.split("_")) <= set(field.split("_"))]
            if meant:
                raise ValueError(
                    f"There is no field {name!r} ({name}={kwargs[name]!r}); did you mean {' or '.join(map(repr, meant))}?"
                )
        if self.head_dim is None and (
            self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads != 0
        ):
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; choose "
                "one that is, or set head_dim."
            )
        kinds, types = self.attention_kinds, self.layer_types or "full_attention"
        self.attention_kinds = _expand_pattern(
            "attention_kinds", kinds, self.num_hidden_layers, tuple(ATTENTION_OPTIONS)
        )
        self.layer_types = _expand_pattern("layer_types", types, self.num_hidden_layers, LAYER_TYPES)
        if self.num_pseudo_heads is None:
            self.num_pseudo_heads = self.num_attention_heads
        if self.attention_options is None:
            self.attention_options = {}

        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Refuses, naming field, value and what is allowed, what cannot be built or would silently be ignored."""
        for field in (*_SIZES, "num_key_value_heads", "head_dim", "num_pseudo_heads", "max_position_embeddings"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}; it must be at least 1.")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_attention_heads="
                f"{self.num_attention_heads}; each key/value head serves the same number of query heads."
            )
        pad = self.pad_token_id
        if pad is not None and not -self.vocab_size <= pad < self.vocab_size:
            raise ValueError(
                f"pad_token_id={pad}; allowed are {-self.vocab_size} to {self.vocab_size - 1}, for vocab_size={self.vocab_size}, and None."
            )
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs, so it must be even.")
        for field, allowed in (("pseudo_positions", PSEUDO_POSITIONS), ("pseudo_collapse", PSEUDO_COLLAPSES)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r}; allowed are {', '.join(map(repr, allowed))}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act={self.hidden_act!r}; allowed are {', '.join(map(repr, ACT2FN))}.")
        for field, (is_valid, expected) in _NUMBERS.items():
            value = getattr(self, field)
            if value is not None and not is_valid(value):
                raise ValueError(f"{field}={value}; it must be {expected}.")
        self._validate_layer_list("attention_kinds", tuple(ATTENTION_OPTIONS))
        self._validate_layer_list("layer_types", LAYER_TYPES)
        self._validate_window()
        self._validate_mlp()
        self._validate_attention_options()
        self._validate_diff()
        self._validate_composition()
        self._validate_rope()

    def _validate_layer_list(self, field: str, allowed: tuple[str, ...]):
        entries = getattr(self, field)
        if len(entries) != self.num_hidden_layers or not set(entries) <= set(allowed):
            raise ValueError(
                f"{field}={entries} must hold one of {', '.join(map(repr, allowed))} for each of "
                f"num_hidden_layers={self.num_hidden_layers} layers."
            )

    def _validate_window(self):
        if "sliding_attention" not in self.layer_types:
            if self.sliding_window is not None:
                raise ValueError(
                    f"sliding_window={self.sliding_window} would have no effect: no entry of layer_types is "
                    "'sliding_attention'. Add sliding layers, or leave sliding_window at None."
                )
        elif self.sliding_window is None or self.sliding_window < 1:
            raise ValueError(
                f"sliding_window={self.sliding_window} with 'sliding_attention' in layer_types; it must be a number of "
                "tokens, at least 1."
            )

    def _validate_mlp(self):
        groups = self.mlp_gate_groups
        if groups is not None and (not self.gated_mlp or groups < 1 or self.intermediate_size % groups != 0):
            raise ValueError(
                f"mlp_gate_groups={groups} with intermediate_size={self.intermediate_size} and gated_mlp={self.gated_mlp}; it "
                "must be a divisor of intermediate_size, with gated_mlp=True, or None."
            )

    def _validate_attention_options(self):
        for kind, options in self.attention_options.items():
            if kind not in ATTENTION_OPTIONS:
                raise ValueError(
                    f"attention_options names the kind {kind!r}; allowed are {', '.join(map(repr, ATTENTION_OPTIONS))}."
                )
            if not isinstance(options, dict):
                raise ValueError(
                    f"attention_options[{kind!r}]={options!r}; it must be a dict of options, perhaps empty."
                )
            for option in options:
                if option not in ATTENTION_OPTIONS[kind]:
                    allowed = ", ".join(map(repr, ATTENTION_OPTIONS[kind])) or "none"
                    raise ValueError(
                        f"attention_options[{kind!r}] has the option {option!r}; options of this kind: {allowed}."
                    )
                _, is_valid, expected = ATTENTION_OPTIONS[kind][option]
                if not is_valid(options[option]):
                    raise ValueError(
                        f"attention_options[{kind!r}] has {option}={options[option]!r}; it must be {expected}."
                    )

        if "hyper_feature" in self.attention_kinds:
            self._validate_hyper_feature()
        for kind in ("hyper", "simplicial"):
            if kind in self.attention_kinds:
                self._validate_hyper(kind)

    def _validate_diff(self):
        if "diff" not in self.attention_kinds:
            return
        if self.num_key_value_heads % 2 != 0:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} is odd; attention kind 'diff' subtracts the second half of the heads "
                "from the first, each with half of the key/value heads, so it must be even."
            )
        if self.attention_dropout:
            raise ValueError(
                f"attention_dropout={self.attention_dropout} with attention kind 'diff', whose paper gives dropout no place in a "
                "difference of two softmaxes: set it to 0."
            )

    def _validate_hyper_feature(self):
        orders = self.hyper_feature_orders
        where = f"attention_options['hyper_feature'] has orders={self.options_of('hyper_feature')['orders']}"
        if len(orders) != self.num_attention_heads:
            raise ValueError(f"{where}; it must be one number, or one for each of {self.num_attention_heads} heads.")
        for order in orders:
            if self.head_dim % (2 * order) != 0:
                raise ValueError(
                    f"{where} and head_dim={self.head_dim}; each of a head's features has head_dim / order channels, which must "
                    "be an even number, for RoPE rotates pairs."
                )
        heads_per_group = self.num_attention_heads // self.num_key_value_heads
        for head, order in enumerate(orders):
            if order != orders[head - head % heads_per_group]:
                raise ValueError(
                    f"{where} with num_key_value_heads={self.num_key_value_heads}; the {heads_per_group} heads of a group share "
                    "its keys, so they must have one order."
                )

    def _validate_hyper(self, kind: str):
        options = self.options_of(kind)
        where = f"attention_options[{kind!r}] has"
        windows = options["windows"]
        sliding = [
            layer_type == "sliding_attention"
            for layer_kind, layer_type in zip(self.attention_kinds, self.layer_types)
            if layer_kind == kind
        ]
        if options["linear"]:
            for option in ("strict_order", "windows"):
                if options[option]:
                    raise ValueError(
                        f"{where} linear=True, whose tuples are all of the past: {option} must not be set."
                    )
            if any(sliding):
                raise ValueError(f"{where} linear=True, which has no window: its layers must be 'full_attention'.")
        elif options["order"] != 3:
            raise ValueError(
                f"{where} order={options['order']} with softmax, which is for order 3 only: set linear=True for other orders."
            )
        if options["strict_order"] and ((windows and windows[1] == 1) or (any(sliding) and self.sliding_window == 1)):
            raise ValueError(
                f"{where} strict_order=True with a window of 1 token for k, which leaves no pair with j > k."
            )
        if windows and not (all(sliding) and max(windows) == self.sliding_window):
            raise ValueError(
                f"{where} windows={windows}; its layers must be 'sliding_attention', with sliding_window={max(windows)}, the larger "
                "of the two."
            )

    @property
    def hyper_feature_orders(self) -> list[int]:
        """The order of each head of a "hyper_feature" layer."""
        orders = self.options_of("hyper_feature")["orders"]
        return [orders] * self.num_attention_heads if isinstance(orders, int) else orders

    def _validate_composition(self):
        options = self.options_of("dcmha")
        if self.num_attention_heads % options["num_groups"] != 0 and "dcmha" in self.attention_kinds:
            raise ValueError(
                f"attention_options['dcmha'] has num_groups={options['num_groups']}, which does not divide "
                f"num_attention_heads={self.num_attention_heads}; heads are composed within groups of equal size."
            )
        if options["rank"] == 0 and not options["gate"] and not options["base_map"]:
            raise ValueError(
                "attention_options['dcmha'] has rank=0, gate=False and base_map=False, which composes nothing: turn one of "
                "them on, or use the kind 'mha'."
            )

    def options_of(self, kind: str) -> dict:
        """The options of an attention kind, defaults and fixed ones included."""
        defaults = {option: default for option, (default, *_) in ATTENTION_OPTIONS[kind].items()}
        return {**FIXED_OPTIONS.get(kind, {}), **defaults, **self.attention_options.get(kind, {})}

    def _validate_rope(self):
        rope_types = ("default", *ROPE_INIT_FUNCTIONS)
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type not in rope_types:
            raise ValueError(
                f"rope_parameters={self.rope_parameters}; its rope_type must be one of {', '.join(map(repr, rope_types))}, and "
                "all layers share one set of parameters."
            )
        # Yarn and longrope find a factor of None from the lengths; None anywhere else is an option that is not set.
        needed = ("rope_theta",) if rope_type in ("yarn", "longrope") else ("rope_theta", "factor")
        for name, value in self.rope_parameters.items():
            is_valid, expected = _ROPE_NUMBERS.get(name, (lambda _: True, ""))
            numbers = value if isinstance(value, list) else [value]
            if (value is not None or name in needed) and not all(map(is_valid, numbers)):
                raise ValueError(f"rope_parameters has {name}={value!r}; it must be {expected}.")
        factor = self.rope_parameters.get("partial_rotary_factor", 1.0)
        if factor != 1.0 and rope_type != "proportional":
            raise ValueError(
                f"rope_parameters has partial_rotary_factor={factor}; the whole head is rotated, so it must be 1.0 "
                "(rope_type 'proportional' excepted, which pads its frequencies with zeros)."
            )

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "IHAConfig":
        """A named configuration: the paper's 2.4B model (IHA, Section 5.1) as `"paper-2.4b-global"`,
        `"paper-2.4b-global-local"`, `"paper-2.4b-iha"`, `"paper-2.4b-talking-heads"` or `"paper-2.4b-diff"`, GPT-3's small model
        (A Theoretical Study of (Hyper) Self-Attention, Section 7.2) as `"gpt3-small"`, `"-hyper-feature"`, `"-hyper-feature-v2"`,
        `"-hyper"` or `"-hyper-no-sharing"`, DCFormer++ (DCMHA, Section 4) as `"dcformer-405m"`, `"-834m"`, `"-1.4b"`, `"-2.8b"` or
        `"-6.9b"`, or `"tiny"` for tests; `overrides` replace single fields.
        The window of `"paper-2.4b-iha"` follows P and the context length (`flop_matched_window`) unless it is given."""
        if name not in PRESETS:
            raise ValueError(f"There is no preset {name!r}; available are {', '.join(map(repr, PRESETS))}.")
        fields = {**PRESETS[name], **overrides}
        if "sliding_attention" in fields.get("layer_types", ()) and "sliding_window" not in fields:
            fields["sliding_window"] = flop_matched_window(
                fields["max_position_embeddings"], fields["num_pseudo_heads"]
            )
        return cls(**fields)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As in Transformers, which reads every config.json through it. Raises a ValueError for one that names not all sizes: the
        model would have Llama-7B's, whatever the weights beside it."""
        if missing := [name for name in _SIZES if name not in config_dict]:
            raise ValueError(
                f"This config.json names no {', '.join(missing)}: it is damaged or incomplete; copy it again, or add them."
            )
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict:
        # Saving after a load from the Hub would else keep entries that point back at the repository of origin, and a
        # wrapped model (FSDP) would name its wrapper.
        return {**super().to_dict(), "auto_map": dict(AUTO_MAP)}


IHAConfig.register_for_auto_class()

__all__ = ["IHAConfig"]
