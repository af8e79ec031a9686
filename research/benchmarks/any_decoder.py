"""Compare a decoder with interleaved heads, `IHAForCausalLM` of the same weights and the plain decoder.

The models have four layers of width 512 with 8 heads in 4 groups, and P = 2. They run a forward pass, a training step
(forward and backward) and eight new tokens after N cached ones. Every layer is interleaved: over all tokens, in a
window of 64 that `interleave_heads` is given, or in such a window of the decoder's own. The logits of the first two
must agree.

example: python -m research.benchmarks.any_decoder --tokens 512 1024 --threads 1 2 --dtypes float32 bfloat16
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from iha.errors import run_cli
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads
from modeling_iha.transformers_versions import CACHE
from research.benchmarks.harness import medians, reported, training, wall_seconds, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [512, 1024], repeats=5)
PARSER.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count()], help="numbers of threads")
PARSER.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(float32 bfloat16)")


SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
}
PSEUDO_HEADS = 2
WINDOW = 64
NEW_TOKENS = 8
WINDOWS = ("none", "given", "own")
BASE = "IHAForCausalLM"
PASSES = ("forward", "training", "decoding")
AGREES = {"float32": 1e-4, "bfloat16": 0.02}


def models(dtype: torch.dtype, window: str) -> dict[str, torch.nn.Module]:
    """Return the plain decoder, the interleaved one, and `IHAForCausalLM` with the same weights."""
    torch.manual_seed(0)
    make = lambda: LlamaForCausalLM(LlamaConfig(**SIZES)).eval()  # noqa: E731
    if window == "own":
        make = lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)).eval()  # noqa: E731
    plain = make()
    interleaved = make()
    interleaved.load_state_dict(plain.state_dict())
    interleave_heads(interleaved, PSEUDO_HEADS, sliding_window=WINDOW if window == "given" else None)
    layers = {} if window == "none" else {"layer_types": "sliding_attention", "sliding_window": WINDOW}
    same = {name: getattr(plain.config, name) for name in ("rms_norm_eps", "rope_parameters")}
    same["mixing_scale"] = interleaved.config.mixing_scale
    config = IHAConfig(**SIZES, **same, **layers, num_pseudo_heads=PSEUDO_HEADS, pseudo_positions="shared")
    iha = IHAForCausalLM(config).eval()
    iha.load_state_dict(interleaved.state_dict())
    return {name: model.to(dtype) for name, model in (("interleaved", interleaved), (BASE, iha), ("plain", plain))}


def prepare(model: torch.nn.Module, name: str, tokens: int) -> Callable[[], torch.Tensor]:
    """Return a function of no arguments that runs a pass of the model and returns its logits."""
    input_ids = torch.arange(tokens)[None] % SIZES["vocab_size"]
    if name == "training":
        embeddings = model.get_input_embeddings()(input_ids).detach()
        run = lambda states: model(inputs_embeds=states, use_cache=False).logits  # noqa: E731
        return training(run, [embeddings], list(model.base_model.layers.parameters()))
    cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def decode() -> torch.Tensor:
        for _ in range(NEW_TOKENS):
            logits = model(input_ids=input_ids[:, :1], **{CACHE: cache}).logits
        return logits

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits

    if name == "forward":
        return forward
    with torch.no_grad():
        model(input_ids=input_ids, **{CACHE: cache}, logits_to_keep=1)
    return decode


def measure(threads: int, dtype: str, name: str, window: str, tokens: int, repeats: int) -> dict:
    torch.set_num_threads(threads)
    decoders = models(getattr(torch, dtype), window)
    make = {form: partial(prepare, model, name, tokens) for form, model in decoders.items()}
    if name != "training" and not torch.allclose(make["interleaved"]()(), make[BASE]()(), atol=AGREES[dtype]):
        raise RuntimeError("The interleaved decoder and IHAForCausalLM compute different logits.")
    # Every run has a new cache, because the place of a cache in memory moved a ratio by a tenth.
    seconds = medians(make, repeats, timer=lambda form: wall_seconds(form()))
    setting = {"threads": threads, "dtype": dtype, "pass": name, "window": window, "tokens": tokens}
    kept = {f"interleaved / {base}": seconds["interleaved"] / seconds[base] for base in (BASE, "plain")}
    return {**setting, "seconds": seconds, "ratios": kept}


def main() -> None:
    args = PARSER.parse_args()
    threads = list(dict.fromkeys(args.threads))
    settings = product(threads, args.dtypes, PASSES, WINDOWS, args.tokens)
    rows = reported(measure(*setting, args.repeats) for setting in settings)
    setting = {"pseudo_heads": PSEUDO_HEADS, "threads": threads, "predicted_by": "the same products: 1"}
    write(args.out, "any_decoder", rows, **setting)


if __name__ == "__main__":
    run_cli(main)
