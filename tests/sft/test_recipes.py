"""Test that every recipe trains at the size of a test, and that mixtures have their shares of the tokens."""

import json

import pytest
import torch
import yaml
from datasets import Dataset
from tiny_training import ROOT, decoder, preset_config, saved, sizes, write_jsonl

from iha_io.checkpoint_io import load_config
from iha_io.command_io import UserError
from kind_facts import is_interleaved
from modeling_iha import IHAForCausalLM
from sft import train
from sft.data import mix, sources


RECIPES = ROOT / "sft" / "recipes"
# Those of preferences and rewards have tests of their own, and most tests of runs take the demo.
FILES = [
    "openthoughts/sft.yaml",
    "openthoughts3/sft.yaml",
    "long_context_64k/sft.yaml",
    "pretrain/sft.yaml",
    "lora/sft.yaml",
]
MECHANISMS = ["global", "global-local", "talking-heads", "diff", "iha"]


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
    return yaml.safe_load((RECIPES / file).read_text()), load_config(str(output / "final")), losses


@pytest.mark.parametrize("file", FILES)
def test_a_recipe_trains(file, tiny, rows_file, text_file, tmp_path):
    rows = text_file if file == "pretrain/sft.yaml" else rows_file
    starts_plain = yaml.safe_load((RECIPES / file).read_text())["model_name_or_path"].startswith("Qwen/")
    model = saved(decoder("llama"), tmp_path / "plain") if starts_plain else tiny
    keys, config, losses = run(file, model, rows, tmp_path / "run")
    assert [step for step, _ in losses] == [1, 2]
    assert is_interleaved(config) == starts_plain
    assert config.mixing_scale == keys.get("mixing_scale", 40 if starts_plain else 1)


def test_the_first_stage_of_long_context_leaves_its_rope_base_and_positions_in_the_checkpoint(tiny, tmp_path):
    rows = [{"text": "word " * (1 + 40 * (number % 3))} for number in range(90)]
    names = [write_jsonl(tmp_path / f"{index}.jsonl", rows[index::3]) for index in range(3)]
    shares = [share for _, share in sources(str(RECIPES / "long_context_64k" / "mixture.yaml"))]
    assert shares == [0.3, 0.3, 0.4]
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(yaml.safe_dump([{"path": path, "share": share} for path, share in zip(names, shares)]))

    output = tmp_path / "run"
    keys, config, _ = run("long_context_64k/continued.yaml", tiny, mixture, output, max_length=256)
    assert config.max_position_embeddings == keys["max_position_embeddings"] == 65536
    assert config.rope_parameters["rope_theta"] == keys["rope_theta"] == 8e6
    trained = IHAForCausalLM.from_pretrained(output / "final")
    assert trained.model.rotary_emb.inv_freq[1].item() == pytest.approx(8e6 ** (-2 / trained.config.head_dim))


def test_the_five_mechanisms_of_the_paper_train_on_equal_budgets(rows_file, tmp_path):
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    small |= {"num_hidden_layers": 5, "max_position_embeddings": 256}
    rates, tokens = set(), set()
    for name in MECHANISMS:
        fields = {**small, "num_pseudo_heads": 2} if name == "iha" else small
        if name == "global-local":
            fields = {**fields, "sliding_window": 16}
        torch.manual_seed(0)
        model = saved(IHAForCausalLM(preset_config(f"paper-2.4b-{name}", **fields)), tmp_path / name / "model")
        output = tmp_path / name / "run"
        run("paper_sft/sft.yaml", model, rows_file, output)
        state = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())
        logged = [entry for entry in state["log_history"] if "learning_rate" in entry]
        rates.add(tuple(entry["learning_rate"] for entry in logged))
        tokens.add(tuple(entry["num_tokens"] for entry in logged))
    assert len(rates) == len(tokens) == 1


# Mixtures


def rows_of(length, count, value):
    tokens = [[value] * length] * count
    columns = {"input_ids": tokens, "labels": tokens, "num_tokens": [length] * count, "first_label": [0] * count}
    return Dataset.from_dict({**columns, "x": [0] * count})


def test_a_mixture_has_its_shares_of_the_tokens_whatever_the_lengths_of_rows():
    parts = [rows_of(64, 200, 1), rows_of(8, 800, 2), rows_of(2, 4000, 3)]
    shares = [0.3, 0.3, 0.4]
    for max_length in (None, 16):
        rows = mix(parts, shares, max_length, seed=0)
        assert "x" not in rows.column_names
        read = list(rows["input_ids"])
        tokens = [sum(len(ids[:max_length]) for ids in read if ids[0] == value) for value in (1, 2, 3)]
        assert [count / sum(tokens) for count in tokens] == pytest.approx(shares, abs=0.03)
    assert rows["input_ids"] == mix(parts, shares, 16, seed=0)["input_ids"]
    assert rows["input_ids"] != mix(parts, shares, 16, seed=1)["input_ids"]


def test_a_single_source_is_left_alone():
    assert sources("open-thoughts/OpenThoughts-114k") == [("open-thoughts/OpenThoughts-114k", 1.0)]
    rows = rows_of(2, 3, 1)
    assert mix([rows], [1.0], None, seed=0) is rows


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
