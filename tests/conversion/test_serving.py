"""Serve OpenAI's client, and reject what cannot serve."""

import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from helpers import HYBRID, plant, random_model, small_config
from servers import answering
from tiny_sources import edit_config, edit_weights, tiny_tokenizer

from iha import sources
from iha.errors import ROOT, UserError
from iha.serving import serve, served_models
from modeling_iha import IHAForCausalLM, IHAForSequenceClassification, IHAModel


NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model():
    """Return a model of both attention kinds and both geometries; a prompt is longer than the window."""
    return random_model(small_config(**HYBRID, sliding_window=4, num_pseudo_heads=3))


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    """Save the model with code of a stranger, which no server here may run."""
    path = tmp_path_factory.mktemp("serving") / "iha"
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    plant(path, path.parent / "mark")
    (path / "processor_config.json").unlink()  # Transformers rejects a processor's code itself
    yield str(path)
    assert not (path.parent / "mark").exists()


def answer(model, chat):
    """Return the model's own answer to a chat."""
    inputs = tiny_tokenizer().apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    length = inputs["input_ids"].shape[1]
    tokens = model.generate(inputs["input_ids"], max_new_tokens=NEW_TOKENS, do_sample=False)[0, length:]
    return tiny_tokenizer().decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
def test_the_command_gives_its_classes_to_the_server():
    """Run its imports in a new process: Transformers replaces its own module while it is imported."""
    program = """
from iha.serving import serve, served_models
served_models.find_models()
import transformers
assert transformers is served_models.model_manager.transformers
assert transformers.AutoModelForMultimodalLM is served_models.WholeMultimodalLM
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_clients_of_openai_are_answered_at_once(checkpoint, model):
    """Ask three questions of different lengths at once, one of them as a stream."""
    chats = [[{"role": "user", "content": text}] for text in ("the", "the people of the state", "of the union " * 5)]
    with answering(checkpoint) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)

        def ask(chat):
            request = {"model": checkpoint, "messages": chat, "max_tokens": NEW_TOKENS, "temperature": 0}
            if chat is not chats[1]:
                return client.chat.completions.create(**request).choices[0].message.content
            pieces = [part.choices[0].delta.content for part in client.chat.completions.create(**request, stream=True)]
            return "".join(filter(None, pieces))

        with ThreadPoolExecutor() as clients:
            answers = list(clients.map(ask, chats))
    assert answers == [answer(model, chat) for chat in chats]


def test_a_request_that_cannot_be_answered_gets_the_reason(checkpoint, tmp_path, capfd):
    """Chat with a model without a chat template, and send it more tokens than its context of 64."""
    plain = shutil.copytree(checkpoint, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    edit_config(plain, max_position_embeddings=64)
    with answering(str(plain)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
        request = {"model": str(plain), "temperature": 0}
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as error:
                chat = [{"role": "user", "content": "the"}]
                client.chat.completions.create(messages=chat, max_tokens=2, stream=stream, **request)
            assert "no chat template: send the text to /v1/completions" in error.value.response.json()["detail"]
            with pytest.raises(openai.BadRequestError) as error:
                client.completions.create(prompt="the people of the state " * 20, stream=stream, **request)
            assert "has 100 tokens, and the model's context has 64" in error.value.response.json()["detail"]
            for few in (-1, 0):
                with pytest.raises(openai.BadRequestError) as error:
                    client.completions.create(prompt="the", max_tokens=few, stream=stream, **request)
                assert error.value.response.json()["detail"] == f"max_tokens is {few}: expected at least 1."
            with pytest.raises(openai.BadRequestError) as error:
                client.completions.create(prompt="", stream=stream, **request)
            assert error.value.response.json()["detail"] == "The prompt has no token: send a text."
        [choice] = client.completions.create(prompt="the", max_tokens=400, **request).choices
        assert choice.finish_reason in ("length", "stop")
        usage = client.completions.create(prompt="the", **request).usage
        assert usage.total_tokens <= 64

        def replies(**sampling):
            request = {"model": str(plain), "prompt": "the", "max_tokens": 8, **sampling}
            return [client.completions.create(**request).choices[0].text for _ in range(4)]

        # The checkpoint does not say `do_sample`.
        assert len(set(replies(temperature=1.0))) > 1
        assert len(set(replies(temperature=0))) == len(set(replies())) == 1
    assert "it answers /v1/completions, and no chats" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda path: edit_weights(path, lambda weights: weights.pop("model.norm.weight")), "missing keys model.norm"),
        (lambda path: edit_config(path, _attn_implementation="org/kernel"), "'org/kernel' would load what is not"),
        (lambda path: [file.unlink() for file in path.glob("*token*")], "holds no tokenizer: save one"),
        (lambda path: (path / "config.json").rename(path / "adapter_config.json"), "holds a LoRA adapter .*: merge"),
    ],
)
def test_what_would_be_served_otherwise_than_it_says_is_refused(change, error, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("uvicorn.Server", None)  # a server would run for ever
    change(shutil.copytree(checkpoint, tmp_path / "iha"))
    monkeypatch.setattr("sys.argv", ["serve", str(tmp_path / "iha"), "--port", "0"])
    with pytest.raises(UserError, match=error):
        serve.main()


def test_a_model_that_a_client_names_is_refused_with_the_reason(checkpoint, tmp_path):
    """Start the server without a model: it loads what clients name, and goes on."""
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    edit_weights(broken, lambda weights: weights.pop("model.norm.weight"))
    with answering() as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
        request = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2, "temperature": 0}
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=str(broken), **request)
        assert "missing keys model.norm" in error.value.response.json()["detail"]
        assert client.chat.completions.create(model=checkpoint, **request).choices[0].message.content is not None


def test_a_server_whose_packages_are_missing_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["serve", checkpoint])
    with pytest.raises(UserError, match=r"not installed: run pip install -e \"\.\[serve\]\""):
        serve.main()


def test_a_port_in_use_is_refused_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("iha.serving.served_models.find_models", None)
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["serve", "nowhere", "--port", str(port)])
        with pytest.raises(UserError, match=f"--port {port} cannot be opened .*: choose another --port"):
            serve.main()


def test_continuous_batching_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr("sys.argv", ["serve", checkpoint, "--continuous-batching"])
    with pytest.raises(UserError, match=r"--continuous-batching keeps one key .* vLLM \(docs/SERVE.md\)"):
        serve.main()


def test_a_model_of_the_hub_is_checked_at_the_revision_that_is_loaded(monkeypatch):
    read = []
    monkeypatch.setattr(sources, "check_on_hub", lambda source: None)
    for name in ("check_no_adapter", "load_config_dict"):
        monkeypatch.setattr(served_models, name, lambda source: read.append((source.location, source.revision)))
    served_models.check_served("org/name:Q4.gguf")  # which the server checks itself
    assert read == []
    served_models.check_served("org/name@v1")
    served_models.check_served("org/name", "v2")
    assert read == [("org/name", "v1")] * 2 + [("org/name", "v2")] * 2


def test_no_server_runs_a_model_on_its_own_attention():
    """vLLM and SGLang ask this before they fall back on a model of Transformers."""
    for each in (IHAModel, IHAForCausalLM, IHAForSequenceClassification):
        with pytest.raises(NotImplementedError, match="vLLM and SGLang hold one key for each token"):
            each.is_backend_compatible()
