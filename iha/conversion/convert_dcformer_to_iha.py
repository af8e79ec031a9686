"""Convert a released DCFormer checkpoint to an IHA checkpoint that computes the same (`iha.api.convert_dcformer`)."""

import functools
from typing import Annotated, Literal

import torch
from pydantic import Field
from transformers import GenerationConfig, PreTrainedConfig
from typing_extensions import TypedDict

from iha.checkpoints import check_finite, load_config_dict, load_generation_config, load_weights, tokenizer_if_any
from iha.errors import UserError
from iha.files import typed
from iha.sources import Source
from modeling_iha import IHAConfig, IHAForCausalLM

from .architectures import check_known
from .shared import Converted, build, new_config


# Field of a DCFormer's config -> IHA's, where the names differ, and those of the same name.
FIELDS = {
    **{"dim": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    **{"norm_eps": "rms_norm_eps", "block_size": "max_position_embeddings"},
    **{name: name for name in ("vocab_size", "intermediate_size", "use_qk_norm", "bos_token_id", "eos_token_id")},
}

# The official code's defaults for fields that an older config lacks.
DEFAULTS = {"window_type": None, "mgate": False, "mgate_dim": 44, "query_wise": False, "use_dcmha": True}

# The official patterns of local and global layers, by window_type. A named pattern has a fixed window.
LOCAL = "sliding_attention"
GLOBAL = "full_attention"
WINDOW_TYPES = {
    **{name: [LOCAL, GLOBAL] for name in (None, "LG")},
    **{"LGLL": [LOCAL, GLOBAL, LOCAL, LOCAL], "LGL6": [LOCAL, GLOBAL, *[LOCAL] * 6]},
}
NAMED_WINDOW = 256

Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0)] | None


class Entries(TypedDict):
    """Hold the entries of a config.json that say what the model computes."""

    vocab_size: Size
    dim: Size
    intermediate_size: Size
    n_layer: Size
    n_head: Size
    block_size: Size
    mgate_dim: Size
    norm_eps: Positive
    rope_base: Positive
    window_size: Size | None
    window_type: Literal[tuple(WINDOW_TYPES)]  # type: ignore[valid-type]
    use_qk_norm: bool
    mgate: bool
    query_wise: bool
    use_dcmha: bool
    bos_token_id: Token
    eos_token_id: Token


# Fields that change no logit: of Transformers' base class, and how the official code trains, caches and prefills.
HARMLESS_FIELDS = {
    *PreTrainedConfig().to_dict(),
    "use_gradient_checkpointing",
    "is_training",
    "q_chunk_size",
    "prefill_pad",
    "head_dim",
    "pad_token_id",
    "torch_dtype",
    "auto_map",
    "tie_word_embeddings",
}

# Parameter of a DCFormer -> IHA's. The official RoPE rotates component i with i + d/2, as Llama's does.
PARAMETERS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_PARAMETERS = {
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.scale": "self_attn.q_norm.weight",
    "attention.k_norm.scale": "self_attn.k_norm.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.mg.weight": "mlp.group_gate.weight",
}
# The compositions of a layer in the order in which the official parameters stack them.
COMPOSITIONS = ("pre_query", "pre_key", "post_query", "post_key")
# Parameters that the official code derives from the others.
DERIVED = (".dyn_w_proj.dw_m", ".dyn_w_proj.qkw_m")
# Static maps: the official code saves identities and reads them as identities.
STATIC_MAPS = (".pre_proj.w", ".post_proj.w")


def iha_config(source: dict) -> IHAConfig:
    """Return the configuration of the converted model, from the entries of a DCFormer's config.json.

    Raise `UserError` if no IHA model computes the same.
    """
    if (model_type := source.get("model_type")) != "dcformer":
        raise UserError(f"The source config has model_type={model_type!r}; expected 'dcformer'.")
    source = typed({**DEFAULTS, **source}, Entries, "The source config")
    check_known(source, {*FIELDS, *DEFAULTS, *HARMLESS_FIELDS, "rope_base", "window_size", "n_local_heads"})
    # In these cases the official code does not compute what the fields say, or no IHA model computes it.
    for names, is_refused, expected in (
        (("n_local_heads", "n_head"), source.get("n_local_heads", -1) not in (-1, source["n_head"]), "equal numbers"),
        (("query_wise", "use_dcmha"), source["query_wise"] or not source["use_dcmha"], "False and True"),
        (
            ("window_type", "window_size"),
            source["window_type"] is not None and source["window_size"] != NAMED_WINDOW,
            f"a window of {NAMED_WINDOW}, which the official code gives to a named type",
        ),
        (
            ("use_qk_norm", "norm_eps"),
            source["use_qk_norm"] and source["norm_eps"] != 1e-6,
            "1e-06, which the official code's QK-norm has, because the IHA model has one epsilon for all norms",
        ),
        (
            ("mgate_dim", "intermediate_size"),
            source["mgate"] and source["intermediate_size"] % source["mgate_dim"] != 0,
            "a divisor and its multiple",
        ),
    ):
        if is_refused:
            fields = " and ".join(f"{name}={source[name]}" for name in names)
            raise UserError(f"The source config has {fields}; expected {expected}.")

    windowed = source["window_size"] is not None
    pattern = WINDOW_TYPES[source["window_type"]] if windowed else [GLOBAL]
    return new_config(
        IHAConfig,
        **{ours: source[theirs] for theirs, ours in FIELDS.items()},
        attention_kinds="dcmha",
        layer_types=[pattern[i % len(pattern)] for i in range(source["n_layer"])],
        sliding_window=source["window_size"],
        mlp_gate_groups=source["mgate_dim"] if source["mgate"] else None,
        rope_parameters={"rope_type": "default", "rope_theta": float(source["rope_base"])},
        tie_word_embeddings=False,
    )


def convert_weights(weights: dict[str, torch.Tensor], config: IHAConfig) -> dict[str, torch.Tensor]:
    """Return the state dict of the converted model, whose tensors are views of those of `weights` where possible.

    Raise `UserError` if a parameter is missing, unknown, of another shape than `config` gives it, not a
    floating-point tensor, or not finite.
    """
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith(DERIVED)}
    weights = {name: tensor for name, tensor in weights.items() if ".kv_cache." not in name}
    for name in [name for name in weights if name.endswith(STATIC_MAPS)]:
        static_map = weights.pop(name)
        identity = torch.eye(config.num_attention_heads).to(static_map)
        if static_map.dim() != 3 or not all(torch.equal(part, identity) for part in static_map):
            raise UserError(f"{name} is not the identity: the official code would read it as one.")
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise UserError(f"{name} has the dtype {tensor.dtype}; expected floating-point weights.")
    check_finite(weights.items(), "the source weights")

    width = config.hidden_size
    heads = config.num_attention_heads
    rank = config.options_of("dcmha").rank
    inner = 2 * rank * heads

    def pop(name: str, *shape: int) -> torch.Tensor:
        tensor = weights.pop(name)
        if tensor.shape != shape:
            raise UserError(
                f"{name} has the shape {list(tensor.shape)}, and its config.json makes it {list(shape)}: expected a "
                "checkpoint of Caiyun-AI's DCFormer."
            )
        return tensor

    state = {}
    try:
        for theirs, ours in PARAMETERS.items():
            state[ours] = weights.pop(theirs)
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}."
            prefix = f"layers.{i}."
            for theirs, ours in LAYER_PARAMETERS.items():
                if prefix + theirs in weights:  # the norms of queries and keys, and the FFN's gate, are optional
                    state[layer + ours] = weights.pop(prefix + theirs)

            projections = pop(f"{prefix}attention.wqkv.weight", 3 * width, width).chunk(3)
            for name, projection in zip(("q_proj", "k_proj", "v_proj"), projections):
                state[f"{layer}self_attn.{name}.weight"] = projection
            dynamic = f"{prefix}attention.dyn_w_proj."
            w1 = pop(f"{dynamic}dw1", width, 1, 4, inner).squeeze(1).unbind(1)  # each [D, I]
            w2 = pop(f"{dynamic}qkw", 1, 4, inner, 2 * rank, heads).squeeze(0).unbind(0)  # each [I, 2 R, H]
            gate = pop(f"{dynamic}dd", width, 1, 4 * heads).squeeze(1).chunk(4, dim=1)  # each [D, H]
            for c, composition in enumerate(COMPOSITIONS):
                name = f"{layer}self_attn.{composition}"
                state[f"{name}.w1.weight"] = w1[c].T.contiguous()
                state[f"{name}.w2"] = w2[c].permute(1, 2, 0).unsqueeze(0).contiguous()
                state[f"{name}.gate.weight"] = gate[c].T.contiguous()
    except KeyError as error:
        raise UserError(
            f"The source weights lack {error.args[0]}: expected a checkpoint of Caiyun-AI's DCFormer."
        ) from None
    if weights:
        raise UserError(f"The source weights hold {sorted(weights)[0]}, which no DCFormer of this config has.")
    return state


def convert_model(
    config: IHAConfig, weights: dict[str, torch.Tensor], generation_config: GenerationConfig | None = None
) -> IHAForCausalLM:
    """Return the model that computes what the official code does with `weights`, with a config of `iha_config`.

    It is in eval mode and in the narrowest dtype that represents every weight exactly. Raise `UserError` if the
    weights are not supported or do not fit the config.
    """
    state = convert_weights(weights, config)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in state.values()))
    return build(IHAForCausalLM, config, state, dtype, generation_config)


def dcformer_to_iha(source: Source) -> Converted:
    """Read and convert a DCFormer. Raise `UserError` if it cannot be converted."""
    print(f"1 of 2: reading {source}", flush=True)
    entries = load_config_dict(source)
    config = iha_config(entries)  # rejects what it can before the weights are read, which takes long
    generation_config = load_generation_config(source)
    tokenizer = tokenizer_if_any(source, config.vocab_size)
    model = convert_model(config, load_weights(source), generation_config)
    return Converted(model, tokenizer, source, "(dcformer)")
