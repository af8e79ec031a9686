"""Convert a pretrained Llama-like checkpoint to "iha" or another attention kind without changing what it computes.

The file of a kind in iha/kinds/ gives the values at which its parameters start.
"""

import copy
import json

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from iha.errors import UserError, refusing
from iha.kinds import companion_of
from iha.sources import Source
from modeling_iha import IHAConfig, IHAForCausalLM, set_mixing_scale
from modeling_iha.flop_matched_window import flop_matched_window
from modeling_iha.mixing_weights import trained_mixing
from modeling_iha.modeling_iha import ATTENTION_CLASSES

from .architectures import (
    ARCHITECTURES,
    SHARED_FIELDS,
    check_source,
    exact_length,
    layer_windows,
    rope_layers,
)
from .arguments import check_layers
from .shared import Converted, build, new_config, read_source, write_checkpoint


def iha_config(
    source: PreTrainedConfig,
    num_pseudo_heads: int | None = None,
    schedule: str = "global",
    window: int | None = None,
    kind: str = "iha",
    options: dict | None = None,
    output_gate: str | None = None,
) -> IHAConfig:
    """Return the configuration of the converted model.

    Raise `UserError` if the source or an argument does not allow one.
    """
    check_layers(num_pseudo_heads, schedule, window, kind, output_gate)
    architecture = check_source(source)
    context = source.max_position_embeddings
    kinds = [kind]
    windows = layer_windows(source)
    if num_pseudo_heads is not None and schedule == "hybrid":
        # The paper's schedule: four sliding IHA layers, then a plain global one (IHA, Section 5.1 and Appendix C).
        kinds = ["iha", "iha", "iha", "iha", "mha"]
        try:
            window = window or flop_matched_window(context, num_pseudo_heads)
        except ValueError:
            none = f"num_pseudo_heads={num_pseudo_heads} leaves no window of 2 tokens or more in {context}"
            advice = "give --window, or fewer pseudo-heads"
            raise UserError(f"{none}, by the paper's N / (2 P^2) of the hybrid schedule: {advice}.") from None
        if window > context:
            raise UserError(f"window={window}: expected at most the source's context, {context} tokens.")
        windows = [None if i % 5 == 4 else window for i in range(source.num_hidden_layers)]
    fields = {name: copy.deepcopy(getattr(source, name)) for name in SHARED_FIELDS if hasattr(source, name)}
    return new_config(
        IHAConfig,
        **fields,
        **architecture.settings(source),
        head_dim=getattr(source, "head_dim", None),
        attention_kinds=[kinds[i % len(kinds)] for i in range(source.num_hidden_layers)],
        attention_options=None if options is None else {kind: options},
        layer_types=["full_attention" if window is None else "sliding_attention" for window in windows],
        sliding_window=next((window for window in windows if window is not None), None),
        no_rope_layers=rope_layers(source),
        num_pseudo_heads=num_pseudo_heads,
        pseudo_positions="shared",
        output_gate=output_gate,
    )


def exact_start(
    config: IHAConfig, layer: int, generator: torch.Generator, value_offsets: str
) -> dict[str, torch.Tensor]:
    """Return by name the parameters of a layer's attention that multi-head attention lacks, at their exact start.

    Mixing weights come with their own starts and scales, at scale 1 (see `Mixing`)."""
    kind = config.attention_kinds[layer]
    start = companion_of(kind).start
    if start is None:
        return {}
    started = start(config, generator, value_offsets)
    for name, value in list(started.items()):
        started |= {f"{name}_start": torch.zeros_like(value), f"{name}_scale": torch.ones(())}
    with torch.device("meta"):
        own = ATTENTION_CLASSES[kind].for_layer(config, layer).state_dict()
    return {name: value for name, value in started.items() if name in own}


def half_open_gate(config: IHAConfig, attention: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return by name the gate of an attention module, and the output projection that makes up for it.

    A gate whose weights are zero is sigmoid(0) = 1/2 everywhere, and a doubled projection undoes it. Both factors are
    powers of two, so nothing is rounded. The projection's bias stays."""
    gates = config.num_attention_heads * (config.head_dim if config.output_gate == "elementwise" else 1)
    return {
        "output_gate.weight": torch.zeros(gates, config.hidden_size),
        "o_proj.weight": 2 * attention["o_proj.weight"],
    }


def convert_model(
    source: PreTrainedModel,
    num_pseudo_heads: int | None = None,
    schedule: str = "global",
    window: int | None = None,
    kind: str = "iha",
    options: dict | None = None,
    value_offsets: str = "balanced",
    seed: int = 0,
    mixing_scale: float | None = None,
    output_gate: str | None = None,
) -> IHAForCausalLM:
    """Return the IHA model that computes what `source` does, in eval mode and the dtype of `source`.

    The arguments are those of `iha.api.convert`. The result shares the memory of the weights of `source`: delete one
    of the two, or copy it, before training. Raise `UserError` if the source is not supported or an argument does not
    fit it.
    """
    config = iha_config(source.config, num_pseudo_heads, schedule, window, kind, options, output_gate)
    generator = torch.Generator().manual_seed(seed)
    state = source.state_dict()
    lacks = ARCHITECTURES[source.config.model_type].lacks
    for i, layer_kind in enumerate(config.attention_kinds):
        prefix = f"model.layers.{i}.self_attn."
        state |= {prefix + name: torch.zeros(config.hidden_size, dtype=source.dtype) for name in lacks}
        of_mha = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        started = exact_start(config, i, generator, value_offsets)
        started |= companion_of(layer_kind).from_mha(config, of_mha)
        if output_gate is not None:
            started |= half_open_gate(config, of_mha | started)
        state |= {prefix + name: value.to(source.dtype) for name, value in started.items()}
    model = build(IHAForCausalLM, config, state, source.dtype, source.generation_config)
    has_mixing = bool(trained_mixing(model))
    if mixing_scale is not None and not has_mixing:
        raise UserError(f"kind {kind!r} with these options has no weights that mix heads: leave out mixing_scale.")
    if has_mixing:
        mixing_scale = 40.0 if mixing_scale is None else mixing_scale
        with refusing("mixing_scale", ValueError):
            set_mixing_scale(model, mixing_scale)
    return model


def llama_to_iha(
    source: Source,
    destination: str,
    dtype: str,
    layers: tuple[int | None, str, int | None, str, dict | None],
    output_gate: str | None,
    value_offsets: str,
    seed: int,
    mixing_scale: float | None,
) -> None:
    """Convert a checkpoint, and write it, its tokenizer and a model card into a new directory.

    `layers` are the arguments of `iha_config` after the first. Raise `UserError`, and leave nothing behind, if the
    source cannot be converted.
    """

    num_pseudo_heads, schedule, _, kind, options = layers

    def make():
        model, tokenizer = read_source(source, lambda config: iha_config(config, *layers, output_gate), dtype)
        converted = convert_model(model, *layers, value_offsets, seed, mixing_scale, output_gate)
        config = converted.config
        how = f"({model.config.model_type})"
        if kind == "iha":
            how += f" with {num_pseudo_heads} pseudo-heads and the {schedule} schedule"
        else:
            how += f" to attention of kind {kind!r}" + (f" with {json.dumps(options)}" if options else "")
        if output_gate is not None:
            how += f" with an output gate ({output_gate})"
        if schedule == "hybrid":
            how += f", whose windows are {config.sliding_window} of {config.max_position_embeddings} tokens"
        return Converted(converted, tokenizer, how, exact_length(model.config, config))

    write_checkpoint(source, destination, make)
