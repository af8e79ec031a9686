# Copyright 2026 the modeling_iha authors. SPDX-License-Identifier: Apache-2.0
"""Interleave heads: mix them into pseudo-heads, lay these out as virtual tokens, and collapse their outputs.

Algorithm 1 of IHA (arXiv:2602.21371) has five steps. Step 1 projects to heads, step 2 mixes them into pseudo-heads
(by alpha), step 3 interleaves these as virtual tokens, step 4 attends over virtual tokens (virtual_tokens.py, which
lists the symbols of shapes), and step 5 collapses the P outputs of a token (by R). T_p rotates pseudo-head p by p
positions further than its token (RoPE). `rotation` has the tables, or is `None` where pseudo-heads share a position.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils.generic import maybe_autocast

from .mixing import Mixing
from .triton_kernels import collapse, decode, expand, kernels_decode, kernels_take
from .virtual_tokens import masked_softmax


class HeadMixing(Mixing):
    """Combine heads into pseudo-heads by learned weights, alpha of IHA, Algorithm 1, step 2.

    The value of `weight` [M, M, P] holds alpha[m, h, p], the share of head m in pseudo-head p of head h."""

    def __init__(self, num_heads: int, num_pseudo_heads: int, scale: float = 1.0):
        super().__init__(scale)
        self.add_weight("weight", torch.zeros(num_heads, num_heads, num_pseudo_heads))

    def init_mechanism(self, config):
        """Start every pseudo-head near its own head (the paper gives no start); the noise makes them differ."""
        # Some configurations lack the field, such as OPT's, which has `init_std`.
        noise = torch.randn_like(self.weight) * getattr(config, "initializer_range", 0.02)
        self.init_weight("weight", torch.eye(len(noise)).to(noise).unsqueeze(-1) + noise)


class HeadCollapse(Mixing):
    """Combine pseudo-heads into heads by learned weights, R of IHA, Algorithm 1, step 5.

    The value of `weight` is [H, P] for `"per_head"`: out[h] = sum_p R[h, p] O[h, p]. It is [H, H * P] for
    `"all_heads"`, which also sums over the heads: column h' * P + p of row h, counted from 0, is the share of
    pseudo-head p of head h' (Definition 3)."""

    def __init__(self, num_heads: int, num_pseudo_heads: int, pseudo_collapse: str, scale: float = 1.0):
        super().__init__(scale)
        self.num_pseudo_heads = num_pseudo_heads
        num_sources = 1 if pseudo_collapse == "per_head" else num_heads
        self.add_weight("weight", torch.zeros(num_heads, num_sources * num_pseudo_heads))

    def init_mechanism(self, config):
        """Start at the mean over the pseudo-heads."""
        num_heads, columns = self.weight.shape
        shares = torch.ones(num_heads, 1) if columns == self.num_pseudo_heads else torch.eye(num_heads)
        self.init_weight("weight", shares.repeat_interleave(self.num_pseudo_heads, dim=1) / self.num_pseudo_heads)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate states [..., head_dim] by RoPE tables that broadcast to them."""
    half = states.shape[-1] // 2
    # This equals states * cos + rotate_half(states) * sin to the last bit, in fewer passes.
    sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return states * cos + states.roll(half, dims=-1) * sin


def make_virtual_sequence(states: torch.Tensor, alpha: torch.Tensor, rotation: tuple | None = None) -> torch.Tensor:
    """Return the virtual sequence [batch, heads, N * P, head_dim] of states [batch, M, N, head_dim].

    alpha is [M, heads, P], for all M heads or a part of them. The result is a view of what the mixing writes,
    [batch, N, P, heads, head_dim], so interleaving copies nothing."""
    if kernels_take(states, alpha):
        return expand(states, alpha, rotation).transpose(1, 2)
    num_pseudo_heads = alpha.shape[2]
    alpha = alpha.to(states.dtype).permute(2, 1, 0).flatten(0, 1)
    states = states.transpose(1, 2)
    # Expanded, alpha gives a batched product, [batch, N, P * heads, head_dim]. With a 2-D one `matmul` makes copies.
    alpha = alpha.expand(*states.shape[:2], -1, -1)
    states = torch.matmul(alpha, states).unflatten(2, (num_pseudo_heads, -1))  # [batch, N, P, heads, head_dim]
    if rotation is not None:
        cos, sin = (table.to(states.dtype).unsqueeze(1) for table in rotation)
        states = rotate(states, cos, sin)
    return states.flatten(1, 2).transpose(1, 2)


class MixedHeads(NamedTuple):
    """Make the virtual tokens of one call by a layer's mixing, and collapse their outputs."""

    q_mix: torch.Tensor  # alpha^Q, [H, H, P]
    k_mix: torch.Tensor  # alpha^K, [G, G, P]
    v_mix: torch.Tensor  # alpha^V, [G, G, P]
    collapse: torch.Tensor  # R, [H, P] or [H, H * P]
    rotation: tuple[torch.Tensor, torch.Tensor] | None  # (cos, sin) of T_p, [P, head_dim]; `None` where T_p is 1

    @classmethod
    def of_module(cls, module: nn.Module, states: torch.Tensor, rotation=None) -> "MixedHeads":
        """Return the weights of a module. It calls its parts with states, because wrappers act on calls."""
        return cls(module.q_mix(states), module.k_mix(states), module.v_mix(states), module.collapse(states), rotation)

    @property
    def num_pseudo_heads(self) -> int:
        return self.q_mix.shape[-1]

    @property
    def collapses_per_head(self) -> bool:
        return self.collapse.shape[1] == self.num_pseudo_heads

    def in_parts(self, count: int) -> list["MixedHeads"]:
        """Return the mixing in parts of G // `count` key/value heads, at least one, with their queries."""
        num_groups = self.k_mix.shape[1]
        if count == 1 or not self.collapses_per_head:
            return [self]
        size = max(1, num_groups // count)
        mixes = [each.split(size * each.shape[1] // num_groups, dim=1) for each in self[:3]]
        collapses = self.collapse.split(size * len(self.collapse) // num_groups)
        return [self._replace(q_mix=q, k_mix=k, v_mix=v, collapse=r) for q, k, v, r in zip(*mixes, collapses)]

    def make_virtual_tokens(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple:
        """Return queries, keys and values of virtual tokens, [batch, H or G, tokens * P, head_dim] (steps 2 and 3)."""
        query = make_virtual_sequence(query, self.q_mix, self.rotation)
        key = make_virtual_sequence(key, self.k_mix, self.rotation)
        return query, key, make_virtual_sequence(value, self.v_mix)

    def collapse_output(self, output: torch.Tensor) -> torch.Tensor:
        """Return heads [batch, N, H, head_dim] of virtual outputs [batch, N * P, H, head_dim] by R (step 5)."""
        if self.collapses_per_head and kernels_take(output, self.collapse):
            return collapse(output, self.collapse)
        output = output.unflatten(1, (-1, self.num_pseudo_heads))
        weight = self.collapse.to(output.dtype)
        if weight.shape[1] == self.num_pseudo_heads:
            # `einsum` would permute the states, and autograd would keep that copy for the backward pass.
            return (output * weight.t().unsqueeze(-1)).sum(dim=2)
        weight = weight.unflatten(1, (-1, self.num_pseudo_heads))
        # Some base models call `view` on the output of attention, so it must be contiguous.
        return torch.einsum("hgp,bnpgd->bnhd", weight, output).contiguous()

    def mask_of_virtual_heads(self, mask: Any) -> Any:
        """Return a mask unchanged: there are as many virtual heads as heads (unlike in pairing.py)."""
        return mask

    def attend_new_token(self, query, key, value, mask: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return the output [batch, 1, H, head_dim] of one new token (IHA, Algorithm 1, steps 2 to 5).

        No virtual token of the cache is built. Mixing, rotation and collapse are linear, so they move from the cached
        tokens to the new one. For query pseudo-head i and key pseudo-head j of a head in group g,

            T_i q_i . T_j sum_m alpha_K[m, g, j] k_m = sum_m (alpha_K[m, g, j] T_j^T T_i q_i) . k_m

        The term in parentheses does not depend on the cached tokens and has the size of a query. It is computed first,
        and the scores are then one product with the cache as it is. In the same way R is applied before the sum over
        the cached values, sum_i R[h, i] (softmax_i V) = (sum_i R[h, i] softmax_i) V, and alpha_V after it.

        Args:
            query: [batch, H, 1, head_dim], rotated as the cached keys are.
            key, value: [batch, G, K, head_dim].
            mask: boolean or additive [batch or 1, H or 1, P, K * P] over virtual tokens.
            scaling: factor of the scores."""
        if kernels_decode(query, self.q_mix):
            return decode(query, key, value, mask, scaling, *self)
        batch, num_heads = query.shape[:2]
        num_pseudo_heads = self.num_pseudo_heads
        dtype = value.dtype
        group = num_heads // key.shape[1]
        q_mix = self.q_mix.to(dtype)
        k_mix = self.k_mix.to(dtype).repeat_interleave(group, dim=1)  # [G (m), H, P], a column for each query head
        v_mix = self.v_mix.to(dtype).repeat_interleave(group, dim=1)
        with maybe_autocast(query.device.type, enabled=False):  # it would round what is in float32 on purpose
            # The pseudo-heads q_i of the query, [batch, H, P (i), 1, head_dim]
            pseudo_query = torch.matmul(q_mix.flatten(1).t() * scaling, query.squeeze(2))
            pseudo_query = pseudo_query.view(batch, num_heads, num_pseudo_heads, 1, -1)
            if self.rotation is not None:
                cos, sin = (table.to(dtype) for table in self.rotation)
                rotated = rotate(pseudo_query, cos.unsqueeze(1), sin.unsqueeze(1))  # by T_i
                # By T_j^T for every j: the tables of all j broadcast, [batch, H, P (i), P (j), head_dim].
                pseudo_query = rotate(rotated, cos, -sin)
            # [batch, G (m), H, P (i), P (j), head_dim], flattened to [batch, G, H * P * P, head_dim]
            absorbed = (pseudo_query.unsqueeze(1) * k_mix[:, :, None, :, None]).flatten(2, 4)
            # One product takes the sum over m too: [batch, H * P * P, G * head_dim] times [batch, G * head_dim, K].
            scores = torch.matmul(absorbed.transpose(1, 2).flatten(2), key.transpose(1, 2).flatten(2).transpose(1, 2))
            scores = scores.view(batch, num_heads, num_pseudo_heads, num_pseudo_heads, -1)
            probabilities = masked_softmax(scores, mask)
            share_of_pseudo_head = self.collapse.to(probabilities.dtype).unsqueeze(1)  # R, [H, 1, P]
            collapsed = torch.matmul(share_of_pseudo_head, probabilities.flatten(-2)).to(dtype)
            collapsed = collapsed.view(batch, num_heads * num_pseudo_heads, -1)
            # [batch, G, H, P (j), head_dim], of which alpha_V takes the sum over G and j
            output = torch.matmul(collapsed.unsqueeze(1), value).unflatten(2, (num_heads, num_pseudo_heads))
            return (output * v_mix.unsqueeze(-1)).sum(dim=(1, 3)).unsqueeze(1)
