"""Check what every attention kind must hold. test_mechanisms.py does so for each entry of `ATTENTION_CLASSES`."""

import json
from dataclasses import dataclass, field, fields
from functools import cache

import pytest
import torch
from helpers import (
    BF16_GRADIENT,
    BF16_OUTPUT,
    FP32,
    FP64,
    PROJECTIONS,
    assert_attention_matches,
    assert_close,
    assert_gradients_match,
    cumulative_lengths,
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
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DynamicCache, StaticCache

from modeling_iha import IHAForCausalLM
from modeling_iha.attention_kinds import ATTENTION_CLASSES
from modeling_iha.kind_options import OPTIONS_CLASSES
from modeling_iha.score_matrix import ScoreMatrixAttention


# (window, length): one token, odd lengths, and lengths around where a window begins to bind.
LENGTHS = [(None, 1), (None, 7), (2, 5), (4, 4), (4, 5), (4, 7)]
LENGTH = 7
# Root mean squares of the difference over that of the logits. Seen: 0.034 and 0.0099 of "dcmha", which norms vectors
# of few entries; 0.017 and 0.0016 of the others.
HALF_PRECISION = {torch.bfloat16: 0.05, torch.float16: 0.016}
INPUTS = ["plain", "padded", "packed"]
# (core, window, inputs) of a layer that takes its queries in blocks; None is the model's own choice of a core.
BLOCKS = [(None, window, inputs) for window in (None, 3) for inputs in INPUTS] + [("eager", 3, "packed")]
# The appended token is alone in its forward, inside and outside the window; on a cache, chunks longer and shorter than
# the window of 3.
CHUNKS = [[6, 1], [1] * LENGTH, [1, 4, 2]]
WINDOWS_AND_CHUNKS = [(None, [1, 4, 2]), (2, [6, 1]), *((3, chunks) for chunks in CHUNKS)]
# None of them is allowed by every option, and every option allows at most two.
NONSENSE = [-1, 0, 0.5, float("nan"), "nonsense", [0, 1], {}, None, True]


@dataclass(frozen=True)
class Mechanism:
    """Name an attention kind and its options."""

    kind: str
    options: dict = field(default_factory=dict, hash=False)

    def __str__(self):
        return f"{self.kind}-{'example' if self.options else 'default'}"

    def config(self, window=None, **overrides):
        """Return a `small_config` of layers of this kind, or skip the test for a window that the kind refuses.

        The epsilon of the norms is of the size of the squares that it is added to: where attention is normed, as in
        "diff", a query that sees a single key would else leave its scale no gradient.
        """
        window_fields = {} if window is None else {"layer_types": "sliding_attention", "sliding_window": window}
        options = {self.kind: self.options} if self.options else {}
        all_fields = {
            "attention_kinds": self.kind,
            "attention_options": options,
            "rms_norm_eps": 0.1,
            **window_fields,
            **overrides,
        }
        try:
            return small_config(**all_fields)
        except Exception as error:
            if all_fields.get("sliding_window") is None or "window" not in str(error):
                raise
            pytest.skip(str(error).splitlines()[-1])

    def hybrid_config(self, **overrides):
        """Return a config with a window layer below a global one, if the kind takes windows."""
        if self.kind == "multi_token":
            return self.config(**overrides)
        return self.config(layer_types=["sliding_attention", "full_attention"], sliding_window=3, **overrides)

    def forms(self):
        """Return the values of `set_core` to test: None for the model's own choice, and "base" where it differs."""
        return [None, "base"] if self.kind == "iha" else [None]

    def is_refused_on(self, core):
        """Return whether the kind needs scores that the core never builds."""
        return issubclass(ATTENTION_CLASSES[self.kind], ScoreMatrixAttention) and ("flash" in core or "flex" in core)


def all_mechanisms():
    """Yield every kind with its default options, and with its example options where it has some."""
    for kind, options in OPTIONS_CLASSES.items():
        yield Mechanism(kind)
        if options.example:
            yield Mechanism(kind, options.example)


def parameters_of(model):
    return dict(model.named_parameters())


# Against the reference


def check_layer(mechanism, window, length, form=None, **fields):
    """Compare output and gradients of one layer in float64 with the reference; `form` is a core of `set_core`."""
    config = mechanism.config(window, num_hidden_layers=1, **fields)
    assert_attention_matches(config, FP64, dtype=torch.float64, core=form, length=length)


def check_blocks(mechanism, core, window, inputs):
    """Compare output and gradients of one layer in float64 with the reference, for "plain", "padded" or "packed" rows.

    The fixture `small_blocks` has the layer take several blocks of queries."""
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :3] = False
    arguments = {"plain": ({}, {}), "padded": padding(real), "packed": packing((4, 1, 4), rows=2)}[inputs]
    config = mechanism.config(window, num_hidden_layers=1)
    # Weights for which no parameter's gradient is a difference of nearly equal sums, as that of a scale before a norm
    # can be: norms are computed in float32.
    assert_attention_matches(config, FP64, dtype=torch.float64, core=core, length=9, inputs=arguments, seed=1)


def check_bfloat16(mechanism, window, form=None):
    """Compare output and gradients of one layer in bfloat16 with the reference."""
    config = mechanism.config(window, num_hidden_layers=1)
    assert_attention_matches(config, BF16_OUTPUT, BF16_GRADIENT, dtype=torch.bfloat16, core=form, length=7, seed=1)


@cache
def _reference(config_json, inputs):
    """Return a model, input ids, arguments of a forward pass, the tokens that count, and what is expected there."""
    model = random_model(small_config(**json.loads(config_json)))
    # A flash core takes documents in a batch of one row only.
    input_ids = random_ids(1 if inputs == "packed" else 2, LENGTH)
    real, of_model, of_reference = torch.ones(input_ids.shape, dtype=torch.bool), {}, {}
    if inputs == "padded":
        real[0, :3], real[1, -2:] = False, False
        of_model, of_reference = padding(real)
    if inputs == "packed":
        of_model, of_reference = packing((3, 1, 3))
        of_model |= cumulative_lengths((3, 1, 3))
    expected, weights = reference_logits(model, input_ids, **of_reference)
    return model, input_ids, of_model, real, expected[real].detach(), gradients(expected[real], weights)


def check_core(mechanism, core, inputs):
    """Compare logits and gradients of a model in float32, or see a core refused that never builds the scores.

    Such a core is refused in a forward pass and where a model is loaded with it."""
    config = mechanism.hybrid_config()
    names = ("attention_kinds", "attention_options", "rms_norm_eps", "layer_types", "sliding_window")
    stated = json.dumps({name: getattr(config, name) for name in names})
    model, input_ids, of_model, real, expected, expected_gradients = _reference(stated, inputs)
    set_core(model, core)
    if mechanism.is_refused_on(core):
        refused = pytest.raises(
            ValueError, match=f"{mechanism.kind!r} changes the scores.*'{core}' never builds: use 'sdpa' or 'eager'"
        )
        with refused:
            model(input_ids, use_cache=False, **of_model)
        with refused:
            weights = model.state_dict()
            IHAForCausalLM.from_pretrained(None, config=config, state_dict=weights, attn_implementation=core)
        return
    with torch.set_grad_enabled(core != "flex_attention"):  # it has no CPU backward
        logits = model(input_ids, use_cache=False, **of_model).logits
    assert relative_error(logits[real], expected) < FP32
    if logits.requires_grad:
        assert_gradients_match(gradients(logits[real], parameters_of(model)), expected_gradients, FP32)


# The cache


def check_cache(mechanism, window, chunks, form=None):
    """Compare chunks on a cache with the whole input, in logits and gradients.

    Caches of the caller, static or without the config, are compared in logits.
    """
    model = random_model(mechanism.config(window), dtype=torch.float64)
    if form is not None:
        set_core(model, form)
    input_ids = random_ids(2, sum(chunks))
    expected = model(input_ids, use_cache=False).logits
    logits, past_key_values = [], None
    for chunk in input_ids.split(chunks, dim=1):
        output = model(chunk, past_key_values=past_key_values, use_cache=True)
        past_key_values = output.past_key_values
        logits.append(output.logits)
    actual = torch.cat(logits, dim=1)
    assert relative_error(actual, expected) < FP64
    expected_gradients = gradients(expected, parameters_of(model))
    assert_gradients_match(gradients(actual, parameters_of(model)), expected_gradients, FP64)
    for of_the_caller in (StaticCache(config=model.config, max_cache_len=sum(chunks) + 3), DynamicCache()):
        assert_close(logits_in_chunks(model, input_ids, chunks, of_the_caller), expected.detach(), FP64)


def check_cache_on_core(mechanism, core):
    """Compare logits of chunks on a cache, on the core, with those of the whole input on the default core."""
    if mechanism.is_refused_on(core):
        pytest.skip(f"{mechanism.kind} changes the scores, which {core} never builds: refused, see check_core")
    model, input_ids = random_model(mechanism.hybrid_config()), random_ids(2, LENGTH)
    expected = uncached_logits(model, input_ids)
    set_core(model, core)
    assert_close(logits_in_chunks(model, input_ids, [3, 1, 2, 1]), expected)


# Precision, training, checkpoints


def check_half_precision(mechanism, dtype, how):
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


def check_round_trip(mechanism, directory):
    model = random_model(mechanism.hybrid_config(), dtype=torch.bfloat16)
    loaded, input_ids = reload(model, directory), random_ids(2, LENGTH)
    assert loaded.config.attention_kinds == [mechanism.kind] * 2
    assert loaded.config.options_of(mechanism.kind) == model.config.options_of(mechanism.kind)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(uncached_logits(loaded, input_ids), uncached_logits(model, input_ids))


def check_learning(mechanism):
    torch.manual_seed(0)
    model = random_model(mechanism.hybrid_config()).train()
    assert learn_one_batch(model, torch.optim.Adam(model.parameters(), lr=0.01)) < 0.05


def check_adapters(mechanism, directory):
    """Train LoRA on the projections, load it again, and merge it."""
    config, input_ids = mechanism.hybrid_config(), random_ids(2, LENGTH)
    base = random_model(config)
    expected = uncached_logits(base, input_ids)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=PROJECTIONS, init_lora_weights=False)
    model = get_peft_model(random_model(config), adapters)
    model(input_ids, labels=input_ids).loss.backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)
    adapted = uncached_logits(model.eval(), input_ids)
    assert (adapted - expected).abs().max() > 0.1
    model.save_pretrained(directory)
    assert torch.equal(uncached_logits(PeftModel.from_pretrained(base, directory), input_ids), adapted)
    assert_close(uncached_logits(model.merge_and_unload(), input_ids), adapted)


# Options


def refusal(kind, options):
    """Return the last line of the error for these options of the kind, None if they are accepted."""
    try:
        small_config(attention_kinds=kind, attention_options={kind: options})
    except Exception as error:
        return str(error).strip().splitlines()[-1]


def check_options(kind):
    """See nonsense refused for every option, in one line that names the kind, the option and the value."""
    for option in fields(OPTIONS_CLASSES[kind]):
        reasons = {str(value): refusal(kind, {option.name: value}) for value in NONSENSE}
        refused = {value: reason for value, reason in reasons.items() if reason is not None}
        assert len(refused) >= len(NONSENSE) - 2, reasons
        for value, reason in refused.items():
            assert repr(kind) in reason and option.name in reason and value in reason
    assert f"attention_options[{kind!r}] has the option 'unheard_of'" in refusal(kind, {"unheard_of": 1})
    assert f"attention_options[{kind!r}]=3; it must be a dict" in refusal(kind, 3)
