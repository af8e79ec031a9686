"""Test that model cards hold what they should, that no name breaks them, and that their example runs as it stands.

A checkpoint of model_cards/ is made again.
"""

import json
import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
from helpers import random_model, small_config
from huggingface_hub import ModelCard
from tiny_training import byte_config, saved
from transformers import LlamaConfig, LlamaForCausalLM

from iha import cards
from iha.card_template import render_card
from iha.cards import name_of_place, source_name, title_of, with_name, with_results
from iha.checkpoints import fingerprint
from iha.errors import ROOT, UserError
from iha.files import read_json
from iha.model_cost import model as cost_of_model
from iha.sources import find_source
from modeling_iha import IHAConfig, interleave_heads
from research.checkpoints import make_checkpoints


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
    assert f"| Parameters | {cost_of_model(config, 8192).parameters:,} |" in card
    assert "| FLOPs of one more token | 15.15 G | 6.927 G | 2.187 |" in card
    assert "The weights are under mit." in card and "under Apache-2.0" in card
    assert "Not evaluated." in card and "- Duvvuri" in card and "- Vaswani" in card
    assert "No license of the weights is known." in render_card(config, "name")


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
    # The recipe's rate of the mixing is rejected for a model without one.
    assert "--mixing_scale 1" not in render_card(others, "name")
    assert "--mixing_scale 1" in render_card(small_config(attention_kinds="paired_heads"), "name")


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


def test_a_card_from_scratch_has_no_base_model():
    card = render_card(small_config(), "name", from_scratch=True)
    assert "base model" not in card and "France" not in card and "The limits of" not in card
    assert "The limits of the base model remain." in render_card(small_config(), "name", base_model="me/base")


# The checkpoints of model_cards/

NAME = "tiny-iha"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Return a copy of the folders of model_cards, which takes its place, as another folder does of the outputs'."""
    monkeypatch.setattr(make_checkpoints, "OUTPUT", tmp_path / "made")
    monkeypatch.setattr(make_checkpoints, "INDEX", tmp_path / "index")
    return shutil.copytree(ROOT / "model_cards", tmp_path / "index")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a checkpoint and its results, which take the place of the recipes."""
    checkpoint = tmp_path / "made"
    random_model(small_config()).save_pretrained(checkpoint)
    (checkpoint / "README.md").write_text(render_card(small_config(), "made"), encoding="utf-8")
    made = make_checkpoints.Made(checkpoint, RESULTS | {"checkpoint": fingerprint(find_source(checkpoint))})
    monkeypatch.setattr(make_checkpoints, "RECIPES", {"a": lambda output: made})
    return made


@pytest.mark.slow  # it trains as many steps as the record says
def test_a_checkpoint_is_made_again_as_recorded(index, tmp_path, capsys):
    """Make it twice: the second time nothing is done again."""
    before = {path: path.read_bytes() for path in index.rglob("*") if path.is_file()}
    make_checkpoints.main([NAME])
    first = capsys.readouterr().out
    assert re.search(f"^{NAME}: (the recorded weights, bit for bit|other bits than recorded; .*, within)", first, re.M)
    weights = tmp_path / "made" / NAME / "run" / "final" / "model.safetensors"
    made, recorded = (read_json(path) for path in (weights.with_name("config.json"), index / NAME / "record.json"))
    assert made | recorded["config"] | {"transformers_version": made["transformers_version"]} == made
    stamp = weights.stat().st_mtime_ns
    make_checkpoints.main([NAME])
    assert capsys.readouterr().out.count("exists: skipping this step") == 2 and weights.stat().st_mtime_ns == stamp
    assert {path: path.read_bytes() for path in index.rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_is_made_again_is_verified_again(tmp_path, monkeypatch):
    ran = []

    def run_command(result, module, *arguments):
        if not result.exists():
            ran.append(module)
            result.write_text("{}")

    monkeypatch.setattr(make_checkpoints, "run_command", run_command)
    monkeypatch.setattr(make_checkpoints, "smollm2_gguf", lambda: "source")
    monkeypatch.setattr(make_checkpoints, "evaluated", lambda *arguments: {})
    for checkpoint_is_gone, steps in ((False, 2), (False, 0), (True, 2)):
        if checkpoint_is_gone:
            (tmp_path / "checkpoint").unlink()
        ran.clear()
        make_checkpoints.convert(tmp_path)
        assert len(ran) == steps


def test_what_differs_from_its_record_is_named(made, index, capsys):
    make_checkpoints.main([])
    assert "a: recorded in" in capsys.readouterr().out
    make_checkpoints.main([])
    assert "a: the recorded weights, bit for bit" in capsys.readouterr().out
    random_model(small_config(), seed=1).save_pretrained(made.checkpoint)
    made.results = deepcopy(made.results) | {"checkpoint": fingerprint(find_source(made.checkpoint))}
    loss = made.results["tasks"]["niah@512"]["metrics"]["loss"]
    loss["value"] += make_checkpoints.TOLERANCE / 2
    make_checkpoints.main([])
    assert "a: other bits than recorded; the losses differ by up to 0.0250 nats" in capsys.readouterr().out
    loss["value"] += make_checkpoints.TOLERANCE
    with pytest.raises(UserError, match=r"a has other weights than recorded, and losses that differ by up to 0\.0750"):
        make_checkpoints.main([])
    loss["value"] = float("nan")
    with pytest.raises(UserError, match="losses that differ by up to nan nats"):
        make_checkpoints.compare("a", made, index / "a")


FOLDERS = sorted(path.parent.name for path in make_checkpoints.INDEX.glob("*/record.json"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_card_says_what_the_cost_model_and_the_template_say(folder):
    """Render the card again; only how the model was made is the card's own."""
    path = make_checkpoints.INDEX / folder
    record, results = read_json(path / "record.json"), cards.read_results(path)
    card = ModelCard.load(path / "README.md")
    details = re.search(r"^## (Conversion|Fine-tuning)\n.*?(?=^## Evaluation)", card.text, re.DOTALL | re.MULTILINE)[0]
    made_from = {key: card.data.get(key) for key in ("base_model", "license", "datasets")}
    rendered = render_card(IHAConfig(**record["config"]), folder, **made_from, details=details)
    expected = ModelCard(with_results(rendered, folder, results))
    assert card.data.to_dict() == expected.data.to_dict()
    assert card.text == expected.text


def test_every_folder_of_the_index_is_whole():
    folders = [path for path in make_checkpoints.INDEX.iterdir() if (path / "record.json").is_file()]
    assert {path.name for path in folders} == make_checkpoints.RECIPES.keys()
    table = (make_checkpoints.INDEX / "README.md").read_text(encoding="utf-8")
    assert table.count("/README.md) | ") == len(folders)
    for folder in folders:
        record = read_json(folder / "record.json", make_checkpoints.Record)
        config, (weights,) = IHAConfig(**record["config"]), record["weights_sha256"].values()
        kinds = ", ".join(dict.fromkeys(config.attention_kinds))
        heads = config.num_pseudo_heads if kinds == "iha" else "–"
        assert f"| [{folder.name}]({folder.name}/README.md) | {kinds} | {heads} | `{weights[:12]}` |" in table
        assert "Not evaluated." not in (folder / "README.md").read_text(encoding="utf-8")
        texts = [path.read_text(encoding="utf-8") for path in folder.iterdir()]
        assert not any(str(Path.home()) in text or "site-packages" in text for text in texts)
