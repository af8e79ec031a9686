"""Interleave tiny models whose code differs most, and check every refusal and the page of all model types.

`python -m experiments.model_types` tries all types; `try_type` of this command compares one with itself.
"""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common.command_io import ROOT, UserError
from experiments import model_types
from experiments.model_types import difference, document, outputs, tiny_config, tiny_model, try_type
from modeling_iha import interleave_heads, remove_interleaving


EXACT = {
    "bart": "a decoder of an encoder-decoder, with learned positions",
    "bert": "an encoder as a decoder",
    "cohere2": "windows, and layers without RoPE",
    "ctrl": "no positions for packed rows",
    "deepseek_v3": "latent attention, whose keys are wider than its values, and experts that are renamed on load",
    "gemma2": "soft caps, on eager",
    "gemma3_text": "windows, and a RoPE of their own",
    "gemma4_text": "shared keys and values, whose layers take the last token of a prompt only",
    "gpt2": "one projection for queries, keys and values",
    "gpt_neox": "RoPE on a part of a head",
    "gpt_oss": "attention sinks, on eager",
    "granitemoehybrid": "Mamba layers and attention",
    "lfm3": "convolutions, windows and attention",
    "llama4_text": "chunks, and layers without RoPE",
    "minimax": "a cache of its own",
    "modernbert-decoder": "windows on both sides in its encoder",
    "olmo2": "norms of queries and keys over all heads",
    "opt": "positions from the padding mask",
    "phi": "biases everywhere",
    "qwen3_5": "recurrent layers, within a model of several media",
    "qwen3_moe": "experts",
    "recurrent_gemma": "a cache that its decoder does not return",
    "starcoder2": "a window in all layers",
    "zamba": "one attention module at several depths",
}
REGISTRY = "does not call attention through the registry of Transformers, so its heads cannot be interleaved."
CHOOSES = "chooses or compresses the keys of each query, in a mask over tokens of its own."
REFUSED = {
    **dict.fromkeys(("bloom", "doge", "falcon", "gptj", "mpt", "rwkv", "xlstm"), REGISTRY),
    "deepseek_v32": f"cannot be interleaved: DeepseekV32Attention {CHOOSES}",
    "deepseek_v4": f"cannot be interleaved: DeepseekV4Attention {CHOOSES}",
    "minimax_m3_vl_text": f"cannot be interleaved: MiniMaxM3VLAttention {CHOOSES}",
    "blt": "cannot be interleaved: BltCrossAttention is not marked as causal self-attention.",
    "mllama": "is no class of Transformers that its Auto classes load for a decoder: a saved checkpoint could not",
    # Its cache has a window that its masks have not.
    "moshi": "does not compute the same with interleaved heads (hidden states differ by",
    # It adds a bias over tokens to the mask.
    "inkling_text": "does not compute the same with interleaved heads (RuntimeError: The size of tensor",
}


@pytest.mark.parametrize("model_type", EXACT)
def test_exact(model_type):
    row = try_type(model_type)
    assert row["verdict"] == "exact", row


@pytest.mark.parametrize("model_type", ["afmoe", "jetmoe", "llama"])
def test_collapse_over_all_heads(model_type):
    """Some base models want the output of attention in one piece of memory."""
    model = tiny_model(model_type)
    before = outputs(model, ["padded"])["padded"]
    assert (
        difference(before, outputs(interleave_heads(model, 2, collapse="all_heads"), ["padded"])["padded"])
        < model_types.EXACT
    )


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "whisper"])
def test_window_of_the_paper_needs_a_length(model_type):
    with pytest.raises(ValueError, match=f"{model_type} has no max_position_embeddings: give the window in tokens"):
        interleave_heads(tiny_model(model_type), 2, sliding_window="paper")


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type):
    row = try_type(model_type)
    assert row["verdict"] == "refused" and REFUSED[model_type] in row["reason"], row


def test_encoder(monkeypatch):
    monkeypatch.setitem(model_types.FIELDS, "bert", {})
    row = try_type("bert")
    assert row == {
        "verdict": "refused",
        "reason": "bert cannot be interleaved: BertSelfAttention is not marked as causal self-attention.",
    }


@pytest.mark.parametrize("model_type", ["moshi", "inkling_text", "minimax_m3_vl_text"])
def test_refusal_leaves_the_model(model_type):
    """Refuse before and after the mixing is attached, on a window that the check shortens."""
    model = tiny_model(model_type)
    before, config, kind = outputs(model), model.config.to_dict(), type(model)
    with pytest.raises(ValueError):
        interleave_heads(model, 2)
    assert (type(model), model.config.to_dict()) == (kind, config)
    assert not any("mix" in name for name, _ in model.named_parameters())
    assert all(logits.equal(before[name]) for name, logits in outputs(model, before).items())


def test_probe_reaches_past_windows():
    """Without a shorter window, 7 tokens would show nothing of one of 3,000."""
    config = tiny_config("moshi")
    config.sliding_window = 3000
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="hidden states differ"):
        interleave_heads(model, 2)
    assert model.config.sliding_window == 3000


@pytest.mark.parametrize("model_type", ["hrm_text", "zamba"])
def test_modules_of_one_index(model_type):
    """Two stacks of layers count from 0, or none has an index."""
    model = interleave_heads(tiny_model(model_type), 2)
    assert len(model.config.interleaved_layers) == {"hrm_text": 4, "zamba": 2}[model_type]


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_blocks_that_share_their_weights_share_the_mixing(model_type, monkeypatch, tmp_path):
    three = {"layers_block_type": 3 * ["hybrid"], "n_mamba_heads": 4, "num_hidden_layers": 3, "num_mem_blocks": 2}
    monkeypatch.setitem(model_types.FIELDS, "zamba2", three)
    model = interleave_heads(tiny_model(model_type), 2)
    names = list(model.config.interleaved_layers)
    first, last = (model.base_model.get_submodule(names[place]).q_mix for place in (0, -1))
    assert first.weight is last.weight
    with torch.no_grad():
        first.weight += 0.3 * torch.randn(first.weight.shape)
    expected = outputs(model, ["full"])["full"]
    model.save_pretrained(tmp_path)
    model.resize_token_embeddings(80)
    assert outputs(model, ["full"])["full"][..., :64].equal(expected)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"]
    loaded.tie_weights()
    assert difference(outputs(loaded, ["full"])["full"], expected) < 1e-6
    before = set(tiny_model(model_type).all_tied_weights_keys)
    assert set(remove_interleaving(interleave_heads(tiny_model(model_type), 2)).all_tied_weights_keys) == before


def test_cores_of_a_model_of_several_configurations_come_back():
    cores = {"": "eager", "text_config": "sdpa", "vision_config": "eager"}
    model = AutoModelForCausalLM.from_config(tiny_config("gemma3"), attn_implementation=cores)
    remove_interleaving(interleave_heads(model, 2))
    configs = {"": model.config, **{name: getattr(model.config, name) for name in model.config.sub_configs}}
    assert {name: config._attn_implementation for name, config in configs.items()} == cores


def test_command_fails_on_a_difference(monkeypatch, capsys):
    monkeypatch.setattr(model_types, "try_type", lambda name: {"verdict": "DIFFERS", "full": 1.0})
    with pytest.raises(UserError, match="Neither exact nor refused: llama"):
        model_types.main(["--types", "llama"])
    assert capsys.readouterr().out.splitlines()[-1] == "1 DIFFERS"


def test_page():
    record = json.loads((ROOT / "experiments" / "results" / "model_types.json").read_text(encoding="utf-8"))
    table = record.pop("types")
    assert (ROOT / "docs" / "MODEL_TYPES.md").read_text(encoding="utf-8") == document(table, record)
    verdicts = [row["verdict"] for row in table.values()]
    assert verdicts.count("exact") >= 110 and set(verdicts) == {"exact", "refused", "not built"}
    if record["transformers"] == transformers.__version__:
        assert list(table) == list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
