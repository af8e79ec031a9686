"""Test that TRL's own trainers of preferences and rewards take a step, and that they and PEFT load remote code."""

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import EVERY_KIND, PROJECTIONS, assert_close, random_ids, random_model, small_config, uncached_logits
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from tiny_sources import tiny_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer

from modeling_iha import IHAForCausalLM
from modeling_iha.attention_iha import InterleavedHeadAttention


WORDS = sorted(word for word in tiny_tokenizer().get_vocab() if word.isalpha())
PREFERENCES = Dataset.from_list(
    [
        {"prompt": WORDS[i], "chosen": " ".join(WORDS[i : 2 * i + 2]), "rejected": " ".join(WORDS[2 * i : i : -1])}
        for i in range(1, 7)
    ]
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Save a model of every kind: trainers load the policy and its reference from one place."""
    directory = tmp_path_factory.mktemp("model")
    # Weights for which the gradient of a "diff" layer's lambda is no difference of nearly equal sums.
    random_model(small_config(eos_token_id=2, **EVERY_KIND), seed=1).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def not_installed(monkeypatch):
    """Have Transformers know the checkpoint's own classes only, as where `modeling_iha` is not installed."""
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "iha")


def arguments(tmp_path) -> dict:
    return {
        "output_dir": str(tmp_path / "output"),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "trust_remote_code": True,
    }


def take_a_step(trainer, name) -> dict:
    """Train one step, in which every parameter must change, and return what it logged."""
    assert type(trainer.model).__name__ == name and type(trainer.model).__module__.startswith("transformers_modules.")
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    unchanged = {name for name, value in trainer.model.named_parameters() if torch.equal(value, before[name])}
    assert not unchanged
    logged = trainer.state.log_history[0]
    assert math.isfinite(logged["loss"]) and 0 < logged["grad_norm"] < math.inf
    return logged


def test_dpo_takes_a_step(directory, tmp_path):
    trainer = DPOTrainer(str(directory), args=DPOConfig(**arguments(tmp_path)), train_dataset=PREFERENCES)
    assert type(trainer.ref_model) is type(trainer.model)
    logged = take_a_step(trainer, "IHAForCausalLM")
    # Before the step the policy is its reference.
    assert logged["loss"] == pytest.approx(math.log(2), abs=1e-6)
    source = IHAForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(value, source[name]) for name, value in trainer.ref_model.state_dict().items())


def test_reward_training_takes_a_step(directory, tmp_path):
    trainer = RewardTrainer(str(directory), args=RewardConfig(**arguments(tmp_path)), train_dataset=PREFERENCES)
    logged = take_a_step(trainer, "IHAForSequenceClassification")
    assert logged["min_reward"] < logged["max_reward"]


def test_grpo_takes_a_step(directory, tmp_path):
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [float(i) for i in range(len(completions))]

    trainer = GRPOTrainer(
        str(directory),
        reward_funcs=reward,
        args=GRPOConfig(**arguments(tmp_path), num_generations=2, max_completion_length=6),
        train_dataset=PREFERENCES.select_columns("prompt"),
    )
    logged = take_a_step(trainer, "IHAForCausalLM")
    assert len(seen) == 4 and logged["reward"] == 1.5
    assert logged["reward_std"] > 0


def test_adapters_load_remote_code_by_path(directory, tmp_path):
    fields = {"target_modules": PROJECTIONS, "modules_to_save": sorted(InterleavedHeadAttention.mixing_modules)}
    config = LoraConfig(task_type="CAUSAL_LM", **fields, init_lora_weights=False)
    adapted = get_peft_model(IHAForCausalLM.from_pretrained(directory), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".modules_to_save." in name:
                parameter.mul_(1.5)
    adapted.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    assert type(base).__module__.startswith("transformers_modules.")
    for model in (
        PeftModel.from_pretrained(base, tmp_path),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True),
    ):
        with torch.no_grad():
            logits = model.eval()(random_ids(2, 9)).logits
        assert_close(logits, uncached_logits(adapted.eval(), random_ids(2, 9)))
