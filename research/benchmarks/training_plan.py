"""Compare the memory plan of a training run (sft/memory_plan.py) with the peak of a process that trains.

The process takes two steps of AdamW, each of two accumulated rows, with TRL's loss. Each configuration has a process
of its own, which also builds the model.

example: python -m research.benchmarks.training_plan --tokens 256 1024
"""

import tempfile
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from iha.errors import run_cli
from modeling_iha import IHAConfig, interleave_heads
from research.benchmarks.harness import PRELOADED, extra_bytes, ratios, reported, write
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [256, 1024])


SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    # TRL's loss makes room for so many columns, and a process takes what of it is written.
    "vocab_size": 32768,
    "max_position_embeddings": 16384,
}


def schedule(pseudo_heads: int) -> dict:
    """Return the fields of a model in which every other layer has the paper's window of N / (2 P^2), N = 1,024."""
    return {
        "num_pseudo_heads": pseudo_heads,
        "num_key_value_heads": 8,
        "attention_kinds": ["iha", "mha"],
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 1024 // (2 * pseudo_heads**2),
    }


# Model type ("llama", or "iha" with fields of its config), P of interleaved heads, and keys of the recipe.
FORMS: dict[str, tuple[dict | None, int, dict]] = {
    "Llama": (None, 1, {}),
    "Llama, checkpointing": (None, 1, {"gradient_checkpointing": True}),
    "Llama, bf16 weights": (None, 1, {"dtype": torch.bfloat16}),
    "P = 2": (None, 2, {}),
    "P = 4": (None, 4, {}),
    "P = 2, bf16 autocast": (None, 2, {"bf16": True}),
    "IHA, P = 2": ({"num_pseudo_heads": 2, "num_key_value_heads": 8}, 1, {}),
    "IHA, P = 4": ({"num_pseudo_heads": 4, "num_key_value_heads": 8}, 1, {}),
    "IHA, P = H": ({"num_pseudo_heads": 8, "num_key_value_heads": 8}, 1, {}),
    **{
        f"IHA, schedule, P = {name}": (schedule(pseudo_heads), 1, {})
        for name, pseudo_heads in (("2", 2), ("4", 4), ("H", 8))
    },
}


def build(form: str) -> PreTrainedModel:
    fields, pseudo_heads, keys = FORMS[form]
    config = LlamaConfig(**SIZES) if fields is None else IHAConfig.from_preset("tiny", **{**SIZES, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=keys.get("dtype", torch.float32))
    return interleave_heads(model, pseudo_heads) if pseudo_heads > 1 else model


def predict(form: str, tokens: int) -> float:
    """Return the bytes of the plan."""
    # The measured processes import this file, and an import at the top would slow each of them.
    from trl import SFTConfig

    from sft.memory_plan import plan

    keys = {"bf16": False, "gradient_checkpointing": False, **FORMS[form][2]}
    keys.pop("dtype", None)
    sizes = {"max_length": tokens, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    args = SFTConfig(tempfile.gettempdir(), use_cpu=True, report_to="none", **sizes, **keys)
    return plan(build(form), None, args).peak


def prepare(form: str, tokens: int) -> Callable[[], None]:
    """Return a function that builds the model and trains it."""
    from trl.trainer.utils import add_fused_lm_head

    keys = FORMS[form][2]

    def train() -> None:
        model = build(form).train()
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        if keys.get("gradient_checkpointing"):
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            for _ in range(2):
                ids = torch.randint(0, SIZES["vocab_size"], (1, tokens))
                with torch.autocast("cpu", torch.bfloat16, enabled=keys.get("bf16", False)):
                    loss = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def measure(tokens: int) -> dict:
    predicted = {form: predict(form, tokens) for form in FORMS}
    measured = {form: extra_bytes(prepare, (form, tokens), (form, 64)) for form in FORMS}
    return {
        "tokens": tokens,
        "seconds": {},
        "extra_bytes": measured,
        "predicted_bytes": predicted,
        "ratios": {
            **{f"predicted / measured: {form}": predicted[form] / measured[form] for form in FORMS},
            **ratios(measured, next(iter(FORMS))),
        },
        "predicted": {f"predicted / measured: {form}": 1.0 for form in FORMS},
    }


def main() -> None:
    args = PARSER.parse_args()
    PRELOADED.append("trl.kernels")
    rows = reported(map(measure, args.tokens))
    write(args.out, "training_plan", rows, dtype="float32", predicted_by="sft/memory_plan.py")


if __name__ == "__main__":
    run_cli(main)
