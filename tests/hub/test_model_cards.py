"""Test that model cards hold what they should, that no name breaks them, and that their example runs as it stands.

A checkpoint of model_cards/ is made again.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from helpers import random_model, small_config
from huggingface_hub import ModelCard
from tiny_training import byte_tokenizer

from checkpoints import make_checkpoints
from common.checkpoint_io import fingerprint
from common.command_io import UserError, read_json
from conversion_scripts import push_to_hub
from evaluation.data import MANIFEST
from kinds.model_cost import model as cost_of_model
from model_cards import render
from model_cards.render import render_card, schedule, with_name, with_results
from modeling_iha import IHAConfig


# Characters that end a line, a cell, a heading, a code span or a string, that open markup, or that are no UTF-8.
NASTY = 'x\n# y\r\n---\n|`$`"\\*_<b>[a](b)\u2028\x1b\udcff'
ALL_OF_GSM8K = MANIFEST["gsm8k/test.jsonl"]["rows"]
SAMPLED = {"do_sample": True, "temperature": 0.6, "max_gen_toks": 512, "until": []}
TASK = {"samples_each": 16, "shots": 0, "generation": SAMPLED, "truncated_prompts": 0, "unfinished_replies": 0}
RESULTS = {
    "checkpoint": "",
    "suite": "reasoning",
    "seed": 0,
    "model_dtype": "float32",
    "device": "cpu",
    "commit": "0" * 40,
    "versions": {"torch": "2.13.0"},
    "data_sha256": {"gsm8k/test.jsonl": MANIFEST["gsm8k/test.jsonl"]["sha256"]},
    "tasks": {
        "gsm8k": {**TASK, "examples": ALL_OF_GSM8K, "metrics": {"pass@1": {"value": 0.54231, "stderr": 0.0137}}},
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


def test_the_schedule_is_drawn_layer_by_layer():
    assert schedule(IHAConfig.from_preset("paper-2.4b-iha")).splitlines() == [
        "layer                     0    5    10   15   20   25",
        "iha, window of 10 tokens  ████·████·████·████·████·█",
        "mha, all tokens           ····█····█····█····█····█·",
    ]
    assert schedule(small_config(num_hidden_layers=1)).splitlines()[1:] == ["iha, all tokens  █"]


def test_a_card_says_what_the_model_costs_and_what_is_not_known():
    config = IHAConfig.from_preset("paper-2.4b-iha")
    card = render_card(config, "name", license="mit")
    assert f"| Parameters | {cost_of_model(config, 8192).parameters:,} |" in card
    assert "| FLOPs of one more token | 15.15 G | 6.927 G | 2.187 |" in card
    assert "The weights are under mit." in card and "under Apache-2.0" in card
    assert "Not evaluated." in card and "- Duvvuri" in card and "- Vaswani" in card
    assert "No licence of the weights is known." in render_card(config, "name")
    assert "FLOPs" in render_card(small_config(max_position_embeddings=10**9), "name")


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


def test_results_stand_in_the_table_and_in_the_metadata():
    card = with_results(render_card(small_config(), "name"), "name", RESULTS)
    assert "Not evaluated." not in card and card.count("## Evaluation") == 1 and "## Cost" in card
    assert f"| gsm8k | pass@1 | 54.2 ± 1.4 | {ALL_OF_GSM8K} | 16 |  |" in card
    assert "| niah@512 | loss | 1.500 ± 0.500 | 8 | 16 | not comparable; 3 replies unfinished |" in card
    (entry,) = ModelCard(card).data.eval_results  # neither what a leaderboard shows nor what is not comparable
    assert (entry.dataset_name, entry.metric_type, entry.metric_value) == ("vt@512", "string_match", 0.25)
    assert entry.metric_args == {"examples": 50}
    again = with_results(card, "name", RESULTS)
    assert again == card
    smoke = with_results(card, "name", RESULTS | {"suite": "smoke"})
    assert ModelCard(smoke).data.eval_results is None and "54.2 ± 1.4" in smoke


def test_only_a_whole_benchmark_is_a_leaderboards():
    entries = render.hub_entries(RESULTS)
    how = "sample(s) a question at temperature 0.6, replies of at most 512 tokens, of which 0 were unfinished"
    notes = f"0-shot, 16 {how}, pass@1"
    dataset = {"id": "openai/gsm8k", "task_id": "gsm8k"}
    assert entries == {"gsm8k.yaml": [{"dataset": dataset, "value": 54.23, "notes": notes}]}
    assert render.hub_entries(RESULTS | {"data_sha256": {}}) == entries  # rows from the Hub
    assert render.hub_entries(RESULTS | {"data_sha256": {"gsm8k/test.jsonl": "another"}}) == {}
    for key, value in {"examples": 50, "truncated_prompts": 1}.items():
        part = deepcopy(RESULTS)
        part["tasks"]["gsm8k"][key] = value
        assert render.hub_entries(part) == {}
    one = {**RESULTS["tasks"]["gsm8k"], "samples_each": 1, "metrics": {"exact_match": {"value": 0.5, "stderr": 0.1}}}
    ((entry,),) = render.hub_entries(RESULTS | {"tasks": {"gsm8k": one}}).values()
    assert entry["value"] == 50 and entry["notes"] == f"0-shot, 1 {how}, exact_match"


def test_the_command_adds_results_and_renames(checkpoint, tmp_path, cli):
    results = RESULTS | {"checkpoint": fingerprint(checkpoint)}
    (tmp_path / "results.json").write_text(json.dumps(results))
    code, _, _ = cli(render, checkpoint, "--name", "me/iha", "--results", tmp_path)
    card = (checkpoint / "README.md").read_text(encoding="utf-8")
    assert code == 0 and "54.2 ± 1.4" in card and "\n# me/iha\n" in card
    assert '\nname = "me/iha"\n' in card and "\nname=me/iha\n" in card and checkpoint.name not in card
    assert ModelCard(card).data.model_name == "me/iha"
    assert yaml.safe_load((checkpoint / ".eval_results" / "gsm8k.yaml").read_text())[0]["value"] == 54.23
    code, _, _ = cli(render, checkpoint, "--name", "me/other")
    assert code == 0 and (checkpoint / "README.md").read_text(encoding="utf-8") == card.replace("me/iha", "me/other")
    titled = card.replace("\n# me/iha\n", "\n# A title of my own\n")
    assert "\n# A title of my own\n" in (renamed := with_name(titled, "me/other")) and "me/iha" not in renamed


LISTS = "".join(f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}'])}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (f"a0: &a0 [x]\n{LISTS}base_model: *a8", "an alias"),
        ("\n".join(f"k{n}: 1" for n in range(100_000)), "has more than 131,072 characters of YAML"),
        ("license: mit\nlicense: x", "the key 'license' is given twice"),
    ],
)
def test_a_card_that_would_take_minutes_is_refused_at_once(metadata, words, checkpoint, cli):
    (checkpoint / "README.md").write_text(f"---\n{metadata}\n---\n")
    start = time.process_time()
    push = (push_to_hub, checkpoint, "me/iha", "--license", "mit", "--base-model", "none", "--dry-run")
    for command in (push, (render, checkpoint, "--name", "me/iha")):
        code, _, error = cli(*command)
        assert code == 1 and re.search(f"[Tt]he metadata of .*{words}", error), error
    assert render.source_license(str(checkpoint)) is None
    assert time.process_time() - start < 5


def test_a_card_of_somebody_else_keeps_its_words():
    card = "---\nlicense: mit\nversion: 1.10  # a string\n---\n# Mine\n\nname = 3\n"
    assert with_name(card, "me/iha") == card
    card = "---\nlicense: mit\n---\n# Mine\n\nname = 3\n"
    assert with_results(card, "name", RESULTS).startswith("---\nlicense: mit\nmodel-index:")
    assert "# Mine\n\nname = 3\n\n## Evaluation\n" in with_results(card, "name", RESULTS)


def test_results_of_another_checkpoint_are_refused(checkpoint):
    before = (checkpoint / "README.md").read_bytes()
    with pytest.raises(UserError, match="The results are of another checkpoint than"):
        render.update(checkpoint, results=RESULTS)
    assert (checkpoint / "README.md").read_bytes() == before and not (checkpoint / ".eval_results").exists()


@pytest.mark.parametrize("name", ["README.md", ".eval_results", ".eval_results/gsm8k.yaml"])
def test_no_link_in_a_checkpoint_leads_to_a_file_that_changes(name, checkpoint, tmp_path):
    outside, link = tmp_path / "outside", checkpoint / name
    link.parent.mkdir(exist_ok=True)
    if name == "README.md":
        shutil.move(link, outside)
    else:
        outside.touch() if link.suffix else outside.mkdir()
    link.symlink_to(outside)
    before = outside.read_bytes() if outside.is_file() else list(outside.iterdir())
    with pytest.raises(UserError, match=f"{name} is a link, and a file elsewhere would change"):
        render.update(checkpoint, "me/iha", RESULTS | {"checkpoint": fingerprint(checkpoint)})
    assert before == (outside.read_bytes() if outside.is_file() else list(outside.iterdir()))


# The checkpoints of model_cards/

NAME = "tiny-iha"


@pytest.fixture
def index(tmp_path):
    return shutil.copytree(make_checkpoints.INDEX, tmp_path / "index", ignore=shutil.ignore_patterns("*.py", "__*"))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return a checkpoint and its results, which take the place of the recipes."""
    checkpoint = tmp_path / "made"
    random_model(small_config()).save_pretrained(checkpoint)
    (checkpoint / "README.md").write_text(render_card(small_config(), "made"), encoding="utf-8")
    results = RESULTS | {"checkpoint": fingerprint(checkpoint)}
    commands = [["module", "an argument", str(make_checkpoints.story())]]
    made = make_checkpoints.Made(checkpoint, results, commands=commands)
    monkeypatch.setattr(make_checkpoints, "recipes", lambda warm_start: {"a": lambda output, name: made})
    return made


@pytest.mark.slow  # it trains as many steps as the record says
def test_a_checkpoint_is_made_again_as_recorded(index, tmp_path, capsys):
    """Make it twice: the second time nothing is done again."""
    arguments = [NAME, "--output", str(tmp_path / "made"), "--index", str(index)]
    before = {path: path.read_bytes() for path in index.rglob("*") if path.is_file()}
    make_checkpoints.main(arguments)
    first = capsys.readouterr().out
    assert re.search(f"^{NAME}: (the recorded weights, bit for bit|other bits than recorded; .*, within)", first, re.M)
    weights = tmp_path / "made" / NAME / "run" / "final" / "model.safetensors"
    made, recorded = (read_json(path) for path in (weights.with_name("config.json"), index / NAME / "record.json"))
    assert made | recorded["config"] | {"transformers_version": made["transformers_version"]} == made
    stamp = weights.stat().st_mtime_ns
    make_checkpoints.main(arguments)
    assert capsys.readouterr().out.count("done before") == 3 and weights.stat().st_mtime_ns == stamp
    assert {path: path.read_bytes() for path in index.rglob("*") if path.is_file()} == before


def test_what_differs_from_its_record_is_named(made, tmp_path, index, monkeypatch, capsys):
    arguments = ["--index", str(index)]
    make_checkpoints.main(arguments)
    assert "a: recorded in" in capsys.readouterr().out
    table = (index / "README.md").read_text(encoding="utf-8")
    assert "| [a](a/README.md) | iha | " in table and "niah@512 (n = 8): loss 1.500 ± 0.500" in table
    assert table.count("## The checkpoints") == table.count("## The card of a checkpoint") == 1
    make_checkpoints.main(arguments)
    assert "a: the recorded weights, bit for bit" in capsys.readouterr().out
    random_model(small_config(), seed=1).save_pretrained(made.checkpoint)
    made.results = deepcopy(made.results) | {"checkpoint": fingerprint(made.checkpoint)}
    loss = made.results["tasks"]["niah@512"]["metrics"]["loss"]
    loss["value"] += make_checkpoints.TOLERANCE / 2
    make_checkpoints.main(arguments)
    assert "a: other bits than recorded; the losses differ by up to 0.0250 nats" in capsys.readouterr().out
    loss["value"] += make_checkpoints.TOLERANCE
    with pytest.raises(UserError, match=r"a has other weights than recorded, and losses that differ by up to 0\.0750"):
        make_checkpoints.main(arguments)
    loss["value"] = float("nan")
    with pytest.raises(UserError, match="losses that differ by up to nan nats"):
        make_checkpoints.compare("a", made, index / "a")
    del made.results["tasks"]["niah@512"]
    with pytest.raises(UserError, match="losses that differ by up to inf nats"):
        make_checkpoints.main(arguments)


def test_the_commands_name_no_place_of_this_machine(made, monkeypatch):
    monkeypatch.chdir(make_checkpoints.ROOT / "docs")
    assert make_checkpoints.path_from_root("../outputs/a") == Path("outputs/a")
    script = make_checkpoints.script(made.commands)
    assert script.endswith("python -m module 'an argument' \"$STORY\"\n") and "SMOLLM2" not in script
    assignment = next(line for line in script.splitlines() if line.startswith("STORY="))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(["sh", "-c", f'PATH="{path}"; {assignment}; echo "$STORY"'], capture_output=True, text=True)
    assert shown.stdout.strip() == str(make_checkpoints.story()), shown.stderr


def test_a_fine_tuned_model_stands_beside_its_twin(tmp_path, index):
    """Read a run directory as experiments/warm_start.py leaves it."""
    for variant, correct, loss in (("iha_2", 20, 0.125), ("mha", 10, 0.25)):
        run = tmp_path / "runs" / f"{variant}-1"
        random_model(small_config()).save_pretrained(run / "final")
        (run / "final" / "README.md").write_text(render_card(small_config(), "final"), encoding="utf-8")
        record = {"recipe": {"eval_size": 48.0, "seed": 0, "use_cpu": True}, "versions": {"torch": "2.13.0"}}
        record |= {section: {"name": f"{tmp_path}/here"} for section in ("data", "base_model")}
        contents = {"result": {"correct": {"gcd": correct}}, "run": record, "loss": {"eval": [[0, 2.0], [100, loss]]}}
        contents["gcd"] = {"rows": 50, "accuracy": correct / 50, "correct": correct, "replies": []}
        for file, content in contents.items():
            (run / f"{file}.json").write_text(json.dumps(content))
    (tmp_path / "here").touch()
    name = "smollm2-135m-iha-p2-sft"
    shutil.rmtree(index / name)
    make_checkpoints.main([name, "--index", str(index), "--warm-start", str(tmp_path)])
    card = (index / name / "README.md").read_text(encoding="utf-8")
    assert "| gcd | accuracy | 40.0 ± 7.0 | 20.0 ± 5.7 | 50 | 1 |  |" in card
    assert "| held-out rows | loss | 0.125 | 0.250 | 48 | 1 |  |" in card
    record = read_json(index / name / "record.json")
    assert record["training"]["data"]["name"] == record["twin"]["data"]["name"] == "here"
    assert [record[run]["losses"]["eval"][-1] for run in ("training", "twin")] == [[100, 0.125], [100, 0.25]]
    assert record["twin"]["weights_sha256"] == record["weights_sha256"]
    assert "--variants mha iha_2 --seeds 1" in (index / name / "commands.sh").read_text()


FOLDERS = sorted(path.parent.name for path in make_checkpoints.INDEX.glob("*/record.json"))
# In place of SmolLM2's sizes.
SMALL = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


@pytest.mark.slow  # every card has the example of the template, which test_hub.py runs
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_example_of_every_card_runs(folder, tmp_path, monkeypatch, capsys):
    record, _ = make_checkpoints.read_record(make_checkpoints.INDEX / folder)
    tokenizer = byte_tokenizer()
    layers = {key: record["config"][key][:2] for key in ("attention_kinds", "layer_types")}
    config = IHAConfig(**record["config"] | SMALL | layers | {"vocab_size": len(tokenizer)})
    random_model(config).save_pretrained(tmp_path / folder)
    tokenizer.save_pretrained(tmp_path / folder)
    card = (make_checkpoints.INDEX / folder / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)[1], {})
    assert capsys.readouterr().out.startswith("The capital of France is")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_card_says_what_the_cost_model_and_the_template_say(folder):
    """Render the card again; how the model was made is the card's own, and its results may stand beside a twin's."""
    path = make_checkpoints.INDEX / folder
    record, results = make_checkpoints.read_record(path)
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


def test_every_folder_of_the_index_is_whole():
    folders = [path for path in make_checkpoints.INDEX.iterdir() if (path / "record.json").is_file()]
    assert {path.name for path in folders} <= make_checkpoints.recipes(None).keys()
    table = (make_checkpoints.INDEX / "README.md").read_text(encoding="utf-8")
    assert make_checkpoints.index_table(make_checkpoints.INDEX) in table
    for folder in folders:
        assert "Not evaluated." not in (folder / "README.md").read_text(encoding="utf-8")
        texts = [path.read_text(encoding="utf-8") for path in folder.iterdir()]
        assert not any(str(Path.home()) in text or "site-packages" in text for text in texts)
