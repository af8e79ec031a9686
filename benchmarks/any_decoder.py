"""Compare a Llama with interleaved heads, `IHAForCausalLM` of the same weights and the plain Llama.

The models have four layers of width 512 with 8 heads in 4 groups, and P = 2. They run a forward pass, a training step
(forward and backward) and one token after N cached ones. Every layer is interleaved, over all tokens or in a window of
64. The logits of the first two must agree.

example: python -m benchmarks.any_decoder --tokens 512 1024 --threads 1 2 --dtypes float32 bfloat16
"""

import os
from collections.abc import Callable
from itertools import product

from benchmarks.options import arguments
from common.command_io import run_cli


PARSER = arguments(__doc__, [512, 1024], repeats=5)
PARSER.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count()], help="numbers of threads")
PARSER.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(float32 bfloat16)")
if __name__ == "__main__":
    run_cli(PARSER.parse_args)  # before the imports below, which take seconds

import torch
from matplotlib.figure import Figure
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.harness import draw, medians, ratios, reported, span, training, write
from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads


SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
}
PSEUDO_HEADS, WINDOW = 2, 64
BASE = "IHAForCausalLM"
PASSES = ("forward", "training", "decoding")
AGREES = {"float32": 1e-4, "bfloat16": 0.02}


def models(dtype: torch.dtype, window: int | None) -> dict[str, torch.nn.Module]:
    """Return the plain Llama, the interleaved one, and `IHAForCausalLM` with the same weights."""
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    interleaved = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    interleaved.load_state_dict(plain.state_dict())
    interleave_heads(interleaved, PSEUDO_HEADS, sliding_window=window)
    layers = {} if window is None else {"layer_types": "sliding_attention", "sliding_window": window}
    same = {name: getattr(plain.config, name) for name in ("rms_norm_eps", "rope_parameters")}
    config = IHAConfig(**SIZES, **same, **layers, num_pseudo_heads=PSEUDO_HEADS, pseudo_positions="shared")
    iha = IHAForCausalLM(config).eval()
    iha.load_state_dict(interleaved.state_dict())
    return {name: model.to(dtype) for name, model in (("interleaved", interleaved), (BASE, iha), ("Llama", plain))}


def prepare(model: torch.nn.Module, name: str, tokens: int) -> Callable[[], torch.Tensor]:
    """Return a function of no arguments that runs a pass of the model and returns its logits."""
    input_ids = torch.arange(tokens)[None] % SIZES["vocab_size"]
    if name == "training":
        embeddings = model.get_input_embeddings()(input_ids).detach()
        run = lambda states: model(inputs_embeds=states, use_cache=False).logits  # noqa: E731
        return training(run, [embeddings], list(model.base_model.layers.parameters()))
    cache = DynamicCache()

    @torch.no_grad()
    def decode() -> torch.Tensor:
        logits = model(input_ids=input_ids[:, :1], past_key_values=cache).logits
        cache.crop(-1)
        return logits

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits

    if name == "forward":
        return forward
    with torch.no_grad():
        model(input_ids=input_ids, past_key_values=cache, logits_to_keep=1)
    return decode


def measure(threads: int, dtype: str, name: str, window: int | None, tokens: int, repeats: int) -> dict:
    torch.set_num_threads(threads)
    runs = {form: prepare(model, name, tokens) for form, model in models(getattr(torch, dtype), window).items()}
    if name != "training" and not torch.allclose(runs["interleaved"](), runs[BASE](), atol=AGREES[dtype]):
        raise RuntimeError("The interleaved Llama and IHAForCausalLM compute different logits.")
    seconds = medians(runs, repeats)
    setting = {"threads": threads, "dtype": dtype, "pass": name, "window": window or 0, "tokens": tokens}
    row = {**setting, "seconds": seconds}
    kept = ratios(seconds, BASE)
    return {**row, "ratios": {f"interleaved / {BASE}": kept[f"interleaved / {BASE}"], **ratios(seconds, "Llama")}}


def plot(table: dict) -> Figure:
    """Plot the time beside `IHAForCausalLM` by pass."""
    found = span(row["ratios"][f"interleaved / {BASE}"] for row in table["rows"])
    message = f"An interleaved Llama takes {found} times as long as {BASE}"

    def of(name: str) -> Callable[[dict], dict]:
        ratio = f"interleaved / {BASE}"
        names = ("window", "dtype", "threads")
        line = lambda row: ", ".join(f"{key} {row[key]}" for key in names).replace("dtype ", "")  # noqa: E731
        return lambda row: {line(row): row["ratios"][ratio]} if row["pass"] == name else {}

    return draw(message, table, {f"{name}: time / {BASE} (lower is better)": of(name) for name in PASSES})


def main() -> None:
    args = PARSER.parse_args()
    threads = list(dict.fromkeys(args.threads))
    settings = product(threads, args.dtypes, PASSES, (None, WINDOW), args.tokens)
    rows = reported(measure(*setting, args.repeats) for setting in settings)
    setting = {"pseudo_heads": PSEUDO_HEADS, "threads": threads, "predicted_by": "the same products: 1"}
    write(args.out, "any_decoder", rows, plot, **setting)


if __name__ == "__main__":
    run_cli(main)
