"""Compare how long servers take with interleaved heads: Transformers' continuous batching, and vLLM.

SmolLM2-135M-Instruct is interleaved with P = 2 in every layer, in float32 and on one thread. 1, 4 and 16 requests of
32 to 128 tokens come at once and get new tokens. Of `batching` the base is one padded `generate` of the same model, of
`vllm` the plain model in the same backend (in .venv-vllm, after `make vllm`). Times are seconds of this process on the
CPU, so that other programs change them less.

example: python -m research.benchmarks.serving batching
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from conversion_scripts.convert_llama_to_iha import convert_model
from iha.checkpoints import load_config, load_model, load_tokenizer, smollm2_gguf
from iha.errors import ROOT, UserError, run_cli
from modeling_iha import interleave_heads
from research.benchmarks.harness import medians, ratios, reported, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, None, repeats=5)
PARSER.add_argument("server", choices=["batching", "vllm"])
PSEUDO_HEADS = 2
REQUESTS = (1, 4, 16)
NEW_TOKENS = {"batching": 24, "vllm": 12}
Prompts = list[list[int]]


def cpu_seconds(function: Callable[[], None]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def load() -> torch.nn.Module:
    return load_model(smollm2_gguf(), torch.float32, load_config(smollm2_gguf())).eval()


def prompts(count: int) -> Prompts:
    """Return the starts of a text, from 32 to 128 tokens long; one alone has 80."""
    tokenizer = load_tokenizer(smollm2_gguf(), load_config(smollm2_gguf()).vocab_size)
    tokens = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    lengths = [32 + 96 * index // (count - 1) for index in range(count)] if count > 1 else [80]
    return [tokens[:length] for length in lengths]


def batching(requests: Prompts) -> dict[str, Callable[[], None]]:
    """Return a padded `generate`, and continuous batching with a manager that is kept and with a new one."""
    options = {"max_new_tokens": NEW_TOKENS["batching"], "do_sample": False}
    config = GenerationConfig(**options, eos_token_id=None, pad_token_id=0)
    # Without a bound each manager would take most of the memory that is free.
    pages = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=2048)
    longest = max(map(len, requests))
    rows = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in requests])
    mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in requests])
    # A model gives every call the manager that it keeps.
    padded, kept, new = (interleave_heads(load(), PSEUDO_HEADS) for _ in range(3))

    def answer(model: torch.nn.Module, **manager) -> None:
        answers = model.generate_batch(requests, config, pages, warmup=False, **manager).values()
        lengths = [len(each.generated_tokens) for each in answers]
        # Transformers logs an error and goes on.
        if lengths != [NEW_TOKENS["batching"]] * len(requests):
            raise UserError(
                f"generate_batch made {lengths} tokens: expected {NEW_TOKENS['batching']} of each request."
            )

    return {
        "padded generate": partial(padded.generate, rows, config, attention_mask=mask),
        "a kept manager": partial(answer, kept, persistent_manager=True),
        "a new manager": partial(answer, new),
    }


@cache
def engines() -> dict:
    """Return engines of the plain model in both of vLLM's backends, and of both ways to interleave it."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM

    models = {"plain": load(), "interleaved": interleave_heads(load(), PSEUDO_HEADS)}
    models["IHAForCausalLM"] = convert_model(load(), PSEUDO_HEADS)
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "skip_tokenizer_init": True}
    options |= {"distributed_executor_backend": "uni", "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as directory:
        for name, model in models.items():
            model.save_pretrained(Path(directory) / name)
        started = {"plain": LLM(f"{directory}/plain", model_impl="transformers", **options)}
        started["vLLM's own Llama"] = LLM(f"{directory}/plain", **options)
        return started | {name: LLM(f"{directory}/{name}", **options) for name in ("interleaved", "IHAForCausalLM")}


def vllm(requests: Prompts) -> dict[str, Callable[[], None]]:
    """Return what answers the requests by each engine."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS["vllm"], ignore_eos=True, detokenize=False)
    tokens = [{"prompt_token_ids": tokens} for tokens in requests]
    return {name: partial(engine.generate, tokens, sampling, use_tqdm=False) for name, engine in engines().items()}


def measure(forms: dict[str, Callable[[], None]], count: int, repeats: int) -> dict:
    seconds = medians(forms, repeats, cpu_seconds)
    return {"requests": count, "seconds": seconds, "ratios": ratios(seconds, next(iter(seconds)))}


def main() -> None:
    args = PARSER.parse_args()
    torch.set_num_threads(1)
    make = {"batching": batching, "vllm": vllm}[args.server]
    rows = reported(measure(make(prompts(count)), count, args.repeats) for count in REQUESTS)
    setting = {"pseudo_heads": PSEUDO_HEADS, "new_tokens": NEW_TOKENS[args.server]}
    write(args.out, f"serving_{args.server}", rows, benchmark="serving", **setting)


if __name__ == "__main__":
    run_cli(main)
