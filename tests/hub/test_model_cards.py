"""Test that model cards hold what they should, that no name breaks them, and that their example runs as it stands."""

import json
import re
import subprocess

import pytest
import torch
from helpers import decoder, random_ids, random_model, small_config
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from tiny_training import byte_config, saved
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from iha import cards
from iha.adapter_card import write_adapter_card
from iha.card_template import render_card
from iha.cards import name_of_place, source_name, title_of, with_name, with_results
from iha.checkpoints import fingerprint
from iha.model_cost import parameters_of
from iha.sources import find_source
from modeling_iha import IHAConfig, interleave_heads, save_adapter


BASE = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
# Characters that end a line, a cell, a heading, a code span or a string, that open markup, or that are no UTF-8.
NASTY = 'x\n# y\r\n---\n|`$`"\\*_<b>[a](b)\u2028\x1b\udcff'
TASK = {"samples_each": 16, "truncated_prompts": 0, "unfinished_replies": 0}
RESULTS = {
    "checkpoint": "",
    "suite": "reasoning",
    "seed": 0,
    "model_dtype": "float32",
    "device": "cpu",
    "commit": "0" * 40,
    "versions": {"torch": "2.13.0"},
    "data_sha256": {},
    "tasks": {
        "gsm8k": {**TASK, "examples": 1319, "metrics": {"pass@1": {"value": 0.54231, "stderr": 0.0137}}},
        "vt@512": {**TASK, "examples": 50, "metrics": {"string_match": {"value": 0.25, "stderr": None}}},
        "niah@512": {
            **TASK,
            "examples": 8,
            "unfinished_replies": 3,
            "note": "not comparable",
            "metrics": {"loss": {"value": 1.5, "stderr": 0.5}, "bits_per_byte": {"value": 2.0, "stderr": None}},
        },
    },
}


@pytest.fixture
def checkpoint(tmp_path):
    """Return a saved model with its card, in a directory whose name is no plain word."""
    directory = tmp_path / "it's a model"
    saved(random_model(byte_config()), directory)
    (directory / "README.md").write_text(render_card(small_config(), directory.name), encoding="utf-8")
    return directory


# The card


def test_a_card_says_what_the_model_costs_and_what_is_not_known():
    config = IHAConfig.from_preset("paper-2.4b-iha")
    card = render_card(config, "name", license="mit")
    assert f"| Parameters | {parameters_of(config):,} |" in card
    assert "| FLOPs of one more token | 15.15 G | 6.927 G | 2.187 |" in card
    assert "The weights are under mit." in card and "under Apache-2.0" in card
    assert "Not evaluated." in card and "- Duvvuri" in card and "- Vaswani" in card
    assert "No license of the weights is known." in render_card(small_config(), "name")
    assert "The costs of this model were not counted." in render_card(small_config(attention_kinds="hyper"), "name")


def test_no_name_breaks_a_card():
    models = [
        ModelCard(render_card(small_config(), name, license=cards.one_printable_line(name)))
        for name in (NASTY, "plain")
    ]
    lines, expected = (card.text.splitlines() for card in models)
    different = [pair for pair in zip(lines, expected, strict=True) if pair[0] != pair[1]]
    assert len(different) == 4
    assert all(line.startswith(("# ", "name = ", "name=", "The code in")) for line, _ in different)
    read = {}
    exec(next(line for line in lines if line.startswith("name = ")), read)
    assert read["name"] == cards.one_printable_line(NASTY)
    assert models[0].data.to_dict().keys() == models[1].data.to_dict().keys()
    str(models[0]).encode()


def test_the_shell_reads_the_name_of_a_card(checkpoint):
    card = (checkpoint / "README.md").read_text(encoding="utf-8")
    assignment = re.search(r"^```sh\n(.*?)\n", card, re.DOTALL | re.MULTILINE)[1]
    shown = subprocess.run(["sh", "-c", f'{assignment}\nprintf %s "$name"'], capture_output=True, text=True)
    assert shown.stdout == checkpoint.name


# Its evaluation and its name


def test_results_stand_in_the_table_and_in_the_metadata():
    card = with_results(render_card(small_config(), "name"), "name", RESULTS)
    assert "Not evaluated." not in card and card.count("## Evaluation") == 1 and "## Cost" in card
    assert "| gsm8k | pass@1 | 54.2 ± 1.4 | 1319 | 16 |  |" in card
    assert "| niah@512 | loss | 1.500 ± 0.500 | 8 | 16 | not comparable; 3 replies unfinished |" in card
    assert "| niah@512 | bits_per_byte | 2.000 |" in card and "bits per byte in bits" in card
    _, entry = ModelCard(card).data.eval_results  # not what is not comparable
    assert (entry.dataset_name, entry.metric_type, entry.metric_value) == ("vt@512", "string_match", 0.25)
    assert entry.metric_args == {"examples": 50}
    again = with_results(card, "name", RESULTS)
    assert again == card
    smoke = with_results(card, "name", RESULTS | {"suite": "smoke"})
    assert ModelCard(smoke).data.eval_results is None and "54.2 ± 1.4" in smoke


def test_the_command_adds_results_and_renames(checkpoint, tmp_path, cli):
    results = RESULTS | {"checkpoint": fingerprint(find_source(checkpoint))}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "of_another").mkdir()
    (tmp_path / "of_another" / "results.json").write_text(json.dumps(RESULTS))
    code, _, err = cli(cards, checkpoint, "--results", tmp_path / "of_another")
    assert code == 1 and "The results are of another checkpoint than" in err
    code, _, _ = cli(cards, checkpoint, "--name", "me/iha", "--results", tmp_path)
    card = (checkpoint / "README.md").read_text(encoding="utf-8")
    assert code == 0 and "54.2 ± 1.4" in card and "\n# me/iha\n" in card
    assert '\nname = "me/iha"\n' in card and "\nname=me/iha\n" in card and checkpoint.name not in card
    assert ModelCard(card).data.model_name == "me/iha"
    code, _, _ = cli(cards, checkpoint, "--name", "me/other")
    assert code == 0 and (checkpoint / "README.md").read_text(encoding="utf-8") == card.replace("me/iha", "me/other")
    titled = card.replace("\n# me/iha\n", "\n# A title of my own\n")
    assert "\n# A title of my own\n" in (renamed := with_name(titled, "me/other")) and "me/iha" not in renamed


def test_a_card_of_a_stranger_keeps_its_text():
    for text in ('name = "my/data"\nname=run1\n', "name=it's\n", 'name = "a"\n'):
        card = f"---\nversion: 1.10\n---\n{text}"
        assert with_name(card, "me/iha") == card


def test_a_card_with_line_endings_of_windows_is_edited():
    card = render_card(small_config(), "a-name-before", license="mit").replace("\n", "\r\n")
    edited = with_results(with_name(card, "me/iha"), "me/iha", RESULTS)
    assert "a-name-before" not in edited and "\n# me/iha\n" in edited
    assert edited.count("## Evaluation") == 1 and "Not evaluated." not in edited


def test_a_card_says_what_serves_the_model():
    config = LlamaConfig(**BASE)
    decoder = interleave_heads(LlamaForCausalLM(config), num_pseudo_heads=2)
    assert "vLLM serves most models of text with interleaved or paired heads" in render_card(decoder.config, "name")
    assert 'vLLM serves "iha" and "mha" layers' in render_card(small_config(), "name")
    others = small_config(attention_kinds=["iha", "diff"], num_hidden_layers=2)
    gated = small_config(output_gate="per_head", exclusive_attention=True)
    for config in (others, gated):
        assert "vLLM, SGLang and llama.cpp do not run it" in render_card(config, "name")
    assert "in every layer an output gate (`per_head`)" in render_card(gated, "name")
    assert "https://arxiv.org/abs/2603.09078" in render_card(gated, "name")


def test_a_card_of_a_run_loads_it_and_is_called_as_it_is(tmp_path, monkeypatch):
    """Name a path as seen from where the command ran; from elsewhere its last part, without paths of this machine."""
    monkeypatch.chdir(tmp_path)
    for place, name, title in (
        ("runs/paired/final", "./runs/paired/final", "paired"),
        (tmp_path / "runs" / "paired" / "final", "./runs/paired/final", "paired"),
        (tmp_path.parent / "paired" / "final", "./paired/final", "paired"),
        (tmp_path.parent / "iha", "./iha", "iha"),
    ):
        assert (name_of_place(place), title_of(name)) == (name, title)
        card = render_card(small_config(), name)
        assert f"\n# {title}\n" in card and f'name = "{name}"' in card and f"\nname={name}\n" in card
        assert "\n# me/iha\n" in with_name(card, "me/iha")
    (tmp_path / "runs" / "paired" / "final").mkdir(parents=True)
    assert (source_name("runs/paired/final"), source_name("me/iha")) == ("paired", "me/iha")


def test_the_card_of_an_adapter_says_how_to_merge_it(tmp_path, monkeypatch):
    """Run its example: the merged model computes what the adapted one does."""
    monkeypatch.chdir(tmp_path)
    saved(decoder("llama"), "base")
    model = interleave_heads(AutoModelForCausalLM.from_pretrained("base"), 2)
    modules = ["q_mix", "k_mix", "v_mix", "collapse"]
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", modules_to_save=modules)).eval()
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.02)
    save_adapter(adapted, "out/adapter")
    write_adapter_card("out/adapter", "base")
    card = ModelCard.load("out/adapter/README.md")
    assert "\n# adapter\n" in card.text and card.data.base_model is None and str(tmp_path) not in str(card)
    exec(re.search(r"^```python\n(.*?)^```", card.text, re.DOTALL | re.MULTILINE)[1], {})
    tokens = random_ids(2, 9)
    merged = AutoModelForCausalLM.from_pretrained("merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits)
    write_adapter_card("out/adapter", "me/base")
    assert ModelCard.load("out/adapter/README.md").data.base_model == "me/base"


def test_a_card_from_scratch_has_no_base_model():
    card = render_card(small_config(), "name", from_scratch=True)
    assert "base model" not in card and "France" not in card and "The limits of" not in card
    assert "The limits of the base model remain." in render_card(small_config(), "name", base_model="me/base")
