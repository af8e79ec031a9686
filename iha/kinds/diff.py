"""Describe kind "diff", to which convert_diffllama_to_iha.py converts DiffLlama checkpoints."""

from iha.layer_cost import Cost
from modeling_iha import IHAConfig

from . import Companion, mha


def cost(config: IHAConfig, tokens: int, window: int | None, form: str) -> Cost:
    """Return twice the cost of "mha", because every softmax is computed once for each half of the values."""
    twice = mha.cost(config, tokens, window, form)
    return twice + Cost(4 * config.head_dim, twice.prefill, twice.training, twice.decode)


COMPANION = Companion(
    card="differential attention as in DiffLlama: the difference of two softmaxes over the same values.",
    paper="Ye et al., 2024, [Differential Transformer](https://arxiv.org/abs/2410.05258)",
    cost=cost,
    control="lambda_q1",
)
