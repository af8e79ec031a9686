"""Start kind "talking_heads" from multi-head attention, and count its parameters."""

import pytest
from helpers import FP32, LLAMA, assert_close, assert_gradients_match, gradients, random_ids, random_model, set_core
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_iha import IHAConfig, IHAForCausalLM


@pytest.mark.parametrize("core", ["eager", "sdpa"])
@pytest.mark.parametrize("heads", [4, 2], ids="G{}".format)
def test_a_new_layer_is_multi_head_attention(core, heads):
    """Start both maps, of H x H, at the identity: a Llama's weights give a Llama's logits and gradients."""
    fields = {**LLAMA, "num_key_value_heads": heads}
    llama = random_model(LlamaConfig(**fields), LlamaForCausalLM)
    model = IHAForCausalLM(IHAConfig(attention_kinds="talking_heads", **fields)).eval()
    missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected and {name.split(".")[-2] for name in missing} == {"score_mix", "weight_mix"}
    assert model.num_parameters() - llama.num_parameters() == 2 * 2 * 4**2
    set_core(model, core)
    input_ids = random_ids(2, 9)
    logits, expected = model(input_ids).logits, llama(input_ids).logits
    assert_close(logits, expected)
    leaves = dict(llama.named_parameters())
    actual = gradients(logits, {name: parameter for name, parameter in model.named_parameters() if name in leaves})
    assert_gradients_match(actual, gradients(expected, leaves), FP32)
