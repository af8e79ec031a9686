"""Prepare a model without data for LoRA, with weights in 32, 16 or 4 bits below the adapters."""

import torch
from torch import nn
from transformers import PreTrainedModel

from iha.errors import check_packages
from modeling_iha.mixing import Mixing


DROPOUT = 0.05  # of the adapters, TRL's default
BLOCK = 64  # weights that share a scale, as bitsandbytes packs them
BLOCK_OF_SCALES = 256  # scales that share one, with double quantization


class Product(torch.autograd.Function):
    """Multiply by a weight that is unpacked for the product, and again for its gradient, as bitsandbytes does."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, packed: torch.Tensor, num_outputs: int) -> torch.Tensor:
        ctx.shape = (num_outputs, states.shape[-1])
        ctx.save_for_backward(packed)
        return states @ states.new_empty(ctx.shape).T

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient @ gradient.new_empty(ctx.shape), None, None


class FourBitLinear(nn.Linear):
    """Stand in for a linear map whose weight is kept in 4 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype)
        count = linear.weight.numel()
        scales = count // BLOCK
        self.weight = nn.Parameter(torch.empty(count // 2, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device="meta"))
        self.register_buffer("scales_of_scales", torch.empty(scales // BLOCK_OF_SCALES, device="meta"))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output = Product.apply(states.to(torch.bfloat16), self.weight, self.out_features)
        return output if self.bias is None else output + self.bias


def add_adapters(model: PreTrainedModel, layers: nn.ModuleList, rank: int, bits: int) -> None:
    """Freeze a model but for adapters of a rank on all linear maps of its layers, and the mixing, in float32.

    With 4 bits these linear maps are kept in 4 bits, and embedding, norms and head as they are."""
    check_packages("peft")
    from peft import LoraConfig, inject_adapter_in_model

    if bits == 4:
        for name, module in list(layers.named_modules()):
            if isinstance(module, nn.Linear):
                layers.set_submodule(name, FourBitLinear(module))
    inject_adapter_in_model(LoraConfig(r=rank, target_modules="all-linear", lora_dropout=DROPOUT), model)
    for name, module in model.named_modules():
        if "lora_" in name or isinstance(module, Mixing):
            module.float().requires_grad_(True)
    model.enable_input_require_grads()
