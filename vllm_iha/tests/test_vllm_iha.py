"""Compare vLLM with `generate`: greedy tokens are equal, and log-probabilities are as close to float64's."""

import gc
import os


# One process, and no logs: an engine then starts in seconds.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.core.sched.scheduler import Scheduler

from iha_io.checkpoint_io import smollm2_gguf
from iha_io.command_io import run_command
from modeling_iha import IHAConfig, IHAForCausalLM
from vllm_iha.model import VirtualAttention


@pytest.fixture(autouse=True)
def undecorated(monkeypatch):
    """Leave the decoder's class as it is: vLLM would change it, and the reference here is of the same class."""
    monkeypatch.setattr("vllm.model_executor.models.transformers.base.Base._decorate_for_torch_compile", lambda self: None)


NEW_TOKENS = 8
GREEDY = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False}
LOGPROBS = {"logprobs": 0, "prompt_logprobs": 0}
LENGTHS = (1, 2, 7, 31, 40, 70, 129, 260)
SCHEDULE = {
    "num_hidden_layers": 5,
    "attention_kinds": ["iha"] * 4 + ["mha"],
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 7,
}
WINDOWS = {"layer_types": "sliding_attention", "sliding_window": 7}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
# Fields of the config, and options of the engine.
CASES = {
    "one_pseudo_head": ({"num_pseudo_heads": 1}, {}),
    "global": ({}, {}),
    "windows": (WINDOWS, {}),
    "window_of_two_tokens": ({**WINDOWS, "sliding_window": 2, "num_pseudo_heads": 3}, {}),
    "schedule": (SCHEDULE, {}),
    "schedule_shared": ({**SCHEDULE, "pseudo_positions": "shared", "num_pseudo_heads": 4, "sliding_window": 32}, {}),
    "schedule_all_heads": ({**SCHEDULE, "pseudo_collapse": "all_heads", "num_pseudo_heads": 3}, {}),
    "paper": (
        {
            **SCHEDULE,
            **{"num_attention_heads": 20, "num_key_value_heads": 20, "num_pseudo_heads": 20, "sliding_window": 10},
            **{"gated_mlp": False, "hidden_act": "gelu", "tie_word_embeddings": True},
        },
        {"num_gpu_blocks_override": 100},
    ),
    "all_heads_shared": ({"pseudo_collapse": "all_heads", "pseudo_positions": "shared"}, {}),
    "no_groups": ({"num_key_value_heads": 4, "num_pseudo_heads": 4}, {}),
    "one_group": ({"num_key_value_heads": 1, "num_pseudo_heads": 5}, {}),
    "wide_heads": ({"head_dim": 80}, {}),
    "qk_norm": ({**SCHEDULE, "use_qk_norm": True}, {}),
    "biases": ({**SCHEDULE, "attention_bias": True, "mlp_bias": True}, {}),
    "two_matrix_ffn_biases_prelu": ({"gated_mlp": False, "mlp_bias": True, "hidden_act": "prelu"}, {}),
    "linear_rope": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, {}),
    "llama3_rope": ({"rope_parameters": LLAMA3}, {}),
    "yarn_rope": ({"rope_parameters": YARN, "pseudo_positions": "shared"}, {}),
    "both_kinds_with_windows": ({**WINDOWS, "attention_kinds": ["iha", "mha"], "use_qk_norm": True}, {}),
    "mha": ({"attention_kinds": "mha", "use_qk_norm": True}, {}),
    "small_chunks": (SCHEDULE, {"max_num_batched_tokens": 16}),
    "few_blocks": ({**SCHEDULE, "num_pseudo_heads": 4}, {"num_gpu_blocks_override": 24}),
    "full_allocation": (SCHEDULE, {"disable_hybrid_kv_cache_manager": True}),
    "bfloat16": ({**SCHEDULE, "initializer_range": 0.02}, {"dtype": "bfloat16"}),
    "compiled": (SCHEDULE, {"enforce_eager": False}),
}


def tiny_config(**overrides) -> IHAConfig:
    sizes = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.1}
    return IHAConfig.from_preset("tiny", **{**sizes, **overrides})


def random_tokens(*lengths: int, vocab_size: int = 256, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def engine(directory: Path, **options):
    """Yield an engine of few blocks that takes prompts in chunks of 64 tokens and six requests at a time."""
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_batched_tokens": 64}
    defaults |= {"num_gpu_blocks_override": 40, "max_num_seqs": 6, "skip_tokenizer_init": True}
    llm = LLM(str(directory), distributed_executor_backend="uni", **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@torch.no_grad()
def token_logprobs(model: IHAForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Return the log-probability of each token but the first, in float64."""
    logprobs = model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def served_logprobs(output) -> torch.Tensor:
    """Return the log-probability that vLLM gives each new token and, where asked, each of the prompt but the first."""
    completion, prompt = output.outputs[0], output.prompt_logprobs
    logprobs = [*prompt[1:], *completion.logprobs] if prompt else completion.logprobs
    tokens = [*output.prompt_token_ids, *completion.token_ids][-len(logprobs) :]
    return torch.tensor([at[token].logprob for at, token in zip(logprobs, tokens)])


def serve(llm: LLM, prompts: list[list[int]], **options) -> list:
    sampling = SamplingParams(**{**GREEDY, **LOGPROBS, **options})
    return llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)


def distances(model: IHAForCausalLM, outputs: list) -> tuple[float, float]:
    """Return how far from float64 the log-probabilities of vLLM and of the model are at most."""
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    ours = [token_logprobs(model, tokens) for tokens in texts]
    exact = IHAForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float64)
    exact = [token_logprobs(exact, tokens) for tokens in texts]
    served = [served_logprobs(output) for output in outputs]
    return tuple(max(float((a - b[-len(a) :]).abs().max()) for a, b in zip(those, exact)) for those in (served, ours))


def assert_equal(model: IHAForCausalLM, outputs: list, tokens: bool = True):
    """Compare the log-probabilities, and with `tokens` what was written: in bfloat16 another token may win.

    Where float64 puts two tokens within 1e-5, the rounding of a CPU chooses, and what follows cannot be compared."""
    for output in outputs if tokens else []:
        prompt = torch.tensor([output.prompt_token_ids])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        written, expected = output.outputs[0].token_ids, expected[0, prompt.shape[1] :].tolist()
        assert len(written) == len(expected)
        for place in [place for place, pair in enumerate(zip(written, expected)) if len(set(pair)) > 1][:1]:
            exact = IHAForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float64)
            text = torch.tensor([[*output.prompt_token_ids, *expected[:place]]])
            first, second = exact(text).logits[0, -1, [written[place], expected[place]]]
            assert abs(first - second) < 1e-5, (written, expected)
    served, ours = distances(model, outputs)
    assert served < 2 * ours


def save(directory: Path, dtype: torch.dtype = torch.float32, **overrides) -> IHAForCausalLM:
    """Save a random model, with noise in norms, biases and collapse too, and load it."""
    torch.manual_seed(0)
    model = IHAForCausalLM(tiny_config(**overrides))
    for parameter in model.parameters():
        parameter.data += model.config.initializer_range * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(directory)
    return IHAForCausalLM.from_pretrained(directory)


@pytest.mark.parametrize("case", CASES)
def test_vllm_equals_generate(case, tmp_path):
    overrides, options = CASES[case]
    dtype = getattr(torch, options.get("dtype", "float32"))
    model = save(tmp_path, dtype, **overrides)
    with engine(tmp_path, **options) as llm:
        outputs = serve(llm, random_tokens(*LENGTHS))
    assert_equal(model, outputs, tokens=dtype == torch.float32)


def after_shared_prefix(directory: Path) -> tuple[IHAForCausalLM, list]:
    """Return a model and what vLLM writes after a prefix that it has in its cache.

    A block of a window layer holds 32 tokens. The first token after a block reaches one token into the block before
    the last one, through the W * P virtual tokens of its window."""
    model = save(directory, **{**SCHEDULE, "num_pseudo_heads": 4, "sliding_window": 33})
    prefix, *ends = random_tokens(260, 1, 5, 40)
    with engine(directory) as llm:
        # A request for log-probabilities of its prompt reads no cached prefix.
        serve(llm, [prefix], prompt_logprobs=None)
        outputs = serve(llm, [[*prefix, *end] for end in ends], prompt_logprobs=None)
    assert all(output.num_cached_tokens == 256 for output in outputs)
    return model, outputs


def test_a_shared_prefix_is_cached(tmp_path):
    assert_equal(*after_shared_prefix(tmp_path))


def test_a_window_one_token_short_is_caught(tmp_path, monkeypatch):
    """Let the cache manager keep W tokens, as for an "mha" layer: the check fails."""
    get_spec = VirtualAttention.get_kv_cache_spec

    def short_spec(*args):
        spec = get_spec(*args)
        return replace(spec, sliding_window=spec.sliding_window - 1)

    monkeypatch.setattr(VirtualAttention, "get_kv_cache_spec", short_spec)
    served, ours = distances(*after_shared_prefix(tmp_path))
    assert served > 100 * ours


def test_preempted_requests_go_on(tmp_path, monkeypatch):
    """Run six prompts on eight free blocks: each takes one block, and a second one for its new tokens."""
    preempted, preempt = [], Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler,
        "_preempt_request",
        lambda *args, **kwargs: preempted.append(args[1].request_id) or preempt(*args, **kwargs),
    )
    model = save(tmp_path, num_pseudo_heads=4)
    with engine(tmp_path, num_gpu_blocks_override=9, max_model_len=64) as llm:
        outputs = serve(llm, random_tokens(*[30] * 6))
    assert preempted
    assert_equal(model, outputs)


def test_a_converted_model(tmp_path):
    converted, schedule = tmp_path / "iha", ["--num-pseudo-heads", "2", "--schedule", "hybrid", "--window", "32"]
    run_command(converted, "conversion_scripts.convert_llama_to_iha", smollm2_gguf(), converted, *schedule)
    model = IHAForCausalLM.from_pretrained(converted, dtype=torch.float32)
    with engine(converted) as llm:
        outputs = serve(llm, random_tokens(5, 40, 130, vocab_size=model.config.vocab_size))
    assert_equal(model, outputs)


CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
REFUSED = {
    "kind": ({"attention_kinds": ["iha", "diff"]}, {}, "'diff'; vLLM serves 'iha' and 'mha'"),
    "mlp_gate_groups": ({"mlp_gate_groups": 4}, {}, "mlp_gate_groups=4"),
    "no_rope_layers": ({"no_rope_layers": [1, 0]}, {}, "no_rope_layers is not served"),
    "rope": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}, "'dynamic'"),
    "head_dim": ({"head_dim": 16}, {}, "head_dim=16; .* takes 32, 64"),
    "tensor_parallel": ({}, {"tensor_parallel_size": 2}, "runs on one device"),
    "quantization": ({}, {"quantization": "fp8"}, "quantization='fp8'"),
    "lora": ({}, {"enable_lora": True}, "merge the adapter"),
    "speculation": (
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "--speculative-config",
    ),
    "kv_cache_dtype": ({}, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
    "connector": ({}, {"kv_transfer_config": CONNECTOR}, "--kv-transfer-config"),
    "offloading": ({}, {"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    "wrong_word": ({}, {"hf_overrides": {"pseudo_positions": "interleave"}}, "allowed are 'interleaved', 'shared'"),
    "window_of_none": (WINDOWS, {"hf_overrides": {"sliding_window": 0}}, "sliding_window=None .* at least 2"),
    "rope_theta": ({}, {"hf_overrides": {"rope_theta": 500.0}}, "rope_theta=500.0 .* no effect"),
    "block_size": ({"num_pseudo_heads": 3}, {"block_size": 128}, "multiple of 96"),
}


@pytest.mark.parametrize("case", [*REFUSED, "version"])
def test_what_is_refused(case, tmp_path, monkeypatch):
    """Refuse before weights are loaded: the directory holds none."""
    if case == "version":
        monkeypatch.setattr("vllm.__version__", "0.310.0")
    overrides, options, message = REFUSED.get(case, ({}, {}, "made for vLLM 0.31 and 0.32, and this is 0.310.0"))
    config = tiny_config(**overrides)
    config.architectures = ["IHAForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=message) as error, engine(tmp_path, **options):
        pass
    assert "\n" not in str(error.value)
