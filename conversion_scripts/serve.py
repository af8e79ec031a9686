"""Serve a checkpoint with `transformers serve`, an OpenAI-compatible server, and all its options.

That server looks for the class of a checkpoint among the names of `transformers`. This command adds those of this
package, and refuses weights that do not fill their models. It runs the installed package, not the code in the
checkpoint.

example: python -m conversion_scripts.serve smollm2-iha --port 8000
"""

import sys
from typing import Any

import transformers
import typer
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.cli.serve import Serve

from iha_io.checkpoint_io import check_filled, load_config_dict
from iha_io.command_io import run_cli
from modeling_iha import IHAForCausalLM
from modeling_iha.modeling_interleaved import InterleavedPreTrainedModel


class WholeModel:
    """Refuse weights that do not fill a model of ours, where Transformers gives random ones in their place."""

    @classmethod
    def from_pretrained(cls, source: str, *arguments: Any, **options: Any) -> Any:
        """Return the model in `source`. Raise `UserError` if its config leads to code from elsewhere, too."""
        load_config_dict(source)
        loaded: Any = super().from_pretrained(source, *arguments, output_loading_info=True, **options)  # type: ignore[misc]
        model, info = loaded
        if isinstance(model, (IHAForCausalLM, InterleavedPreTrainedModel)):
            check_filled(info, source)
        return model


class WholeCausalLM(WholeModel, AutoModelForCausalLM): ...


class WholeMultimodalLM(WholeModel, AutoModelForMultimodalLM): ...


def main() -> None:
    """Serve until interrupted."""
    for name in ("IHAForCausalLM", "InterleavedForCausalLM"):
        setattr(transformers, name, WholeCausalLM)
    transformers.AutoModelForMultimodalLM = WholeMultimodalLM  # for a base that takes images
    app = typer.Typer(add_completion=False)
    app.command(help=__doc__)(Serve)
    app(prog_name=sys.argv[0])


if __name__ == "__main__":
    run_cli(main)
