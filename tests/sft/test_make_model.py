"""Test what a pre-training begins from: a tokenizer of a text, and random weights of a preset."""

import json
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from helpers import last_line
from transformers import AutoModelForCausalLM, AutoTokenizer

from iha.cards import Origin, origin_of, origin_to_add
from iha.errors import ROOT
from modeling_iha import IHAForCausalLM
from sft import make_model, make_text, make_tokenizer, train
from sft.data import load_rows


SIZES = "num_hidden_layers=5 hidden_size=32 intermediate_size=64 num_attention_heads=4 max_position_embeddings=128"


def test_a_start_from_a_text_and_a_preset(tmp_path, cli):
    text = "That all that glisters is not gold, often have you heard that told. " * 50
    (tmp_path / "text.txt").write_text(text)
    assert cli(make_tokenizer, tmp_path / "text.txt", tmp_path / "tokenizer", "--vocab-size", 300)[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for words in (text[:60], "Größe: 3 €, \t\n\x00 and 漢字"):
        assert tokenizer.decode(tokenizer(words)["input_ids"]) == words
    assert 270 < len(tokenizer) <= 300 and len(tokenizer(text)["input_ids"]) < len(text) / 2

    seeds = {"one": 1, "again": 1, "other": 2}
    for name, seed in seeds.items():
        arguments = ("small-10m-paired-heads", tmp_path / name, "--tokenizer", tmp_path / "tokenizer", "--seed", seed)
        assert cli(make_model, *arguments, "--set", *SIZES.split())[0] == 0
    models = {name: AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True) for name in seeds}
    config = models["one"].config
    assert (config.vocab_size, config.num_hidden_layers, config.sliding_window) == (len(tokenizer), 5, 2)
    assert config.eos_token_id == tokenizer.eos_token_id
    heads = {name: model.lm_head.weight for name, model in models.items()}
    assert torch.equal(heads["one"], heads["again"]) and not torch.equal(heads["one"], heads["other"])
    assert origin_of(str(tmp_path / "one")).from_scratch and not origin_of(str(tmp_path / "tokenizer")).from_scratch
    assert origin_to_add(tmp_path / "one", "mit", None) == Origin({"license": "mit"})


def test_a_tokenizer_is_trained_on_what_a_run_takes(tmp_path, cli):
    lines = ["All that\n", "\n", "glisters is not gold.\n"]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("".join(lines[:2]))
    (tmp_path / "texts" / "b.txt").write_text(lines[2])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"content": "".join(lines), "id": 1}) + "\n")
    (tmp_path / "text.txt").write_text("".join(lines))
    found = []
    for name, words in (("text.txt", ()), ("texts", ()), ("rows.jsonl", ("--dataset_text_field", "content"))):
        code, out, _ = cli(make_tokenizer, tmp_path / name, tmp_path / f"of-{name}", "--vocab-size", 280, *words)
        assert code == 0
        found.append(AutoTokenizer.from_pretrained(tmp_path / f"of-{name}").get_vocab())
    assert found[0] == found[1] == found[2]
    (tmp_path / "empty.txt").touch()
    code, _, errors = cli(make_tokenizer, tmp_path / "empty.txt", tmp_path / "of-nothing")
    assert code == 1 and "empty.txt" in last_line(errors) and not (tmp_path / "of-nothing").exists()


def test_a_tokenizer_reads_no_more_of_a_stream_than_it_is_told_to(tmp_path, cli):
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'text': 'ab' * 500})}\n" + '{"text": ""}\n')  # a bad row
    words = (tmp_path / "rows.jsonl", tmp_path / "short", "--vocab-size", 270)
    assert cli(make_tokenizer, *words)[0] == 1
    assert cli(make_tokenizer, *words, "--max-bytes", 900)[0] == 0


def test_a_text_needs_no_network(tmp_path, cli):
    files = (tmp_path / "train.jsonl", tmp_path / "held.jsonl")
    assert cli(make_text, *files)[0] == 0
    train_rows, held_rows = (load_rows(str(file))["text"] for file in files)
    assert held_rows and not set(train_rows) & set(held_rows)
    assert sum(map(len, train_rows)) > 1_000_000
    assert cli(make_text, *files)[0] == 1


@pytest.mark.slow  # three minutes
def test_five_million_parameters_learn_from_four_megabytes_in_two_hundred_steps(tmp_path, cli):
    """Go the way of docs/FROM_SCRATCH.md on the source of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    (tmp_path / "train.txt").write_text(text[:4_000_000])
    tokenizer = tmp_path / "tokenizer"
    assert cli(make_tokenizer, tmp_path / "train.txt", tokenizer, "--vocab-size", 1024)[0] == 0
    start = ("--preset", "small-10m-paired-heads", "--tokenizer", tokenizer)
    start += ("--preset_fields", "num_hidden_layers=5", "max_position_embeddings=256")
    steps = ("--max_steps", 200, "--warmup_steps", 20, "--learning_rate", 1e-3, "--logging_steps", 1)
    rows = ("--dataset_name", tmp_path / "train.txt", "--max_length", 256, "--per_device_train_batch_size", 8)
    recipe = ("--config", ROOT / "sft" / "recipes" / "pretrain" / "sft.yaml", "--use_cpu", "true", "--bf16", "false")
    begun = time.monotonic()
    train.main([str(word) for word in (*recipe, *start, *rows, *steps, "--output_dir", tmp_path / "run")])
    assert time.monotonic() - begun < 600
    losses = [loss for _, loss in json.loads((tmp_path / "run" / "loss.json").read_text())["train"]]
    assert len(losses) == 200 and sum(losses[-20:]) / 20 < sum(losses[:20]) / 20 - 1  # nats per token


def test_bytes_are_the_tokens_without_a_tokenizer(tmp_path, cli):
    assert cli(make_model, "tiny", tmp_path / "start")[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "start")
    assert len(tokenizer("gold")["input_ids"]) == 4


def test_an_end_token_that_pads_is_learned():
    tokenizer = make_tokenizer.byte_tokenizer()
    assert make_model.config_of("tiny", tokenizer, []).pad_token_id == tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.eos_token
    model = IHAForCausalLM(make_model.config_of("tiny", tokenizer, ["tie_word_embeddings=false"]))
    ids = torch.tensor([[5, tokenizer.eos_token_id, 7]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[tokenizer.eos_token_id].any()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("absent", "start"), "There is no preset 'absent'"),
        (("tiny", "start", "--set", "num_hidden_layers"), "expected FIELD=VALUE"),
        (
            ("tiny", "start", "--set", "num_attention_heads=7"),
            "must divide num_attention_heads=7",
        ),
        (("tiny", "start", "--set", "n_layers=3"), "no field 'n_layers'; did you mean 'num_hidden_layers'"),
        (("tiny", "start", "--set", "num_layers=3"), "did you mean 'num_hidden_layers'"),
        (("tiny", "start", "--set", "num_labels=3"), "no field 'num_labels'"),  # a property
        (("tiny", "start", "--tokenizer", "."), "holds no tokenizer"),
    ],
)
def test_what_no_model_can_have_is_refused(arguments, named, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = cli(make_model, *arguments)
    assert code == 1 and named in last_line(errors) and not (tmp_path / "start").exists()
