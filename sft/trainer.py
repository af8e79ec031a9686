"""TRL's trainer with a learning rate of its own for the weights that mix heads."""

import torch
from trl import SFTTrainer

from modeling_iha.attention_kinds import ATTENTION_CLASSES
from sft.distributed import DistributedTrainer


# The modules that mix heads or collapse pseudo-heads, with entries of order 1.
MIXING_MODULES = {module for attention in ATTENTION_CLASSES.values() for module in attention.mixing_modules}


class MixingTrainer(DistributedTrainer, SFTTrainer):
    """SFTTrainer with a parameter group of its own for the mixing and collapse weights.

    Their entries are of order 1, so Adam at a usual fine-tuning rate of 5e-5 moves them by less than 0.003 in 60
    steps: the group learns at `mixing_lr_multiplier` times the backbone's rate and without weight decay, which would
    pull the exact warm start towards zero. A model without such weights trains as usual.
    """

    def __init__(self, *args, mixing_lr_multiplier: float, **kwargs) -> None:
        self.mixing_lr_multiplier = mixing_lr_multiplier
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        parameters = (self.model if model is None else model).named_parameters()
        mixing = [value for name, value in parameters if value.requires_grad and MIXING_MODULES & set(name.split("."))]
        if mixing:
            moved = {id(value) for value in mixing}
            for group in optimizer.param_groups:
                group["params"] = [value for value in group["params"] if id(value) not in moved]
            rate = self.args.learning_rate * self.mixing_lr_multiplier
            optimizer.add_param_group({"params": mixing, "lr": rate, "weight_decay": 0.0, "is_mixing": True})
        return optimizer

    def _get_learning_rate(self) -> float:
        # Asked for at the one moment that both rates are still those of the step just taken.
        self.mixing_learning_rate = self.lr_scheduler.get_last_lr()[-1]
        return super()._get_learning_rate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "learning_rate" in logs and self.optimizer.param_groups[-1].get("is_mixing"):
            logs["mixing_learning_rate"] = self.mixing_learning_rate
        super().log(logs, start_time)
