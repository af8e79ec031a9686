"""Test that a step is counted as it is, and that a run that cannot fit is refused before its rows are read."""

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from helpers import random_model
from tiny_training import byte_config, decoder, recipe, sizes
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils
from trl import SFTConfig
from trl.trainer.utils import add_fused_lm_head

from iha.errors import UserError
from iha.step_memory import Counter, StepMemory, one_document
from modeling_iha import interleave_heads
from sft import memory_plan, train
from sft.arguments import RecipeParser
from sft.base_model import lora_config
from sft.memory_plan import plan


pytestmark = pytest.mark.usefixtures("in_repository_root")


def parsed(**keys):
    arguments = sizes("model", "rows", "out", **{"max_length": 64, **keys})
    return RecipeParser(SFTConfig, "").parse(["--config", recipe("demo"), *arguments])


def counted(model: torch.nn.Module, args: SFTConfig) -> int:
    """Return the peak of two real steps, counted as those of a plan."""
    model.train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    optimizer, counter = torch.optim.AdamW(model.parameters(), fused=True), Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        counter.add(tensor)
    with counter:
        ids = torch.zeros(args.per_device_train_batch_size, args.max_length, dtype=torch.long)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return counter.peak


@pytest.mark.one_of(2)
@pytest.mark.parametrize("autocast", ["false", "true"], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["iha", "llama", "gemma3_text"])
def test_a_step_without_data_takes_what_a_real_one_does(name, autocast):
    """Count a model of this package and two decoders with interleaved heads, one of them with a window."""
    model = random_model(byte_config()) if name == "iha" else interleave_heads(decoder(name), 2)
    _, args = parsed(bf16=autocast)
    planned = plan(model, None, args)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert planned.gradients == pytest.approx(weights, rel=0.02) and planned.weights >= weights
    assert planned.optimizer == pytest.approx(2 * weights, rel=0.02)
    assert all(not parameter.is_meta and parameter.grad is None for parameter in model.parameters())
    assert planned.peak == pytest.approx(counted(model, args), rel=0.05)


def test_rows_with_data_are_asked_for_documents_meanwhile():
    """Plan in one thread while another attends to packed rows."""
    packed, find = torch.tensor([[0, 1, 0, 1, 2]]), masking_utils.find_packed_sequence_indices
    with one_document(), one_document():
        with ThreadPoolExecutor(1) as executor:
            found = executor.submit(lambda: masking_utils.find_packed_sequence_indices(packed)).result()
        with FakeTensorMode():
            assert masking_utils.find_packed_sequence_indices(torch.arange(5)[None]) is None
    assert found.tolist() == [[0, 0, 1, 1, 1]] and masking_utils.find_packed_sequence_indices is find


def test_adapters_and_accumulated_steps_are_counted():
    model = interleave_heads(decoder("llama"), 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def planned(**keys) -> StepMemory:
        run, args = parsed(**keys)
        return plan(model, lora_config(run, model), args)

    plain, longer, accumulated = planned(), planned(max_length=128), planned(gradient_accumulation_steps=2)
    adapters = planned(use_peft="true", lora_r=2)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(value.equal(after[name]) for name, value in before.items())
    assert accumulated.peak - plain.peak == pytest.approx(plain.gradients, rel=0.01)
    assert adapters.gradients < plain.gradients / 4 and adapters.weights > plain.weights
    assert longer.peak > 1.5 * plain.peak and longer.weights == plain.weights


def test_a_run_that_cannot_fit_is_refused(tiny, rows_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "check_memory", memory_plan.check_memory)  # other runs of the tests go without
    monkeypatch.setattr(train, "training_rows", lambda *_: pytest.fail("the rows were read"))
    memory = type("Memory", (), {"available": 1_000_000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(UserError, match=r"The run needs 0\.\d GB on each device and there are 0\.0 GB: set"):
        train.main(["--config", recipe("demo"), *sizes(tiny, rows_file, tmp_path / "run")])
    assert "A step takes 0." in capsys.readouterr().out


def test_hybrid_sharding_keeps_a_share_of_its_shards(tmp_path, monkeypatch, capsys):
    """Two replicas of eight shards keep an eighth on each device, and not a sixteenth."""
    run, args = parsed()
    planned = StepMemory(peak=24 * 10**9, weights=8 * 10**9, gradients=8 * 10**9, optimizer=0)
    monkeypatch.setattr(memory_plan, "plan", lambda *_: planned)
    monkeypatch.setattr(memory_plan, "lora_config", lambda *_: None)
    monkeypatch.setattr(memory_plan, "asks_for_fsdp", lambda args: True)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Namespace(available=10**12))
    monkeypatch.setattr(SFTConfig, "world_size", 16)
    for replicas, expected in ((1, 8 + 16 / 16), (2, 8 + 16 / 8)):
        args.parallelism_config = Namespace(dp_replicate_size=replicas)
        memory_plan.check_memory(None, run, args)
        assert f"A step takes {expected * memory_plan.ALLOCATOR:.2f} GB on each device" in capsys.readouterr().out


def test_a_step_that_cannot_be_counted_is_said_and_not_refused(tiny, tmp_path, capsys):
    arguments = sizes(tiny, "rows", tmp_path / "run", max_length="null")
    memory_plan.main(["--config", recipe("demo"), *arguments])
    assert "what this run takes in memory is not planned" in capsys.readouterr().out
