"""Test that TRL's own trainers and commands, and PEFT, load remote code and train."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import (
    GEOMETRIES,
    PROJECTIONS,
    assert_close,
    random_ids,
    random_model,
    small_config,
    train_mixing,
    uncached_logits,
)
from peft import LoraConfig, get_peft_model
from tiny_sources import tiny_tokenizer
from tiny_training import byte_config, decoder, one_step, saved, write_jsonl
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl.scripts import dpo, grpo

from iha.errors import ROOT
from iha.processes import run_in_clean_process
from modeling_iha import IHAForCausalLM, interleave_heads
from modeling_iha.attention_iha import InterleavedHeadAttention
from sft import make_reasoning_data


WORDS = sorted(word for word in tiny_tokenizer().get_vocab() if word.isalpha())
PREFERENCES = [
    {"prompt": WORDS[i], "chosen": " ".join(WORDS[i : 2 * i + 2]), "rejected": " ".join(WORDS[2 * i : i : -1])}
    for i in range(1, 7)
]

COLUMNS, ROLES = ("prompt", "chosen", "rejected"), ("user", "assistant", "assistant")
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


def words_of(name: str) -> list[str]:
    """Return the words of a recipe of TRL's own command, at the size of a test."""
    values = {"model_name_or_path": "model", "dataset_name": "data", "output_dir": "run", "max_steps": 3}
    values |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "logging_steps": 1, "save_steps": 3}
    values |= {"learning_rate": 1e-3, "bf16": "false"}
    given = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    return ["--config", str(ROOT / "sft/recipes" / name / "trl.yaml"), "--trust_remote_code", "--use_cpu", *given]


def result_of(directory: Path) -> tuple[list[dict], PreTrainedModel]:
    """Return what a run in a directory logged, and the model that it saved."""
    state = json.loads((directory / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    steps = [entry for entry in state["log_history"] if "learning_rate" in entry]
    assert len(steps) == 3 and all(math.isfinite(entry["loss"]) for entry in steps)
    return steps, AutoModelForCausalLM.from_pretrained(directory / "run", trust_remote_code=True)


def assert_every_weight_moved(before: torch.nn.Module, after: torch.nn.Module) -> None:
    trained = dict(after.named_parameters())
    assert not [name for name, value in before.named_parameters() if torch.equal(value, trained[name])]


@pytest.mark.parametrize("by_command", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trl_prefers_answers_by_our_recipe(by_command, tmp_path, monkeypatch):
    """Train an interleaved Llama, whose mixing is far from its start, by `trl dpo` or by what that runs.

    The plain base is another reference.
    """
    model = interleave_heads(decoder("llama"), 2)
    train_mixing(model, 0.5)
    saved(model, tmp_path / "model")
    pairs = [
        {name: [{"role": role, "content": text}] for name, role, text in zip(COLUMNS, ROLES, texts, strict=True)}
        for texts in (("1+1?", "2", "3"), ("2+2?", "4", "22"), ("Who?", "I", "They"), ("Why?", "So", "Not so"))
    ]
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", pairs)
    monkeypatch.chdir(tmp_path)
    if by_command:
        command = [Path(sys.executable).with_name("trl"), "dpo", *words_of("dpo")]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    else:
        dpo.main(*dpo.make_parser().parse_args_and_config(words_of("dpo")))
    steps, trained = result_of(tmp_path)
    # Before the first step the model is its reference.
    assert abs(steps[0]["rewards/chosen"]) < 1e-5 < 1e-3 < abs(steps[-1]["rewards/chosen"])
    assert type(trained).__name__ == "InterleavedLlamaForCausalLM"
    assert_every_weight_moved(model, trained)


def test_trl_learns_from_rewards_by_our_recipe(tmp_path, monkeypatch):
    """Call what `trl grpo` runs. A model with random weights is never right: a second reward is for its text alone."""
    model = random_model(byte_config(**GEOMETRIES["hybrid"], max_position_embeddings=1024))
    saved(model, tmp_path / "model")
    (tmp_path / "data").mkdir()
    make_reasoning_data.main([str(tmp_path / "data" / "train.jsonl"), "--rows", "6", "--prompts"])
    reward = "[sum(map(ord, reply['content'])) % 7 / 7 for (reply,) in completions]"
    (tmp_path / "of_text.py").write_text(f"def reward(completions, **_):\n    return {reward}\n")
    rewards = ("--reward_funcs", "sft.score_reasoning.correctness", "of_text.reward")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sizes = ("--num_generations", "2", "--max_completion_length", "8")
    grpo.main(*grpo.make_parser().parse_args_and_config([*words_of("grpo"), *sizes, *rewards]))
    steps, trained = result_of(tmp_path)
    assert {step["rewards/correctness/mean"] for step in steps} == {0} and abs(steps[0]["kl"]) < 1e-6
    assert any(step["rewards/reward/mean"] > 0 for step in steps)
    assert_every_weight_moved(model, trained)
