"""Test that what the mixing has learned survives every way by which weights move between models of two scales."""

import copy
import json
import pickle

import accelerate
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import assert_close, decoder, random_ids, random_model, small_config, train_mixing, uncached_logits
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from iha.checkpoints import load_model
from iha.errors import UserError
from iha.plots import plot_mixing, save_plot
from iha.sources import find_source
from modeling_iha import (
    IHAConfig,
    IHAForCausalLM,
    interleave_heads,
    mixing_change,
    mixing_parameters,
    set_mixing_scale,
)
from modeling_iha.interleaving import HeadMixing
from modeling_iha.mixing_weights import PARTS, state_with_values
from modeling_iha.modeling_interleaved import MIXING_MODULES


TOKENS = random_ids(2, 9)
SCALES = [(40.0, 10.0), (40.0, 1.0), (1.0, 10.0)]
LORA = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": list(MIXING_MODULES)}


def logits(model):
    return uncached_logits(model.eval(), TOKENS)


def interleaved(scale, name="llama", seed=0):
    fields = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 0, "mamba_dt_rank": 4}
    return interleave_heads(decoder(name, **fields if name == "zamba" else {}), 2, mixing_scale=scale, seed=seed)


def trainer(model, directory):
    return Trainer(model, TrainingArguments(directory, use_cpu=True, report_to="none"))


def by_state_dict(model, other, directory):
    other.load_state_dict(model.state_dict())
    return other


def by_trainer(model, other, directory):
    trainer(model, directory).save_model(str(directory / "checkpoint"))
    trainer(other, directory)._load_from_checkpoint(str(directory / "checkpoint"))
    return other


def by_adapter(model, other, directory):
    state = get_peft_model_state_dict(get_peft_model(model, LoraConfig(**LORA)))
    other = get_peft_model(other, LoraConfig(**LORA))
    set_peft_model_state_dict(other, state)
    return other


def by_distributed_checkpoint(model, other, directory):
    dcp.save(model.state_dict(), checkpoint_id=directory / "shards", no_dist=True)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=directory / "shards", no_dist=True)
    other.load_state_dict(state)
    return other


def by_accelerate(model, other, directory):
    model.save_pretrained(directory / "model")
    accelerate.load_checkpoint_in_model(other, directory / "model")
    return other


def by_config(model, other, directory):
    """Load with a configuration that says another scale."""
    model.save_pretrained(directory / "model")
    config = AutoConfig.from_pretrained(directory / "model")
    config.mixing_scale = other.config.mixing_scale
    return AutoModelForCausalLM.from_pretrained(directory / "model", config=config)


def by_iha(model, other, directory):
    fields = {name: getattr(model.config, name) for name in ("rms_norm_eps", "rope_parameters", "num_pseudo_heads")}
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    fields |= {name: getattr(model.config, name) for name in (*sizes, "num_attention_heads", "num_key_value_heads")}
    fields |= {"pseudo_positions": "shared", "mixing_scale": other.config.mixing_scale}
    built = IHAForCausalLM(IHAConfig(**fields))
    built.load_state_dict(model.state_dict())
    return built


WAYS = (
    *(by_state_dict, by_trainer, by_adapter, by_distributed_checkpoint, by_accelerate, by_config, by_iha),
    *(lambda model, other, _: copy.deepcopy(model), lambda model, other, _: pickle.loads(pickle.dumps(model))),
)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("way", WAYS)
def test_weights_keep_their_values_in_a_model_of_another_scale(way, scales, tmp_path):
    first, second = scales
    model, other = train_mixing(interleaved(first)), interleaved(second, seed=9)
    expected = logits(model)
    assert (expected - logits(other)).abs().max() > 0.1
    loaded = way(model, other, tmp_path)
    assert logits(loaded).equal(expected) if way is not by_iha else assert_close(logits(loaded), expected) is None


@pytest.mark.parametrize("name", ["llama", "zamba"])
def test_a_saved_model_has_a_scale_that_a_load_cannot_change(name, tmp_path):
    model = train_mixing(interleaved(40.0, name))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mixing_scale"] == 40
    loaded = load_model(find_source(tmp_path))
    assert logits(loaded).equal(expected) and loaded.config.mixing_scale == 40
    for load in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(ValueError, match="depend on mixing_scale=40.*set_mixing_scale"):
            load.from_pretrained(tmp_path, trust_remote_code=True, mixing_scale=10)
        load.from_pretrained(tmp_path, trust_remote_code=True, mixing_scale=40)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "half")).equal(logits(half))


def test_a_rounded_scale_is_written_as_it_was_given(tmp_path):
    model = interleave_heads(decoder("llama").bfloat16(), 2, mixing_scale=0.1)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mixing_scale"] == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "zamba", "iha"])
def test_the_scale_changes_and_the_values_stay(name, dtype, tmp_path):
    """Zamba's blocks share their weights, so the values of all of them have to be taken first."""
    model = random_model(small_config(mixing_scale=40.0)) if name == "iha" else train_mixing(interleaved(40.0, name))
    model.to(dtype)
    expected, learned = logits(model), state_with_values(model)
    for scale in (10, 1, 3.0):
        set_mixing_scale(model, scale)
        assert model.config.mixing_scale == scale and logits(model).equal(expected)
        assert all(value.equal(learned[name]) for name, value in state_with_values(model).items())
        assert not any(weight.any() for weight in mixing_parameters(model))
    model.save_pretrained(tmp_path)
    loaded = state_with_values(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    assert all(value.equal(learned[name]) for name, value in loaded.items())
    for weight in mixing_parameters(model):
        weight.data += 0.1
    for name, value in state_with_values(model).items():
        if any(part in name.split(".") for part in MIXING_MODULES):
            assert_close(value, learned[name] + 0.3, 0.01)
    for scale in (0, float("nan"), "10"):
        with pytest.raises(ValueError, match="expected a number above 0"):
            set_mixing_scale(model, scale)
    with pytest.raises(ValueError, match="no weights that mix heads"):
        set_mixing_scale(decoder("llama"), 10)


@pytest.mark.parametrize("collapse", ["per_head", "all_heads"])
def test_the_change_of_the_mixing_is_that_of_each_head(collapse, tmp_path):
    """Move one pseudo-head of one part at a time, by 0.3 and 0.4 of two heads."""
    model = interleave_heads(decoder("llama"), 2, layers=[0, 2], collapse=collapse)
    assert not any(head.any() for layers in mixing_change(model).values() for head in layers.values())
    for name, part in PARTS.items():
        moved = copy.deepcopy(model)
        weight = getattr(moved.model.layers[2].self_attn, name).weight.data
        of_head = weight[1] if name == "collapse" else weight[:, 1].flatten()
        of_head[0], of_head[-1] = 0.3 / 40, 0.4 / 40
        weight[:, 1] = weight[:, 1] if name == "collapse" else of_head.view_as(weight[:, 1])
        moved.save_pretrained(tmp_path / name)
        adapted = get_peft_model(copy.deepcopy(moved), LoraConfig(**LORA))
        for weight_name, original in adapted.named_parameters():
            if weight_name.endswith(".original_module.weight"):
                original.data.zero_()  # a copy is trained
        for each in (moved, adapted, AutoModelForCausalLM.from_pretrained(tmp_path / name)):
            changes = mixing_change(each)
            expected = torch.zeros(len(changes[part][2]))
            expected[1] = ((0.3**2 + 0.4**2) / 2) ** 0.5  # of two pseudo-heads
            assert_close(changes[part].pop(2), expected)
            assert not any(heads.any() for layers in changes.values() for heads in layers.values())


def test_the_change_is_that_of_the_mixing_in_use():
    model = train_mixing(interleave_heads(decoder("llama"), 2))
    expected = mixing_change(model)["queries"][0]
    adapted = get_peft_model(model, LoraConfig(**LORA))
    with torch.no_grad():
        adapted.base_model.model.model.layers[0].self_attn.q_mix.modules_to_save.default.weight += 1
    assert (mixing_change(adapted)["queries"][0] - expected).abs().min() > 0.1
    with adapted.disable_adapter():
        assert_close(mixing_change(adapted)["queries"][0], expected)
    adapted.add_adapter("plain", LoraConfig(target_modules=["q_proj"]))
    adapted.set_adapter("plain")
    assert_close(mixing_change(adapted)["queries"][0], expected)


@pytest.mark.parametrize("pseudo_collapse", ["per_head", "all_heads"])
def test_a_mixing_from_scratch_starts_as_far_away_as_its_noise(pseudo_collapse):
    model = IHAForCausalLM(small_config(num_pseudo_heads=2, pseudo_collapse=pseudo_collapse, initializer_range=0.02))
    changes = mixing_change(model)
    assert not changes["collapse"][0].any()
    for part, heads in (("queries", 4), ("keys", 2), ("values", 2)):
        assert (changes[part][1] / (0.02 * heads**0.5) - 1).abs().max() < 1
    with torch.no_grad():
        model.model.layers[1].self_attn.q_mix.weight[0, 3] += 1  # head 3 now reads head 0
    assert (mixing_change(model)["queries"][1] > 0.5).tolist() == [False, False, False, True]
    with pytest.raises(ValueError, match="no weights that mix heads"):
        mixing_change(decoder("llama"))


def test_the_picture_of_the_mixing_shows_its_change(tmp_path):
    model = train_mixing(interleave_heads(decoder("llama"), 2, layers=[0, 2], collapse="all_heads"))
    figure = plot_mixing(model)
    panels = [axes for axes in figure.axes if axes.images]
    changes = mixing_change(model)
    assert len(panels) == 8
    for row in (panels[:4], panels[4:]):  # parts are compared by color
        assert len({axes.images[0].norm.vmax for axes in row}) == 1
    for axes, (part, layers) in zip(panels, changes.items()):
        assert axes.get_title() == part and [label.get_text() for label in axes.get_yticklabels()] == ["0", "2"]
        assert axes.images[0].get_array().tolist() == torch.stack(list(layers.values())).tolist()
    queries = panels[4].images[0].get_array()  # head m read by head h
    values = [state_with_values(model.model.layers[layer].self_attn.q_mix)["weight"] for layer in (0, 2)]
    own = torch.eye(4)[:, :, None]
    squares = torch.stack([(value - own).square().mean(-1) for value in values])
    assert_close(torch.tensor(queries), squares.mean(0).sqrt())
    save_plot(figure, tmp_path / "mixing.png")
    assert (tmp_path / "mixing.png").stat().st_size > 10_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_from_scratch_a_weight_is_its_value(dtype):
    """Compare to the bit, with and without gradients. A weight has the gradient of its value at every scale."""
    torch.manual_seed(0)
    module = HeadMixing(5, 3).to(dtype)
    module.weight.data.copy_(torch.randn(5, 5, 3))
    assert torch.equal(module.value(), module.weight)
    with torch.no_grad():
        assert torch.equal(module.value(), module.weight)
    set_mixing_scale(module, 0.3)
    module.weight.data.copy_(torch.randn(5, 5, 3))
    value, gradient = module.value(), torch.randn(5, 5, 3).to(dtype)
    value.backward(gradient)
    assert torch.equal(module.weight.grad, gradient)
    with torch.no_grad():
        assert torch.equal(module.value(), value)


def test_a_file_of_changes_without_starts_is_refused(tmp_path):
    model = train_mixing(interleaved(40.0))
    model.save_pretrained(tmp_path)
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="missing keys .*weight_scale"):
        load_model(find_source(tmp_path))
    parameters = dict(model.named_parameters())
    other = interleaved(40.0, seed=9)
    other.load_state_dict(parameters, strict=False)  # docs/CHECKPOINTS.md says that starts stay behind
    assert (logits(other) - logits(model)).abs().max() > 0.01
    with pytest.raises(RuntimeError, match="weight_start"):
        other.load_state_dict(parameters)


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_tangent_passes_through_a_mixing(needs_gradient):
    """Differentiate forward, as `torch.func.jvp` does with weights that may need no gradient."""
    mixing = HeadMixing(2, 2, scale=10.0)
    weights = {name: tensor.detach().requires_grad_(needs_gradient) for name, tensor in mixing.named_parameters()}
    tangents = {name: torch.randn_like(tensor) for name, tensor in weights.items()}
    _, tangent = torch.func.jvp(lambda weights: functional_call(mixing, weights, (None,)), (weights,), (tangents,))
    assert torch.equal(tangent, tangents["weight"])
