"""A row of a batch and a document of a packed row are what they are alone: on every core, forward and backward.

test_mechanisms.py has the padding and packing of every kind, test_packing.py what TRL packs, and test_masks.py which
calls are rejected.
"""

from functools import partial

import pytest
import torch
import transformers
from helpers import (
    BOTH,
    CORES,
    IHA_GEOMETRIES,
    PLAIN,
    WAYS,
    assert_close,
    cumulative_lengths,
    decoder,
    geometry_model,
    interleaved,
    packing,
    padding,
    random_ids,
    random_model,
    set_core,
)
from packaging.version import Version

from modeling_iha import IHAConfig, IHAForCausalLM, IHAForSequenceClassification, interleave_heads
from modeling_iha.sdpa_in_blocks import NAME as SDPA_IN_BLOCKS
from modeling_iha.transformers_versions import CACHE


LENGTH, WINDOW = 30, 5
DOCUMENTS = (13, 1, 16)
LEFT, RIGHT = torch.ones(2, LENGTH).bool(), torch.ones(2, LENGTH).bool()
LEFT[0, :7] = RIGHT[1, -7:] = False
CALLS = {
    "nothing": {},
    "left padding": padding(LEFT)[0],
    "right padding": {"attention_mask": RIGHT.long()},
    "positions": packing(DOCUMENTS)[0],
    "lengths": packing(DOCUMENTS)[0] | cumulative_lengths(DOCUMENTS),
}
# Functions of a window. Gemma 3, Mistral and Llama 4 have longer windows, shorter ones and chunks of their own, too.
OURS = {
    **{name: lambda window, name=name: geometry_model(name, pseudo_positions="shared") for name in IHA_GEOMETRIES},
    "paired_heads with both additions": partial(WAYS["paired_heads"], **BOTH),
    **WAYS,
    "gemma3_text": partial(interleaved, "gemma3_text", layers=[0, 1], num_pseudo_heads=3),
    "mistral": partial(interleaved, "mistral", layers=[0, 1], num_pseudo_heads=3, sliding_window=WINDOW - 1),
}
LLAMA_4 = {"llama4_text": partial(interleaved, "llama4_text", layers=[0, 1])}  # whose chunks flash cores lack
MODELS = OURS | LLAMA_4 | PLAIN
ON_CORES = [(name, core) for name in OURS for core in CORES]
ON_CORES += [(name, "sdpa") for name in LLAMA_4] + [(name, SDPA_IN_BLOCKS) for name in PLAIN]


def logits_and_gradients_of(model, real, batches):
    """Return the logits of the real tokens of some calls, and the gradients of the sum of their squares."""
    model.zero_grad()
    logits = torch.cat([model(**batch, use_cache=False).logits.flatten(0, 1) for batch in batches])[real.flatten()]
    if logits.requires_grad:
        logits.square().sum().backward()
    return [logits.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.one_of(8)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("name", "core"), ON_CORES)
@pytest.mark.usefixtures("cpu_cores", "small_blocks")
def test_a_row_is_what_its_documents_are_alone(name, core, window, call):
    """Compute the documents alone on "eager". FlexAttention has no backward on a CPU."""
    model, inputs = MODELS[name](window), CALLS[call]
    is_packed = call in ("positions", "lengths")
    if name in LLAMA_4 and is_packed and Version(transformers.__version__) < Version("5.18"):
        pytest.skip(
            "Transformers 5.17 counts the chunks of Llama 4 from the start of a packed row, in plain models too"
        )
    input_ids = random_ids(1 if is_packed else 2, LENGTH)
    real = inputs.get("attention_mask", torch.ones_like(input_ids)).bool()
    alone = [ids for row, kept in zip(input_ids, real) for ids in row[kept].split(DOCUMENTS if is_packed else LENGTH)]
    with torch.set_grad_enabled(core != "flex_attention"):
        set_core(model, "eager")
        ones = torch.ones(int(real.sum()), dtype=torch.bool)
        expected = logits_and_gradients_of(model, ones, [{"input_ids": ids[None]} for ids in alone])
        set_core(model, core)
        actual = logits_and_gradients_of(model, real, [{"input_ids": input_ids, **inputs}])
    assert_close(actual[0], expected[0])
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert_close(one, other, 1e-4)


# Rows of one token


def preset_model(name, model_class=IHAForCausalLM):
    """Return a random model of a preset, with two query heads to each group."""
    return random_model(IHAConfig.from_preset(name, num_key_value_heads=4, pad_token_id=0), model_class)


def interleaved_by_readme():
    return interleave_heads(decoder("llama"), 2, layers="paper", sliding_window="paper")


# Each has layers without virtual tokens, where a row of one token is one query.
WITH_MHA = {
    **{name: partial(preset_model, f"small-1m-{name}") for name in ("global-local", "global", "iha", "paired-heads")},
    "README's": interleaved_by_readme,
}


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("name", WITH_MHA)
def test_rows_of_one_token_are_what_each_is_alone(name, rows):
    """Forward, training, generation, and a batch of which all rows but one are padding.

    As many rows as heads of a group, which is two, are a shape that SDPA takes for another."""
    model, input_ids = WITH_MHA[name](), random_ids(rows, 1)
    ones, first = torch.ones(rows, 1).long(), torch.zeros(rows, 1).long()
    first[0] = 1
    expected = logits_and_gradients_of(model, ones.bool(), [{"input_ids": row[None]} for row in input_ids])
    actual = logits_and_gradients_of(model, ones.bool(), [{"input_ids": input_ids, "attention_mask": ones}])
    assert_close(actual[0], expected[0])
    # A softmax over one key has no gradient, so small ones are noise.
    assert_close(*(torch.cat([each.flatten() for each in found[1:]]) for found in (actual, expected)))
    with torch.no_grad():
        padded = model(input_ids, attention_mask=first, use_cache=False).logits
        assert padded.isfinite().all()
        assert_close(padded[0], expected[0][:1])
        options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        generated = model.generate(input_ids, attention_mask=ones, **options)
        alone = [model.generate(row[None], attention_mask=ones[:1], **options) for row in input_ids]
        assert torch.equal(generated, torch.cat(alone))
        sampled = model.generate(
            input_ids[:1], attention_mask=ones[:1], num_return_sequences=rows, **options | {"do_sample": True}
        )
        assert sampled.shape == (rows, 4)


@torch.no_grad()
def test_rows_of_one_token_are_classified_and_decoded():
    """A loop of one's own passes a mask for the first token, too."""
    model, input_ids = preset_model("small-1m-iha", IHAForSequenceClassification), random_ids(3, 5)
    expected = torch.cat([model(row[None, :1]).logits for row in input_ids])
    assert_close(model(input_ids[:, :1], attention_mask=torch.ones(3, 1).long()).logits, expected)
    model, cache = preset_model("small-1m-iha"), None
    expected = model(input_ids, use_cache=False).logits
    for n in range(5):
        mask = torch.ones(3, n + 1).long()
        output = model(input_ids[:, [n]], attention_mask=mask, use_cache=True, **{CACHE: cache})
        cache = output[CACHE]
        assert_close(output.logits[:, 0], expected[:, n])
