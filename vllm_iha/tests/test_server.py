"""Serve a checkpoint to OpenAI's client with a key, many clients at a time, some of which leave."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_iha import IHAConfig, IHAForCausalLM


KEY = "a-key"
WORDS = [f"w{number}" for number in range(254)]
GREEDY = {"max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 256 words."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")


def prompt(client: int) -> str:
    """Return from 1 to 40 words; those of client 0 fit no window."""
    return " ".join(WORDS[(client * 7 + place) % len(WORDS)] for place in range(40 - client % 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> IHAForCausalLM:
    """Save a model of the paper's schedule, whose tensors no other test has."""
    torch.manual_seed(0)
    schedule = {"attention_kinds": ["iha"] * 4 + ["mha"], "num_hidden_layers": 5, "sliding_window": 7}
    schedule["layer_types"] = ["sliding_attention"] * 4 + ["full_attention"]
    config = IHAConfig.from_preset("tiny", hidden_size=128, head_dim=32, initializer_range=0.1, **schedule)
    model = IHAForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("served") / "iha"
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return IHAForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """Yield the address of a server that asks for a key."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model.name_or_path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32"]
    command += ["--max-model-len", "512", "--max-num-seqs", "6", "--served-model-name", "iha"]
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 300
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


def answer(model: IHAForCausalLM, text: str) -> str:
    """Return what `generate` writes after the prompt."""
    ids = tokenizer()(text, return_tensors="pt")["input_ids"]
    tokens = model.generate(
        ids, max_new_tokens=GREEDY["max_tokens"], do_sample=False, eos_token_id=None, pad_token_id=1
    )
    return tokenizer().decode(tokens[0, ids.shape[1] :])


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
