"""Interleave tiny models whose code differs most, and check every rejection and the page of all model types.

`python -m research.experiments.model_types` tries all types; `try_type` of this command compares one with itself.
"""

import base64
import copy
import io
import json
import math
import re
import shutil

import numpy
import openai
import pytest
import torch
import transformers
from helpers import train_mixing
from PIL import Image
from servers import answering
from tiny_sources import edit_weights, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, CLIPImageProcessorPil, LlavaProcessor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from iha.errors import ROOT, UserError
from iha.processes import run_in_clean_process
from iha.serving import serve
from modeling_iha import interleave_heads, remove_interleaving, virtual_tokens
from modeling_iha.interleaved_attention import register_core
from research.experiments import model_types
from research.experiments.model_types import (
    CAUSAL,
    MULTIMODAL,
    TYPES,
    difference,
    document,
    image_inputs,
    load,
    outputs,
    tiny_config,
    tiny_model,
    try_type,
)


# test_interleave.py has Llama, Gemma 2 and 3, OLMo 2, Qwen 3 MoE, BERT and GPT-2.
EXACT = {
    "bart": "a decoder of an encoder-decoder, with learned positions",
    "ctrl": "no positions for packed rows",
    "deepseek_v3": "latent attention, whose keys are wider than its values, and experts that are renamed on load",
    "gemma4_text": "shared keys and values, whose layers take the last token of a prompt only",
    "gpt_oss": "attention sinks, on eager",
    "granitemoehybrid": "Mamba layers and attention",
    "llama4_text": "chunks, and layers without RoPE",
    "minimax": "a cache of its own",
    "modernbert-decoder": "windows on both sides in its encoder",
    "opt": "positions from the padding mask",
    "qwen3_5": "recurrent layers, within a model of several media",
    "recurrent_gemma": "a cache that its decoder does not return",
    "zamba": "one attention module at several depths",
}
IMAGES = {
    "gemma3": "windows; the tokens of an image see each other both ways",
    "llava": "images in patches, on a Llama",
    "qwen2_5_vl": "positions in three dimensions",
    "qwen3_5": "recurrent layers, and a class for text alone besides",
}
REGISTRY = "does not call attention through the registry of Transformers, so its heads cannot be interleaved."
CHOOSES = "chooses or compresses the keys of each query, in a mask over tokens of its own."
REFUSED = {
    **dict.fromkeys(("bloom", "blt", "falcon", "mpt", "rwkv", "xlstm"), REGISTRY),
    "deepseek_v32": f"cannot be interleaved: DeepseekV32Attention {CHOOSES}",
    "deepseek_v4": f"cannot be interleaved: DeepseekV4Attention {CHOOSES}",
    "minimax_m3_vl_text": f"cannot be interleaved: MiniMaxM3VLAttention {CHOOSES}",
    "mllama": "is not a class that Transformers' Auto classes load as a decoder: a saved checkpoint could not",
    # Its cache has a window that its masks have not.
    "moshi": "does not compute the same with interleaved heads (hidden states differ by",
    # These add a bias over tokens to the mask.
    "doge": "does not compute the same with interleaved heads (RuntimeError: The size of tensor",
    "inkling_text": "does not compute the same with interleaved heads (RuntimeError: The size of tensor",
}


# `make test-full` tries the others too.
QUICK = (
    "deepseek_v3",
    "gemma3",
    "gemma4_text",
    "gpt_oss",
    "qwen2_5_vl",
    "recurrent_gemma",
)


def quick_or_slow(names):
    """Return the types with those marked that `make test` leaves out."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def tried(request, tmp_path_factory):
    """Try one type after another, then load what is exact and train it in one clean process for each Auto class.

    Types whose tests are not selected are left out.
    """
    rows, asked = {}, {item.name for item in request.session.items}
    for auto_class, names, test in ((CAUSAL, EXACT, "test_exact"), (MULTIMODAL, IMAGES, "test_exact_with_images")):
        names = [name for name in names if f"{test}[{name}]" in asked]
        places = {name: tmp_path_factory.mktemp(name) for name in names}
        found = {name: try_type(name, auto_class, place) for name, place in places.items()}
        load({places[name]: row for name, row in found.items()}, auto_class)
        rows |= found
    return rows


@pytest.mark.parametrize("model_type", quick_or_slow(EXACT))
def test_exact(model_type, tried):
    assert tried[model_type]["verdict"] == "exact", tried[model_type]


@pytest.mark.parametrize("model_type", quick_or_slow(IMAGES))
def test_exact_with_images(model_type, tried):
    row = tried[model_type]
    assert row["verdict"] == "exact" and "image" in row, row


@pytest.mark.parametrize("recompute", [False, True])
def test_flash_cores_get_raised_sinks(recompute, monkeypatch):
    """Raise the sinks by log P: each key has P copies. Record what a flash core is called with; none runs here.

    Recomputation makes no parts of heads with sinks."""
    given = []
    monkeypatch.setattr(virtual_tokens, "PART_BYTES", 1)

    def record(module, query, *args, s_aux, **kwargs):
        given.append(s_aux)
        assert query.shape[1] == len(s_aux)
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", record)
    model = interleave_heads(tiny_model("gpt_oss", CAUSAL), 2)
    model.config._attn_implementation = register_core("flash_attention_2")
    model.config.recompute_virtual_tokens = recompute
    model(torch.arange(5)[None], use_cache=False)
    sinks = [layer.self_attn.sinks for layer in model.model.layers]
    assert len(given) == len(sinks)
    for ours, base in zip(given, sinks):
        assert torch.allclose(ours, base + math.log(2))


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_images_in_interleaved_models(model_type):
    """Generate after an image, and compare the cached logits, the cores, and gradients of the text decoder alone."""
    model = tiny_model(model_type, MULTIMODAL)
    towers = {name for name, _ in model.named_parameters() if "vision" in name or "visual" in name}
    batch = image_inputs(model)
    interleave_heads(model, 2)
    assert towers == {name for name, _ in model.named_parameters() if "vision" in name or "visual" in name}
    train_mixing(model)
    options = {**model_types.GREEDY, "disable_compile": True, "suppress_tokens": [model_types.IMAGE_TOKEN]}
    generated = model.generate(**batch, **options)
    new = generated.sequences[:, batch["input_ids"].shape[1] :]
    whole = dict(batch, input_ids=generated.sequences[:, :-1])
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in whole:
            more = torch.full_like(new[:, :-1], name == "attention_mask")
            whole[name] = torch.cat((whole[name], more.to(whole[name].dtype)), dim=1)
    logits = model(**whole, use_cache=False).logits.detach()
    assert difference(torch.stack(generated.logits, dim=1), logits[:, -model_types.NEW_TOKENS :]) < model_types.EXACT
    model.set_attn_implementation("eager")
    seen = whole["attention_mask"].bool()
    assert difference(logits[seen], model(**whole, use_cache=False).logits[seen]) < model_types.EXACT


@torch.no_grad()
def test_a_static_cache_with_a_window_of_layers_whose_images_see_ahead():
    model = train_mixing(interleave_heads(tiny_model("gemma3", MULTIMODAL), 2, sliding_window=3))
    options = {**model_types.GREEDY, "disable_compile": True, "suppress_tokens": [model_types.IMAGE_TOKEN]}
    padded = {"input_ids": torch.arange(5, 15).view(2, 5), "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5])}
    for inputs in (image_inputs(model), padded):
        static = model.generate(**inputs, **options, cache_implementation="static")
        dynamic = model.generate(**inputs, **options)
        assert difference(torch.stack(static.logits), torch.stack(dynamic.logits)) < model_types.EXACT


WITH_PROCESSOR = """
import numpy
from transformers import AutoModelForImageTextToText, AutoProcessor
processor = AutoProcessor.from_pretrained(request["place"], trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(request["place"], trust_remote_code=True)
image = numpy.arange(28 * 28 * 3, dtype=numpy.uint8).reshape(28, 28, 3)
inputs = processor(images=image, text="<image> the", return_tensors="pt")
result = {"ids": inputs["input_ids"].tolist(), "logits": model(**inputs).logits.tolist()}
"""


# A turn of an image and a text.
CHAT_TEMPLATE = (
    "{% for turn in messages %}{% for part in turn['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """Save a model that reads images, next to its processor, and return the directory and both."""
    tokenizer = copy.deepcopy(tiny_tokenizer())  # which all tests share
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    config = tiny_config("llava")
    config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
    config.vision_config.image_size, config.vision_config.patch_size = 28, 14
    torch.manual_seed(0)
    model = interleave_heads(AutoModelForImageTextToText.from_config(config).eval(), 2)
    size = {"height": 28, "width": 28}
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "chat_template": CHAT_TEMPLATE}
    processor = LlavaProcessor(CLIPImageProcessorPil(size=size, crop_size=size), tokenizer, **options)
    processor.num_additional_image_tokens = 1
    place = tmp_path_factory.mktemp("llava")
    model.save_pretrained(place)
    processor.save_pretrained(place)
    return str(place), model, processor


IMAGE = numpy.arange(28 * 28 * 3, dtype=numpy.uint8).reshape(28, 28, 3)


def test_a_processor_is_saved_beside_the_model(llava):
    """Load both in a clean process, by the Auto classes, and read an image of raw pixels."""
    place, model, processor = llava
    answer = run_in_clean_process(WITH_PROCESSOR, {"place": place})
    inputs = processor(images=IMAGE, text="<image> the", return_tensors="pt")
    image_tokens = answer["ids"][0].count(model.config.image_token_index)
    assert answer["ids"] == inputs["input_ids"].tolist() and image_tokens == 4
    assert difference(model(**inputs).logits, torch.tensor(answer["logits"])) < model_types.EXACT


def test_a_client_sends_an_image(llava):
    """Compare the answer of Transformers' server with that of `generate`."""
    place, model, processor = llava
    file = io.BytesIO()
    Image.fromarray(IMAGE).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "the"}]
    with answering(place) as server:
        client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60, max_retries=0)
        chat = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        answer = client.chat.completions.create(model=place, **chat).choices[0].message.content
    inputs = processor(images=IMAGE, text="<image>the", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer == processor.decode(tokens, skip_special_tokens=True)


def test_weights_that_leave_a_part_random_are_not_served(llava, tmp_path, monkeypatch):
    place = shutil.copytree(llava[0], tmp_path / "llava")
    edit_weights(place, lambda weights: weights.pop(next(name for name in weights if "q_mix" in name)))
    monkeypatch.setattr("uvicorn.Server", None)  # a server would run for ever
    monkeypatch.setattr("sys.argv", ["serve", str(place), "--port", "0"])
    with pytest.raises(UserError, match="missing keys .*q_mix"):
        serve.main()


@pytest.mark.parametrize("model_type", ["afmoe", "jetmoe", "llama"])
def test_collapse_over_all_heads(model_type):
    """Some base models want the output of attention in one piece of memory."""
    model = tiny_model(model_type)
    before = outputs(model, ["padded"])["padded"]
    assert (
        difference(before, outputs(interleave_heads(model, 2, collapse="all_heads"), ["padded"])["padded"])
        < model_types.EXACT
    )


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "whisper"])
def test_window_of_the_paper_needs_a_length(model_type):
    with pytest.raises(ValueError, match=f"{model_type} has no max_position_embeddings: give the window in tokens"):
        interleave_heads(tiny_model(model_type), 2, sliding_window="paper")


@pytest.mark.one_of(2)
@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type, tmp_path):
    row = try_type(model_type, CAUSAL, tmp_path)
    assert row["verdict"] == "rejected" and REFUSED[model_type] in row["reason"], row


@pytest.mark.parametrize("model_type", ["moshi", "inkling_text", "minimax_m3_vl_text"])
def test_refusal_leaves_the_model(model_type):
    """Reject before and after the mixing is attached, on a window that the check shortens."""
    model = tiny_model(model_type)
    before, config, kind = outputs(model), model.config.to_dict(), type(model)
    with pytest.raises(ValueError, match=re.escape(REFUSED[model_type])):
        interleave_heads(model, 2)
    assert (type(model), model.config.to_dict()) == (kind, config)
    assert not any("mix" in name for name, _ in model.named_parameters())
    assert all(logits.equal(before[name]) for name, logits in outputs(model, before).items())


def test_probe_reaches_past_windows():
    """Without a shorter window, 7 tokens would show nothing of one of 3,000."""
    config = tiny_config("moshi")
    config.sliding_window = 3000
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="hidden states differ"):
        interleave_heads(model, 2)
    assert model.config.sliding_window == 3000


@pytest.mark.parametrize("model_type", ["hrm_text", "zamba"])
def test_modules_of_one_index(model_type):
    """Two stacks of layers count from 0, or none has an index."""
    model = interleave_heads(tiny_model(model_type), 2)
    assert len(model.config.interleaved_layers) == {"hrm_text": 4, "zamba": 2}[model_type]


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_blocks_that_share_their_weights_share_the_mixing(model_type, monkeypatch, tmp_path):
    three = {"layers_block_type": 3 * ["hybrid"], "n_mamba_heads": 4, "num_hidden_layers": 3, "num_mem_blocks": 2}
    monkeypatch.setitem(model_types.FIELDS, "zamba2", three)
    model = interleave_heads(tiny_model(model_type), 2)
    names = list(model.config.interleaved_layers)
    first, last = (model.base_model.get_submodule(names[place]).q_mix for place in (0, -1))
    assert first.weight is last.weight
    with torch.no_grad():
        first.weight += 0.3 * torch.randn(first.weight.shape)
    expected = outputs(model, ["full"])["full"]
    model.save_pretrained(tmp_path)
    model.resize_token_embeddings(80)
    assert outputs(model, ["full"])["full"][..., :64].equal(expected)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"]
    loaded.tie_weights()
    assert difference(outputs(loaded, ["full"])["full"], expected) < 1e-6
    before = set(tiny_model(model_type).all_tied_weights_keys)
    assert set(remove_interleaving(interleave_heads(tiny_model(model_type), 2)).all_tied_weights_keys) == before


def test_cores_of_a_model_of_several_configurations_come_back():
    cores = {"": "eager", "text_config": "sdpa", "vision_config": "eager"}
    model = AutoModelForCausalLM.from_config(tiny_config("gemma3"), attn_implementation=cores)
    remove_interleaving(interleave_heads(model, 2))
    configs = {"": model.config, **{name: getattr(model.config, name) for name in model.config.sub_configs}}
    assert {name: config._attn_implementation for name, config in configs.items()} == cores


def test_page():
    record = json.loads(
        (ROOT / "research" / "experiments" / "results" / "model_types.json").read_text(encoding="utf-8")
    )
    tables = record.pop("types")
    assert (ROOT / "docs" / "MODEL_TYPES.md").read_text(encoding="utf-8") == document(tables, record)
    for auto_class, least in {CAUSAL: 138, MULTIMODAL: 40}.items():
        verdicts = [row["verdict"] for row in tables[auto_class].values()]
        assert verdicts.count("exact") >= least and set(verdicts) == {"exact", "rejected", "not built"}
        if record["transformers"] == transformers.__version__:
            assert list(tables[auto_class]) == TYPES[auto_class]
