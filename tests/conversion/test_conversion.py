"""Convert pretrained checkpoints to IHA checkpoints, and back, without changing what they compute."""

import copy
import json
import re
import resource
import shutil
import sys
import weakref
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from helpers import IHA_CODE, last_line, random_model, small_config
from tiny_sources import (
    CHAT_TEMPLATE,
    FOLDED_SOURCES,
    SOURCES,
    STOCK_SOURCES,
    VOCAB_SIZE,
    assert_equal_logits,
    continuation,
    edit_config,
    edit_weights,
    logits,
    padded_logits,
    save_tiny_source,
    tiny_source,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)

from common import checkpoint_io
from common.checkpoint_io import load_in_clean_process, run_in_clean_process, smollm2_gguf
from common.command_io import UserError, attention_kinds, new_directory, run_cli
from conversion_scripts import (
    convert_diffllama_to_iha,
    convert_iha_to_diffllama,
    convert_iha_to_llama,
    convert_llama_to_iha,
    verify_conversion,
)
from conversion_scripts.architectures import ARCHITECTURES
from conversion_scripts.convert_iha_to_llama import convert_back
from conversion_scripts.convert_llama_to_iha import convert, exact_length, iha_config
from kinds.iha import last_pseudo_head
from model_cards import render
from modeling_iha import IHAConfig, IHAForCausalLM
from modeling_iha.attention_kinds import ATTENTION_CLASSES


# What is converted


P3, TALKING_HEADS, DCMHA = {"num_pseudo_heads": 3}, {"attention_kind": "talking_heads"}, {"attention_kind": "dcmha"}
OTHER_KINDS = [{"attention_kind": kind} for kind in convert_llama_to_iha.ATTENTION_KINDS if kind != "iha"]
# What a kind meets in a layer, whatever the architecture: a head_dim of its own, QK-norm, windows, biases, no RoPE.
LAYERS = ("llama-tied-head-dim", "qwen3-sliding-bias", "smollm3-sliding")
# A fold ends in the weights of a Llama, from which every kind starts.
CONVERSIONS = [
    *((name, P3) for name in SOURCES),
    *(("qwen2-sliding", {"num_pseudo_heads": p}) for p in (1, 2, 4)),
    *((name, kind) for name in LAYERS for kind in OTHER_KINDS),
]


@pytest.mark.parametrize(("name", "arguments"), CONVERSIONS, ids=str)
def test_converted_model_computes_what_its_source_does(name, arguments):
    source = tiny_source(name)
    expected, padded, tokens = logits(source), padded_logits(source), continuation(source)
    model = convert(source, **arguments)
    assert type(model) is IHAForCausalLM and not model.training
    assert set(model.config.attention_kinds) == {arguments.get("attention_kind", "iha")}
    assert exact_length(source.config, model.config) is None
    assert_equal_logits(logits(model), expected)
    assert_equal_logits(padded_logits(model), padded)
    assert continuation(model) == tokens


def test_nothing_is_dead_after_a_conversion_to_dcmha():
    """Expect gradients of the second projections and the gates at once, and of the first projections after a step."""
    model = convert(tiny_source(), **DCMHA)
    expected = logits(model)
    own = {name: p for name, p in model.named_parameters() if "pre_" in name or "post_" in name}
    for step in range(2):
        model(torch.arange(5, 14)[None]).logits.square().sum().backward()
        assert all(p.grad.abs().max() > 0 for name, p in own.items() if step or "w1" not in name)
        torch.optim.SGD(own.values(), lr=1e-3).step()
    assert (logits(model) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["talking_heads", "diff_v2", "gated", "knocking_heads", "multi_token"])
def test_nothing_is_dead_after_a_conversion(kind):
    model = convert(tiny_source(), attention_kind=kind)
    # Weights that share memory would learn as one, and cannot be saved.
    assert len({p.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    model(torch.arange(5, 14)[None]).logits.square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize(("name", "arguments"), [case for case in CONVERSIONS if case[0] != "granite-tied"], ids=str)
def test_bfloat16_conversion_adds_no_rounding(name, arguments):
    """Compare both models, upcast to float32, as float32 models: mixing, offsets included, is exact in bfloat16."""
    source = tiny_source(name, torch.bfloat16)
    model = convert(source, **arguments)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_equal_logits(logits(model.float()), logits(source.float()))


@pytest.mark.parametrize("dtype, factor", [(torch.bfloat16, 12.0), (torch.bfloat16, 4.0), (torch.float32, 12.0)])
def test_multipliers_that_round_weights_are_announced(dtype, factor, capsys):
    convert(tiny_source("granite", dtype, embedding_multiplier=factor), 2)
    announced = "convert with --dtype float32" in capsys.readouterr().err
    assert announced == (dtype == torch.bfloat16 and factor == 12.0)


def test_multipliers_leave_embeddings_tied():
    model = convert(tiny_source("granite-tied"), 2)
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "field, neutral",
    [
        ("embedding_multiplier", 1.0),
        ("residual_multiplier", 1.0),
        ("attention_multiplier", 16**-0.5),
        ("logits_scaling", 1.0),
    ],
)
def test_each_multiplier_is_folded(field, neutral):
    source = tiny_source("granite")
    expected = logits(source)
    setattr(source.config, field, neutral)
    assert (logits(convert(source, 2)) - expected).abs().max() > 1e-2


@pytest.fixture
def convert_otherwise(monkeypatch):
    """Return a function that converts a tiny source by a changed row of the table."""

    def convert_otherwise(source, **change):
        model_type = source.config.model_type
        monkeypatch.setitem(ARCHITECTURES, model_type, replace(ARCHITECTURES[model_type], **change))
        return convert(source, 2)

    return convert_otherwise


@pytest.mark.parametrize("name", ["granite", "ernie4_5", "helium"])
def test_a_fold_that_is_left_out_is_noticed(name, convert_otherwise):
    source = tiny_source(name)
    assert (logits(convert_otherwise(source, fold=None)) - logits(source)).abs().max() > 1e-2


def test_layers_without_rope_are_noticed():
    source = tiny_source("smollm3-tied")
    expected = logits(source)
    source.config.no_rope_layers = [1] * 6
    model = convert(source, 2)
    assert model.config.no_rope_layers == [1] * 6 and (logits(model) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    "name, change",
    [
        ("phi3-sliding", {"fold": None}),
        ("ernie4_5", {"mlp_bias": False}),
        ("seed_oss-biases", {"mlp_bias": False}),
        ("arcee", {"gated_mlp": True}),
    ],
)
def test_a_row_that_is_wrong_is_refused(name, change, convert_otherwise):
    with pytest.raises(UserError, match="_keys|does not know"):
        convert_otherwise(tiny_source(name), **change)


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


ORIGINAL = {"original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear"},
        {"rope_type": "dynamic"},
        {"rope_type": "yarn", **ORIGINAL},
        {"rope_type": "longrope", **ORIGINAL, "short_factor": [1.0, 1.5, 2, 3], "long_factor": [1.0, 2, 4, 8]},
        {"rope_type": "llama3", **ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_rope_type_is_carried_over(rope):
    source = tiny_source(rope_parameters={"rope_theta": 100.0, "factor": 4.0, **rope}, max_position_embeddings=12)
    plain = tiny_source(rope_parameters={"rope_theta": 100.0, "rope_type": "default"}, max_position_embeddings=12)
    expected = logits(source)
    assert (expected - logits(plain)).abs().max() > 1e-2, "the RoPE type makes no difference here"
    assert_equal_logits(logits(convert(source, 3)), expected)


def test_offsets_balance_and_set_the_pseudo_heads_apart():
    source = tiny_source()

    def v_mix(layer=2, **arguments):
        return convert(source, 3, **arguments).model.layers[layer].self_attn.v_mix.weight

    mixing = v_mix(seed=1)
    offsets = mixing - torch.eye(2)[:, :, None]
    assert torch.equal(offsets.sum(-1), torch.zeros(2, 2))
    assert (offsets[..., 0] != offsets[..., 1]).any() and (offsets[..., 1] != offsets[..., 2]).any()
    assert 0.01 < offsets.abs().max() <= 0.25
    assert torch.equal(mixing, v_mix(seed=1))
    assert not torch.equal(mixing, v_mix(seed=2)) and not torch.equal(mixing, v_mix(3, seed=1))
    assert torch.equal(v_mix(value_offsets="none"), torch.eye(2)[:, :, None].expand(2, 2, 3))


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
        *(
            (lambda config, name=name: CONFIG_MAPPING[name](), rf"^The architecture '{name}' cannot .*: {reason}")
            for name, reason in {
                **dict.fromkeys(("olmo2", "olmo3"), "its norms follow"),
                **dict.fromkeys(("gemma", "gemma2"), r"its norms scale by 1 \+ weight"),
                **dict.fromkeys(("cohere", "cohere2"), "attention and FFN of a layer run side by side"),
                **dict.fromkeys(
                    ("mixtral", "qwen2_moe", "ernie4_5_moe", "granitemoe", "deepseek_v3"), "its FFN is a mix"
                ),
            }.items()
        ),
        (lambda config: CONFIG_MAPPING["stablelm"](), "'stablelm' cannot be converted. Supported are qwen2, llama"),
        (lambda config: tiny_source("granite", logits_scaling=0.0).config, "logits_scaling=0.0"),
        (
            lambda config: tiny_source("phi3-sliding", partial_rotary_factor=0.5).config,
            "partial_rotary_factor=0.5; the whole head",
        ),
        (lambda config: setattr(config, "attn_logit_softcapping", 50.0), "attn_logit_softcapping=50.0"),
        (lambda config: setattr(config, "num_experts", 4), "num_experts=4"),
        (lambda config: setattr(config, "is_causal", False), "is_causal=False"),
        (lambda config: setattr(config, "sliding_window", 9), "sliding_window=9"),
        (lambda config: setattr(config, "quantization_config", {"bits": 4}), "weights of the source are quantized"),
        (lambda config: config.rope_parameters.update(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (
            lambda config: tiny_source("qwen2-sliding", layer_types=["chunked_attention"] * 6).config,
            "chunked_attention",
        ),
    ],
)
def test_what_would_change_the_logits_is_refused_by_name(change, message):
    config = tiny_source().config
    config = change(config) or config
    with pytest.raises(UserError, match=message):
        iha_config(config, 2)


def test_longrope_keeps_the_cache_where_phi3_fills_it_again():
    """Decode 24 tokens after nine, past the original length of 16."""
    source = tiny_source("phi3-longrope", original_max_position_embeddings=16)
    model = convert(source, 2)
    ours, theirs = continuation(model, 24), continuation(source, 24)
    assert ours[:16] == theirs[:16] and ours != theirs


def test_the_auto_map_of_released_phi3_is_ignored():
    auto_map = {"AutoConfig": "configuration_phi3.Phi3Config"}
    assert iha_config(tiny_source("phi3-sliding", auto_map=auto_map).config, 2).sliding_window == 7


def test_fields_that_mean_nothing_are_ignored():
    config = tiny_source().config
    fields = {"is_llama_config": True, "rope_interleaved": False, "use_mrope": None, "layer_types": None}
    for field, value in fields.items():
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


@pytest.mark.parametrize(
    ("name", "dtype", "arguments"),
    [
        *((name, torch.bfloat16, P3) for name in STOCK_SOURCES),
        *(("llama", torch.float32, arguments) for arguments in (P3, TALKING_HEADS)),
    ],
    ids=str,
)
def test_round_trip_returns_the_same_model(name, dtype, arguments):
    source = tiny_source(name, dtype)
    restored = convert_back(convert(source, **arguments))
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


@pytest.mark.parametrize("name", FOLDED_SOURCES)
def test_a_folded_source_goes_back_to_a_relative_of_llama(name):
    source = tiny_source(name)
    restored = convert_back(convert(source, **P3))
    relatives = {"phi3-sliding": MistralForCausalLM, "seed_oss": Qwen2ForCausalLM}
    assert type(restored) is relatives.get(name, LlamaForCausalLM)
    assert_equal_logits(logits(restored), logits(source))


def test_heads_that_do_not_divide_the_width_go_back():
    """Expect a Qwen3, which allows them; the configs of Llama and Arcee refuse them."""
    source = tiny_source("qwen3", num_attention_heads=6)
    restored = convert_back(convert(source, **P3))
    assert type(restored) is Qwen3ForCausalLM
    assert_equal_logits(logits(restored), logits(source))


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
    wide.load_state_dict({name: t for name, t in model.state_dict().items() if "collapse" not in name}, strict=False)
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.collapse"):
        convert_back(wide)
    for layer in wide.model.layers:
        layer.self_attn.collapse.weight.data = last_pseudo_head(4, 3, "all_heads")
    assert_equal_logits(logits(wide), logits(model))
    assert torch.equal(logits(convert_back(wide)), logits(convert_back(model)))


@pytest.mark.parametrize("positions", ["interleaved", "shared"])
@pytest.mark.parametrize("collapse", ["per_head", "all_heads"])
def test_head_mixing_without_virtual_tokens_is_a_llama(collapse, positions):
    """Fold a random mixing of heads, P = 1, into the projections."""
    fields = {"pseudo_collapse": collapse, "pseudo_positions": positions, "head_dim": 12, "attention_bias": True}
    model = random_model(small_config(num_pseudo_heads=1, num_key_value_heads=2, **fields))
    llama = convert_back(model)
    assert type(llama) is LlamaForCausalLM
    assert_equal_logits(logits(llama), logits(model))
    assert continuation(llama) == continuation(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_mix.weight.neg_()
    assert (logits(llama) - logits(model)).abs().max() > 1e-2


def test_a_qk_norm_keeps_the_mixing_of_queries_and_keys_from_being_folded():
    model = random_model(small_config(num_pseudo_heads=1, use_qk_norm=True))
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_mix\.weight has moved"):
        convert_back(model)
    for layer in model.model.layers:
        for mixing in (layer.self_attn.q_mix, layer.self_attn.k_mix):
            mixing.weight.data = torch.eye(len(mixing.weight))[..., None]
    qwen = convert_back(model)
    assert type(qwen) is Qwen3ForCausalLM
    assert_equal_logits(logits(qwen), logits(model))


@pytest.mark.parametrize("step, moved", [(2**-6, "0.016"), (float("nan"), "nan")])
@pytest.mark.parametrize("name", ["q_mix", "k_mix", "v_mix", "collapse", "score_mix"])
def test_a_parameter_that_moved_is_named(name, step, moved):
    model = convert(tiny_source(), **(TALKING_HEADS if name == "score_mix" else P3))
    with torch.no_grad():
        for layer in (5, 3):
            getattr(model.model.layers[layer].self_attn, name).weight.view(-1)[1] += step
    with pytest.raises(UserError, match=rf"^model.layers.3.self_attn.{name}.weight has moved by up to {moved} from"):
        convert_back(model)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"attention_kinds": "mha", "gated_mlp": False, "use_qk_norm": True}, "gated_mlp=False"),
        ({"attention_kinds": "mha", "mlp_gate_groups": 4}, "mlp_gate_groups=4"),
        ({"attention_kinds": "diff"}, "Layer 0 is of kind 'diff'"),
        ({"attention_kinds": "dcmha"}, "Layer 0 is of kind 'dcmha'"),
        ({"attention_kinds": "mha", "no_rope_layers": [1, 0], "use_qk_norm": True}, r"no_rope_layers=\[1, 0\]"),
        ({"attention_kinds": "diff_v2"}, "Layer 0 is of kind 'diff_v2'"),
        ({"attention_kinds": "gated"}, "Layer 0 is of kind 'gated'"),
        ({"pseudo_positions": "interleaved"}, "pseudo_positions='interleaved'"),
    ],
)
def test_no_stock_architecture_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        convert_back(IHAForCausalLM(IHAConfig.from_preset("tiny", **fields)))


def test_no_stock_architecture_has_windows_like_these():
    with pytest.raises(UserError, match="layer_types="):
        convert_back(convert(tiny_source("arcee"), 2, "hybrid", window=5))


def test_trained_output_bias_is_not_dropped():
    model = convert(tiny_source("qwen2-sliding"), 2)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.bias[0] = 0.5
    restored = convert_back(model)
    assert type(restored) is SmolLM3ForCausalLM, "a Qwen2 has no such bias"
    assert_equal_logits(logits(restored), logits(model))


@pytest.mark.parametrize("values", ["linear", "mlp"])
@pytest.mark.parametrize("name", ["llama", "qwen3-sliding-bias"])
def test_maps_of_knocking_heads_fold_into_the_projections(name, values):
    """Export random maps, and an MLP while its gate is zero, as the stock model that computes the same."""
    source, options = tiny_source(name), {"queries": True, "keys": True, "values": values}
    config = convert(source, attention_kind="knocking_heads").config
    model = random_model(IHAConfig.from_dict(config.to_dict() | {"attention_options": {"knocking_heads": options}}))
    gates = [layer.self_attn.v_map.gate for layer in model.model.layers] if values == "mlp" else []
    for gate in gates:
        torch.nn.init.zeros_(gate)
    folded = convert_back(model)
    assert type(folded) is type(source)
    assert_equal_logits(logits(folded), logits(model))
    for gate in gates[3:]:
        torch.nn.init.constant_(gate, 0.5)
        with pytest.raises(UserError, match=r"^model.layers.3.self_attn.v_map.gate has moved by up to 0.5 from"):
            convert_back(model)


# The commands


class Road(NamedTuple):
    """Hold a source's name, the commands there and back, and a parameter of the conversion."""

    source: str
    there: ModuleType
    options: tuple
    back: ModuleType
    parameter: str


LLAMA = Road("qwen2-sliding", convert_llama_to_iha, ("--num-pseudo-heads", "2"), convert_iha_to_llama, "k_mix.weight")
DIFFLLAMA = Road("diffllama", convert_diffllama_to_iha, (), convert_iha_to_diffllama, "lambda_k2")


@pytest.fixture(scope="module")
def travel(tmp_path_factory):
    """Return a function that makes a folder with a road's source, and with what its command makes of it."""

    @cache
    def travel(road):
        folder = tmp_path_factory.mktemp(road.source)
        save_tiny_source(folder / "source", road.source, torch.bfloat16, max_shard_size="10KB")
        (folder / "source" / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["convert", str(folder / "source"), str(folder / "iha"), *road.options])
            road.there.main()
        return folder

    return travel


@pytest.fixture
def converted(travel):
    return travel(LLAMA)


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


def test_model_card(travel):
    card = (travel(LLAMA) / "iha" / "README.md").read_text()
    for line in (
        *("library_name: transformers", "license: mit", "- custom_code", 'name = "iha"'),
        "iha, window of 7 tokens  ···███",
        "| Attention layers | 3 iha (full_attention), 3 iha (sliding_attention) |",
        "| Sliding window | 7 tokens |",
    ):
        assert line in card.splitlines(), card
    assert "for sequences of any length" in card and str(travel(LLAMA)) not in card
    card = (travel(DIFFLLAMA) / "iha" / "README.md").read_text()
    assert "| Attention layers | 6 diff (full_attention) |" in card and "Converted from source (diffllama)" in card
    assert str(travel(DIFFLLAMA)) not in card
    assert "pseudo" not in card.lower().replace("--num_pseudo_heads 1", "")


def test_converted_directory_stands_alone(converted):
    prompt = [{"role": "user", "content": "this great war"}]
    result = load_in_clean_process(converted / "iha", prompt, max_new_tokens=20)
    assert result["module"].startswith("transformers_modules.") and result["model_class"] == "IHAForCausalLM"
    model = AutoModelForCausalLM.from_pretrained(converted / "iha", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(converted / "iha")
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :].tolist()
    assert result["token_ids"] == expected and len(expected) > 3
    assert result["parameters"] == model.num_parameters() and result["vocabulary"] == VOCAB_SIZE


def test_clean_process_refuses_what_does_not_load(converted, tmp_path, monkeypatch):
    """Run the program of the clean process in this one, whose import of PyTorch is done."""

    def run_here(program, request, **_):
        with pytest.raises(SystemExit) as refused:
            exec(program, {"request": request})
        raise UserError(str(refused.value))

    with pytest.raises(UserError, match="no config.json"):
        load_in_clean_process(tmp_path)
    with pytest.raises(UserError, match="^why$"):
        run_in_clean_process("raise SystemExit('where\\nwhy')", {})
    with pytest.raises(UserError, match="^why$"):
        run_in_clean_process(
            "print('why\\nnanobind: leaked 4 types!\\n - a', file=sys.stderr); raise SystemExit(1)", {}
        )
    monkeypatch.setattr(checkpoint_io, "run_in_clean_process", run_here)
    broken = shutil.copytree(converted / "iha", tmp_path / "broken")
    edit_weights(broken, lambda w: w.pop("model.layers.4.self_attn.collapse.weight"))
    with pytest.raises(
        UserError, match=r"does not load in a clean process: missing_keys: .*layers\.4\.self_attn\.collapse"
    ):
        load_in_clean_process(broken)


VERIFY = ("--tokens", 40, "--max-new-tokens", 20)


@pytest.mark.parametrize("road, control", [(LLAMA, 0.1), (DIFFLLAMA, 0.01)], ids=["llama", "diffllama"])
def test_verify_accepts_the_conversion(road, control, travel, tmp_path, cli):
    folder, figures = travel(road), tmp_path / "figures.json"
    code, out, err = cli(verify_conversion, folder / "source", folder / "iha", *VERIFY, "--json", figures)
    assert code == 0 and "exact up to rounding" in out, err
    figures = json.loads(figures.read_text())
    assert figures["converted"]["passed"] and figures["converted"]["max_logit_difference"] < 2e-5
    assert figures["converted"]["mean_kl"] < 1e-8
    assert figures["converted"]["greedy_agreement"] == figures["converted"]["greedy_tokens"] == 20
    assert not figures["control"]["passed"] and figures["control"]["max_logit_difference"] > control
    assert figures["control"]["mean_kl"] > control / 100


def test_verify_holds_one_model_at_a_time(converted, monkeypatch, cli):
    """Expect the source's weights to be freed when those of the conversion are read."""
    alive, load = [], verify_conversion.load_model

    def load_alone(*arguments):
        assert not any(reference() for reference in alive)
        model = load(*arguments)
        alive.append(weakref.ref(model.get_input_embeddings().weight))
        return model

    monkeypatch.setattr(verify_conversion, "load_model", load_alone)
    code, _, err = cli(verify_conversion, converted / "source", converted / "iha", *VERIFY)
    assert code == 0 and len(alive) == 2, err


def test_verify_decodes_greedily_whatever_the_source_asks_for(converted, tmp_path, cli):
    folder = shutil.copytree(converted, tmp_path / "both")
    for model in ("source", "iha"):
        settings = {"stop_strings": ["x"], "return_dict_in_generate": True, "max_time": 1e-6, "num_beams": 2}
        edit_config(folder / model, "generation_config.json", **settings)
    code, out, err = cli(verify_conversion, folder / "source", folder / "iha", *VERIFY)
    assert code == 0 and "exact up to rounding" in out, err


@pytest.mark.parametrize(
    "stored, loaded, pickled",
    [(torch.float32, "float16", False), (torch.float16, "bfloat16", False), (torch.bfloat16, "float16", True)],
)
def test_weights_that_the_dtype_of_the_config_rounds_are_named(stored, loaded, pickled, tmp_path, cli):
    """Convert files whose config names another dtype, in which a load rounds them without a word; then keep them."""
    source = save_tiny_source(tmp_path / "source", dtype=stored)
    if pickled:
        (tmp_path / "source" / "model.safetensors").unlink()
        torch.save(source.state_dict(), tmp_path / "source" / "pytorch_model.bin")
    edit_config(tmp_path / "source", dtype=loaded)
    for options, said in (([], True), (["--dtype", "float32"], False)):
        out = tmp_path / f"iha{len(options)}"
        code, _, err = cli(convert_llama_to_iha, tmp_path / "source", out, "--num-pseudo-heads", 2, *options)
        assert code == 0 and (f"torch.{loaded}, in which its config has them loaded, rounds 99" in err) == said, err


def test_a_tokenizer_with_code_of_its_own_is_saved_without_it(tmp_path, cli):
    """Save the tokenizer as what it was read as, because the code that its source names is not copied."""
    save_tiny_source(tmp_path / "source")
    edit_config(tmp_path / "source", "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.X", None]})
    code, _, err = cli(convert_llama_to_iha, tmp_path / "source", tmp_path / "iha", "--num-pseudo-heads", 2)
    assert code == 0, err
    assert "auto_map" not in json.loads((tmp_path / "iha" / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("kind", [arguments["attention_kind"] for arguments in OTHER_KINDS])
def test_another_kind_is_converted_and_verified(kind, converted, tmp_path, cli):
    code, out, err = cli(convert_llama_to_iha, converted / "source", tmp_path / "out", "--attention-kind", kind)
    assert code == 0 and f"to attention of kind {kind!r}" in out, err
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| Attention layers | 3 {kind} (full_attention), 3 {kind} (sliding_attention) |" in card
    assert "pseudo" not in card.lower().replace("--num_pseudo_heads 1", "")
    code, out, err = cli(verify_conversion, converted / "source", tmp_path / "out", *VERIFY)
    assert code == 0 and "exact up to rounding" in out, err


@pytest.mark.parametrize("name", ["granite-tied", "phi3-sliding", "phi3-longrope"])
def test_a_folded_checkpoint_is_converted_and_verified(name, tmp_path, cli):
    save_tiny_source(tmp_path / "source", name)
    code, out, err = cli(convert_llama_to_iha, tmp_path / "source", tmp_path / "out", "--num-pseudo-heads", 2)
    assert code == 0 and ("`generate` crosses 8 tokens" in out) == (name == "phi3-longrope"), err
    code, out, err = cli(verify_conversion, tmp_path / "source", tmp_path / "out", *VERIFY)
    assert code == 0 and "exact up to rounding" in out, err


@pytest.mark.parametrize("road", [LLAMA, DIFFLLAMA], ids=["llama", "diffllama"])
def test_verify_refuses_a_changed_conversion(road, travel, tmp_path, cli):
    changed = shutil.copytree(travel(road) / "iha", tmp_path / "changed")
    edit_weights(changed, lambda w: w[f"model.layers.5.self_attn.{road.parameter}"].view(-1)[3].add_(0.5))
    code, out, err = cli(verify_conversion, travel(road) / "source", changed, *VERIFY)
    assert code == 1 and "converted" in out and "does not compute what" in last_line(err)


def test_verify_refuses_a_control_that_passes(converted, monkeypatch, cli):
    monkeypatch.setattr(verify_conversion, "break_one_parameter", lambda model: None)
    code, _, err = cli(verify_conversion, converted / "source", converted / "iha", *VERIFY)
    assert code == 1 and "control with a broken parameter passed" in last_line(err)


def test_verify_a_hybrid_within_and_beyond_its_window(tmp_path, cli):
    source = save_tiny_source(tmp_path / "source")
    options = ("--num-pseudo-heads", 2, "--schedule", "hybrid", "--window", 24, "--dtype", "bfloat16")
    code, out, _ = cli(convert_llama_to_iha, tmp_path / "source", tmp_path / "iha", *options)
    assert code == 0 and "for sequences of at most 24 tokens; longer ones differ" in out
    assert "at most 24 tokens" in (tmp_path / "iha" / "README.md").read_text()
    source.bfloat16().save_pretrained(tmp_path / "source")
    check = (verify_conversion, tmp_path / "source", tmp_path / "iha", "--max-new-tokens", 8, "--tokens")
    assert cli(*check, 24)[0] == 0
    code, _, err = cli(*check, 60)
    assert code == 1 and "sliding layers" in last_line(err)


@pytest.mark.parametrize(
    "arguments, message",
    [(("--tokens", 5000), "5000 are asked for"), (("--text", "missing.txt"), "missing.txt cannot be read")],
)
def test_verify_names_a_bad_text(converted, arguments, message, cli):
    code, _, err = cli(verify_conversion, converted / "source", converted / "iha", *arguments)
    assert code == 1 and message in last_line(err)


@pytest.mark.parametrize("road", [LLAMA, DIFFLLAMA], ids=["llama", "diffllama"])
def test_back_conversion_command(road, travel, tmp_path, cli):
    folder, source = travel(road), AutoModelForCausalLM.from_pretrained(travel(road) / "source", dtype="auto")
    code, out, _ = cli(road.back, folder / "iha", tmp_path / "back")
    assert code == 0 and type(source).__name__ in out
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert type(restored) is type(source) and restored.dtype == torch.bfloat16
    assert torch.equal(logits(restored), logits(source))
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == CHAT_TEMPLATE
    code, _, err = cli(road.back, tmp_path / "back", tmp_path / "again")
    assert code == 1 and "expected 'iha'" in last_line(err) and not (tmp_path / "again").exists()
    quantized = json.loads((folder / "iha" / "config.json").read_text()) | {"quantization_config": {"bits": 8}}
    (tmp_path / "quantized").mkdir()
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(quantized))
    code, _, err = cli(road.back, tmp_path / "quantized", tmp_path / "again")
    assert code == 1 and "quantized are quantized: take the checkpoint" in last_line(err)


def test_help_names_what_the_tables_hold(cli):
    _, out, _ = cli(convert_llama_to_iha, "--help")
    names = re.search("Convert a (.*) checkpoint to", " ".join(out.split())).group(1).lower()
    assert set(re.findall(r"\w+", names)) - {"or"} == ARCHITECTURES.keys()
    assert attention_kinds() == sorted(ATTENTION_CLASSES) and all(kind in out for kind in ATTENTION_CLASSES)


def test_a_kind_without_an_exact_start_is_refused_before_anything_is_read(tmp_path, cli):
    for kind in set(ATTENTION_CLASSES) - set(convert_llama_to_iha.ATTENTION_KINDS):
        arguments = (tmp_path / "absent", tmp_path / "out", "--attention-kind", kind)
        code, _, err = cli(convert_llama_to_iha, *arguments)
        assert code == 1 and f"--attention-kind {kind}: no layer of this kind computes" in last_line(err)


# Bad input


@pytest.mark.parametrize(
    "source, message",
    [
        ("nowhere/at/all", "neither a directory, nor a GGUF file, nor a Hub id"),
        ("missing.gguf", "does not exist"),
        ("bad.gguf", "bad.gguf"),
    ],
)
def test_missing_source(source, message, tmp_path, monkeypatch, cli):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    monkeypatch.chdir(tmp_path)
    code, _, err = cli(convert_llama_to_iha, source, "iha", "--num-pseudo-heads", 2)
    assert code == 1 and message in last_line(err)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


@pytest.mark.parametrize(
    "architecture, what, add",
    [
        ("llama", "rope_freqs.weight", lambda file: file.add_tensor("rope_freqs.weight", np.ones(4, np.float32))),
        ("llama", "blk.0.attn_q.bias", lambda file: file.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32))),
        ("qwen2", "rope.scaling.factor", lambda file: file.add_rope_scaling_factor(4.0)),
        ("phi3", "attention.sliding_window", lambda file: file.add_sliding_window(2047)),
        ("phi3", "rope.dimension_count=6", lambda file: file.add_rope_dimension_count(6)),
        # What changes nothing is not refused, and the weights are looked for.
        ("llama", None, lambda file: (file.add_rope_scaling_factor(1.0), file.add_sliding_window(0))),
    ],
)
def test_a_gguf_file_of_which_transformers_reads_a_part(architecture, what, add, tmp_path, cli):
    file = gguf.GGUFWriter(tmp_path / "tiny.gguf", architecture)
    file.add_name("tiny")
    for name, size in {"block_count": 1, "embedding_length": 32, "feed_forward_length": 24, "head_count": 4}.items():
        getattr(file, f"add_{name}")(size)
    file.add_vocab_size(VOCAB_SIZE)
    add(file)
    for write in (file.write_header_to_file, file.write_kv_data_to_file, file.write_tensors_to_file, file.close):
        write()
    code, _, err = cli(convert_llama_to_iha, tmp_path / "tiny.gguf", tmp_path / "out", "--num-pseudo-heads", 2)
    said = f"holds {what}, which Transformers does not read" if what else "does not hold the weights"
    assert code == 1 and said in last_line(err), err


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_a_source_without_a_tokenizer_converts_there_and_back(name, tmp_path, cli):
    """Convert a source from whose config alone Transformers builds no tokenizer, and one from which it builds one."""
    source = tiny_source(name)
    source.save_pretrained(tmp_path / "source")
    for module, *arguments in (
        (convert_llama_to_iha, tmp_path / "source", tmp_path / "iha", "--num-pseudo-heads", 2),
        (convert_iha_to_llama, tmp_path / "iha", tmp_path / "back"),
    ):
        code, _, err = cli(module, *arguments)
        assert code == 0 and "holds no tokenizer" in err, err
        assert not list(arguments[1].glob("tokenizer*"))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert_equal_logits(logits(back), logits(source))


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path, cli):
    """Limit the size of files, so that the system refuses to write as it does when a disk is full."""
    save_tiny_source(tmp_path / "source")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        code, _, err = cli(convert_llama_to_iha, tmp_path / "source", tmp_path / "iha", "--num-pseudo-heads", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and "File too large" in last_line(err)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "error, code, line",
    [
        (Exception("No space left on device (os error 28)"), 1, "Error: No space left on device (os error 28)\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
    ids=repr,
)
def test_errors_of_the_system_are_one_line(error, code, line, tmp_path, capsys):
    def main():
        with new_directory(tmp_path / "out") as directory:
            (directory / "half").write_text("half")
            raise error

    with pytest.raises(SystemExit, match=str(code)):
        run_cli(main)
    assert capsys.readouterr().err == line and not list(tmp_path.iterdir())


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_cli(lambda: 1 / 0)


def test_new_directory_takes_an_empty_one_and_makes_parents(tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        with new_directory(target) as directory:
            assert directory.parent == target.parent
            (directory / "file").write_text("whole")
        assert [path.name for path in target.iterdir()] == ["file"]


# Real weights


@pytest.mark.parametrize(
    "num_pseudo_heads", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_real_weights(num_pseudo_heads, tmp_path, monkeypatch, cli):
    try:
        source = smollm2_gguf()
    except UserError as missing:
        pytest.skip(str(missing))
    # The header takes seconds to read, and config, tokenizer, licence and weights each read it again.
    reader = cache(gguf.GGUFReader)
    for module in (gguf, render):
        monkeypatch.setattr(module, "GGUFReader", reader)
    # Transformers asks for the same map once for every module of the model.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    code, _, err = cli(convert_llama_to_iha, source, tmp_path / "iha", "--num-pseudo-heads", num_pseudo_heads)
    assert code == 0, err
    assert "license: apache-2.0" in (tmp_path / "iha" / "README.md").read_text()
    chat = AutoTokenizer.from_pretrained(tmp_path / "iha").apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    lengths = ("--tokens", 200, "--max-new-tokens", 16)
    code, _, err = cli(verify_conversion, source, tmp_path / "iha", *lengths, "--json", tmp_path / "figures")
    assert code == 0, err
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["tokens"] == 200 and figures["converted"]["greedy_tokens"] == 16
