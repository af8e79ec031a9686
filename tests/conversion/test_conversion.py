"""Convert pretrained checkpoints to IHA checkpoints, and back, without changing what they compute."""

import copy
import json
import re
import shutil
from functools import cache
from types import ModuleType
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch
from helpers import IHA_CODE, LOCAL_ROPE, decoder, last_line, random_ids, random_model, small_config, uncached_logits
from tiny_sources import (
    CHAT_TEMPLATE,
    OTHER_SOURCES,
    SOURCES,
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
from tokenizers import Tokenizer, models
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    SmolLM3ForCausalLM,
)

from conversion_scripts import convert_diffllama_to_iha, convert_iha_to_llama, convert_llama_to_iha
from conversion_scripts import verify_conversion as verify_script
from iha import api, cli, processes
from iha.checkpoints import load_model, load_tokenizer, smollm2_gguf
from iha.conversion import convert_diffllama_to_iha as of_diffllama
from iha.conversion import verify_conversion
from iha.conversion.architectures import exact_length
from iha.conversion.convert_iha_to_llama import convert_back
from iha.conversion.convert_llama_to_iha import convert_model, iha_config
from iha.conversion.layers import KINDS, Layers
from iha.errors import UserError
from iha.kinds import described
from iha.processes import load_in_clean_process, run_in_clean_process
from iha.sources import find_source
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, pair_heads
from modeling_iha.exact_start import last_pseudo_head
from modeling_iha.mixing_weights import state_with_values
from research.experiments.model_types import MULTIMODAL, tiny_model


pytestmark = pytest.mark.usefixtures("uncounted_cards")


# What is converted


def convert(source, *layers, value_offsets="balanced", seed=0, mixing_scale=None, **more_layers):
    """Convert a model of Llama's family to the layers of these arguments of `Layers`."""
    config = iha_config(source.config, Layers(*layers, **more_layers))
    return convert_model(source, config, value_offsets, seed, mixing_scale)


def convert_diffllama(source):
    return of_diffllama.convert_model(source, of_diffllama.iha_config(source.config))


CONVERT = {**dict.fromkeys(SOURCES, convert), **dict.fromkeys(OTHER_SOURCES, convert_diffllama)}
P3, TALKING_HEADS = {"num_pseudo_heads": 3}, {"kind": "talking_heads"}
OTHER_KINDS = [{"kind": kind} for kind in KINDS if kind != "iha"]
# "smollm3-sliding" has what a kind meets in a layer, whatever the architecture: another head_dim, windows, biases
# and layers without RoPE. "qwen3" adds QK-norm.
CONVERSIONS = [
    *((name, P3) for name in SOURCES),
    *((name, {}) for name in OTHER_SOURCES),
    *(("qwen2-sliding", {"num_pseudo_heads": p}) for p in (1, 4)),
    *(("smollm3-sliding", kind) for kind in OTHER_KINDS),
    *(("qwen3", kind) for kind in OTHER_KINDS),
    *(("smollm3-sliding", {"kind": kind, "output_gate": "elementwise"}) for kind in ("mha", "diff_v2")),
    ("qwen3", {"kind": "mha", "output_gate": "per_head"}),
    ("llama", {**P3, "output_gate": "elementwise"}),
    *(
        ("qwen3", {"kind": kind, "options": options})
        for kind, options in (
            ("knocking_heads", {"queries": True, "keys": True, "values": "linear"}),
            ("dcmha", {"base_map": True, "num_groups": 2, "sides": "query"}),
        )
    ),
]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("name", "arguments"), CONVERSIONS, ids=str)
def test_converted_model_computes_what_its_source_does(name, arguments):
    source = tiny_source(name)
    expected, padded, tokens = logits(source), padded_logits(source), continuation(source)
    model = CONVERT[name](source, **arguments)
    assert type(model) is IHAForCausalLM and not model.training
    assert set(model.config.attention_kinds) == {"diff" if name in OTHER_SOURCES else arguments.get("kind", "iha")}
    assert exact_length(source.config, model.config) is None
    assert_equal_logits(logits(model), expected)
    assert_equal_logits(padded_logits(model), padded)
    assert continuation(model) == tokens

    # In bfloat16 the conversion adds no rounding: mixing, offsets included, is exact.
    source = tiny_source(name, torch.bfloat16)
    model = CONVERT[name](source, **arguments)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert_equal_logits(logits(model.float()), logits(source.float()))


@pytest.mark.parametrize(("name", "arguments"), CONVERSIONS[: len(CONVERT)], ids=str)
def test_round_trip_returns_the_same_model(name, arguments):
    source = tiny_source(name, torch.bfloat16)
    restored = convert_back(CONVERT[name](source, **arguments))
    # A Mistral without a window is a Llama.
    expected_class = LlamaForCausalLM if name == "mistral" else type(source)
    assert type(restored) is expected_class and not restored.training
    expected, actual = source.state_dict(), restored.state_dict()
    assert actual.keys() == expected.keys() and all(torch.equal(actual[key], expected[key]) for key in expected)
    assert torch.equal(logits(restored), logits(source))
    assert restored.generation_config.to_dict() == source.generation_config.to_dict()
    if name != "mistral":
        ours, theirs = restored.config.to_dict(), source.config.to_dict()
        # IHA has one field for how layers slide, and writes out what a config class leaves to its default.
        for field in theirs.keys() - {"max_window_layers", "use_sliding_window", "architectures"}:
            assert ours[field] == theirs[field], field


@pytest.mark.parametrize("kind", [arguments["kind"] for arguments in OTHER_KINDS])
def test_nothing_is_dead_after_a_conversion(kind):
    """Expect gradients of the first projections of "dcmha" after a step, and of all else at once."""
    model = convert(tiny_source(), kind=kind)
    # Weights that share memory would learn as one, and cannot be saved.
    assert len({p.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    for step in range(2):
        model(torch.arange(5, 14)[None]).logits.square().sum().backward()
        assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if step or "w1" not in name)
        torch.optim.SGD(model.parameters(), lr=1e-3).step()


@pytest.mark.parametrize("name", ["mistral-sliding", "qwen3"])
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
    if name == "qwen3":
        restored = convert_back(model)
        assert restored.config.layer_types == config.layer_types
        assert_equal_logits(logits(restored), logits(model))
    else:  # the smaller window counts
        assert exact_length(source.config, iha_config(source.config, Layers(2, "hybrid", 9))) == 7
    # By default the window is the paper's.
    assert iha_config(source.config, Layers(2, "hybrid")).sliding_window == 256 // (2 * 2**2)


ORIGINAL = {"original_max_position_embeddings": 8}
ROPES = {
    **{"linear": {}, "dynamic": {}, "yarn": ORIGINAL},
    "longrope": {**ORIGINAL, "short_factor": [1.0, 1.5, 2, 3], "long_factor": [1.0, 2, 4, 8]},
    "llama3": {**ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_every_rope_type_is_carried_over(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 100.0, "factor": 4.0, **ROPES[rope_type]}
    source = tiny_source(rope_parameters=rope, max_position_embeddings=12)
    plain = tiny_source(rope_parameters={"rope_theta": 100.0, "rope_type": "default"}, max_position_embeddings=12)
    expected = logits(source)
    assert (expected - logits(plain)).abs().max() > 1e-2, "the RoPE type makes no difference here"
    assert_equal_logits(logits(convert(source, 3)), expected)


def test_offsets_balance_and_set_the_pseudo_heads_apart():
    source = tiny_source()

    def v_mix(layer=2, **arguments):
        return convert(source, 3, **arguments).model.layers[layer].self_attn.v_mix.value()

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
        (lambda config: CONFIG_MAPPING["phi3"](), "^The architecture 'phi3' .*import interleave_heads"),
        (lambda config: CONFIG_MAPPING["diffllama"](), "use `python -m conversion_scripts.convert_diffllama_to_iha`"),
        (lambda config: setattr(config, "attn_logit_softcapping", 50.0), "attn_logit_softcapping=50.0"),
        (lambda config: setattr(config, "is_causal", False), "is_causal=False"),
        (lambda config: setattr(config, "sliding_window", 9), "sliding_window=9"),
        (lambda config: setattr(config, "quantization_config", {"bits": 4}), "weights of the source are quantized"),
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
        iha_config(config, Layers(2))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_pseudo_heads": 0}, "num_pseudo_heads=0"),
        ({"num_pseudo_heads": 2, "window": 8}, "the global schedule has no window"),
        ({"num_pseudo_heads": 2, "schedule": "hybrid", "window": 257}, "window=257: expected at most .* 256 tokens"),
        ({"num_pseudo_heads": 9, "schedule": "hybrid"}, "num_pseudo_heads=9 leaves no window .*: give --window"),
        ({"num_pseudo_heads": 2, **TALKING_HEADS}, "'talking_heads' has no pseudo-heads"),
        ({"kind": "diff_v2", "mixing_scale": 3.0}, "'diff_v2' with these options has no weights that mix heads"),
        ({"kind": "mha"}, "kind 'mha' without a gate is what the source has: give --output-gate"),
        ({"kind": "diff"}, "kind='diff' has no exact start"),
        ({"kind": "knocking_heads", "options": {"every": 4}}, "unexpected keyword argument 'every'"),
    ],
    ids=str,
)
def test_arguments_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        convert(tiny_source(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "paper"}, "schedule='paper': expected 'global' or 'hybrid'"),
        ({"num_pseudo_heads": "2"}, "num_pseudo_heads='2': expected a valid integer"),
    ],
)
def test_a_program_may_give_no_other_types_than_the_command(arguments, message, tmp_path):
    with pytest.raises(UserError, match=message):
        api.convert("source", tmp_path / "iha", **{"num_pseudo_heads": 2, **arguments})


def test_offsets_of_pseudo_heads_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(UserError, match="kind 'diff_v2' has no pseudo-heads, whose values could differ"):
        api.convert("source", tmp_path / "iha", kind="diff_v2", value_offsets="none")


def test_the_command_adds_a_gate(tmp_path):
    save_tiny_source(tmp_path / "source")
    words = [str(tmp_path / "source"), str(tmp_path / "iha"), "--kind", "mha", "--output-gate", "per_head"]
    cli.call(api.convert, words)
    model = load_model(find_source(tmp_path / "iha"))
    assert (model.config.attention_kinds[0], model.config.output_gate) == ("mha", "per_head")
    assert "to attention of kind 'mha' with an output gate (per_head)" in (tmp_path / "iha" / "README.md").read_text()
    with pytest.raises(UserError, match="output_gate='per_head', which no stock architecture computes"):
        convert_back(model)


def test_a_whole_number_scales_the_mixing(tmp_path):
    save_tiny_source(tmp_path / "source")
    api.convert(str(tmp_path / "source"), tmp_path / "iha", 2, mixing_scale=8)
    assert load_model(find_source(tmp_path / "iha")).config.mixing_scale == 8


# And back


def test_collapse_over_all_heads_goes_back():
    model = convert(tiny_source(), 3)
    config = copy.deepcopy(model.config)
    config.pseudo_collapse, config.mixing_scale = "all_heads", 1.0
    wide = IHAForCausalLM(config).eval()
    wide.load_state_dict(
        {name: t for name, t in state_with_values(model).items() if "collapse" not in name}, strict=False
    )
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.collapse"):
        convert_back(wide)
    for layer in wide.model.layers:
        layer.self_attn.collapse.weight.data = last_pseudo_head(4, 3, "all_heads")
    assert_equal_logits(logits(wide), logits(model))
    assert torch.equal(logits(convert_back(wide)), logits(convert_back(model)))


@pytest.mark.parametrize(("collapse", "positions"), [("per_head", "interleaved"), ("all_heads", "shared")])
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


@pytest.mark.parametrize(
    "name, step, moved",
    [
        *((name, 2**-6, "0.016") for name in ("q_mix", "k_mix", "v_mix", "collapse")),
        ("v_mix", float("nan"), "nan"),
    ],
)
def test_a_parameter_that_moved_is_named(name, step, moved):
    model = convert(tiny_source(), **P3)
    with torch.no_grad():
        for layer in (5, 3):
            getattr(model.model.layers[layer].self_attn, name).weight.view(-1)[1] += step / model.config.mixing_scale
    with pytest.raises(UserError, match=rf"^model.layers.3.self_attn.{name}.weight has moved by up to {moved} from"):
        convert_back(model)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"attention_kinds": "mha", "gated_mlp": False, "use_qk_norm": True}, "gated_mlp=False"),
        ({"attention_kinds": "mha", "mlp_gate_groups": 4}, "mlp_gate_groups=4"),
        ({"attention_kinds": "talking_heads"}, "Layer 0 is of kind 'talking_heads'"),
        ({"attention_kinds": "mha", "output_gate": "per_head"}, "output_gate='per_head', which no stock architecture"),
        ({"attention_kinds": "mha", "exclusive_attention": True}, "exclusive_attention=True, which no stock"),
        ({"attention_kinds": "mha", "no_rope_layers": [1, 0], "use_qk_norm": True}, r"no_rope_layers=\[1, 0\]"),
        ({"pseudo_positions": "interleaved"}, "pseudo_positions='interleaved'"),
        ({**LOCAL_ROPE, "attention_kinds": "mha"}, "layers with a window have a separate RoPE"),
    ],
)
def test_no_stock_architecture_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        convert_back(IHAForCausalLM(IHAConfig.from_preset("tiny", **fields)))


def test_trained_output_bias_is_not_dropped():
    model = convert(tiny_source("qwen2-sliding"), 2)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.bias[0] = 0.5
    restored = convert_back(model)
    assert type(restored) is SmolLM3ForCausalLM, "a Qwen2 has no such bias"
    assert_equal_logits(logits(restored), logits(model))


@pytest.mark.parametrize(("dtype", "moved"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)])
def test_a_fold_that_rounds_weights_is_announced(dtype, moved, capsys):
    model = convert(tiny_source(dtype=dtype), 1)
    for layer in model.model.layers if moved else ():
        torch.nn.init.normal_(layer.self_attn.v_mix.weight, std=0.01)
    convert_back(model)
    assert ("rounded in torch.bfloat16: convert with --dtype float32" in capsys.readouterr().err) == (
        moved and dtype == torch.bfloat16
    )


# The commands


class Road(NamedTuple):
    """Hold a source's name, the command that converts it, and a parameter of the conversion."""

    source: str
    there: ModuleType
    options: tuple
    parameter: str


LLAMA = Road("qwen2-sliding", convert_llama_to_iha, ("--num-pseudo-heads", "2"), "k_mix.weight")
DIFFLLAMA = Road("diffllama", convert_diffllama_to_iha, (), "lambda_k2")


@pytest.fixture(scope="module")
def travel(tmp_path_factory):
    """Return a function that makes a folder with a road's source, and with what its command makes of it."""

    @cache
    def travel(road):
        folder = tmp_path_factory.mktemp(road.source)
        save_tiny_source(folder / "source", road.source, torch.bfloat16, max_shard_size="10KB")
        (folder / "source" / "README.md").write_text("---\nlicense: mit\n---\nA model.\n")
        code = {"AutoTokenizer": ["tokenization_x.X", None]}
        edit_config(folder / "source", "tokenizer_config.json", auto_map=code)
        road.there.main([str(folder / "source"), str(folder / "iha"), *road.options])
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
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((converted / "iha" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["model_type"] == "iha"
    tokenizer = AutoTokenizer.from_pretrained(converted / "iha")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    # It is saved as what it was read as, because the code that its source names is not copied.
    assert "auto_map" not in json.loads((converted / "iha" / "tokenizer_config.json").read_text())
    ours = GenerationConfig.from_pretrained(converted / "iha")
    assert (ours.eos_token_id, ours.max_length) == ([2, 3], 77)
    card = (converted / "iha" / "README.md").read_text()
    assert "license: mit" in card and "for sequences of any length" in card and str(converted) not in card


@pytest.mark.parametrize(
    ("stated", "kept"),
    [
        ("base_model: me/base", "base_model: me/base"),
        ("tags:\n- trained-from-scratch", "- trained-from-scratch"),
    ],
)
def test_a_card_keeps_what_that_of_a_local_source_says(stated, kept, converted, tmp_path):
    source = shutil.copytree(converted / "source", tmp_path / "source")
    (source / "README.md").write_text(f"---\n{stated}\n---\nA model.\n")
    convert_llama_to_iha.main([str(source), str(tmp_path / "iha"), *LLAMA.options])
    card = (tmp_path / "iha" / "README.md").read_text()
    assert f"\n{kept}\n" in card and ("base_model" in card) == ("base_model" in stated)


@pytest.mark.parametrize("convert", [api.convert, api.convert_back, api.convert_dcformer, api.convert_diffllama])
def test_a_source_that_is_missing_leaves_no_directory(convert, tmp_path):
    options = {"num_pseudo_heads": 2} if convert is api.convert else {}
    with pytest.raises(UserError, match="nosuch is not a directory"):
        convert(tmp_path / "nosuch", tmp_path / "new" / "iha", **options)
    assert not list(tmp_path.iterdir())


def test_clean_process_refuses_what_does_not_load(converted, tmp_path, monkeypatch):
    """Run the program of the clean process in this one, whose import of PyTorch is done."""

    def run_here(program, request, **_):
        with pytest.raises(SystemExit) as refused:
            exec(program, {"request": request})
        raise UserError(str(refused.value))

    leaks = "print('why\\nnanobind: leaked 4 types!\\n - a', file=sys.stderr); raise SystemExit(1)"
    for program in ("raise SystemExit('where\\nwhy')", leaks):
        with pytest.raises(UserError, match="^why$"):
            run_in_clean_process(program, {})
    monkeypatch.setattr(processes, "run_in_clean_process", run_here)
    broken = shutil.copytree(converted / "iha", tmp_path / "broken")
    edit_weights(broken, lambda w: w.pop("model.layers.4.self_attn.collapse.weight"))
    with pytest.raises(
        UserError, match=r"not load in a clean process: missing_keys: .*layers\.4\.self_attn\.collapse"
    ):
        load_in_clean_process(broken)


VERIFY = ("--tokens", 40, "--max-new-tokens", 20)


@pytest.mark.parametrize(
    "road, control",
    [pytest.param(LLAMA, 0.1, id="llama"), pytest.param(DIFFLLAMA, 0.01, marks=pytest.mark.slow, id="diffllama")],
)
def test_verify_accepts_the_conversion_and_refuses_a_changed_one(road, control, travel, tmp_path, cli):
    """Decode greedily, whatever the checkpoints ask for."""
    folder, figures = shutil.copytree(travel(road), tmp_path / "both"), tmp_path / "figures.json"
    for model in ("source", "iha"):
        settings = {"stop_strings": ["x"], "return_dict_in_generate": True, "max_time": 1e-6, "num_beams": 2}
        edit_config(folder / model, "generation_config.json", **settings)
    verify = (verify_script, folder / "source", folder / "iha", *VERIFY)
    code, out, err = cli(*verify, "--json", figures)
    assert code == 0 and "exact up to rounding" in out, err
    figures = json.loads(figures.read_text())
    assert figures["converted"]["passed"] and figures["converted"]["max_logit_difference"] < 2e-5
    assert figures["converted"]["mean_kl"] < 1e-8
    assert figures["converted"]["greedy_agreement"] == figures["converted"]["greedy_tokens"] == 20
    assert not figures["control"]["passed"] and figures["control"]["max_logit_difference"] > control
    assert figures["control"]["mean_kl"] > control / 100

    edit_weights(folder / "iha", lambda w: w[f"model.layers.5.self_attn.{road.parameter}"].view(-1)[3].add_(0.5))
    code, out, err = cli(*verify)
    assert code == 1 and "converted" in out and "does not compute what" in last_line(err)
    assert "rounded" not in err
    for model, dtype in (("source", "float32"), ("iha", "bfloat16")):
        edit_config(folder / model, dtype=dtype)
    assert "Its weights were rounded to torch.bfloat16" in last_line(cli(*verify)[2])


@pytest.mark.parametrize(
    "stored, loaded, pickled", [(torch.float16, "bfloat16", False), (torch.bfloat16, "float16", True)]
)
def test_weights_that_the_dtype_of_the_config_rounds_are_named(stored, loaded, pickled, tmp_path, cli):
    """Convert files whose config names another dtype, in which a load silently rounds them; then keep them."""
    source = save_tiny_source(tmp_path / "source", dtype=stored)
    if pickled:
        (tmp_path / "source" / "model.safetensors").unlink()
        torch.save(source.state_dict(), tmp_path / "source" / "pytorch_model.bin")
    edit_config(tmp_path / "source", dtype=loaded)
    for options, said in (([], True), (["--dtype", "float32"], False)):
        out = tmp_path / f"iha{len(options)}"
        code, _, err = cli(convert_llama_to_iha, tmp_path / "source", out, "--num-pseudo-heads", 2, *options)
        assert code == 0 and (f"torch.{loaded}, in which its config has them loaded, rounds" in err) == said, err


def test_verify_refuses_a_control_that_passes(converted, monkeypatch, cli):
    monkeypatch.setattr(verify_conversion, "break_one_parameter", lambda model: None)
    code, _, err = cli(verify_script, converted / "source", converted / "iha", *VERIFY)
    assert code == 1 and "control with a broken parameter passed" in last_line(err)


@pytest.mark.parametrize("kind", ["mha", "iha", "paired_heads", "diff", "dcmha"])
def test_every_control_breaks_something(kind):
    model = random_model(small_config(attention_kinds=kind))
    tokens = random_ids(1, 9)
    before = uncached_logits(model, tokens)
    verify_conversion.break_one_parameter(model)
    assert (uncached_logits(model, tokens) - before).abs().max() > 1e-3


def test_a_control_breaks_a_paired_decoder():
    paired, tokens = pair_heads(decoder("llama"), 2), random_ids(1, 9)
    before = uncached_logits(paired, tokens)
    verify_conversion.break_one_parameter(paired)
    assert (uncached_logits(paired, tokens) - before).abs().max() > 1e-3


def test_a_control_breaks_a_decoder_of_images():
    """Its text decoder, whose configuration is a part of the model's, has the interleaved layers."""
    model, tokens = interleave_heads(tiny_model("gemma3", MULTIMODAL), 2), random_ids(1, 9)
    before = uncached_logits(model, tokens)
    verify_conversion.break_one_parameter(model)
    assert (uncached_logits(model, tokens) - before).abs().max() > 1e-3
    assert described(model.config).attention_kinds == ["iha", "iha"]


def test_verify_a_hybrid_within_its_window(tmp_path, cli):
    source = save_tiny_source(tmp_path / "source")
    options = ("--num-pseudo-heads", 2, "--schedule", "hybrid", "--window", 24, "--dtype", "bfloat16")
    code, out, _ = cli(convert_llama_to_iha, tmp_path / "source", tmp_path / "iha", *options)
    assert code == 0 and "windows are 24 of 256 tokens" in out and "at most 24 tokens; longer ones differ" in out
    assert "at most 24 tokens" in (tmp_path / "iha" / "README.md").read_text()
    source.bfloat16().save_pretrained(tmp_path / "source")
    check = (verify_script, tmp_path / "source", tmp_path / "iha", "--json", tmp_path / "figures.json")
    code, out, err = cli(*check, "--tokens", 60, "--max-new-tokens", 20)
    assert code == 0 and "uses 24 tokens and decodes the last 12" in out, err
    assert "exact up to rounding, for sequences of at most 24 tokens; longer ones differ." in out
    [beyond] = re.findall(r"^after 24 +(\S+).*differs, as expected from its windows", out, re.MULTILINE)
    assert float(beyond) > 0.01 and json.loads((tmp_path / "figures.json").read_text())["tokens"] == 24


def test_an_interleaved_decoder_is_exact_up_to_the_shortest_window():
    source = decoder("mistral", sliding_window=600)
    config = interleave_heads(copy.deepcopy(source), 2).config
    assert exact_length(source.config, config) is None
    config.sliding_window = 550
    assert exact_length(source.config, config) == 550
    config.interleaved_window = 20
    assert exact_length(source.config, config) == 20


def test_verify_returns_and_writes_up_to_which_length_another_window_is_exact(tmp_path):
    save_tiny_source(tmp_path / "source", "mistral-sliding")
    api.convert(tmp_path / "source", tmp_path / "iha", 2)
    figures = tmp_path / "figures.json"
    for window, tokens, length in ((7, 40, None), (30, 40, 7), (30, 6, 7)):
        edit_config(tmp_path / "iha", sliding_window=window)
        results = api.verify(tmp_path / "source", tmp_path / "iha", tokens=tokens, max_new_tokens=3, json=figures)
        assert results["converted"].passed and results["converted"].exact_length == length
        assert json.loads(figures.read_text())["converted"]["exact_length"] == length


@pytest.mark.parametrize(
    "edit, message",
    [
        (
            lambda w: [w[f"model.layers.0.self_attn.{name}_proj.weight"].mul_(1e25) for name in "qk"],
            "itself gives NaN or infinity",
        ),
        (lambda w: w["lm_head.weight"].mul_(1e5), None),  # large logits round by more than small ones
    ],
)
def test_verify_says_where_the_source_is_at_fault(edit, message, tmp_path, cli):
    save_tiny_source(tmp_path / "source", "mistral")
    code, _, err = cli(convert_llama_to_iha, tmp_path / "source", tmp_path / "iha", "--num-pseudo-heads", 2)
    assert code == 0, err
    for model in ("source", "iha"):
        edit_weights(tmp_path / model, edit)
    code, _, err = cli(verify_script, tmp_path / "source", tmp_path / "iha", *VERIFY)
    assert (code == 1 and message in last_line(err)) if message else code == 0, err


@pytest.mark.parametrize("road", [LLAMA, DIFFLLAMA], ids=["llama", "diffllama"])
def test_back_conversion_command(road, travel, tmp_path, cli):
    folder, source = travel(road), AutoModelForCausalLM.from_pretrained(travel(road) / "source", dtype="auto")
    code, out, _ = cli(convert_iha_to_llama, folder / "iha", tmp_path / "back")
    assert code == 0 and type(source).__name__ in out
    restored = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    assert type(restored) is type(source) and restored.dtype == torch.bfloat16
    assert torch.equal(logits(restored), logits(source))
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == CHAT_TEMPLATE
    code, _, err = cli(convert_iha_to_llama, tmp_path / "back", tmp_path / "again")
    assert code == 1 and "expected 'iha'" in last_line(err) and not (tmp_path / "again").exists()
    edit_config(quantized := shutil.copytree(folder / "iha", tmp_path / "quantized"), quantization_config={"bits": 8})
    code, _, err = cli(convert_iha_to_llama, quantized, tmp_path / "again")
    assert code == 1 and "quantized are quantized: take the checkpoint" in last_line(err)


# Bad input


@pytest.mark.parametrize(
    "architecture, what, add",
    [
        ("llama", "rope_freqs.weight", lambda file: file.add_tensor("rope_freqs.weight", np.ones(4, np.float32))),
        ("llama", "blk.0.attn_q.bias", lambda file: file.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32))),
        ("qwen2", "rope.scaling.factor", lambda file: file.add_rope_scaling_factor(4.0)),
        ("phi3", "attention.sliding_window", lambda file: file.add_sliding_window(2047)),
        ("phi3", "rope.dimension_count=6", lambda file: file.add_rope_dimension_count(6)),
        # Fields that change nothing are not rejected, and the weights are looked for.
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


def test_a_source_without_a_tokenizer_converts_there_and_back(tmp_path, cli):
    """Convert a source from whose config alone Transformers builds a tokenizer, which knows no word."""
    source = tiny_source("qwen2-tied")
    source.save_pretrained(tmp_path / "source")
    for module, *arguments in (
        (convert_llama_to_iha, tmp_path / "source", tmp_path / "iha", "--num-pseudo-heads", 2),
        (convert_iha_to_llama, tmp_path / "iha", tmp_path / "back"),
    ):
        code, _, err = cli(module, *arguments)
        assert code == 0 and "holds no tokenizer" in err, err
        assert not list(arguments[1].glob("tokenizer*"))
    assert_equal_logits(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "back")), logits(source))


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("GemmaTokenizer", {}),
        ("Qwen2Tokenizer", {"0": {"content": "<|im_end|>", "special": True}, "1": {"content": "<think>"}}),
    ],
)
def test_a_tokenizer_that_knows_no_word_is_refused(name, added, tmp_path):
    """Reject what Transformers builds from a tokenizer_config.json alone: no text has ids, or all are unknown."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    settings = {"tokenizer_class": name, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="no usable tokenizer: it knows no word, .* such as tokenizer.json, next to"):
        load_tokenizer(find_source(tmp_path), 61)
    save_tiny_source(tmp_path)
    assert load_tokenizer(find_source(tmp_path), 61)("the")["input_ids"]


def test_a_tokenizer_of_other_words_is_taken(tmp_path):
    """A vocabulary of one's own may know no English word."""
    words = models.WordLevel({"[UNK]": 0, "plus": 1, "zwei": 2}, unk_token="[UNK]")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="[UNK]").save_pretrained(tmp_path)
    assert load_tokenizer(find_source(tmp_path), 61)("zwei")["input_ids"] == [2]


def test_no_number_of_the_mixing_is_nan(tmp_path, converted):
    """Look at the starts of the mixing too, which are buffers."""
    broken = shutil.copytree(converted / "iha", tmp_path / "broken")
    edit_weights(broken, lambda weights: weights["model.layers.0.self_attn.v_mix.weight_start"].fill_(torch.nan))
    with pytest.raises(UserError, match="v_mix.weight_start of .* holds NaN or infinity"):
        load_model(find_source(broken))


# Real weights


@pytest.mark.slow  # `make demo` converts and verifies them too
@pytest.mark.parametrize("num_pseudo_heads", [2, 3, 4])
def test_real_weights(num_pseudo_heads, tmp_path, monkeypatch, cli):
    try:
        source = smollm2_gguf()
    except UserError as missing:
        pytest.skip(str(missing))
    # The header takes seconds to read, and config, tokenizer, license and weights each read it again.
    monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
    # Transformers asks for the same map once for every module of the model.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    code, _, err = cli(convert_llama_to_iha, source, tmp_path / "iha", "--num-pseudo-heads", num_pseudo_heads)
    assert code == 0, err
    assert "license: apache-2.0" in (tmp_path / "iha" / "README.md").read_text()
    chat = AutoTokenizer.from_pretrained(tmp_path / "iha").apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    lengths = ("--tokens", 64, "--max-new-tokens", 6)
    code, _, err = cli(verify_script, source, tmp_path / "iha", *lengths, "--json", tmp_path / "figures")
    assert code == 0, err
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["tokens"] == 64 and figures["converted"]["greedy_tokens"] == 6
