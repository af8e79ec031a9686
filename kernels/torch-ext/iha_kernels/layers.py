"""Take the Triton kernels where they run, and PyTorch elsewhere."""

import torch
from torch import nn

from .triton_kernels import collapse, expand, kernels_take


class Expand(nn.Module):
    """Return virtual queries, keys and values [batch, H or G, N * P, D] of ones [batch, M, N, D].

    `mixes` are alpha of each, [M, H or G, P]. `rotation`, (cos, sin) [P, D] with equal halves, is of queries and keys.
    """

    can_torch_compile = True

    def forward(self, states, mixes, rotation=None):
        if kernels_take(states[0], mixes[0]):
            return expand(states, mixes, rotation)
        return tuple(mix_and_rotate(*each) for each in zip(states, mixes, (rotation, rotation, None)))


def mix_and_rotate(states, alpha, rotation):
    virtual = torch.einsum("bmnd,mhp->bhnpd", states, alpha.to(states.dtype))
    if rotation is not None:
        first, second = virtual.chunk(2, dim=-1)
        virtual = virtual * rotation[0] + torch.cat((-second, first), dim=-1) * rotation[1]
    return virtual.flatten(2, 3).to(states.dtype)


class Collapse(nn.Module):
    """Return heads [batch, N, H, D] of virtual outputs [batch, N * P, H, D] by R [H, P]."""

    can_torch_compile = True

    def forward(self, output, weight):
        if kernels_take(output, weight):
            return collapse(output, weight)
        return torch.einsum("bnphd,hp->bnhd", output.unflatten(1, (-1, weight.shape[1])), weight.to(output.dtype))
