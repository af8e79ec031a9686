"""Test that model cards hold what they should, that no name breaks them, and that their example runs as it stands.

A checkpoint of model_cards/ is made again.
"""

import json
import re
import shutil
import subprocess

import pytest
from helpers import random_model, small_config
from huggingface_hub import ModelCard
from tiny_training import byte_tokenizer

from iha_io.checkpoint_io import fingerprint
from iha_io.command_io import UserError, read_json
from model_cards import render
from model_cards.render import render_card, with_name, with_results
from modeling_iha import IHAConfig
from research.checkpoints import make_checkpoints


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
            "metrics": {"loss": {"value": 1.5, "stderr": 0.5}},
        },
    },
}


@pytest.fixture
def checkpoint(tmp_path):
    """Return a saved model with its card, in a directory whose name is no plain word."""
    directory = tmp_path / "it's a model"
    tokenizer = byte_tokenizer()
    random_model(small_config(vocab_size=len(tokenizer))).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "README.md").write_text(render_card(small_config(), directory.name), encoding="utf-8")
    return directory


# The card


def test_no_name_breaks_a_card():
    cards = [
        ModelCard(render_card(small_config(), name, license=render.one_printable_line(name)))
        for name in (NASTY, "plain")
    ]
    lines, expected = (card.text.splitlines() for card in cards)
    different = [pair for pair in zip(lines, expected, strict=True) if pair[0] != pair[1]]
    assert len(different) == 4
    assert all(line.startswith(("# ", "name = ", "name=", "The code in")) for line, _ in different)
    read = {}
    exec(next(line for line in lines if line.startswith("name = ")), read)
    assert read["name"] == render.one_printable_line(NASTY)
    assert cards[0].data.to_dict().keys() == cards[1].data.to_dict().keys()
    str(cards[0]).encode()


def test_the_shell_reads_the_name_of_a_card(checkpoint):
    card = (checkpoint / "README.md").read_text(encoding="utf-8")
    assignment = re.search(r"^```sh\n(.*?)\n", card, re.DOTALL | re.MULTILINE)[1]
    shown = subprocess.run(["sh", "-c", f'{assignment}\nprintf %s "$name"'], capture_output=True, text=True)
    assert shown.stdout == checkpoint.name


# Its evaluation and its name


def test_the_command_adds_results_and_renames(checkpoint, tmp_path, cli):
    results = RESULTS | {"checkpoint": fingerprint(checkpoint)}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "of_another").mkdir()
    (tmp_path / "of_another" / "results.json").write_text(json.dumps(RESULTS))
    code, _, err = cli(render, checkpoint, "--results", tmp_path / "of_another")
    assert code == 1 and "The results are of another checkpoint than" in err
    code, _, _ = cli(render, checkpoint, "--name", "me/iha", "--results", tmp_path)
    card = (checkpoint / "README.md").read_text(encoding="utf-8")
    assert code == 0 and "54.2 ± 1.4" in card and "\n# me/iha\n" in card
    assert '\nname = "me/iha"\n' in card and "\nname=me/iha\n" in card and checkpoint.name not in card
    assert ModelCard(card).data.model_name == "me/iha"
    code, _, _ = cli(render, checkpoint, "--name", "me/other")
    assert code == 0 and (checkpoint / "README.md").read_text(encoding="utf-8") == card.replace("me/iha", "me/other")
    titled = card.replace("\n# me/iha\n", "\n# A title of my own\n")
    assert "\n# A title of my own\n" in (renamed := with_name(titled, "me/other")) and "me/iha" not in renamed


def test_no_link_in_a_checkpoint_leads_to_a_file_that_changes(checkpoint, tmp_path):
    shutil.move(checkpoint / "README.md", outside := tmp_path / "outside")
    (checkpoint / "README.md").symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(UserError, match="README.md is a link, and a file elsewhere would change"):
        render.update(checkpoint, "me/iha")
    assert before == outside.read_bytes()


# The checkpoints of model_cards/


FOLDERS = sorted(path.parent.name for path in make_checkpoints.INDEX.glob("*/record.json"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_card_says_what_the_cost_model_and_the_template_say(folder):
    """Render the card again; how the model was made is the card's own, and its results may stand beside a twin's."""
    path = make_checkpoints.INDEX / folder
    record, results = read_json(path / "record.json"), render.read_results(path)
    card = ModelCard.load(path / "README.md")
    details = re.search(r"^## (Conversion|Fine-tuning)\n.*?(?=^## Evaluation)", card.text, re.DOTALL | re.MULTILINE)[0]
    made_from = {key: card.data.get(key) for key in ("base_model", "license", "datasets")}
    rendered = render_card(IHAConfig(**record["config"]), folder, **made_from, details=details)
    expected = ModelCard(with_results(rendered, folder, results))
    assert card.data.to_dict() == expected.data.to_dict()
    evaluation = re.compile(r"^## Evaluation\n.*?(?=^## )", re.DOTALL | re.MULTILINE)
    assert evaluation.sub("", card.text) == evaluation.sub("", expected.text)
    for row in evaluation.search(expected.text)[0].splitlines():
        assert " | ".join(row.split(" | ")[:3]) in card.text  # task, metric and figure
