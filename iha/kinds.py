"""Describe each attention mechanism to cards, converters and servers; a checkpoint ships none of this.

A kind of `ATTENTION_CLASSES` without an entry in `COMPANIONS` has the defaults of `Companion`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from modeling_iha import IHAConfig
from modeling_iha.attention_dcmha import CompositionWeights
from modeling_iha.attention_mha import MultiHeadAttention
from modeling_iha.exact_start import exact_start
from modeling_iha.modeling_iha import ATTENTION_CLASSES
from modeling_iha.virtual_tokens import View


@dataclass(frozen=True)
class Companion:
    """Hold what is known of a kind.

    Attributes:
        card: what a layer does, for the reader of a model card; `{config.field}` is a field of its config. The default
            is the first sentence of the class's docstring.
        paper: where the mechanism was published, in Markdown.
        times_pairs: for a kind with virtual tokens, a function of the config that returns how many times the pairs of
            "mha" a layer over all tokens has.
        served_by_vllm: whether the plugin vllm_iha serves the kind.
        start: a function of (config, generator) that returns parameters of the attention module by name, float32,
            with which a layer computes exactly multi-head attention. Only "iha" goes without a generator. Without
            this function no checkpoint is converted to the kind.
        from_mha: a function of (config, parameters of multi-head attention by name) that returns those of them that
            have another value at the exact start, by name. By default all keep their values.
        control: the name of the parameter whose sign the control of a verification reverses.
    """

    card: str = ""
    paper: str | None = None
    times_pairs: Callable[[IHAConfig], int] | None = None
    served_by_vllm: bool = False
    start: Callable[[IHAConfig, torch.Generator | None], dict[str, torch.Tensor]] | None = None
    from_mha: Callable[[IHAConfig, dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda config, attention: {}
    control: str | None = None


# The exact starts from Llama


def start_iha(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return the mixing and collapse that leave a layer's output unchanged (see modeling_iha/exact_start.py).

    Value offsets from the generator make the pseudo-heads differ. Without one they are equal."""
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    return exact_start(heads, config.num_pseudo_heads, config.pseudo_collapse, generator)


def start_talking_heads(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return identity maps of scores and of weights."""
    return {name: torch.eye(config.num_attention_heads) for name in ("score_mix.weight", "weight_mix.weight")}


def start_dcmha(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return compositions that change nothing; the generator draws their first projections as at any start."""
    options = config.options_of("dcmha")
    state = {}
    if options.base_map:
        size = config.num_attention_heads // options.num_groups
        maps = torch.eye(size).repeat(options.num_groups, 1, 1)
        state = {f"{name}.weight": maps.clone() for name in ("pre_base", "post_base")}
    for name in ("pre_query", "pre_key", "post_query", "post_key"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            composition = CompositionWeights(config)
            composition.init_mechanism(config)
        composition.init_identity()
        state |= composition.state_dict(prefix=f"{name}.")
    return state


def start_diff_v2(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return a lambda of one half.

    Query head h of Llama becomes heads 2 h and 2 h + 1, which compute the same output y, because they are of the group
    that head h was of: 2 h // (2 H / G) = (2 h + 1) // (2 H / G) = h // (H / G). Where W is zero, lambda is sigmoid(0)
    = 1/2, so their difference is y - y / 2 = y / 2, and a doubled output projection undoes the half. All factors are
    powers of two, so nothing is rounded. The output projection's bias stays."""
    return {"lambda_proj.weight": torch.zeros(config.num_attention_heads, config.hidden_size)}


def heads_twice(config: IHAConfig, attention: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return every query head twice, and a doubled output projection."""
    queries = {
        name: rows.unflatten(0, (-1, config.head_dim)).repeat_interleave(2, dim=0).flatten(0, 1)
        for name, rows in attention.items()
        if name.startswith("q_proj.")
    }
    return {**queries, "o_proj.weight": 2 * attention["o_proj.weight"]}


def start_knocking_heads(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return identity maps. The MLP of the values has U = D = I and G = 0, so it is 2 (v * 1/2) = v."""
    options = config.options_of("knocking_heads")
    d = config.head_dim
    linear = [options.queries and "q_map", options.keys and "k_map", options.values == "linear" and "v_map"]
    state = {f"{name}.weight": torch.eye(d) for name in linear if name}
    if options.values == "mlp":
        state |= {"v_map.up": torch.eye(d), "v_map.gate": torch.zeros(d, d), "v_map.down": torch.eye(d)}
    return state


COMPANIONS = {
    "mha": Companion(
        card="ordinary multi-head attention.",
        paper="Vaswani et al., 2017, [Attention Is All You Need](https://arxiv.org/abs/1706.03762)",
        served_by_vllm=True,
    ),
    "iha": Companion(
        card="Interleaved Head Attention: every head is a learned combination of all heads, and every token takes "
        "part in attention as {config.num_pseudo_heads} interleaved virtual tokens. The KV cache holds base keys and "
        "values only, so it is as large as that of the same model with ordinary attention.",
        paper="Duvvuri, Ekbote, Bansal, Tiwari, Khatri, Brandfonbrener, Liang, Dhillon and Zaheer, 2026, "
        "[Interleaved Head Attention](https://arxiv.org/abs/2602.21371)",
        times_pairs=lambda config: config.num_pseudo_heads**2,
        served_by_vllm=True,
        start=start_iha,
        control="v_mix.weight",
    ),
    "talking_heads": Companion(
        card="Talking-Heads Attention: the heads mix their attention scores before the softmax and their weights "
        "after it.",
        paper="Shazeer et al., 2020, [Talking-Heads Attention](https://arxiv.org/abs/2003.02436)",
        start=start_talking_heads,
        control="weight_mix.weight",
    ),
    "diff": Companion(
        card="differential attention as in DiffLlama: the difference of two softmaxes over the same values.",
        paper="Ye et al., 2024, [Differential Transformer](https://arxiv.org/abs/2410.05258)",
        control="lambda_q1",
    ),
    "dcmha": Companion(
        card="Dynamically Composable Multi-Head Attention: before and after the softmax, heads are combined with "
        "weights that are computed from the query's and the key's token. The KV cache also holds the weights of each "
        "key's token.",
        paper="Xiao et al., 2024, Improving Transformers with Dynamically Composable Multi-Head Attention "
        "([code](https://github.com/Caiyun-AI/DCFormer))",
        start=start_dcmha,
        # At the exact start the kind's own parameters have no effect, because they multiply parameters that are zero.
        control="v_proj.weight",
    ),
    "hyper_feature": Companion(
        card="HyperFeatureAttention: a head's scores are products of several features' scores.",
        paper="A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions: Representation, "
        "Training, Generalization",
    ),
    "hyper": Companion(
        card="HyperAttention: every token attends to tuples of tokens.",
        paper="A Theoretical Study of (Hyper) Self-Attention through the Lens of Interactions: Representation, "
        "Training, Generalization",
    ),
    "simplicial": Companion(
        card="2-simplicial attention: every token attends to pairs of tokens.",
        paper="Roy et al., 2025, Fast and Simplex: 2-Simplicial Attention in Triton",
    ),
    "diff_v2": Companion(
        card="differential attention, version 2: each head is the difference of two softmaxes over the same keys and "
        "values. It has twice the query heads, and the KV cache is as large as that of ordinary attention.",
        paper="Ye, Dong, Sun and Wei, 2026, Differential Transformer V2 "
        "([code](https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2))",
        start=start_diff_v2,
        from_mha=heads_twice,
        # At the exact start lambda's weights are zero.
        control="v_proj.weight",
    ),
    "knocking_heads": Companion(
        card="knocking-heads attention: maps that all heads share act on the values, and where configured on the "
        "queries and keys. Linear maps only re-parametrise the projections.",
        paper="Zhou et al., 2025, [Knocking-Heads Attention](https://arxiv.org/abs/2510.23052)",
        start=start_knocking_heads,
        control="v_proj.weight",
    ),
    "paired_heads": Companion(
        # No exact start: with Llama's weights every head of a group sees the keys and values of the others too, and
        # the layer has no parameters that could undo it.
        card="paired heads: {config.num_pseudo_heads} heads share one sequence, with a virtual token of each head "
        "for each token, and attend to the keys and values of all of them. The layer has the parameters and the KV "
        "cache of ordinary attention.",
        paper="modded-nanogpt, 2026, [Paired Head "
        "Attention](https://github.com/KellerJordan/modded-nanogpt/tree/master/records/track_1_short/2026-01-07_PairedHeadAttention)",
        times_pairs=lambda config: config.num_pseudo_heads,
        served_by_vllm=True,
    ),
}

# The additions of `IHAConfig` to the heads of every layer, by field.
ADDITIONS = {
    "output_gate": Companion(
        card="an output gate (`{config.output_gate}`): a sigmoid of the layer's input scales the output of each head.",
        paper="Qiu et al., 2025, [Gated Attention for Large Language Models](https://arxiv.org/abs/2505.06708)",
    ),
    "exclusive_attention": Companion(
        card="exclusive self attention: the output of each head is left without what is along its value of the same "
        "token.",
        paper="Zhai, 2026, [Exclusive Self Attention](https://arxiv.org/abs/2603.09078)",
    ),
}


def companion_of(kind: str) -> Companion:
    """Return the companion of a kind, with its defaults filled in, or of a layer of Transformers by its model type."""
    if kind not in ATTENTION_CLASSES:
        return Companion(card="the base model's own layer.")
    mechanism = COMPANIONS.get(kind, Companion())
    card = mechanism.card or _first_sentence(ATTENTION_CLASSES[kind]).replace("{", "{{").replace("}", "}}")
    return replace(mechanism, card=card)


def additions_of(config: PreTrainedConfig) -> list[Companion]:
    """Return what a configuration adds to the heads of every layer."""
    if not isinstance(config, IHAConfig):
        return []
    return [addition for field, addition in ADDITIONS.items() if getattr(config, field)]


def virtual_tokens_per_token(config: PreTrainedConfig) -> int:
    """Return the number of virtual tokens that the layers with virtual tokens of a model make of each token."""
    kinds = getattr(config, "attention_kinds", None)  # only `IHAConfig` has the field
    if kinds is not None and not any(companion_of(kind).times_pairs for kind in kinds):
        return 1
    return getattr(config.get_text_config(decoder=True), "num_pseudo_heads", 1)


def is_interleaved(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is that of a decoder of Transformers with interleaved or paired heads."""
    return hasattr(config.get_text_config(decoder=True), "interleaved_layers")


def interleaved_kind(config: PreTrainedConfig) -> str:
    """Return the kind of the layers that `interleave_heads` or `pair_heads` changed."""
    return "paired_heads" if config.get_text_config(decoder=True).virtual_heads == "paired" else "iha"


def is_ours(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is that of an `IHAForCausalLM`, or of interleaved or paired heads."""
    return isinstance(config, IHAConfig) or is_interleaved(config)


def described(config: PreTrainedConfig) -> Any:
    """Return a configuration with the kind, the type and P of each layer in the fields of an IHAConfig.

    In a decoder of Transformers the kind of an interleaved layer is `interleaved_kind`, and that of another layer is
    the model type.
    """
    if isinstance(config, IHAConfig):
        return config
    text = config.get_text_config(decoder=True)
    interleaved = [layer_number(name) for name in getattr(text, "interleaved_layers", ())]
    layers = range(text.num_hidden_layers)
    window = getattr(text, "sliding_window", None)
    kinds = dict.fromkeys(layers, config.model_type)
    if interleaved:
        kinds |= dict.fromkeys(interleaved, interleaved_kind(config))
    types = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * len(layers)
    if own := getattr(text, "interleaved_window", None):
        types = [f"window of {own}" if i in interleaved else types[i] for i in layers]
    return View(
        text,
        attention_kinds=[kinds[i] for i in layers],
        layer_types=types,
        sliding_window=window,
        num_pseudo_heads=virtual_tokens_per_token(config),
    )


def layer_number(name: str) -> int:
    """Return the number in the name of a module of a layer, such as "layers.3.self_attn"."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def own_modules(model: torch.nn.Module) -> list[str]:
    """Return the names of the modules that a kind of attention initialises by itself, such as the mixing.

    They are small and have separate starts, so they train in full next to adapters.
    """
    modules = {name.rpartition(".")[2]: module for name, module in model.named_modules()}
    with_starts = {name: module for name, module in modules.items() if hasattr(module, "init_mechanism")}
    return sorted(name for name, module in with_starts.items() if not isinstance(module, MultiHeadAttention))


def _first_sentence(documented: type) -> str:
    """Return the first sentence of a class's docstring on one line, or the class's name if it has none."""
    text = (documented.__doc__ or f"{documented.__name__}.").strip()
    return " ".join(re.split(r"(?<=\.)\s+(?=[A-Z])|\n\s*\n", text, maxsplit=1)[0].split())
