# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Interleave heads: mix them into pseudo-heads, lay these out as virtual tokens, collapse (IHA, Algorithm 1).

The algorithm has five steps. Step 1 projects to heads, step 2 mixes them into pseudo-heads (by alpha), step 3
interleaves these as virtual tokens, step 4 attends over virtual tokens, and step 5 collapses the P outputs of a token
(by R). T_p is RoPE's rotation of pseudo-head p within its token: by p positions. The shapes of all files are in these
symbols:

    N  tokens of a call       H  query heads                P  pseudo-heads of a head
    W  window, in tokens      G  key and value heads        M  H for queries, G for keys and values
    L  virtual tokens, N * P  K  keys, cached ones included

P pseudo-heads turn token n into the P consecutive virtual tokens n * P .. n * P + P - 1, over which a stock attention
core runs. For P = 2 and three tokens, each query sees the keys marked x (with a window of two tokens, the last four x
of its row):

                                  key of token 0   token 1   token 2
                     pseudo-head             0 1       0 1       0 1
    query of token 0, pseudo-head 0          x
                      pseudo-head 1          x x
    query of token 1, pseudo-head 0          x x       x
                      pseudo-head 1          x x       x x
    query of token 2, pseudo-head 0          x x       x x       x
                      pseudo-head 1          x x       x x       x x
"""

from collections.abc import Sequence

import torch


def mix(states: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Return pseudo-heads [batch, N, P, M, head_dim] of heads [batch, M, N, head_dim] by alpha [M, M, P] (step 2)."""
    num_heads, _, num_pseudo_heads = alpha.shape
    alpha = alpha.to(states.dtype).permute(2, 1, 0).reshape(num_pseudo_heads * num_heads, num_heads)
    states = states.transpose(1, 2)
    # `matmul` with a single matrix would fold the tokens into head_dim and then copy the result. Expanding the matrix
    # over the tokens (a view) makes it write the wanted layout directly.
    alpha = alpha.expand(*states.shape[:2], -1, -1)
    return torch.matmul(alpha, states).unflatten(2, (num_pseudo_heads, num_heads))


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate states [..., head_dim] by RoPE tables that broadcast to them."""
    half = states.shape[-1] // 2
    # This equals states * cos + rotate_half(states) * sin to the last bit, in fewer passes.
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return states * cos + states.roll(half, dims=-1) * sin


def interleave(states: torch.Tensor) -> torch.Tensor:
    """View pseudo-heads [batch, N, P, M, head_dim] as the virtual sequence [batch, M, N * P, head_dim] (step 3)."""
    return states.flatten(1, 2).transpose(1, 2)


def make_virtual_sequence(
    states: torch.Tensor, alpha: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """Return the virtual sequence [batch, M, N * P, head_dim] of heads [batch, M, N, head_dim] (steps 2, 3, T_p)."""
    states = mix(states, alpha)
    if rotation is not None:
        cos, sin = (table.to(states.dtype).unsqueeze(1) for table in rotation)
        states = rotate(states, cos, sin)
    return interleave(states)


def collapse(states: torch.Tensor, weight: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Collapse virtual tokens [batch, N * P, H, head_dim] to heads [batch, N, H, head_dim] by R (step 5)."""
    states = states.unflatten(1, (-1, num_pseudo_heads))
    weight = weight.to(states.dtype)
    if weight.shape[1] == num_pseudo_heads:
        # `einsum` would permute the states, and autograd would keep that copy for the backward pass.
        return (states * weight.t().unsqueeze(-1)).sum(dim=2)
    # Some base models call `view` on the output of attention, so it must be contiguous, as a core's is.
    return torch.einsum("hgp,bnpgd->bnhd", weight.unflatten(1, (-1, num_pseudo_heads)), states).contiguous()


def token_attentions(
    attentions: tuple[torch.Tensor, ...], num_tokens: int, paired: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Return attention maps over tokens, [batch, H, N, K], of a call with `num_tokens` tokens N.

    Maps over virtual tokens, [batch, H, N * P, K * P], are summed over the P of a key and averaged over the P of a
    query. In a layer of `paired` heads, [batch, H / P, N * P, K * P], each virtual query belongs to one head, so
    the rows are returned to their heads and not averaged. Other maps stay as they are."""
    maps = []
    for weights, is_paired in zip(attentions, paired, strict=True):
        size = weights.shape[-2] // num_tokens  # P, or 1 in a layer without virtual tokens
        by_key = weights.unflatten(-1, (-1, size)).sum(-1)
        by_query = by_key.unflatten(-2, (-1, size))  # [batch, heads, N, P, K]
        if is_paired:
            maps.append(by_query.movedim(3, 1).flatten(1, 2))
        else:
            maps.append(by_query.mean(-2))
    return tuple(maps)


def virtual_positions(position_ids: torch.Tensor, num_pseudo_heads: int) -> torch.Tensor:
    """Return positions n * P + p of virtual tokens, [batch, N * P], from positions n of tokens, [batch, N]."""
    offsets = torch.arange(num_pseudo_heads, device=position_ids.device)
    return (position_ids[..., None] * num_pseudo_heads + offsets).flatten(-2)


def in_virtual_tokens(window: int | None, num_pseudo_heads: int) -> int | None:
    """Return a window in virtual tokens from one in tokens, or `None` where there is no window."""
    return None if window is None else window * num_pseudo_heads


def virtual_kwargs(kwargs: dict, num_pseudo_heads: int) -> dict:
    """Convert to virtual tokens the keyword arguments that describe windows and packed documents.

    Positions become n * P + p even if the virtual tokens of a token share its RoPE position, because a core would take
    a repeated position for a new document."""
    virtual = dict(kwargs)
    if kwargs.get("position_ids") is not None:
        virtual["position_ids"] = virtual_positions(kwargs["position_ids"], num_pseudo_heads)
    for name in ("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if kwargs.get(name) is not None:
            virtual[name] = kwargs[name] * num_pseudo_heads
    return virtual
