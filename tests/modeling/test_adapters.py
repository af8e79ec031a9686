"""Test adapters of an interleaved model: they load on the plain base in one call, and fail in every other way."""

import copy
import json
import pickle
import warnings

import peft
import pytest
import torch
import transformers
from helpers import assert_close, decoder, random_ids, train_mixing
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations.peft import MIN_PEFT_VERSION

from iha.errors import ROOT
from iha.processes import run_in_clean_process
from modeling_iha import interleave_heads, load_adapter, remove_interleaving, save_mixing, set_mixing_scale
from modeling_iha.adapter_records import has_moved
from modeling_iha.mixing_weights import mixing_parameters
from modeling_iha.modeling_interleaved import MIXING_MODULES


OPTIONS = {"layers": [0, 2], "sliding_window": 5, "mixing_scale": 20.0}
MIXING = {"modules_to_save": list(MIXING_MODULES)}
TARGETS = {"target_modules": ["q_proj", "v_proj"], **MIXING}
METHODS = {
    "LoRA": LoraConfig(r=2, task_type="CAUSAL_LM", **MIXING),  # PEFT knows the targets of the base
    "LoRA of some layers": LoraConfig(r=2, layers_to_transform=[0], layers_pattern="layers", **TARGETS),
    "LoRA and a head": LoraConfig(r=2, target_modules=".*q_proj", modules_to_save=[*MIXING_MODULES, "lm_head"]),
    "IA3": peft.IA3Config(**MIXING),
    "LoHa": peft.LoHaConfig(r=2, **TARGETS),
    "OFT": peft.OFTConfig(r=2, oft_block_size=0, **TARGETS),
    "norms": peft.LNTuningConfig(**MIXING),
    "VB-LoRA": peft.VBLoRAConfig(r=2, vector_length=2, num_vectors=4, topk=1, **TARGETS),
}
INSTRUCTION = r"which this adapter needs \(load it with load_adapter\(base, adapter\) of modeling_iha\)"
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
    mixing = set(mixing_parameters(model))
    for weight in model.parameters():
        if weight.requires_grad:
            size = 0.3 / 20 if weight in mixing else 0.1
            weight.data += size * torch.randn(weight.shape, generator=generator).to(weight)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits


def adapter(base, place, config, **options):
    """Save a trained adapter, and return its logits."""
    model = trained(get_peft_model(interleave_heads(plain(base, **options), 2, **OPTIONS), copy.deepcopy(config)))
    model.save_pretrained(place)
    return logits(model)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_loads_on_the_plain_base_in_one_call_and_in_no_other_way(method, base, tmp_path, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(transformers.configuration_utils.logger, "warning", warnings.append)
    expected = adapter(base, tmp_path, METHODS[method])
    assert warnings == []  # PEFT reads the base's configuration, and Transformers warned that its type is another
    assert (expected - logits(plain(base))).abs().max() > 0.1
    assert logits(load_adapter(plain(base), tmp_path)).equal(expected)
    for load in (PeftModel.from_pretrained, load_adapter):
        for options in ({}, {"mixing_scale": 40.0}, {"mixing_scale": 1.0}):  # which the adapter brings with it
            same = interleave_heads(plain(base), 2, **OPTIONS | options, seed=9)
            assert logits(load(same, tmp_path)).equal(expected)
        for options in ({"layers": [0, 1]}, {"sliding_window": 6}, {"collapse": "all_heads"}):
            otherwise = interleave_heads(plain(base), 2, **OPTIONS | options)
            with pytest.raises(ValueError, match="interleaved otherwise"):
                load(otherwise, tmp_path)
    loads = [lambda: PeftModel.from_pretrained(plain(base), tmp_path)]
    loads += [lambda: peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)]
    if method != "VB-LoRA":  # which Transformers does not take by itself
        loads += [lambda: AutoModelForCausalLM.from_pretrained(tmp_path), lambda: plain(base).load_adapter(tmp_path)]
        own = interleave_heads(plain(base), 2, **OPTIONS, seed=9)
        own.load_adapter(str(tmp_path))
        assert logits(own).equal(expected)
    for load in loads:
        with pytest.raises(ValueError, match=INSTRUCTION):
            load()


# Run where the package cannot be imported: only data on disk can make a load fail.
LOADS = """
import torch
from transformers import AutoModelForCausalLM

interleaved = AutoModelForCausalLM.from_pretrained(request["interleaved"], trust_remote_code=True)
from peft import AutoPeftModelForCausalLM, PeftModel

base, adapter = request["base"], request["adapter"]
loads = [
    lambda: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter),
    lambda: AutoModelForCausalLM.from_pretrained(base).load_adapter(adapter),
    lambda: AutoModelForCausalLM.from_pretrained(adapter, trust_remote_code=True),
    lambda: AutoPeftModelForCausalLM.from_pretrained(adapter),
]
model = PeftModel.from_pretrained(interleaved, adapter).eval()
result = {"errors": [], "logits": model(torch.tensor(request["tokens"]), use_cache=False).logits.tolist()}
model.save_pretrained(request["again"])
for load in loads:
    try:
        load()
        result["errors"].append("loaded")
    except ValueError as error:
        result["errors"].append(str(error))
"""


def test_where_the_package_is_not_installed(base, tmp_path):
    expected = adapter(base, tmp_path / "adapter", METHODS["LoRA"])
    interleave_heads(plain(base), 2, **OPTIONS, seed=9).save_pretrained(tmp_path / "interleaved")
    places = {name: str(tmp_path / name) for name in ("adapter", "interleaved", "again")}
    answer = run_in_clean_process(LOADS, {"base": base, "tokens": TOKENS.tolist(), **places})
    assert len(answer["errors"]) == 4 and all("load_adapter(base, adapter)" in error for error in answer["errors"])
    assert_close(torch.tensor(answer["logits"]), expected)
    assert_close(logits(load_adapter(plain(base), tmp_path / "again")), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_trained_on_copied_and_merged(dtype, base, tmp_path):
    expected = adapter(base, tmp_path / "one", METHODS["LoRA"], dtype=dtype)
    model = load_adapter(plain(base, dtype=dtype), tmp_path / "one", is_trainable=True, adapter_name="mine")
    assert any("q_mix" in name for name, weight in model.named_parameters() if weight.requires_grad)
    pickle.loads(pickle.dumps(model)).save_pretrained(tmp_path / "two")
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


def saved_targets(place):
    return json.loads((place / "adapter_config.json").read_text())["target_modules"]


def test_every_adapter_of_a_model_records_it(base, tmp_path):
    """Add a second one; then use the configuration for a plain model."""
    config = copy.deepcopy(METHODS["LoRA"])
    model = get_peft_model(interleave_heads(plain(base), 2), config)
    model.add_adapter("second", copy.deepcopy(config))
    model.save_pretrained(tmp_path)
    loaded = load_adapter(plain(base), tmp_path)
    loaded.load_adapter(tmp_path / "second", "second")
    assert loaded.peft_config["second"].target_modules == {"q_proj", "v_proj"}

    config.modules_to_save = None
    assert config.auto_mapping is not None  # the record of the interleaved model
    get_peft_model(plain(base), config).save_pretrained(tmp_path / "plain")
    assert set(saved_targets(tmp_path / "plain")) == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match="needs no interleaved heads"):
        load_adapter(plain(base), tmp_path / "plain")
    config.auto_mapping = {"of": "another library"}
    get_peft_model(plain(base), config).save_pretrained(tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "adapter_config.json").read_text())["auto_mapping"] == config.auto_mapping


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"this Transformers adds adapters with PEFT {MIN_PEFT_VERSION} or later; `make test-oldest` has another",
)
def test_an_adapter_that_transformers_adds_records_it(base, tmp_path):
    config, model = METHODS["LoRA"], interleave_heads(plain(base), 2)
    model.add_adapter(copy.deepcopy(config))
    model.delete_adapter("default")
    model.add_adapter(copy.deepcopy(config))
    trained(model).save_pretrained(tmp_path)
    assert logits(load_adapter(plain(base), tmp_path)).equal(logits(model))


def test_an_adapter_without_the_mixing(base, tmp_path):
    """It is right on the plain base while the mixing is at its start, and needs its own model otherwise."""
    config = LoraConfig(target_modules=["q_proj"])
    with pytest.warns(UserWarning, match="leaves the mixing frozen at its start"):
        model = trained(get_peft_model(interleave_heads(plain(base), 2), copy.deepcopy(config)))
    model.save_pretrained(tmp_path / "one")
    assert_close(logits(PeftModel.from_pretrained(plain(base), tmp_path / "one")), logits(model))
    moved = trained(interleave_heads(plain(base), 2))
    with warnings.catch_warnings(action="error", category=UserWarning):
        PeftModel.from_pretrained(interleave_heads(plain(base), 2), tmp_path / "one")
        get_peft_model(copy.deepcopy(moved), copy.deepcopy(config))
    for model in (moved, interleave_heads(plain(base), 2, sliding_window=5)):
        get_peft_model(copy.deepcopy(model), copy.deepcopy(config)).save_pretrained(tmp_path / "two")
        PeftModel.from_pretrained(model, tmp_path / "two")
        if model is moved:
            with pytest.raises(ValueError, match="together with a trained mixing"):
                PeftModel.from_pretrained(interleave_heads(plain(base), 2), tmp_path / "two")
        with pytest.raises(ValueError, match=INSTRUCTION):
            PeftModel.from_pretrained(plain(base), tmp_path / "two")
        with pytest.raises(ValueError, match="holds no mixing"):
            load_adapter(plain(base), tmp_path / "two")
    for part in ({"modules_to_save": ["q_mix"]}, {"target_parameters": ["q_mix.weight"]}):
        with pytest.raises(ValueError, match="all of the mixing or nothing"):
            get_peft_model(interleave_heads(plain(base), 2), LoraConfig(target_modules=["q_proj"], **part))


def test_a_run_resumes_and_loads_its_best_adapter(base, tmp_path):
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
        assert logits(load_adapter(plain(base), best)).equal(found[-1])
    assert found[0].equal(found[1])


def test_a_model_with_a_loaded_mixing_keeps_the_core_that_its_plain_base_refuses(base, tmp_path):
    """TRL gives the name of the core to the plain base, which would else be its reference without a word."""
    model = interleave_heads(plain(base), 2)
    for weight in mixing_parameters(model):
        weight.data += 0.02
    save_mixing(model, tmp_path)
    loaded = load_adapter(plain(base), tmp_path)
    eager = copy.deepcopy(loaded)
    eager.set_attn_implementation("eager")
    for each in (loaded, copy.deepcopy(loaded), eager):
        other = plain(base)
        other.config._attn_implementation = each.config._attn_implementation
        with pytest.raises(RuntimeError, match="reference model is the plain base"):
            logits(other)
    assert torch.allclose(logits(loaded), logits(eager), atol=1e-5)


def test_the_mixing_alone_is_saved_and_loaded(base, tmp_path):
    model = interleave_heads(plain(base), 2, **OPTIONS)
    for weight in mixing_parameters(model):
        weight.data += 0.02
    save_mixing(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["interleaving.safetensors"]
    assert (tmp_path / "interleaving.safetensors").stat().st_size < 8000
    assert logits(load_adapter(plain(base), tmp_path)).equal(logits(model))
    assert logits(load_adapter(interleave_heads(plain(base), 2, **OPTIONS, seed=9), tmp_path)).equal(logits(model))
    with pytest.raises(ValueError, match="interleaved otherwise .num_pseudo_heads"):
        load_adapter(interleave_heads(plain(base), 3, **OPTIONS), tmp_path)
    for fields, message in (
        ({"num_hidden_layers": 2}, "another base"),
        ({"num_hidden_layers": 6}, "another model.*num_layers"),
        ({"num_key_value_heads": 4}, "otherwise"),
    ):
        other = decoder("llama", **fields)
        with pytest.raises(ValueError, match=message):
            load_adapter(other, tmp_path)
        assert type(other) is LlamaForCausalLM and not hasattr(other.config, "interleaved_layers")
    with pytest.raises(ValueError, match="neither an adapter"):
        load_adapter(plain(base), base)
    for other in (plain(base), get_peft_model(model, copy.deepcopy(METHODS["LoRA"]))):
        with pytest.raises(ValueError, match="no interleaved heads of its own"):
            save_mixing(other, tmp_path / "none")
    with pytest.raises(ValueError, match="within an adapter"):
        save_mixing(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


# Two copies of the code in one process: the models of two checkpoints, or of one and of the package.
COPIES = """
import copy
from threading import Thread
import torch
from transformers import AutoModelForCausalLM

tokens, base, places = torch.tensor(request["tokens"]), request["base"], request["interleaved"]
models = [AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True) for place in places]
if request["root"] is not None:
    sys.meta_path = [finder for finder in sys.meta_path if type(finder).__name__ != "Blocker"]
    sys.path.insert(0, request["root"])
    import modeling_iha
    models.append(modeling_iha.interleave_heads(AutoModelForCausalLM.from_pretrained(base), 2))
assert len({type(model).__module__ for model in models}) == 2
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTuner

mixing = ["q_mix", "k_mix", "v_mix", "collapse"]
if request["wrapped_twice"]:  # as two threads may
    for model in models:
        for name in [name for name in vars(BaseTuner) if "interleaved" in name]:
            delattr(BaseTuner, name)
        sys.modules[type(model).__module__].watch_peft()
result = {"expected": [], "found": [], "errors": [], "own": []}

def logits(model):
    with torch.no_grad():
        return model.eval()(tokens, use_cache=False).logits.tolist()

def make(i):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=mixing)
    model = get_peft_model(copy.deepcopy(models[i]), config)
    generator = torch.Generator().manual_seed(i)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.02 * torch.randn(weight.shape, generator=generator)
    expected[i] = logits(model)
    model.save_pretrained(f"adapter{i}")

expected = {}
make(0)  # which imports what torch imports late
threads = [Thread(target=make, args=(i,)) for i in (0, 1)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for i in (0, 1):
    result["expected"].append(expected[i])
    for model in models:  # either copy takes the adapter of the other
        result["found"].append(logits(PeftModel.from_pretrained(copy.deepcopy(model), f"adapter{i}")))
    try:
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f"adapter{i}")
        result["errors"].append("loaded")
    except ValueError as error:
        result["errors"].append(str(error))
"""


@pytest.mark.parametrize("wrapped_twice", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("with_package", [False, True])
def test_two_copies_of_the_code_know_each_others_adapters(with_package, wrapped_twice, base, tmp_path):
    places = [str(tmp_path / name) for name in ("one", "other")][: 1 if with_package else 2]
    for place in places:
        interleave_heads(plain(base), 2).save_pretrained(place)
    request = {"base": base, "interleaved": places, "tokens": TOKENS.tolist(), "wrapped_twice": wrapped_twice}
    answer = run_in_clean_process(COPIES, request | {"root": str(ROOT) if with_package else None})
    assert all("load_adapter(base, adapter)" in error for error in answer["errors"]), answer["errors"]
    first, other = map(torch.tensor, answer["expected"])
    assert (first - other).abs().max() > 0.1
    for found, expected in zip(map(torch.tensor, answer["found"]), (first, first, other, other), strict=True):
        assert_close(found, expected)


# Prompts


PROMPTS = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompt and mixing": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **MIXING),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "layers": peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2),
}


def prompted(model):
    """Return logits; a prefix is in the cache."""
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_beside_a_trained_mixing_loads_in_one_call_and_in_no_other_way(name, base, tmp_path):
    own = train_mixing(interleave_heads(plain(base), 2, **OPTIONS))
    model = trained(get_peft_model(copy.deepcopy(own), copy.deepcopy(PROMPTS[name])))
    model.save_pretrained(tmp_path)
    assert prompted(load_adapter(copy.deepcopy(own), tmp_path)).equal(prompted(model))
    others = [plain(base), interleave_heads(plain(base), 2, **OPTIONS)]
    if "mixing" in name:
        for other in others:
            other = load_adapter(other, tmp_path, adapter_name="mine")
            assert prompted(other).equal(prompted(model))
            other.save_pretrained(tmp_path / "again")
        assert prompted(load_adapter(plain(base), tmp_path / "again" / "mine")).equal(prompted(model))
    else:
        for other, message in zip(others, ("holds no mixing", "together with a trained mixing")):
            with pytest.raises(ValueError, match=message):
                load_adapter(other, tmp_path)
    loads = [lambda: PeftModel.from_pretrained(plain(base), tmp_path), lambda: plain(base).load_adapter(tmp_path)]
    loads += [lambda: peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)]
    for load in loads:
        with pytest.raises(ValueError, match=INSTRUCTION):
            load()


def test_a_prompt_from_before_the_interleaving_records_it_too(base, tmp_path):
    model = get_peft_model(plain(base), copy.deepcopy(PROMPTS["prompt"]))
    train_mixing(interleave_heads(model.get_base_model(), 2))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=INSTRUCTION):
        PeftModel.from_pretrained(plain(base), tmp_path)


def test_a_prompt_beside_an_untrained_mixing_is_one_of_the_base(base, tmp_path):
    model = trained(get_peft_model(interleave_heads(plain(base), 2), copy.deepcopy(PROMPTS["prompt"])))
    model.save_pretrained(tmp_path)
    assert_close(prompted(PeftModel.from_pretrained(plain(base), tmp_path)), prompted(model))
    with pytest.raises(ValueError, match="needs no interleaved heads"):
        load_adapter(plain(base), tmp_path)


# Refusals


def test_an_adapter_comes_after_the_interleaving(base):
    config = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    adapted, wrapped = plain(base), get_peft_model(plain(base), copy.deepcopy(config))
    peft.inject_adapter_in_model(copy.deepcopy(config), adapted)
    for model in (adapted, wrapped.get_base_model()):
        with pytest.raises(ValueError, match=r"has an adapter \(Linear\): call interleave_heads before PEFT adds one"):
            interleave_heads(model, 2)
        assert type(model) is LlamaForCausalLM
    interleave_heads(wrapped.merge_and_unload(), 2)
    with pytest.raises(ValueError, match="LlamaModel is a part of an interleaved model: give PEFT the whole"):
        get_peft_model(interleave_heads(plain(base), 2).model, config)


def test_no_interleaving_is_removed_under_an_adapter(base):
    adapted, wrapped = (interleave_heads(plain(base), 2) for _ in range(2))
    peft.inject_adapter_in_model(copy.deepcopy(METHODS["LoRA"]), adapted)
    wrapped = get_peft_model(wrapped, copy.deepcopy(METHODS["LoRA"]))
    for model in (adapted, wrapped.get_base_model()):
        with pytest.raises(ValueError, match="has an adapter .*remove_interleaving after merge_and_unload"):
            remove_interleaving(model)
    with pytest.raises(ValueError, match="PeftModelForCausalLM is not a model of Transformers"):
        remove_interleaving(wrapped)
    merged = wrapped.merge_and_unload()
    assert type(remove_interleaving(merged)) is LlamaForCausalLM


def test_a_mixing_file_without_its_record_is_refused(base, tmp_path):
    model = interleave_heads(plain(base), 2)
    save_mixing(model, tmp_path)
    file = tmp_path / "interleaving.safetensors"
    tensors = load_file(file)
    for metadata, message in (
        ({}, "does not record how its model was interleaved"),
        ({"interleaving": "{}"}, "lacks interleaved_layers, interleaved_window, mixing_scale, num_layers, num_pseudo"),
    ):
        save_file(tensors, file, metadata)
        for other in (plain(base), model):
            with pytest.raises(ValueError, match=message):
                load_adapter(other, tmp_path)


def test_a_trained_start_counts_as_trained(base, tmp_path):
    """Another scale makes the present values the start, and then no change is left to tell that they were learned."""
    model = trained(interleave_heads(plain(base), 2))
    set_mixing_scale(model, 10)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=INSTRUCTION):
        PeftModel.from_pretrained(plain(base), tmp_path)


def test_a_mixing_that_cannot_be_read_counts_as_trained():
    """Read no value on the meta device, where offloaded weights are."""
    model = interleave_heads(decoder("llama"), 2)
    assert not has_moved(model)
    assert has_moved(model.to("meta"))
