"""Convert a pretrained Llama-like checkpoint to "iha" or another attention kind without changing what it computes.

The file of a kind in iha/kinds/ gives the values at which its parameters start.
"""

import copy
import json

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from iha.checkpoints import load_config
from iha.errors import UserError, refusing
from iha.kinds import companion_of
from iha.sources import Source
from modeling_iha import IHAConfig, IHAForCausalLM, set_mixing_scale
from modeling_iha.flop_matched_window import flop_matched_window
from modeling_iha.mixing_weights import trained_mixing

from .architectures import (
    ARCHITECTURES,
    SHARED_FIELDS,
    check_source,
    exact_length,
    layer_windows,
    rope_layers,
)
from .arguments import Layers
from .shared import Converted, build, new_config, read_source


def iha_config(source: PreTrainedConfig, layers: Layers) -> IHAConfig:
    """Return the configuration of the converted model. Raise `UserError` if the source does not allow such layers."""
    architecture = check_source(source)
    context = source.max_position_embeddings
    kinds = [layers.kind]
    windows = layer_windows(source)
    if layers.schedule == "hybrid":
        # The paper's schedule: four sliding IHA layers, then a plain global one (IHA, Section 5.1 and Appendix C).
        kinds = ["iha", "iha", "iha", "iha", "mha"]
        try:
            window = layers.window or flop_matched_window(context, layers.num_pseudo_heads)
        except ValueError:
            none = f"num_pseudo_heads={layers.num_pseudo_heads} leaves no window of 2 tokens or more in {context}"
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
        attention_options=None if layers.options is None else {layers.kind: layers.options},
        layer_types=["full_attention" if window is None else "sliding_attention" for window in windows],
        sliding_window=next((window for window in windows if window is not None), None),
        no_rope_layers=rope_layers(source),
        num_pseudo_heads=layers.num_pseudo_heads,
        pseudo_positions="shared",
        output_gate=layers.output_gate,
    )


def added_parameters(config: IHAConfig, kind: str, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return by name the parameters of attention that multi-head attention lacks, at the exact start of a kind.

    Each comes with its own start and scale, at scale 1, which only mixing weights have (see `Mixing`)."""
    start = companion_of(kind).start
    values = {} if start is None else start(config, generator)
    starts = {f"{name}_start": torch.zeros_like(value) for name, value in values.items()}
    return values | starts | {f"{name}_scale": torch.ones(()) for name in values}


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
    config: IHAConfig,
    value_offsets: str = "balanced",
    seed: int = 0,
    mixing_scale: float | None = None,
) -> IHAForCausalLM:
    """Return the IHA model that computes what `source` does, in eval mode and the dtype of `source`.

    `config` is that of `iha_config`, and the others are arguments of `iha.api.convert`. The result shares the memory
    of the weights of `source`: delete one of the two, or copy it, before training. Raise `UserError`.
    """
    generator = torch.Generator().manual_seed(seed) if value_offsets == "balanced" else None
    state = source.state_dict()
    lacks = ARCHITECTURES[source.config.model_type].lacks
    with torch.device("meta"):
        known = IHAForCausalLM(config).state_dict().keys()
    for i, kind in enumerate(config.attention_kinds):
        prefix = f"model.layers.{i}.self_attn."
        state |= {prefix + name: torch.zeros(config.hidden_size, dtype=source.dtype) for name in lacks}
        of_mha = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        added = added_parameters(config, kind, generator)
        own = {name: value for name, value in added.items() if prefix + name in known}
        own |= companion_of(kind).from_mha(config, of_mha)
        if config.output_gate is not None:
            own |= half_open_gate(config, of_mha | own)
        state |= {prefix + name: value.to(source.dtype) for name, value in own.items()}
    model = build(IHAForCausalLM, config, state, source.dtype, source.generation_config)
    has_mixing = bool(trained_mixing(model))
    if mixing_scale is not None and not has_mixing:
        kind = config.attention_kinds[0]
        raise UserError(f"kind {kind!r} with these options has no weights that mix heads: leave out mixing_scale.")
    if has_mixing:
        mixing_scale = 40.0 if mixing_scale is None else mixing_scale
        with refusing("mixing_scale", ValueError):
            set_mixing_scale(model, mixing_scale)
    return model


def llama_to_iha(
    source: Source, layers: Layers, dtype: str, value_offsets: str, seed: int, mixing_scale: float | None
) -> Converted:
    """Read a checkpoint of Llama's family with weights in `dtype`, and convert it.

    Raise `UserError` if it cannot be converted.
    """
    print(f"1 of 2: reading {source}", flush=True)
    of_source = load_config(source)
    config = iha_config(of_source, layers)  # rejects what it can before the weights are read, which takes long
    model, tokenizer = read_source(source, of_source, dtype)
    converted = convert_model(model, config, value_offsets, seed, mixing_scale)
    how = f"({of_source.model_type})"
    if layers.kind == "iha":
        how += f" with {layers.num_pseudo_heads} pseudo-heads and the {layers.schedule} schedule"
    else:
        how += f" to attention of kind {layers.kind!r}"
    if layers.options:
        how += f" with {json.dumps(layers.options)}"
    if layers.output_gate is not None:
        how += f" with an output gate ({layers.output_gate})"
    if layers.schedule == "hybrid":
        how += f", whose windows are {config.sliding_window} of {config.max_position_embeddings} tokens"
    return Converted(converted, tokenizer, source, how, exact_length(of_source, config))
