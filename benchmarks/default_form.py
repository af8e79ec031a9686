"""Compare the default form of an "iha" layer with the stock form, SDPA on the virtual sequence, for one attention
module with the same weights: a forward, a training step (forward and backward), and one token after N cached ones.
Width 512, 8 heads, fp32, no padding; with one thread and with all threads.

example: python -m benchmarks.default_form --tokens 512 2048 --pseudo-heads 2 4 8 --batch 1 4
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for runs by path: see CONTRIBUTING.md

from benchmarks.cost import attention
from benchmarks.decode import cache_of, one_token
from benchmarks.harness import Attention, arguments, inference, medians, report, training, write


WINDOW = {"layer_types": "sliding_attention"}
PASSES = ("forward", "training", "decoding")


def chosen(module: Attention, states: torch.Tensor, part: str) -> str:
    """The name of the form that the default takes."""
    cache = None
    if part == "decoding":
        cache, states = cache_of(*torch.zeros(2, states.shape[0], 8, states.shape[1], 1)), states[:, :1]
    with torch.set_grad_enabled(part == "training"):
        (mask,) = module.model.create_masks(states, None, cache, None).values()
    return "sdpa" if mask.attention_form is None else mask.attention_form.__name__


def prepare(module: Attention, states: torch.Tensor, part: str) -> Callable[[], None]:
    if part == "training":
        return training(module, [states.clone()], module.leaves())
    if part == "forward":
        return inference(module, states)
    cache = cache_of(*torch.randn(2, states.shape[0], 8, states.shape[1], 64))
    token = states[:, :1]
    return torch.no_grad()(one_token(module.attend(token, cache), token, cache))


def predicted(module: Attention, tokens: int, part: str, form: str) -> float:
    """Multiply-adds of the default over those of SDPA."""
    config = module.model.config
    field = {"forward": "prefill", "training": "training", "decoding": "decode"}[part]
    default, sdpa = (
        getattr(attention(config, "iha", config.layer_types[0], tokens, cost_form), field)
        for cost_form in ("sdpa" if form == "sdpa" else "collapse_first", "sdpa")
    )
    return default / sdpa


def measure(threads: int, tokens: int, pseudo_heads: int, batch: int, window: int | None, part: str, repeats: int):
    torch.set_num_threads(threads)
    fields = {"num_pseudo_heads": pseudo_heads} | ({} if window is None else {**WINDOW, "sliding_window": window})
    modules = {name: Attention(form, **fields) for name, form in (("default", None), ("sdpa", "virtual"))}
    modules["default"].load_state_dict(modules["sdpa"].state_dict())
    states = torch.randn(batch, tokens, 512)
    runs = {name: prepare(module, states, part) for name, module in modules.items()}
    # Short runs are noisy, and a run of 16384 virtual tokens takes up to a minute.
    if part != "decoding" and tokens * pseudo_heads * batch > 8192:
        repeats = 1
    else:
        repeats *= max(1, (4096 if part == "decoding" else 1024) // tokens)
    seconds = medians(runs, repeats)
    form = chosen(modules["default"], states, part)
    return {
        "threads": threads,
        "tokens": tokens,
        "pseudo_heads": pseudo_heads,
        "batch": batch,
        "window": window,
        "pass": part,
        "form": form,
        "seconds": seconds,
        "ratios": {"default / sdpa": seconds["default"] / seconds["sdpa"]},
        "predicted": {"default / sdpa": predicted(modules["default"], tokens, part, form)},
    }


def main() -> None:
    parser = arguments(__doc__, [64, 256, 512, 2048])
    parser.add_argument(
        "--pseudo-heads", type=int, nargs="+", default=[2, 4, 8], help="numbers of pseudo-heads ([2, 4, 8])"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="batch sizes ([1, 4])")
    parser.add_argument(
        "--window", type=int, nargs="+", default=[64], help="windows of sliding layers, in tokens ([64])"
    )
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads (one, and one for each core)")
    parser.add_argument("--longest", type=int, default=16384, help="virtual tokens of the largest batch (16384)")
    args = parser.parse_args()
    counts = args.threads or list(dict.fromkeys((1, os.cpu_count())))
    rows = []
    for threads in counts:
        for tokens in args.tokens:
            for pseudo_heads in args.pseudo_heads:
                for batch in args.batch:
                    if tokens * pseudo_heads * batch > args.longest:
                        continue
                    for window in (None, *(window for window in args.window if window < tokens)):
                        for part in PASSES if window is None else PASSES[:2]:
                            row = measure(threads, tokens, pseudo_heads, batch, window, part, args.repeats)
                            rows.append(row)
                            report(row)

    def panel(threads: int, part: str):
        def lines(row: dict) -> dict:
            if (row["threads"], row["pass"], row["window"]) != (threads, part, None):
                return {}
            return {f"P = {row['pseudo_heads']}, batch {row['batch']}": row["ratios"]["default / sdpa"]}

        return lines

    panels = {f"default / SDPA, {part}, threads: {n}": panel(n, part) for n in counts for part in PASSES}
    write(
        args.out, "default_form", rows, "tokens", panels, dtype="float32", threads=counts, predicted_by="multiply-adds"
    )


if __name__ == "__main__":
    main()
