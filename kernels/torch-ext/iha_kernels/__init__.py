"""Mix, rotate and interleave attention heads, and collapse them: Interleaved Head Attention, arXiv 2602.21371."""

from . import layers
from .triton_kernels import collapse, expand, kernels_take


__all__ = ["collapse", "expand", "kernels_take", "layers"]
