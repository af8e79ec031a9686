"""Interleave heads where others hold the model or share the process: DDP, threads, copies of the code."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import DECODER_SIZES, assert_close, decoder, random_ids, train_mixing
from helpers import uncached_logits as logits
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel, replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    BertModel,
    EncoderDecoderModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from iha.errors import ROOT
from iha.processes import run_in_clean_process
from modeling_iha import interleave_heads, pair_heads, remove_interleaving
from modeling_iha.interleaved_attention import implementation_of_user, register_core
from modeling_iha.mixing_weights import mixing_parameters, state_with_values
from modeling_iha.virtual_tokens import View
from research.experiments.model_types import MULTIMODAL, tiny_model


# A part of a model


LOAD_WHOLE = """
import torch
import transformers
from transformers.testing_utils import CaptureLogger
tokens, result = torch.tensor(request["tokens"]), {}
for place, auto_class in request["places"].items():
    with CaptureLogger(transformers.utils.logging.get_logger("transformers.modeling_utils")) as log:
        try:
            loader = getattr(transformers, auto_class)
            model = loader.from_pretrained(place, trust_remote_code=True)
            result[place] = {"logits": model(input_ids=tokens, use_cache=False).logits.tolist()}
        except ValueError as error:
            result[place] = {"error": str(error)}
    result[place]["log"] = log.out
"""


def test_a_part_is_never_lost_in_silence(tmp_path):
    """Interleave the decoder within a model, save the whole, and load it where the package is not installed.

    A causal model has the mixing. Most models of several media raise an error. Qwen 2 VL and its kin read the fields
    of their decoder without a look at its type: there Transformers' report of loading names the mixing."""
    wholes = {"llama": decoder("llama")} | {name: tiny_model(name, MULTIMODAL) for name in ("llava", "qwen2_vl")}
    tokens, expected = random_ids(1, 7), {}
    for name, whole in wholes.items():
        part = whole.model if name == "llama" else whole.model.language_model
        train_mixing(interleave_heads(part, 2))
        expected[name] = logits(whole, input_ids=tokens)
        whole.save_pretrained(tmp_path / name)
    classes = {"llama": AutoModelForCausalLM, **dict.fromkeys(("llava", "qwen2_vl"), AutoModelForImageTextToText)}
    places = {str(tmp_path / name): auto_class.__name__ for name, auto_class in classes.items()}
    answers = run_in_clean_process(LOAD_WHOLE, {"places": places, "tokens": tokens.tolist()})
    llama, llava, qwen = (answers[place] for place in places)
    assert_close(torch.tensor(llama["logits"]), expected["llama"])
    assert "interleaved" in llava["error"]
    assert "q_mix" in qwen["log"] and "UNEXPECTED" in qwen["log"]


def test_a_part_with_a_head_is_in_the_report_of_loading(tmp_path):
    """Interleave the decoder next to an encoder, whose saved configuration stays plain."""
    encoder = BertModel(BertConfig(**DECODER_SIZES))
    whole = EncoderDecoderModel(encoder=encoder, decoder=decoder("gpt2"))
    interleave_heads(whole.decoder, 2)
    whole.save_pretrained(tmp_path)
    with CaptureLogger(logging.get_logger("transformers.modeling_utils")) as log:
        EncoderDecoderModel.from_pretrained(tmp_path)
    assert "attn.q_mix.weight" in log.out and "UNEXPECTED" in log.out


@pytest.mark.parametrize("name", ["llama", "llava"])
def test_a_whole_takes_its_part_with_the_package(name, tmp_path):
    """Load it where the package is imported, and take the mixing off again."""
    whole = decoder("llama") if name == "llama" else tiny_model(name, MULTIMODAL)
    part = whole.model if name == "llama" else whole.model.language_model
    fields = whole.config.to_dict()
    with pytest.raises(ValueError, match="layers is .7"):
        interleave_heads(part, 2, layers=[7])
    assert whole.config.to_dict() == fields
    remove_interleaving(interleave_heads(part, 2))
    assert whole.config.to_dict() == fields
    train_mixing(interleave_heads(part, 2))
    whole.save_pretrained(tmp_path)
    loader = AutoModelForCausalLM if name == "llama" else AutoModelForImageTextToText
    loaded = loader.from_pretrained(tmp_path, trust_remote_code=True)
    assert_close(logits(loaded, input_ids=random_ids(1, 7)), logits(whole, input_ids=random_ids(1, 7)))


def test_a_plain_model_does_not_save_the_configuration_of_an_interleaved_one(tmp_path):
    """Build two from one configuration object: the plain one computes what it did, and would load as the other."""
    decoder("llama").model.save_pretrained(tmp_path / "base")
    config = AutoConfig.from_pretrained(tmp_path / "base")
    one, other = (AutoModel.from_config(config).eval() for _ in range(2))
    expected = other(random_ids(1, 7)).last_hidden_state
    interleave_heads(one, 2)
    config.save_pretrained(tmp_path / "alone")
    torch.testing.assert_close(other(random_ids(1, 7)).last_hidden_state, expected)
    with pytest.raises(ValueError, match="This LlamaModel would be saved by .*copy.deepcopy"):
        other.save_pretrained(tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())
    one.save_pretrained(tmp_path / "one")
    assert AutoConfig.from_pretrained(tmp_path / "one").architectures == ["InterleavedLlamaModel"]
    remove_interleaving(one)
    other.save_pretrained(tmp_path / "other")
    assert type(AutoModel.from_pretrained(tmp_path / "other")) is type(other)


def test_a_part_of_an_interleaved_model_is_interleaved_already():
    model = interleave_heads(tiny_model("gemma3", MULTIMODAL), 2)
    for part in (model, model.model.language_model):
        with pytest.raises(ValueError, match="interleaved already"):
            interleave_heads(part, 2)


# Distribution, and the state of a process


@pytest.fixture
def two_processes():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_what_ddp_wraps_is_refused(two_processes):
    """DDP would leave the gradients of the mixing to each rank. Before and after it the model may be interleaved."""
    model, names = decoder("llama"), set(decoder("llama").state_dict())
    wrapped = DistributedDataParallel(model)
    with pytest.raises(ValueError, match="before PEFT, FSDP or DistributedDataParallel wraps the model"):
        interleave_heads(wrapped, 2)
    assert set(model.state_dict()) == names
    del wrapped
    model(random_ids(1, 5)).logits.sum().backward()
    DistributedDataParallel(interleave_heads(model, 2))


@pytest.mark.parametrize("way", [interleave_heads, pair_heads])
def test_a_replica_of_data_parallel(way, monkeypatch):
    """Compare the loss and gradients of a replica with the model's. Trainer makes these where it sees several GPUs."""
    model, ids = way(decoder("llama"), 2), random_ids(2, 5)
    expected = model(ids, labels=ids).loss
    expected.backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()

    def copied(tensors, *args, **kwargs):
        return [[each * 1 for each in tensors]]  # one replica

    module = sys.modules[replicate.__module__]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copied)
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    loss = replicate(model, [0])[0](ids, labels=ids).loss  # its weights are tensors and no parameters
    loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(weight.grad, each) for weight, each in zip(model.parameters(), gradients, strict=True))


def test_what_fsdp_holds_is_refused(two_processes):
    sharded = FullyShardedDataParallel(decoder("llama"), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="llama does not"):
        interleave_heads(sharded.module, 2)


def test_inference_mode_leaves_a_mixing_that_learns():
    model, tokens = decoder("llama"), random_ids(1, 7)
    expected = logits(model, input_ids=tokens)
    with torch.inference_mode():
        interleave_heads(model, 2)
        assert_close(model(tokens).logits, expected)
    model(tokens, labels=tokens).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in mixing_parameters(model))


def test_initialising_again_keeps_the_mixing():
    """Call `init_weights`, as from_pretrained and users do: it leaves all weights of a plain model as they are."""
    model = train_mixing(interleave_heads(decoder("llama"), 2))
    expected = {name: value.clone() for name, value in state_with_values(model).items()}
    model.init_weights()
    for name, value in state_with_values(model).items():
        assert value.equal(expected[name]), name


# Layers that are cut off


def test_layers_are_cut_off(tmp_path):
    """Load fewer layers than were saved, and save a model that lost some."""
    model, tokens = train_mixing(interleave_heads(decoder("llama"), 2)), random_ids(1, 7)
    model.save_pretrained(tmp_path / "whole")
    short = copy.deepcopy(model)
    short.model.layers, short.config.num_hidden_layers = short.model.layers[:1], 1
    expected = logits(short, input_ids=tokens)
    short.save_pretrained(tmp_path / "short")
    short.set_attn_implementation("eager")
    assert_close(logits(pickle.loads(pickle.dumps(short)), input_ids=tokens), expected)
    for place, fields in {"whole": {"num_hidden_layers": 1}, "short": {}}.items():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / place, trust_remote_code=True, **fields)
        assert list(loaded.config.interleaved_layers) == ["layers.0.self_attn"]
        assert_close(logits(loaded, input_ids=tokens), expected)
    late = interleave_heads(decoder("llama"), 2, layers=[2])
    late.save_pretrained(tmp_path / "late")
    with pytest.raises(ValueError, match="has none of its interleaved layers .layers.2.self_attn.: keep more layers"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "late", trust_remote_code=True, num_hidden_layers=2)
    plain = remove_interleaving(interleave_heads(decoder("llama"), 2))
    assert logits(plain, input_ids=tokens).equal(logits(decoder("llama"), input_ids=tokens))


# Registries that threads and copies of the code share


def test_threads_interleave_at_once():
    models = [decoder("llama", core) for core in 4 * ["sdpa", "eager"]]
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda model: interleave_heads(model, 2), models))
    expected = logits(decoder("llama"), input_ids=random_ids(1, 9))
    for model in models:
        assert len(model.config.interleaved_layers) == 3
        assert_close(logits(model, input_ids=random_ids(1, 9)), expected)


def test_names_of_cores_come_back(monkeypatch, tmp_path):
    """Take a core of the Hub, whose name has a "/", and copy, save and undo the model, which all read the name."""
    assert implementation_of_user("sdpa") == "sdpa" and implementation_of_user("core--_") == "core--_"
    model, tokens = decoder("llama"), random_ids(1, 9)
    model.config._attn_implementation = "some/core_"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "some/core_", ALL_ATTENTION_FUNCTIONS["sdpa"])
    monkeypatch.setitem(
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "some/core_", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    name = register_core("some/core_")
    assert "/" not in name and implementation_of_user(name) == "some/core_"
    expected = logits(decoder("llama"), input_ids=tokens)
    interleave_heads(model, 2)
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(logits(again, input_ids=tokens), expected)
        assert remove_interleaving(again).config._attn_implementation == "some/core_"


TWO_COPIES = """
import sys
import torch
from concurrent.futures import ThreadPoolExecutor
from transformers import AutoModelForCausalLM
tokens = torch.tensor(request["tokens"])
load = lambda place: AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
with ThreadPoolExecutor(2) as executor:
    models = list(executor.map(load, request["places"]))
sys.path.insert(0, request["root"])
sys.meta_path = [each for each in sys.meta_path if type(each).__name__ != "Blocker"]
from modeling_iha import interleave_heads
from transformers import LlamaConfig, LlamaForCausalLM
plain = LlamaForCausalLM(LlamaConfig(**request["sizes"])).eval()
expected = plain(tokens, use_cache=False).logits
models.append(interleave_heads(plain, 2))
run = lambda model: model(tokens, use_cache=False).logits
with ThreadPoolExecutor(3) as executor:
    found = [list(executor.map(run, models)) for _ in range(5)]
result = {
    "logits": [[each.tolist() for each in logits] for logits in found],
    "expected": expected.tolist(),
}
"""


def test_copies_of_the_code_share_a_process(tmp_path):
    """Load two checkpoints at once, one of whose files differ, then import the package, and run all in threads."""
    tokens, models = (
        random_ids(1, 9),
        [train_mixing(interleave_heads(decoder("llama"), 2), size) for size in (0.2, 0.3)],
    )
    places = [tmp_path / name for name in ("one", "other")]
    for model, place in zip(models, places):
        model.save_pretrained(place)
    (places[1] / "virtual_tokens.py").open("a").write("# of another version\n")
    request = {"places": [str(place) for place in places], "tokens": tokens.tolist(), "root": str(ROOT)}
    answer = run_in_clean_process(TWO_COPIES, {**request, "sizes": DECODER_SIZES})
    expected = [*(logits(model, input_ids=tokens) for model in models), torch.tensor(answer["expected"])]
    for found in answer["logits"]:
        for one, other in zip(found, expected, strict=True):
            assert_close(torch.tensor(one), other)


# A config or a cache with other attributes


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))])
def test_a_view_can_be_copied(again):
    view = again(View(BertConfig(hidden_size=8, num_attention_heads=2), hidden_size=16))
    assert (view.hidden_size, view.num_attention_heads) == (16, 2)
