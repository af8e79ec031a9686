"""Test that TRL's own trainers of preferences and rewards take a step, and that they and PEFT load remote code."""

import math

import pytest
import torch
from datasets import Dataset
from helpers import (
    EVERY_KIND,
    GEOMETRIES,
    PROJECTIONS,
    assert_close,
    random_ids,
    random_model,
    small_config,
    uncached_logits,
)
from peft import LoraConfig, get_peft_model
from tiny_sources import tiny_tokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
)

from iha_io.checkpoint_io import run_in_clean_process
from modeling_iha import IHAForCausalLM, IHAForSequenceClassification
from modeling_iha.attention_iha import InterleavedHeadAttention


WORDS = sorted(word for word in tiny_tokenizer().get_vocab() if word.isalpha())
PREFERENCES = [
    {"prompt": WORDS[i], "chosen": " ".join(WORDS[i : 2 * i + 2]), "rejected": " ".join(WORDS[2 * i : i : -1])}
    for i in range(1, 7)
]

MIXING = sorted(InterleavedHeadAttention.mixing_modules)


@pytest.fixture(params=["hybrid", "every_kind"])
def directory(request, tmp_path):
    """Save a model: DPO loads its reference policy from the place that the policy came from."""
    config = small_config(eos_token_id=2, **{**GEOMETRIES, "every_kind": EVERY_KIND}[request.param])
    # Weights for which the gradient of a "diff" layer's lambda is no difference of nearly equal sums.
    random_model(config, seed=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


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
    }


def take_a_step(trainer) -> dict:
    """Train one step, in which every parameter must change, and return what it logged."""
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    unchanged = {name for name, value in trainer.model.named_parameters() if torch.equal(value, before[name])}
    assert not unchanged
    logged = trainer.state.log_history[0]
    assert math.isfinite(logged["loss"]) and 0 < logged["grad_norm"] < math.inf
    return logged


def test_dpo_takes_a_step(directory, tmp_path):
    trainer = DPOTrainer(
        model=IHAForCausalLM.from_pretrained(directory),
        args=DPOConfig(**arguments(tmp_path)),
        train_dataset=Dataset.from_list(PREFERENCES),
        processing_class=tiny_tokenizer(),
    )
    assert type(trainer.ref_model) is IHAForCausalLM
    logged = take_a_step(trainer)
    # Before the step the policy is its reference.
    assert logged["loss"] == pytest.approx(math.log(2), abs=1e-6)
    source = IHAForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(value, source[name]) for name, value in trainer.ref_model.state_dict().items())


def test_reward_training_takes_a_step(directory, tmp_path):
    trainer = RewardTrainer(
        model=IHAForSequenceClassification.from_pretrained(directory, num_labels=1),
        args=RewardConfig(**arguments(tmp_path)),
        train_dataset=Dataset.from_list(PREFERENCES),
        processing_class=tiny_tokenizer(),
    )
    logged = take_a_step(trainer)
    assert logged["min_reward"] < logged["max_reward"]


def test_grpo_takes_a_step(directory, tmp_path):
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [float(i) for i in range(len(completions))]

    trainer = GRPOTrainer(
        model=IHAForCausalLM.from_pretrained(directory),
        reward_funcs=reward,
        args=GRPOConfig(**arguments(tmp_path), num_generations=2, max_completion_length=6),
        train_dataset=Dataset.from_list([{"prompt": row["chosen"]} for row in PREFERENCES]),
        processing_class=tiny_tokenizer(),
    )
    logged = take_a_step(trainer)
    assert len(seen) == 4 and logged["reward"] == 1.5
    assert logged["reward_std"] > 0


@pytest.mark.parametrize("directory", ["hybrid"], indirect=True)
def test_trainers_and_adapters_load_remote_code_by_path(directory, tmp_path):
    """Load policy, reference, reward model and adapters in one process: DPO loads the reference itself."""
    tiny_tokenizer().save_pretrained(directory)
    fields = {"target_modules": PROJECTIONS, "modules_to_save": MIXING, "init_lora_weights": False}
    adapted = get_peft_model(IHAForCausalLM.from_pretrained(directory), LoraConfig(task_type="CAUSAL_LM", **fields))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".modules_to_save." in name:
                parameter.mul_(1.5)
    adapted.save_pretrained(tmp_path / "adapter")
    program = """
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

base = AutoModelForCausalLM.from_pretrained(request["model"], trust_remote_code=True)
adapted = [
    PeftModel.from_pretrained(base, request["adapter"]),
    AutoPeftModelForCausalLM.from_pretrained(request["adapter"], trust_remote_code=True),
]
with torch.no_grad():
    logits = [model.eval()(torch.tensor(request["input_ids"])).logits.tolist() for model in adapted]
result = {"adapters": {"logits": logits, "modules": [type(base).__module__]}}
for trainer_class, config_class in ((DPOTrainer, DPOConfig), (RewardTrainer, RewardConfig)):
    arguments = config_class(**request["arguments"], trust_remote_code=True)
    trainer = trainer_class(request["model"], args=arguments, train_dataset=Dataset.from_list(request["rows"]))
    trainer.train()
    models = [trainer.model, *([trainer.ref_model] if trainer_class is DPOTrainer else [])]
    result[trainer_class.__name__] = {
        "loss": trainer.state.log_history[0]["loss"],
        "classes": [type(model).__name__ for model in models],
        "modules": [type(model).__module__ for model in models],
    }
"""
    request = {"model": str(directory), "rows": PREFERENCES, "arguments": arguments(tmp_path)}
    request |= {"adapter": str(tmp_path / "adapter"), "input_ids": random_ids(2, 9).tolist()}
    answer = run_in_clean_process(program, request)
    for logits in answer["adapters"]["logits"]:
        assert_close(torch.tensor(logits), uncached_logits(adapted.eval(), random_ids(2, 9)))
    assert answer["DPOTrainer"]["classes"] == ["IHAForCausalLM"] * 2
    assert answer["DPOTrainer"]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert answer["RewardTrainer"]["classes"] == ["IHAForSequenceClassification"]
    assert math.isfinite(answer["RewardTrainer"]["loss"])
    modules = [module for trainer in answer.values() for module in trainer["modules"]]
    assert all(module.startswith("transformers_modules.") for module in modules)
