"""Hold what every attention kind promises beyond what test_drawn.py compares: precision, training, options, loading.

The kinds are the entries of `ATTENTION_CLASSES`: nothing here names one."""

from dataclasses import fields, is_dataclass

import pytest
import torch
from helpers import (
    BF16_GRADIENT,
    BF16_OUTPUT,
    EVERY_KIND,
    HALVES,
    LOCAL_ROPE,
    assert_attention_matches,
    random_ids,
    random_model,
    set_core,
    small_config,
    uncached_logits,
)
from mechanism_checks import all_mechanisms

from iha.processes import run_in_clean_process
from modeling_iha.configuration_iha import OPTIONS_CLASSES
from modeling_iha.modeling_iha import ATTENTION_CLASSES


MECHANISMS = list(all_mechanisms())
OF_EACH_KIND = {mechanism.kind: mechanism for mechanism in MECHANISMS}
mechanisms = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)

LENGTH = 7
# Root mean squares of the difference over that of the logits. Seen: 0.034 and 0.0099 of "dcmha", which norms vectors
# of few entries; 0.017 and 0.0016 of the others.
HALF_PRECISION = {torch.bfloat16: 0.05, torch.float16: 0.016}
# None of them is allowed by every option, and every option allows at most two.
NONSENSE = [-1, 0, 0.5, float("nan"), "nonsense", [0, 1], {}, None, True]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("window", [None, 3])
@mechanisms
def test_layer_in_bfloat16(mechanism, window):
    config = mechanism.config(window, num_hidden_layers=1)
    assert_attention_matches(config, BF16_OUTPUT, BF16_GRADIENT, dtype=torch.bfloat16, length=7, seed=1)


# Precision, training, checkpoints


@pytest.mark.one_of(4)
@pytest.mark.parametrize("how", ["loaded", "autocast"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@mechanisms
def test_half_precision(mechanism, dtype, how):
    """Compare logits with those in float32, and see finite gradients: "loaded" in the dtype, or under "autocast"."""
    config, input_ids = mechanism.hybrid_config(use_qk_norm=True), random_ids(2, 13)
    expected = uncached_logits(random_model(config), input_ids)
    model = random_model(config, dtype=dtype if how == "loaded" else torch.float32)
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        output = model(input_ids, labels=input_ids, use_cache=False)
    assert output.logits.dtype == dtype
    assert (output.logits.float() - expected).norm() < HALF_PRECISION[dtype] * expected.norm()
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("mechanism", OF_EACH_KIND.values(), ids=str)
def test_attention_weights_have_gradients(mechanism):
    if mechanism.kind in ("hyper", "simplicial"):
        pytest.skip("the weights returned are sums over pairs, which the output does not depend on")
    model = random_model(mechanism.hybrid_config())
    model.set_attn_implementation("eager")
    output = model(random_ids(2, 9), output_attentions=True, use_cache=False)
    for weights in output.attentions:
        weights.retain_grad()
    output.logits.square().sum().backward()
    assert all(weights.grad.any() for weights in output.attentions)


@pytest.mark.parametrize("window", [None, 3])
@mechanisms
def test_attention_is_dropped_in_training_alone(mechanism, window, monkeypatch):
    """Mechanisms without weights of one softmax to drop reject `attention_dropout`."""
    plain = random_model(mechanism.config(window))
    try:
        dropping = random_model(mechanism.config(window, attention_dropout=0.5))
    except Exception as error:
        assert mechanism.kind == "diff" or "linear=True" in str(error)
        assert "attention_dropout=0.5" in str(error) and "set it to 0" in str(error)
        return
    dropping.load_state_dict(plain.state_dict())
    input_ids = random_ids(2, LENGTH)
    assert torch.equal(uncached_logits(dropping, input_ids), uncached_logits(plain, input_ids))
    shares = []
    for name, argument in (("dropout", "p"), ("scaled_dot_product_attention", "dropout_p")):
        function = getattr(torch.nn.functional, name)

        def watched(*args, function=function, argument=argument, **kwargs):
            shares.append(kwargs[argument])
            return function(*args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, name, watched)
    learned = [dropping.train()(input_ids, use_cache=False).logits.detach() for _ in range(2)]
    assert (learned[0] - learned[1]).abs().max() > 0.01 and set(shares) == {0.5}


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


# Options


def refusal(kind, options):
    """Return the error for these options of the kind, None if they are accepted."""
    try:
        small_config(attention_kinds=kind, attention_options={kind: options})
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("kind", ATTENTION_CLASSES)
def test_options(kind):
    """See nonsense rejected for every option, by its name."""
    options = OPTIONS_CLASSES[kind]
    for option in fields(options) if is_dataclass(options) else ():
        reasons = {str(value): refusal(kind, {option.name: value}) for value in NONSENSE}
        refused = {value: reason for value, reason in reasons.items() if reason is not None}
        assert len(refused) >= len(NONSENSE) - 2, reasons
        assert all(option.name in reason for reason in refused.values()), refused
    assert ("unheard_of" if is_dataclass(options) else repr(kind)) in refusal(kind, {"unheard_of": 1})
    assert refusal(kind, 3) is not None


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
    configs = {name: mechanism.hybrid_config() for name, mechanism in OF_EACH_KIND.items()}
    configs |= {"all": small_config(**EVERY_KIND), "local_rope": small_config(num_pseudo_heads=3, **LOCAL_ROPE)}
    configs["additions"] = small_config(output_gate="elementwise", exclusive_attention=True)
    for name, config in configs.items():
        model = random_model(config)
        model.save_pretrained(tmp_path / name)
        directories[name], expected[name] = str(tmp_path / name), uncached_logits(model, input_ids)
    logits = run_in_clean_process(PROGRAM, {"directories": directories, "input_ids": input_ids.tolist()})
    assert logits.keys() == expected.keys()
    for name in expected:
        assert torch.equal(torch.tensor(logits[name]), expected[name])
