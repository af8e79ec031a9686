"""Convert an IHA checkpoint of "diff" layers, trained or not, to a DiffLlama checkpoint that computes the same."""

import argparse

from common.command_io import UserError, run_cli
from conversion_scripts.options import add_dtype, converter_parser


def parse_arguments() -> argparse.Namespace:
    parser = converter_parser(
        __doc__,
        "diff-iha diffllama-again",
        "IHA checkpoint: a directory or a Hub id",
        "the DiffLlama checkpoint",
    )
    add_dtype(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run_cli(parse_arguments)  # before the imports below, which take seconds

from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from conversion_scripts.conversion import SHARED_FIELDS, build, new_config
from conversion_scripts.convert_iha_to_llama import write_stock_checkpoint
from modeling_iha import IHAConfig, IHAForCausalLM


def diffllama_config(config: IHAConfig) -> DiffLlamaConfig:
    """Return the configuration of the DiffLlama.

    Raise a `UserError` that names the layer or field that no DiffLlama has.
    """
    for i, (kind, layer_type) in enumerate(zip(config.attention_kinds, config.layer_types)):
        if (kind, layer_type) != ("diff", "full_attention"):
            raise UserError(f"Layer {i} is of kind {kind!r}, {layer_type}; expected 'diff', full_attention.")
    for field, value in {"gated_mlp": True, "mlp_bias": False, "use_qk_norm": False}.items():
        if getattr(config, field) != value:
            raise UserError(f"The model has {field}={getattr(config, field)}; a DiffLlama has {field}={value} only.")
    fields = {name: getattr(config, name) for name in (*SHARED_FIELDS, "attention_bias", "head_dim")}
    return new_config(DiffLlamaConfig, **fields, lambda_std_dev=config.options_of("diff").lambda_std_dev)


def convert_back(model: IHAForCausalLM) -> DiffLlamaForCausalLM:
    """Return the DiffLlama that computes what `model` does, in eval mode and its dtype, with its weights' memory.

    Raise `UserError` if there is none.
    """
    config = diffllama_config(model.config)
    return build(DiffLlamaForCausalLM, config, model.state_dict(), model.dtype, model.generation_config)


def main() -> None:
    write_stock_checkpoint(parse_arguments(), convert_back)


if __name__ == "__main__":
    run_cli(main)
