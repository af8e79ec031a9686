"""Test that the attention explorer's page holds what the model computes."""

import base64
import gzip
import json
import re
import shutil
from itertools import product

import pytest
import torch
from helpers import EVERY_KIND, HYBRID, LLAMA, command, last_line, random_ids, random_model, small_config
from tiny_training import byte_tokenizer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from modeling_iha import IHAForCausalLM
from research.experiments import explore_attention


PROMPT = "a <b>\né"
# One byte each, but for the two of "é", which are no whole character alone.
LABELS = ["a", "␣", "<", "b", ">", "↵", "Ã", "©"]
CONFIGS = {
    "per_head": small_config(vocab_size=300),
    "all_heads": small_config(vocab_size=300, pseudo_collapse="all_heads", num_pseudo_heads=3),
    "every_kind": small_config(vocab_size=300, num_key_value_heads=4, **EVERY_KIND),
    "llama": LlamaConfig(**{**LLAMA, "vocab_size": 300, "bos_token_id": None}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Write a checkpoint of each config, and "tuned", which is another of "per_head"."""
    directory = tmp_path_factory.mktemp("checkpoints")
    models = {
        name: random_model(config, LlamaForCausalLM if name == "llama" else IHAForCausalLM)
        for name, config in CONFIGS.items()
    }
    models["tuned"] = random_model(CONFIGS["per_head"], seed=1)
    for name, model in models.items():
        model.save_pretrained(directory / name)
        byte_tokenizer().save_pretrained(directory / name)
    return directory, models


def explored(checkpoints, tmp_path, *arguments):
    """Return the data and the codes inside the page that the command writes."""
    directory, _ = checkpoints
    paths = [str(directory / argument) if (directory / argument).is_dir() else argument for argument in arguments]
    explore_attention.main([*paths, "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(text) < 10e6 and "{{" not in text
    contents = re.findall(r'id="packed-(data|codes)">([^<]*)<', text)
    parts = {name: gzip.decompress(base64.b64decode(content)) for name, content in contents}
    return json.loads(parts["data"]), parts["codes"]


def decoded(data, codes, checkpoint, layer, tokens=len(LABELS)):
    """Return the weights [H, N * P, N * P] of a layer, or `None`."""
    entry, shape = data["checkpoints"][checkpoint]["layers"][layer].get("codes"), data["layers"][layer]
    if entry is None:
        return None
    size = tokens * shape["pseudo_heads"]
    dtype, levels = (torch.int8, 127) if entry["signed"] else (torch.uint8, 255)
    count = shape["heads"] * size**2
    roots = torch.frombuffer(bytearray(codes), dtype=dtype, count=count, offset=entry["start"]).float() / levels
    return (entry["largest"] * roots * roots.abs()).reshape(-1, size, size)


def attentions(model):
    model.set_attn_implementation("eager")
    ids = byte_tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return [weights[0] for weights in model(ids, output_attentions=True, use_cache=False).attentions]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_page_holds_what_the_model_computes(name, checkpoints, tmp_path):
    data, codes = explored(checkpoints, tmp_path, name, PROMPT)
    assert data["tokens"] == LABELS and "change" not in data
    model, layers = checkpoints[1][name], data["checkpoints"][0]["layers"]
    kinds = getattr(model.config, "attention_kinds", ["llama"] * 2)
    assert [layer["kind"] for layer in data["layers"]] == kinds
    signs = set()
    for i, expected in enumerate(attentions(model)):
        weights = decoded(data, codes, 0, i)
        # Half a step of the square root's codes, at the largest weight.
        signed = layers[i]["codes"]["signed"]
        assert (weights - expected).abs().max() <= 1.01 * expected.abs().max() / (127 if signed else 255)
        signs.add(signed)
        modules = dict(model.base_model.layers[i].self_attn.named_modules())
        assert set(layers[i]["mixing"]) == ({"q_mix", "k_mix", "v_mix", "collapse"} if kinds[i] == "iha" else set())
        for matrix, rows in layers[i]["mixing"].items():
            torch.testing.assert_close(torch.tensor(rows), modules[matrix].weight.detach(), rtol=5e-4, atol=0)
    assert signs == ({False, True} if name == "every_kind" else {False})


def test_attentions_in_tokens():
    """Read whole and cached attentions as clients do: each token has a row that sums to 1; others stay."""
    model = random_model(small_config(**HYBRID, sliding_window=3, num_pseudo_heads=3))
    model.set_attn_implementation("eager")
    ids, cache = random_ids(2, 7), DynamicCache(config=model.config)
    for part in (ids[:, :6], ids[:, 6:]):
        output = model(part, past_key_values=cache, output_attentions=True)
        maps = model.token_attentions(output.attentions, part.shape[1])
        for kind, virtual, weights in zip(model.config.attention_kinds, output.attentions, maps, strict=True):
            assert weights.shape[:3] == (2, 4, part.shape[1])
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
            if kind == "mha":
                assert torch.equal(weights, virtual)
            for n, m in product(range(weights.shape[2]), range(weights.shape[3]) if kind == "iha" else ()):
                expected = sum(virtual[..., 3 * n + p, 3 * m + r] for p, r in product(range(3), repeat=2)) / 3
                torch.testing.assert_close(weights[..., n, m], expected)


def test_comparison_and_chosen_layers(checkpoints, tmp_path):
    models = checkpoints[1]
    data, codes = explored(checkpoints, tmp_path, "per_head", PROMPT, "--compare", "tuned", "--layers", "1")
    assert [layer["index"] for layer in data["layers"]] == [1]
    assert [checkpoint["name"] for checkpoint in data["checkpoints"]] == ["A: per_head", "B: tuned"]
    before, after = (attentions(models[name])[1] for name in ("per_head", "tuned"))
    for index, expected in enumerate((before, after)):
        assert (decoded(data, codes, index, 0) - expected).abs().max() < 0.01
    expected = [sum((a - b).abs().sum() / 2 for a, b in zip(*heads)) / 16 for heads in zip(before, after)]
    assert data["change"][0] == pytest.approx([value.item() for value in expected], rel=1e-3)
    data, _ = explored(checkpoints, tmp_path, "per_head", PROMPT, "--compare", "per_head")
    assert data["change"] == [[0] * 4] * 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["IN/per_head", "a" * 300], r"The prompt has 300 tokens, .* room for 256 with 2 layers of 1 checkpoint:"),
        (["IN/per_head", "a", "--layers", "0", "2"], "--layers 0 2: expected numbers from 0 to 1"),
        (["IN/per_head", "a", "--compare", "IN/all_heads"], "all_heads has other layers, heads or pseudo-heads"),
        (["IN/per_head", "a", "--compare", "IN/other_tokens"], "other_tokens splits the prompt into other tokens"),
    ],
)
def test_mistakes_are_named_in_one_line(arguments, message, checkpoints, tmp_path, monkeypatch, capsys):
    directory, _ = checkpoints
    if not (directory / "other_tokens").exists():
        shutil.copytree(directory / "tuned", directory / "other_tokens")
        byte_tokenizer(special=("<|im_start|>",)).save_pretrained(directory / "other_tokens")
    monkeypatch.setattr(explore_attention, "load_model", None)  # no mistake is found after the work
    replaced = [argument.replace("IN", str(directory)) for argument in arguments]
    output = ("--output", tmp_path / "page.html")
    code, _, stderr = command(monkeypatch, capsys, explore_attention, *replaced, *output)
    assert code == 1 and re.search(message, last_line(stderr))
    assert list(tmp_path.iterdir()) == []
