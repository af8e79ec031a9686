"""Test adapters of an interleaved model: `save_adapter` and `load_adapter` bring its mixing to the plain base."""

import copy
import json
import pickle
import warnings

import peft
import pytest
import torch
from helpers import assert_close, decoder, random_ids, train_mixing
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

from iha.processes import run_in_clean_process
from modeling_iha import interleave_heads, load_adapter, pair_heads, remove_interleaving, save_adapter
from modeling_iha.mixing_weights import trained_mixing
from modeling_iha.modeling_interleaved import MIXING_MODULES
from research.experiments.model_types import MULTIMODAL, tiny_model


OPTIONS = {"layers": [0, 2], "sliding_window": 5, "mixing_scale": 20.0}
MIXING = {"modules_to_save": list(MIXING_MODULES)}
TARGETS = {"target_modules": ["q_proj", "v_proj"], **MIXING}
METHODS = {
    "LoRA": LoraConfig(r=2, task_type="CAUSAL_LM", **TARGETS),
    "LoRA of some layers": LoraConfig(r=2, layers_to_transform=[0], layers_pattern="layers", **TARGETS),
    "LoRA and a head": LoraConfig(r=2, target_modules=".*q_proj", modules_to_save=[*MIXING_MODULES, "lm_head"]),
    "LoRA and a part": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["q_mix", "collapse"]),
    "LoRA alone": LoraConfig(r=2, target_modules=["q_proj"]),
    "LoRA of the mixing": LoraConfig(r=2, target_parameters=["q_mix.weight"], target_modules=["q_proj"]),
    "IA3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], **MIXING),
    "LoHa": peft.LoHaConfig(r=2, **TARGETS),
    "OFT": peft.OFTConfig(r=2, oft_block_size=0, **TARGETS),
    "norms": peft.LNTuningConfig(target_modules=["norm"], **MIXING),
    "VB-LoRA": peft.VBLoRAConfig(r=2, vector_length=2, num_vectors=4, topk=1, **TARGETS),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompts of layers": peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2),
}
TOKENS = random_ids(2, 9)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    place = tmp_path_factory.mktemp("base")
    decoder("llama").save_pretrained(place)
    return str(place)


def plain(base, **options):
    return AutoModelForCausalLM.from_pretrained(base, **options)


def trained(model):
    """Move everything that trains, the mixing by steps as large as its scale makes them."""
    generator = torch.Generator().manual_seed(3)
    mixing = set(trained_mixing(model))
    for weight in model.parameters():
        if weight.requires_grad:
            size = 0.3 / 20 if weight in mixing else 0.1
            weight.data += size * torch.randn(weight.shape, generator=generator).to(weight)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits[:, -9:]  # without a prompt; a prefix is in the cache


def adapter(base, place, config, **options):
    """Save an adapter that was trained over a trained mixing, and return its logits."""
    model = train_mixing(interleave_heads(plain(base, **options), 2, **OPTIONS))
    model = trained(get_peft_model(model, copy.deepcopy(config)))
    save_adapter(model, place)
    return logits(model)


# LoRA in its three relations to the mixing, an adapter that scales and one that adds tokens.
QUICK = ("LoRA", "LoRA and a head", "LoRA alone", "IA3", "prefix")


@pytest.mark.parametrize(
    "method", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_an_adapter_loads_on_its_plain_base(method, base, tmp_path):
    expected = adapter(base, tmp_path, METHODS[method])
    assert (expected - logits(plain(base))).abs().max() > 0.1
    assert logits(load_adapter(plain(base), tmp_path)).equal(expected)
    for options in ({}, {"mixing_scale": 40.0}, {"mixing_scale": 1.0}):  # which the adapter brings with it
        loaded = load_adapter(interleave_heads(plain(base), 2, **OPTIONS | options, seed=9), tmp_path)
        assert logits(loaded).equal(expected)
        assert loaded.get_base_model().config.mixing_scale == 20
    for options in ({"layers": [0, 1]}, {"sliding_window": 6}, {"collapse": "all_heads"}):
        otherwise = interleave_heads(plain(base), 2, **OPTIONS | options)
        with pytest.raises(ValueError, match="interleaved otherwise"):
            load_adapter(otherwise, tmp_path)


LOAD = """
import torch
from transformers import AutoModelForCausalLM
interleaved = AutoModelForCausalLM.from_pretrained(request["interleaved"], trust_remote_code=True)
from peft import PeftModel
model = PeftModel.from_pretrained(interleaved, request["adapter"]).eval()
result = model(torch.tensor(request["tokens"])).logits.tolist()
"""


def test_where_the_package_is_not_installed(base, tmp_path):
    """Load an adapter that holds all of the mixing, on a checkpoint of another seed."""
    expected = adapter(base, tmp_path / "adapter", METHODS["LoRA"])
    interleave_heads(plain(base), 2, **OPTIONS, seed=9).save_pretrained(tmp_path / "interleaved")
    places = {name: str(tmp_path / name) for name in ("adapter", "interleaved")}
    assert_close(torch.tensor(run_in_clean_process(LOAD, {"tokens": TOKENS.tolist(), **places})), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_trained_on_copied_and_merged(dtype, base, tmp_path):
    expected = adapter(base, tmp_path / "one", METHODS["LoRA"], dtype=dtype)
    model = load_adapter(plain(base, dtype=dtype), tmp_path / "one", is_trainable=True, adapter_name="mine")
    assert any("q_mix" in name for name, weight in model.named_parameters() if weight.requires_grad)
    save_adapter(pickle.loads(pickle.dumps(model)), tmp_path / "two")
    model = load_adapter(plain(base, dtype=dtype), tmp_path / "two" / "mine")
    assert logits(model).equal(expected)
    assert not any(weight.requires_grad for weight in model.parameters())
    mixing = [weight.clone() for name, weight in model.state_dict().items() if "_mix.modules_to_save" in name]
    merged = model.merge_and_unload()
    kept = [weight for name, weight in merged.state_dict().items() if "_mix." in name]
    assert len(mixing) == 18 and all(one.equal(other) for one, other in zip(mixing, kept, strict=True))
    if dtype == torch.float32:  # bfloat16 rounds the sum of weight and adapter
        assert_close(logits(merged), expected)
    merged.save_pretrained(tmp_path / "merged")
    assert logits(plain(tmp_path / "merged", trust_remote_code=True)).equal(logits(merged))


def test_every_adapter_of_a_model_is_saved_with_its_mixing(base, tmp_path):
    model = get_peft_model(train_mixing(interleave_heads(plain(base), 2)), copy.deepcopy(METHODS["LoRA"]))
    model.add_adapter("second", copy.deepcopy(METHODS["LoRA"]))
    for name in ("default", "second"):
        model.set_adapter(name)
        trained(model)
    save_adapter(model, tmp_path)
    for name, place in {"default": tmp_path, "second": tmp_path / "second"}.items():
        model.set_adapter(name)
        assert logits(load_adapter(plain(base), place)).equal(logits(model))
    both = load_adapter(plain(base), tmp_path)
    both.load_adapter(tmp_path / "second", "second")
    both.set_adapter("second")
    assert logits(both).equal(logits(model))


def test_a_run_resumes_and_loads_its_best_adapter(base, tmp_path):
    """Trainer saves by PEFT, so its checkpoints load on the interleaved model."""
    rows = [{"input_ids": row, "labels": row} for row in random_ids(8, 9).tolist()]
    keys = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    keys |= {"load_best_model_at_end": True, "learning_rate": 0.05, "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(tmp_path, use_cpu=True, per_device_train_batch_size=2, **keys)
    found = []
    for resumed in (None, str(tmp_path / "checkpoint-2")):
        model = get_peft_model(interleave_heads(plain(base), 2), copy.deepcopy(METHODS["LoRA"]))
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train(resume_from_checkpoint=resumed)
        found.append(logits(model))
        best = trainer.state.best_model_checkpoint
        assert logits(PeftModel.from_pretrained(interleave_heads(plain(base), 2), best)).equal(found[-1])
        with pytest.raises(ValueError, match="has no interleaving.json: save the adapter by save_adapter"):
            load_adapter(plain(base), best)
        save_adapter(model, tmp_path / "adapter")
        assert logits(load_adapter(plain(base), tmp_path / "adapter")).equal(found[-1])
    assert found[0].equal(found[1])


def test_a_changed_model_has_no_name_by_which_its_plain_base_loads(base, tmp_path):
    """TRL loads a reference model by this name, which would else silently be the plain base."""
    save_adapter(train_mixing(interleave_heads(plain(base), 2)), tmp_path)
    for changed in (load_adapter(plain(base), tmp_path), pair_heads(plain(base), 2), interleave_heads(plain(base), 2)):
        assert changed.name_or_path == changed.config.name_or_path == ""
        with pytest.raises(OSError):
            AutoModelForCausalLM.from_pretrained(changed.config.name_or_path)
    assert remove_interleaving(changed).config.name_or_path == changed.name_or_path == str(base)


def test_no_path_of_this_machine_is_saved(base, tmp_path):
    """Keep an id of the Hub, which tells where the base is."""
    for name, kept in ((base, ""), ("org/base-1.0", "org/base-1.0"), ("/gone/base", "")):
        model = plain(base)
        model.name_or_path = model.config.name_or_path = name
        interleave_heads(model, 2).save_pretrained(tmp_path / "model")
        save_adapter(model, tmp_path / "adapter")
        assert json.loads((tmp_path / "model" / "config.json").read_text())["base_name_or_path"] == kept
        save_adapter(plain(tmp_path / "model"), tmp_path / "again")
        for place in ("adapter", "again"):
            record = json.loads((tmp_path / place / "interleaving.json").read_text())
            assert record["base_model_name_or_path"] == kept
        assert remove_interleaving(model).name_or_path == model.config.name_or_path == name


def test_the_mixing_alone_is_saved_and_loaded(base, tmp_path):
    model = train_mixing(interleave_heads(plain(base), 2, **OPTIONS))
    save_adapter(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"interleaving.json", "interleaving.safetensors"}
    assert (tmp_path / "interleaving.safetensors").stat().st_size < 8000
    assert logits(load_adapter(plain(base), tmp_path)).equal(logits(model))
    assert logits(load_adapter(interleave_heads(plain(base), 2, **OPTIONS, seed=9), tmp_path)).equal(logits(model))
    with pytest.raises(ValueError, match="interleaved otherwise .num_pseudo_heads"):
        load_adapter(interleave_heads(plain(base), 3, **OPTIONS), tmp_path)
    for fields, message in (
        ({"num_hidden_layers": 2}, "another base"),
        ({"num_hidden_layers": 6}, "another model.*num_hidden_layers"),
        ({"num_key_value_heads": 4}, "otherwise"),
    ):
        other = decoder("llama", **fields)
        with pytest.raises(ValueError, match=message):
            load_adapter(other, tmp_path)
        assert type(other) is LlamaForCausalLM and not hasattr(other.config, "interleaved_layers")
        assert other.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="has no interleaving.json: save the adapter by save_adapter"):
        load_adapter(plain(base), base)
    with pytest.raises(ValueError, match="no directory missing, and the Hub gives no interleaving.json"):
        load_adapter(plain(base), "missing", local_files_only=True)  # asking the Hub takes a while without a network
    for other in (plain(base), get_peft_model(plain(base), LoraConfig(target_modules=["q_proj"]))):
        with pytest.raises(ValueError, match="LlamaForCausalLM has no interleaved heads"):
            save_adapter(other, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    remove_interleaving(interleave_heads(plain(base), 2, **OPTIONS | {"sliding_window": None}))


@pytest.mark.filterwarnings("ignore:.*are paired")
def test_paired_heads_have_a_record_and_no_mixing(base, tmp_path):
    model, config = pair_heads(plain(base), 2, layers=[1], sliding_window=4), METHODS["LoRA alone"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # there is no mixing that could be left frozen
        model = trained(get_peft_model(model, copy.deepcopy(config)))
    save_adapter(model, tmp_path)
    assert not (tmp_path / "interleaving.safetensors").exists()
    assert logits(load_adapter(plain(base), tmp_path)).equal(logits(model))
    with pytest.raises(ValueError, match="interleaved otherwise"):
        load_adapter(interleave_heads(plain(base), 2, layers=[1], sliding_window=4), tmp_path)


def test_the_mixing_of_a_decoder_within_a_model_of_images(tmp_path):
    model = train_mixing(interleave_heads(tiny_model("gemma3", MULTIMODAL), 2, sliding_window=3))
    save_adapter(model, tmp_path)
    assert logits(load_adapter(tiny_model("gemma3", MULTIMODAL), tmp_path)).equal(logits(model))


# Rejections


def test_an_adapter_comes_after_the_interleaving(base):
    config = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    adapted, wrapped = plain(base), get_peft_model(plain(base), copy.deepcopy(config))
    peft.inject_adapter_in_model(copy.deepcopy(config), adapted)
    for model in (adapted, wrapped.get_base_model()):
        with pytest.raises(ValueError, match="Linear .* wraps a part of one: call interleave_heads before PEFT"):
            interleave_heads(model, 2)
        assert type(model) is LlamaForCausalLM
    interleave_heads(wrapped.merge_and_unload(), 2)


def test_no_interleaving_is_removed_under_an_adapter(base):
    adapted, wrapped = (interleave_heads(plain(base), 2) for _ in range(2))
    peft.inject_adapter_in_model(copy.deepcopy(METHODS["LoRA"]), adapted)
    wrapped = get_peft_model(wrapped, copy.deepcopy(METHODS["LoRA"]))
    for model in (adapted, wrapped.get_base_model()):
        with pytest.raises(ValueError, match="wraps a part of one: .* remove_interleaving on the unwrapped model"):
            remove_interleaving(model)
    with pytest.raises(ValueError, match="PeftModelForCausalLM is not a model of Transformers"):
        remove_interleaving(wrapped)
    merged = wrapped.merge_and_unload()
    assert type(remove_interleaving(merged)) is LlamaForCausalLM


def test_a_damaged_mixing_is_refused_and_leaves_the_model(base, tmp_path):
    save_adapter(interleave_heads(plain(base), 2), tmp_path)
    file = tmp_path / "interleaving.safetensors"
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if name.endswith("_scale")))
    save_file(tensors, file, {"format": "pt"})
    model = plain(base)
    with pytest.raises(ValueError, match="does not hold the mixing that its record names"):
        load_adapter(model, tmp_path)
    assert type(model) is LlamaForCausalLM and logits(model).equal(logits(plain(base)))


@pytest.mark.parametrize("name", ["gemma3_text", "mistral"])
def test_a_prefix_of_a_decoder_with_windows(name):
    """PEFT fills the cache with the prefix before the call; a window that is not full has dropped nothing."""
    plain_model = decoder(name)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    torch.manual_seed(0)
    expected = get_peft_model(copy.deepcopy(plain_model), config).eval()
    torch.manual_seed(0)
    model = get_peft_model(interleave_heads(plain_model, 2), config).eval()
    with torch.no_grad():
        assert_close(model(input_ids=TOKENS).logits, expected(input_ids=TOKENS).logits)
