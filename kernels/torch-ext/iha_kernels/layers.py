"""Take the Triton kernels where they run, and PyTorch elsewhere."""

import torch
from torch import nn

from .triton_kernels import collapse, expand, kernels_take


class Expand(nn.Module):
    """Return virtual tokens [batch, N * P, H, D] of heads [batch, M, N, D] by alpha [M, H, P].

    With tables `cos` and `sin` [P, D], whose halves are equal, pseudo-head p is rotated by RoPE's angle p."""

    can_torch_compile = True

    def forward(self, states, alpha, cos=None, sin=None):
        if kernels_take(states, alpha):
            return expand(states, alpha, None if cos is None else (cos, sin))
        virtual = torch.einsum("bmnd,mhp->bnphd", states, alpha.to(states.dtype))
        if cos is not None:
            first, second = virtual.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
            virtual = virtual * cos.to(states.dtype).unsqueeze(1) + turned * sin.to(states.dtype).unsqueeze(1)
        return virtual.flatten(1, 2)


class Collapse(nn.Module):
    """Return heads [batch, N, H, D] of virtual outputs [batch, N * P, H, D] by R [H, P]."""

    can_torch_compile = True

    def forward(self, output, weight):
        if kernels_take(output, weight):
            return collapse(output, weight)
        return torch.einsum("bnphd,hp->bnhd", output.unflatten(1, (-1, weight.shape[1])), weight.to(output.dtype))
