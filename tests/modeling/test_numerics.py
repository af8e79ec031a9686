"""Hold the precision of dtypes, the arithmetic of training, and the ways in which weights come into a model."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from helpers import (
    BOTH,
    EVERY_KIND,
    HYBRID,
    assert_close,
    interleaved,
    random_ids,
    random_model,
    set_core,
    small_config,
    uncached_logits,
)
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from modeling_iha import IHAForCausalLM
from modeling_iha.transformers_versions import CACHE


def hybrid_config(**overrides):
    return small_config(**{"num_pseudo_heads": 3, **HYBRID, "sliding_window": 3, **overrides})


# Dtypes


@pytest.mark.one_of(2)
@pytest.mark.parametrize("how", ["loaded", "autocast"])
@pytest.mark.parametrize("core", ["base", "eager"])
@pytest.mark.parametrize("kind", EVERY_KIND["attention_kinds"])
def test_bfloat16_under_a_mask_and_on_a_cache(kind, core, how):
    """Compare logits, gradients and a decoded token with those in float32."""
    config = small_config(attention_kinds=kind, num_key_value_heads=4)
    input_ids = random_ids(8, 12)  # of one or two new tokens the roundings would decide
    mask = torch.ones(8, 12, dtype=torch.long)
    mask[0, :3] = 0
    outputs = []
    for half in (False, True):
        model = random_model(config, dtype=torch.bfloat16 if half and how == "loaded" else torch.float32)
        set_core(model, core)
        with torch.autocast("cpu", torch.bfloat16, enabled=half and how == "autocast"):
            logits = model(input_ids, attention_mask=mask, use_cache=False).logits
            gradients = torch.autograd.grad(logits[mask.bool()].float().square().mean(), list(model.parameters()))
            with torch.no_grad():
                cache = model(input_ids[:, :11], use_cache=True)[CACHE]
                token = model(input_ids[:, 11:], **{CACHE: cache}).logits
        outputs.append([logits[mask.bool()], torch.cat([g.flatten() for g in gradients]), token])
    for exact, states in zip(*outputs):
        assert (states.float() - exact).norm() < 0.2 * exact.norm()  # seen: 0.12


@pytest.mark.parametrize("positions", ["interleaved", "shared"])
@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half()])
def test_rope_keeps_its_precision(move, positions):
    """Move a model to half precision: rounded frequencies would turn position 1000 by radians."""
    config = small_config(pseudo_positions=positions)
    model = random_model(config)
    position_ids = torch.arange(1000, 1010)[None]
    x = torch.zeros(1, 10, 1)
    expected = model.model.rotary_emb.tables(x, position_ids)
    actual = move(model).model.rotary_emb.tables(x, position_ids)
    assert actual.keys() == expected.keys()
    for name in expected:
        for a, e in zip(actual[name], expected[name]):
            assert torch.equal(a, e)


def test_rope_rounds_once():
    """Scale in float64, as Llama scales before it rounds: YaRN's factor and half precision."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = random_model(small_config(rope_parameters=rope), dtype=torch.bfloat16)
    position_ids, x = torch.arange(40)[None], torch.zeros(1, 40, 1, dtype=torch.bfloat16)
    embedding = model.model.rotary_emb
    assert embedding.attention_scaling != 1
    tables = embedding.tables(x, position_ids)
    at_first = embedding.tables(x, position_ids * model.config.num_pseudo_heads)["token"]
    for expected, actual in zip(at_first, tables["interleaved"]):
        assert torch.equal(actual, expected)


# Training


def test_accumulated_gradients_are_those_of_one_batch(tmp_path):
    """Give the number of labels of all rows, as Trainer does, to rows that train 8, 1, 5 and 3 tokens."""
    model, input_ids = random_model(hybrid_config()), random_ids(4, 9)
    assert Trainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to="none")).model_accepts_loss_kwargs
    labels = input_ids.clone()
    for row, trained in enumerate((8, 1, 5, 3)):
        labels[row, : 9 - trained] = -100
    gradients = []
    for rows in (4, 1):
        model.zero_grad()
        for ids, of_rows in zip(input_ids.split(rows), labels.split(rows)):
            model(ids, labels=of_rows, num_items_in_batch=17).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    for actual, expected in zip(*gradients):
        assert_close(actual, expected)


# Weights


@pytest.mark.parametrize("layers", [{}, EVERY_KIND], ids=["hybrid", "every_kind"])
def test_from_the_meta_device(layers, tmp_path):
    """Fill a model without weights from a state dict, and load one from shards."""
    model = random_model(small_config(**layers) if layers else hybrid_config())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    input_ids = random_ids(2, 9)
    expected = uncached_logits(model, input_ids)
    with torch.device("meta"):
        empty = IHAForCausalLM(deepcopy(model.config))
    assert all(p.is_meta for p in empty.parameters())
    with torch.no_grad():
        for positions in (None, torch.arange(9, device="meta")[None]):
            assert empty(input_ids.to("meta"), position_ids=positions).logits.shape == expected.shape
    loaded = IHAForCausalLM.from_pretrained(tmp_path)
    assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])
    assert torch.equal(uncached_logits(loaded, input_ids), expected)
    empty.load_state_dict(loaded.state_dict(), assign=True)
    empty.model.rotary_emb = loaded.model.rotary_emb  # its buffers are in no checkpoint
    assert torch.equal(uncached_logits(empty.eval(), input_ids), expected)


OFFLOADED = {
    "hybrid": lambda: random_model(hybrid_config()),
    "hybrid, tied": lambda: random_model(hybrid_config(tie_word_embeddings=True, **BOTH)),
    "interleaved llama": partial(interleaved, "llama"),
    "interleaved gemma3": partial(interleaved, "gemma3_text"),
}


@pytest.mark.parametrize("core", ["eager", "sdpa"])
@pytest.mark.parametrize("name", OFFLOADED)
def test_device_map_with_disk_offload(name, core, tmp_path):
    """Let accelerate keep layers on disk and bring them in for their forward, with a cache that stays."""
    model = OFFLOADED[name]()
    model.save_pretrained(tmp_path / "model")
    modules = [f"model.{part}" for part, _ in model.model.named_children() if part != "layers"]
    device_map = dict.fromkeys([*modules, "lm_head"], "cpu")
    device_map |= {f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(len(model.model.layers))}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload", attn_implementation=core
    )
    assert {name.split(".")[2] for name, p in loaded.named_parameters() if p.is_meta} == {"1", "2"}
    input_ids = random_ids(2, 9)
    assert_close(uncached_logits(loaded, input_ids), uncached_logits(model, input_ids))
    options = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(input_ids, **options), model.generate(input_ids, **options))
    assert any(p.is_meta for p in loaded.model.layers[1].parameters())


@pytest.mark.parametrize("kind", ["iha", "knocking_heads", "talking_heads", "dcmha"])
def test_mixing_in_another_dtype_than_the_layer(kind):
    """Keep the mixing in float32 next to a base in bfloat16, without autocast."""
    options = {"knocking_heads": {"values": "mlp", "queries": True}} if kind == "knocking_heads" else None
    model = random_model(small_config(attention_kinds=kind, attention_options=options)).to(torch.bfloat16)
    for layer in model.model.layers:
        for name in layer.self_attn.mixing_modules:
            if getattr(layer.self_attn, name) is not None:
                getattr(layer.self_attn, name).float()
    assert uncached_logits(model, random_ids(1, 7)).dtype == torch.bfloat16


def test_a_new_mixing_is_the_identity_with_noise_of_the_range():
    """Start close to multi-head attention, with pseudo-heads that differ."""
    fields = {"hidden_size": 128, "num_attention_heads": 16, "num_key_value_heads": 16, "initializer_range": 0.01}
    torch.manual_seed(0)
    attention = IHAForCausalLM(small_config(**fields)).model.layers[0].self_attn
    for mixing in (attention.q_mix, attention.k_mix, attention.v_mix):
        noise = mixing.value() - torch.eye(16)[..., None]
        assert noise.std().item() == pytest.approx(0.01, rel=0.1) and noise.mean().abs() < 0.001
