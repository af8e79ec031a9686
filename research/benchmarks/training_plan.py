"""Compare the memory plan of a training run (sft/memory_plan.py) with the peak of a process that trains.

The process takes two steps of AdamW, each of two accumulated rows, with TRL's loss. Each configuration has a process
of its own, which also builds the model.

example: python -m research.benchmarks.training_plan --tokens 1024 4096
"""

from collections.abc import Callable

from iha_io.command_io import run_cli
from research.benchmarks.options import arguments


PARSER = arguments(__doc__, [1024, 4096])
if __name__ == "__main__":
    run_cli(PARSER.parse_args)  # before the imports below, which take seconds

import torch
from trl.kernels import ChunkedLogProbFunction

from modeling_iha import IHAConfig, IHAForCausalLM
from research.benchmarks.harness import PRELOADED, extra_bytes, reported, write


SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1024,
    "vocab_size": 8192,
    "max_position_embeddings": 16384,
}
NARROW = {"hidden_size": 256, "num_key_value_heads": 2}
SCHEDULE = {
    "num_hidden_layers": 4,
    "attention_kinds": ["iha", "mha"],
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 128,
    "num_pseudo_heads": 2,
}
# Fields of a config, and of a Setting of the plan.
FORMS = {
    "mha": ({"attention_kinds": "mha"}, {}),
    "mha, narrow, two groups": ({"attention_kinds": "mha", **NARROW}, {}),
    "mha, checkpointing": ({"attention_kinds": "mha", "num_hidden_layers": 4}, {"checkpointing": True}),
    "P = 2": ({"num_pseudo_heads": 2}, {"attention_form": "virtual"}),
    "P = 4": ({"num_pseudo_heads": 4}, {"attention_form": "virtual"}),
    "P = 4, base": ({"num_pseudo_heads": 4}, {"attention_form": "base"}),
    "P = 4, checkpointing": (
        {"num_pseudo_heads": 4, "num_hidden_layers": 4},
        {"attention_form": "virtual", "checkpointing": True},
    ),
    "schedule": (SCHEDULE, {"attention_form": "virtual"}),
    "schedule, bf16 autocast": (SCHEDULE, {"attention_form": "virtual", "autocast": True}),
}


def config_of(form: str) -> IHAConfig:
    return IHAConfig.from_preset("tiny", **{**SIZES, **FORMS[form][0]}, attn_implementation="sdpa")


def predict(form: str, tokens: int) -> float:
    """Return the bytes of the plan."""
    # The measured processes import this file, and an import at the top would slow each of them.
    from sft.arguments import RunArguments
    from sft.memory_plan import Layout, Setting, count_parameters, estimate

    config = config_of(form)
    setting = {
        "config": config,
        "parameters": count_parameters(config, RunArguments(model_name_or_path=form, dataset_name=form)),
        "layout": Layout(),
        "batch": 1,
        "tokens": tokens,
        "checkpointing": False,
        "offloading": False,
        "attention_form": None,
        "autocast": False,
        "weight_bytes": 4,
        "optimizer": "adamw_torch_fused",
        "on_cpu": True,
    }
    return estimate(Setting(**{**setting, **FORMS[form][1]})).total


def prepare(form: str, tokens: int) -> Callable[[], None]:
    """Return a function that builds the model and trains it."""
    config, options = config_of(form), FORMS[form][1]

    def train() -> None:
        model = IHAForCausalLM(config).train()
        model.base_model.attention_form = options.get("attention_form")
        if options.get("checkpointing"):
            model.activation_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            for _ in range(2):
                ids = torch.randint(0, config.vocab_size, (1, tokens))
                with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
                    hidden = model.base_model(ids, use_cache=False).last_hidden_state[0, :-1]
                    outputs = ("log_probs", "entropy", "is_top1")
                    loss_arguments = (hidden, model.lm_head.weight, None, ids[0, 1:], 1.0, 32768, None, 1.0, outputs)
                    loss = -ChunkedLogProbFunction.apply(*loss_arguments)[0].mean()
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
        "ratios": {f"predicted / measured: {form}": predicted[form] / measured[form] for form in FORMS},
        "predicted": {f"predicted / measured: {form}": 1.0 for form in FORMS},
    }


def main() -> None:
    args = PARSER.parse_args()
    PRELOADED.append("trl.kernels")
    rows = reported(map(measure, args.tokens))
    write(args.out, "training_plan", rows, dtype="float32", predicted_by="sft/memory_plan.py")


if __name__ == "__main__":
    run_cli(main)
