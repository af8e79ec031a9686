"""Take a Llama from the Hub to a fine-tuned IHA model on the Hub and back.

The real client and the commands of this repository run against a stand-in for the Hub (`loopback_hub.py`)."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import IHA_CODE, random_model, small_config
from loopback_hub import File, LoopbackHub
from tiny_training import byte_tokenizer, recipe, sizes, training_rows, write_jsonl
from transformers import LlamaConfig, LlamaForCausalLM

from common.checkpoint_io import load_in_clean_process, run_in_clean_process
from modeling_iha import IHAForCausalLM
from modeling_iha.configuration_iha import AUTO_MAP
from sft import train


ROOT = Path(__file__).resolve().parents[1]
PROMPT = "1+1?"

# Several pushes in one process. That directory and repository load alone is what tests/test_pull_and_list.py checks.
PUSHES = """
import json, sys
from conversion_scripts import push_to_hub
from common.checkpoint_io import UserError
push_to_hub.load_in_clean_process = lambda directory: None
push_to_hub.load_cached_in_clean_process = lambda repo_id, revision, cache: None
for arguments in json.load(sys.stdin):
    sys.argv = ["push_to_hub.py", *arguments]
    try:
        push_to_hub.main()
    except UserError as error:
        print(f"Refused: {error}")
"""

# What somebody does who has Transformers and a repository's name, in an empty cache: the config and the tokenizer by
# themselves first, so that neither rests on what a model load has brought.
FROM_THE_HUB = """
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
"""


def run(environment, *arguments, **kwargs):
    """Return the completed process of Python in the repository's root, which must have succeeded."""
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        **kwargs,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process


def pushes(environment, *commands):
    """Return what push_to_hub.py prints for each of the lists of arguments."""
    commands = [[str(word) for word in (*words, "--base-model", "me/llama", "--trust-code")] for words in commands]
    return run(environment, "-c", PUSHES, input=json.dumps(commands)).stdout


def test_the_code_of_a_checkpoint_is_short_enough_to_read(tmp_path):
    """Count the lines that a stranger reads before trusting an "iha" model. The aim is 1,600."""
    random_model(small_config()).save_pretrained(tmp_path)
    lines = {path.name: path.read_text().count("\n") for path in tmp_path.glob("*.py")}
    assert lines.keys() == IHA_CODE and sum(lines.values()) <= 1725, lines


@pytest.fixture(scope="module")
def hub():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def trained(hub, tmp_path_factory):
    """Return the output directory of a fine-tuning run on an IHA model, converted from a Llama on the hub."""
    path = tmp_path_factory.mktemp("hub")
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
    )
    random_model(config, LlamaForCausalLM).save_pretrained(path / "llama")
    tokenizer.save_pretrained(path / "llama")
    (path / "llama" / "README.md").write_text("---\nlicense: apache-2.0\n---\nA Llama.\n")
    hub.add("me/llama", path / "llama")

    convert = ("-m", "conversion_scripts.convert_llama_to_iha")
    run(hub.environment(path / "home"), *convert, "me/llama", path / "iha", "--num-pseudo-heads", 2)
    rows = write_jsonl(path / "rows.jsonl", training_rows(20))
    with pytest.MonkeyPatch.context() as context:
        context.chdir(ROOT)
        train.main(["--config", recipe("demo"), *sizes(path / "iha", rows, path / "run", max_steps=2)])
    return path / "run"


@pytest.fixture(scope="module")
def second(trained, tmp_path_factory):
    """Return a copy of the fine-tuned model with other weights, and code that says so."""
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
def commits(hub, trained, second, tmp_path_factory):
    """Push the first model to "me/iha" with the tag v1, and the second over it and to the private "me/secret"."""
    out = pushes(
        hub.environment(tmp_path_factory.mktemp("home")),
        [trained / "final", "me/iha", "--tag", "v1"],
        [second, "me/iha"],
        [second, "me/secret", "--private"],
    )
    assert "Refused" not in out
    first = hub.repositories["me/iha"].references["v1"]
    assert f"{hub.endpoint}/me/iha/commit/{first}" in out
    return {"first": first, "second": hub.repositories["me/iha"].references["main"]}


def test_a_conversion_from_the_hub_says_where_it_is_from(trained):
    card = (trained.parent / "iha" / "README.md").read_text()
    assert "base_model: me/llama" in card and "license: apache-2.0" in card
    assert json.loads((trained.parent / "iha" / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_what_a_push_stores(hub, commits, trained):
    """Store the checkpoint byte for byte and nothing else, weights as LFS objects, in one commit for each push."""
    repository = hub.repositories["me/iha"]
    assert commits["first"] != commits["second"] and repository.references["v1"] == commits["first"]
    files = repository.commits[commits["first"]]
    assert {name for name in files if name.endswith(".py")} == IHA_CODE
    assert {name for name, file in files.items() if file.lfs} == {"model.safetensors"}
    assert b"base_model: me/llama" in files["README.md"].content
    for name in files.keys() - {".gitattributes", "README.md"}:
        assert files[name].content == (trained / "final" / name).read_bytes()
    newer = repository.commits[commits["second"]]
    changed = {name for name in files.keys() | newer.keys() if files.get(name) != newer.get(name)}
    assert changed == {"model.safetensors", "modeling_iha.py"}
    puts = [path for method, path in hub.calls if method == "PUT"]
    assert len(puts) == len(set(puts)) and ("POST", "/api/validate-yaml") in hub.calls


def test_pull_requests_tags_and_conflicts(hub, commits, second, tmp_path):
    def somebody_else(repository):
        if repository.pull_requests:
            repository.commit("main", {**repository.commits[commits["second"]], "note.txt": File(b"!", False)})

    hub.before_commit = somebody_else
    repository = hub.repositories["me/iha"]
    (second / "LICENSE").write_text("Apache License 2.0")
    out = pushes(
        hub.environment(tmp_path),
        [second, "me/iha", "--create-pr"],
        [second, "me/iha", "--tag", "v1"],
        [second, "me/iha"],
    )
    hub.before_commit = None
    pull_request, tag, conflict = out.split("Checking")[1:]
    assert f"Published: {hub.endpoint}/me/iha/discussions/1" in pull_request
    assert "LICENSE" in repository.commits[repository.references["refs/pr/1"]]
    assert "Refused: me/iha already has a tag or branch 'v1'" in tag
    assert "Refused: Publishing me/iha failed" in conflict and "somebody committed meanwhile" in conflict
    assert hub.head("me/iha").keys() - repository.commits[commits["second"]].keys() == {"note.txt"}
    repository.references["main"] = commits["second"]


def test_a_private_repository_needs_the_token(hub, commits, tmp_path):
    assert hub.repositories["me/secret"].private and not hub.repositories["me/iha"].private
    ask = ("-c", "from huggingface_hub import HfApi; print(HfApi().repo_info('me/secret').sha)")
    assert run(hub.environment(tmp_path), *ask).stdout.strip() == hub.repositories["me/secret"].references["main"]
    with pytest.raises(AssertionError, match="401"):
        run({**hub.environment(tmp_path), "HF_TOKEN": ""}, *ask)


def test_load_by_id_at_a_revision(hub, commits, trained, second, tmp_path, monkeypatch):
    """Load by commit, tag and branch, with every head, without this package, and save again."""
    for name, value in hub.environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    again = tmp_path / "again"
    request = {"repo_id": "me/iha", "first": commits["first"], "prompt": PROMPT, "again": str(again)}
    result = run_in_clean_process(FROM_THE_HUB, request, offline=False)

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
    reply = load_in_clean_process(again, PROMPT, max_new_tokens=4)
    assert reply["token_ids"] == result["first"]["tokens"][length:]


def test_trainer_checkpoints_carry_the_code(trained):
    checkpoint = trained / "checkpoint-2"
    assert {path.name for path in checkpoint.glob("*.py")} == IHA_CODE
    assert json.loads((checkpoint / "config.json").read_text())["auto_map"] == AUTO_MAP
    reply = load_in_clean_process(checkpoint, PROMPT, max_new_tokens=4)
    inputs = byte_tokenizer()(PROMPT, return_tensors="pt")
    tokens = IHAForCausalLM.from_pretrained(checkpoint).generate(**inputs, max_new_tokens=4, do_sample=False)[0]
    assert reply["token_ids"] == tokens[inputs["input_ids"].shape[1] :].tolist()
