"""Test that TRL's own trainers of preferences and rewards, and PEFT, load remote code and take a step."""

import math

import pytest
import torch
from helpers import (
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
from tiny_training import one_step

from iha.processes import run_in_clean_process
from modeling_iha import IHAForCausalLM
from modeling_iha.attention_iha import InterleavedHeadAttention


WORDS = sorted(word for word in tiny_tokenizer().get_vocab() if word.isalpha())
PREFERENCES = [
    {"prompt": WORDS[i], "chosen": " ".join(WORDS[i : 2 * i + 2]), "rejected": " ".join(WORDS[2 * i : i : -1])}
    for i in range(1, 7)
]

MIXING = sorted(InterleavedHeadAttention.mixing_modules)


def test_trainers_and_adapters_load_remote_code_by_path(tmp_path):
    """Load policy, reference, reward model and adapters in one process: DPO loads the reference itself."""
    directory = tmp_path / "model"
    random_model(small_config(eos_token_id=2, **GEOMETRIES["hybrid"])).save_pretrained(directory)
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
    request = {"model": str(directory), "rows": PREFERENCES}
    request["arguments"] = one_step(tmp_path / "output", per_device_train_batch_size=4, learning_rate=1e-3)
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
