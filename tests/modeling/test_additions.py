"""Compare what any kind may add to its heads, an output gate and exclusive self attention, with its reference.

Both are drawn in test_drawn.py."""

import pytest
import torch
from helpers import (
    BOTH,
    EVERY_KIND,
    random_model,
    small_config,
)
from torch.nn.functional import normalize

from modeling_iha import IHAForCausalLM


ADDITIONS = {
    "gate": {"output_gate": "elementwise"},
    "per_head": {"output_gate": "per_head"},
    "xsa": {"exclusive_attention": True},
    "both": BOTH,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exclusive_outputs_leave_the_value_out(dtype):
    """See that nothing is left along the value, in half precision, and that a value of 0 gives no NaN."""
    model = random_model(small_config(attention_kinds="mha", exclusive_attention=True), dtype=dtype)
    attention = model.model.layers[0].self_attn
    output, values = torch.randn(2, 5, 4, 8, dtype=dtype), torch.randn(2, 2, 5, 8, dtype=dtype)
    values[0, 0, 0] = 0
    heads = attention.combine_heads(output, torch.zeros(2, 5, 32), values).unflatten(-1, (4, 8)).float()
    own = normalize(values.float(), dim=-1).repeat_interleave(2, dim=1).transpose(1, 2)
    left = (heads * own).sum(-1).abs()
    assert heads.isfinite().all() and left.max() < 8 * torch.finfo(dtype).eps
    assert torch.equal(heads[0, 0, :2], output[0, 0, :2].float())


def test_a_model_starts_with_open_gates():
    torch.manual_seed(0)
    gate = IHAForCausalLM(small_config(**ADDITIONS["both"])).model.layers[0].self_attn.output_gate
    assert gate.weight.shape == (32, 32) and 0.01 < gate.weight.std() < 0.03 and gate.bias is None


def test_a_config_without_the_fields_adds_nothing():
    """Read a config as it was saved before the fields existed."""
    config = small_config(attention_kinds=EVERY_KIND["attention_kinds"][:2])
    saved = {
        name: value for name, value in config.to_dict().items() if name not in ("output_gate", "exclusive_attention")
    }
    old = type(config).from_dict(saved)
    assert old.output_gate is None and old.exclusive_attention is False
    assert not [name for name in IHAForCausalLM(old).state_dict() if "output_gate" in name]
