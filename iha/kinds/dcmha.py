"""Describe kind "dcmha".

A layer computes the multi-head attention that it replaces while its second projections and its gates are zero."""

import torch

from iha.layer_cost import Cost
from modeling_iha import IHAConfig
from modeling_iha.attention_dcmha import CompositionWeights

from . import Companion, mha


def start(config: IHAConfig, generator: torch.Generator | None) -> dict[str, torch.Tensor]:
    """Return compositions that change nothing; the generator draws their first projections as at any start."""
    options = config.options_of("dcmha")
    state = {}
    if options.base_map:
        size = config.num_attention_heads // options.num_groups
        maps = torch.eye(size).repeat(options.num_groups, 1, 1)
        state = {f"{name}.weight": maps.clone() for name in ("pre_base", "post_base")}
    for name in ("pre_query", "pre_key", "post_query", "post_key"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            composition = CompositionWeights(config)
            composition.init_mechanism(config)
        composition.init_identity()
        state |= composition.state_dict(prefix=f"{name}.")
    return state


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return the cost of the scores with compositions, two of rank R and two gates for each stage (DCMHA, App. E)."""
    options = config.options_of("dcmha")
    heads = config.num_attention_heads
    groups = options.num_groups
    rank = options.rank
    size = heads // groups
    stages = 2 if options.stages == "both" else 1
    sides = 2 if options.sides == "both" else 1
    inner = 2 * size * rank
    weights = groups * inner * (config.hidden_size + 2 * rank * size) + options.gate * heads * config.hidden_size
    base = options.base_map * heads * size
    cached = (options.sides != "query") * stages * heads * (2 * rank + options.gate)
    per_pair = stages * (sides * (2 * rank + options.gate) * heads + base)
    return mha.score_matrix(config, tokens, window, form, per_pair, stages * sides * weights, cached) + Cost(
        parameters=stages * base
    )


COMPANION = Companion(
    card="Dynamically Composable Multi-Head Attention: before and after the softmax, heads are combined with weights "
    "that are computed from the query's and the key's token. The KV cache also holds the weights of each key's token.",
    paper="Xiao et al., 2024, Improving Transformers with Dynamically Composable Multi-Head "
    "Attention ([code](https://github.com/Caiyun-AI/DCFormer))",
    cost=cost,
    start=start,
    # At the exact start the kind's own parameters have no effect, because they multiply parameters that are zero.
    control="v_proj.weight",
)
