"""Test that a config that cannot work is rejected where it is built or read.

What Transformers and other libraries store in one passes."""

import importlib
import json
import shutil
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers import in_window, random_ids, random_model, small_config
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


def rope(rope_type, **parameters):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 100.0, **parameters}}


def of(kind, options=None, window=None, **fields):
    """Return the fields of a config of layers of a kind, with its options and a window."""
    return {"attention_kinds": kind, "attention_options": {kind: options or {}}, **in_window(window), **fields}


def heads(kind, num_heads, groups, **fields):
    return of(kind, num_attention_heads=num_heads, num_key_value_heads=groups, head_dim=8, **fields)


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
BAD = [
    ({"num_pseudo_heads": 0}, "num_pseudo_heads=0.*above 0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3.*divide.*num_attention_heads=4"),
    ({"head_dim": 7}, "head_dim=7 must be even"),
    ({"hidden_size": 126, "num_attention_heads": 6, "head_dim": None}, "head_dim=21 .*hidden_size=126 over .*heads=6"),
    ({"mixing_scale": 0}, "mixing_scale=0.*above 0"),
    ({"attention_kinds": "linear"}, "attention_kinds.*'linear'.*'mha', 'iha'"),
    ({"attention_kinds": ["iha"] * 3}, r"attention_kinds has 3 entries.*one per layer \(2\)"),
    ({"layer_types": "chunked_attention"}, "layer_types.*'chunked_attention'.*'full_attention', 'sliding_attention'"),
    ({"layer_types": ["full_attention"] * 3}, r"layer_types has 3 entries.*one per layer \(2\)"),
    ({"layer_types": "sliding_attention", "sliding_window": 0}, "sliding_window=0.*at least 2"),
    ({"layer_types": "sliding_attention"}, "sliding_window=None.*at least 2"),
    ({"sliding_window": 4}, "sliding_window=4.*None elsewhere"),
    ({"pseudo_collapse": "mean"}, "'pseudo_collapse'.*'per_head', 'all_heads'.*mean"),
    ({"attention_options": {"linear": {"foo": 1}}}, "attention_options.*'linear'"),
    ({"attention_options": {"iha": {"foo": 1}}}, "attention_options.*'iha'"),
    ({"attention_options": {"diff": {"foo": 1}}}, "foo"),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_parameters.*rope_type.*linear.*factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.*one set"),
    ({**LOCAL, "rope_parameters": {"sliding_attention": PLAIN}}, "rope_parameters.*one set for each"),
    ({"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}}, "rope_parameters.*one set"),
    (
        {**LOCAL, "rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN, "factor": 2.0}},
        "rope_parameters.*no other key",
    ),
    ({"initializer_range": -0.1}, "Value must be .*0.0 .*-0.1"),
    ({"no_rope_layers": [1, 2]}, "no_rope_layers.* 2: .*of 0, 1"),
    ({"no_rope_layers": [1, 0, 1]}, r"no_rope_layers has 3 entries.*one per layer \(2\)"),
    # Options of a kind
    (
        of("dcmha", {"rank": 0, "gate": False, "base_map": True, "sides": "query"}),
        "sides='query' with rank=0 and gate=False",
    ),
    (of("dcmha", {"num_groups": 3}), "num_groups=3.*does not divide num_attention_heads=4"),
    (of("dcmha", {"rank": 0, "gate": False}), "composes nothing.*'mha'"),
    *[
        (of("diff", {"lambda_std_dev": value}), "lambda_std_dev.*number, at least 0")
        for value in (float("nan"), float("inf"), -1)
    ],
    (of("diff", num_key_value_heads=1), "num_key_value_heads=1 is odd.*'diff'.*must be even"),
    (heads("diff", 3, 3), "num_key_value_heads=3 is odd"),
    (of("diff", attention_dropout=0.1), "attention_dropout=0.1.*'diff'.*set it to 0"),
    (of("hyper", {"order": 4}), "order=4 with softmax, which is for order 3 only: set linear=True"),
    (of("hyper", {"linear": True, "strict_order": True}), "linear=True.*strict_order must not be set"),
    (of("hyper", {"linear": True, "windows": [2, 3]}, 3), "linear=True.*windows must not be set"),
    (of("hyper", {"linear": True}, 3), "linear=True.*must be 'full_attention'"),
    (of("hyper", {"windows": [2, 3]}), r"windows=\[2, 3\]; .* must be 'sliding_attention', with sliding_window=3"),
    (
        of("hyper", {"strict_order": True, "windows": [3, 1]}, 3),
        "strict_order=True with a window of 1 token for k",
    ),
    (of("simplicial", {"sharing": True}), "unexpected keyword argument 'sharing'"),
    (of("hyper_feature", {"orders": [1, 1.5, 1, 1]}), "Field 'orders' with value"),
    (of("hyper_feature", {"orders": [1, 2]}), r"orders=\[1, 2\].*one for each of 4 heads"),
    (of("hyper_feature", {"orders": 3}), "orders=3 and head_dim=8.*even"),
    (of("hyper_feature", {"orders": 8}), "orders=8 and head_dim=8.*even"),
    (
        of("hyper_feature", {"orders": [1, 2, 2, 2]}),
        r"orders=\[1, 2, 2, 2\] with num_key_value_heads=2; the 2 heads of a group",
    ),
    (of("knocking_heads", {"values": None}), "leaves multi-head attention: set one of them, or use kind 'mha'"),
    *[
        (
            heads("paired_heads", num_heads, groups, num_pseudo_heads=p),
            f"num_pseudo_heads={p or num_heads} does not divide num_key_value_heads={groups}: .*so choose a divisor.$",
        )
        for num_heads, groups, p in ((4, 2, 4), (6, 6, 4), (4, 2, None))
    ],
    # Additions to every kind
    ({"output_gate": "per_token"}, "output_gate"),
    ({"output_gate": True}, "output_gate"),
    ({"exclusive_attention": "yes"}, "exclusive_attention"),
    (of("hyper", exclusive_attention=True), "exclusive_attention=True with attention kind 'hyper'"),
    (of("simplicial", exclusive_attention=True), "tuples of tokens: set it to False"),
    ({"exclusive_attentions": True}, "did you mean 'exclusive_attention'"),
    ({"attention_kinds": "gated"}, "attention_kinds has 2 entries, of 'gated'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[str(fields) for fields, _ in BAD])
def test_what_cannot_work_is_refused(fields, message):
    with pytest.raises(Exception, match=f"(?s){message}"):
        small_config(**fields)


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
    {"attention_dropout": 0.1},
    heads("mha", 3, 3),
    {"num_key_value_heads": 1},
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
        ("n_layer", "num_hidden_layers"),
        ("d_model", "hidden_size"),
        ("P", "num_pseudo_heads"),
    ],
)
def test_a_misspelt_override_of_a_preset_is_refused(name, meant):
    with pytest.raises(ValueError, match=f"no field '{name}'; did you mean '{meant}'") as caught:
        IHAConfig.from_preset("tiny", **{name: 3})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("pseudo_heads", "num_pseudo_heads"),
        ("sliding_windows", "sliding_window"),
        ("num_hidden_layer", "num_hidden_layers"),
    ],
)
def test_a_misspelt_field_is_refused(name, meant, tmp_path):
    """Reject it in a call and in a file, because it would silently give another model."""
    with pytest.raises(ValueError, match=f"no field '{name}'; did you mean '{meant}'"):
        small_config(**{name: 2})
    (tmp_path / "config.json").write_text(json.dumps(small_config().to_dict() | {name: 2}))
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        AutoConfig.from_pretrained(tmp_path)


# What Transformers reads or keeps although it is no field of the config, what it once wrote, what other models and
# libraries write.
FOREIGN = {
    **{"torch_dtype": "bfloat16", "rope_theta": 100.0, "max_window_layers": 28, "model_max_length": 4096},
    **{"id2label": {"0": "a", "1": "b"}, "task_specific_params": None, "use_bfloat16": False, "pruned_heads": {}},
    **{"tokenizer_class": "PreTrainedTokenizerFast", "use_sliding_window": False, "unsloth_version": "2026.1"},
    "quantization_config": {"quant_method": "none"},
    **{"norm_eps": 1.0, "num_labels": 3, "attn_implementation": "eager", "a_field_of_a_newer_version": 1},
}


def test_what_others_store_passes(tmp_path):
    for name, value in FOREIGN.items():
        small_config(**{name: value})
    written = small_config().to_dict() | {name: FOREIGN[name] for name in ("unsloth_version", "quantization_config")}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.unsloth_version, config.quantization_config["quant_method"]) == ("2026.1", "none")


def test_the_ffn_is_llamas_unless_a_config_says_otherwise():
    ours, llama = random_model(small_config()), LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=32))
    names = {name for name, _ in llama.model.layers[0].mlp.named_parameters()}
    assert {name for name, _ in ours.model.layers[0].mlp.named_parameters()} == names


FIRST_LAYERS = {
    "num_hidden_layers": 3,
    "attention_kinds": ["iha", "iha", "mha"],
    "layer_types": ["full_attention"] * 3,
    "no_rope_layers": [1] * 3,
}
OVERRIDES = {
    "a window without a sliding layer": ({"sliding_window": 4}, "sliding_window=4 with .*None elsewhere"),
    "no option": ({"attention_options": {"iha": {"foo": 1}}}, "attention_options.*'iha'"),
    "fewer layers": ({"num_hidden_layers": 3}, "attention_kinds has 4 entries"),
    "more layers": ({"num_hidden_layers": 5}, "attention_kinds has 4 entries"),
    "other kinds": ({"attention_kinds": ["mha"] * 4}, None),
    "the first layers": (FIRST_LAYERS, None),
    "of Transformers": ({"dtype": torch.bfloat16, "use_cache": False}, None),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_fields_that_replace_those_of_a_file_are_checked_with_the_rest(name, tmp_path):
    """Load with fields of the config among the arguments of `from_pretrained`."""
    random_model(small_config(num_hidden_layers=4, attention_kinds=["iha", "iha", "mha", "iha"])).save_pretrained(
        tmp_path
    )
    fields, message = OVERRIDES[name]
    if message is not None:
        with pytest.raises(Exception, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path, **fields)
        return
    config, unused = AutoConfig.from_pretrained(tmp_path, **fields, device_map="cpu", return_unused_kwargs=True)
    assert unused["device_map"] == "cpu" and not fields.keys() - {"dtype"} & unused.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **fields)
    for each in (config, model.config):
        assert {field: getattr(each, field) for field in fields} == fields
    assert len(model.model.layers) == config.num_hidden_layers


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sliding_window", 4, "sliding_window=4 with"),
        ("num_hidden_layers", 5, "attention_kinds has 2 entries"),
        ("attention_kinds", ["mah"] * 2, "attention_kinds has .*'mah'"),
        ("attention_kinds", "mha", "attention_kinds has"),  # not expanded any more
    ],
)
@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_fields_that_are_set_on_a_config_are_checked_when_a_model_is_built(auto_class, field, value, message):
    config = small_config()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=message):
        auto_class.from_config(config)


@pytest.mark.parametrize("layers", [0, None])
def test_a_number_of_layers_that_is_none_is_refused(layers):
    with pytest.raises(Exception, match=rf"num_hidden_layers|one per layer \({layers}\)"):
        IHAConfig.from_preset("small-1m-iha", num_hidden_layers=layers)


def test_the_configuration_imports_no_attention_code(tmp_path, monkeypatch):
    """Import it without the package's other files. LlamaConfig itself imports torch."""
    shutil.copytree(
        Path(modeling_iha.__file__).parent, tmp_path / "bare", ignore=shutil.ignore_patterns("__init__.py")
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("bare.configuration_iha")
    imported = {name.removeprefix("bare.") for name in sys.modules if name.startswith("bare.")}
    assert {name for name in imported if "option" not in name} == {"configuration_iha", "transformers_versions"}


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


def test_an_override_of_the_scaling_keeps_the_base_of_a_preset():
    """Transformers would fill in a base of 10,000."""
    preset = IHAConfig.from_preset("paper-2.4b-iha", rope_parameters=SCALED)
    assert preset.rope_parameters == {**SCALED, "rope_theta": 500000.0}
    both = IHAConfig.from_preset("paper-2.4b-iha", rope_parameters=SCALED, rope_theta=7.0)
    assert both.rope_parameters == {**SCALED, "rope_theta": 7.0}
    ropes = {"full_attention": {**PLAIN, "rope_theta": 7.0}, "sliding_attention": {**PLAIN, "rope_theta": 5.0}}
    assert IHAConfig.from_preset("paper-2.4b-iha", rope_parameters=ropes).rope_parameters == ropes


def test_a_subclass_has_fields_of_its_own(tmp_path):
    class Scaled(IHAConfig):
        scale: float = 1.0

    Scaled(**small_config().to_diff_dict()).save_pretrained(tmp_path)
    assert Scaled.from_pretrained(tmp_path, scale=3.0).scale == 3.0


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
    """Transformers completes what it is given, in some versions besides the layer types."""
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
    similar = "'small-1m-mha'; similar are 'small-1m-iha', .*configuration_iha.PRESETS lists all"
    with pytest.raises(ValueError, match=similar) as caught:
        IHAConfig.from_preset("small-1m-mha")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        ("iha", {}, {"num_pseudo_heads": 20, "sliding_window": 10}),
        ("iha", {"num_attention_heads": 4}, {"num_pseudo_heads": 4, "sliding_window": 256}),
        ("iha", {"num_attention_heads": 4, "num_pseudo_heads": 2}, {"num_pseudo_heads": 2, "sliding_window": 1024}),
        ("iha", {"num_pseudo_heads": 2, "attention_kinds": "mha"}, {"sliding_window": 1024}),  # windows only
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


def test_a_preset_takes_an_attention_implementation():
    assert IHAConfig.from_preset("tiny", attn_implementation="eager")._attn_implementation == "eager"


def test_a_window_of_a_preset_that_is_none_is_refused():
    with pytest.raises(Exception, match="'sliding_window' with value 'paper' .*int"):
        IHAConfig.from_preset("small-1m-iha", sliding_window="paper")
    with pytest.raises(ValueError, match="sliding_window=512 is not shorter than max_position_embeddings=512: give"):
        IHAConfig.from_preset("paper-2.4b-global-local", max_position_embeddings=512, sliding_window=512)
    with pytest.raises(ValueError, match=r"num_pseudo_heads=20 leaves no window at 512 tokens"):
        IHAConfig.from_preset("paper-2.4b-iha", max_position_embeddings=512)


# Weights in matrices and norms of the IHA paper's models, and of GPT-3 small without its learned positions and biases.
PAPER = 26 * (4 * 2560**2 + 2 * 2560 * 10240) + 128256 * 2560 + (2 * 26 + 1) * 2560
GPT3_SMALL = 12 * (4 * 768**2 + 2 * 768 * 3072) + 50257 * 768 + 25 * 768
# "1, 10 and 106 million" of the table in configuration_iha/README.md
SMALL = {
    "1m": 5 * (4 * 128**2 + 3 * 128 * 352) + 256 * 128 + (2 * 5 + 1) * 128,
    "10m": 10 * (4 * 256**2 + 3 * 256 * 1024) + 256 * 256 + (2 * 10 + 1) * 256,
    "100m": 15 * (4 * 768**2 + 3 * 768 * 2048) + 256 * 768 + (2 * 15 + 1) * 768,
}
FOLDER = Path(configuration_iha.__file__).parent
SMALL_LAYERS = {"1m": (5, 8), "10m": (10, 8), "100m": (15, 12)}  # layers, heads
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
    **{f"small-{size}-iha": SMALL[size] + n * 4 // 5 * (3 * h**3 + h**2) for size, (n, h) in SMALL_LAYERS.items()},
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
    forms = ("global", "global-local", "iha", "paired-heads")
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
