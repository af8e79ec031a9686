"""Serve checkpoints in separate processes to OpenAI's client, many clients at a time, some of which leave."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest
from serving import WORDS, save_iha, save_interleaved, word_tokenizer
from transformers import PreTrainedModel


KEY = "a-key"
GREEDY = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}


def prompt(client: int) -> str:
    """Return from 1 to 40 words; those of client 0 fit no window."""
    return " ".join(WORDS[(client * 7 + place) % len(WORDS)] for place in range(40 - client % 40))


@pytest.fixture(scope="module", params=["iha_compiled", "interleaved", "with_its_own_code"])
def model(request, tmp_path_factory) -> PreTrainedModel:
    """Save a model in the paper's schedule."""
    directory = tmp_path_factory.mktemp("served") / request.param
    if request.param == "iha_compiled":
        schedule = {"attention_kinds": ["iha"] * 4 + ["mha"], "num_hidden_layers": 5, "sliding_window": 7}
        schedule["layer_types"] = ["sliding_attention"] * 4 + ["full_attention"]
        model = save_iha(directory, **schedule)
    else:
        model = save_interleaved(directory, "olmo2", {}, num_pseudo_heads=4, layers="paper", sliding_window=7)
    word_tokenizer().save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """Yield the address of a server that asks for a key.

    One compiles the model. The last does not find `modeling_iha`, and runs the code that the checkpoint ships."""
    options, environment = [], {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    if model.config.model_type == "olmo2":
        options = ["--enforce-eager"]
    if model.name_or_path.endswith("with_its_own_code"):
        options, hidden = [*options, "--trust-remote-code"], tmp_path_factory.mktemp("hidden")
        (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['modeling_iha'] = None\n")
        environment["PYTHONPATH"] = f"{hidden}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model.name_or_path]
    command += ["--host", "127.0.0.1", "--port", str(port), *options, "--dtype", "float32"]
    command += ["--max-model-len", "512", "--max-num-seqs", "6", "--served-model-name", "iha"]
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + 600  # to compile takes minutes on a busy machine
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):  # of a server that did not start
            os.killpg(process.pid, signal.SIGKILL)  # its engine and worker would outlive it
        process.wait()


def answer(model: PreTrainedModel, text: str) -> str:
    """Return what `generate` writes after the prompt."""
    ids = word_tokenizer()(text, return_tensors="pt")["input_ids"]
    tokens = model.generate(
        ids, max_new_tokens=GREEDY["max_tokens"], do_sample=False, eos_token_id=None, pad_token_id=1
    )
    return word_tokenizer().decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)  # as the server does


def test_a_hundred_clients_get_what_generate_writes(server, model):
    async def ask(client: openai.AsyncOpenAI, index: int) -> str:
        request = {"model": "iha", "prompt": prompt(index), **GREEDY}
        if index % 10 == 1:  # leaves in the middle
            stream = await client.completions.create(**request, stream=True)
            async for _ in stream:
                break
            await stream.close()
            return ""
        if index % 10 == 2:  # reads slowly
            pieces = []
            async for chunk in await client.completions.create(**request, stream=True):
                await asyncio.sleep(0.2)
                pieces.append(chunk.choices[0].text)
            return "".join(pieces)
        return (await client.completions.create(**request)).choices[0].text

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key=KEY, timeout=300, max_retries=0) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(100)))

    answers = asyncio.run(ask_all())
    for index, text in enumerate(answers):
        if index % 10 != 1:
            assert text.split() == answer(model, prompt(index)).split(), index
