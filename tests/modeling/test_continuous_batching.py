"""Give every request of a batch the tokens and log-probabilities that `generate` gives it alone."""

import inspect
import logging
from dataclasses import fields

import pytest
import torch
from helpers import BF16_OUTPUT, FP32, GEOMETRIES, random_ids, random_model, set_core, small_config, train_mixing
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from iha.processes import run_in_clean_process
from modeling_iha import interleave_heads, paged_requests, pair_heads
from research.experiments.model_types import tiny_model


# Of one token, around a page of 4 tokens and the windows of 3 and 4, longer than a batch of 16 tokens; two are equal.
PROMPTS = [random_ids(length, seed=seed).tolist() for seed, length in enumerate((1, 2, 5, 30, 13, 4, 4))]
NEW_TOKENS = 7

# Transformers 5.17 calls a page a block.
PAGE = "page_size" if "page_size" in {field.name for field in fields(ContinuousBatchingConfig)} else "block_size"

SUPPORTED = [name for name in GEOMETRIES if not name.startswith(("hyper", "simplicial", "dcmha", "multi_token"))]
SUPPORTED += ["hyper_feature"]
MORE = {
    "shared_positions": {"pseudo_positions": "shared", "num_pseudo_heads": 3, "pseudo_collapse": "all_heads"},
    "schedule": {
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "attention_kinds": ["iha"] * 4 + ["mha"],
        "num_hidden_layers": 5,
        "sliding_window": 4,
        "num_pseudo_heads": 3,
        "use_qk_norm": True,
        "gated_mlp": False,
    },
    "mha": {"attention_kinds": "mha"},
    "multi_token_of_heads": {
        "attention_kinds": "multi_token",
        "attention_options": {"multi_token": {"convolution": None}},
    },
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Keep the log of requests that fail on purpose out of the output."""
    caplog.set_level(logging.CRITICAL, logger="ContinuousBatchingLogger")


@pytest.fixture
def found(monkeypatch):
    """Record how many tokens of each request are found in pages."""
    found, search = [], PagedAttentionCache.search_prefix_match
    monkeypatch.setattr(
        PagedAttentionCache, "search_prefix_match", lambda *args: found.append(search(*args)) or found[-1]
    )
    return found


def options(**overrides):
    """Return the config of greedy decoding, without a token that ends it."""
    fields = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(**fields | overrides)


def batching(**overrides):
    """Return a config of pages of 4 tokens and batches of 16 tokens, so that long prompts come in chunks."""
    return ContinuousBatchingConfig(
        **{PAGE: 4, "num_blocks": 64, "max_batch_tokens": 16, "return_logprobs": True, **overrides}
    )


def alone(model, prompt, new_tokens=NEW_TOKENS):
    config = options(max_new_tokens=new_tokens, return_dict_in_generate=True, output_logits=True)
    output = model.generate(torch.tensor([prompt]), config)
    logits = torch.stack(output.logits, dim=1)[0].float()
    return output.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1).amax(-1)


def check(model, prompts, outputs, tolerance=FP32):
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None, output.error
        tokens, logprobs = alone(model, prompt, len(output.generated_tokens))
        assert output.generated_tokens == tokens
        torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=tolerance, rtol=tolerance)


CASES = [*((name, "sdpa") for name in [*SUPPORTED, *MORE]), ("hybrid", "base"), ("global", "base")]
CASES += [(name, "eager") for name in ("schedule", "hybrid", "diff", "talking_heads")]


def built(name, **arguments):
    return random_model(small_config(**{**GEOMETRIES, **MORE}[name]), **arguments)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("name", "core"), CASES)
def test_requests_are_answered_as_if_each_were_alone(name, core):
    model = built(name)
    set_core(model, core)
    stated = model.config.to_dict()
    outputs = model.generate_batch(PROMPTS, options(), batching(), warmup=False)
    assert {len(output.generated_tokens) for output in outputs.values()} == {NEW_TOKENS}
    assert model.config.to_dict() == stated and model.config._attn_implementation == core.replace("base", "sdpa")
    check(model, PROMPTS, outputs.values())


def test_a_model_in_bfloat16():
    """Compare the log-probability of the first token: later ones follow tokens that rounding may change."""
    model = built("schedule", dtype=torch.bfloat16)
    outputs = model.generate_batch(PROMPTS, options(), batching(), warmup=False)
    for prompt, output in zip(PROMPTS, outputs.values(), strict=True):
        assert len(output.generated_tokens) == NEW_TOKENS
        assert abs(output.logprobs[0] - alone(model, prompt, 1)[1][0]) < 2 * BF16_OUTPUT


def test_a_kept_manager_takes_a_second_call():
    model = built("hybrid")
    arguments = {"warmup": False, "persistent_manager": True}
    for prompts in (PROMPTS, PROMPTS[::-1][:2], PROMPTS[:1]):
        outputs = model.generate_batch(prompts, options(), batching(), **arguments)
        check(model, prompts, outputs.values())
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("name", ["global", "hybrid", "talking_heads"])
def test_shared_prefixes_and_forks(name, found):
    """Decode two sequences for each prompt.

    The second prompt finds pages of the first. Of a prompt of one token, and of the last one, which finds all its
    tokens but one in pages, no token is new when the request is forked.
    """
    model, again = built(name), random_ids(1, 9, seed=9)[0].tolist()
    prompts = [PROMPTS[3], PROMPTS[3][:21] + PROMPTS[4], PROMPTS[0], again, PROMPTS[4], PROMPTS[1], again]
    sampled = options(do_sample=True, top_k=1, num_return_sequences=2)
    outputs = model.generate_batch(prompts, sampled, batching(), warmup=False).values()
    # Transformers searches where no layer has a window.
    assert model.config.sliding_window is not None or max(found) >= 4
    # Of a fork, Transformers 5.17 returns one output.
    assert [output.prompt_ids for output in outputs] in (prompts, [prompt for prompt in prompts for _ in range(2)])
    for output in outputs:
        assert output.generated_tokens == alone(model, output.prompt_ids)[0]


def test_requests_that_do_not_fit_wait_their_turn():
    model = built("hybrid")
    outputs = model.generate_batch(PROMPTS, options(), batching(num_blocks=14), warmup=False)
    check(model, PROMPTS, outputs.values())


@pytest.mark.parametrize("name", ["hyper", "hyper_linear", "simplicial", "dcmha", "multi_token"])
def test_kinds_that_cache_more_are_refused(name):
    model = built(name)
    kind = model.config.attention_kinds[0]
    with pytest.raises(NotImplementedError, match=f"Continuous batching .* of kind '{kind}' cache more. Use generate"):
        model.generate_batch(PROMPTS, options(), batching(), warmup=False)


@pytest.mark.parametrize("compiled", [{"use_cuda_graph": True}, {"default_compile_level": 1}])
def test_fixed_shapes_are_refused(compiled):
    with pytest.raises(ValueError, match="runs without CUDA graphs and compilation: leave use_cuda_graph"):
        built("global").generate_batch(PROMPTS, options(), batching(**compiled), warmup=False)


# Interleaved decoders


INTERLEAVED = {
    "llama": {"num_pseudo_heads": 2},
    "qwen3": {"num_pseudo_heads": 4, "collapse": "all_heads"},
    "gemma3_text": {"num_pseudo_heads": 2},  # windows
    "olmo2": {"num_pseudo_heads": 4},
    "qwen3_moe": {"num_pseudo_heads": 2, "collapse": "all_heads"},
    "gpt_oss": {"num_pseudo_heads": 4},  # windows and sinks, on eager
    "mistral": {"num_pseudo_heads": 2, "layers": [0]},
    "granite": {"num_pseudo_heads": 4, "layers": "paper", "sliding_window": 4},
    "arcee": {"num_pseudo_heads": 2, "layers": [1], "sliding_window": 4},
}
PAIRED = {"llama": {}, "gemma3_text": {}, "granite": {"layers": [0], "sliding_window": 4}}


def interleaved(name):
    """Return a tiny model with interleaved heads whose mixing has moved. A window of the base has 4 tokens."""
    model = tiny_model(name)
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 4
        for module in model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window = 4
    interleave_heads(model, **INTERLEAVED[name])
    return train_mixing(model)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_decoders_answer_as_if_each_request_were_alone(name):
    model = interleaved(name)
    core = model.config._attn_implementation
    outputs = model.generate_batch(PROMPTS, options(), batching(), warmup=False)
    assert {len(output.generated_tokens) for output in outputs.values()} == {NEW_TOKENS}
    check(model, PROMPTS, outputs.values())
    assert model.config._attn_implementation == core
    one = model.generate_batch(PROMPTS[3:4], options(), batching(max_batch_tokens=64), warmup=False)
    check(model, PROMPTS[3:4], one.values())


@pytest.mark.parametrize("name", PAIRED)
def test_paired_decoders_answer_as_if_each_request_were_alone(name):
    model = pair_heads(tiny_model(name), 2, **PAIRED[name])
    outputs = model.generate_batch(PROMPTS, options(), batching(), warmup=False)
    assert {len(output.generated_tokens) for output in outputs.values()} == {NEW_TOKENS}
    check(model, PROMPTS, outputs.values())


def test_an_interleaved_decoder_keeps_its_manager_and_shares_prefixes(found):
    model = interleaved("llama")
    for prompts in (PROMPTS, [PROMPTS[3][:21] + PROMPTS[4], PROMPTS[3]], PROMPTS[:1]):
        outputs = model.generate_batch(prompts, options(), batching(), warmup=False, persistent_manager=True)
        check(model, prompts, outputs.values())
    model.destroy_cached_continuous_batching_manager()
    assert max(found) >= 20


@pytest.mark.parametrize(("name", "windows"), [("llama", set()), ("gemma3_text", {0}), ("arcee", {1})])
def test_layers_with_a_window_keep_its_pages_only(name, windows, monkeypatch):
    """Read a prompt of 30 tokens in chunks of 16, and six tokens: a window of 4 gives at most 4 + 14 keys."""
    most, update = {}, PagedAttentionCache.update

    def record(cache, key, value, layer, *args, **kwargs):
        states = update(cache, key, value, layer, *args, **kwargs)
        most[layer] = max(most.get(layer, 0), states[0].numel() * key.shape[2] // key.numel())
        return states

    record.__signature__ = inspect.signature(update)  # which tells versions of Transformers apart
    monkeypatch.setattr(PagedAttentionCache, "update", record)
    interleaved(name).generate_batch(PROMPTS[3:4], options(), batching(), warmup=False)
    assert most == {layer: 18 if layer in windows else 36 for layer in (0, 1)}


@pytest.mark.parametrize("name", ["window", "window_mha", "hybrid", "gemma3_text", "arcee"])
def test_pages_that_keep_one_token_less_are_noticed(name, monkeypatch):
    """Leave the pages of windows as Transformers lays them out: each request longer than the window fails."""
    monkeypatch.setattr(paged_requests, "WINDOW_EDGE", 0)
    model = interleaved(name) if name in INTERLEAVED else built(name)
    outputs = model.generate_batch(PROMPTS[3:4], options(), batching(), warmup=False)
    assert "version of Transformers lays pages out in another way. Use generate" in next(iter(outputs.values())).error


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("bart", "passes position_ids, which BartDecoder does not take"),
        ("bamba", "bamba has layers of type .*linear_attention"),
        ("llama4_text", "llama4_text has layers of type chunked_attention"),
    ],
)
def test_decoders_without_pages_are_refused_by_name(name, problem):
    model = interleave_heads(tiny_model(name), 2)
    with pytest.raises(NotImplementedError, match=f"Continuous batching .*{problem}.* Use generate"):
        model.generate_batch(PROMPTS, options(), batching(), warmup=False)


@pytest.mark.parametrize("name", ["diffllama", "hrm_text", "deepseek_v3"])  # two calls; values narrower than keys
def test_what_pages_would_not_hold_is_refused(name):
    outputs = interleave_heads(tiny_model(name), 2).generate_batch(PROMPTS, options(), batching(), warmup=False)
    assert all("Attention does not. Use generate" in output.error for output in outputs.values())


CLEAN = """
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
model = AutoModelForCausalLM.from_pretrained(request["place"], trust_remote_code=True)
options = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
batching = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
outputs = model.generate_batch(request["prompts"], options, batching, warmup=False)
result = [output.generated_tokens for output in outputs.values()]
"""


def test_a_saved_decoder_answers_where_the_package_is_not_installed(tmp_path):
    model = interleaved("gemma3_text")
    model.save_pretrained(tmp_path)
    tokens = run_in_clean_process(CLEAN, {"place": str(tmp_path), "prompts": PROMPTS})
    assert tokens == [alone(model, prompt, 4)[0] for prompt in PROMPTS]
