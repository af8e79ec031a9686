"""Refuse mistakes in the commands without a test file of their own: in one line, before any work."""

import json
import re

import pytest
from helpers import last_line, random_model, small_config
from tiny_training import with_template
from transformers import LlamaConfig

from iha_io.command_io import UserError, run_module
from research.benchmarks import cost
from sft import make_reasoning_data, score_reasoning


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a directory of inputs, good and bad, which no command may change."""
    directory = tmp_path_factory.mktemp("inputs")
    make_reasoning_data.main([str(directory / "rows.jsonl"), "--rows", "2"])
    wrong = json.loads((directory / "rows.jsonl").read_text().splitlines()[0])
    wrong["conversations"][1]["value"] = "<|begin_of_solution|>\nnone\n<|end_of_solution|>"
    (directory / "wrong.jsonl").write_text(json.dumps(wrong))
    LlamaConfig().save_pretrained(directory / "llama")
    return directory


MISTAKES = [
    (cost, ["--preset", "", "--tokens", "8"], "argument 2 is empty: expected a value"),
    (cost, ["--config", "IN/llama", "--tokens", "8"], "IN/llama is a 'llama' model; expected 'iha'"),
    (make_reasoning_data, ["IN/rows.jsonl", "--rows", "1"], "IN/rows.jsonl exists: "),
    (score_reasoning, ["IN", "IN/wrong.jsonl"], "row 1: the verifier of 'chain_sum' does not accept"),
]


@pytest.mark.parametrize(
    ("module", "arguments", "message"), MISTAKES, ids=[f"{' '.join(a):.60}" for _, a, _ in MISTAKES]
)
def test_a_mistake_is_one_line(module, arguments, message, files, monkeypatch, cli):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
    code, out, err = cli(module, *(argument.replace("IN", str(files)) for argument in arguments))
    assert (code, out) == (1, "") and re.search(message.replace("IN", str(files)), last_line(err))
    assert {path: path.read_bytes() for path in files.rglob("*") if path.is_file()} == before


def test_a_model_is_asked_for_an_answer(monkeypatch, files):
    tokenizer, model, asked = with_template("smollm2.jinja"), random_model(small_config(vocab_size=300)), []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **inputs: asked.extend(inputs["input_ids"]) or generate(**inputs))
    score_reasoning.score(model, tokenizer, score_reasoning.read_rows(files / "rows.jsonl"), max_new_tokens=1)
    prompts = tokenizer.batch_decode(asked)
    assert len(prompts) == 2 and all(prompt.endswith("<|im_start|>assistant\n") for prompt in prompts)


def test_a_step_that_is_done_is_not_repeated_and_one_that_fails_names_what_is_missing(tmp_path, capfd):
    (tmp_path / "given").write_text("1")
    for _ in range(2):
        run_module(tmp_path / "made", "json.tool", tmp_path / "given", tmp_path / "made")
        (tmp_path / "given").write_text("2")
    assert (tmp_path / "made").read_text() == "1\n"
    with pytest.raises(UserError, match="absent was not made, see above"):
        run_module(tmp_path / "absent", "json.tool", tmp_path / "nothing")
    assert "No such file" in capfd.readouterr().err
