"""Test the companions of the attention kinds.

Each thing known of a kind stands in one place, and what is derived from there is complete."""

import re
from pathlib import Path

import pytest
import torch
from helpers import EVERY_KIND, LLAMA, assert_close, random_ids, random_model, small_config, uncached_logits
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_relative_import_files

from iha.card_template import render_card
from iha.conversion.convert_iha_to_llama import deviations, to_mha
from iha.conversion.layers import KINDS
from iha.errors import ROOT
from iha.kinds import companion_of
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.mixing_weights import mixing_parameters
from modeling_iha.modeling_iha import ATTENTION_CLASSES
from modeling_iha.package import shipped_code


@pytest.mark.parametrize("kind", ATTENTION_CLASSES)
def test_a_checkpoint_ships_what_its_code_imports(kind, tmp_path):
    code = shipped_code([kind])
    for name, source in code.items():
        (tmp_path / name).write_bytes(source)
    roots = {"configuration_iha.py", "modeling_iha.py"}
    imported = {Path(file).name for root in roots for file in get_relative_import_files(tmp_path / root)}
    assert code.keys() == imported | roots


def test_what_is_derived():
    assert list(KINDS) == sorted(kind for kind in ATTENTION_CLASSES if companion_of(kind).start)
    names = {name for attention in ATTENTION_CLASSES.values() for name in attention.mixing_modules}
    assert {"q_mix", "k_mix", "v_mix", "collapse"} < names
    model = IHAForCausalLM(small_config(**EVERY_KIND))
    by_name = {id(weight) for name, weight in model.named_parameters() if names & set(name.split("."))}
    assert {id(weight) for weight in mixing_parameters(model)} == by_name


def test_support_has_a_row_for_every_kind():
    section = (ROOT / "docs" / "SUPPORT.md").read_text(encoding="utf-8").partition("## Kinds of attention")[2]
    rows = re.findall(r'^\| \[`"(\w+)"`\]\(\.\./modeling_iha/attention_(\w+)\.py\) \|', section, re.MULTILINE)
    assert sorted(rows) == sorted((kind, kind) for kind in ATTENTION_CLASSES)


@pytest.mark.parametrize("kind", ATTENTION_CLASSES)
def test_a_card_describes_every_kind(kind):
    config = small_config(attention_kinds=kind)
    text = companion_of(kind).card.format(config=config)
    assert text.endswith(".") and "{" not in text and f'- "{kind}": {text}' in render_card(config, "name")


def test_no_deviation_at_the_exact_start():
    config = small_config(attention_kinds="iha")
    attention = ATTENTION_CLASSES["iha"].for_layer(config, 0)
    state = companion_of("iha").start(config, torch.Generator().manual_seed(0))
    attention.load_state_dict(state, strict=False)
    assert deviations(attention, config).keys() == state.keys()
    assert not any(deviation.any() for deviation in deviations(attention, config).values())
    for name in state:
        folded = to_mha(config, attention.state_dict())
        with torch.no_grad():
            attention.get_parameter(name).view(-1)[0] += 0.1
        again = to_mha(config, attention.state_dict())
        is_folded = any(not torch.equal(again[projection], folded[projection]) for projection in folded)
        assert deviations(attention, config)[name].any() != is_folded


@pytest.mark.parametrize(
    ("kind", "options", "added"),
    [
        ("talking_heads", {}, ["score_mix.weight", "weight_mix.weight"]),
        ("knocking_heads", {}, ["v_map.up", "v_map.gate", "v_map.down"]),
        (
            "knocking_heads",
            {"queries": True, "keys": True, "values": "linear"},
            ["q_map.weight", "k_map.weight", "v_map.weight"],
        ),
        ("knocking_heads", {"keys": True, "values": None}, ["k_map.weight"]),
    ],
    ids=str,
)
def test_a_new_layer_is_multi_head_attention(kind, options, added):
    """Start every map and kernel at the identity: a Llama's weights give a Llama's logits."""
    llama = random_model(LlamaConfig(**LLAMA), LlamaForCausalLM)
    model = IHAForCausalLM(IHAConfig(attention_kinds=kind, attention_options={kind: options}, **LLAMA)).eval()
    missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
    expected = {f"{name}{part}" for name in added for part in ("", "_start", "_scale")}
    assert not unexpected and {name.partition("self_attn.")[2] for name in missing} == expected
    assert_close(uncached_logits(model, random_ids(2, 9)), uncached_logits(llama, random_ids(2, 9)))
