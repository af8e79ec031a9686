# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Make the mixing weights that leave a layer's output unchanged, and measure how far a layer is from them.

At the start every pseudo-head equals its head, and the pseudo-heads of a token share its RoPE position. The collapse
selects the last pseudo-head, the only one that sees all copies of its token under the interleaved causal mask.
Every layer then computes what it computed before (the inclusion of IHA, Theorem 2, in its causal form). The copies of
a token have equal keys, so they get equal weights. Value offsets that sum to zero over the copies therefore cancel,
and make the pseudo-heads differ without changing the result.

All tensors are made on the CPU, whatever PyTorch's default device is: the generator is the CPU's, so a seed gives the
same start everywhere.
"""

from collections.abc import Sequence

import torch


# How far from zero the sum of the value offsets over the pseudo-heads may be by rounding alone.
OFFSET_TOLERANCE = 1e-6


def identity_mixing(num_heads: int, num_pseudo_heads: int) -> torch.Tensor:
    """Return alpha [M, M, P] (source head, head, pseudo-head), float32, where every pseudo-head equals its head."""
    return torch.eye(num_heads, device="cpu")[:, :, None].repeat(1, 1, num_pseudo_heads)


def last_pseudo_head(num_heads: int, num_pseudo_heads: int, pseudo_collapse: str = "per_head") -> torch.Tensor:
    """Return R [H, P] or, for "all_heads", [H, H * P], float32, where each head selects its own last pseudo-head."""
    last = torch.zeros(1, num_pseudo_heads, device="cpu")
    last[0, -1] = 1.0
    if pseudo_collapse == "per_head":
        return last.repeat(num_heads, 1)
    return torch.kron(torch.eye(num_heads, device="cpu"), last)


def balanced_offsets(num_heads: int, num_pseudo_heads: int, generator: torch.Generator) -> torch.Tensor:
    """Draw D [M, M, P], float32, within 0.25 of zero, which sums to zero over the pseudo-heads and is zero for P = 1.

    The entries are multiples of 2^-7, so I + D and its sum over the pseudo-heads are exact in bfloat16 too. Rounded
    entries would cause an error of 0.2% in the values of every layer.
    """
    size = (num_heads, num_heads, num_pseudo_heads)
    steps = torch.randint(-16, 17, size, generator=generator, device="cpu")
    return (steps - steps.roll(1, dims=-1)) / 128


def exact_start(
    head_counts: Sequence[int], num_pseudo_heads: int, pseudo_collapse: str, generator: torch.Generator | None
) -> dict[str, torch.Tensor]:
    """Return the mixing and collapse, float32, that leave a layer's output unchanged.

    `head_counts` are the numbers of query, key and value heads. The value offsets are drawn from `generator`, and are
    zero without one."""
    num_heads, num_key_heads, num_value_heads = head_counts
    value_mixing = identity_mixing(num_value_heads, num_pseudo_heads)
    if generator is not None:
        value_mixing += balanced_offsets(num_value_heads, num_pseudo_heads, generator)
    return {
        "q_mix.weight": identity_mixing(num_heads, num_pseudo_heads),
        "k_mix.weight": identity_mixing(num_key_heads, num_pseudo_heads),
        "v_mix.weight": value_mixing,
        "collapse.weight": last_pseudo_head(num_heads, num_pseudo_heads, pseudo_collapse),
    }


def deviations(
    own: dict[str, torch.Tensor], head_counts: Sequence[int], num_pseudo_heads: int, pseudo_collapse: str
) -> dict[str, torch.Tensor]:
    """Return the differences of the values of a layer's mixing from an exact start, by parameter.

    For the value offsets return the sum over the pseudo-heads, beyond rounding, because for equal keys only the
    sum matters."""
    exact = exact_start(head_counts, num_pseudo_heads, pseudo_collapse, None)
    moved = {name: own[name].cpu() - value for name, value in exact.items()}
    offsets = moved["v_mix.weight"].double().sum(-1)
    # A NaN is kept: it is not a rounding error.
    return moved | {"v_mix.weight": offsets.masked_fill(offsets.abs() <= OFFSET_TOLERANCE, 0)}
