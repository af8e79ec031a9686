"""Test parts of an interleaved model that are saved by themselves, and a model that the code of a checkpoint made."""

import copy
import pickle

import pytest
import torch
from helpers import decoder, random_ids, small_config, train_mixing
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
)

from iha.errors import ROOT
from iha.processes import run_in_clean_process
from modeling_iha import IHAConfig, IHAForSequenceClassification, IHAModel, interleave_heads, remove_interleaving
from modeling_iha.modeling_interleaved import MIXING_MODULES
from research.experiments.model_types import tiny_model


def test_parts_of_an_image_model_are_not_saved_by_themselves(tmp_path):
    """A decoder would load as a plain one. All else stays as it was."""
    plain = tiny_model("llava", "AutoModelForImageTextToText")
    before = type(plain.config.text_config)
    model = train_mixing(interleave_heads(copy.deepcopy(plain), 2))
    model.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole", trust_remote_code=True)
    for each in (model, loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="part of a model with interleaved heads.*save the whole model"):
            each.model.language_model.save_pretrained(tmp_path / "part")
        assert isinstance(each.config.text_config, before) and each.config.text_config.model_type == "llama"
        each.model.vision_tower.save_pretrained(tmp_path / "tower")
    assert not list((tmp_path / "part").glob("*"))
    untrained = remove_interleaving(interleave_heads(plain, 2))
    assert type(untrained.config.text_config) is before
    untrained.model.language_model.save_pretrained(tmp_path / "part")


def test_the_decoder_of_a_text_model_is_loaded_from_the_whole(tmp_path):
    model = train_mixing(interleave_heads(decoder("llama"), 2, layers=[0, 2]))
    with pytest.raises(ValueError, match="a part of that model, save the whole model"):
        model.model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    tokens = random_ids(2, 9)
    with torch.no_grad():
        assert loaded(tokens, use_cache=False)[0].equal(model.model(tokens, use_cache=False)[0])


@pytest.mark.parametrize("shared", ["layer", "decoder"])
def test_a_plain_model_with_interleaved_layers_names_what_it_cannot_load(shared, tmp_path):
    """Its configuration and its class are Transformers' own: neither is asked when it is saved, nor when it loads."""
    model = train_mixing(interleave_heads(decoder("llama"), 2))
    if shared == "layer":
        holder, auto_class = decoder("llama"), AutoModelForCausalLM
        holder.model.layers[1] = model.model.layers[1]
    else:
        holder, auto_class = (
            LlamaForSequenceClassification(decoder("llama").config),
            AutoModelForSequenceClassification,
        )
        holder.model = model.model
    holder.save_pretrained(tmp_path)
    _, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    names = {name.partition("self_attn.")[2] for name in info["unexpected_keys"]}
    assert names == {f"{name}.weight{part}" for name in MIXING_MODULES for part in ("", "_start", "_scale")}


OWN_CODE = """
from transformers import AutoModelForCausalLM
models = [AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True) for place in request["places"]]
sys.meta_path = [finder for finder in sys.meta_path if type(finder).__name__ != "Blocker"]
sys.path.insert(0, request["root"])
from modeling_iha import mixing_parameters, remove_interleaving
result = [len(mixing_parameters(model)) for model in models]
assert all(type(model).__module__.startswith("transformers_modules.") for model in models)
for model in models:
    try:
        result.append(type(remove_interleaving(model)).__module__)
    except ValueError as error:
        result.append(str(error))
"""


@pytest.mark.parametrize("scale", [40.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_package_knows_the_mixing_of_a_checkpoints_own_code(scale, tmp_path):
    model = interleave_heads(decoder("llama"), 2, mixing_scale=scale)
    model.save_pretrained(tmp_path / "untrained")
    train_mixing(model).save_pretrained(tmp_path / "trained")
    places = [str(tmp_path / name) for name in ("untrained", "trained")]
    answer = run_in_clean_process(OWN_CODE, {"places": places, "root": str(ROOT)})
    assert answer[:3] == [12, 12, "transformers.models.llama.modeling_llama"]
    assert answer[3].startswith("The mixing was trained: its entries are up to")


class UsersConfig(IHAConfig):
    model_type = "users-iha"


class UsersDecoder(IHAModel):
    config_class = UsersConfig


class UsersClassifier(IHAForSequenceClassification):
    config_class = UsersConfig


def test_a_classifier_keeps_the_decoder_that_a_user_registered(monkeypatch):
    """Register a class for a config of the user's own, and another one for ours."""
    registered = dict(AutoModel._model_mapping._extra_content)
    monkeypatch.setattr(AutoModel._model_mapping, "_extra_content", registered)
    AutoModel.register(UsersConfig, UsersDecoder)
    assert type(UsersClassifier(UsersConfig.from_preset("tiny")).model) is UsersDecoder

    class Other(IHAModel): ...

    AutoModel.register(IHAConfig, Other, exist_ok=True)
    assert type(IHAForSequenceClassification(small_config()).model) is Other
    assert registered[IHAConfig] is Other
