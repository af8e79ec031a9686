"""Fetch a Llama from the Hub, convert it, fine-tune it, publish it on the Hub, and load it from there.

The real client and the commands of this repository speak to a stand-in for the Hub (`loopback_hub.py`).
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import IHA_CODE
from loopback_hub import LoopbackHub
from tiny_training import byte_tokenizer, decoder, recipe, saved, sizes, training_rows, write_jsonl

from iha.api import convert, push
from iha.checkpoints import load_model
from iha.errors import ROOT, UserError
from iha.hub import checkpoint_checks
from iha.processes import run_in_clean_process
from iha.sources import find_source
from modeling_iha import IHAForCausalLM
from modeling_iha.configuration_iha import AUTO_MAP
from sft import train


PROMPT = "1+1?"

# What somebody does who has Transformers and a repository's name, in an empty cache: the config and the tokenizer by
# themselves first, so that neither rests on what a model load has brought.
FROM_THE_HUB = """
import os, tempfile
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
import torch
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoModelForQuestionAnswering, AutoModelForSequenceClassification,
    AutoModelForTokenClassification, AutoTokenizer, pipeline,
)
repo_id, first, prompt = request["repo_id"], request["first"], request["prompt"]
pinned = {"revision": first, "trust_remote_code": True}
tokenizer = AutoTokenizer.from_pretrained(repo_id, revision=first, trust_remote_code=False)
result = {"code_for_the_tokenizer": [name for name in sys.modules if name.startswith("transformers_modules.")]}
config = AutoConfig.from_pretrained(repo_id, **pinned)
config.save_pretrained(request["again"] + "config")
inputs = tokenizer(prompt, return_tensors="pt")

def describe(model):
    with torch.no_grad():
        return {
            "logits": model(inputs["input_ids"]).logits.tolist(),
            "tokens": model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)[0].tolist(),
            "revision": getattr(type(model), "revision", 1),
            "module": type(model).__module__,
        }

model = AutoModelForCausalLM.from_pretrained(repo_id, **pinned)
result |= {"config": type(config).__name__, "first": describe(model)}
model.save_pretrained(request["again"])
tokenizer.save_pretrained(request["again"])
result["newest"] = describe(AutoModelForCausalLM.from_pretrained(repo_id, trust_remote_code=True))
tagged = AutoModelForCausalLM.from_pretrained(repo_id, revision="v1", trust_remote_code=True)
result["tag"] = describe(tagged)["revision"]

result["heads"] = {}
for auto_class in (
    AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering
):
    head, info = auto_class.from_pretrained(repo_id, num_labels=3, output_loading_info=True, **pinned)
    output = head(inputs["input_ids"])
    shape = list((output.start_logits if "start_logits" in output else output.logits).shape)
    result["heads"][type(head).__name__] = [shape, sorted(key.split(".")[0] for key in info["missing_keys"])]
    head.save_pretrained(request["again"] + type(head).__name__)

generate = pipeline("text-generation", repo_id, **pinned)
result["pipeline"] = generate(prompt, max_new_tokens=4, do_sample=False, return_full_text=False)[0]["generated_text"]

# The example of the card as it stands, in its directory and by id, with all that it writes to stderr.
log = tempfile.TemporaryFile()
os.dup2(log.fileno(), 2)
os.chdir(request["directory"])
for example in request["examples"]:
    exec(example, {})
log.seek(0)
result["stderr_of_the_examples"] = log.read().decode()
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Return the stand-in, which commands in this process reach; what other tests load is taken for granted."""
    with pytest.MonkeyPatch.context() as patch, LoopbackHub() as hub:
        hub.use(patch, tmp_path_factory.mktemp("home"))
        patch.setattr(checkpoint_checks, "load_in_clean_process", lambda directory: None)
        yield hub


LLAMA_CARD = "---\nlicense: other\nlicense_name: llama9\nlicense_link: LICENSE\n---\nA Llama.\n"


@pytest.fixture(scope="module")
def trained(hub, tmp_path_factory):
    """Return the output directory of a fine-tuning of an IHA model that was converted from a Llama on the hub."""
    path = tmp_path_factory.mktemp("hub")
    saved(decoder("llama"), path / "llama")
    (path / "llama" / "README.md").write_text(LLAMA_CARD)
    hub.add("me/llama", path / "llama")

    rows = write_jsonl(path / "rows.jsonl", training_rows(20))
    with pytest.MonkeyPatch.context() as context:
        convert("me/llama", path / "iha", 2)
        context.chdir(ROOT)
        train.main(["--config", recipe("demo"), *sizes(path / "iha", rows, path / "run", max_steps=2)])
    return path / "run"


@pytest.fixture(scope="module")
def second(trained, tmp_path_factory):
    """Return a changed copy of the fine-tuned model: other weights, and code that says so."""
    directory = tmp_path_factory.mktemp("second") / "iha"
    model = IHAForCausalLM.from_pretrained(trained / "final")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    shutil.copytree(trained / "final", directory)
    model.save_pretrained(directory)
    with open(directory / "modeling_iha.py", "a") as file:
        file.write("\nIHAForCausalLM.revision = 2\n")
    return directory


@pytest.fixture(scope="module")
def first(hub, trained, second):
    """Push the fine-tuned model, and the changed one over it; return the first commit, which is tagged v1."""
    push(trained / "final", "me/iha", tag="v1", base_model="me/llama")
    push(second, "me/iha", base_model="me/llama", trust_code=True)
    return hub.repositories["me/iha"].references["v1"]


def test_a_conversion_from_the_hub_says_where_it_is_from(trained):
    card = (trained.parent / "iha" / "README.md").read_text()
    assert "base_model: me/llama" in card and "license: other\nlicense_name: llama9\nlicense_link: LICENSE\n" in card
    assert "The weights are under llama9." in card
    assert json.loads((trained.parent / "iha" / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_load_by_id_at_a_revision(hub, first, trained, second, tmp_path, monkeypatch, new_processes):
    """Load by commit, tag and branch, with every head, and as the card says, without this package; save again."""
    for name, value in hub.environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    again = tmp_path / "again"
    request = {"repo_id": "me/iha", "first": first, "prompt": PROMPT, "again": str(again)}
    request["directory"] = str(trained.parent)
    cards = (trained / "final" / "README.md").read_text(), hub.head("me/iha")["README.md"].decode()
    request["examples"] = [re.search(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)[1] for card in cards]
    assert 'name = "./run/final"\n' in request["examples"][0] and 'name = "me/iha"\n' in request["examples"][1]
    result = run_in_clean_process(FROM_THE_HUB, request, offline=False)

    assert result["stderr_of_the_examples"] == ""
    tokenizer = byte_tokenizer()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    for name, directory, revision in (("first", trained / "final", 1), ("newest", second, 2)):
        model = IHAForCausalLM.from_pretrained(directory)
        tokens = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)[0]
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(result[name]["logits"]), model(inputs["input_ids"]).logits)
        assert result[name]["tokens"] == tokens.tolist() and result[name]["revision"] == revision
        assert result[name]["module"].startswith("transformers_modules.me.iha.")
    assert result["config"] == "IHAConfig" and result["tag"] == 1 and result["code_for_the_tokenizer"] == []
    length = inputs["input_ids"].shape[1]
    assert result["heads"] == {
        "IHAForSequenceClassification": [[1, 3], ["score"]],
        "IHAForTokenClassification": [[1, length, 3], ["score", "score"]],
        "IHAForQuestionAnswering": [[1, length], ["qa_outputs", "qa_outputs"]],
    }
    text = tokenizer.decode(result["first"]["tokens"][length:], skip_special_tokens=True)
    assert result["pipeline"] == text

    # A config that is saved alone, as merging tools do, brings the code of the model too.
    for directory in (again, *(Path(f"{again}{name}") for name in ("config", *result["heads"]))):
        assert json.loads((directory / "config.json").read_text())["auto_map"] == AUTO_MAP
        assert {path.name for path in directory.glob("*.py")} == IHA_CODE
        for name in IHA_CODE:
            assert (directory / name).read_bytes() == (trained / "final" / name).read_bytes()
    final = {path.name: path.read_bytes() for path in (trained / "final").iterdir()}
    assert (again / "model.safetensors").read_bytes() == final["model.safetensors"]
    # The Trainer's last checkpoint is as whole as the final model.
    for name in IHA_CODE | {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}:
        assert (trained / "checkpoint-2" / name).read_bytes() == final[name], name


def test_a_source_with_a_revision_is_loaded_at_it(first):
    older, newest = (load_model(find_source("me/iha", revision)) for revision in ("v1", None))
    assert newest.lm_head.weight.equal(2 * older.lm_head.weight)


def test_a_clean_process_knows_no_remote_code_of_this_one(tmp_path, monkeypatch):
    """Transformers puts its cache of remote code on `sys.path`, which would hide that of the clean process."""
    (tmp_path / "transformers_modules").mkdir()
    (tmp_path / "transformers_modules" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(UserError, match="No module named 'transformers_modules'"):
        run_in_clean_process("import transformers_modules\nresult = {}", {})
