"""Kind "diff" against the loops of `references/diff.py` and against Transformers' DiffLlama, which it equals on every
core."""

import pytest
import torch
from helpers import (
    BF16_GRADIENT,
    BF16_OUTPUT,
    FP32,
    FP64,
    LLAMA,
    assert_attention_matches,
    assert_gradients_match,
    gradients,
    learn_one_batch,
    logits_in_chunks,
    packing,
    padding,
    random_ids,
    random_model,
    reference_logits,
    relative_error,
    reload,
    set_core,
    small_config,
    uncached_logits,
)
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from modeling_iha import IHAConfig, IHAForCausalLM, cpu_precision


CORES = ["eager", "sdpa", "flash_attention_2", "flex_attention"]
GEOMETRIES = {
    "global": {},
    "window_of_1": {"layer_types": "sliding_attention", "sliding_window": 1},
    "hybrid": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
}
DIFF_LLAMA = {field: value for field, value in LLAMA.items() if field != "mlp_bias"}


def diff_config(geometry="global", **overrides):
    """With an epsilon of the size of the squares it is added to: to a query that sees a single key lambda is a scale,
    which the norm would else take out again, and with it the gradient."""
    return small_config(**{"attention_kinds": "diff", "rms_norm_eps": 0.1, **GEOMETRIES[geometry], **overrides})


# Against the reference


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (2, 2), (6, 2)], ids="H{0[0]}G{0[1]}".format)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "gradient_tolerance"),
    [(torch.float32, FP32, FP32), (torch.float64, FP64, FP64), (torch.bfloat16, BF16_OUTPUT, BF16_GRADIENT)],
    ids=str,
)
def test_attention_matches_reference(heads, window, dtype, tolerance, gradient_tolerance):
    config = diff_config(
        hidden_size=8 * heads[0],
        num_hidden_layers=1,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        layer_types="full_attention" if window is None else "sliding_attention",
        sliding_window=window,
    )
    # Weights for which the gradient of lambda is no difference of nearly equal sums, as it is with some.
    assert_attention_matches(config, tolerance, gradient_tolerance, dtype=dtype, seed=1)


@pytest.mark.parametrize("inputs", ["plain", "padded", "packed"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("core", CORES)
def test_model_matches_reference(cpu_cores, core, geometry, inputs):
    """Window layers in blocks of queries are in test_window_blocks.py."""
    model = random_model(diff_config(geometry))
    set_core(model, core)
    # A flash core takes documents in a batch of one row only.
    input_ids = random_ids(1 if inputs == "packed" else 2, 11)
    real = torch.ones(input_ids.shape, dtype=torch.bool)
    arguments, reference = {}, {}
    if inputs == "padded":
        real[0, :3] = False
        arguments, reference = padding(real)
    if inputs == "packed":
        arguments, reference = packing((5, 1, 5), rows=len(input_ids))
    with torch.set_grad_enabled(core != "flex_attention"):  # it has no CPU backward
        logits = model(input_ids, use_cache=False, **arguments).logits
    expected, weights = reference_logits(model, input_ids, **reference)
    assert relative_error(logits[real], expected[real]) < FP32
    if logits.requires_grad:
        actual_gradients = gradients(logits[real], dict(model.named_parameters()))
        assert_gradients_match(actual_gradients, gradients(expected[real], weights), FP32)


# It is DiffLlama's attention


def of_diff_llama(source, **overrides):
    """The model with the weights of a DiffLlama."""
    model = IHAForCausalLM(IHAConfig(attention_kinds="diff", **DIFF_LLAMA, **overrides)).to(source.dtype).eval()
    model.load_state_dict(source.state_dict())
    return model


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("core", CORES)
def test_diff_layers_are_diff_llama(cpu_cores, core, dtype, autocast, monkeypatch):
    """Bit by bit: the same operations in the same order and precision, where the CPU has products of the dtype."""
    monkeypatch.setattr(cpu_precision, "SLOW_DTYPES", [])
    config = DiffLlamaConfig(**DIFF_LLAMA, rms_norm_eps=1e-6)
    source = random_model(config, DiffLlamaForCausalLM, dtype=torch.float32 if autocast else dtype)
    model = of_diff_llama(source)
    source.set_attn_implementation(core)
    set_core(model, core)
    input_ids, chunks = random_ids(2, 9), [4, 1, 1, 3]
    with torch.autocast("cpu", dtype, enabled=autocast):
        with torch.no_grad():
            logits = model(input_ids).logits
            assert torch.equal(logits, source(input_ids).logits)
            assert torch.equal(logits_in_chunks(model, input_ids, chunks), logits_in_chunks(source, input_ids, chunks))
        if core == "flex_attention":
            return  # it has no CPU backward
        model(input_ids, labels=input_ids).loss.backward()
        source(input_ids, labels=input_ids).loss.backward()
    expected = {name: parameter.grad for name, parameter in source.named_parameters()}
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all()
        assert torch.equal(parameter.grad, expected[name]), name


def test_extra_parameters():
    """Four vectors as wide as a head to a layer; the norm has no weight."""
    sizes = {kind: random_model(small_config(attention_kinds=kind)).num_parameters() for kind in ("mha", "diff")}
    assert sizes["diff"] - sizes["mha"] == 2 * 4 * 8


@pytest.mark.parametrize(("options", "expected"), [(None, 0.1), ({"diff": {"lambda_std_dev": 0.7}}, 0.7)], ids=str)
def test_lambda_starts_at_its_initial_value(options, expected):
    """Vectors near zero: lambda is near lambda_init, that is 0.2 in the first layer."""
    torch.manual_seed(0)
    model = IHAForCausalLM(diff_config(head_dim=1000, num_hidden_layers=1, attention_options=options))
    deviations = [p.std().item() for name, p in model.named_parameters() if "lambda_" in name]
    assert len(deviations) == 4 and deviations == pytest.approx([expected] * 4, rel=0.1)
    assert model.model.layers[0].self_attn.lambda_init == pytest.approx(0.2)


# Training, checkpoints, refusals


def test_a_batch_can_be_learned():
    torch.manual_seed(0)
    model = IHAForCausalLM(diff_config("hybrid"))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lambda_" in name}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    assert learn_one_batch(model, optimizer) < 0.05
    for name, value in before.items():
        assert (model.get_parameter(name) - value).abs().max() > 0.01, name


def test_round_trip(tmp_path):
    options = {"diff": {"lambda_std_dev": 0.2}}
    model = random_model(diff_config("hybrid", attention_options=options), dtype=torch.bfloat16)
    loaded = reload(model, tmp_path)
    assert loaded.config.attention_kinds == ["diff"] * 2 and loaded.config.attention_options == options
    input_ids = random_ids(2, 7)
    assert torch.equal(uncached_logits(loaded, input_ids), uncached_logits(model, input_ids))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is odd.*'diff'.*must be even"),
        ({"num_attention_heads": 3, "head_dim": 8, "num_key_value_heads": 3}, "num_key_value_heads=3 is odd"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1.*'diff'.*set it to 0"),
        ({"attention_options": {"diff": {"lambda_std_dev": -1.0}}}, "lambda_std_dev=-1.0.*number, at least 0"),
        ({"attention_options": {"diff": {"lambda_std_dev": "x"}}}, "lambda_std_dev='x'.*number, at least 0"),
        ({"attention_options": {"diff": {"lambda_std": 1.0}}}, "'lambda_std'; options of this kind: 'lambda_std_dev'"),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_refused(fields, message):
    with pytest.raises(Exception, match=f"(?s){message}"):
        diff_config(**fields)
    # Without such a layer there is nothing to split.
    if "attention_options" not in fields:
        small_config(**fields)
