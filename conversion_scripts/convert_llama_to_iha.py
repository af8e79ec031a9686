"""Convert a pretrained Llama-like checkpoint to "iha" or another attention kind without changing what it computes.

The file of a kind in kinds/ gives the values at which its parameters start.
"""

import argparse
import copy

from common.command_io import UserError, attention_kinds, run_cli


SCHEDULES = ("global", "hybrid")
VALUE_OFFSETS = ("balanced", "none")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Convert a qwen2, llama, mistral, ministral, qwen3, smollm3, arcee, seed_oss, granite, phi3, "
        "ernie4_5 or helium checkpoint to another attention without changing what it computes.",
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
from transformers import PreTrainedConfig, PreTrainedModel

from conversion_scripts.architectures import caveat, check_source, fold, layer_windows, rope_layers
from conversion_scripts.conversion import (
    LARGEST_SIZE,
    SHARED_FIELDS,
    build,
    describe,
    new_config,
    read_source,
    write_checkpoint,
)
from kinds import all_companions, companion_of
from modeling_iha import IHAConfig, IHAForCausalLM


ATTENTION_KINDS = [kind for kind, mechanism in all_companions().items() if mechanism.start]


def iha_config(
    source: PreTrainedConfig,
    num_pseudo_heads: int | None = None,
    schedule: str = "global",
    window: int | None = None,
    attention_kind: str = "iha",
) -> IHAConfig:
    """Return the configuration of the converted model.

    Raise `UserError` if the source or an argument does not allow one.
    """
    architecture = check_source(source)
    if (attention_kind == "iha") != (num_pseudo_heads is not None):
        raise UserError(
            f"attention kind {attention_kind!r} with num_pseudo_heads={num_pseudo_heads}: 'iha' needs a number of "
            "pseudo-heads, such as --num-pseudo-heads 2, and no other kind has any."
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
    kinds, windows = [attention_kind], layer_windows(source)
    if schedule == "hybrid":
        # The paper's schedule: four sliding IHA layers, then a plain global one (IHA, Section 5.1 and Appendix C).
        kinds = ["iha", "iha", "iha", "iha", "mha"]
        windows = [None if i % 5 == 4 else window for i in range(source.num_hidden_layers)]
    fields = {name: copy.deepcopy(getattr(source, name)) for name in SHARED_FIELDS if hasattr(source, name)}
    return new_config(
        IHAConfig,
        **fields,
        **architecture.settings(source),
        head_dim=getattr(source, "head_dim", None),
        attention_kinds=[kinds[i % len(kinds)] for i in range(source.num_hidden_layers)],
        layer_types=["full_attention" if window is None else "sliding_attention" for window in windows],
        sliding_window=next((window for window in windows if window is not None), None),
        no_rope_layers=rope_layers(source),
        num_pseudo_heads=num_pseudo_heads,
        pseudo_positions="shared",
    )


def exact_length(source: PreTrainedConfig, config: IHAConfig) -> int | None:
    """Return the longest sequence, in tokens, for which the conversion is exact, or `None` for any length.

    A layer agrees with its source while the smaller of the two windows covers the sequence: in a sliding "iha" layer
    the last pseudo-head of token n sees all pseudo-heads of the tokens n - W + 1 .. n and nothing else.
    """
    pairs = zip(layer_windows(source), layer_windows(config))
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
    """Return the IHA model that computes what `source` does, in eval mode and the dtype of `source`.

    Args:
        source: a causal language model of one of `ARCHITECTURES`. The result shares the memory of all weights that no
            fold changes: delete one of the two, or copy it, before training.
        num_pseudo_heads (`int`, *optional*): P; kind "iha" needs it, and no other kind has it.
        schedule (`str`): "global" keeps the geometry of every layer and is exact; "hybrid" is the paper's four sliding
            "iha" layers, then a plain global one, and is exact for sequences of at most `exact_length` tokens.
        window (`int`, *optional*): of the sliding layers of "hybrid", in tokens.
        value_offsets (`str`): "balanced" (see kinds/iha.py) or "none", which leaves the pseudo-heads symmetric.
        seed (`int`): of the values that the exact start leaves random.
        attention_kind (`str`): one of `ATTENTION_KINDS`, those whose mechanism has an exact start.

    Raise `UserError` if the source is not supported or an argument does not fit it.
    """
    config = iha_config(source.config, num_pseudo_heads, schedule, window, attention_kind)
    generator = torch.Generator().manual_seed(seed)
    state = fold(source.state_dict(), config, source.config)
    for i, kind in enumerate(config.attention_kinds):
        if start := (companion := companion_of(kind)).start:
            prefix = f"model.layers.{i}.self_attn."
            of_mha = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            started = start(config, generator, value_offsets) | companion.from_mha(config, of_mha)
            state |= {prefix + name: value.to(source.dtype) for name, value in started.items()}
    return build(IHAForCausalLM, config, state, source.dtype, source.generation_config)


def main() -> None:
    args = parse_arguments()
    if args.attention_kind not in ATTENTION_KINDS:
        raise UserError(
            f"--attention-kind {args.attention_kind}: no layer of this kind computes what one of Llama does; expected "
            f"one of {', '.join(ATTENTION_KINDS)}."
        )
    if not 0 <= args.seed < 2**64:  # PyTorch's generators refuse others, or take them for another seed
        raise UserError(f"--seed {args.seed} must be a whole number from 0 to {2**64 - 1}.")
    arguments = (args.num_pseudo_heads, args.schedule, args.window)

    def make():
        source, tokenizer = read_source(
            args.src, lambda config: iha_config(config, *arguments, args.attention_kind), args.dtype
        )
        model = convert(source, *arguments, args.value_offsets, args.seed, args.attention_kind)
        how = f" to attention of kind {args.attention_kind!r}"
        if args.attention_kind == "iha":
            how = f" with {args.num_pseudo_heads} pseudo-heads and the {args.schedule} schedule"
        length = exact_length(source.config, model.config)
        section = describe(args.src, source.config.model_type, how, length) + caveat(source.config)
        return model, tokenizer, section

    write_checkpoint(args.src, args.dst, make)


if __name__ == "__main__":
    run_cli(main)
