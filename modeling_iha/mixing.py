# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Hold the weights that mix heads, and learn them at `scale` times the rate of the optimizer."""

import torch
from torch import nn
from transformers import initialization as init


class Mixing(nn.Module):
    """Hold weights of order 1 that mix heads, and learn them at a multiple of the optimizer's rate.

    The layers use the value of a weight w, and not w itself:

        value = start + s * w
        gradient of w = gradient of the value    (as if the value were w, and not s times as much)

    with buffers for the start and the scale s, which are saved with w. For s = 1, as from scratch, the start is zero,
    so that w is the value. For any other s, w begins at zero.

    Adam moves a weight by its rate at each step, which is far too little for values of order 1: the value moves s
    times as far. Weight decay pulls the value to its start. (The steps of `torch.optim.Adafactor` depend on the size
    of w: do not use it.)"""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.initial_scale = scale

    def add_weight(self, name: str, value: torch.Tensor):
        """Add a parameter with its start, of the same shape, and its scale, of shape []."""
        self.register_parameter(name, nn.Parameter(value))
        weight = self.get_parameter(name)  # Accelerate and vLLM patch `register_parameter` to move it
        self.register_buffer(f"{name}_start", torch.zeros_like(weight))
        self.register_buffer(f"{name}_scale", weight.new_ones(()))

    def init_weight(self, name: str, value: torch.Tensor):
        """Set a weight, its start and its scale, except those that were loaded (`init` skips them).

        At scale 1 the weight becomes `value`, and its start zero. At any other scale it is the other way round."""
        weight, start = self.get_parameter(name), self.get_buffer(f"{name}_start")
        value = value.to(weight).expand_as(weight)
        is_plain = self.initial_scale == 1
        init.copy_(weight, value if is_plain else torch.zeros_like(value))
        init.copy_(start, torch.zeros_like(value) if is_plain else value)
        init.constant_(self.get_buffer(f"{name}_scale"), self.initial_scale)

    def value(self, name: str = "weight") -> torch.Tensor:
        """Return the value of a weight."""
        weight = getattr(self, name)
        fixed = weight.detach()
        value = torch.addcmul(self._buffers[f"{name}_start"], fixed, self._buffers[f"{name}_scale"])
        # To autograd `value` is a constant. `weight - fixed` is zero, and hands the gradient (or tangent) on unscaled.
        return value + (weight - fixed) if torch.is_grad_enabled() else value

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the value. Wrappers (PEFT, offloading) act on a call with states, which are not used here."""
        return self.value()
