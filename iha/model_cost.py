"""Predict the parameters, multiply-adds and cached values of a model.

The multiply-adds of matrix products are counted; norms, rotations and softmax are not. An "iha" layer with P
pseudo-heads has P^2 times the query-key pairs of an "mha" layer. With a window W = N / (2 P^2) it sees about N^2 / 2
pairs, as many as a causal global "mha" layer over N tokens. IHA, Appendix C counts N^2 for that layer, without its
mask, so that the schedule of four windows and a global layer costs 3/5 of global attention. `form="paper"` counts so.
`python -m iha.cost` prints the table.
"""

from typing import Any

from iha.errors import UserError
from iha.kinds import all_companions, companion_of
from iha.layer_cost import Cost, linear
from modeling_iha import IHAConfig
from modeling_iha.virtual_tokens import View


def attention(config: IHAConfig, kind: str, layer_type: str, tokens: int, form: str = "sdpa") -> Cost:
    """Return the cost of an attention module with its projections, by the options of `config` for this layer.

    Raise a `UserError` for a kind whose mechanism has no cost function."""
    if (between := companion_of(kind).cost) is None:
        known = [known for known, mechanism in all_companions().items() if mechanism.cost]
        place = f"iha/kinds/{kind}.py"
        raise UserError(
            f"The cost model knows {', '.join(map(repr, known))}, not {kind!r}: add its function to {place}."
        )
    window = config.sliding_window if layer_type == "sliding_attention" else None
    hidden = config.hidden_size
    bias = config.attention_bias
    norms = 2 * config.head_dim * config.use_qk_norm
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    projections = linear(tokens, hidden, queries, bias) + linear(tokens, queries, hidden, bias)
    projections += linear(tokens, hidden, keys, bias) + linear(tokens, hidden, keys, bias)
    if config.output_gate is not None:
        gates = queries if config.output_gate == "elementwise" else config.num_attention_heads
        projections += linear(tokens, hidden, gates)
    return projections + Cost(parameters=norms) + between(config, tokens, window, form)


def ffn(config: IHAConfig, tokens: int) -> Cost:
    """Return the cost of the FFN."""
    hidden = config.hidden_size
    inner = config.intermediate_size
    bias = config.mlp_bias
    cost = linear(tokens, hidden, inner, bias) + linear(tokens, inner, hidden, bias)
    if config.gated_mlp:
        cost += linear(tokens, hidden, inner, bias)
    if config.mlp_gate_groups is not None:
        cost += linear(tokens, hidden, config.mlp_gate_groups)
    return cost


def head(config: IHAConfig, tokens: int) -> Cost:
    """Return the cost of embedding, last norm and language modeling head, with logits at all tokens."""
    table = linear(tokens, config.hidden_size, config.vocab_size)
    embedding = 0 if config.tie_word_embeddings else table.parameters
    return table + Cost(embedding + config.hidden_size)


def model(config: IHAConfig, tokens: int, form: str = "sdpa") -> Cost:
    """Return the cost of a whole model with its language modeling head."""
    total = head(config, tokens)
    for i, (kind, layer_type) in enumerate(zip(config.attention_kinds, config.layer_types)):
        total += attention(_in_layer(config, i), kind, layer_type, tokens, form) + ffn(config, tokens)
    norms = 2 * config.num_hidden_layers * config.hidden_size
    return total + Cost(parameters=norms)


def flops_of_a_token(config: IHAConfig, tokens: int) -> float:
    """Return the FLOPs of a model in a training step, for each token of rows of `tokens` tokens.

    They are three times those of a forward pass, and leave out what a kernel or activation checkpointing recomputes,
    as in the utilization of model FLOPs (PaLM, Appendix B). Only the pairs that the masks leave count.
    """
    return 3 * 2 * model(config, tokens).prefill / tokens


def _in_layer(config: IHAConfig, layer_idx: int) -> IHAConfig:
    """Show a config with the options as they hold in a layer, for the kinds whose layers differ."""

    def options_of(kind: str) -> Any:
        options = config.options_of(kind)
        return options.in_layer(layer_idx) if hasattr(options, "in_layer") else options

    return View(config, options_of=options_of)  # type: ignore[return-value]


def with_mha(config: IHAConfig, everywhere: str | None = None) -> IHAConfig:
    """Return the config with "mha" in every layer, and with the layer type `everywhere` if it is given."""
    fields = {**config.to_dict(), "attention_kinds": "mha", "attention_options": None}
    if everywhere is not None:
        rope = config.rope_of(everywhere)  # only the one of these layers, if each layer type has its own
        fields |= {"layer_types": everywhere, "sliding_window": None, "rope_parameters": rope}
    return IHAConfig(**fields)
