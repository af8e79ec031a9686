"""Serve tiny random models by an engine in this process, and compare it with `generate` and with float64."""

import gc
import os


# One process, and no logs: an engine then starts in seconds.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")

from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads
from modeling_iha.mixing_weights import mixing_parameters


WORDS = [f"w{number}" for number in range(254)]
NEW_TOKENS = 8
GREEDY = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False}
LOGPROBS = {"logprobs": 0, "prompt_logprobs": 0}
LENGTHS = (1, 2, 7, 31, 40, 70, 129, 260)
SIZES = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 5}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048}
SIZES |= {"initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def word_tokenizer(*special: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer of 256 words and the special tokens."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"unk_token": "<unk>", "eos_token": "<eos>", "additional_special_tokens": list(special)}
    return PreTrainedTokenizerFast(tokenizer_object=words, **tokens)


def random_tokens(*lengths: int, vocab_size: int = 256, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def save_iha(directory: Path, dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
    """Save a random `IHAForCausalLM`, with noise in norms, biases and collapse too, and load it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.1}
    model = IHAForCausalLM(IHAConfig.from_preset("tiny", **{**sizes, **overrides}))
    for parameter in model.parameters():
        parameter.data += model.config.initializer_range * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(directory)
    return load(directory, dtype)


def random_base(model_type: str, auto_class: type = AutoModelForCausalLM, **fields) -> PreTrainedModel:
    """Build a random model of Transformers, with noise in norms and biases too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **fields})
    model = auto_class.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def save_interleaved(
    directory: Path, model_type: str, fields: dict, dtype: torch.dtype = torch.float32, **options
) -> PreTrainedModel:
    """Save a random interleaved model whose mixing has left its start, and load it."""
    model = interleave_heads(random_base(model_type, **fields), **{"num_pseudo_heads": 2, **options})
    for parameter in mixing_parameters(model):
        parameter.data += 0.2 / model.config.get_text_config().mixing_scale * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(directory)
    return load(directory, dtype, type(model))


def load(directory: Path | str, dtype: torch.dtype = torch.float32, cls: type = AutoModelForCausalLM):
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}  # what float64 has everywhere
    return cls.from_pretrained(directory, dtype=dtype, **options).eval()


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


def serve(llm: LLM, prompts: list[list[int]], **options) -> list:
    sampling = SamplingParams(**{**GREEDY, **LOGPROBS, **options})
    return llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)


@torch.no_grad()
def token_logprobs(model: PreTrainedModel, tokens: list[int], **images) -> torch.Tensor:
    """Return the log-probability of each token but the first, in float32 at least, as vLLM does."""
    logits = model(torch.tensor([tokens]), **images).logits[0, :-1]
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].double()


def served_logprobs(output) -> torch.Tensor:
    """Return the log-probability that vLLM gives each new token and, where asked, each of the prompt but the first."""
    completion, prompt = output.outputs[0], output.prompt_logprobs
    logprobs = [*prompt[1:], *completion.logprobs] if prompt else completion.logprobs
    tokens = [*output.prompt_token_ids, *completion.token_ids][-len(logprobs) :]
    return torch.tensor([at[token].logprob for at, token in zip(logprobs, tokens)], dtype=torch.float64)


def distances(model: PreTrainedModel, outputs: list, **images) -> tuple[float, float]:
    """Return how far from float64 the log-probabilities of vLLM and of the model are at most."""
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    ours = [token_logprobs(model, tokens, **images) for tokens in texts]
    exact_model = load(model.name_or_path, torch.float64, type(model))
    exact = [token_logprobs(exact_model, tokens, **images) for tokens in texts]
    served = [served_logprobs(output) for output in outputs]
    return tuple(max(float((a - b[-len(a) :]).abs().max()) for a, b in zip(those, exact)) for those in (served, ours))


def assert_tokens_equal(model: PreTrainedModel, outputs: list, **images):
    """Compare what was written with `generate`.

    Where float64 puts two tokens within 1e-5, the rounding of a CPU chooses, and what follows cannot be compared."""
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **images, **options)
        written, expected = output.outputs[0].token_ids, expected[0, prompt.shape[1] :].tolist()
        assert len(written) == len(expected)
        for place in [place for place, pair in enumerate(zip(written, expected)) if len(set(pair)) > 1][:1]:
            text = torch.tensor([[*output.prompt_token_ids, *expected[:place]]])
            with torch.no_grad():
                logits = load(model.name_or_path, torch.float64, type(model))(text, **images).logits[0, -1]
            assert abs(logits[written[place]] - logits[expected[place]]) < 1e-5, (written, expected)


def assert_equal(model: PreTrainedModel, outputs: list, **images):
    """Compare the tokens with `generate`, and the log-probabilities with float64."""
    assert_tokens_equal(model, outputs, **images)
    served, ours = distances(model, outputs, **images)
    assert served < 2 * ours
