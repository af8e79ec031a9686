# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Hold the weights that mix heads, and learn them at `scale` times the rate (IHA, Algorithm 1, steps 2 and 5)."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init


class Mixing(nn.Module):
    """Hold weights of order 1 that mix heads, and learn them at a multiple of the optimizer's rate.

    Adam moves a weight by its rate at each step, which is far too little for entries of order 1. A weight is therefore
    the change w from a start, the value is start + s * w, and the gradient of w is that of the value. An
    optimizer whose steps do not depend on the size of the weight (SGD and Adam, but not `torch.optim.Adafactor`) then
    changes the value at s times its rate, and weight decay pulls the value to its start. In half precision w is near
    zero, where it keeps the small steps that a weight near 1 loses.

    Start and scale s are buffers and are saved with w, so a state dict always holds all three. From scratch the start
    is zero and s is 1, so that w is the value."""

    initial_scale = 1.0  # the scale at which `init_weight` starts

    def add_weight(self, name: str, value: torch.Tensor):
        """Add a parameter with its start, of the same shape, and its scale, of shape []."""
        self.register_parameter(name, nn.Parameter(value))
        weight = self.get_parameter(name)  # Accelerate and vLLM patch `register_parameter` to move it
        self.register_buffer(f"{name}_start", torch.zeros_like(weight))
        self.register_buffer(f"{name}_scale", weight.new_ones(()))

    def init_weight(self, name: str, value: torch.Tensor):
        """Set a weight, its start and its scale, except those that were loaded (`init` skips them).

        At scale 1 the weight becomes `value`, and its start zero. At any other scale the start becomes `value`, and
        the weight zero. Checkpoints of earlier versions have no scale, and those of scale 1 have no start either:
        this sets what is missing. Raise a ValueError if a weight was loaded without its start at another scale."""
        weight = self.get_parameter(name)
        start = self.get_buffer(f"{name}_start")
        scale = self.get_buffer(f"{name}_scale")
        if was_loaded(weight) and not was_loaded(start) and self.initial_scale != 1:
            raise ValueError(
                f"The weights of a {type(self).__name__} hold changes and no starts: save a model by save_pretrained "
                "or its state_dict, not its parameters alone."
            )
        value = value.to(weight).expand_as(weight)
        if self.initial_scale == 1:
            init.copy_(weight, value)
            init.zeros_(start)
        else:
            init.copy_(start, value)
            init.zeros_(weight)
        init.constant_(scale, self.initial_scale)

    def value(self, name: str = "weight") -> torch.Tensor:
        """Return the value of a weight."""
        weight = getattr(self, name)
        value = torch.addcmul(getattr(self, f"{name}_start"), weight.detach(), getattr(self, f"{name}_scale"))
        if not torch.is_grad_enabled():
            return value
        # The gradient of start + s * w with respect to w would be s times that of the value. The term that is added is
        # zero, and its gradient is that of the value.
        return value + (weight - weight.detach())


def was_loaded(tensor: torch.Tensor) -> bool:
    """Return whether Transformers has read a tensor from a checkpoint."""
    return getattr(tensor, "_is_hf_initialized", False)


def set_initial_scale(module: nn.Module, scale: float):
    """Set the scale at which all mixing weights in a module are initialized (see `Mixing`)."""
    for submodule in module.modules():
        if isinstance(submodule, Mixing):
            submodule.initial_scale = scale


class HeadMixing(Mixing):
    """Combine heads into pseudo-heads by learned weights, alpha of IHA, Algorithm 1, step 2.

    The value of `weight` [M, M, P] holds alpha[m, h, p], the share of head m in pseudo-head p of head h."""

    def __init__(self, num_heads: int, num_pseudo_heads: int):
        super().__init__()
        self.add_weight("weight", torch.eye(num_heads).unsqueeze(-1).repeat(1, 1, num_pseudo_heads))

    def init_mechanism(self, config: PreTrainedConfig):
        """Start every pseudo-head near its own head, so that the layer starts close to MHA.

        The paper gives no initialization. The noise makes the pseudo-heads differ."""
        # Some configurations lack the field, such as OPT's, which has `init_std`.
        noise = torch.randn_like(self.weight) * getattr(config, "initializer_range", 0.02)
        identity = torch.eye(self.weight.shape[0], device=noise.device, dtype=noise.dtype)
        self.init_weight("weight", identity.unsqueeze(-1) + noise)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return alpha for the states. Wrappers (PEFT, offloading) act on this call, not on the weight."""
        return self.value()


class HeadCollapse(Mixing):
    """Combine pseudo-heads into heads by learned weights, R of IHA, Algorithm 1, step 5.

    The value of `weight` is [H, P] for `"per_head"`: out[h] = sum_p R[h, p] O[h, p]. It is [H, H * P] for
    `"all_heads"`, which also sums over the heads: column h' * P + p of row h, counted from 0, is the share of
    pseudo-head p of head h' (Definition 3)."""

    def __init__(self, num_heads: int, num_pseudo_heads: int, pseudo_collapse: str):
        super().__init__()
        self.num_pseudo_heads = num_pseudo_heads
        columns = num_pseudo_heads if pseudo_collapse == "per_head" else num_heads * num_pseudo_heads
        self.add_weight("weight", torch.empty(num_heads, columns))
        self.init_mechanism()  # parameters are finite as soon as they are made

    def init_mechanism(self, config: PreTrainedConfig | None = None):
        """Start at the mean over the pseudo-heads."""
        num_heads, columns = self.weight.shape
        options: dict = {"device": self.weight.device, "dtype": self.weight.dtype}
        is_per_head = columns == self.num_pseudo_heads
        shares = torch.ones(num_heads, 1, **options) if is_per_head else torch.eye(num_heads, **options)
        self.init_weight("weight", shares.repeat_interleave(self.num_pseudo_heads, dim=1) / self.num_pseudo_heads)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return R for the states, as `HeadMixing` returns alpha."""
        return self.value()
