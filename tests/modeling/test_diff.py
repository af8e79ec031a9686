"""Compare kind "diff" with Transformers' DiffLlama, which it equals on every core."""

from itertools import product

import pytest
import torch
from helpers import (
    CORES,
    HALVES,
    LLAMA,
    logits_in_chunks,
    loss_and_gradients,
    random_ids,
    random_model,
    set_core,
    small_config,
    uncached_logits,
)
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from modeling_iha import IHAConfig, IHAForCausalLM


DIFF_LLAMA = {field: value for field, value in LLAMA.items() if field != "mlp_bias"}


@pytest.mark.parametrize(
    ("core", "dtype", "autocast"),
    [
        *product(CORES, [torch.float32, torch.bfloat16], [False]),
        *product(["eager", "sdpa"], HALVES, [True]),
        ("sdpa", torch.float16, False),
    ],
    ids=str,
)
def test_diff_layers_are_diff_llama(cpu_cores, core, dtype, autocast):
    """Compare bit by bit: the operations, their order and their precision are the same."""
    config = DiffLlamaConfig(**DIFF_LLAMA, rms_norm_eps=1e-6)
    source = random_model(config, DiffLlamaForCausalLM, dtype=torch.float32 if autocast else dtype)
    model = IHAForCausalLM(IHAConfig(attention_kinds="diff", **DIFF_LLAMA)).to(source.dtype).eval()
    model.load_state_dict(source.state_dict())
    source.set_attn_implementation(core)
    set_core(model, core)
    input_ids, chunks = random_ids(2, 9), [4, 1, 1, 3]
    with torch.autocast("cpu", dtype, enabled=autocast):
        assert torch.equal(uncached_logits(model, input_ids), uncached_logits(source, input_ids))
        assert torch.equal(logits_in_chunks(model, input_ids, chunks), logits_in_chunks(source, input_ids, chunks))
        if core == "flex_attention":
            return  # it has no CPU backward
        _, actual = loss_and_gradients(model, input_ids)
        _, expected = loss_and_gradients(source, input_ids)
    for name, gradient in actual.items():
        assert gradient.isfinite().all() and torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(("options", "expected"), [(None, 0.1), ({"diff": {"lambda_std_dev": 0.7}}, 0.7)], ids=str)
def test_lambda_starts_at_its_initial_value(options, expected):
    """Draw vectors near zero: lambda is near lambda_init, which is 0.2 in the first layer."""
    torch.manual_seed(0)
    model = IHAForCausalLM(
        small_config(attention_kinds="diff", head_dim=1000, num_hidden_layers=1, attention_options=options)
    )
    deviations = [p.std().item() for name, p in model.named_parameters() if "lambda_" in name]
    assert len(deviations) == 4 and deviations == pytest.approx([expected] * 4, rel=0.1)
    assert model.model.layers[0].self_attn.lambda_init == pytest.approx(0.2)
