"""Test that every recipe trains at the size of a test, and that mixtures have their shares of the tokens."""

import json
from functools import reduce
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import Dataset
from tiny_training import ROOT, byte_tokenizer, decoder, saved, sizes, write_jsonl
from trl import SFTConfig

from iha.checkpoints import load_config
from iha.errors import UserError
from iha.kinds import is_interleaved
from iha.sources import find_source
from modeling_iha import IHAForCausalLM, interleave_heads
from sft import row_sources, train
from sft.data import mix
from sft.row_sources import parts_of_mixture


RECIPES = ROOT / "sft" / "recipes"
# Those of preferences, rewards and 4 bits have separate tests, and most tests of runs take the demo.
FILES = [
    "openthoughts/sft.yaml",
    "openthoughts3/sft.yaml",
    "long_context_64k/sft.yaml",
    "paper_sft/sft.yaml",
    "pretrain/sft.yaml",
    "lora/sft.yaml",
]


pytestmark = pytest.mark.usefixtures("in_repository_root")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory) -> str:
    """Write short documents of plain text, and some that are longer than the rows of a test."""
    rows = [{"text": f"Document {number}. " * (1 if number % 5 else 20)} for number in range(60)]
    return write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", rows)


def run(file, model, rows, output, **overrides):
    """Take two steps of a recipe, and return its keys, the final config and the losses of training."""
    small = {"max_steps": 2, "eval_steps": 2, "bf16": "false", "dtype": "float32", **overrides}
    train.main(["--config", str(RECIPES / file), *sizes(model, rows, output, **small)])
    losses = json.loads((output / "loss.json").read_text())["train"]
    return yaml.safe_load((RECIPES / file).read_text()), load_config(find_source(output / "final")), losses


def test_pretraining_warms_up_for_the_papers_steps():
    keys = yaml.safe_load((RECIPES / "pretrain/sft.yaml").read_text())
    args = SFTConfig(max_steps=keys["max_steps"], warmup_steps=keys["warmup_steps"], bf16=False, use_cpu=True)
    assert args.get_warmup_steps(keys["max_steps"]) == 1000


@pytest.mark.parametrize("file", FILES)
def test_a_recipe_trains(file, tiny, rows_file, text_file, tmp_path):
    rows, others = (text_file, {"eval_size": 0}) if file == "pretrain/sft.yaml" else (rows_file, {})
    starts_plain = "model_name_or_path: Qwen/" in (RECIPES / file).read_text()
    model = saved(decoder("llama"), tmp_path / "plain") if starts_plain else tiny
    keys, config, losses = run(file, model, rows, tmp_path / "run", **others)
    assert [step for step, _ in losses] == [1, 2]
    assert is_interleaved(config) == starts_plain
    assert config.mixing_scale == keys.get("mixing_scale", 40 if starts_plain else 1)


def test_the_first_stage_of_long_context_leaves_its_rope_base_and_positions_in_the_checkpoint(tiny, tmp_path):
    rows = [{"text": "word " * (1 + 40 * (number % 3))} for number in range(90)]
    names = [write_jsonl(tmp_path / f"{index}.jsonl", rows[index::3]) for index in range(3)]
    shares = [share for _, share in parts_of_mixture(str(RECIPES / "long_context_64k" / "mixture.yaml"))]
    assert shares == [0.3, 0.3, 0.4]
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(yaml.safe_dump([{"path": path, "share": share} for path, share in zip(names, shares)]))

    output = tmp_path / "run"
    keys, config, _ = run("long_context_64k/continued.yaml", tiny, mixture, output, max_length=256, eval_size=0)
    assert config.max_position_embeddings == keys["max_position_embeddings"] == 65536
    assert config.rope_parameters["rope_theta"] == keys["rope_theta"] == 8e6
    trained = IHAForCausalLM.from_pretrained(output / "final")
    assert trained.model.rotary_emb.inv_freq[1].item() == pytest.approx(8e6 ** (-2 / trained.config.head_dim))


def built(node):
    """Return what a section of NeMo AutoModel's configuration stands for: a call of what `_target_` names."""
    if not isinstance(node, dict):
        return node
    arguments = {name: built(value) for name, value in node.items()}
    if "_target_" not in arguments:
        return arguments
    module, *attributes = arguments.pop("_target_").split(".")
    return reduce(getattr, attributes, import_module(module))(**arguments)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_the_model_of_nemos_recipe_is_built_and_trains(is_interleaved, tiny, tmp_path):
    start = saved(interleave_heads(decoder("llama"), 2), tmp_path / "start") if is_interleaved else tiny
    model = yaml.safe_load((RECIPES / "pretrain" / "nemo_automodel.yaml").read_text())["model"]
    model["config"]["pretrained_model_name_or_path"] = start
    model = built(model)
    assert type(model).__name__ == ("InterleavedLlamaForCausalLM" if is_interleaved else "IHAForCausalLM")
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Mixtures


def texts_of(length: int, count: int, letter: str) -> Dataset:
    return Dataset.from_dict({"text": [letter * length] * count})


def test_a_mixture_has_its_shares_of_the_tokens_whatever_the_lengths_of_rows():
    parts, tokenizer = [texts_of(64, 200, "a"), texts_of(8, 800, "b"), texts_of(2, 4000, "c")], byte_tokenizer()
    shares = [0.3, 0.3, 0.4]
    for max_length in (None, 16):
        read = mix(parts, shares, tokenizer, max_length, seed=0)["text"][:]
        tokens = [sum(len(text[:max_length]) for text in read if text[0] == letter) for letter in "abc"]
        assert [count / sum(tokens) for count in tokens] == pytest.approx(shares, abs=0.03)
    assert read == mix(parts, shares, tokenizer, 16, seed=0)["text"][:]
    assert read != mix(parts, shares, tokenizer, 16, seed=1)["text"][:]
    turns = Dataset.from_list([{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(UserError, match="rows of one schema"):
        mix([parts[0], turns], [0.5, 0.5], tokenizer, None, seed=0)


def test_the_parts_of_a_mixture_have_the_configuration_of_the_run(tmp_path, monkeypatch):
    asked = []
    builder = SimpleNamespace(hash="0")
    monkeypatch.setattr(row_sources, "load_dataset_builder", lambda *given: asked.append(given) or builder)
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("[{path: me/a, share: 0.5}, {path: me/b, share: 0.5}]")
    row_sources.identify_data(str(mixture), "main")
    assert asked == [("me/a", "main"), ("me/b", "main")]


@pytest.mark.parametrize(
    "text, named",
    [
        ("[{path: a}]", r"0\.share is missing"),
        ("[{path: a, share: 1, split: test}]", r"0\.split is 'test'"),
        ("[{path: a, share: 0.5}, {path: b, share: .nan}]", r"1\.share is nan"),
        ("[{path: a, share: 0.5}, {path: b, share: 0.4}]", "add up to 0.9"),
    ],
)
def test_a_bad_mixture_is_refused_before_the_model_is_loaded(tmp_path, text, named):
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(text)
    with pytest.raises(UserError, match=named):
        train.main(["--config", str(RECIPES / "demo/sft.yaml"), *sizes("absent/model", mixture, tmp_path / "run")])
