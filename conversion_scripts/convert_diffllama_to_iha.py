"""Convert a DiffLlama checkpoint to an IHA checkpoint of "diff" layers without changing what it computes.

A "diff" layer is the attention of Transformers' DiffLlama (Differential Transformer), and every parameter keeps its
name.
"""

import argparse
import copy

from common.command_io import UserError, new_directory, run_cli


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description='Convert a DiffLlama checkpoint to an IHA checkpoint of "diff" layers without changing what it '
        "computes.",
        epilog="example: python -m conversion_scripts.convert_diffllama_to_iha kajuma/DiffLlama-0.3B-handcut diff-iha",
    )
    parser.add_argument("src", help="DiffLlama checkpoint: a directory or a Hub id")
    parser.add_argument("dst", help="new directory for the converted checkpoint")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights (default: the source's)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from transformers import DiffLlamaForCausalLM, PreTrainedConfig

from common.checkpoint_io import load_config, load_model, load_tokenizer
from conversion_scripts.convert_llama_to_iha import (
    SHARED_FIELDS,
    build,
    check_fields,
    new_config,
    write_checkpoint,
)
from model_cards.render import markdown, source_name
from modeling_iha import IHAConfig, IHAForCausalLM


def iha_config(source: PreTrainedConfig) -> IHAConfig:
    """The configuration of the converted model. Raises `UserError` when the source does not allow one."""
    if source.model_type != "diffllama":
        raise UserError(
            f"The architecture {source.model_type!r} is not 'diffllama'. Use convert_llama_to_iha.py for Llama and "
            "similar architectures."
        )
    check_fields(source, ("attention_bias", "lambda_std_dev"))
    return new_config(
        IHAConfig,
        **{name: copy.deepcopy(getattr(source, name)) for name in (*SHARED_FIELDS, "attention_bias", "head_dim")},
        attention_kinds="diff",
        attention_options={"diff": {"lambda_std_dev": source.lambda_std_dev}},
    )


def convert(source: DiffLlamaForCausalLM) -> IHAForCausalLM:
    """The model that computes what `source` does, in eval mode and its dtype, sharing its weights' memory.

    Raises `UserError` when the source is not supported.
    """
    return build(IHAForCausalLM, iha_config(source.config), source.state_dict(), source)


def main() -> None:
    args = parse_arguments()
    with new_directory(args.dst) as directory:
        print(f"Reading {args.src}", flush=True)
        # Loading takes long, so everything that can be refused without weights is refused first.
        iha_config(load_config(args.src))
        source = load_model(args.src, args.dtype)
        tokenizer = load_tokenizer(args.src, source.config.vocab_size)
        model = convert(source)
        details = (
            f"## Conversion\n\nConverted from {markdown(source_name(args.src))} (diffllama). Before any further "
            "training the model computes what its source does, up to rounding, for sequences of any length."
        )
        write_checkpoint(directory, model, tokenizer, args.src, args.dst, details)
    print(f"Wrote {args.dst}, {model.num_parameters():,} parameters.")


if __name__ == "__main__":
    run_cli(main)
