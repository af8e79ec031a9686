"""Describe each attention mechanism to cards, converters and benchmarks; a checkpoint ships none of this.

The file `iha/kinds/<kind>.py` of a kind of `ATTENTION_CLASSES` has the name of the kind. A kind without a file has
the defaults of `Companion`.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedConfig

from iha.layer_cost import Cost
from modeling_iha import IHAConfig
from modeling_iha.attention_mha import MultiHeadAttention
from modeling_iha.modeling_iha import ATTENTION_CLASSES
from modeling_iha.virtual_tokens import View


@dataclass(frozen=True)
class Companion:
    """Hold the `COMPANION` of a companion file.

    Attributes:
        card: what a layer does, for the reader of a model card; `{config.field}` is a field of its config. The default
            is the first sentence of the class's docstring.
        paper: where the mechanism was published, in Markdown.
        cost: a function of (config, tokens, window in tokens or `None`, form as in `counted_pairs`) that returns the
            cost of the attention between the projections.
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
    cost: Callable[[IHAConfig, int, int | None, str], Cost] | None = None
    times_pairs: Callable[[IHAConfig], int] | None = None
    served_by_vllm: bool = False
    start: Callable[[IHAConfig, torch.Generator | None], dict[str, torch.Tensor]] | None = None
    from_mha: Callable[[IHAConfig, dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda config, attention: {}
    control: str | None = None


def companion_of(kind: str) -> Companion:
    """Return the companion of a kind, with its defaults filled in, or of a layer of Transformers by its model type."""
    if kind not in ATTENTION_CLASSES:
        return Companion(card="the base model's own layer.")
    name = f"{__name__}.{kind}"
    mechanism = importlib.import_module(name).COMPANION if find_spec(name) else Companion()
    card = mechanism.card or _first_sentence(ATTENTION_CLASSES[kind]).replace("{", "{{").replace("}", "}}")
    return replace(mechanism, card=card)


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


def additions_of(config: PreTrainedConfig) -> list[Companion]:
    """Return what a configuration adds to the heads of every layer."""
    if not isinstance(config, IHAConfig):
        return []
    return [addition for field, addition in ADDITIONS.items() if getattr(config, field)]


def all_companions() -> dict[str, Companion]:
    """Return the companion of every kind, in the order of `ATTENTION_CLASSES`."""
    return {kind: companion_of(kind) for kind in ATTENTION_CLASSES}


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
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        num_pseudo_heads=virtual_tokens_per_token(config),
        pseudo_positions="shared",
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
