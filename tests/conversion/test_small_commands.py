"""Refuse mistakes in the commands without a test file of their own: in one line, before any work."""

import errno
import json
import re
import socket
from pathlib import Path

import pytest
import torch
from helpers import SLOW, random_model, small_config
from tiny_training import with_template
from transformers import LlamaConfig

from benchmarks import cost
from common.command_io import UserError, run_module
from conversion_scripts import serve
from modeling_iha import cpu_precision
from sft import make_reasoning_data, score_reasoning, train


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a directory of inputs, good and bad, which no command may change."""
    directory = tmp_path_factory.mktemp("inputs")
    make_reasoning_data.main([str(directory / "rows.jsonl"), "--rows", "2"])
    good = (directory / "rows.jsonl").read_text().splitlines()[0]
    damaged = json.loads(good)
    damaged["entry"] = {"question": damaged["entry"]["question"]}
    wrong = json.loads(good)
    wrong["conversations"][1]["value"] = "<|begin_of_solution|>\nnone\n<|end_of_solution|>"
    contents = {
        "empty.jsonl": "\n",
        "cut.jsonl": f"{good}\n{good[:40]}\n",
        "list.jsonl": "[1]\n",
        "deep.jsonl": "[" * 100_000,
        "digits.jsonl": '{"a": ' + "9" * 5000 + "}",
        "messages.jsonl": '{"messages": [{"role": "assistant", "content": "a"}]}\n',
        "unhashable.jsonl": json.dumps(json.loads(good) | {"generator": []}),
        "damaged.jsonl": f"{good}\n{json.dumps(damaged)}\n",
        "wrong.jsonl": json.dumps(wrong),
        "questions.jsonl": '{"entry": {"question": 3}}\n',
    }
    for name, content in contents.items():
        (directory / name).write_text(content)
    (directory / "latin.jsonl").write_bytes(f"{good}\n".encode() + '{"a": "é"}\n'.encode("latin-1"))
    configs = {"broken": "{", "bare": '{"model_type": "iha"}', "kernel": '{"a": {"attn_implementation": "org/k"}}'}
    for name, content in configs.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(content)
    with_template("smollm2.jinja").save_pretrained(directory / "bare")
    LlamaConfig().save_pretrained(directory / "llama")
    (directory / "nothing").mkdir()
    random_model(small_config(vocab_size=300)).save_pretrained(directory / "mute")
    tokenizer = with_template("smollm2.jinja")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(directory / "mute")
    return directory


PRESET = ["--preset", "tiny"]
MISTAKES = [
    (cost, ["--preset", "huge", "--tokens", "8"], "--preset huge: .*paper-2.4b-iha, .*tiny"),
    (cost, ["--preset", "", "--tokens", "8"], "argument 2 is empty: expected a value"),
    (cost, ["--config", "IN/absent", "--tokens", "8"], "IN/absent is neither a directory"),
    (cost, ["--config", "IN/nothing", "--tokens", "8"], "IN/nothing has no usable configuration"),
    (cost, ["--config", "IN/broken", "--tokens", "8"], "IN/broken has no usable configuration"),
    (cost, ["--config", "IN/bare", "--tokens", "8"], "IN/bare has no usable configuration: .*vocab_size"),
    (cost, ["--config", "IN/llama", "--tokens", "8"], "IN/llama is a 'llama' model; expected 'iha'"),
    (cost, [*PRESET, "--tokens", "0"], "--tokens 0: expected at least 1"),
    (cost, [*PRESET, "--tokens", "-3"], "--tokens -3: expected at least 1"),
    (cost, [*PRESET, "--tokens", "8", "--bytes", "0"], "--bytes 0: expected at least 1"),
    (make_reasoning_data, ["OUT/a.jsonl", "--rows", "1", "--generator", "absent"], "absent"),
    (make_reasoning_data, ["OUT/a.jsonl", "--rows", "0"], "--rows 0: expected at least 1"),
    (train, "--model_name_or_path m --dataset_name d --learning_rat 1".split(), "unknown key 'learning_rat'"),
    (make_reasoning_data, ["OUT/a.jsonl", "--rows", "1", "--seed", "-1"], "--seed -1: expected at least 0"),
    (
        make_reasoning_data,
        ["OUT/a.jsonl", "--rows", "1", "--seed", str(2**70), "--generator", "pool_matrix"],
        f"'pool_matrix' with seed {2**70} .*Seed must be between",
    ),
    (
        make_reasoning_data,
        ["OUT/a.jsonl", "--rows", "1", "--options", "min_terms=3.5"],
        "'chain_sum' with seed 0 and options {'min_terms': 3.5}: ",
    ),
    (make_reasoning_data, ["IN/rows.jsonl", "--rows", "1"], "IN/rows.jsonl exists: "),
    (make_reasoning_data, ["IN/rows.jsonl/a.jsonl", "--rows", "1"], "a.jsonl cannot be written: Not a directory"),
    *[
        (make_reasoning_data, ["OUT/a.jsonl", "--rows", "1", "--exclude", f"IN/{name}.jsonl"], message)
        for name, message in {
            "absent": "No such file",
            "empty": "empty.jsonl: no rows",
            "latin": "latin.jsonl, row 2: not UTF-8",
            "questions": "questions.jsonl, row 1: column 'entry' with a 'question'",
            "messages": "messages.jsonl, row 1: column 'entry' with a 'question'",
        }.items()
    ],
    *[
        (score_reasoning, ["IN/nothing", f"IN/{name}.jsonl"], message)
        for name, message in {
            "absent": "No such file",
            "empty": "empty.jsonl: no rows",
            "cut": "cut.jsonl, row 2: not valid JSON .*; each line holds one object",
            "list": "list.jsonl, row 1: expected a JSON object",
            "deep": "deep.jsonl, row 1: not valid JSON",
            "digits": "digits.jsonl, row 1: not valid JSON",
            "latin": "latin.jsonl, row 2: not UTF-8",
            "messages": "row 1: columns 'generator' and 'entry'",
            "unhashable": "row 1: columns 'generator' and 'entry'",
            "damaged": "row 2: the verifier of 'chain_sum' fails on its entry: KeyError",
            "wrong": "row 1: the verifier of 'chain_sum' does not accept",
        }.items()
    ],
    *[
        (score_reasoning, ["IN/nothing", "IN/rows.jsonl", option, count], f"{option} {count}: expected at least 1")
        for option in ("--limit", "--batch-size", "--max-new-tokens")
        for count in ("0", "-1")
    ],
    (
        score_reasoning,
        ["IN/nothing", "IN/rows.jsonl"],
        "IN/nothing has no usable configuration: it holds no config.json",
    ),
    (score_reasoning, ["IN/mute", "IN/rows.jsonl"], "The tokenizer has no chat template"),
    (score_reasoning, ["IN/nothing", "IN/rows.jsonl", "--json", "IN/rows.jsonl"], "IN/rows.jsonl exists: "),
    (serve, ["IN/absent", "--port", "0"], "server cannot start with IN/absent: "),
    (serve, ["IN/nothing", "--port", "0"], "server cannot start with IN/nothing: "),
    (serve, ["IN/bare", "--port", "0"], "server cannot start with IN/bare: .*vocab_size"),
    (serve, ["IN/kernel", "--port", "0"], "attn_implementation 'org/k' would load what is not in the checkpoint"),
    (serve, ["--port", "0", "--chat-template-kwargs", "{"], "server cannot start with these options: "),
    (serve, ["IN/absent", "--host", "127.0.0.1", "--port", "TAKEN"], "--port [0-9]+: Address already in use"),
    (serve, ["IN/absent", "--port", "70000"], "--port 70000: expected"),
    (serve, ["IN/absent", "--host", "no such host"], "--host no such host --port 8000: "),
    (serve, ["IN/absent", "--host", "0.0.0.0"], "without a key.* vLLM and --api-key"),
    (serve, ["IN/absent", "--host", "::"], "without a key"),
]


@pytest.fixture
def fail(cli):
    """Return a function that runs a command, which must exit with 1, and returns its errors."""

    def fail(module, *arguments):
        code, out, err = cli(module, *arguments)
        assert (code, out) == (1, "")
        return [line for line in err.splitlines() if line.startswith("Error: ")]

    return fail


@pytest.mark.parametrize(
    ("module", "arguments", "message"), MISTAKES, ids=[f"{m.__name__} {' '.join(a):.60}" for m, a, _ in MISTAKES]
)
def test_a_mistake_is_one_line(module, arguments, message, files, tmp_path, monkeypatch, fail):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"IN": str(files), "OUT": str(tmp_path / "new"), "TAKEN": str(taken.getsockname()[1])}
        for name, value in names.items():
            arguments = [argument.replace(name, value) for argument in arguments]
        lines = fail(module, *arguments)
    assert len(lines) == 1
    assert re.search(message.replace("IN", str(files)), lines[0])
    assert list(tmp_path.iterdir()) == []
    assert {path: path.read_bytes() for path in files.rglob("*") if path.is_file()} == before


def test_a_server_without_its_libraries_names_them(monkeypatch, fail):
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    (line,) = fail(serve, "--port", "0")
    assert "pip install 'transformers[serving]'" in line


def test_a_directory_that_cannot_be_written_is_found_first(monkeypatch, fail, tmp_path):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "touch", refuse)
    (line,) = fail(make_reasoning_data, tmp_path / "a" / "b.jsonl", "--rows", "1")
    assert line.endswith("b.jsonl cannot be written: Permission denied.")


def test_missing_directories_are_made_for_a_result(monkeypatch, files, tmp_path, capsys):
    model = random_model(small_config(vocab_size=300)).bfloat16()
    monkeypatch.setattr(cpu_precision, "SLOW_DTYPES", [torch.bfloat16])
    monkeypatch.setattr(score_reasoning, "load_model", lambda _: model)
    tokenizer, generate, asked = with_template("smollm2.jinja"), model.generate, []
    monkeypatch.setattr(score_reasoning, "load_tokenizer", lambda *_: tokenizer)

    def listen(**inputs):
        asked.extend(tokenizer.batch_decode(inputs["input_ids"]))
        return generate(**inputs)

    monkeypatch.setattr(model, "generate", listen)
    out = tmp_path / "a" / "b" / "figures.json"
    arguments = [str(files), str(files / "rows.jsonl"), "--max-new-tokens", "1", "--json", str(out)]
    result = score_reasoning.main(arguments)
    assert json.loads(out.read_text()) == result
    assert len(asked) == 2 and all(prompt.endswith("<|im_start|>assistant\n") for prompt in asked)
    assert [path.name for path in out.parent.iterdir()] == ["figures.json"]
    if not torch.cuda.is_available():
        assert SLOW in capsys.readouterr().err


def test_a_step_that_is_done_is_not_repeated_and_one_that_fails_names_what_is_missing(tmp_path, capfd):
    rows = tmp_path / "rows.jsonl"
    run_module(rows, "sft.make_reasoning_data", rows, "--rows", "1")
    made = rows.read_bytes()
    run_module(rows, "sft.make_reasoning_data", rows, "--rows", "2")
    assert rows.read_bytes() == made
    with pytest.raises(UserError, match="absent.json was not made, see above"):
        run_module(tmp_path / "absent.json", "sft.make_reasoning_data", rows, "--rows", "1")
    assert "Error:" in capfd.readouterr().err
