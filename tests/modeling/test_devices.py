"""Run every kind on stand-ins for GPUs: find tensors on another device, and waits of the CPU for the GPU."""

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from helpers import EVERY_KIND, HYBRID, assert_close, packing, padding, random_ids, random_model, small_config
from stand_in_gpu import GpuTensor, gpus, move

from modeling_iha.transformers_versions import CACHE


FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LENGTH = 11


def spread(model) -> None:
    """Place the first half of the model on one GPU and the rest on another, as `device_map="auto"` does."""
    decoder = model.model
    middle = len(decoder.layers) // 2
    places = {decoder.embed_tokens: FIRST, decoder.rotary_emb: FIRST, decoder.norm: SECOND, model.lm_head: SECOND}
    places |= {layer: FIRST if i < middle else SECOND for i, layer in enumerate(decoder.layers)}
    for module, device in places.items():
        move(module, device)
        hook = AlignDevicesHook()
        hook.execution_device = device  # the constructor's would move the parameters
        add_hook_to_module(module, hook)


def on_gpu(inputs: dict) -> dict:
    return {name: GpuTensor(tensor, FIRST) for name, tensor in inputs.items()}


def run(model, input_ids, how, inputs):
    if how == "train":
        output = model(input_ids, labels=input_ids, use_cache=False, **inputs)
        output.loss.backward()
        return [output.logits, *(parameter.grad for parameter in model.parameters())]
    with torch.no_grad():
        if how == "generate":
            mask = torch.ones_like(input_ids)
            return [model.generate(input_ids, attention_mask=mask, max_new_tokens=3, do_sample=False)]
        cache = model(input_ids[:, :-1], use_cache=True)[CACHE]
        return [model(input_ids[:, -1:], **{CACHE: cache}).logits]


PADDED = torch.ones(2, LENGTH, dtype=torch.bool)
PADDED[0, 8:] = False
POSITIONS = {"position_ids": torch.arange(LENGTH)[None]}
INPUTS = {"plain": {}, "positions": POSITIONS, "padded": padding(PADDED)[0], "packed": packing([4, 7])[0]}


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("core", "how", "inputs"),
    [
        *(("sdpa", "train", inputs) for inputs in INPUTS if inputs != "positions"),
        ("eager", "train", "padded"),
        *((core, "decode", "plain") for core in ("sdpa", "eager")),
        ("sdpa", "generate", "plain"),
    ],
)
def test_two_gpus(core, how, inputs, small_blocks):
    """Return the logits, gradients and tokens of a CPU where a model lies on two GPUs."""
    input_ids = random_ids(1 if inputs == "packed" else 2, LENGTH)
    model = random_model(small_config(**EVERY_KIND, **WINDOW, output_gate="per_head"))
    model.set_attn_implementation(core)
    expected = run(model, input_ids, how, INPUTS[inputs])
    model.zero_grad()
    spread(model)
    with gpus():
        actual = run(model, GpuTensor(input_ids, FIRST), how, on_gpu(INPUTS[inputs]))
    for one, other in zip(actual, expected, strict=True):
        assert isinstance(one, GpuTensor)
        assert_close(one.values, other)


def test_a_tensor_on_another_device_is_refused():
    """Show that the stand-in finds what a GPU would reject."""
    with gpus(), pytest.raises(RuntimeError, match="same device"):
        GpuTensor(torch.ones(2), FIRST) + torch.ones(2)
    with gpus(), pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=FIRST) + torch.ones(2, device=SECOND)


# A call copies what it declares to the CPU once. "eager" has dense masks, for which Transformers looks at positions.
@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("core", "inputs", "count"),
    [
        *(("sdpa", "plain", 0), ("sdpa", "positions", 1), ("sdpa", "padded", 1)),
        *(("eager", "plain", 0), ("eager", "positions", 4), ("eager", "padded", 1)),
    ],
)
def test_waits(core, inputs, count, request):
    """Count the waits for the GPU in a forward; one more token waits for nothing."""
    model = random_model(small_config(**{**HYBRID, "sliding_window": 4}))
    model.set_attn_implementation(core)
    move(model, FIRST)
    input_ids = GpuTensor(random_ids(2, LENGTH), FIRST)
    with gpus() as waits, torch.no_grad():
        model(input_ids, use_cache=False, **on_gpu(INPUTS[inputs]))
        assert len(waits) == count
        request.getfixturevalue("small_blocks")
        waits.clear()
        model(input_ids, use_cache=False, **on_gpu(INPUTS[inputs]))
        assert len(waits) == count
        cache = model(input_ids)[CACHE]
        waits.clear()
        model(input_ids[:, :1], **{CACHE: cache})
        assert not waits
