"""Load quantised models: the linear layers shrink, mixing and collapse stay as they are, and the model still works.

The quantisers of Transformers replace `nn.Linear` and nothing else, so they pass over the mixing and collapse weights,
which are a few hundred numbers a layer.
"""

import pytest
import torch
from helpers import (
    GEOMETRIES,
    greedy,
    random_ids,
    random_model,
    small_config,
    uncached_logits,
)
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

from modeling_iha import IHAForCausalLM, interleave_heads


def torchao_int8():
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes(**bits):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return BitsAndBytesConfig(**bits)


# name -> (its configuration, the type of a quantised weight, the largest relative error of the logits)
SCHEMES = {
    "torchao-int8": (torchao_int8, "Int8Tensor", 0.02),
    "bitsandbytes-int8": (lambda: bitsandbytes(load_in_8bit=True), "Int8Params", 0.03),
    "bitsandbytes-nf4": (lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), "Params4bit", 0.25),
}


@pytest.fixture(params=SCHEMES)
def scheme(request):
    make, weight_type, tolerance = SCHEMES[request.param]
    return make(), weight_type, tolerance


@pytest.fixture(params=[pytest.param("global", marks=pytest.mark.slow), "hybrid"])
def directory(request, tmp_path):
    # bitsandbytes' 4-bit product of a single token needs layers as wide as a multiple of its block of 64.
    config = small_config(hidden_size=64, intermediate_size=128, mixing_scale=0.5, **GEOMETRIES[request.param])
    random_model(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def is_close(actual, expected, tolerance):
    return (actual - expected).norm() <= tolerance * expected.norm()


def decided(model):
    """Return a prompt, and its 8 greedy tokens without a cache, where the likeliest token always leads by 0.15.

    bitsandbytes rounds a token otherwise next to other tokens, so a cache moves the logits of int8 by up to 0.05."""
    for seed in range(200):
        prompt = random_ids(1, 9, seed=seed)
        tokens = greedy(model, prompt, 8)
        first, second = uncached_logits(model, tokens)[0, 8:-1].topk(2).values.unbind(-1)
        if (first - second).min() > 0.15:
            return prompt, tokens
    raise AssertionError("no prompt is decided")


def test_quantised_model_works_and_keeps_its_mixing(scheme, directory, tmp_path):
    config, weight_type, tolerance = scheme
    source = IHAForCausalLM.from_pretrained(directory)
    model = IHAForCausalLM.from_pretrained(directory, quantization_config=config)
    # Before the first forward: bitsandbytes repacks 4-bit weights for some CPUs then, and loses precision when they
    # are saved.
    model.save_pretrained(tmp_path / "quantised")

    exact = dict(source.named_parameters())
    starts = {name: start for name, start in source.named_buffers() if name.endswith("_start")}
    assert starts and all(torch.equal(model.get_buffer(name), start) for name, start in starts.items())
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.weight"):
            assert type(parameter).__name__ == weight_type, name
        else:
            assert type(parameter) is torch.nn.Parameter and torch.equal(parameter, exact[name]), name
    assert sum("_mix." in name or ".collapse." in name for name in exact) == 4 * source.config.attention_kinds.count(
        "iha"
    )

    input_ids = random_ids(2, 9)
    expected = uncached_logits(source, input_ids)
    quantised = uncached_logits(model, input_ids)
    assert is_close(quantised, expected, tolerance) and not torch.equal(quantised, expected)
    prompt, expected = decided(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), expected)

    again = IHAForCausalLM.from_pretrained(tmp_path / "quantised")
    assert torch.equal(uncached_logits(again, input_ids), quantised)


def test_lora_on_4_bit_weights_keeps_its_gradients(tmp_path):
    """bitsandbytes repacks 4-bit weights for some CPUs in the first evaluating forward, such as a comparison's."""
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    options = {"quantization_config": bitsandbytes(load_in_4bit=True), "dtype": "float32"}
    model = interleave_heads(LlamaForCausalLM.from_pretrained(tmp_path, **options), 2)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).train()
    ids = random_ids(1, 9)
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [weight.grad for name, weight in model.named_parameters() if "lora_B" in name]
    assert gradients and all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)
