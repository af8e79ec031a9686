"""Convert a pretrained Llama-like checkpoint to Interleaved Head Attention (IHA), or to another attention kind,
without changing what it computes.

The file of a kind in kinds/ gives the values at which its parameters start.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.command_io import UserError, attention_kinds, new_directory, one_line, run_cli


SCHEDULES = ("global", "hybrid")
VALUE_OFFSETS = ("balanced", "none")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Convert a Llama, Mistral, Qwen2 or Qwen3 checkpoint to another attention without changing what "
        "it computes.",
        epilog="example: python -m conversion_scripts.convert_llama_to_iha HuggingFaceTB/SmolLM2-135M-Instruct "
        "smollm2-iha --num-pseudo-heads 2",
    )
    parser.add_argument("src", help="source checkpoint: a directory, a Hub id or a GGUF file")
    parser.add_argument("dst", help="new directory for the converted checkpoint")
    parser.add_argument(
        "--attention-kind",
        choices=attention_kinds(),
        default="iha",
        help="attention kind of the converted layers (default: iha)",
    )
    parser.add_argument(
        "--num-pseudo-heads", type=int, metavar="P", help="pseudo-heads of each head; required for iha"
    )
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        default="global",
        help="global: every layer keeps its window, and the conversion is exact; hybrid: 4 sliding IHA layers, then a "
        "plain global layer, exact for sequences of at most WINDOW tokens (default: global)",
    )
    parser.add_argument(
        "--window", type=int, help="window of the hybrid schedule, in tokens; the paper uses context length / (2 P^2)"
    )
    parser.add_argument(
        "--value-offsets",
        choices=VALUE_OFFSETS,
        default="balanced",
        help="balanced: offsets of the values, which sum to zero, make the pseudo-heads differ; none: the "
        "pseudo-heads start equal (default: balanced)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights (default: the source's)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random values (default: 0)")
    return parser.parse_args()


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.activations import ACT2FN

from common.checkpoint_io import load_config, load_model, load_tokenizer
from kinds import all_companions, companion_of
from model_cards.render import markdown, render_card, source_license, source_name
from modeling_iha import IHAConfig, IHAForCausalLM


@dataclass(frozen=True)
class Architecture:
    """How a Transformers architecture differs from Llama.

    Attributes:
        attention_bias, mlp_bias (`bool` or `None`): what the architecture fixes, or `None` if the config decides.
        use_qk_norm (`bool`): RMSNorm over each head's query and key.
        layer_windows: gives, from the config, the window of each layer in tokens, `None` for a global one.
        lacks (`tuple[str, ...]`): parameters of a layer that this architecture lacks; the converted model has zeros.
        fields (`tuple[str, ...]`): config fields, beside the shared ones, that the conversion carries over.
    """

    model_class: type[PreTrainedModel]
    attention_bias: bool | None
    mlp_bias: bool | None
    use_qk_norm: bool
    layer_windows: Callable[[PreTrainedConfig], list[int | None]]
    lacks: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


def _no_windows(config: PreTrainedConfig) -> list[None]:
    return [None] * config.num_hidden_layers


def _same_window(config: PreTrainedConfig) -> list[int | None]:
    return [config.sliding_window] * config.num_hidden_layers


def window_per_layer(config: PreTrainedConfig) -> list[int | None]:
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    for layer_type in config.layer_types:
        if layer_type not in windows:
            raise UserError(
                f"layer_types holds {layer_type!r}; this conversion knows {', '.join(map(repr, windows))}."
            )
    return [windows[layer_type] for layer_type in config.layer_types]


_QWEN_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

# By model_type. All of them, and IHA, use Llama's parameter names. `convert_iha_to_llama.py` takes the first row that
# fits.
ARCHITECTURES = {
    "qwen2": Architecture(
        Qwen2ForCausalLM,
        attention_bias=True,
        mlp_bias=False,
        use_qk_norm=False,
        layer_windows=window_per_layer,
        lacks=("self_attn.o_proj.bias",),
        fields=_QWEN_WINDOWS,
    ),
    "llama": Architecture(
        LlamaForCausalLM,
        attention_bias=None,
        mlp_bias=None,
        use_qk_norm=False,
        layer_windows=_no_windows,
        fields=("attention_bias", "mlp_bias"),
    ),
    "mistral": Architecture(
        MistralForCausalLM,
        attention_bias=False,
        mlp_bias=False,
        use_qk_norm=False,
        layer_windows=_same_window,
        fields=("sliding_window",),
    ),
    "qwen3": Architecture(
        Qwen3ForCausalLM,
        attention_bias=None,
        mlp_bias=False,
        use_qk_norm=True,
        layer_windows=window_per_layer,
        fields=("attention_bias", *_QWEN_WINDOWS),
    ),
}

# Config fields that have the same name and meaning in all of them and in IHA.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
)

# Fields that no forward pass reads: those of Transformers' base class, and others that published checkpoints have.
HARMLESS_FIELDS = {
    *PreTrainedConfig().to_dict(),
    "head_dim",
    "is_llama_config",
    "model_max_length",
    "pretraining_tp",
    "transformers.js_config",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
}

# The fields from which the shapes of all weights follow.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Attention cores count tokens in 32 bits.
LARGEST_SIZE = 2**31 - 1

ATTENTION_KINDS = [kind for kind, mechanism in all_companions().items() if mechanism.start]


def check_source(config: PreTrainedConfig) -> Architecture:
    """The row of `ARCHITECTURES` for a source config. Raises a `UserError` that names the field for anything that
    could change what the model computes and that the row does not carry over."""
    if config.model_type not in ARCHITECTURES:
        raise UserError(
            f"The architecture {config.model_type!r} cannot be converted; supported are {', '.join(ARCHITECTURES)}."
        )
    architecture = ARCHITECTURES[config.model_type]
    check_fields(config, architecture.fields)
    return architecture


def check_fields(config: PreTrainedConfig, fields: tuple[str, ...]) -> None:
    """Raises `UserError` for a source config that sets a field which could change what the model computes and is
    neither shared nor one of its architecture's `fields`."""
    check_sizes({name: getattr(config, name) for name in SIZES})
    if not isinstance(config.hidden_act, str) or config.hidden_act not in ACT2FN:
        raise UserError(f"The source config sets hidden_act={config.hidden_act!r}, which Transformers does not have.")
    known = {*SHARED_FIELDS, *fields, *HARMLESS_FIELDS}
    for field, value in config.to_dict().items():
        # An extension of the architecture that is switched off changes nothing.
        if field not in known and not field.startswith("_") and value:
            raise UserError(
                f"The source config sets {field}={value!r}, which {config.model_type} conversion does not know. If it "
                "does not change the model's output, remove it from config.json."
            )


def check_sizes(sizes: dict[str, int]) -> None:
    """Raises a `UserError` that names the field of a source config that is not a whole number from 1 to
    `LARGEST_SIZE`."""
    for field, value in sizes.items():
        if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
            raise UserError(
                f"The source config has {field}={value!r}; it must be a whole number from 1 to {LARGEST_SIZE}."
            )


def check_seed(seed: int) -> None:
    """Raises `UserError` for a seed that PyTorch's generators refuse or take for another one."""
    if not 0 <= seed < 2**64:
        raise UserError(f"--seed {seed} must be a whole number from 0 to {2**64 - 1}.")


def new_config(config_class: type[PreTrainedConfig], **fields) -> PreTrainedConfig:
    """`config_class(**fields)`. Raises `UserError` if the class refuses the fields."""
    try:
        return config_class(**fields)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise UserError(f"No {config_class.__name__} can be built: {one_line(error.__cause__ or error)}") from error


def iha_config(
    source: PreTrainedConfig,
    num_pseudo_heads: int | None = None,
    schedule: str = "global",
    window: int | None = None,
    attention_kind: str = "iha",
) -> IHAConfig:
    """The configuration of the converted model. Raises `UserError` if the source or an argument does not allow one."""
    architecture = check_source(source)
    if (attention_kind == "iha") != (num_pseudo_heads is not None):
        raise UserError(
            f"attention kind {attention_kind!r} with num_pseudo_heads={num_pseudo_heads}: 'iha' needs a number of "
            "pseudo-heads, and no other kind has any."
        )
    if num_pseudo_heads is not None and num_pseudo_heads * source.max_position_embeddings > LARGEST_SIZE:
        raise UserError(
            f"num_pseudo_heads={num_pseudo_heads} with max_position_embeddings={source.max_position_embeddings}: "
            f"their product, the virtual tokens of a full context, must be at most {LARGEST_SIZE}."
        )
    if attention_kind != "iha" and schedule != "global":
        raise UserError(f"attention kind {attention_kind!r} with schedule={schedule!r}: only 'iha' has that schedule.")
    if (schedule == "hybrid") != (window is not None):
        raise UserError(
            f"schedule={schedule!r} with window={window}: the hybrid schedule needs a window, global has none."
        )
    kinds, windows = [attention_kind], architecture.layer_windows(source)
    if schedule == "hybrid":
        # The paper's schedule: four sliding IHA layers, then a plain global one (IHA, Section 5.1 and Appendix C).
        kinds = ["iha", "iha", "iha", "iha", "mha"]
        windows = [None if i % 5 == 4 else window for i in range(source.num_hidden_layers)]
    fields = {name: copy.deepcopy(getattr(source, name)) for name in SHARED_FIELDS}
    for name in ("attention_bias", "mlp_bias"):
        fixed = getattr(architecture, name)
        fields[name] = getattr(source, name) if fixed is None else fixed
    return new_config(
        IHAConfig,
        **fields,
        head_dim=getattr(source, "head_dim", None),
        use_qk_norm=architecture.use_qk_norm,
        attention_kinds=[kinds[i % len(kinds)] for i in range(source.num_hidden_layers)],
        layer_types=["full_attention" if window is None else "sliding_attention" for window in windows],
        sliding_window=next((window for window in windows if window is not None), None),
        num_pseudo_heads=num_pseudo_heads,
        pseudo_positions="shared",
    )


def exact_length(source: PreTrainedConfig, config: IHAConfig) -> int | None:
    """The longest sequence, in tokens, for which the converted model computes what its source does; `None` for any
    length.

    A layer agrees with its source while the smaller of the two windows covers the sequence: in a sliding "iha" layer
    the last pseudo-head of token n sees all pseudo-heads of the tokens n - W + 1 .. n and nothing else.
    """
    pairs = zip(ARCHITECTURES[source.model_type].layer_windows(source), window_per_layer(config))
    limits = [min(window for window in pair if window is not None) for pair in pairs if pair[0] != pair[1]]
    return min(limits, default=None)


def convert(
    source: PreTrainedModel,
    num_pseudo_heads: int | None = None,
    schedule: str = "global",
    window: int | None = None,
    value_offsets: str = "balanced",
    seed: int = 0,
    attention_kind: str = "iha",
) -> IHAForCausalLM:
    """The IHA model that computes what `source` does, in eval mode and the dtype of `source`.

    Args:
        source: a causal language model of one of `ARCHITECTURES`. The result shares its weights' memory: delete one of
            the two, or copy it, before training.
        num_pseudo_heads (`int`, *optional*): P; kind "iha" needs it, and no other kind has it.
        schedule (`str`): "global" keeps the geometry of every layer and is exact; "hybrid" is the paper's four sliding
            "iha" layers, then a plain global one, and is exact for sequences of at most `exact_length` tokens.
        window (`int`, *optional*): of the sliding layers of "hybrid", in tokens.
        value_offsets (`str`): "balanced" (see kinds/iha.py) or "none", which leaves the pseudo-heads symmetric.
        seed (`int`): of the values that the exact start leaves random.
        attention_kind (`str`): one of `ATTENTION_KINDS`, those whose mechanism has an exact start.

    Raises `UserError` if the source is not supported or an argument does not fit it.
    """
    config = iha_config(source.config, num_pseudo_heads, schedule, window, attention_kind)
    generator = torch.Generator().manual_seed(seed)
    state = dict(source.state_dict())
    for i, kind in enumerate(config.attention_kinds):
        layer = f"model.layers.{i}."
        for name in ARCHITECTURES[source.config.model_type].lacks:
            state[layer + name] = torch.zeros(config.hidden_size, dtype=source.dtype)
        if start := companion_of(kind).start:
            for name, value in start(config, generator, value_offsets).items():
                state[f"{layer}self_attn.{name}"] = value.to(source.dtype)
    return build(IHAForCausalLM, config, state, source)


def build(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    state: dict[str, torch.Tensor],
    source: PreTrainedModel,
) -> PreTrainedModel:
    """A model that uses the tensors of `state` without copying them and generates with the settings of `source`."""
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=source.dtype, output_loading_info=True
    )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise RuntimeError(f"{model_class.__name__} was not filled exactly: {info}")
    # Otherwise it would be "None", which adapters would record as their base model.
    model.name_or_path = model.config._name_or_path = ""
    model.generation_config = copy.deepcopy(source.generation_config)
    return model


def describe(source: str, source_config: PreTrainedConfig, config: IHAConfig, schedule: str) -> str:
    """The part of the model card, in Markdown, that says what was converted and up to which length it is exact."""
    length = exact_length(source_config, config)
    lengths = (
        "sequences of any length" if length is None else f"sequences of at most {length} tokens; longer ones differ"
    )
    how = f"to attention of kind {config.attention_kinds[0]!r}"
    if "iha" in config.attention_kinds:
        how = f"with {config.num_pseudo_heads} pseudo-heads and the {schedule} schedule"
    return (
        f"## Conversion\n\nConverted from {markdown(source_name(source))} ({source_config.model_type}) {how}. Before "
        f"any further training the model computes what its source does, up to rounding, for {lengths}."
    )


def write_checkpoint(
    directory: Path, model: IHAForCausalLM, tokenizer: PreTrainedTokenizerBase, src: str, dst: str, details: str
) -> None:
    """Writes model, code, tokenizer and model card into `directory`, which becomes `dst` later."""
    print("Writing model, code, tokenizer and model card", flush=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    card = render_card(
        model.config,
        Path(dst).name,
        base_model=None if Path(src).exists() else src,
        license=source_license(src),
        details=details,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    args = parse_arguments()
    if args.attention_kind not in ATTENTION_KINDS:
        raise UserError(
            f"--attention-kind {args.attention_kind}: no layer of this kind computes what one of Llama does; expected "
            f"one of {', '.join(ATTENTION_KINDS)}."
        )
    check_seed(args.seed)
    with new_directory(args.dst) as directory:
        print(f"Reading {args.src}", flush=True)
        # Loading takes long, so everything that can be refused without weights is refused first.
        iha_config(load_config(args.src), args.num_pseudo_heads, args.schedule, args.window, args.attention_kind)
        source = load_model(args.src, args.dtype)
        tokenizer = load_tokenizer(args.src, source.config.vocab_size)

        print(
            f"Converting {source.config.model_type}, {source.num_parameters():,} parameters, {source.dtype}",
            flush=True,
        )
        model = convert(
            source,
            args.num_pseudo_heads,
            args.schedule,
            args.window,
            args.value_offsets,
            args.seed,
            args.attention_kind,
        )
        details = describe(args.src, source.config, model.config, args.schedule)

        write_checkpoint(directory, model, tokenizer, args.src, args.dst, details)
    print(f"Wrote {args.dst}, {model.num_parameters():,} parameters.\n{details.splitlines()[-1]}")


if __name__ == "__main__":
    run_cli(main)
