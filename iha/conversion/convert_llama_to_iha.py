"""Convert a pretrained Llama-like checkpoint to "iha" or another attention kind without changing what it computes.

iha/kinds.py has the values at which the parameters of a kind start.
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
from modeling_iha.flop_matched_window import flop_matched_window, paper_layers
from modeling_iha.mixing_weights import trained_mixing

from .architectures import (
    ARCHITECTURES,
    SHARED_FIELDS,
    architecture_of,
    exact_length,
    layer_windows,
    rope_layers,
)
from .layers import Layers
from .shared import Converted, build, new_config, read_source


def iha_config(source_config: PreTrainedConfig, layers: Layers) -> IHAConfig:
    """Return the configuration of the converted model. Raise `UserError` if the source does not allow such layers."""
    architecture = architecture_of(source_config)
    kinds, windows = zip(*kinds_and_windows(source_config, layers))
    fields = {
        name: copy.deepcopy(getattr(source_config, name)) for name in SHARED_FIELDS if hasattr(source_config, name)
    }
    return new_config(
        IHAConfig,
        **fields,
        **architecture.settings(source_config),
        head_dim=getattr(source_config, "head_dim", None),
        attention_kinds=list(kinds),
        attention_options=None if layers.options is None else {layers.kind: layers.options},
        layer_types=["full_attention" if window is None else "sliding_attention" for window in windows],
        sliding_window=next((window for window in windows if window is not None), None),
        no_rope_layers=rope_layers(source_config),
        num_pseudo_heads=layers.num_pseudo_heads,
        pseudo_positions="shared",
        output_gate=layers.output_gate,
    )


def kinds_and_windows(source_config: PreTrainedConfig, layers: Layers) -> list[tuple[str, int | None]]:
    """Return the kind of each layer of the converted model and its window, `None` for one over all tokens.

    The hybrid schedule is the paper's: four sliding IHA layers, then a plain global one (IHA, Section 5.1 and
    Appendix C). Raise `UserError`."""
    if layers.schedule == "global":
        return [(layers.kind, window) for window in layer_windows(source_config)]
    numbers = range(source_config.num_hidden_layers)
    window = hybrid_window(source_config.max_position_embeddings, layers)
    sliding = paper_layers(numbers)
    return [("iha", window) if number in sliding else ("mha", None) for number in numbers]


def hybrid_window(context: int, layers: Layers) -> int:
    """Return the window of the hybrid schedule in a context, both in tokens. Raise `UserError` if it is too long."""
    window = layers.window
    if window is None:
        try:
            window = flop_matched_window(context, layers.num_pseudo_heads)
        except ValueError:
            none = f"num_pseudo_heads={layers.num_pseudo_heads} leaves no window of 2 tokens or more in {context}"
            advice = "give --window, or fewer pseudo-heads"
            raise UserError(f"{none}, by the paper's N / (2 P^2) of the hybrid schedule: {advice}.") from None
    if window > context:
        raise UserError(f"window={window}: expected at most the source's context, {context} tokens.")
    return window


def attention_at_start(
    config: IHAConfig, kind: str, of_mha: dict[str, torch.Tensor], generator: torch.Generator | None
) -> dict[str, torch.Tensor]:
    """Return by name the parameters of an attention module with which it computes what multi-head attention does.

    `of_mha` are those of multi-head attention, and the ones that keep their values are left out."""
    companion = companion_of(kind)
    new = {} if companion.start is None else companion.start(config, generator)
    # Weights that mix heads have two buffers too, with which the weight is the value (`Mixing`): a start of 0 and a
    # scale of 1. `convert_model` leaves out the buffers of all other weights, which the model lacks.
    starts = {f"{name}_start": torch.zeros_like(value) for name, value in new.items()}
    scales = {f"{name}_scale": torch.ones(()) for name in new}
    changed = companion.from_mha(config, of_mha)
    gate = {} if config.output_gate is None else half_open_gate(config, of_mha | changed)
    return new | starts | scales | changed | gate


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
    source_model: PreTrainedModel,
    config: IHAConfig,
    value_offsets: str = "balanced",
    seed: int = 0,
    mixing_scale: float | None = None,
) -> IHAForCausalLM:
    """Return the IHA model that computes what `source_model` does, in eval mode and the dtype of `source_model`.

    `config` is that of `iha_config`, and the others are arguments of `iha.api.convert`. The result shares the memory
    of the weights of `source_model`: delete one of the two, or copy it, before training. Raise `UserError`.
    """
    generator = torch.Generator().manual_seed(seed) if value_offsets == "balanced" else None
    state = source_model.state_dict()
    lacks = ARCHITECTURES[source_model.config.model_type].lacks
    with torch.device("meta"):
        known = IHAForCausalLM(config).state_dict().keys()
    for i, kind in enumerate(config.attention_kinds):
        prefix = f"model.layers.{i}.self_attn."
        state |= {prefix + name: torch.zeros(config.hidden_size, dtype=source_model.dtype) for name in lacks}
        of_mha = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        for name, value in attention_at_start(config, kind, of_mha, generator).items():
            if prefix + name in known:  # the model has these buffers for weights that mix heads
                state[prefix + name] = value.to(source_model.dtype)
    model = build(IHAForCausalLM, config, state, source_model.dtype, source_model.generation_config)
    scale_mixing(model, mixing_scale)
    return model


def scale_mixing(model: IHAForCausalLM, mixing_scale: float | None) -> None:
    """Let the mixing learn at `mixing_scale` times the optimizer's rate, by default 40 times.

    Raise `UserError` for a given scale if there is no mixing."""
    if trained_mixing(model):
        with refusing("mixing_scale", ValueError):
            set_mixing_scale(model, 40.0 if mixing_scale is None else mixing_scale)
    elif mixing_scale is not None:
        kind = model.config.attention_kinds[0]
        raise UserError(f"kind {kind!r} with these options has no weights that mix heads: leave out mixing_scale.")


def llama_to_iha(
    source: Source, layers: Layers, dtype: str, value_offsets: str, seed: int, mixing_scale: float | None
) -> Converted:
    """Read a checkpoint of Llama's family with weights in `dtype`, and convert it.

    Raise `UserError` if it cannot be converted.
    """
    print(f"1 of 2: reading {source}", flush=True)
    source_config = load_config(source)
    config = iha_config(source_config, layers)  # rejects what it can before the weights are read, which takes long
    source_model, tokenizer = read_source(source, source_config, dtype)
    model = convert_model(source_model, config, value_offsets, seed, mixing_scale)
    how = f"({source_config.model_type}){words_for(layers, config)}"
    return Converted(model, tokenizer, source, how, exact_length(source_config, config))


def words_for(layers: Layers, config: IHAConfig) -> str:
    """Return the end of the sentence that says to which layers a model was converted."""
    if layers.kind == "iha":
        words = f" with {layers.num_pseudo_heads} pseudo-heads and the {layers.schedule} schedule"
    else:
        words = f" to attention of kind {layers.kind!r}"
    if layers.options:
        words += f" with {json.dumps(layers.options)}"
    if layers.output_gate is not None:
        words += f" with an output gate ({layers.output_gate})"
    if layers.schedule == "hybrid":
        words += f", whose windows are {config.sliding_window} of {config.max_position_embeddings} tokens"
    return words
