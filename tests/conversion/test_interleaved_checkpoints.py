"""Give the commands a checkpoint of a decoder whose heads `interleave_heads` interleaved."""

import re

import openai
import pytest
from loopback_hub import LoopbackHub
from servers import answering
from tiny_training import byte_tokenizer, decoder, saved

from conversion_scripts import convert_iha_to_llama, convert_llama_to_iha, pull_from_hub, push_to_hub
from iha.api import verify
from iha.card_template import render_card
from iha.checkpoints import load_config, load_model
from iha.errors import UserError
from iha.hub import checkpoint_checks
from iha.sources import find_source
from modeling_iha import interleave_heads
from modeling_iha.package import imported_code
from sft.score_reasoning import generate_replies


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Save a Llama and a Gemma 3, plain and with two of three layers interleaved."""
    place = tmp_path_factory.mktemp("interleaved")
    for name in ("llama", "gemma3_text"):
        model = decoder(name, num_hidden_layers=3, max_position_embeddings=2048, initializer_range=0.3)
        saved(model, place / name)
        saved(interleave_heads(model, 2, layers=[0, 1]), place / f"{name}-iha")
    return place


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_commands_take_it(name, place, tmp_path, capsys):
    plain, directory = str(place / name), str(place / f"{name}-iha")
    results = verify(plain, directory, tokens=40, max_new_tokens=9)
    printed = capsys.readouterr().out
    assert "exact up to rounding" in printed
    assert results["converted"].passed and not results["control"].passed
    assert generate_replies(
        load_model(find_source(directory)), byte_tokenizer(), [[{"role": "user", "content": "1"}]] * 2, 2, 3
    )
    card = render_card(load_config(find_source(directory)), "me/model")
    assert f'- "{name}": the base model\'s own layer.' in card
    assert "by the plugin of the code (vllm_iha; see docs/SERVE.md); SGLang and llama.cpp do not run it" in card
    assert card.count("vLLM") == 1
    assert "(https://arxiv.org/abs/2602.21371)" in card
    assert "|  | this model | plain model | ratio |" in card and "| FLOPs of a training step |" in card
    assert "--lora_modules_to_save collapse k_mix q_mix v_mix" in card


def test_it_is_pushed_pulled_and_served(place, tmp_path, monkeypatch, cli):
    """Publish the code of this package alone, and serve what was pulled."""
    push = (place / "gemma3_text-iha", "me/model", "--license", "apache-2.0", "--base-model", "none")
    code = push[0] / "interleaving.py"
    before = code.read_bytes()
    code.write_bytes(before + b"# changed\n")
    status, _, err = cli(push_to_hub, *push, "--dry-run")
    assert status == 1 and re.search(r"interleaving\.py of .* differs from this package's code", err)
    code.write_bytes(before)
    with LoopbackHub() as hub:
        hub.use(monkeypatch, tmp_path / "home")
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_checks, "load_in_clean_process", lambda directory: None)  # the pull loads it
            status, out, err = cli(push_to_hub, *push)
        assert status == 0, err
        published = {line.split()[0] for line in out.splitlines() if ".py " in line}
        assert published == imported_code("modeling_interleaved.py").keys()
        status, out, err = cli(pull_from_hub, "me/model", tmp_path / "pulled")
        assert status == 0 and "InterleavedGemma3ForCausalLM" in out, err
    pulled = str(tmp_path / "pulled")
    chat = [{"role": "user", "content": "1+1?"}]
    with answering(pulled) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
        answer = client.chat.completions.create(model=pulled, messages=chat, max_tokens=4, temperature=0)
    assert [answer.choices[0].message.content] == generate_replies(
        load_model(find_source(pulled)), byte_tokenizer(), [chat], 1, 4
    )


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (convert_llama_to_iha, ["--num-pseudo-heads", "2"], "heads of the source are interleaved already"),
        (convert_iha_to_llama, [], "is a checkpoint of type 'interleaved'; expected 'iha'"),
    ],
)
def test_converters_refuse_it(command, options, message, place, tmp_path):
    with pytest.raises(UserError, match=message):
        command.main([str(place / "llama-iha"), str(tmp_path / "new" / "out"), *options])
    assert not list(tmp_path.iterdir())


def test_a_base_that_transformers_does_not_know_is_refused(place, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "interleaved", "base_model_type": "gpt-9"}')
    with pytest.raises(UserError, match="base_model_type is 'gpt-9': expected a model type of Transformers"):
        load_config(find_source(tmp_path))
