"""Run what the launches of test_shared_rows.py have in each of their processes: compare models, then train.

python tests/sft/shared_rows_driver.py PLANS, a JSON list: {"cases": [...], "record": file}, and plans of `train_run`.
"""

import gc
import json
import sys
import warnings
from pathlib import Path


sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]
gc.disable()  # as conftest.py does
if __name__ == "__main__":
    sys.modules["bitsandbytes"] = None  # PEFT would import it, and it Inductor, for seconds

import fake_flash  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from distributed_driver import shard_on_cpu, train_run, whole_gradients  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.functional import cross_entropy, pad  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: E402

from modeling_iha import IHAConfig, IHAForCausalLM, interleave_heads, pair_heads  # noqa: E402
from sft.sequence_parallel import piece, shared_rows  # noqa: E402


TOKENS = 64
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
DOCUMENTS = {"one": [TOKENS], "packed": [5, 17, 2, 30, 10], "short": [1] * 3 + [13] + [3] * 16}


def of_kind(kinds, window: int | None, **fields) -> IHAForCausalLM:
    types = {"layer_types": "sliding_attention", "sliding_window": window} if window else {}
    return IHAForCausalLM(IHAConfig(**{**SIZES, **types, "attention_kinds": kinds, "use_qk_norm": True, **fields}))


def decoder(name: str, **fields):
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**{**SIZES, **fields}), attn_implementation="sdpa")


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "use_sliding_window": True}
# Name -> a model, for a window of its layers.
MODELS = {
    "iha": lambda window: of_kind("iha", window, num_pseudo_heads=2),
    "iha, P = 4": lambda window: of_kind("iha", window, num_pseudo_heads=4),
    "iha, all heads": lambda window: of_kind("iha", window, num_pseudo_heads=2, pseudo_collapse="all_heads"),
    "paired heads": lambda window: of_kind("paired_heads", window, num_pseudo_heads=2),
    "diff_v2": lambda window: of_kind("diff_v2", window),
    "knocking heads": lambda window: of_kind("knocking_heads", window),
    "mha": lambda window: of_kind("mha", window),
    "iha and mha": lambda window: of_kind(["iha", "mha"], window, num_pseudo_heads=2),
    "llama": lambda window: interleave_heads(decoder("llama"), 2, None, window),
    "llama, one layer": lambda window: interleave_heads(decoder("llama"), 4, [1], window),
    "llama, paired": lambda window: pair_heads(decoder("llama"), 2, sliding_window=window),
    "qwen3": lambda window: interleave_heads(decoder("qwen3", num_key_value_heads=2), 2, None, window),
    "qwen3 with windows, one layer": lambda _: interleave_heads(decoder("qwen3", **SLIDING), 2, [0]),
}


def model_of(case: dict):
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model = MODELS[case["model"]](case["window"])
    for weight in model.parameters():  # the mixing, and norms, leave their start
        weight.data += 0.02 * torch.randn_like(weight)
    model = model.double().train()
    if "checkpointing" in case["how"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case["how"] == "flash":
        model.set_attn_implementation("flash_attention_2")
    model.config.recompute_virtual_tokens = case["how"] == "recompute"
    return model


def whole_batch(lengths: list[int]) -> dict:
    """Return what TRL's collator makes of one row of documents."""
    torch.manual_seed(1)
    ids = torch.randint(SIZES["vocab_size"], (1, TOKENS))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = ids.masked_fill((positions == 0) | (torch.rand(1, TOKENS) < 0.3), -100)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(lengths)}
    return {"input_ids": ids, "position_ids": positions, "labels": labels, **lengths}


def step(model, batch: dict, size: int = 1) -> dict[str, torch.Tensor]:
    """Return the summed loss, the logits and the gradients of a step, over all `size` processes of a row."""
    batch = dict(batch)
    labels = batch.pop("labels")
    shifted = batch.pop("shift_labels", pad(labels[:, 1:], (0, 1), value=-100))
    logits = model(**batch, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum", ignore_index=-100)
    (loss * size).backward()  # FSDP takes the mean over processes
    results = {"loss": loss.detach().clone(), "logits": logits.detach(), **whole_gradients(model)}
    if size > 1:
        dist.all_reduce(results["loss"])
        parts = [torch.empty_like(results["logits"]) for _ in range(size)]
        dist.all_gather(parts, results["logits"].contiguous())
        results["logits"] = torch.cat(parts, dim=1)
    return results


def furthest(case: dict) -> float:
    """Return the largest difference of a shared row from one process, relative to the largest entry of a tensor."""
    batch = whole_batch(DOCUMENTS[case["documents"]])
    expected = step(model_of(case), batch)
    model, size = model_of(case), dist.get_world_size()
    is_sharded = "fsdp" in case["how"]
    if is_sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    core = "flash_attention_2" if case["how"] == "flash" else "sdpa_in_blocks"
    with shared_rows(core, dist.group.WORLD):
        actual = step(model, piece(batch, dist.get_rank(), size), size)
    for name, value in actual.items():
        if name not in ("loss", "logits") and not is_sharded:
            dist.all_reduce(value)
            value /= size
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - each).abs().max() / each.abs().max()) for name, each in expected.items())


def compare_models(plan: dict) -> None:
    record = []
    patch = pytest.MonkeyPatch()
    fake_flash.install(patch)
    for case in plan["cases"]:
        try:
            record.append(furthest(case))
        except Exception as error:  # the test shows it
            record.append(f"{type(error).__name__}: {error}")
    patch.undo()
    if dist.get_rank() == 0:
        Path(plan["record"]).write_text(json.dumps(record), encoding="utf-8")


def run_plans(plans: list[dict]) -> None:
    torch.set_num_threads(1)
    shard_on_cpu()
    dist.init_process_group("gloo")
    for plan in plans:
        (train_run if "arguments" in plan else compare_models)(plan)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    run_plans(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
