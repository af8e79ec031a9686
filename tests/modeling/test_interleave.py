"""Test `interleave_heads`: the model computes what it computed, learns as a plain loop does, and comes back."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from datasets.fingerprint import Hasher
from helpers import DECODER_SIZES as SIZES
from helpers import (
    DECODERS,
    WAYS,
    assert_close,
    assert_gradients_match,
    decoder,
    interleaved,
    loss_and_gradients,
    random_ids,
    random_model,
    small_config,
    train_mixing,
)
from helpers import uncached_logits as logits
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    EncoderDecoderModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TextGenerationPipeline,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from iha.processes import run_in_clean_process
from modeling_iha import (
    IHAConfig,
    IHAForCausalLM,
    interleave_heads,
    modeling_interleaved,
    pair_heads,
    remove_interleaving,
    token_attentions,
)
from modeling_iha.mixing_weights import mixing_parameters, state_with_values
from modeling_iha.modeling_interleaved import HOOK, MIXING_MODULES
from modeling_iha.transformers_versions import CACHE
from sft.make_tokenizer import byte_tokenizer


SCALE = 40.0  # the default
EVERY = pytest.mark.parametrize("name", DECODERS)


def padded(rows=2, length=27, padding=5):
    tokens = random_ids(rows, length)
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask}


# An attention of loops, as an attention core of the base model: it reads the mixing weights by itself.


def attend_in_loops(module, query, key, value, attention_mask, scaling, softcap=None, **kwargs):
    """Compute IHA, Algorithm 1, for full attention, from a mask over tokens."""
    weights, dtype = [getattr(module, name)(query).double() for name in MIXING_MODULES], value.dtype
    query, key, value = query.double(), key.double(), value.double()
    heads, groups = query.shape[1], key.shape[1]
    q_mix, k_mix, v_mix, shares = weights
    pseudo_heads, output = q_mix.shape[-1], []
    for h in range(heads):
        g = h // (heads // groups)
        keys = [sum(k_mix[m, g, j] * key[:, m] for m in range(groups)) for j in range(pseudo_heads)]
        values = [sum(v_mix[m, g, j] * value[:, m] for m in range(groups)) for j in range(pseudo_heads)]
        collapsed = 0
        for p in range(pseudo_heads):
            own = sum(q_mix[m, h, p] * query[:, m] for m in range(heads))
            scores = torch.stack([own @ keys[j].transpose(1, 2) * scaling for j in range(pseudo_heads)], dim=-1)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            hidden = (attention_mask[:, 0] != 0)[..., None].repeat(1, 1, 1, pseudo_heads)
            n = torch.arange(query.shape[2])
            hidden[:, n, n, p + 1 :] = True
            scores = scores.masked_fill(hidden, -torch.inf).flatten(2)
            collapsed = collapsed + shares[h, p] * (scores.softmax(-1) @ torch.stack(values, dim=2).flatten(1, 2))
        output.append(collapsed)
    return torch.stack(output, dim=2).to(dtype), None


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "qwen3_moe"])
def test_gradients_are_those_of_a_plain_loop(name, monkeypatch):
    model = train_mixing(interleave_heads(decoder(name, "eager"), 3))
    plain = remove_only_the_classes(copy.deepcopy(model))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "eager", attend_in_loops)
    expected = loss_and_gradients(plain, random_ids(2, 7))
    monkeypatch.delitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "eager")
    loss, gradients = loss_and_gradients(model, random_ids(2, 7))
    assert_close(loss, expected[0])
    assert_gradients_match(gradients, {name: g.double() for name, g in expected[1].items()}, 1e-4)
    assert all(gradient.abs().max() > 0 for name, gradient in gradients.items() if "_mix" in name)


def remove_only_the_classes(model):
    """Return the base model with the mixing still in it, for a core that reads it."""
    del model.model._forward_pre_hooks[HOOK]
    model.__class__ = type(model).__bases__[1]
    model.config._attn_implementation = "eager"
    return model


# Exact start and the way back


@pytest.mark.one_of(2)
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"collapse": "all_heads", "layers": [1], "seed": None}])
def test_start_changes_nothing_and_can_be_removed(name, dtype, options):
    model, inputs = decoder(name).to(dtype), padded()
    real, before = inputs["attention_mask"].bool(), decoder(name).to(dtype)
    expected, names = logits(before, **inputs)[real], set(before.state_dict())
    assert interleave_heads(model, 2, **options) is model
    assert_close(logits(model, **inputs)[real], expected, 1e-6 if dtype == torch.float32 else 2e-2)
    assert {weight.dtype for weight in model.parameters()} == {dtype}

    assert type(remove_interleaving(model)) is type(before)
    assert set(model.state_dict()) == names
    assert model.config.to_dict() == before.config.to_dict()
    assert logits(model, **inputs)[real].equal(expected)
    interleave_heads(model, 3)  # a second time


def test_models_of_one_configuration_object_are_interleaved_one_by_one():
    model = decoder("llama")
    plain, fields = type(model)(model.config), model.config.to_dict()
    interleave_heads(model, 2)
    assert plain.config.to_dict() == fields
    assert plain.config._attn_implementation == "sdpa"
    assert {id(module.config) for module in model.modules() if hasattr(module, "config")} == {id(model.config)}
    interleave_heads(plain, 3)
    assert (model.config.num_pseudo_heads, plain.config.num_pseudo_heads) == (2, 3)


def test_attention_of_others_is_left_alone(monkeypatch):
    """Set an item of the registry, as sequence-parallel libraries do, and run another model in the middle."""
    stock, other, lengths = ALL_ATTENTION_FUNCTIONS["sdpa"], decoder("llama"), []

    def theirs(module, query, *args, **kwargs):
        lengths.append(query.shape[2])
        if len(lengths) == 1:
            logits(other, input_ids=random_ids(1, 5))
        return stock(module, query, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", theirs)
    model = interleave_heads(decoder("llama"), 2)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
    lengths[:] = [0]
    logits(model, input_ids=random_ids(1, 7))
    assert lengths[1:] == [14] * 3


def test_trained_mixing_is_not_removed():
    model = interleave_heads(decoder("llama"), 2)
    model.model.layers[2].self_attn.k_mix.weight.data[0, 1, 1] += 0.25 / SCALE
    with pytest.raises(ValueError, match=r"up to 0\.25 from the start"):
        remove_interleaving(model)
    with pytest.raises(ValueError, match="no interleaved heads"):
        remove_interleaving(decoder("llama"))
    with pytest.raises(ValueError, match="window of their own"):
        remove_interleaving(interleave_heads(decoder("llama"), 2, sliding_window=3))


def test_a_loaded_checkpoint_is_plain_again(tmp_path):
    interleaved = interleave_heads(decoder("llama"), 2)
    interleaved.save_pretrained(tmp_path / "interleaved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "interleaved", trust_remote_code=True)
    decoder("llama").save_pretrained(tmp_path)
    for place, model in {"saved": interleaved, "loaded": loaded}.items():
        remove_interleaving(model).save_pretrained(tmp_path / place)
        assert (tmp_path / place / "config.json").read_text() == (tmp_path / "config.json").read_text()
        again = AutoModelForCausalLM.from_pretrained(tmp_path / place, trust_remote_code=True)
        assert logits(again, input_ids=random_ids(1, 5)).equal(logits(decoder("llama"), input_ids=random_ids(1, 5)))


def with_sharded_layer(model):
    """Make a layer of a model one of the class that FSDP2 makes, as `fully_shard(layer)` does before the model."""
    as_fsdp2_names_it = {"__module__": "torch.distributed.fsdp._fully_shard"}
    layer = model.model.layers[1]
    layer.__class__ = type("FSDPLlamaDecoderLayer", (type(layer),), as_fsdp2_names_it)
    return model


def paired(model):
    with pytest.warns(UserWarning, match="are paired"):
        return pair_heads(model, 2)


@pytest.mark.parametrize("make", [lambda model: interleave_heads(model, 2), paired])
def test_a_model_whose_layers_were_changed_is_not_saved(make, tmp_path):
    """A copied layer attends over virtual tokens, and a load would make it plain."""
    model = make(decoder("llama"))
    copied = copy.deepcopy(model.model.layers[2])
    copied.self_attn.layer_idx = 3
    model.model.layers.append(copied)
    with pytest.raises(ValueError, match="has 4 attention modules .* not the 3"):
        model.save_pretrained(tmp_path / "longer")
    del model.model.layers[1:]
    model.save_pretrained(tmp_path)  # without its last layers
    attention = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="has 0 attention modules .* not the 1"):
        for name in MIXING_MODULES if hasattr(attention, "q_mix") else ["paired_heads"]:
            delattr(attention, name)
        model.save_pretrained(tmp_path)


def test_moved_layers_are_not_saved(tmp_path):
    """A load would drop the mixing of one layer and make that of another anew."""
    model = interleave_heads(decoder("llama"), 2, layers=[0, 2])
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in (0, 2, 1)])
    with pytest.raises(ValueError, match="has 2 attention modules .* not the 2"):
        model.save_pretrained(tmp_path)


def test_the_default_device_does_not_matter():
    tokens, expected = random_ids(1, 5), interleave_heads(decoder("llama"), 2)
    model = decoder("llama")
    with torch.device("meta"):
        interleave_heads(model, 2)
    assert state_equal(model, expected)
    with torch.device("meta"):
        remove_interleaving(model)
        model = paired(model)
    assert_close(logits(model, input_ids=tokens), logits(paired(decoder("llama")), input_ids=tokens))


def state_equal(model, other) -> bool:
    state = other.state_dict()
    return all(value.equal(state[name]) for name, value in model.state_dict().items())


def test_autocast_does_not_decide_whether_a_model_is_supported():
    with torch.autocast("cpu", torch.bfloat16):
        model = interleave_heads(decoder("gpt2"), 2)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_layers_and_windows_of_the_paper():
    model = interleave_heads(decoder("llama", num_hidden_layers=6), 2, layers="paper", sliding_window="paper")
    assert list(model.config.interleaved_layers) == [f"layers.{i}.self_attn" for i in (0, 1, 2, 3, 5)]
    assert model.config.interleaved_window == 256 // (2 * 2**2)


def llama():
    return decoder("llama")


BOTH_REJECT = [
    (llama, {"num_pseudo_heads": 1}, "expected an integer of at least 2"),
    (llama, {"num_pseudo_heads": "2"}, "is '2': expected an integer of at least 2"),
    (llama, {"layers": "papr"}, "layers is 'papr': expected"),
    (llama, {"layers": 1}, "layers is 1: expected"),
    (llama, {"layers": [True, False]}, "layers is .True, False.: expected"),
    (llama, {"layers": [3]}, r"some of the attention layers \[0, 1, 2\] of llama"),
    (llama, {"layers": []}, "some of the attention layers"),
    (llama, {"sliding_window": 1}, "at least 2 tokens"),
    (llama, {"sliding_window": 4096}, "4096, longer than the context of 256 tokens"),
    (lambda: interleave_heads(llama(), 2), {}, "interleaved already"),
    (lambda: paired(llama()), {}, "interleaved already"),
    (lambda: IHAForCausalLM(IHAConfig(**SIZES)), {}, "heads of this model are interleaved already"),
    (lambda: with_sharded_layer(llama()), {}, "FSDPLlamaDecoderLayer is not a model of Transformers or .* PEFT, FSDP"),
    (lambda: get_peft_model(llama(), LoraConfig()), {}, "before PEFT, FSDP"),
    (lambda: T5ForConditionalGeneration(T5Config(d_model=32, d_ff=32, num_layers=1)), {}, "t5 has an encoder"),
]
REJECTED = [
    *((change, *case) for change in (interleave_heads, pair_heads) for case in BOTH_REJECT),
    (interleave_heads, llama, {"mixing_scale": 0}, "mixing_scale is 0: expected a number above 0"),
    (interleave_heads, llama, {"mixing_scale": float("nan")}, "mixing_scale is nan: expected"),
    (interleave_heads, llama, {"collapse": "sum"}, 'expected "per_head" or "all_heads"'),
    (pair_heads, llama, {"num_pseudo_heads": 4}, "4: expected a divisor of the 4 query heads and 2 key/value heads"),
    (pair_heads, llama, {"sliding_window": "paper"}, "'paper': expected at least 2 tokens, None"),
    (pair_heads, lambda: decoder("gpt_oss", "eager"), {}, "GptOssAttention has an attention sink for each head"),
]


@pytest.mark.parametrize(("change", "make", "options", "message"), REJECTED)
def test_what_is_rejected_stays_as_it_was(change, make, options, message):
    made = make()
    model = getattr(made, "model", made)
    names, kind, config = set(model.state_dict()), type(model), getattr(model, "config", None)
    fields = config and config.to_dict()
    with pytest.raises(ValueError, match=message) as error:
        change(made, **{"num_pseudo_heads": 2, **options})
    assert "\n" not in str(error.value)
    assert set(model.state_dict()) == names and type(model) is kind
    assert getattr(model, "config", None) is config and (config and config.to_dict()) == fields


@pytest.mark.parametrize(
    "make", [lambda: interleave_heads(decoder("llama"), 2), lambda: IHAForCausalLM(IHAConfig(**SIZES))]
)
def test_trainer_and_pipelines_know_a_causal_language_model(make, tmp_path):
    model, tokens = make(), random_ids(2, 9)
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    trainer = Trainer(model, arguments)
    smoothed = trainer.label_smoother(model(tokens), tokens, shift_labels=True)
    assert_close(trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens}), smoothed)
    with CaptureLogger(logging.get_logger("transformers.pipelines.base")) as log:
        TextGenerationPipeline(model, byte_tokenizer())
    assert "not supported" not in log.out


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-5), (torch.float32, 1e-3), (torch.float16, 0.05), (torch.bfloat16, 0.05)],
    ids=str,
)
def test_a_difference_beyond_what_a_dtype_rounds_is_refused(dtype, tolerance, monkeypatch):
    monkeypatch.setattr("modeling_iha.probes.relative_difference", lambda expected, actual: 1.01 * tolerance)
    with pytest.raises(ValueError, match="hidden states differ by"):
        interleave_heads(decoder("llama").to(dtype), 2)


def test_meta_models_and_inexact_ones_are_refused(monkeypatch):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="meta device"):
        interleave_heads(model, 2)
    # A model whose code changes its mask after it was made, and one that is computed otherwise than before.
    model = decoder("llama")
    config = model.config
    forward = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *args, attention_mask=None, **kwargs: forward(
        *args, attention_mask=None if attention_mask is None else attention_mask[..., :7, :7], **kwargs
    )
    with pytest.raises(ValueError, match="RuntimeError: The size of tensor"):
        interleave_heads(model, 2)
    assert type(model) is LlamaForCausalLM
    assert model.config is config and config._attn_implementation == "sdpa"
    monkeypatch.setattr("modeling_iha.exact_start.last_pseudo_head", lambda heads, p, _: torch.ones(heads, p) / p)
    with pytest.raises(ValueError, match="hidden states differ by"):
        interleave_heads(decoder("llama"), 2)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model = decoder("llama", "mine")
    with pytest.raises(ValueError, match="'mine' has no mask function"):
        interleave_heads(model, 2)
    assert (type(model), model.config._attn_implementation) == (LlamaForCausalLM, "mine")


def test_layers_may_be_left_out_and_threads_share_a_model():
    assert interleave_heads(decoder("opt"), 2).train()(random_ids(1, 5)).logits.isfinite().all()
    model, tokens = train_mixing(interleave_heads(decoder("llama"), 2)), random_ids(1, 5)
    expected = logits(model, input_ids=tokens)
    with ThreadPoolExecutor(4) as executor:
        found = executor.map(lambda _: logits(model, input_ids=tokens), range(60))
    assert all(each.equal(expected) for each in found)


def test_a_server_without_the_plugin_is_told_of_it():
    """Answer vLLM, which loads the class that `auto_map` names, takes a model of Transformers alone, and asks it."""
    loaded = modeling_interleaved.InterleavedLlamaForCausalLM
    assert issubclass(loaded, transformers.PreTrainedModel)
    with pytest.raises(NotImplementedError, match="install the plugin vllm_iha"):
        loaded.is_backend_compatible()


def test_masks_that_misfit_are_refused():
    model = interleave_heads(decoder("llama"), 2)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    for core in ("sdpa", "eager"):
        model.set_attn_implementation(core)
        with pytest.raises(ValueError, match=r"attention_mask must be .* This one is \[1, 1, 7, 7\], for 5 tokens"):
            model(random_ids(1, 5), attention_mask=mask)
    assert model.config._attn_implementation == "iha_eager"


def test_flex_takes_layers_that_share_keys():
    """Gemma 4 asks for this core by name before it leaves out rows of a mask."""
    with torch.compiler.set_stance("force_eager"):
        model, inputs = decoder("gemma4_text", "flex_attention"), padded()
        expected = logits(model, **inputs, logits_to_keep=3)
        interleave_heads(model, 2)
        assert_close(logits(model, **inputs, logits_to_keep=3), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_decoder_beside_an_encoder(name, tmp_path):
    """Compare the logits of an encoder-decoder, its tokens, and those of what was saved and loaded."""
    encoder = BertModel(BertConfig(**SIZES)).eval()
    plain = EncoderDecoderModel(encoder=encoder, decoder=decoder(name)).eval()
    model = EncoderDecoderModel(encoder=encoder, decoder=interleave_heads(decoder(name), 2)).eval()
    inputs = {**padded(), "decoder_input_ids": random_ids(2, 5)}
    greedy = {"max_new_tokens": 4, "decoder_start_token_id": 1, "do_sample": False}
    assert_close(logits(model, **inputs), logits(plain, **inputs))
    assert model.generate(**padded(), **greedy).equal(plain.generate(**padded(), **greedy))
    train_mixing(model.decoder)
    model.save_pretrained(tmp_path)
    assert_close(logits(EncoderDecoderModel.from_pretrained(tmp_path), **inputs), logits(model, **inputs))


# Checkpoints


def test_classifier_is_interleaved_in_place_and_loaded(tmp_path):
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES)).eval()
    tokens = random_ids(1, 9)
    before = model(tokens).logits
    assert_close(interleave_heads(model, 2)(tokens).logits, before)
    expected = train_mixing(model)(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True)
    assert_close(loaded(tokens).logits, expected)


def test_models_are_pickled(tmp_path):
    model, tokens = train_mixing(interleave_heads(decoder("gemma3_text"), 2, sliding_window=4)), random_ids(1, 9)
    torch.save(model, tmp_path / "model.pt")
    expected = logits(model, input_ids=tokens)
    for again in (pickle.loads(pickle.dumps(model)), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert (type(again), type(again.config)) == (type(model), type(model.config))
        assert again.config.to_dict() == model.config.to_dict()
        assert logits(again, input_ids=tokens).equal(expected)


def test_the_auto_classes_build_what_a_configuration_names(monkeypatch):
    """Build it also where the configuration came by pickle to a process that read no checkpoint, as vLLM's worker."""
    config = interleave_heads(decoder("llama"), 2).config
    built = AutoModelForCausalLM.from_config(config)
    q_mix = built.model.layers[0].self_attn.q_mix.value()
    assert not torch.equal(q_mix[..., 0], q_mix[..., 1])  # noise makes the pseudo-heads differ
    assert type(built).__name__ == "InterleavedLlamaForCausalLM" and built.config.interleaved_layers
    monkeypatch.delitem(AutoModelForCausalLM._model_mapping._extra_content, type(config))
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_config(config)
    assert type(AutoModelForCausalLM.from_config(pickle.loads(pickle.dumps(config)))) is type(built)


# Other libraries


LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": list(MIXING_MODULES)}


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: get_peft_model(model, LoraConfig(**LORA))])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_mixing_learns_at_a_rate_of_its_own(name, wrap):
    """Train one copy by any optimizer, and a copy without starts by one that has a group for the mixing."""
    tokens = random_ids(2, 9)
    ours = wrap(interleave_heads(decoder(name), 2)).train()  # `decoder` sets the seed of LoRA too
    plain = wrap(interleave_heads(decoder(name), 2, mixing_scale=1)).train()
    mixing = set(mixing_parameters(plain))
    others = [weight for weight in plain.parameters() if weight.requires_grad and weight not in mixing]
    groups = [{"params": others}, {"params": list(mixing), "lr": SCALE * 1e-3}]
    settings = {"lr": 1e-3, "weight_decay": 0.0}
    optimizers = torch.optim.AdamW(ours.parameters(), **settings), torch.optim.AdamW(groups, **settings)
    for _ in range(4):
        losses = []
        for model, optimizer in zip((ours, plain), optimizers):
            optimizer.zero_grad()
            losses.append(model(tokens, labels=tokens).loss)
            losses[-1].backward()
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
        assert_close(torch.stack(losses[:2]), torch.stack(losses[2:]), 1e-4)
    expected = state_with_values(plain)
    for weight, value in state_with_values(ours).items():
        assert_close(value, expected[weight], 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_steps_are_kept_and_decay_pulls_to_the_start(dtype):
    """Take steps as at 1e-5, which are lost next to entries of 1 in bfloat16, and then steps of decay alone."""
    model = interleave_heads(decoder("llama").to(dtype), 2)
    start, weights = state_with_values(model), mixing_parameters(model)
    optimizer = torch.optim.AdamW(weights, lr=1e-5, eps=0, weight_decay=0.0)
    for _ in range(50):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    spacing = torch.finfo(dtype).eps  # of the value 1
    for name, value in state_with_values(model).items():
        if any(f".{each}." in name for each in MIXING_MODULES):
            assert (start[name] - value).sub(SCALE * 50 * 1e-5).abs().max() < spacing
    optimizer = torch.optim.AdamW(weights, lr=0.5, weight_decay=1.0)
    for _ in range(20):
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert all(torch.allclose(value, start[name], atol=1e-7) for name, value in state_with_values(model).items())


@pytest.mark.parametrize("window", [None, 4])
def test_images_have_a_dense_mask(window):
    """Let image tokens see each other both ways."""
    model = interleaved("llama", window, [0, 1], 3)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    images = torch.full((1, 60), -1)
    images[0, 10:17] = images[0, 30:34] = 0  # parts of one block, which see each other
    real = (torch.arange(60) >= 4)[None]
    tokens, kwargs = random_ids(1, 60), {CACHE: None, "block_sequence_ids": images}
    found = []
    for each in (model, eager):
        states = each.get_input_embeddings()(tokens)
        mask = create_causal_mask(each.config, states, real, **kwargs)
        # With a window there are two planes: that of the plain layer, and that of the interleaved ones.
        assert list(mask.shape) == [1, 1 if window is None else 2, 180, 180]
        found.append(logits(each, None, inputs_embeds=states, attention_mask=mask)[real])
    assert_close(*found)
    # The first pseudo-head of token 12 sees itself in its own token, and all of the later tokens of its image.
    seen = (mask == 0)[0, -1, 3 * 12].nonzero().flatten()
    first = 3 * 4 if window is None else 3 * (12 - window) + 1
    assert seen.tolist() == [*range(first, 3 * 12 + 1), *range(3 * 13, 3 * 17), *range(3 * 30, 3 * 34)]


def test_an_image_of_two_tokens_keeps_a_dense_mask():
    """The only later token that a token sees is the next one. Padding on the left could be first keys."""
    config = interleave_heads(decoder("llama"), 2).config
    kwargs = {CACHE: None, "block_sequence_ids": torch.tensor([[-1, -1, 0, 0, -1]])}
    mask = create_causal_mask(config, torch.zeros(1, 5, 32), torch.tensor([[0, 1, 1, 1, 1]]), **kwargs)
    assert list(mask.shape) == [1, 1, 10, 10]
    assert mask[0, 0, 2 * 2].nonzero().flatten().tolist() == [2, 3, 4, 6, 7]


def test_a_mask_of_both_ways_means_what_it_means_to_the_base():
    """Let the first four tokens see each other, as a prefix does."""
    model, tokens = decoder("llama"), random_ids(2, 9)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    mask[..., :4, :4] = True
    expected = logits(model, input_ids=tokens, attention_mask=mask)
    assert (logits(model, input_ids=tokens) - expected).abs().max() > 1e-3
    assert_close(logits(interleave_heads(model, 2), input_ids=tokens, attention_mask=mask), expected)


def test_a_base_that_returns_nan_is_named():
    """Llama's eager softmax is in float32, where the lowest float64 hides a row of padding as -inf."""
    with pytest.raises(ValueError, match="llama itself returns NaN or infinity for a padded batch"):
        interleave_heads(decoder("llama", "eager").double(), 2)


def test_a_configuration_of_attention_in_both_directions_is_refused():
    for model in (interleave_heads(decoder("llama"), 2), random_model(small_config())):
        model.config.is_causal = False
        with pytest.raises(ValueError, match="is_causal=False: interleaved heads are causal"):
            model(random_ids(1, 9))


@pytest.mark.slow
def test_datasets_hashes_a_loaded_model(tmp_path):
    """Hash equal models alike, so that `Dataset.map` finds what it has computed with one."""
    models = {"iha": random_model(small_config()), "interleaved": interleave_heads(decoder("llama"), 2)}
    for way, model in models.items():
        assert Hasher.hash(model) == Hasher.hash(copy.deepcopy(model))
        model.save_pretrained(tmp_path / way)
    for equal, again, other in run_in_clean_process(HASHES, {"places": [str(tmp_path / way) for way in models]}):
        assert equal == again != other


HASHES = """
from datasets.fingerprint import Hasher
from transformers import AutoModelForCausalLM
result = []
for place in request["places"]:
    models = [AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True) for _ in range(3)]
    models[2].lm_head.weight.data[0, 0] += 1
    result.append([Hasher.hash(lambda row: model(row)) for model in models])
"""


# Distribution, maps and fields


def test_tensor_parallelism_is_refused(tmp_path, monkeypatch):
    """Reject some of the heads, as `from_pretrained` would share them; no process group is needed to ask."""
    shared = DistributedConfig(tp_size=2, fsdp_size=1)
    model = decoder("llama")
    model.config.distributed_config = shared  # as `from_pretrained` leaves it
    with pytest.raises(ValueError, match="Tensor parallelism .* leaves each process some heads"):
        interleave_heads(model, 2)
    assert type(model) is LlamaForCausalLM
    del model.config.distributed_config
    interleave_heads(model, 2).save_pretrained(tmp_path)
    prepared = lambda distributed_config, **_: (distributed_config, None, None)  # noqa: E731
    monkeypatch.setattr(PreTrainedModel, "prepare_distribute_model", prepared)
    with pytest.raises(ValueError, match="Tensor parallelism .* leaves each process some heads"):
        AutoModelForCausalLM.from_pretrained(tmp_path, distributed_config=shared)
    interleave_heads(decoder("llama", distributed_config=DistributedConfig(tp_size=1, fsdp_size=2)), 2)


def test_maps_that_are_not_there_or_not_of_these_tokens_are_refused():
    model = interleave_heads(decoder("llama"), 2)
    with pytest.raises(ValueError, match=r'SDPA returns none: call model.set_attn_implementation\("eager"\)'):
        token_attentions(model(random_ids(1, 5), output_attentions=True).attentions or (), 5, 4)
    model.set_attn_implementation("eager")
    maps = model(random_ids(1, 5), output_attentions=True).attentions
    for wrong in (4, 20):
        with pytest.raises(ValueError, match=rf"num_tokens is {wrong}, and a map has the shape \(1, 4, 10, 10\)"):
            token_attentions(maps, wrong, 4)


def test_a_model_without_mixing_has_no_mixing_parameters():
    """Say so, because an optimizer would get an empty group. Frozen mixing and paired heads have no others."""
    for plain in (decoder("llama"), random_model(small_config(attention_kinds="mha"))):
        with pytest.raises(ValueError, match=f"{type(plain).__name__} has no weights that mix heads"):
            mixing_parameters(plain)
    frozen = interleave_heads(decoder("llama"), 2).requires_grad_(False)
    pairs = random_model(small_config(attention_kinds=["paired_heads", "mha"]))
    adapted = get_peft_model(paired(decoder("llama")), LoraConfig(target_modules=["q_proj"]))
    for model in (frozen, pairs, adapted):
        assert mixing_parameters(model) == []


@pytest.mark.parametrize("way", WAYS)
def test_attention_maps_are_reduced_to_tokens(way):
    """Take the maps of a prompt, and of a token after it in the cache. A pseudo-head of "iha" is a head of its own."""
    model, tokens = WAYS[way](), random_ids(2, 6)
    model.set_attn_implementation("eager")
    prompt = model(tokens[:, :5], output_attentions=True, use_cache=True)
    last = model(tokens[:, 5:], **{CACHE: prompt[CACHE]}, output_attentions=True)
    for output, queries, keys in ((prompt, 5, 5), (last, 1, 6)):
        for weights, mapped in zip(output.attentions, token_attentions(output.attentions, queries, 4), strict=True):
            assert mapped.shape == (2, 4, queries, keys)
            size = weights.shape[-1] // keys  # P, or 1 in a plain layer
            of_tokens = weights.unflatten(-1, (keys, size)).sum(-1).unflatten(2, (queries, size))
            is_paired = "paired" in way  # virtual head i, pseudo-head p is head p * H / P + i
            expected = of_tokens.permute(0, 3, 1, 2, 4).flatten(1, 2) if is_paired else of_tokens.mean(3)
            torch.testing.assert_close(mapped, expected)
            torch.testing.assert_close(mapped.sum(-1), torch.ones(mapped.shape[:-1]))
    assert prompt.attentions[0].shape[-1] > 5


@pytest.mark.parametrize(("kinds", "layers"), [(["paired_heads", "mha"], 1), (["hyper", "paired_heads"], 2)])
def test_attention_maps_of_some_layers(kinds, layers):
    """A linear "hyper" layer returns none, and a forward leaves out layers beyond `num_hidden_layers`."""
    model = random_model(small_config(attention_kinds=kinds, attention_options={"hyper": {"linear": True}}))
    model.set_attn_implementation("eager")
    model.config.num_hidden_layers = layers
    (maps,) = token_attentions(model(random_ids(1, 5), output_attentions=True).attentions, 5, 4)
    assert maps.shape == (1, 4, 5, 5)
    torch.testing.assert_close(maps.sum(-1), torch.ones(1, 4, 5))


def test_the_fields_of_a_configuration_do_not_name_the_plain_base(tmp_path):
    """Look the class up as torchtitan 0.3.0 does: by the fields of a configuration, copied into another.

    Others, which look it up by `model_type`, find how to build what the base needs."""
    model = interleave_heads(decoder("llama"), 2)
    model.save_pretrained(tmp_path)
    for config in (model.config, AutoConfig.from_pretrained(tmp_path)):
        assert config.model_type == "llama" and config.to_dict()["model_type"] == "interleaved"
        assert "model_type" not in vars(config)
    assert remove_interleaving(model).config.model_type == "llama"
