"""Compare every attention kind, with its default and its example options, with its reference and in every use.

The kinds are the entries of `ATTENTION_CLASSES`: nothing here names one."""

import mechanism_checks as checks
import pytest
import torch
from helpers import CORES, EVERY_KIND, HALVES, random_ids, random_model, set_core, small_config, uncached_logits

from iha_io.checkpoint_io import run_in_clean_process
from modeling_iha.attention_kinds import ATTENTION_CLASSES


MECHANISMS = list(checks.all_mechanisms())
mechanisms = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
in_every_form = pytest.mark.parametrize(
    ("mechanism", "form"), [(mechanism, form) for mechanism in MECHANISMS for form in mechanism.forms()], ids=str
)
on_every_core = pytest.mark.parametrize(
    ("mechanism", "core"),
    [(mechanism, core) for mechanism in MECHANISMS for core in CORES if core != "base" or core in mechanism.forms()],
    ids=str,
)


@pytest.mark.parametrize(("window", "length"), checks.LENGTHS)
@in_every_form
def test_layer(mechanism, window, length, form):
    checks.check_layer(mechanism, window, length, form=form)


@pytest.mark.parametrize(("core", "window", "inputs"), checks.BLOCKS, ids=str)
@mechanisms
def test_layer_in_blocks(small_blocks, mechanism, core, window, inputs):
    checks.check_blocks(mechanism, core, window, inputs)


@pytest.mark.parametrize("window", [None, 3])
@in_every_form
def test_layer_in_bfloat16(mechanism, window, form):
    checks.check_bfloat16(mechanism, window, form)


@mechanisms
def test_layer_without_grouped_queries(mechanism):
    checks.check_layer(mechanism, None, 5, num_key_value_heads=4)


@mechanisms
def test_layer_with_qk_norm_and_biases(mechanism):
    checks.check_layer(mechanism, None, 5, use_qk_norm=True, attention_bias=True)


@pytest.mark.parametrize("inputs", checks.INPUTS)
@on_every_core
def test_core(cpu_cores, mechanism, core, inputs):
    checks.check_core(mechanism, core, inputs)


@pytest.mark.parametrize(("window", "chunks"), checks.WINDOWS_AND_CHUNKS, ids=str)
@in_every_form
def test_cache(mechanism, window, chunks, form):
    checks.check_cache(mechanism, window, chunks, form)


@pytest.mark.parametrize("window", [None, 3])
@mechanisms
def test_cache_in_blocks(small_blocks, mechanism, window):
    checks.check_cache(mechanism, window, [1, 9, 1, 6])


@on_every_core
def test_cache_on_core(cpu_cores, mechanism, core):
    checks.check_cache_on_core(mechanism, core)


@pytest.mark.parametrize("how", ["loaded", "autocast"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@mechanisms
def test_half_precision(mechanism, dtype, how):
    checks.check_half_precision(mechanism, dtype, how)


@mechanisms
def test_round_trip(mechanism, tmp_path):
    checks.check_round_trip(mechanism, tmp_path)


@pytest.mark.parametrize("mechanism", {mechanism.kind: mechanism for mechanism in MECHANISMS}.values(), ids=str)
def test_learning(mechanism):
    checks.check_learning(mechanism)


@mechanisms
def test_a_layer_of_another_model_starts_from_weights(mechanism):
    """Build a layer that no model initialises, while PyTorch fills new memory with NaN."""
    config = mechanism.config()
    torch.use_deterministic_algorithms(True)
    try:
        layer = ATTENTION_CLASSES[mechanism.kind](config, 0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name, weight in layer.named_parameters() if not weight.isfinite().all()] == []


@mechanisms
def test_adapters(mechanism, tmp_path):
    checks.check_adapters(mechanism, tmp_path)


@pytest.mark.parametrize("kind", ATTENTION_CLASSES)
def test_options(kind):
    checks.check_options(kind)


@pytest.mark.parametrize("form", ["base", "sdpa"])
@pytest.mark.parametrize("positions", ["interleaved", "shared"])
def test_layers_without_rope_have_no_position(positions, form):
    """Compare layers without RoPE, of every kind, with layers whose RoPE has the frequency 0."""
    geometry = {**EVERY_KIND, "pseudo_positions": positions}
    kinds = len(EVERY_KIND["attention_kinds"])
    model = random_model(small_config(**geometry, no_rope_layers=[0] * kinds))
    rotated = random_model(small_config(**geometry))
    for each in (model, rotated):
        set_core(each, form)
    input_ids, prompt = random_ids(2, 9), random_ids(2, 5)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert (uncached_logits(model, input_ids) - uncached_logits(rotated, input_ids)).abs().max() > 1e-2
    rotated.model.rotary_emb.inv_freq.zero_()
    torch.testing.assert_close(uncached_logits(model, input_ids), uncached_logits(rotated, input_ids))
    assert torch.equal(model.generate(prompt, **options), rotated.generate(prompt, **options))


@pytest.mark.parametrize("layer", [0, 1])
def test_only_the_layers_named_go_without_rope(layer):
    """Change the positions of the model's only layer with RoPE, and of its only layer without."""
    model = random_model(small_config(no_rope_layers=[1, 0]))
    attention, states = model.model.layers[layer].self_attn, torch.randn(1, 5, 32)
    outputs = [
        attention(states, model.model.rotary_emb.tables(states, torch.arange(0, 5 * step, step)[None]))[0]
        for step in (1, 3)
    ]
    assert torch.equal(*outputs) == (layer == 1)


PROGRAM = """
import json
import torch
from transformers import AutoModelForCausalLM

result = {}
for name, directory in request["directories"].items():
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    with torch.no_grad():
        result[name] = model(torch.tensor(request["input_ids"]), use_cache=False).logits.tolist()
"""


def test_remote_code(tmp_path):
    """Compare logits with those of a process that has the checkpoint's own code only."""
    input_ids, expected, directories = random_ids(2, 5), {}, {}
    of_each_kind = {mechanism.kind: mechanism for mechanism in MECHANISMS}
    configs = {name: mechanism.hybrid_config() for name, mechanism in of_each_kind.items()}
    for name, config in (configs | {"all": small_config(**EVERY_KIND)}).items():
        model = random_model(config)
        model.save_pretrained(tmp_path / name)
        directories[name], expected[name] = str(tmp_path / name), uncached_logits(model, input_ids)
    logits = run_in_clean_process(PROGRAM, {"directories": directories, "input_ids": input_ids.tolist()})
    assert logits.keys() == expected.keys()
    for name in expected:
        assert torch.equal(torch.tensor(logits[name]), expected[name])
