"""Interleave the heads of a model that Axolotl trains, by keys of its YAML: see axolotl.yaml next to this file.

Axolotl calls the plugin after it has loaded the model and before it adds adapters. The keys are the arguments of
`interleave_heads`:

    plugins: [axolotl_plugin.InterleavedHeads]  # with the folder of this file in PYTHONPATH
    num_pseudo_heads: 2
    interleaved_layers: paper                   # or indices of layers (all layers)
    interleaved_window: 4096                    # or paper (the model's own window, if it has one)
"""

from typing import Annotated, Any, Literal

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field
from transformers import PreTrainedModel

from modeling_iha import interleave_heads, save_adapter


class InterleavedHeadsArgs(BaseModel):
    """Hold the keys that the plugin adds to Axolotl's."""

    num_pseudo_heads: Annotated[int, Field(ge=2)]
    interleaved_layers: list[int] | Literal["paper"] | None = None
    interleaved_window: int | Literal["paper"] | None = None


class InterleavedHeads(BasePlugin):
    """Interleave the heads before the training, and save an adapter with the mixing after it."""

    def get_input_args(self) -> str:
        return f"{__name__}.InterleavedHeadsArgs"

    def post_model_build(self, cfg: Any, model: PreTrainedModel) -> None:
        interleave_heads(
            model, cfg.num_pseudo_heads, layers=cfg.interleaved_layers, sliding_window=cfg.interleaved_window
        )

    def post_train(self, cfg: Any, model: Any) -> None:
        if cfg.adapter:  # what Axolotl saves of an adapter lacks the record that `load_adapter` reads
            save_adapter(model, cfg.output_dir)
