# Copyright 2026 the modeling_iha authors.
# SPDX-License-Identifier: Apache-2.0
"""Measure the tokens a second that vLLM and `generate` write for 1, 4, 16 and 64 requests at a time.

The model is SmolLM2-135M-Instruct, converted to the paper's schedule. Every request has random tokens.

example: python -m vllm_iha.throughput --requests 1 4
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


# vLLM runs in this process, so that all are measured with the threads that it takes.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="ERROR")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64], help="requests at a time")
    parser.add_argument("--tokens", type=int, nargs=2, default=[32, 128], help="shortest and longest prompt (32 128)")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens to write for each request (24)")
    parser.add_argument("--num-pseudo-heads", type=int, default=2, metavar="P", help="pseudo-heads (2)")
    parser.add_argument("--window", type=int, default=64, help="window of the schedule (64)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("results"), help="directory of the results"
    )
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before the imports below, which take seconds

import torch
import vllm
from matplotlib.figure import Figure
from transformers import ContinuousBatchingConfig, GenerationConfig

from iha_io import plots
from iha_io.checkpoint_io import load_model, smollm2_gguf
from iha_io.command_io import run_module, write_json
from modeling_iha import IHAForCausalLM
from research.benchmarks.harness import environment


ONE_BY_ONE = 4  # Their rate does not depend on their number.


def rates(run: Callable[[list[list[int]]], None], batches: dict[int, list[list[int]]]) -> dict[int, float]:
    """Return the tokens a second that `run` writes for each number of requests."""
    run([[1, 2, 3]])  # warms up
    measured = {}
    for count, prompts in batches.items():
        start = time.perf_counter()
        run(prompts)
        measured[count] = round(count * args.new_tokens / (time.perf_counter() - start), 2)
        print(f"{count} requests: {measured[count]} tokens a second", flush=True)
    return measured


def vllm_rates(directory: Path, batches: dict[int, list[list[int]]]) -> dict[int, float]:
    llm = vllm.LLM(
        str(directory),
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
    )
    options = vllm.SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True, detokenize=False)

    def run(prompts: list[list[int]]) -> None:
        llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], options, use_tqdm=False)

    measured = rates(run, batches)
    llm.llm_engine.engine_core.shutdown()
    vllm.distributed.cleanup_dist_env_and_memory()
    return measured


def generate_rates(model: IHAForCausalLM, batches: dict[int, list[list[int]]]) -> dict[str, dict[int, float]]:
    def batch(prompts: list[list[int]]) -> None:
        padding = [max(map(len, prompts)) - len(tokens) for tokens in prompts]
        ids = torch.tensor([[0] * pad + tokens for pad, tokens in zip(padding, prompts)])
        mask = torch.tensor([[0] * pad + [1] * len(tokens) for pad, tokens in zip(padding, prompts)])
        options = {"max_new_tokens": args.new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.generate(ids, attention_mask=mask, **options)

    def one_by_one(prompts: list[list[int]]) -> None:
        for tokens in prompts:
            batch([tokens])

    def requests(prompts: list[list[int]]) -> None:
        options = {"max_new_tokens": args.new_tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        # The default of 8192 tokens would plan 27 GB of memory.
        batching = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=1024)
        model.generate_batch(prompts, GenerationConfig(**options), batching)

    alone = {count: prompts for count, prompts in batches.items() if count <= ONE_BY_ONE}
    return {
        "generate_batch": rates(requests, batches),
        "generate, padded batch": rates(batch, batches),
        "generate, one by one": rates(one_by_one, alone),
    }


def plot(table: dict[str, dict[int, float]]) -> Figure:
    """Plot the new tokens a second by the number of requests, {name: {requests: rate}}."""
    plain, ours = (table[name][max(table[name])] for name in ("vLLM, source Llama", "vLLM"))
    message = f"vLLM makes {ours:.0f} tokens a second with the converted schedule and {plain:.0f} with its source"
    figure, (axes,) = plots.panels(message, height=3.6)
    for name, measured in table.items():
        axes.loglog(measured.keys(), measured.values(), marker="o", label=name)
    axes.set(xlabel="requests at a time", ylabel="new tokens a second\n(higher is better)")
    plots.ticks(axes, "x", [count for measured in table.values() for count in measured])
    return figure


def main() -> None:
    generator = torch.Generator().manual_seed(0)

    def prompt() -> list[int]:
        length = torch.randint(args.tokens[0], args.tokens[1] + 1, (1,), generator=generator)
        return torch.randint(1000, 40000, (int(length),), generator=generator).tolist()

    batches = {count: [prompt() for _ in range(count)] for count in args.requests}
    with tempfile.TemporaryDirectory() as directory:
        source, converted = Path(directory, "llama"), Path(directory, "iha")
        load_model(smollm2_gguf(), torch.float32).save_pretrained(source)
        schedule = ["--schedule=hybrid", f"--window={args.window}", f"--num-pseudo-heads={args.num_pseudo_heads}"]
        run_module(converted, "conversion_scripts.convert_llama_to_iha", smollm2_gguf(), converted, *schedule)
        table = {"vLLM, source Llama": vllm_rates(source, batches), "vLLM": vllm_rates(converted, batches)}
        table |= generate_rates(IHAForCausalLM.from_pretrained(converted, dtype=torch.float32), batches)
    setting = {
        **environment(" ".join(["vllm_iha.throughput", *sys.argv[1:]])),
        "vllm": vllm.__version__,
        "prompt_tokens": args.tokens,
        "new_tokens": args.new_tokens,
        "num_pseudo_heads": args.num_pseudo_heads,
        "window": args.window,
    }
    write_json(args.out / "throughput.json", {**setting, "tokens_a_second": table})
    plots.save_plot(plot(table), args.out / "throughput.png")
    for name, measured in table.items():
        print(
            f"| {name} |", " | ".join(f"{measured[count]:.1f}" if count in measured else "–" for count in batches), "|"
        )


if __name__ == "__main__":
    main()
