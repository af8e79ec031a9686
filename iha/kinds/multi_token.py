"""Describe kind "multi_token".

A layer computes the multi-head attention that it replaces while each kernel is 1 in the middle of its last row and 0
elsewhere, and its mixing is the identity. A norm or a gate of the heads leaves no exact start.
"""

import torch

from iha.flops import Cost, cached_tokens, linear, score_matrix
from modeling_iha import IHAConfig

from . import Companion


def _acts(where: str | None) -> list[str]:
    """Return the names of what is convolved or mixed."""
    return [name for name, stage in (("score", "pre"), ("weight", "post")) if where in ("both", stage)]


def start(config: IHAConfig, generator: torch.Generator, value_offsets: str) -> dict[str, torch.Tensor]:
    """Return kernels and mixing that change nothing."""
    options = config.options_of("multi_token")
    heads = config.num_attention_heads
    kernel = torch.zeros(heads, 1, options.query_kernel, options.key_kernel)
    kernel[:, :, -1, options.key_kernel // 2] = 1
    group = options.head_group or heads
    mixing = torch.eye(group).repeat(heads // group, 1, 1)
    state = {f"{name}_conv.weight": kernel.clone() for name in _acts(options.convolution)}
    return state | {f"{name}_mix.weight": mixing.clone() for name in _acts(options.head_mixing)}


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of a score matrix with its convolutions and mixing, and of the rows of past queries."""
    options = config.options_of("multi_token")
    heads = config.num_attention_heads
    d = config.head_dim
    convolved = _acts(options.convolution)
    mixed = _acts(options.head_mixing)
    past = len(convolved) * (options.query_kernel - 1)
    kernel = options.query_kernel * options.key_kernel
    group = options.head_group or heads
    of_scores, of_weights = (
        heads * ((name in convolved) * kernel + (name in mixed) * group) for name in ("score", "weight")
    )
    plain = score_matrix(config, tokens, window, form, of_scores + of_weights)
    cached = cached_tokens(tokens, window, past=past)
    states = 2 * config.num_key_value_heads * d + (heads * d if past else 0)
    # One more token takes the scores of all past queries, which are composed for the weights that are convolved.
    composed = options.query_kernel if "weight" in convolved else 1
    products = heads * d * (past + 2) + composed * of_scores + of_weights
    gate = linear(tokens * heads, d, 1, bias=True) if options.head_gate else Cost()
    return Cost(
        parameters=of_scores + of_weights + options.head_norm * d + gate.parameters,
        prefill=plain.prefill + gate.prefill,
        training=plain.training + gate.training,
        decode=products * (cached + 1) + gate.decode * heads,
        cache=states * cached,
    )


COMPANION = Companion(
    card="multi-token attention: convolutions over neighbouring queries and keys, and a mixing of heads, change the "
    "scores before the softmax and the weights after it. With a convolution over queries the KV cache also holds the "
    "query of each token.",
    paper="Golovneva, Wang, Weston and Sukhbaatar, 2025, [Multi-Token Attention](https://arxiv.org/abs/2504.00927)",
    cost=cost,
    start=start,
    control="weight_mix.weight",
)
