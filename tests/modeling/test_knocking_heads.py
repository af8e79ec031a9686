"""Start kind "knocking_heads" from multi-head attention, and refuse options that leave nothing of it."""

import pytest
from helpers import LLAMA, assert_close, random_ids, random_model, small_config, uncached_logits
from transformers import LlamaConfig, LlamaForCausalLM

from modeling_iha import IHAConfig, IHAForCausalLM


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ("v_map.up", "v_map.gate", "v_map.down")),
        ({"queries": True, "keys": True, "values": "linear"}, ("q_map.weight", "k_map.weight", "v_map.weight")),
        ({"keys": True, "values": None}, ("k_map.weight",)),
    ],
    ids=str,
)
def test_a_new_layer_is_multi_head_attention(options, names):
    """Start every map at the identity: a Llama's weights give a Llama's logits."""
    llama = random_model(LlamaConfig(**LLAMA), LlamaForCausalLM)
    config = IHAConfig(attention_kinds="knocking_heads", attention_options={"knocking_heads": options}, **LLAMA)
    model = IHAForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected and {name.partition("self_attn.")[2] for name in missing} == set(names)
    assert_close(uncached_logits(model, random_ids(2, 9)), uncached_logits(llama, random_ids(2, 9)))


def test_a_layer_that_maps_nothing_is_refused():
    with pytest.raises(Exception, match="leaves multi-head attention: set one of them, or use kind 'mha'"):
        small_config(
            attention_kinds="knocking_heads", attention_options={"knocking_heads": {"queries": False, "values": None}}
        )
