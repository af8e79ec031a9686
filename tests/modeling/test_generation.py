"""Hold the size of a cache, the choice of the form of one new token, and the heads of tasks.

test_drawn.py compares what is generated."""

import pytest
import torch
from helpers import (
    HYBRID,
    assert_close,
    geometry_model,
    logits_in_chunks,
    random_ids,
    random_model,
    small_config,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from modeling_iha import IHAForQuestionAnswering, IHAForSequenceClassification, IHAForTokenClassification
from modeling_iha.interleaving import MixedHeads
from modeling_iha.pairing import PairedHeads
from modeling_iha.transformers_versions import CACHE
from modeling_iha.virtual_tokens import takes_new_token


LENGTH = 11


# The cache


def cache_bytes(model, input_ids):
    with torch.no_grad():
        cache = model(input_ids, use_cache=True)[CACHE]
    assert type(cache) is DynamicCache
    assert {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


@pytest.mark.parametrize(("positions", "dtype"), [("interleaved", torch.float32), ("shared", torch.bfloat16)], ids=str)
@pytest.mark.parametrize(("kind", "num_pseudo_heads"), [("iha", 1), ("iha", 2), ("iha", 5), ("paired_heads", 2)])
def test_cache_bytes_are_llamas(kind, num_pseudo_heads, positions, dtype):
    config = small_config(attention_kinds=kind, num_pseudo_heads=num_pseudo_heads, pseudo_positions=positions)
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    llama_config = LlamaConfig(num_key_value_heads=2, **{field: getattr(config, field) for field in shared})
    model, llama = random_model(config, dtype=dtype), random_model(llama_config, LlamaForCausalLM, dtype=dtype)
    for length in (1, 7):
        input_ids = random_ids(2, length)
        assert cache_bytes(model, input_ids) == cache_bytes(llama, input_ids)


def test_a_cache_cut_too_short_is_refused():
    """Reject the cache of an "mha" model, which has dropped a token that the "iha" window still reaches."""
    window = {"layer_types": "sliding_attention", "sliding_window": 3}
    mha = random_model(small_config(attention_kinds="mha", **window))
    cache = DynamicCache(config=mha.config)
    logits_in_chunks(mha, random_ids(1, 5), [5], cache)
    with pytest.raises(ValueError, match="keeps one token too few for this model"):
        random_model(small_config(**window))(random_ids(1, 1), **{CACHE: cache})


# Decoding from base states


def takes(num_keys, batch=1, core="sdpa", dropout=0.0, mask=True, **fields):
    model = geometry_model("global", **fields)
    model.set_attn_implementation(core)
    attention, query = model.model.layers[0].self_attn, torch.empty(batch, 4, 1, 8)
    heads, key = MixedHeads.of_module(attention, query), torch.empty(batch, 2, num_keys, 8)
    mask = torch.ones(batch, 1, 3, 3 * num_keys, dtype=torch.bool) if mask else None
    return takes_new_token(attention, heads, query, key, mask, dropout)


def test_one_token():
    """Decode from base states from 64 keys in a row and 128 in the batch on."""
    assert takes(128) and takes(64, batch=2) and not takes(127) and not takes(63, batch=64)
    assert not takes(4096, core="eager") and not takes(4096, dropout=0.1)
    assert not takes(4096, mask=False) and not takes(4096, pseudo_collapse="all_heads")


def test_a_collapse_over_all_heads_concerns_iha_layers_only(monkeypatch):
    """Decode paired heads from base states, and "iha" layers with such a collapse from virtual tokens."""
    calls = []
    new_token = PairedHeads.attend_new_token
    monkeypatch.setattr(PairedHeads, "attend_new_token", lambda *args: calls.append("paired") or new_token(*args))
    monkeypatch.setattr(MixedHeads, "attend_new_token", lambda *args: calls.append("mixed"))
    fields = {"attention_kinds": ["paired_heads", "iha"], "num_hidden_layers": 2, "pseudo_collapse": "all_heads"}
    model = random_model(small_config(**fields))
    input_ids = random_ids(1, 140)
    with torch.no_grad():
        past = model(input_ids[:, :-1], use_cache=True)[CACHE]
        assert not calls
        assert_close(model(input_ids[:, -1:], **{CACHE: past}).logits, model(input_ids).logits[:, -1:])
    assert calls == ["paired"]


# Task heads


@pytest.mark.parametrize(
    ("model_class", "labels", "shapes"),
    [
        (IHAForSequenceClassification, {"labels": torch.tensor([2, 0])}, {"logits": (2, 3)}),
        (IHAForTokenClassification, {"labels": torch.ones(2, 6, dtype=torch.long)}, {"logits": (2, 6, 3)}),
        (
            IHAForQuestionAnswering,
            {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
            {"start_logits": (2, 6), "end_logits": (2, 6)},
        ),
    ],
)
def test_task_heads(model_class, labels, shapes, tmp_path):
    """Train a step and save: the checkpoint gives the same answer, also behind padding on the left."""
    model = random_model(small_config(num_labels=3, **HYBRID, sliding_window=3), model_class)
    input_ids = random_ids(2, 6)
    output = model(input_ids, attention_mask=torch.ones_like(input_ids), **labels)
    for name, shape in shapes.items():
        assert getattr(output, name).shape == shape
    output.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    model.save_pretrained(tmp_path)
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    padded = torch.nn.functional.pad(input_ids, (2, 0))
    with torch.no_grad():
        again = loaded(input_ids, attention_mask=torch.ones_like(input_ids))
        behind_padding = loaded(
            padded, attention_mask=(padded != 0).long(), position_ids=((padded != 0).cumsum(-1) - 1).clamp_min(0)
        )
    for name in shapes:
        assert_close(getattr(again, name), getattr(output, name).detach())
        # A per-token head answers for the padding, too.
        per_token = getattr(output, name).shape[1] == 6
        actual = getattr(behind_padding, name)[:, 2:] if per_token else getattr(behind_padding, name)
        assert_close(actual, getattr(output, name).detach())


@pytest.mark.parametrize("geometry", ["global", "talking_heads"])
def test_masks_for_generate_without_a_cache(geometry):
    """Transformers' own function of this name has a default for the cache."""
    model = geometry_model(geometry)
    embeddings = torch.zeros(1, 1, model.config.hidden_size)
    masks = model.create_masks_for_generate(model.config, embeddings, None)
    assert set(masks) == {layer.self_attn.mask_name for layer in model.model.layers}


@pytest.mark.parametrize("geometry", ["global", "paired_heads", "window_mha"])
def test_one_new_token_on_the_meta_device(geometry):
    """Cached tokens are enough that a CPU would decode from base states."""
    model = geometry_model(geometry).to("meta")
    cache = DynamicCache(config=model.config)
    for length in (70, 1):
        tokens = torch.zeros(2, length, dtype=torch.long, device="meta")
        logits = model(tokens, **{CACHE: cache}).logits
    assert logits.shape == (2, 1, model.config.vocab_size) and logits.is_meta


def test_a_cache_rebuilt_from_its_tensors_keeps_the_edge_of_the_window():
    """Take the window from the tensor that `Cache.__iter__` hands out, as `ddp_cache_data` does."""
    model = geometry_model("window")
    cache = model(random_ids(1, 9), use_cache=True)[CACHE]
    window = model.config.sliding_window + 1
    assert [int(kept) for _, _, kept in cache] == [window] * model.config.num_hidden_layers
