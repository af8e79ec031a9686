"""Compare a Llama with interleaved heads, `IHAForCausalLM` of the same weights and the plain Llama.

The models have four layers of width 512 with 8 heads in 4 groups, P = 2 and float32 weights. They run a forward pass,
a training step (forward and backward) and one token after N cached ones. Every layer is interleaved, over all tokens
or in a window of 64. The logits of the first two must agree.

example: python -m benchmarks.any_decoder --tokens 512 1024
"""

from collections.abc import Callable

from benchmarks.options import arguments
from common.command_io import run_cli


PARSER = arguments(__doc__, [512, 1024], repeats=5)
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


def models(window: int | None) -> dict[str, torch.nn.Module]:
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
    return {"interleaved": interleaved, BASE: iha, "Llama": plain}


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


def measure(name: str, tokens: int, window: int | None, repeats: int) -> dict:
    runs = {form: prepare(model, name, tokens) for form, model in models(window).items()}
    if name != "training" and not torch.allclose(runs["interleaved"](), runs[BASE](), atol=1e-4):
        raise RuntimeError("The interleaved Llama and IHAForCausalLM compute different logits.")
    seconds = medians(runs, repeats)
    row = {"pass": name, "tokens": tokens, "window": window or 0, "seconds": seconds}
    kept = ratios(seconds, BASE)
    return {**row, "ratios": {f"interleaved / {BASE}": kept[f"interleaved / {BASE}"], **ratios(seconds, "Llama")}}


def plot(table: dict) -> Figure:
    """Plot the time beside `IHAForCausalLM` by pass."""
    found = span(row["ratios"][f"interleaved / {BASE}"] for row in table["rows"])
    message = f"An interleaved Llama takes {found} times as long as {BASE}"

    def of(name: str) -> Callable[[dict], dict]:
        ratio = f"interleaved / {BASE}"
        return lambda row: {f"window {row['window']}": row["ratios"][ratio]} if row["pass"] == name else {}

    return draw(message, table, {f"{name}: time / {BASE} (lower is better)": of(name) for name in PASSES})


def main() -> None:
    args = PARSER.parse_args()
    settings = [(name, tokens, window) for name in PASSES for window in (None, WINDOW) for tokens in args.tokens]
    rows = reported(measure(*setting, args.repeats) for setting in settings)
    setting = {"pseudo_heads": PSEUDO_HEADS, "dtype": "float32", "predicted_by": "the same products: 1"}
    write(args.out, "any_decoder", rows, plot, **setting)


if __name__ == "__main__":
    run_cli(main)
