"""Draw models and calls for property tests, run a call, and compute what its rows are alone.

A drawn value is a frozen dataclass of numbers and names: a failing test prints it, and the print can be pasted into
an `@example`.
"""

import copy
import warnings
from dataclasses import dataclass

import torch
import transformers
from helpers import (
    LOCAL_ROPE,
    causal_4d,
    cumulative_lengths,
    decoder,
    random_ids,
    random_model,
    small_config,
    train_mixing,
)
from hypothesis import strategies as st
from packaging.version import Version
from transformers import DynamicCache, GenerationConfig, StaticCache

from modeling_iha import interleave_heads, pair_heads
from modeling_iha.configuration_iha import OPTIONS_CLASSES
from modeling_iha.sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from modeling_iha.transformers_versions import CACHE


BLOCK = 128  # virtual queries of a block, at least

# The rows of docs/SUPPORT.md: kinds that change scores, among them those over pairs of tokens, take no flash function
# and no FlexAttention. Those over pairs depend on absolute positions.
PAIRS = ("hyper", "simplicial")
SCORES = ("talking_heads", "dcmha", "hyper_feature", *PAIRS)
CORES = ("sdpa", "sdpa", "eager", SDPA_IN_BLOCKS, "flash_attention_2", "flex_attention")
DENSE_CORES = ("sdpa", "eager")  # that build scores


# Fields of the rest of a layer.
MORE = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "two matrices": {"gated_mlp": False, "mlp_bias": True, "hidden_act": "gelu", "tie_word_embeddings": True},
    "local rope": {"rope_parameters": LOCAL_ROPE["rope_parameters"]},
}


# Models


class Drawn:
    """Hold what models of both ways have."""

    @property
    def heads_of_group(self):
        return self.heads // self.groups

    @property
    def is_flash(self):
        return "flash" in self.core

    @property
    def is_in_blocks(self):
        """Return whether `sdpa_in_blocks` attends, which is what "sdpa" means here."""
        return self.core in ("sdpa", SDPA_IN_BLOCKS) and not self.needs_dense_masks

    @property
    def takes_static(self):
        return not self.is_flash and self.core != "flex_attention"

    @property
    def may_skip_positions(self):
        """Return whether a document may begin at a position above 0.

        A flash function takes the smallest position for the beginning of every document, and Llama 4 counts its chunks
        by positions."""
        return not (self.is_flash or self.needs_positions or getattr(self, "name", None) == "llama4_text")


@dataclass(frozen=True)
class OwnModel(Drawn):
    """Describe a model of `IHAConfig`."""

    kinds: tuple[str, ...]  # of each layer
    slides: tuple[bool, ...]  # whether the layer has the window
    window: int | None
    num_pseudo_heads: int
    heads: int
    groups: int
    core: str
    dtype: str = "float32"
    positions: str = "interleaved"
    collapse: str = "per_head"
    qk_norm: bool = False
    gate: str | None = None
    xsa: bool = False
    recomputes: bool = False
    options: str = "default"  # of the kinds: "example" or "linear" too
    more: str | None = None  # a key of `MORE`

    def build(self):
        options = {}
        if self.options == "example":
            options = {kind: getattr(OPTIONS_CLASSES[kind], "example", {}) for kind in self.kinds}
        if self.options == "linear":
            options = {"hyper": {"linear": True, "order": 4, "sharing": False}}
        config = small_config(
            attention_kinds=list(self.kinds),
            num_hidden_layers=len(self.kinds),
            layer_types=["sliding_attention" if slides else "full_attention" for slides in self.slides],
            sliding_window=self.window,
            num_pseudo_heads=self.num_pseudo_heads,
            head_dim=8,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            pseudo_positions=self.positions,
            pseudo_collapse=self.collapse,
            use_qk_norm=self.qk_norm,
            output_gate=self.gate,
            exclusive_attention=self.xsa,
            recompute_virtual_tokens=self.recomputes,
            attention_options=options,
            # Of the size of the squares that it is added to: "diff" norms the output of a query, and the gradient of
            # its scale is a small difference where the query sees a single key.
            rms_norm_eps=0.1,
            **MORE.get(self.more, {}),
        )
        return on_core(random_model(config), self.core, self.dtype)

    is_own = True
    is_ours = True
    keeps_documents_apart = True
    keeps_documents_flat = True

    @property
    def has_virtual_heads(self):
        return self.num_pseudo_heads > 1 and any(kind in ("iha", "paired_heads") for kind in self.kinds)

    @property
    def needs_dense_masks(self):
        return any(kind in SCORES for kind in self.kinds)

    @property
    def dense_masks(self):
        """Return the kinds of masks [batch, 1, tokens, keys] that the model takes."""
        return [] if self.is_flash else ["bool", "additive"]

    @property
    def needs_positions(self):
        return any(kind in PAIRS for kind in self.kinds)

    @property
    def most_tokens(self):
        """Return the length of a call that one example can afford: pairs of tokens have scores of N^3 entries."""
        return 40 if self.needs_positions else 150


# Fields of tiny decoders for a window, or for none. Dropout is left out of all, because training is compared too.
LAYER_TYPES = ["sliding_attention", "full_attention"]
NO_DROPOUT = {
    f"{name}_{drop}": 0.0
    for name in ("attention", "hidden", "resid", "residual", "embedding", "embd")
    for drop in ("dropout", "pdrop")
}
BASES = {
    "llama": lambda window: {},
    "mistral": lambda window: {"sliding_window": window},
    "qwen2": lambda window: {"sliding_window": window, "use_sliding_window": bool(window), "max_window_layers": 1},
    "qwen3": lambda window: {"sliding_window": window, "use_sliding_window": bool(window), "max_window_layers": 1},
    "gemma2": lambda window: {"sliding_window": window or 400, "query_pre_attn_scalar": 8},
    "gemma3_text": lambda window: {
        "sliding_window": window or 400,
        "layer_types": LAYER_TYPES,
        "query_pre_attn_scalar": 8,
    },
    "phi3": lambda window: {"sliding_window": window},
    "olmo2": lambda window: {},
    "cohere2": lambda window: {"sliding_window": window or 400, "layer_types": LAYER_TYPES},
    "gpt_neox": lambda window: {},
    "opt": lambda window: {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "layerdrop": 0.0},
    "starcoder2": lambda window: {"sliding_window": window},
    "granite": lambda window: {},
    "stablelm": lambda window: {},  # passes no `cu_seq_lens_q` on
    "qwen2_moe": lambda window: {
        **{"sliding_window": window, "use_sliding_window": bool(window), "max_window_layers": 1},
        **{"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    },
    "llama4_text": lambda window: {
        **{"attention_chunk_size": window or 400, "num_local_experts": 2, "num_experts_per_tok": 2},
        "no_rope_layers": [1, 0],
    },
    "gpt_oss": lambda window: {"sliding_window": window or 400, "num_local_experts": 2, "num_experts_per_tok": 2},
}
WITHOUT_GROUPS = ("gpt_neox", "opt")
# Bases that compute on eager attention alone: soft caps and attention sinks.
EAGER = ("gemma2", "gpt_oss")
# They hand no window to their attention, so Transformers makes dense masks: Llama 4 has chunks.
DENSE = ("qwen2_moe", "llama4_text")
WITH_WINDOWS = tuple(name for name, fields in BASES.items() if {"sliding_window", *DENSE} & {name, *fields(None)})


@dataclass(frozen=True)
class Decoder(Drawn):
    """Describe a decoder of Transformers of two layers whose heads are interleaved or paired, or a plain one."""

    name: str
    way: str  # "interleaved", "paired" or "plain"
    core: str
    dtype: str = "float32"
    layers: tuple[int, ...] = (0, 1)
    own_window: int | None = None
    given_window: int | None = None
    num_pseudo_heads: int = 2
    groups: int = 2
    collapse: str = "per_head"
    recomputes: bool = False

    def build(self):
        fields = NO_DROPOUT | BASES[self.name](self.own_window)
        core = "eager" if self.name in EAGER else "sdpa"
        sizes = {"num_hidden_layers": 2, "num_key_value_heads": self.groups, "max_position_embeddings": 512}
        model = decoder(self.name, core, **{**sizes, **fields})
        model.set_experts_implementation("eager")  # the only one that takes float64
        enlarge(model)
        if self.way == "interleaved":
            options = {"sliding_window": self.given_window, "collapse": self.collapse}
            train_mixing(interleave_heads(model, self.num_pseudo_heads, self.layers, **options))
        if self.way == "paired":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pair_heads(model, self.num_pseudo_heads, self.layers, self.given_window)
        model.config.recompute_virtual_tokens = self.recomputes
        return on_core(model, self.core, self.dtype)

    @property
    def window(self):
        return min((each for each in (self.own_window, self.given_window) if each), default=None)

    @property
    def takes_static(self):
        """Return whether the decoder takes a static cache: in Transformers 5.17 `generate` of Llama 4 does not."""
        is_old = Version(transformers.__version__) < Version("5.18")
        return super().takes_static and not (self.name == "llama4_text" and is_old)

    heads = 4
    is_own = False
    needs_positions = False
    most_tokens = 150

    @property
    def is_ours(self):
        return self.way != "plain"

    @property
    def has_virtual_heads(self):
        return self.is_ours

    @property
    def keeps_documents_flat(self):
        return self.is_ours and self.name != "stablelm"

    @property
    def needs_dense_masks(self):
        return self.name in EAGER + DENSE

    @property
    def dense_masks(self):
        """Return the kinds of masks [batch, 1, tokens, keys] that the decoder takes."""
        return [] if self.is_flash or self.core == "flex_attention" else ["bool", "additive"]

    @property
    def keeps_documents_apart(self):
        """Return whether the base does: the masks of OPT and gpt-oss read no positions.

        Transformers 5.17 counts the chunks of Llama 4 from the start of a packed row."""
        joins_chunks = self.name == "llama4_text" and Version(transformers.__version__) < Version("5.18")
        return self.name not in ("opt", "gpt_oss") and not joins_chunks


@torch.no_grad()
def enlarge(model, size=0.2):
    """Give matrices entries of about `size`, and move all others as far: then every part of the model shows."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = size * torch.randn(weight.shape, generator=generator)
        weight.copy_(noise if weight.ndim > 1 else weight + noise)


def on_core(model, core, dtype):
    model.set_attn_implementation(core)
    return model.to(getattr(torch, dtype)).eval()


@st.composite
def own_models(draw, cores, dtypes):
    count = draw(st.integers(1, 3))
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count)))
    if any(kind in SCORES for kind in kinds):
        cores = [core for core in cores if core in DENSE_CORES]
    heads = draw(st.sampled_from((4, 4, 4, 6)))
    options = draw(st.sampled_from(("default", "example", "linear")))
    if options == "example" and "hyper_feature" in kinds:  # it has an order for each of 4 heads, in 2 groups
        heads = 4
    groups = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    if "diff" in kinds or options == "example" or "paired_heads" in kinds:  # which halve the groups, or more
        groups = groups if groups % 2 == 0 else 2 * groups
    num_pseudo_heads = draw(st.sampled_from((2, 3, 1, 4)))
    if "paired_heads" in kinds and groups % num_pseudo_heads:
        num_pseudo_heads = 2
    window = draw(WINDOWS)
    slides = [window is not None and draw(st.booleans()) for _ in kinds]
    if options == "linear":  # which has no window
        slides = [slide and kind != "hyper" for slide, kind in zip(slides, kinds)]
    more = draw(st.sampled_from((None, *MORE)))
    if more == "local rope" and (len(set(slides)) < 2 or not {"mha", "iha", "paired_heads"}.issuperset(kinds)):
        more = None  # it is for models of both layer types, and the loops of other kinds have no such RoPE
    return OwnModel(
        kinds=kinds,
        slides=tuple(slides),
        window=window if any(slides) else None,
        num_pseudo_heads=num_pseudo_heads,
        heads=heads,
        groups=groups,
        core=draw(st.sampled_from(cores)),
        dtype=draw(st.sampled_from(dtypes)),
        positions=draw(st.sampled_from(("interleaved", "shared"))),
        collapse=draw(st.sampled_from(("per_head", "all_heads"))),
        qk_norm=draw(st.booleans()),
        gate=draw(st.sampled_from((None, "elementwise", "per_head"))),
        xsa=not any(kind in PAIRS for kind in kinds) and draw(st.booleans()),
        recomputes=draw(st.booleans()),
        options=options,
        more=more,
    )


# "iha" and "paired_heads" come up more often, because each of them has a form for every call.
KINDS = ("iha", "iha", "iha", "paired_heads", "paired_heads", *(kind for kind in OPTIONS_CLASSES))
WINDOWS = st.sampled_from((None, None, 2, 3, 4, 5, 6, 20))
DTYPES = ("float32", "float32", "float32", "float64", "bfloat16", "float16")


@st.composite
def decoders(draw, cores, dtypes, names=tuple(BASES), ways=("interleaved", "interleaved", "paired", "plain")):
    name = draw(st.sampled_from(names))
    way = draw(st.sampled_from(ways))
    # Attention sinks cannot be paired. By its name `sdpa_in_blocks` needs a base that hands its window on.
    if name in EAGER or (name in DENSE and way == "plain"):
        way = "interleaved"
    groups = 4 if name in WITHOUT_GROUPS else draw(st.sampled_from((2, 1, 4)))
    if way == "paired":
        groups = max(groups, 2)
    if name in EAGER:
        cores = ("eager",)
    elif way == "plain":
        cores = (SDPA_IN_BLOCKS,)
    elif name in DENSE:
        cores = [core for core in cores if core in DENSE_CORES]
    elif name == "stablelm":
        cores = [core for core in cores if core != "flex_attention"]  # it does not support it
    return Decoder(
        name=name,
        way=way,
        core=draw(st.sampled_from(cores)),
        dtype=draw(st.sampled_from(dtypes)),
        layers=draw(st.sampled_from(((0, 1), (0,), (1,)))),
        own_window=draw(WINDOWS) if name in WITH_WINDOWS else None,
        given_window=draw(WINDOWS) if way != "plain" else None,
        num_pseudo_heads=2 if way == "paired" else draw(st.sampled_from((2, 3))),
        groups=groups,
        collapse=draw(st.sampled_from(("per_head", "all_heads"))),
        recomputes=draw(st.booleans()),
    )


def models(cores=CORES, dtypes=DTYPES):
    return own_models(cores, dtypes) | decoders(cores, dtypes)


# Calls


@dataclass(frozen=True)
class Call:
    """Describe a call: rows of one length, with padding or with documents, at once or in chunks on a cache."""

    chunks: tuple[int, ...]
    padding: tuple[tuple[str, int], ...]  # of each row: where, and of how many tokens
    mask: str | None = None  # "padding", or [batch, 1, tokens, keys]: "bool" or "additive"
    has_positions: bool = False
    documents: tuple[tuple[int, ...], ...] = ()  # their lengths in each row
    skip: int = 0  # the first position of every second document
    has_lengths: bool = False  # whether `cu_seq_lens_q` declares the documents too
    cache: str | None = None  # "dynamic", "whole" (keeps what windows drop) or "static"
    room: int = 0  # for tokens to come, in the mask and in a static cache
    says_no_cache: bool = True  # or leaves the choice to the model
    has_embeddings: bool = False

    @property
    def rows(self):
        return len(self.padding)

    @property
    def length(self):
        return sum(self.chunks)

    @property
    def real(self):
        """Return False where a token is padding, [rows, length]."""
        real = torch.ones(self.rows, self.length, dtype=torch.bool)
        for row, (place, count) in zip(real, self.padding):
            first = {"left": 0, "right": self.length - count, "inner": self.length // 2}.get(place, 0)
            row[first : first + count] = False
        return real

    @property
    def position_ids(self):
        if self.documents:
            starts = (0, self.skip)
            rows = [torch.cat([torch.arange(n) + starts[i % 2] for i, n in enumerate(row)]) for row in self.documents]
            # One row says it for all.
            return torch.stack(rows if len(set(self.documents)) > 1 else rows[:1])
        return (self.real.cumsum(-1) - 1).clamp_min(0)

    @property
    def input_ids(self):
        return random_ids(self.rows, self.length)

    def inputs(self, model, first=0, last=None, cache=None):
        """Return the arguments of a forward of the tokens from `first` up to `last`."""
        last = self.length if last is None else last
        ids = self.input_ids[:, first:last]
        inputs = {"inputs_embeds": model.get_input_embeddings()(ids)} if self.has_embeddings else {"input_ids": ids}
        if self.mask == "padding":
            to_come = torch.zeros(self.rows, self.room, dtype=torch.bool)
            inputs["attention_mask"] = torch.cat((self.real[:, :last], to_come), dim=1).long()
        elif self.mask is not None:
            visible = causal_4d(self.real, "bool")[:, :, first:last, :last]
            hidden = torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
            inputs["attention_mask"] = visible if self.mask == "bool" else hidden
        if self.has_positions or self.documents:
            inputs["position_ids"] = self.position_ids[:, first:last]
        if self.has_lengths:
            inputs |= cumulative_lengths(self.documents[0])
        if cache is not None:
            return inputs | {CACHE: cache}
        return inputs | ({"use_cache": False} if self.says_no_cache else {})

    def logits(self, model):
        """Return the logits of all tokens, [rows, length, vocabulary]."""
        if self.cache is None:
            return model(**self.inputs(model)).logits
        cache = new_cache(self.cache, model, self.length + self.room)
        logits, first = [], 0
        for count in self.chunks:
            logits.append(model(**self.inputs(model, first, first + count, cache)).logits)
            first += count
        return torch.cat(logits, dim=1)

    def logits_alone(self, model, counts_padding=True):
        """Return the logits of each row and document alone, without padding and cache, and zeros for padding.

        A row with padding between its tokens keeps its mask, because a window counts these places too. Flash functions
        do not (`counts_padding`)."""
        expected = []
        for row, (ids, real) in enumerate(zip(self.input_ids, self.real)):
            if self.padding[row][0] == "inner" and counts_padding:
                inputs = {"attention_mask": real[None].long(), "position_ids": self.position_ids[[row]]}
                found = model(ids[None], **inputs, use_cache=False).logits[0][real]
            elif real.any():
                kept = ids[real]
                parts = kept.split(self.documents[row] if self.documents else len(kept))
                found = torch.cat([model(part[None], use_cache=False).logits[0] for part in parts])
            else:
                found = torch.zeros(0, model.config.vocab_size, dtype=torch.float64)
            places = real.nonzero().expand(-1, found.shape[-1])
            expected.append(torch.zeros(len(ids), found.shape[-1], dtype=found.dtype).scatter(0, places, found))
        return torch.stack(expected)


def new_cache(kind, model, length):
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    return DynamicCache(config=model.config) if kind == "dynamic" else DynamicCache()


def reference_of(model):
    """Return the model in float64 on eager attention."""
    reference = copy.deepcopy(model).double()
    reference.set_attn_implementation("eager")
    return reference.eval()


def lengths_of(model):
    """Return the lengths at which something begins: windows, blocks, the form of one new token on a CPU."""
    window, block = model.window or 0, 33 if model.needs_positions else -(-BLOCK // model.num_pseudo_heads)
    around = [*(window + n for n in (-1, 0, 1)), 2 * window, *(window + block + n for n in (-1, 0, 1)), 70, 130]
    return [1, 1, 2, *sorted({5, 9} | {n for n in around if 2 < n <= model.most_tokens})]


@st.composite
def calls(draw, model, caches=("dynamic", "whole", "static"), length=None):
    """Draw a call that the model takes, of a length around which something begins or of a given one."""
    length = length or draw(st.sampled_from(lengths_of(model)))
    rows = draw(st.sampled_from((1, 2, 3, model.heads_of_group)))
    kind = draw(st.sampled_from(("padding", "padding", "documents", "cache", "cache")))
    embeddings = draw(st.booleans())
    if kind == "documents" and model.keeps_documents_apart:
        # Flash functions take documents of one row.
        rows = 1 if model.is_flash else rows
        documents = tuple(draw(cuts(length)) for _ in range(rows))
        # A document whose positions continue those of the one before it would be the same document.
        skip = next(n for n in range(3, 200) if not any(n in row for row in documents))
        return Call(
            chunks=(length,),
            padding=(("none", 0),) * rows,
            documents=documents if draw(st.booleans()) else documents[:1] * rows,
            skip=draw(st.sampled_from((0, skip))) if model.may_skip_positions else 0,
            has_lengths=rows == 1 and draw(st.booleans()),
            has_embeddings=embeddings,
        )

    padding = tuple(draw(paddings(model, length, may_be_empty=row > 0)) for row in range(rows))
    is_padded = any(count for _, count in padding)
    # Absolute positions, and those after a hole, are those of the row alone only where they are given.
    needs_positions = model.needs_positions or any(place == "inner" for place, _ in padding)
    if not model.takes_static:  # nor caches of the caller
        caches = [each for each in caches if each == "dynamic"]
    cache = draw(st.sampled_from(caches)) if kind == "cache" and caches else None
    masks = ["padding"] if is_padded else [None, "padding"]
    if cache != "static" and length <= (model.window or length):  # a mask over tokens cannot hold a window
        masks += model.dense_masks
    mask = draw(st.sampled_from(masks))
    is_dense = mask in model.dense_masks
    return Call(
        chunks=draw(cuts(length)) if cache else (length,),
        padding=padding,
        mask=mask,
        has_positions=is_dense or (is_padded and needs_positions) or draw(st.booleans()),
        cache=cache,
        # A flash function takes the last columns of a mask for those of the keys.
        room=draw(st.sampled_from((0, 3))) if cache and not is_dense and not model.is_flash else 0,
        says_no_cache=draw(st.booleans()),
        has_embeddings=embeddings,
    )


@st.composite
def cuts(draw, length):
    """Draw lengths that add up to `length`. Single tokens at the end come up often."""
    places = sorted({1, 2, 3, length // 2, length - 2, length - 1} & set(range(1, length)))
    if not places:
        return (length,)
    chosen = draw(st.lists(st.sampled_from(places) | st.integers(1, length - 1), max_size=3, unique=True))
    bounds = [0, *sorted(chosen), length]
    return tuple(last - first for first, last in zip(bounds, bounds[1:]))


@st.composite
def paddings(draw, model, length, may_be_empty):
    """Draw where a row has padding, and of how many tokens."""
    if (model.core, model.dtype) == ("eager", "float64"):
        # So it is in Llama: the softmax is in float32, where the lowest float64 is -inf, and a query that sees nothing
        # becomes NaN.
        return ("none", 0)
    places = ("none", "left", "left", "right", "inner", "all")
    place = draw(st.sampled_from(places if may_be_empty else places[:-1]))
    most = {"none": 0, "all": length}.get(place, length - 1)
    if place == "inner":  # each query in a hole sees a real key
        most = min(length // 2 - 1, 3, (model.window or length) - 1)
        if model.is_flash and model.window is not None:
            most = 0  # it counts a window in real tokens, of which a cache keeps too few, as in Mistral
    if place == "none" or most < 1:
        return ("none", 0)
    return (place, length if place == "all" else draw(st.integers(1, most)))


@st.composite
def cases(draw, cores=CORES, dtypes=DTYPES, **options):
    model = draw(models(cores, dtypes))
    return model, draw(calls(model, **options))


@dataclass(frozen=True)
class Generation:
    """Describe a call of `generate`: prompts with padding on the left, a cache, and how the prompt is read."""

    prompts: tuple[int, ...]  # their lengths
    is_static: bool
    chunk: int | None
    new_tokens: int = 3
    mode: str = "greedy"  # a key of `MODES`

    def run(self, model, **options):
        """Return what `generate` returns, with logits. It begins with the same random numbers each time."""
        torch.manual_seed(0)
        length = max(self.prompts)
        real = torch.arange(length) >= length - torch.tensor(self.prompts)[:, None]
        ids = random_ids(len(self.prompts), length).masked_fill(~real, 0)
        if not options:
            static = {"cache_implementation": "static", "disable_compile": True} if self.is_static else {}
            options = static | ({} if self.chunk is None else {"prefill_chunk_size": self.chunk})
        options |= {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True, **MODES[self.mode]}
        config = GenerationConfig(max_new_tokens=self.new_tokens, **options)
        return model.generate(ids, attention_mask=real.long(), generation_config=config)


MODES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "top_k": 5, "num_return_sequences": 2},
}


@st.composite
def generations(draw, model, modes):
    lengths = [n for n in lengths_of(model) if n < model.most_tokens]
    length = draw(st.sampled_from(lengths))
    rows = draw(st.sampled_from((1, 2, 3, model.heads_of_group)))
    mode = draw(st.sampled_from(modes))
    is_padded = mode == "greedy" and draw(st.booleans()) and (model.core, model.dtype) != ("eager", "float64")
    others = st.sampled_from([n for n in lengths if n <= length]) if is_padded else st.just(length)
    return Generation(
        prompts=(length, *(draw(others) for _ in range(rows - 1))),
        is_static=draw(st.booleans()) and model.takes_static,
        chunk=draw(st.sampled_from((None, 1 if length < 20 else 50, 4 if length < 50 else 65))),
        mode=mode,
    )
