"""A saved decoder gives what it gave, where the package is not installed and where it is.

test_mechanisms.py loads every kind of an `IHAForCausalLM` without the package, and test_model_types.py every type."""

import json
import shutil

import pytest
import torch
from helpers import DECODERS, assert_close, decoder, interleaved, random_ids, train_mixing, uncached_logits
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from iha.processes import run_in_clean_process
from modeling_iha import interleave_heads, pair_heads, remove_interleaving
from modeling_iha.modeling_interleaved import models_by_auto_class
from research.experiments.model_types import tiny_model


MODELS = {
    **{name: lambda name=name: interleaved(name, layers=[0, 1]) for name in DECODERS},
    "paired_llama": lambda: pair_heads(decoder("llama"), 2),
    "paired_gemma3": lambda: pair_heads(decoder("gemma3_text"), 2),
    "paired_moe": lambda: pair_heads(decoder("qwen3_moe"), 2, sliding_window=3),
}
if "internlm3" in CONFIG_MAPPING:  # which has its own configuration, and the models of Llama
    MODELS["internlm3"] = lambda: train_mixing(interleave_heads(tiny_model("internlm3"), 2))

# Loads each model, saves it again, pickles and trains what is loaded then, and takes the heads that Transformers has.
LOAD = """
import pickle
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
tokens = torch.tensor(request["tokens"])
result = {}
for place in request["places"]:
    model, info = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, output_loading_info=True)
    missing = [*info["missing_keys"], *info["unexpected_keys"]]
    logits = [model(input_ids=tokens, use_cache=False).logits.tolist()]
    model.generate(tokens, max_new_tokens=2, do_sample=False)
    model.save_pretrained(place + "-again")
    again = AutoModelForCausalLM.from_pretrained(place + "-again", trust_remote_code=True, attn_implementation="eager")
    again = pickle.loads(pickle.dumps(again))
    output = again(input_ids=tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    logits += [output.logits.tolist()]
    for task in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        if task.__name__ not in model.config.auto_map:
            continue
        head, info = task.from_pretrained(place, trust_remote_code=True, output_loading_info=True)
        missing += [name for name in info["missing_keys"] if not name.startswith("score.")]
        head.save_pretrained(place + "-head")
        task.from_pretrained(place + "-head", trust_remote_code=True)
    try:
        AutoModelForCausalLM.from_pretrained(place, trust_remote_code=False)
        trusted = "loaded"
    except ValueError as error:
        trusted = str(error)
    experts = [model.config._experts_implementation]
    model.set_experts_implementation("batched_mm")
    eager = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True, experts_implementation="eager")
    experts += [each.config._experts_implementation for each in (model, eager)]
    names = [type(each).__name__ for each in (model, again)]
    result[place] = {"logits": logits, "missing": missing, "trusted": trusted, "experts": experts, "names": names}
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save each model, and one whose config was saved alone, as mergekit does; return them by their directory."""
    directory, models = tmp_path_factory.mktemp("saved"), {}
    for name, make in MODELS.items():
        models[directory / name] = make()
        models[directory / name].save_pretrained(directory / name)
    AutoConfig.from_pretrained(directory / "llama", trust_remote_code=True).save_pretrained(directory / "alone")
    shutil.copy(directory / "llama" / "model.safetensors", directory / "alone")
    return models | {directory / "alone": models[directory / "llama"]}


def test_decoders_load_where_the_package_is_not_installed(saved):
    tokens = random_ids(2, 11)
    answers = run_in_clean_process(LOAD, {"tokens": tokens.tolist(), "places": list(map(str, saved))})
    assert len(answers) == len(MODELS) + 1
    for place, model in saved.items():
        answer, expected = answers[str(place)], uncached_logits(model, tokens)
        assert answer["missing"] == [] and "trust_remote_code=True" in answer["trusted"]
        assert torch.tensor(answer["logits"][0]).equal(expected)
        assert_close(torch.tensor(answer["logits"][1]), expected)
        if "moe" in place.name:
            usual = model.config._experts_implementation
            assert answer["experts"] == [usual, "batched_mm", "eager"] and usual != "eager"
        assert set(answer["names"]) == {type(model).__name__}


def test_decoders_load_where_the_package_is(saved):
    """Load them without trust."""
    for place, model in saved.items():
        loaded = AutoModelForCausalLM.from_pretrained(place)
        assert (type(loaded), type(loaded.config)) == (type(model), type(model.config))
        assert uncached_logits(loaded, random_ids(2, 9)).equal(uncached_logits(model, random_ids(2, 9)))
        if place.name.startswith("paired"):
            assert json.loads((place / "config.json").read_text())["virtual_heads"] == "paired"
            with pytest.raises(ValueError, match="are paired, and the plain model would compute something else"):
                remove_interleaving(loaded)
    assert type(AutoModel.from_config(model.config).config) is type(model.config)


def test_what_a_checkpoint_of_an_interleaved_decoder_holds(saved):
    place = next(place for place in saved if place.name == "llama")
    config = json.loads((place / "config.json").read_text())
    assert (config["model_type"], config["base_model_type"]) == ("interleaved", "llama")
    assert config["architectures"] == ["InterleavedLlamaForCausalLM"]
    assert set(config["auto_map"]) == {"AutoConfig", *models_by_auto_class(LlamaConfig)}
    names = ("modeling_interleaved", "virtual_tokens", "sdpa_in_blocks", "interleaved_attention", "interleaving")
    names += ("triton_kernels", "mixing", "pairing", "transformers_versions")
    assert {path.stem for path in place.glob("*.py")} == set(names)
