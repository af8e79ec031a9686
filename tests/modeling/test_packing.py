"""Keep packed documents apart: what TRL packs and collates is learned as each document alone.

What could not keep them apart is rejected. test_drawn.py packs every kind of attention on every core.
"""

import fake_flash
import pytest
import torch
from datasets import Dataset
from helpers import (
    FP64,
    assert_gradients_match,
    geometry_model,
    random_ids,
    random_model,
    small_config,
)
from tiny_training import byte_tokenizer, one_step
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import SFTConfig

from iha.errors import UserError
from research.experiments.model_types import CAUSAL, tiny_model
from sft.base_model import check_packing
from sft.trainer import SFTRecipeTrainer


# Documents of different lengths; a sequence of 16 holds several.
LENGTHS = (9, 7, 5, 5, 3, 2, 1)


def document_rows() -> Dataset:
    """Return documents whose first tokens have no label, as prompts have none."""
    documents = random_ids(sum(LENGTHS)).split(LENGTHS)
    return Dataset.from_list(
        [
            {"input_ids": ids.tolist(), "labels": [-100] * (len(ids) // 3) + ids[len(ids) // 3 :].tolist()}
            for ids in documents
        ]
    )


def packed_trainer(model, tmp_path) -> SFTRecipeTrainer:
    sizes = {"max_length": 16, "per_device_train_batch_size": 2, "gradient_checkpointing": False}
    return SFTRecipeTrainer(
        model=model,
        args=SFTConfig(**one_step(tmp_path, packing=True, **sizes)),
        train_dataset=document_rows(),
        processing_class=byte_tokenizer(),
    )


def separate_loss(model, batch) -> torch.Tensor:
    """Return the loss, over all labels, of the documents of a packed batch, each in a separate forward."""
    total, count = 0.0, 0
    boundaries = batch["cu_seq_lens_q"].tolist()
    assert len(boundaries) > 3
    for start, end in zip(boundaries, boundaries[1:]):
        logits = model(batch["input_ids"][:, start:end], use_cache=False).logits
        labels = batch["labels"][0, start + 1 : end]
        total = total + torch.nn.functional.cross_entropy(logits[0, :-1], labels, reduction="sum")
        count += (labels != -100).sum()
    return total / count


@pytest.mark.parametrize(
    ("core", "geometry"), [("sdpa", "hybrid"), ("flash_attention_2", "hybrid"), ("eager", "dcmha")]
)
def test_a_packed_batch_is_learned_as_its_documents_alone(geometry, core, cpu_cores, small_blocks, tmp_path):
    model = geometry_model(geometry, core, torch.float64).train()
    trainer = packed_trainer(model, tmp_path)
    check_packing(model, trainer.args)
    losses, gradients = [], []
    batch = next(iter(trainer.get_train_dataloader()))
    for loss_of in (lambda: trainer.compute_loss(model, dict(batch)), lambda: separate_loss(model, batch)):
        model.zero_grad()
        loss = loss_of()
        losses.append(loss.item())
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_gradients_match(*gradients, FP64)


def test_cores_that_are_not_known_to_keep_documents_apart_are_refused(monkeypatch, tmp_path):
    fake_flash.install(monkeypatch)
    model, args = random_model(small_config()), SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    ALL_ATTENTION_FUNCTIONS.register("of_somebody", ALL_ATTENTION_FUNCTIONS["sdpa"])
    try:
        for core in ("of_somebody", "paged|sdpa"):
            model.config._attn_implementation = core
            check_packing(model, args)
            for keys in ({"packing": True}, {"padding_free": True}):
                with pytest.raises(UserError, match="is not known to keep documents apart"):
                    check_packing(model, SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **keys))
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["of_somebody"]


@pytest.mark.parametrize(("name", "are_apart"), [("llama", True), ("qwen3_moe", True), ("opt", False)])
def test_a_model_that_joins_packed_documents_is_refused(name, are_apart, tmp_path):
    """Ask the model: Transformers' code of some types does not read documents from positions, on any core."""
    model = tiny_model(name, CAUSAL)
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, packing=True)
    if are_apart:
        check_packing(model.train(), args)
        assert model.training
    else:
        with pytest.raises(UserError, match=f"would attend to one another in this '{name}' model"):
            check_packing(model, args)
