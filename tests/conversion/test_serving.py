"""Serve OpenAI's client and `transformers chat`, run pipelines, and refuse what cannot serve."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient
from helpers import HYBRID, plant, random_ids, random_model, small_config
from tiny_sources import tiny_tokenizer
from transformers import AutoModel, pipeline
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.command_io import UserError
from conversion_scripts import serve
from modeling_iha import IHAForCausalLM, IHAForSequenceClassification, IHAModel


CHAT = [{"role": "user", "content": "the people of the state"}]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model():
    """Return a model of both attention kinds and both geometries; a prompt is longer than the window."""
    return random_model(small_config(**HYBRID, sliding_window=4, num_pseudo_heads=3))


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    """Save the model with code of a stranger, which no server or pipeline here may run."""
    path = tmp_path_factory.mktemp("serving") / "iha"
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    plant(path, path.parent / "mark")
    (path / "processor_config.json").unlink()  # Transformers refuses a processor's code itself
    yield str(path)
    assert not (path.parent / "mark").exists()


def answer(model, chat):
    """Return the model's own answer to a chat, and the number of tokens of the prompt."""
    inputs = tiny_tokenizer().apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    length = inputs["input_ids"].shape[1]
    tokens = model.generate(inputs["input_ids"], max_new_tokens=NEW_TOKENS, do_sample=False)[0, length:]
    return tiny_tokenizer().decode(tokens, skip_special_tokens=True), length


@pytest.fixture(scope="module")
def reply(model):
    return answer(model, CHAT)


@contextmanager
def answering(checkpoint, *options):
    """Yield the address of a server of the checkpoint, which runs in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [checkpoint, *options, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    process = get_context("fork").Process(target=serve.main, args=(arguments,))  # a new one would import PyTorch
    process.start()
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.is_alive() and time.monotonic() < deadline, "no server answers"
                time.sleep(0.2)
        yield url
    finally:
        process.kill()  # a fork stays with the threads of its parent if it is asked to end
        process.join(30)


@pytest.fixture(scope="module")
def server(checkpoint):
    with answering(checkpoint) as url:
        yield url


def test_openai_client(server, checkpoint, reply):
    """Ask for the model's name, and for a whole and a streamed answer, decoded greedily."""
    text, length = reply
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60, max_retries=0)
    assert [served.id for served in client.models.list()] == [checkpoint]
    request = {"model": checkpoint, "messages": CHAT, "max_tokens": NEW_TOKENS, "temperature": 0}
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.content == text and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (length, NEW_TOKENS)

    pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**request, stream=True)]
    pieces = [piece for piece in pieces if piece]
    assert "".join(pieces) == text and len(pieces) > NEW_TOKENS // 2


def test_continuous_batching_answers_clients_together(checkpoint, model):
    """Ask three questions of different lengths at once, one of them as a stream."""
    chats = [[{"role": "user", "content": text}] for text in ("the", "the people of the state", "of the union " * 5)]
    # By default the pages take most of the memory there is.
    pages = ["--cb-block-size", "4", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "16"]

    with answering(checkpoint, "--continuous-batching", *pages) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)

        def ask(chat):
            request = {"model": checkpoint, "messages": chat, "max_tokens": NEW_TOKENS, "temperature": 0}
            if chat is not chats[1]:
                return client.chat.completions.create(**request).choices[0].message.content
            pieces = [part.choices[0].delta.content for part in client.chat.completions.create(**request, stream=True)]
            return "".join(filter(None, pieces))

        with ThreadPoolExecutor() as clients:
            answers = list(clients.map(ask, chats))
    assert answers == [answer(model, chat)[0] for chat in chats]


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [("dcmha", [], "layers of kind 'dcmha' cache more"), ("iha", ["--cb-use-cuda-graph"], "leave use_cuda_graph")],
)
def test_what_continuous_batching_cannot_serve_is_refused_at_the_start(kind, options, error, tmp_path, monkeypatch):
    monkeypatch.setattr("uvicorn.Server", None)  # a server would run for ever
    random_model(small_config(attention_kinds=kind)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"The server cannot start with .*{error}"):
        serve.main([str(tmp_path), "--port", "0", "--continuous-batching", *options])


def test_the_server_answers_this_machine_only_and_stops_soon(checkpoint, monkeypatch):
    configs = []
    monkeypatch.setattr("uvicorn.Server", lambda config: SimpleNamespace(run=lambda: configs.append(config)))
    monkeypatch.setattr("uvicorn.Config", uvicorn.Config)  # main changes it
    with pytest.raises(SystemExit, match="0"):
        serve.main([checkpoint, "--port", "0"])
    assert configs[0].timeout_graceful_shutdown == serve.STOP_SECONDS
    client = TestClient(configs[0].app, base_url="http://localhost:8000")
    for headers, status in (
        ({}, 200),
        ({"Host": "127.0.0.1:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Origin": "http://localhost:8000"}, 200),
        ({"Host": "rebound.example:8000", "Origin": "http://rebound.example:8000"}, 400),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "null"}, 403),
    ):
        for method, path in (("GET", "/v1/models"), ("POST", "/reset")):
            assert client.request(method, path, headers=headers).status_code == status, (headers, path)


def test_what_would_be_served_otherwise_than_it_says_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr("uvicorn.Server", None)  # a server would run for ever
    weights = model.state_dict()
    del weights["model.norm.weight"]
    model.save_pretrained(tmp_path / "lacking", state_dict=weights)
    tiny_tokenizer().save_pretrained(tmp_path / "lacking")
    with pytest.raises(UserError, match="missing keys model.norm.weight"):
        serve.main([str(tmp_path / "lacking"), "--port", "0"])
    (tmp_path / "model@v2").mkdir()
    with pytest.raises(UserError, match="for a revision of another model. Rename the directory"):
        serve.main([str(tmp_path / "model@v2"), "--port", "0"])


def test_transformers_chat(server, checkpoint, reply, tmp_path):
    process = subprocess.run(
        [Path(sys.executable).with_name("transformers"), "chat", checkpoint, server]
        + [f"max_new_tokens={NEW_TOKENS}", "do_sample=False"],
        input=f"{CHAT[0]['content']}\nn\n!exit\n",
        env=os.environ
        | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0 and reply[0] in process.stdout, process.stdout + process.stderr


def test_text_generation_pipeline(checkpoint, reply):
    generate = pipeline("text-generation", checkpoint, device="cpu")
    output = generate(CHAT, max_new_tokens=NEW_TOKENS, do_sample=False)[0]["generated_text"]
    assert output == [*CHAT, {"role": "assistant", "content": reply[0]}]
    # Prompts of different lengths in one batch, which the pipeline pads.
    prompts = ["the people", "the people of the state of the union"]
    together = generate(prompts, max_new_tokens=4, do_sample=False, batch_size=2)
    assert together == [generate([prompt], max_new_tokens=4, do_sample=False)[0] for prompt in prompts]


def build_as_a_server(config, core):
    """Build the decoder on the meta device: vLLM writes the core into the config, and SGLang passes an argument."""
    arguments = {"attn_implementation": core} if core == "sglang" else {}
    if core != "sglang":
        config._attn_implementation = core
    with torch.device("meta"):
        return AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True, **arguments)


@pytest.mark.parametrize("core", ["vllm", "vllm_mla", "sglang"])  # the names by which servers register theirs
def test_a_servers_own_attention_is_refused(core, monkeypatch):
    """Refuse it for all but plain "mha" layers, also where a server sets it on a model that is built."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, core, ALL_ATTENTION_FUNCTIONS["sdpa"])
    # vLLM and SGLang ask this before they fall back on a Transformers model.
    assert not any(each.is_backend_compatible() for each in (IHAModel, IHAForCausalLM, IHAForSequenceClassification))
    for overrides in (
        {"attention_kinds": ["mha", "iha"], "num_pseudo_heads": 1},
        {"attention_kinds": ["mha", "iha"]},
        {"attention_kinds": ["mha", "talking_heads"]},
        {"attention_kinds": ["mha", "diff"]},
        {"attention_kinds": "mha", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
    ):
        refused = pytest.raises(ValueError, match=f"attn_implementation='{core}' knows .* layer 1 is a .*: serve")
        with refused:
            build_as_a_server(small_config(**overrides), core)
        model = random_model(small_config(**overrides))
        model.set_attn_implementation(core)
        with refused:
            model(random_ids(1, 5))

    config = small_config(attention_kinds="mha")
    assert build_as_a_server(config, core).device.type == "meta"
    model = random_model(config)
    model.set_attn_implementation(core)
    assert model(random_ids(1, 5)).logits.isfinite().all()
