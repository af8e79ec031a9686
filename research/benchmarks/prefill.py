"""Measure the prefill of long inputs by small models of five layers (heads of 64, fp32, logits of the last token).

The models have four sliding "iha" layers and a global "mha" layer, four sliding "mha" layers and a global one, or five
global "mha" layers. The window is the same at every length.

example: python -m research.benchmarks.prefill --tokens 4096 8192 16384 32768 65536
"""

from collections.abc import Callable

import torch

from iha.errors import run_cli
from iha.model_cost import head, model
from modeling_iha import IHAConfig
from research.benchmarks.harness import CONTEXT, causal_lm, extra_bytes, inference, medians, ratios, reported, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [4096, 8192, 16384, 32768, 65536])


BASE = "5 mha"
HEADS = 1
PSEUDO_HEADS = 2
WINDOW = 512
LOCAL_GLOBAL = ["sliding_attention"] * 4 + ["full_attention"]
# In the order, and so the colours, of research/experiments/first_screen.py.
FORMS = {
    BASE: {"attention_kinds": "mha"},
    "4 local mha + 1 mha": {"attention_kinds": "mha", "layer_types": LOCAL_GLOBAL},
    "4 iha + 1 mha": {"attention_kinds": ["iha"] * 4 + ["mha"], "layer_types": LOCAL_GLOBAL},
}


def config_of(form: str) -> IHAConfig:
    sizes = {"hidden_size": 64 * HEADS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    window = {"sliding_window": WINDOW} if "layer_types" in FORMS[form] else {}
    sizes = {**sizes, "num_pseudo_heads": PSEUDO_HEADS, "num_hidden_layers": 5}
    return IHAConfig.from_preset("tiny", max_position_embeddings=CONTEXT, **sizes, **FORMS[form], **window)


def prepare(form: str, tokens: int) -> Callable[[], None]:
    language_model = causal_lm(config_of(form))
    input_ids = torch.randint(256, (1, tokens))
    return inference(lambda: language_model(input_ids=input_ids, logits_to_keep=1, use_cache=False))


def measure(tokens: int, repeats: int) -> dict:
    # Beyond 16384 tokens a run takes up to a minute.
    seconds = medians({form: prepare(form, tokens) for form in FORMS}, repeats if tokens <= 16384 else 1)
    configs = {form: config_of(form) for form in FORMS}
    products = {form: model(each, tokens).prefill - head(each, tokens).prefill for form, each in configs.items()}
    return {"tokens": tokens, "seconds": seconds, "ratios": ratios(seconds, BASE), "predicted": ratios(products, BASE)}


def main() -> None:
    args = PARSER.parse_args()
    rows = reported(measure(tokens, args.repeats) for tokens in args.tokens)
    row = max(rows, key=lambda row: row["tokens"])
    longest = row["tokens"]
    extra = {form: extra_bytes(prepare, (form, longest), (form, longest // 32)) for form in FORMS}
    row.update(extra_bytes=extra, ratios={**row["ratios"], **ratios(extra, BASE, "memory: ")})
    print(f"{longest} tokens, extra bytes: {extra}", flush=True)
    setting = {"heads": HEADS, "pseudo_heads": PSEUDO_HEADS, "window": WINDOW, "dtype": "float32"}
    write(args.out, "prefill", rows, **setting, predicted_by="multiply-adds")


if __name__ == "__main__":
    run_cli(main)
