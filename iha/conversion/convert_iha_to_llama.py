"""Convert an IHA checkpoint to a stock architecture that computes the same (`iha.api.convert_back`)."""

import sys

import torch
from transformers import CONFIG_MAPPING, DiffLlamaConfig, DiffLlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from iha.checkpoints import load_config
from iha.errors import UserError
from iha.sources import Source
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.exact_start import deviations as deviations_from_start
from modeling_iha.mixing_weights import state_with_values

from .architectures import ARCHITECTURES, SHARED_FIELDS, Architecture, layer_windows, rope_layers
from .shared import Converted, build, check_iha, new_config, read_source


def heads_of(config: IHAConfig) -> tuple[int, int, int]:
    """Return the numbers of query, key and value heads."""
    return config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads


def foldable(config: IHAConfig) -> dict[str, str]:
    """Return {mixing parameter: the projection into which it can be multiplied}, for one pseudo-head.

    Such a layer mixes heads and makes no virtual tokens. RoPE acts within a head, so it commutes with a mixing of
    heads. A QK-norm does not."""
    if config.num_pseudo_heads > 1:
        return {}
    queries_and_keys = {} if config.use_qk_norm else {"q_mix.weight": "q_proj", "k_mix.weight": "k_proj"}
    return {**queries_and_keys, "v_mix.weight": "v_proj", "collapse.weight": "o_proj"}


def to_mha(config: IHAConfig, attention: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the projections with the mixing of one pseudo-head multiplied in, in float64."""
    folded = {}
    for mixing, projection in foldable(config).items():
        weight = attention[mixing].double()
        for name, tensor in attention.items():
            if name.rpartition(".")[0] != projection:
                continue
            if projection != "o_proj":
                rows = tensor.double().unflatten(0, (-1, config.head_dim))
                product = torch.einsum("mh,m...->h...", weight[..., 0], rows).flatten(0, 1)
            elif name.endswith(".weight"):  # its bias follows the collapse
                collapse = weight.diagflat() if config.pseudo_collapse == "per_head" else weight
                columns = tensor.double().unflatten(1, (-1, config.head_dim))
                product = torch.einsum("hg,xhd->xgd", collapse, columns).flatten(1)
            else:
                continue
            folded[name] = product
    return folded


def deviations(attention: torch.nn.Module, config: IHAConfig) -> dict[str, torch.Tensor]:
    """Return the differences from the exact start, and zeros for what folds into the projections.

    For the value offsets return the sum over the pseudo-heads, beyond rounding: for equal keys only the sum matters.
    NaN and infinity become NaN."""
    moved = deviations_from_start(
        state_with_values(attention), heads_of(config), config.num_pseudo_heads, config.pseudo_collapse
    )
    return moved | {name: 0 * moved[name] for name in foldable(config)}


@torch.no_grad()
def added_parameters(model: IHAForCausalLM) -> set[str]:
    """Return the names of the parameters that multi-head attention lacks.

    Raise a `UserError` that names the first layer or parameter by which `model` computes another attention.
    """
    config = model.config
    added = set()
    for i, kind in enumerate(config.attention_kinds):
        if kind == "mha":
            continue
        if kind != "iha":
            raise UserError(f"Layer {i} is of kind {kind!r}, which none of these architectures computes.")
        if config.pseudo_positions != "shared" and config.num_pseudo_heads > 1:
            positions = f"pseudo_positions={config.pseudo_positions!r}"
            raise UserError(f"Layer {i} has {positions}; only shared positions can equal an MHA.")
        for parameter, deviation in deviations(model.model.layers[i].self_attn, config).items():
            name = f"model.layers.{i}.self_attn.{parameter}"
            largest = deviation.abs().max().item()
            if largest != 0:  # true for NaN too
                moved = f"{name} has moved by up to {largest:.2g} from the warm start"
                raise UserError(f"{moved}: no stock architecture computes the layer any more.")
            added.add(name)
    return added


def stock_config(model: IHAForCausalLM) -> tuple[Architecture, PreTrainedConfig]:
    """Return the first row of `ARCHITECTURES` that can compute what `model` does, and its config.

    Raise `UserError` if there is none.
    """
    config = model.config
    fields = {name: getattr(config, name) for name in (*SHARED_FIELDS, "head_dim")}
    if config.has_sliding_rope:
        raise UserError(
            "The layers with a window have a separate RoPE, which no stock architecture has "
            f"({', '.join(ARCHITECTURES)}): use the checkpoint as it is."
        )
    has_llama_ffn = config.gated_mlp and not config.mlp_gate_groups
    candidates = ARCHITECTURES if has_llama_ffn else {}
    for model_type, architecture in candidates.items():
        own = {name: getattr(config, name) for name in architecture.known_fields if hasattr(config, name)}
        if "use_sliding_window" in architecture.known_fields:
            own["use_sliding_window"] = config.sliding_window is not None
        try:
            target = new_config(CONFIG_MAPPING[model_type], **fields, **own)
        except UserError:
            if config.hidden_size % config.num_attention_heads == 0:
                raise
            continue  # Llama's config rejects such heads, and others allow them
        if _computes_the_same(architecture, target, model):
            return architecture, target
    names = ["gated_mlp", "mlp_gate_groups", "use_qk_norm", "attention_bias", "mlp_bias"]
    names += ["hidden_size", "num_attention_heads", "layer_types", "no_rope_layers"]
    has = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    raise UserError(
        f"No stock architecture ({', '.join(ARCHITECTURES)}) has this combination: {has}. Use the checkpoint as it is."
    )


def _computes_the_same(architecture: Architecture, target: PreTrainedConfig, model: IHAForCausalLM) -> bool:
    """Return whether a model of an architecture with the config `target` can compute what `model` does."""
    config = model.config
    settings = architecture.settings(config)
    if any(getattr(config, name) != value for name, value in settings.items()):
        return False
    if layer_windows(target) != layer_windows(config) or rope_layers(target) != rope_layers(config):
        return False
    lacking = [tensor for name, tensor in model.state_dict().items() if name.endswith(architecture.lacks)]
    return not any(tensor.any() for tensor in lacking)


def diffllama_config(config: IHAConfig) -> DiffLlamaConfig:
    """Return the configuration of the DiffLlama that computes what "diff" layers do.

    Raise a `UserError` that names the layer or field that no DiffLlama has.
    """
    for i, (kind, layer_type) in enumerate(zip(config.attention_kinds, config.layer_types)):
        if (kind, layer_type) != ("diff", "full_attention"):
            raise UserError(f"Layer {i} is of kind {kind!r}, {layer_type}; expected 'diff', full_attention.")
    only = {"gated_mlp": True, "mlp_gate_groups": None, "mlp_bias": False, "use_qk_norm": False}
    for field, value in {**only, "no_rope_layers": [1] * config.num_hidden_layers}.items():
        if getattr(config, field) != value:
            raise UserError(f"The model has {field}={getattr(config, field)}; a DiffLlama has {field}={value} only.")
    fields = {name: getattr(config, name) for name in (*SHARED_FIELDS, "attention_bias", "head_dim")}
    return new_config(DiffLlamaConfig, **fields, lambda_std_dev=config.options_of("diff").lambda_std_dev)


def convert_back(model: IHAForCausalLM) -> PreTrainedModel:
    """Return the stock model that computes what `model` does, in eval mode and its dtype.

    It shares the memory of all weights into which nothing is folded. Print on stderr how many folded weights half
    precision rounds. Raise `UserError` if no stock architecture computes the layers, or has the rest of the model.
    """
    for field in ("output_gate", "exclusive_attention"):
        if value := getattr(model.config, field):
            raise UserError(f"The model has {field}={value!r}, which no stock architecture computes.")
    if "diff" in model.config.attention_kinds:
        diffllama = diffllama_config(model.config)
        return build(DiffLlamaForCausalLM, diffllama, model.state_dict(), model.dtype, model.generation_config)
    added = added_parameters(model)
    architecture, config = stock_config(model)
    state = {name: tensor for name, tensor in state_with_values(model).items() if name not in added}
    state = {name: tensor for name, tensor in state.items() if not name.endswith(architecture.lacks)}
    rounded = 0
    for i, (kind, layer) in enumerate(zip(model.config.attention_kinds, model.model.layers)):
        folds = to_mha(model.config, state_with_values(layer.self_attn)) if kind == "iha" else {}
        for name, value in folds.items():
            folded = value.to(model.dtype)
            state[f"model.layers.{i}.self_attn.{name}"] = folded
            rounded += model.dtype.itemsize < 4 and not torch.equal(folded.to(value.dtype), value)
    if rounded:
        advice = "convert with --dtype float32 for a conversion that is exact"
        print(f"{rounded} folded tensors are rounded in {model.dtype}: {advice}.", file=sys.stderr)
    return build(architecture.model_class, config, state, model.dtype, model.generation_config)


def iha_to_stock(source: Source, dtype: str) -> Converted:
    """Read an IHA checkpoint with weights in `dtype`, and convert it to a stock one. Raise `UserError`."""
    print(f"1 of 2: reading {source}", flush=True)
    config = load_config(source)
    check_iha(source, config)
    model, tokenizer = read_source(source, config, dtype)
    return Converted(convert_back(model), tokenizer, source)
