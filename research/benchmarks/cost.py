"""Print the parameters, FLOPs and cached values of a model.

The table gives each kind of layer, the whole model, and ratios to the same model with "mha" in every layer. The
figures are those of kind_facts/model_cost.py.
"""

from collections.abc import Sequence
from dataclasses import astuple

from iha_io.checkpoint_io import load_config
from iha_io.command_arguments import check_cost, cost_arguments
from iha_io.command_io import UserError, run_cli
from kind_facts.cost import Cost
from kind_facts.model_cost import attention, ffn, head, model, with_mha
from modeling_iha import IHAConfig


def row(title: str, cost: Cost, tokens: int) -> str:
    """Return a line of the table: parameters in millions, FLOPs (two for each multiply-add), and cached values."""
    figures = (
        f"{cost.parameters / 1e6:.3f} M",
        *(f"{2 * products / 1e9:.3f} G" for products in (cost.prefill, cost.training, cost.decode)),
        f"{cost.cache / tokens:.0f}",
    )
    return f"{title:<30}{''.join(f'{figure:>16}' for figure in figures)}"


def cost(preset: str | None, config: str | None, tokens: int) -> None:
    """Print the table of a preset, or of a checkpoint's `config`, for `tokens` tokens. Raise `UserError`."""
    check_cost(preset, config, tokens)
    if config is not None:
        settings = load_config(config)
        if not isinstance(settings, IHAConfig):
            wrong = f"{config} is a {settings.model_type!r} model"
            raise UserError(f"{wrong}; expected 'iha', as the conversions write.")
    else:
        settings = IHAConfig.from_preset(preset)

    columns = ("parameters", "prefill FLOPs", "training FLOPs", "decode FLOPs", "cached / token")
    print(f"{'':<30}{''.join(f'{name:>16}' for name in columns)}")
    for kind, layer_type in dict.fromkeys(zip(settings.attention_kinds, settings.layer_types)):
        figures = attention(settings, kind, layer_type, tokens)
        print(row(f"{kind}, {layer_type}", figures, tokens))
    print(row("FFN", ffn(settings, tokens), tokens))
    print(row("embedding, last norm, head", head(settings, tokens), tokens))
    whole = model(settings, tokens)
    print(row("whole model", whole, tokens))
    for title, other in (("mha", with_mha(settings)), ("global mha", with_mha(settings, "full_attention"))):
        ratios = (a / b for a, b in zip(astuple(whole), astuple(model(other, tokens))))
        print(f"{f'ratio to {title} everywhere':<30}{''.join(f'{ratio:>16.3f}' for ratio in ratios)}")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table that the arguments ask for, or raise a `UserError`."""
    cost(**cost_arguments(argv))


if __name__ == "__main__":
    run_cli(main)
