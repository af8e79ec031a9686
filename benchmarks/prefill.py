"""Measure the prefill of long inputs by small models of five layers (heads of 64, fp32, logits of the last token).

The models have four sliding "iha" layers and a global "mha" layer, four sliding "mha" layers and a global one, or five
global "mha" layers. The window is the same at every length.

example: python -m benchmarks.prefill --tokens 4096 8192 16384 32768 65536
"""

from collections.abc import Callable

import torch

from benchmarks.harness import arguments, causal_lm, extra_bytes, inference, medians, ratios, report, write
from kinds.model_cost import head, model
from modeling_iha import IHAConfig


BASE = "5 mha"
LOCAL_GLOBAL = ["sliding_attention"] * 4 + ["full_attention"]
FORMS = {
    "4 iha + 1 mha": {"attention_kinds": ["iha"] * 4 + ["mha"], "layer_types": LOCAL_GLOBAL},
    "4 local mha + 1 mha": {"attention_kinds": "mha", "layer_types": LOCAL_GLOBAL},
    BASE: {"attention_kinds": "mha"},
}


def config_of(form: str, heads: int, pseudo_heads: int, window: int) -> IHAConfig:
    sizes = {"hidden_size": 64 * heads, "num_attention_heads": heads, "num_key_value_heads": heads}
    window = {"sliding_window": window} if "layer_types" in FORMS[form] else {}
    sizes = {**sizes, "num_pseudo_heads": pseudo_heads, "num_hidden_layers": 5}
    return IHAConfig.from_preset("tiny", **sizes, **FORMS[form], **window)


def prepare(form: str, tokens: int, *sizes: int) -> Callable[[], None]:
    language_model = causal_lm(config_of(form, *sizes))
    input_ids = torch.randint(256, (1, tokens))
    return inference(lambda: language_model(input_ids=input_ids, logits_to_keep=1, use_cache=False))


def main() -> None:
    parser = arguments(__doc__, [4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--heads", type=int, default=1, help="heads of 64 (1)")
    parser.add_argument("--pseudo-heads", type=int, default=2, help="number of pseudo-heads (2)")
    parser.add_argument("--window", type=int, default=512, help="window in tokens (512)")
    args = parser.parse_args()
    sizes = (args.heads, args.pseudo_heads, args.window)
    rows = []
    for tokens in args.tokens:
        # Beyond 16384 tokens a run takes up to a minute.
        repeats = args.repeats if tokens <= 16384 else 1
        seconds = medians({form: prepare(form, tokens, *sizes) for form in FORMS}, repeats)
        products = {}
        for form in FORMS:
            config = config_of(form, *sizes)
            products[form] = model(config, tokens).prefill - head(config, tokens).prefill
        rows.append(
            {
                "tokens": tokens,
                "seconds": seconds,
                "ratios": ratios(seconds, BASE),
                "predicted": ratios(products, BASE),
            }
        )
        report(rows[-1])
    longest = max(args.tokens)
    extra = {form: extra_bytes(prepare, (form, longest, *sizes), (form, longest // 32, *sizes)) for form in FORMS}
    memory = {f"memory: {name}": ratio for name, ratio in ratios(extra, BASE).items()}
    row = next(row for row in rows if row["tokens"] == longest)
    row.update(extra_bytes=extra, ratios={**row["ratios"], **memory})
    print(f"{longest} tokens, extra bytes: {extra}", flush=True)
    panels = {
        "seconds": lambda row: row["seconds"],
        f"time / {BASE}": lambda row: {
            **row["ratios"],
            **{f"{name}, predicted": value for name, value in row["predicted"].items()},
        },
    }
    setting = {"heads": args.heads, "pseudo_heads": args.pseudo_heads, "window": args.window, "dtype": "float32"}
    write(args.out, "prefill", rows, "tokens", panels, **setting, predicted_by="multiply-adds")


if __name__ == "__main__":
    main()
