"""Compare every attention kind with "mha" by the time of a training step, a forward pass and a decoding step.

It also compares the step's peak memory. The model has two layers, width 512, 8 heads of 64 and a gated FFN of 2048, in
fp32 on one thread.

DCMHA's paper reports 74.5 to 89.2% of the baseline's training speed and 81 to 95% of its inference speed on TPUs, at
widths of 1024 to 4096, where attention is a smaller part of the model (DCMHA, Section 4.4).

example: python -m research.benchmarks.mechanisms --tokens 256 1024
"""

from collections.abc import Callable
from itertools import product

from iha_io.command_io import run_cli
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [256, 1024])
if __name__ == "__main__":
    run_cli(PARSER.parse_args)  # before the imports below, which take seconds

import torch
from transformers import DynamicCache

from kind_facts import all_companions
from kind_facts.model_cost import model
from modeling_iha import IHAConfig
from research.benchmarks.harness import causal_lm, extra_bytes, inference, medians, ratios, reported, write


FORMS = {
    title: {"attention_kinds": kind, **fields}
    for kind, mechanism in all_companions().items()
    if mechanism.cost
    for title, fields in mechanism.forms.items()
}
PARTS = ("training", "forward", "decoding")
SIZES = {
    **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 2048},
    "max_position_embeddings": 8192,
}


def config_of(form: str) -> IHAConfig:
    return IHAConfig.from_preset("tiny", **{**SIZES, **FORMS[form]})


def prepare(form: str, tokens: int, part: str = "training") -> Callable[[], None]:
    """Return a function of no arguments that runs a step of a new model."""
    causal = causal_lm(config_of(form))
    input_ids = torch.randint(256, (1, tokens))
    if part == "forward":
        return inference(lambda: causal(input_ids, use_cache=False, logits_to_keep=1))
    if part == "decoding":
        cache = DynamicCache(config=causal.config)
        inference(lambda: causal(input_ids, past_key_values=cache, logits_to_keep=1))()
        # The cache grows by a token with each step, too little to show in the time.
        return inference(lambda: causal(input_ids[:, :1], past_key_values=cache))

    def step() -> None:
        causal.zero_grad()
        causal.train()(input_ids, labels=input_ids, use_cache=False).loss.backward()

    return step


def measure(tokens: int, part: str, repeats: int) -> dict:
    runs = {form: prepare(form, tokens, part) for form in FORMS}
    seconds = medians(runs, repeats)
    costs = {form: model(config_of(form), tokens) for form in FORMS}
    field = {"training": "training", "forward": "prefill", "decoding": "decode"}[part]
    predicted = {form: getattr(cost, field) for form, cost in costs.items()}
    row = {
        "tokens": tokens,
        "part": part,
        "seconds": seconds,
        "ratios": ratios(seconds, "mha"),
        "predicted": ratios(predicted, "mha"),
    }
    if part == "training":
        row["extra_bytes"] = {form: extra_bytes(prepare, (form, tokens), (form, tokens // 8)) for form in FORMS}
        row["ratios"] |= ratios(row["extra_bytes"], "mha", "memory: ")
    return row


def main() -> None:
    args = PARSER.parse_args()
    rows = reported(measure(tokens, part, args.repeats) for tokens, part in product(args.tokens, PARTS))
    write(args.out, "mechanisms", rows, dtype="float32", predicted_by="multiply-adds")


if __name__ == "__main__":
    run_cli(main)
