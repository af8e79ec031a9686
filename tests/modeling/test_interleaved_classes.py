"""Test that Transformers treats an interleaved model as its base where it decides by the class, its name or module."""

import pytest
import torch
from helpers import assert_close, decoder, random_ids, train_mixing
from helpers import uncached_logits as logits
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from modeling_iha import interleave_heads, modeling_interleaved, remove_interleaving
from modeling_iha.interleaved_attention import implementation_of_user
from modeling_iha.transformers_versions import CACHE
from research.experiments.model_types import CAUSAL, MULTIMODAL, tiny_model


@pytest.mark.parametrize(
    ("name", "auto_class"),
    [
        ("gpt_neox", AutoModelForCausalLM),
        pytest.param("qwen2_vl", AutoModelForMultimodalLM, marks=pytest.mark.slow),
    ],
)
def test_weights_that_are_renamed_by_the_name_of_the_class_are_saved(name, auto_class, tmp_path):
    """Interleave a model that comes from a file: Transformers has renamed its weights on load."""
    tiny_model(name, CAUSAL if auto_class is AutoModelForCausalLM else MULTIMODAL).save_pretrained(tmp_path / "plain")
    model, tokens = auto_class.from_pretrained(tmp_path / "plain").eval(), random_ids(1, 7)
    plain = logits(model, input_ids=tokens)
    train_mixing(interleave_heads(model, 2)).save_pretrained(tmp_path / "interleaved")
    loaded, report = auto_class.from_pretrained(tmp_path / "interleaved", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_close(logits(loaded.eval(), input_ids=tokens), logits(model, input_ids=tokens))
    model = interleave_heads(auto_class.from_pretrained(tmp_path / "plain"), 2)
    remove_interleaving(model).save_pretrained(tmp_path / "again")
    assert_close(logits(auto_class.from_pretrained(tmp_path / "again").eval(), input_ids=tokens), plain)


def test_a_server_takes_the_class_of_the_base_and_its_calls(tmp_path):
    """Do what the plugin for vLLM does with a loaded model: it maps weights by the base's class, and has a core."""
    interleave_heads(decoder("llama"), 2).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    own, own_config = type(model), type(model.config)
    modeling_interleaved.return_classes(model)
    assert type(model) is LlamaForCausalLM and type(model.config) is LlamaConfig
    assert model.config.architectures == ["LlamaForCausalLM"]
    modeling_interleaved.take_classes(model)
    assert type(model) is own and type(model.config) is own_config
    assert model.config.architectures == ["InterleavedLlamaForCausalLM"]
    modeling_interleaved.remove_hook(model)
    model.config._attn_implementation = "sdpa"
    assert hasattr(model.model.layers[0].self_attn, "q_mix")
    assert logits(model, input_ids=random_ids(1, 5)).equal(logits(decoder("llama"), input_ids=random_ids(1, 5)))


@pytest.mark.skipif("internlm3" not in CONFIG_MAPPING, reason="this Transformers has no InternLM 3")
def test_a_type_that_uses_the_models_of_another():
    """InternLM 3 has its own configuration and the models of Llama."""
    model = interleave_heads(tiny_model("internlm3"), 2)
    assert type(model).__name__ == "InterleavedLlamaForCausalLM_of_InternLM3Config"
    assert type(model.config).__name__ == "InterleavedInternLM3Config"
    own = interleave_heads(decoder("llama"), 2)
    assert type(own).__name__ == "InterleavedLlamaForCausalLM"
    assert type(AutoModel.from_config(own.config).config) is type(own.config)


def test_hidden_states_and_attentions_of_models_without_a_head(tmp_path):
    """Ask for them in place, and of two loaded models of different bases: each has the layers of its base."""
    tokens, loaded = random_ids(1, 7), {}
    for name in ("llama", "gpt2"):
        decoder(name).base_model.save_pretrained(tmp_path / name)
        model = interleave_heads(AutoModel.from_pretrained(tmp_path / name, attn_implementation="eager").eval(), 2)
        output = model(tokens, output_hidden_states=True, output_attentions=True)
        assert len(output.hidden_states) == len(output.attentions) + 1 == model.config.num_hidden_layers + 1
        model.save_pretrained(tmp_path / f"{name}-interleaved")
        loaded[name] = AutoModel.from_pretrained(tmp_path / f"{name}-interleaved").eval()
    for model in loaded.values():
        assert len(model(tokens, output_hidden_states=True).hidden_states) == model.config.num_hidden_layers + 1


@pytest.mark.parametrize("window", [None, 4])
def test_a_vision_tower_keeps_the_core_of_transformers(window):
    model = interleave_heads(tiny_model("llava", MULTIMODAL), 2, sliding_window=window)
    model.set_attn_implementation("eager")
    assert model.model.vision_tower.config._attn_implementation == "eager"
    name = model.model.language_model.config._attn_implementation
    assert implementation_of_user(name) == "eager" != name
    pixels = torch.rand(1, 3, *[model.config.vision_config.image_size] * 2)
    assert model.get_image_features(pixels, return_dict=True).last_hidden_state.isfinite().all()
    if window is None:  # else the plain model is another one
        remove_interleaving(model)
        assert model.model.language_model.config._attn_implementation == "eager"


def test_a_configuration_may_ask_for_attention_maps(tmp_path):
    """Ask before interleaving, after it, and on load; and only on the eager core, as the base."""
    tokens = random_ids(1, 7)
    decoder("llama").save_pretrained(tmp_path / "plain")
    eager = {"attn_implementation": "eager", "output_attentions": True}
    model = interleave_heads(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **eager), 2)
    model.save_pretrained(tmp_path / "interleaved")
    assert len(model(tokens).attentions) == model.config.num_hidden_layers
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "interleaved", **eager)
    loaded.save_pretrained(tmp_path / "again")
    assert len(loaded(tokens).attentions) == model.config.num_hidden_layers
    loaded.config.output_attentions = False
    loaded.config.output_attentions = True
    loaded.set_attn_implementation("sdpa")
    for action in (
        lambda: setattr(loaded.config, "output_attentions", True),
        lambda: loaded.save_pretrained(tmp_path),
    ):
        with pytest.raises(Exception, match="set it to 'eager'"):
            action()


def test_a_base_that_this_version_does_not_know_is_named(tmp_path):
    interleave_heads(decoder("llama"), 2).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"base_model_type": "llama"', '"base_model_type": "new"'))
    for trust in (True, False):
        with pytest.raises(ValueError, match="base_model_type is 'new': expected a model type of Transformers 5"):
            AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)


@pytest.mark.skipif(CACHE != "cache", reason="before Transformers 5.24 checkpointing makes no cache at all")
def test_a_cache_that_is_made_without_gradients_goes_on():
    model, tokens = train_mixing(interleave_heads(decoder("mistral"), 2)), random_ids(1, 40)
    expected = logits(model, input_ids=tokens)
    model.gradient_checkpointing_enable()
    model.train()
    with torch.no_grad():
        first = model(tokens[:, :39])
        last = model(tokens[:, 39:], cache=first.cache)
    assert_close(last.logits[:, -1], expected[:, -1])
