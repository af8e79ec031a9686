"""Convert an IHA checkpoint of "diff" layers, trained or not, to a DiffLlama checkpoint that computes the same."""

import os
from collections.abc import Sequence

from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from conversion_scripts.conversion import SHARED_FIELDS, add_dtype, build, converter_parser, new_config
from conversion_scripts.convert_iha_to_llama import write_stock_checkpoint
from iha_io.command_io import UserError, run_cli
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


def convert(source: str | os.PathLike, destination: str | os.PathLike, dtype: str = "auto") -> None:
    """Convert the IHA checkpoint `source` to a DiffLlama in the new directory `destination`. Raise `UserError`."""
    write_stock_checkpoint(source, destination, dtype, convert_back)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = converter_parser(
        __doc__,
        "diff-iha diffllama-again",
        "IHA checkpoint: a directory or a Hub id",
        "the DiffLlama checkpoint",
    )
    add_dtype(parser)
    convert(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    run_cli(main)
