"""Test that a config that cannot work is refused where it is built or read.

What Transformers and other libraries store in one passes."""

import importlib
import json
import re
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers import random_ids, random_model, small_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

import configuration_iha
import modeling_iha
from configuration_iha import PRESETS
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.configuration_iha import AUTO_MAP


NAN, INF = float("nan"), float("inf")


def rope(rope_type, **parameters):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 100.0, **parameters}}


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
BAD = [
    ({"num_pseudo_heads": 0}, "num_pseudo_heads=0.*at least 1"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3.*divide.*num_attention_heads=4"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0.*at least 1"),
    ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size=32.*num_attention_heads=3.*head_dim"),
    ({"num_attention_heads": 0}, "hidden_size=32.*num_attention_heads=0"),
    ({"hidden_act": "zip"}, "hidden_act='zip'.*'gelu'"),
    ({"head_dim": 7}, "head_dim=7.*even"),
    ({"attention_kinds": "linear"}, "attention_kinds.*'linear'.*'mha', 'iha'"),
    ({"attention_kinds": ["iha"] * 3}, "attention_kinds has 3 entries.*num_hidden_layers=2"),
    ({"layer_types": "chunked_attention"}, "layer_types.*'chunked_attention'.*'full_attention', 'sliding_attention'"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries.*num_hidden_layers=2"),
    ({"layer_types": "sliding_attention", "sliding_window": 0}, "sliding_window=0.*at least 2"),
    ({"pseudo_collapse": "mean"}, "pseudo_collapse='mean'.*'per_head', 'all_heads'"),
    ({"attention_options": {"linear": {}}}, "attention_options.*'linear'.*'mha', 'iha'"),
    ({"attention_options": {"iha": None}}, "attention_options.*'iha'.*None.*dict"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_parameters.*rope_type.*linear.*factor"),
    ({"rope_parameters": {"rope_type": "alibi", "rope_theta": 1e4}}, "rope_parameters.*'alibi'.*'default'.*'yarn'"),
    ({"rope_parameters": {**PLAIN, "rope_theta": [1e4]}}, r"rope_theta=\[10000.0\]; it must be a number above 0"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.*one set"),
    ({**LOCAL, "rope_parameters": {"sliding_attention": PLAIN}}, "rope_parameters.*one set for each"),
    ({"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}}, "layers of full_attention;.*one set"),
    (
        {**LOCAL, "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN, "factor": 2.0}},
        "rope_parameters.*no other key",
    ),
    (
        {**LOCAL, "rope_parameters": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 0}}},
        "rope_theta=0; .* above 0",
    ),
    (
        {**LOCAL, "rope_parameters": {"full_attention": PLAIN, "sliding_attention": None}},
        "rope_parameters.*rope_type must be one of",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "rope_parameters.*partial_rotary_factor=0.5.*1.0",
    ),
    *[
        (rope("default", rope_theta=theta), f"rope_theta={theta!r}; .* above 0")
        for theta in (NAN, 0, -1.0, INF, "1e4", None, True)
    ],
    *[
        (rope(rope_type, factor=factor), f"factor={factor}; .* above 0")
        for rope_type in ("linear", "dynamic", "yarn")
        for factor in (0, -2.0, NAN, INF)
    ],
    (rope("linear", factor=None), "factor=None; .* above 0"),
    (rope("default", factor=8.0), "factor=8.0 with the rope_type 'default'"),
    ({"rope_theta": 1e6}, "rope_theta=1000000.0 beside rope_parameters=.*100.0.*: give one base"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling=.*linear.* beside rope_parameters=.*: put both",
    ),
    ({"per_layer_config": {"0": {"num_attention_heads": 2}}}, "per_layer_config: .* by lists, such as layer_types"),
    *[
        ({"attention_kinds": kind, "attention_options": {kind: options}}, message)
        for kind, options, message in (
            ("multi_token", {"convolution": None, "every": 4}, "convolution=None and every, which describe"),
            (
                "dcmha",
                {"rank": 0, "gate": False, "base_map": True, "sides": "query"},
                "sides='query' with rank=0 and gate=False",
            ),
        )
    ],
    (rope("yarn", factor=2.0, original_max_position_embeddings=0), "original_max_position_embeddings=0; .* above 0"),
    (rope("yarn", factor=2.0, attention_factor=NAN), "attention_factor=nan; .* above 0"),
    (rope("yarn", factor=2.0, beta_fast=NAN), "beta_fast=nan; .* at least 0"),
    (rope("yarn", factor=2.0, beta_slow=-1), "beta_slow=-1; .* at least 0"),
    (rope("yarn", factor=2.0, mscale=NAN, mscale_all_dim=1.0), "mscale=nan; .* at least 0"),
    (
        rope("llama3", factor=8.0, low_freq_factor=0, high_freq_factor=4.0, original_max_position_embeddings=64),
        "low_freq_factor=0; .* above 0",
    ),
    (
        rope("longrope", short_factor=[1.0] * 4, long_factor=[1.0, 1.0, NAN, 1.0], factor=4.0),
        "long_factor=.*nan.*; .* above 0",
    ),
    (rope("proportional", partial_rotary_factor=1.5), "partial_rotary_factor=1.5; .* from 0 to 1"),
    # With 0, a row of padding, whose embedding is zero, would become NaN.
    *[({"rms_norm_eps": eps}, f"rms_norm_eps={eps}; .* above 0") for eps in (-1.0, NAN, 0.0, INF)],
    ({"initializer_range": -0.1}, "Value must be .*0.0 .*-0.1"),
    *[
        ({"attention_dropout": dropout}, f"attention_dropout={dropout}; .* at least 0 and below 1")
        for dropout in (2.0, 1.0, -0.1, NAN)
    ],
    *[
        (
            {"attention_kinds": "diff", "attention_options": {"diff": {"lambda_std_dev": value}}},
            f"lambda_std_dev={value}; .* number, at least 0",
        )
        for value in (NAN, INF, -1)
    ],
    (
        {"attention_kinds": "knocking_heads", "attention_options": {"knocking_heads": {"values": None}}},
        "leaves multi-head attention: set one of them, or use kind 'mha'",
    ),
    # An embedding of 61 rows: Llama fails there, too, once it is built.
    ({"pad_token_id": 61}, "pad_token_id=61; .*vocab_size=61"),
    ({"pad_token_id": -62}, "pad_token_id=-62; .*vocab_size=61"),
    ({"no_rope_layers": [1, 2]}, "no_rope_layers holds 2; allowed are 0, 1"),
    ({"no_rope_layers": [1, 0, 1]}, "no_rope_layers has 3 entries for num_hidden_layers=2"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_what_cannot_work_is_refused(fields, message):
    with pytest.raises(Exception, match=f"(?s){message}") as caught:
        small_config(**fields)
    reason = str(caught.value).strip().splitlines()[-1]
    assert re.search(message, reason)  # all of it in one line


GOOD = [
    rope("linear", factor=0.5),
    rope("dynamic", factor=2),
    rope("yarn", factor=None, original_max_position_embeddings=64),
    rope("yarn", factor=2.0, mscale=1.0, mscale_all_dim=0, beta_fast=32, beta_slow=1, truncate=False),
    rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=4.0, attention_factor=None),
    rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    rope("proportional", partial_rotary_factor=0.5),
    {"rope_parameters": None},
    {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"attention_dropout": 0},
    {"attention_dropout": None},
    {"attention_dropout": None, "attention_kinds": "diff"},
    {"initializer_range": 0.0},
    # Of released Llama checkpoints.
    {"pad_token_id": -1},
    {"pad_token_id": None},
    {"bos_token_id": 128000, "eos_token_id": [128001, 128009]},
]


@pytest.mark.parametrize("fields", GOOD, ids=map(str, GOOD))
def test_what_llama_accepts_and_can_run_is_accepted(fields):
    small_config(**fields)


@pytest.mark.parametrize("kind", ["mha", "talking_heads", "hyper"])
def test_a_model_without_dropout_runs(kind):
    model = random_model(small_config(attention_kinds=kind, attention_dropout=None))
    for is_training in (False, True):
        assert model.train(is_training)(random_ids(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("pseudo_heads", "num_pseudo_heads"),
        ("attention_kind", "attention_kinds"),
        ("num_heads", "num_attention_heads"),  # beside num_pseudo_heads
    ],
)
def test_a_misspelt_field_is_refused(name, meant):
    with pytest.raises(ValueError, match=f"no field '{name}' .*=3.*'{meant}'") as caught:
        small_config(**{name: 3})
    assert len(str(caught.value).splitlines()) == 1


# What Transformers reads or keeps although it is no field of the config, what it once wrote, what other models and
# libraries write.
FOREIGN = {
    **{"torch_dtype": "bfloat16", "rope_theta": 100.0, "max_window_layers": 28, "model_max_length": 4096},
    **{"id2label": {"0": "a", "1": "b"}, "task_specific_params": None, "use_bfloat16": False, "pruned_heads": {}},
    **{"tokenizer_class": "PreTrainedTokenizerFast", "use_sliding_window": False, "unsloth_version": "2026.1"},
    "quantization_config": {"quant_method": "none"},
    "norm_eps": 1.0,
}


def test_what_others_store_passes(tmp_path):
    for name, value in FOREIGN.items():
        small_config(**{name: value})
    written = small_config().to_dict() | {name: FOREIGN[name] for name in ("unsloth_version", "quantization_config")}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.unsloth_version, config.quantization_config["quant_method"]) == ("2026.1", "none")


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def test_the_ffn_is_llamas_unless_a_config_says_otherwise():
    ours, llama = random_model(small_config()), LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=32))
    names = {name for name, _ in llama.model.layers[0].mlp.named_parameters()}
    assert {name for name, _ in ours.model.layers[0].mlp.named_parameters()} == names


@pytest.mark.parametrize("missing", [SIZES, *[[name] for name in SIZES]], ids=str)
def test_a_config_json_without_sizes_is_refused(tmp_path, missing):
    """Refuse what would become a model of Llama-7B's sizes, whatever the weights beside it."""
    small_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in written.items() if name not in missing}))
    for read in (AutoConfig.from_pretrained, IHAConfig.from_pretrained):
        with pytest.raises(ValueError, match=f"config.json names no {', '.join(missing)}") as caught:
            read(tmp_path)
        assert len(str(caught.value).splitlines()) == 1


OVERRIDES = {
    "a window without a sliding layer": ({"sliding_window": 4}, "sliding_window=4 would have no effect"),
    "no option": ({"attention_options": {"iha": {"foo": 1}}}, "has the option 'foo'"),
    "one name": ({"attention_kinds": "mha", "num_pseudo_heads": None}, {"attention_kinds": ["mha"] * 4}),
    "the first layers": (
        {"num_hidden_layers": 3},
        {"attention_kinds": ["iha", "iha", "mha"], "layer_types": ["full_attention"] * 3, "no_rope_layers": [1] * 3},
    ),
    "more layers": ({"num_hidden_layers": 5}, "attention_kinds has 4 entries for num_hidden_layers=5"),
    "of Transformers": ({"dtype": torch.bfloat16, "use_cache": False}, {"dtype": torch.bfloat16, "use_cache": False}),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_fields_that_replace_those_of_a_file_are_checked_with_the_rest(name, tmp_path):
    """Load with fields of the config among the arguments of `from_pretrained`."""
    random_model(small_config(num_hidden_layers=4, attention_kinds=["iha", "iha", "mha", "iha"])).save_pretrained(
        tmp_path
    )
    fields, expected = OVERRIDES[name]
    if isinstance(expected, str):
        for auto_class in (AutoConfig, AutoModelForCausalLM):
            with pytest.raises(Exception, match=expected):
                auto_class.from_pretrained(tmp_path, **fields)
        return
    config, unused = AutoConfig.from_pretrained(tmp_path, **fields, device_map="cpu", return_unused_kwargs=True)
    assert unused["device_map"] == "cpu" and not fields.keys() - {"dtype"} & unused.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **fields)
    for each in (config, model.config):
        assert {field: getattr(each, field) for field in expected} == expected
    assert len(model.model.layers) == config.num_hidden_layers


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPES = {"sliding_attention": {**ROPE, "rope_theta": 500.0}, "full_attention": ROPE}


@pytest.mark.parametrize(
    ("types", "given", "expected"),
    [
        ("ssf", {}, {"sliding_window": 8, "rope_parameters": ROPES["sliding_attention"]}),
        ("ffs", {}, {"sliding_window": None, "rope_parameters": ROPES["full_attention"]}),
        ("sfs", {}, {"sliding_window": 8, "rope_parameters": ROPES}),
        ("ssf", {"rope_parameters": ROPE}, {"sliding_window": 8, "rope_parameters": ROPE}),
        ("ffs", {"layer_types": "sliding_attention", "rope_parameters": ROPE}, {"sliding_window": 8}),
    ],
)
def test_the_first_layers_keep_what_concerns_their_types(types, given, expected, tmp_path):
    """Load two layers of three, of which all or some have a window and RoPE parameters of their own."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    fields = {"layer_types": [kinds[each] for each in types], "sliding_window": 8, "rope_parameters": ROPES}
    random_model(small_config(num_hidden_layers=3, **fields)).save_pretrained(tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2, **given).config
    assert {field: getattr(config, field) for field in expected} == expected and len(config.layer_types) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("pseudo_positions", "foo"), ("sliding_window", 4), ("num_hidden_layers", 5), ("attention_kinds", ["mah"] * 2)],
)
@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_fields_that_are_set_on_a_config_are_checked_when_a_model_is_built(auto_class, field, value):
    config = small_config()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=f"{field}.* (allowed are|would have no effect|give one name)"):
        auto_class.from_config(config)


def test_a_name_that_is_set_for_a_list_of_layers_is_refused():
    config = small_config()
    config.attention_kinds = "mha"
    with pytest.raises(ValueError, match="attention_kinds='mha' was assigned: assign a list with one entry per layer"):
        IHAForCausalLM(config)


def test_a_configuration_of_another_class_is_refused():
    with pytest.raises(ValueError, match="^LlamaConfig is not an IHAConfig: build one, or convert the model"):
        IHAForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2))


@pytest.mark.parametrize("layers", [10_001, 10**9])
def test_a_damaged_number_of_layers_is_refused_before_lists_of_that_length_are_made(layers):
    with pytest.raises(ValueError, match=f"num_hidden_layers={layers}; it must be at most 10000"):
        IHAConfig.from_preset("tiny", num_hidden_layers=layers)
    with pytest.raises(ValueError, match=f"num_hidden_layers={layers}; it must be at most 10000"):
        IHAConfig.from_preset("small-1m-iha", num_hidden_layers=layers)


@pytest.mark.parametrize("layers", [-1, 0, None, "5"])
def test_a_number_of_layers_that_is_none_is_refused(layers):
    with pytest.raises(Exception, match="num_hidden_layers"):
        IHAConfig.from_preset("small-1m-iha", num_hidden_layers=layers)


def test_the_configuration_imports_no_attention_code(tmp_path, monkeypatch):
    """Import it without the package's other files. LlamaConfig itself imports torch."""
    shutil.copytree(
        Path(modeling_iha.__file__).parent, tmp_path / "bare", ignore=shutil.ignore_patterns("__init__.py")
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("bare.configuration_iha")
    imported = {name.removeprefix("bare.") for name in sys.modules if name.startswith("bare.")}
    assert {name for name in imported if "option" not in name} == {
        "configuration_iha",
        "mixing_scale",
        "tested_versions",
    }


OWN_MODEL = """from modeling_iha import IHAForCausalLM


class OwnModel(IHAForCausalLM): ...


OwnModel.register_for_auto_class("AutoModelForCausalLM")
"""


def test_a_users_own_class_stays_the_one_that_is_loaded(tmp_path, monkeypatch):
    """Save a registered subclass, and save it again after loading."""
    (tmp_path / "own_model.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("own_model").OwnModel(small_config())
    for name in ("once", "twice"):
        model.save_pretrained(tmp_path / name)
        written = json.loads((tmp_path / name / "config.json").read_text())["auto_map"]
        assert written == AUTO_MAP | {"AutoModelForCausalLM": "own_model.OwnModel"}
        model = type(model).from_pretrained(tmp_path / name)


# Presets


@pytest.mark.parametrize("preset", PRESETS)
def test_config_round_trip(preset, tmp_path):
    config = IHAConfig.from_preset(preset, pseudo_positions="shared", rope_parameters={"rope_theta": 123.0})
    config.save_pretrained(tmp_path)
    for loaded in (AutoConfig.from_pretrained(tmp_path), IHAConfig.from_dict(config.to_dict())):
        assert type(loaded) is IHAConfig
        assert loaded.to_diff_dict() | {"_name_or_path": ""} == config.to_diff_dict() | {"_name_or_path": ""}
        assert loaded.rope_parameters == {"rope_type": "default", "rope_theta": 123.0}
    assert IHAConfig.from_preset(preset, rope_theta=7.0).rope_parameters["rope_theta"] == 7.0


SCALED = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_an_override_of_the_scaling_keeps_the_base(name, tmp_path):
    """Transformers would fill in a base of 10,000."""
    small_config().save_pretrained(tmp_path)
    loaded = IHAConfig.from_pretrained(tmp_path, **{name: SCALED})
    assert loaded.rope_parameters == {**SCALED, "rope_theta": 100.0}
    preset = IHAConfig.from_preset("paper-2.4b-iha", **{name: SCALED})
    assert preset.rope_parameters == {**SCALED, "rope_theta": 500000.0}


def test_an_override_of_the_scaling_of_each_layer_type_keeps_its_base(tmp_path):
    ropes = {"full_attention": {**PLAIN, "rope_theta": 7.0}, "sliding_attention": {**PLAIN, "rope_theta": 5.0}}
    small_config(**LOCAL, rope_parameters=ropes).save_pretrained(tmp_path)
    given = {"full_attention": SCALED, "sliding_attention": {**PLAIN, "rope_theta": 3.0}}
    loaded = IHAConfig.from_pretrained(tmp_path, rope_parameters=given)
    assert loaded.rope_parameters == {**given, "full_attention": {**SCALED, "rope_theta": 7.0}}
    with pytest.raises(ValueError, match="no rope_theta, and the layer types .* have a base each"):
        IHAConfig.from_pretrained(tmp_path, rope_parameters=SCALED)


@pytest.mark.parametrize(
    ("older", "override", "expected"),
    [
        ({"rope_theta": 5.0}, {"rope_theta": 7.0}, {**PLAIN, "rope_theta": 7.0}),
        ({"rope_theta": 5.0}, {"rope_scaling": SCALED}, {**SCALED, "rope_theta": 5.0}),
        ({"rope_theta": 5.0, "rope_scaling": SCALED}, {"rope_theta": 7.0}, {**SCALED, "rope_theta": 7.0}),
        (
            {"rope_theta": 5.0, "rope_scaling": SCALED},
            {"rope_scaling": {**SCALED, "factor": 2.0}},
            {**SCALED, "factor": 2.0, "rope_theta": 5.0},
        ),
        (
            {"rope_parameters": {**PLAIN, "rope_theta": 5.0}, "rope_theta": 5.0},
            {"rope_theta": 7.0},
            {**PLAIN, "rope_theta": 7.0},
        ),
        (
            {"rope_parameters": {**PLAIN, "rope_theta": 5.0}},
            {"rope_theta": 7.0, "rope_parameters": None},
            {**PLAIN, "rope_theta": 7.0},
        ),
        (
            {"rope_parameters": {**PLAIN, "rope_theta": 5.0}},
            {"rope_parameters": None},
            {**PLAIN, "rope_theta": 5.0},
        ),
    ],
)
def test_an_override_of_rope_replaces_the_older_fields_of_a_file(older, override, expected):
    fields = {name: value for name, value in small_config().to_dict().items() if not name.startswith("rope_")}
    loaded = IHAConfig.from_dict(fields | older, **override)
    assert loaded.rope_parameters == expected


def test_a_subclass_has_fields_of_its_own(tmp_path):
    class Scaled(IHAConfig):
        scale: float = 1.0

    Scaled(**small_config().to_diff_dict()).save_pretrained(tmp_path)
    assert Scaled.from_pretrained(tmp_path, scale=3.0).scale == 3.0


def test_overrides_that_contradict_or_mean_nothing_are_refused(tmp_path):
    small_config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="rope_theta=5.0 beside rope_parameters=.*: give one base"):
        IHAConfig.from_pretrained(tmp_path, rope_theta=5.0, rope_parameters={**SCALED, "rope_theta": 6.0})
    with pytest.raises(ValueError, match="rope_scaling beside rope_parameters"):
        IHAConfig.from_pretrained(tmp_path, rope_scaling=SCALED, rope_parameters=SCALED)
    with pytest.raises(ValueError, match="no field 'pseudo_heads' .*'num_pseudo_heads'"):
        IHAConfig.from_pretrained(tmp_path, pseudo_heads=4)


def test_files_of_others_stay_when_a_configuration_is_saved(tmp_path):
    """Only files of this package are removed, whose kinds the configuration lacks."""
    small_config(attention_kinds="paired_heads").save_pretrained(tmp_path)
    (tmp_path / "score_matrix.py").write_text("# mine")
    assert (tmp_path / "pairing.py").is_file()
    small_config(attention_kinds="mha").save_pretrained(tmp_path)
    assert (tmp_path / "score_matrix.py").read_text() == "# mine"
    assert not (tmp_path / "attention_paired_heads.py").exists()


@pytest.mark.parametrize("given", [{"rope_theta": 5.0}, {"full_attention": dict(PLAIN), "sliding_attention": PLAIN}])
def test_the_callers_rope_parameters_stay_as_they_are(given):
    """Transformers completes what it is given, in some versions beside the layer types."""
    before = deepcopy(given)
    for _ in range(2):
        small_config(**LOCAL, rope_parameters=given)
    assert given == before


def test_patterns_are_saved_expanded():
    config = small_config(
        num_hidden_layers=10,
        attention_kinds=["iha"] * 4 + ["mha"],
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
        sliding_window=4,
    )
    assert config.attention_kinds == (["iha"] * 4 + ["mha"]) * 2
    assert config.layer_types == (["sliding_attention"] * 4 + ["full_attention"]) * 2
    assert small_config().attention_kinds == ["iha", "iha"]
    assert small_config().layer_types == ["full_attention"] * 2
    assert small_config(num_pseudo_heads=None).num_pseudo_heads == 4


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="'huge'.*'paper-2.4b-iha'.*'tiny'"):
        IHAConfig.from_preset("huge")


@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        ("iha", {}, {"num_pseudo_heads": 20, "sliding_window": 10}),
        ("iha", {"num_attention_heads": 4}, {"num_pseudo_heads": 4, "sliding_window": 256}),
        ("iha", {"num_attention_heads": 4, "num_pseudo_heads": 2}, {"num_pseudo_heads": 2, "sliding_window": 1024}),
        ("iha", {"num_pseudo_heads": 2, "attention_kinds": "mha"}, {"sliding_window": 1024}),  # windows alone
        ("iha", {"num_pseudo_heads": 2, "sliding_window": 7}, {"sliding_window": 7}),
        ("iha", {"layer_types": "full_attention"}, {"sliding_window": None}),
        ("global-local", {}, {"sliding_window": 512}),
        ("global-local", {"max_position_embeddings": 512}, {"sliding_window": 32}),
        ("global-local", {"max_position_embeddings": 512, "sliding_window": 511}, {"sliding_window": 511}),
        ("global-local", {"num_hidden_layers": 3}, {"layer_types": ["sliding_attention"] * 3, "sliding_window": 512}),
        ("iha", {"num_hidden_layers": 6}, {"attention_kinds": [*["iha"] * 4, "mha", "iha"], "sliding_window": 10}),
        ("global", {"vocab_size": 128001}, {"bos_token_id": 128000, "eos_token_id": None}),
        ("global", {"vocab_size": 256, "eos_token_id": 3}, {"bos_token_id": None, "eos_token_id": 3}),
    ],
)
def test_what_depends_on_an_override_of_a_preset_follows_it(preset, overrides, expected):
    config = IHAConfig.from_preset(f"paper-2.4b-{preset}", **overrides)
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_window_of_a_preset_that_is_none_is_refused():
    with pytest.raises(ValueError, match="sliding_window=512 is not shorter than max_position_embeddings=512: give"):
        IHAConfig.from_preset("paper-2.4b-global-local", max_position_embeddings=512, sliding_window=512)
    with pytest.raises(ValueError, match=r"num_pseudo_heads=20 leaves no window at 512 tokens"):
        IHAConfig.from_preset("paper-2.4b-iha", max_position_embeddings=512)


# Weights in matrices and norms of the IHA paper's models, and of GPT-3 small without its learned positions and biases.
PAPER = 26 * (4 * 2560**2 + 2 * 2560 * 10240) + 128256 * 2560 + (2 * 26 + 1) * 2560
GPT3_SMALL = 12 * (4 * 768**2 + 2 * 768 * 3072) + 50257 * 768 + 25 * 768
# "1, 10, 32 and 106 million" of the table in configuration_iha/README.md
SMALL = {
    "1m": 5 * (4 * 128**2 + 3 * 128 * 352) + 256 * 128 + (2 * 5 + 1) * 128,
    "10m": 10 * (4 * 256**2 + 3 * 256 * 1024) + 256 * 256 + (2 * 10 + 1) * 256,
    "30m": 10 * (4 * 512**2 + 3 * 512 * 1408) + 256 * 512 + (2 * 10 + 1) * 512,
    "100m": 15 * (4 * 768**2 + 3 * 768 * 2048) + 256 * 768 + (2 * 15 + 1) * 768,
}
FOLDER = Path(configuration_iha.__file__).parent
SMALL_LAYERS = {
    "1m": (5, 8, 16),
    "10m": (10, 8, 32),
    "30m": (10, 8, 64),
    "100m": (15, 12, 64),
}  # layers, heads, head_dim
# IHA adds 3 H^2 P + H P in each of 21 mixing layers; the others 2 H^2 or 4 d in each of 26. HyperAttention without
# sharing has a second key and value. The sizes of DCFormers are those of their names.
PRESET_SIZES = {
    "paper-2.4b-global": PAPER,
    "paper-2.4b-global-local": PAPER,
    "paper-2.4b-iha": PAPER + 21 * (3 * 20**2 * 20 + 20 * 20),
    "paper-2.4b-talking-heads": PAPER + 26 * 2 * 20**2,
    "paper-2.4b-diff": PAPER + 26 * 4 * 128,
    "paper-2.4b-paired-heads": PAPER,
    **{f"small-{size}-{form}": count for size, count in SMALL.items() for form in ("global", "global-local")},
    **{f"small-{size}-paired-heads": count for size, count in SMALL.items()},
    **{f"small-{size}-talking-heads": SMALL[size] + n * 2 * h**2 for size, (n, h, _) in SMALL_LAYERS.items()},
    **{f"small-{size}-diff": SMALL[size] + n * 4 * d for size, (n, _, d) in SMALL_LAYERS.items()},
    **{f"small-{size}-iha": SMALL[size] + n * 4 // 5 * (3 * h**3 + h**2) for size, (n, h, _) in SMALL_LAYERS.items()},
    **dict.fromkeys(
        [f"gpt3-small{name}" for name in ("", "-hyper-feature", "-hyper-feature-v2", "-hyper")], GPT3_SMALL
    ),
    "gpt3-small-hyper-no-sharing": GPT3_SMALL + 12 * 2 * 768**2,
    **{"dcformer-405m": 405e6, "dcformer-834m": 834e6, "dcformer-1.4b": 1.4e9},
    **{"dcformer-2.8b": 2.8e9, "dcformer-6.9b": 6.9e9},
}


@pytest.mark.parametrize("preset", PRESET_SIZES)
def test_presets_have_the_size_of_their_papers(preset):
    config = IHAConfig.from_preset(preset)
    with torch.device("meta"):
        size = IHAForCausalLM(config).num_parameters()
    assert abs(size / PRESET_SIZES[preset] - 1) <= (0.06 if "dcformer" in preset else 0)
    if "dcformer" in preset:
        assert set(config.attention_kinds) == {"dcmha"} and config.sliding_window == 256
        assert config.layer_types[:4] == ["sliding_attention", "full_attention"] * 2
        assert not config.tie_word_embeddings


@pytest.mark.parametrize("size", SMALL)
def test_small_presets_differ_by_their_form_alone(size):
    """Give IHA the window that a change of the context gives it, and P = H."""
    forms = ("global", "global-local", "iha", "talking-heads", "diff", "paired-heads")
    files = {form: json.loads((FOLDER / f"small-{size}-{form}.json").read_text()) for form in forms}
    own = {"attention_kinds", "layer_types", "sliding_window", "num_pseudo_heads"}
    shared = [{name: value for name, value in fields.items() if name not in own} for fields in files.values()]
    assert all(fields == shared[0] for fields in shared)
    config = IHAConfig.from_preset(f"small-{size}-iha")
    assert config.num_pseudo_heads == config.num_attention_heads
    assert files["iha"]["sliding_window"] == config.sliding_window  # which from_preset computes
    windows = files["global-local"]["sliding_window"]
    assert windows == config.max_position_embeddings // 16 == 4 * files["paired-heads"]["sliding_window"]


def test_a_preset_without_layer_types_has_no_window():
    config = IHAConfig.from_preset("paper-2.4b-iha", layer_types=None)
    assert set(config.layer_types) == {"full_attention"} and config.sliding_window is None


def test_the_windows_of_paired_presets_hold_as_many_pairs_as_plain_ones():
    plain, paired = (IHAConfig.from_preset(f"paper-2.4b-{name}") for name in ("global-local", "paired-heads"))
    assert paired.num_pseudo_heads * paired.sliding_window == plain.sliding_window
    assert paired.layer_types == plain.layer_types
    small = [IHAConfig.from_preset(f"small-{size}-paired-heads") for size in SMALL]
    for config in (paired, *small):
        kinds = dict(zip(config.layer_types, config.attention_kinds))
        assert kinds == {"sliding_attention": "paired_heads", "full_attention": "mha"}
        assert config.num_pseudo_heads * config.sliding_window == config.max_position_embeddings // 16


def test_a_config_is_not_uploaded_without_its_code(tmp_path):
    with pytest.raises(ValueError, match="would upload no code: call config.push_to_hub"):
        small_config().save_pretrained(tmp_path, push_to_hub=True)
    assert not list(tmp_path.iterdir())
