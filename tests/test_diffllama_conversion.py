"""DiffLlama checkpoints become IHA checkpoints of "diff" layers, and go back, trained or not, without changing what
they compute."""

import copy
import json
import shutil

import pytest
import torch
from helpers import command, last_line, random_model, small_config
from safetensors.torch import load_file, save_file
from tiny_sources import (
    CHAT_TEMPLATE,
    OTHER_SOURCES,
    assert_equal_logits,
    continuation,
    edit_config,
    edit_weights,
    logits,
    save_tiny_source,
    shards,
    tiny_source,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, DiffLlamaForCausalLM

from common.checkpoint_io import load_in_clean_process
from common.command_io import UserError
from conversion_scripts import convert_diffllama_to_iha, convert_iha_to_diffllama, verify_conversion
from conversion_scripts.convert_diffllama_to_iha import convert, iha_config
from conversion_scripts.convert_iha_to_diffllama import convert_back
from modeling_iha import IHAForCausalLM


DIFFLLAMAS = [name for name in OTHER_SOURCES if name.startswith("diffllama")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DIFFLLAMAS)
def test_there_and_back(name, dtype):
    source = tiny_source(name, dtype)
    expected, tokens = logits(source), continuation(source)
    model = convert(source)
    assert type(model) is IHAForCausalLM and not model.training and model.dtype == dtype
    assert model.config.attention_kinds == ["diff"] * 6
    assert_equal_logits(logits(model), expected)
    assert continuation(model) == tokens

    restored = convert_back(model)
    assert type(restored) is DiffLlamaForCausalLM and not restored.training
    assert restored.state_dict().keys() == source.state_dict().keys()
    for key, tensor in source.state_dict().items():
        assert torch.equal(restored.state_dict()[key], tensor), key
    assert torch.equal(logits(restored), expected)
    assert restored.generation_config.to_dict() == source.generation_config.to_dict()
    ours, theirs = restored.config.to_dict(), source.config.to_dict()
    for field in theirs.keys() - {"architectures"}:
        assert ours[field] == theirs[field], field


def test_a_wrong_layer_shows():
    """The comparison can fail: a lambda vector in another layer's place gives other logits."""
    source = tiny_source("diffllama")
    model = convert(source)
    assert_equal_logits(logits(model), logits(source))
    first, second = (model.model.layers[i].self_attn.lambda_k2 for i in (1, 2))
    first.data, second.data = second.data, first.data
    assert (logits(model) - logits(source)).abs().max() > 1e-2


def test_conversion_makes_no_second_copy_of_the_weights():
    source = tiny_source("diffllama-tied-bias-head-dim")
    model = convert(source)
    copies = {parameter.data_ptr() for parameter in model.parameters()}
    assert copies == {parameter.data_ptr() for parameter in source.parameters()}
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"sliding_window": 9}, "sliding_window=9"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 with attention kind 'diff'"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is odd"),
        ({"lambda_std_dev": None}, "lambda_std_dev=None; it must be a number"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_refused_by_name(change, message):
    config = copy.deepcopy(tiny_source("diffllama").config)
    for field, value in change.items():
        setattr(config, field, value)
    with pytest.raises(UserError, match=message):
        iha_config(config)


def test_other_architectures_are_refused():
    with pytest.raises(UserError, match="'llama' is not 'diffllama'.*convert_llama_to_iha.py"):
        iha_config(tiny_source("llama").config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_kinds": ["diff", "mha"]}, "Layer 1 is of kind 'mha', full_attention"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
            "Layer 1 is of kind 'diff', sliding_attention",
        ),
        ({"gated_mlp": False}, "gated_mlp=False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_qk_norm": True}, "use_qk_norm=True"),
    ],
    ids=str,
)
def test_what_no_diffllama_computes_does_not_go_back(overrides, message):
    with pytest.raises(UserError, match=message):
        convert_back(random_model(small_config(**{"attention_kinds": "diff", **overrides})))


# The commands


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A source directory, and what the command made of it."""
    folder = tmp_path_factory.mktemp("diffllama")
    save_tiny_source(folder / "source", "diffllama", torch.bfloat16, max_shard_size="10KB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["convert", str(folder / "source"), str(folder / "iha")])
        convert_diffllama_to_iha.main()
    return folder


def test_converted_directory_stands_alone(converted):
    assert len(shards(converted / "source")) > 3
    assert {path.name for path in converted.iterdir()} == {"source", "iha"}
    result = load_in_clean_process(converted / "iha", "this great war", max_new_tokens=20)
    assert result["module"].startswith("transformers_modules.") and result["model_class"] == "IHAForCausalLM"
    source = AutoModelForCausalLM.from_pretrained(converted / "source", dtype="auto")
    inputs = AutoTokenizer.from_pretrained(converted / "source")("this great war", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    expected = source.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert result["token_ids"] == expected.tolist() and len(expected) > 3
    card = (converted / "iha" / "README.md").read_text()
    assert "| Attention layers | 6 diff (full_attention) |" in card and "(diffllama)" in card
    assert str(converted) not in card and "pseudo" not in card.lower().replace("--num_pseudo_heads 1", "")


def verify(converted, directory, monkeypatch, capsys, *arguments):
    check = (converted / "source", directory, "--tokens", 40, "--max-new-tokens", 20, *arguments)
    return command(monkeypatch, capsys, verify_conversion, *check)


def test_verification_accepts_it_and_rejects_the_control(converted, tmp_path, monkeypatch, capsys):
    code, out, err = verify(converted, converted / "iha", monkeypatch, capsys, "--json", tmp_path / "figures.json")
    assert code == 0 and "exact up to rounding" in out, err
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["converted"]["max_logit_difference"] < 2e-5 and figures["converted"]["greedy_agreement"] == 20
    assert not figures["control"]["passed"] and figures["control"]["max_logit_difference"] > 0.01


def test_verification_refuses_a_changed_conversion(converted, tmp_path, monkeypatch, capsys):
    changed = shutil.copytree(converted / "iha", tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.5.self_attn.lambda_k2"] += 0.5
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    code, _, err = verify(converted, changed, monkeypatch, capsys)
    assert code == 1 and "does not compute what" in last_line(err)


def test_back_conversion_command(converted, tmp_path, monkeypatch, capsys):
    back = (converted / "iha", tmp_path / "back")
    code, out, err = command(monkeypatch, capsys, convert_iha_to_diffllama, *back)
    assert code == 0 and "DiffLlamaForCausalLM" in out, err
    restored, source = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (tmp_path / "back", converted / "source")
    )
    assert type(restored) is type(source) and restored.dtype == torch.bfloat16
    assert torch.equal(logits(restored), logits(source))
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == CHAT_TEMPLATE
    again = (tmp_path / "back", tmp_path / "again")
    code, _, err = command(monkeypatch, capsys, convert_iha_to_diffllama, *again)
    assert code == 1 and "expected 'iha'" in last_line(err) and not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda source: edit_weights(source, lambda w: w.pop("model.layers.4.self_attn.lambda_q1", None)),
            "missing keys",
        ),
        (lambda source: edit_config(source, model_type="llama"), "is not 'diffllama'"),
        (lambda source: edit_config(source, num_key_value_heads=1), "num_key_value_heads=1 is odd"),
        (lambda source: shards(source)[1].unlink(), "cannot be loaded"),
    ],
    ids=["missing_lambda", "llama", "odd_groups", "missing_shard"],
)
def test_bad_source_is_one_line_and_leaves_nothing(damage, message, tmp_path, monkeypatch, capsys):
    save_tiny_source(tmp_path / "source", "diffllama", max_shard_size="20KB")
    damage(tmp_path / "source")
    code, _, err = command(monkeypatch, capsys, convert_diffllama_to_iha, tmp_path / "source", tmp_path / "iha")
    assert code == 1 and message in last_line(err)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("module", [convert_diffllama_to_iha, convert_iha_to_diffllama])
def test_existing_output_is_kept_and_help_has_an_example(module, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    code, _, err = command(monkeypatch, capsys, module, tmp_path / "source", tmp_path / "out")
    assert code == 1 and "not an empty directory" in last_line(err)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious.txt"]
    code, out, _ = command(monkeypatch, capsys, module, "--help")
    name = module.__name__.rpartition(".")[2]
    assert code == 0 and f"example: python -m conversion_scripts.{name} " in " ".join(out.split())
