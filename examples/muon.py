"""Train a model's matrices with Muon, and the rest with AdamW: the embeddings, the head, norms, and what mixes heads.

docs/FROM_SCRATCH.md shows it with Trainer, and says what we measured.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from modeling_iha import mixing_parameters


class Together(torch.optim.Optimizer):
    """Step several optimizers as one, which Trainer takes: schedules, checkpoints and clipping see all groups."""

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Let the parts read the rates that a schedule writes."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def muon(model: PreTrainedModel, rate: float) -> torch.optim.Optimizer:
    """Return Muon for the matrices, with the size of AdamW's steps, and AdamW for the rest."""
    mixing = {id(weight) for weight in mixing_parameters(model)}
    vocabulary = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = []
    others = []
    for weight in model.parameters():
        is_matrix = weight.ndim == 2 and id(weight) not in mixing | vocabulary
        (matrices if is_matrix else others).append(weight)
    of_matrices = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return Together(of_matrices, torch.optim.AdamW(others, lr=rate, weight_decay=0.0))
