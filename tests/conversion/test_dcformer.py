"""Convert released DCFormer checkpoints with equal logits.

They are compared with the loops of `references/dcmha.py`, which follow the released format, and, where
DCFORMER_OFFICIAL_CODE names its folder, with the official code (pytorch/dcformer of Caiyun-AI/DCFormer).
"""

import importlib
import json
import os

import pytest
import torch
from helpers import FP64, logits_in_chunks, random_ids, relative_error, uncached_logits
from references.dcmha import released_causal_lm
from tiny_sources import DCFORMER, released_weights, save_released
from transformers import AutoModelForCausalLM

from conversion_scripts import convert_dcformer_to_iha
from iha.conversion.convert_dcformer_to_iha import convert_model, iha_config
from iha.errors import UserError


pytestmark = pytest.mark.usefixtures("uncounted_cards")
# An older config, as of the first release: no QK-norm, no gate of the FFN, and its fields absent.
PLAIN = {name: value for name, value in DCFORMER.items() if name not in ("window_type", "mgate", "mgate_dim")}
PLAIN |= {"use_qk_norm": False, "norm_eps": 1e-5}


def layer_windows(config):
    return [config["window_size"] if i % 2 == 0 else None for i in range(config["n_layer"])]


def test_mixed_dtypes_lose_no_digit():
    weights = released_weights(DCFORMER, torch.float32)
    weights["output.weight"] = weights["output.weight"].bfloat16()
    model = convert_model(iha_config(DCFORMER), dict(weights))
    assert model.dtype == torch.float32 and {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert torch.equal(model.model.embed_tokens.weight, weights["tok_embeddings.weight"])
    assert torch.equal(model.lm_head.weight, weights["output.weight"].float())
    assert convert_model(iha_config(DCFORMER), released_weights(DCFORMER, torch.bfloat16)).dtype == torch.bfloat16
    weights = {name: tensor.half() for name, tensor in weights.items()} | {"output.weight": weights["output.weight"]}
    assert convert_model(iha_config(DCFORMER), weights).dtype == torch.float32  # neither half holds the other


@pytest.mark.parametrize("source", [DCFORMER, PLAIN, DCFORMER | {"window_size": None}], ids=["all", "plain", "global"])
def test_converted_model_computes_what_the_released_one_does(source):
    weights = released_weights(source)
    model = convert_model(iha_config(source), weights)
    assert not model.training and model.dtype == torch.float64
    input_ids = random_ids(2, 9)
    expected = released_causal_lm(input_ids, weights, source, layer_windows(source))
    assert relative_error(uncached_logits(model, input_ids), expected) < FP64
    assert relative_error(logits_in_chunks(model, input_ids, [4, 1, 1, 2, 1]), expected) < FP64


@pytest.mark.parametrize("window", [5, None])
def test_official_code(window, monkeypatch):
    """Prefill twice the window, the most that the official cache of a window layer takes, then one token at a time."""
    if "DCFORMER_OFFICIAL_CODE" not in os.environ:
        pytest.skip("DCFORMER_OFFICIAL_CODE does not name the folder pytorch/dcformer of Caiyun-AI/DCFormer")
    monkeypatch.syspath_prepend(os.environ["DCFORMER_OFFICIAL_CODE"])
    official_class = importlib.import_module("modeling_dcformer").DCFormer
    official_class.all_tied_weights_keys = {}  # what newer Transformers asks for
    source = DCFORMER | {"window_size": window}
    weights = released_weights(source, torch.float32)
    config = official_class.config_class(
        **{k: v for k, v in source.items() if k not in ("torch_dtype", "model_type")}, dtype=torch.float32
    )
    official = official_class(config).eval()
    official.load_state_dict(weights)
    model = convert_model(iha_config(source), weights)
    input_ids = random_ids(2, 33)
    positions = torch.arange(33).expand(2, -1)
    with torch.no_grad():
        official.setup_caches(2)
        expected = [
            official(input_ids[:, part], input_pos=positions[:, part], batch_indexes=torch.arange(2)).logits
            for part in (slice(0, 10), *(slice(n, n + 1) for n in range(10, 33)))
        ]
    expected = torch.cat(expected, dim=1)
    assert relative_error(uncached_logits(model, input_ids), expected) < 1e-4
    assert relative_error(logits_in_chunks(model, input_ids, [10, *[1] * 23]), expected) < 1e-4


@pytest.mark.parametrize(
    ("window_type", "pattern"), [(None, "LGLGLGLGL"), ("LGLL", "LGLLLGLLL"), ("LGL6", "LGLLLLLLL")]
)
def test_schedules(window_type, pattern):
    source = DCFORMER | {"window_type": window_type, "window_size": 256, "n_layer": 9}
    del source["n_local_heads"]  # a source may leave it out
    config = iha_config(source)
    assert config.layer_types == [{"L": "sliding_attention", "G": "full_attention"}[letter] for letter in pattern]
    assert config.sliding_window == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "dcpythia"}, "model_type='dcpythia'; expected 'dcformer'"),
        ({"n_local_heads": 2}, "n_local_heads=2 and n_head=4"),
        ({"query_wise": True}, "query_wise=True"),
        ({"use_dcmha": False}, "use_dcmha=False"),
        ({"window_type": "LLG"}, "window_type is 'LLG': expected None, 'LG'"),
        ({"window_type": "LG"}, "window_type=LG and window_size=3"),
        ({"norm_eps": 1e-5}, "use_qk_norm=True and norm_eps=1e-05"),
        ({"rotary_pct": 0.25}, "rotary_pct=0.25"),
        ({"mgate_dim": 5}, "mgate_dim=5 and intermediate_size="),
    ],
)
def test_what_would_change_the_logits_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        iha_config({**DCFORMER, **changes})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("layers.3.attention.dyn_w_proj.qkw"), "lack layers.3.attention.dyn_w_proj.qkw"),
        (lambda w: w.pop("layers.1.feed_forward.mg.weight"), "missing keys .*layers.1.mlp.group_gate"),
        (lambda w: w.update({"layers.0.attention.wqkv.bias": torch.zeros(96)}), "hold layers.0.attention.wqkv.bias"),
        (lambda w: w.update({"norm.weight": torch.zeros(31)}), "mismatched keys .*norm.weight"),
        (
            lambda w: w.update({"layers.2.attention.dyn_w_proj.post_proj.w": 2 * torch.eye(4)[None]}),
            "layers.2.attention.dyn_w_proj.post_proj.w is not the identity",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, message):
    weights = released_weights(DCFORMER)
    change(weights)
    with pytest.raises(UserError, match=message):
        convert_model(iha_config(DCFORMER), weights)


# The command


@pytest.mark.parametrize("form", ["bin", "shards"])
def test_command(form, tmp_path, cli):
    weights = save_released(tmp_path / "source", form=form)
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "max_length": 33}))
    code, out, err = cli(convert_dcformer_to_iha, tmp_path / "source", tmp_path / "converted")
    assert code == 0, err
    assert "Wrote" in out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert model.dtype == torch.float32 and model.config.eos_token_id == 2
    assert (model.generation_config.eos_token_id, model.generation_config.max_length) == ([2, 5], 33)
    input_ids = random_ids(1, 9)
    expected = uncached_logits(convert_model(iha_config(DCFORMER), weights), input_ids)
    assert torch.equal(uncached_logits(model, input_ids), expected)
    card = (tmp_path / "converted" / "README.md").read_text()
    assert "Converted from source (dcformer)" in card and "dcmha" in card
