"""Share a tokenizer of bytes, rows, and recipes at the size of a test among the tests of fine-tuning."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import helpers
import pytest
from helpers import small_config
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from iha.errors import ROOT
from modeling_iha import IHAConfig
from sft import make_tokenizer


TEMPLATES = ROOT / "sft" / "chat_templates"
# A base whose longest wavelength is beyond the rows of these tests, for the small models of helpers.py.
LONG_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# SmolLM2-Instruct's own template, as its published tokenizer holds it.
SMOLLM2_STOCK_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(special=make_tokenizer.SPECIAL) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte and each special token."""
    tokenizer = make_tokenizer.byte_tokenizer(special)
    tokenizer.chat_template = SMOLLM2_STOCK_TEMPLATE
    return tokenizer


def byte_config(**fields) -> IHAConfig:
    """Return the small config of helpers.py for `byte_tokenizer` and the rows of these tests."""
    tokenizer = byte_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    return small_config(**{**ids, "rope_parameters": LONG_ROPE, **fields})


def preset_config(name: str = "tiny", **fields) -> IHAConfig:
    """Return a preset for `byte_tokenizer`."""
    tokenizer = byte_tokenizer()
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    return IHAConfig.from_preset(name, **ids, **fields)


def decoder(name: str, **fields) -> PreTrainedModel:
    """Return a plain decoder of Transformers, of two layers, for `byte_tokenizer`."""
    tokenizer = byte_tokenizer()
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": tokenizer.eos_token_id}
    return helpers.decoder(name, **{**ids, "num_hidden_layers": 2, "initializer_range": 0.2, **fields})


def saved(model: PreTrainedModel, directory: Path) -> str:
    """Save a model with `byte_tokenizer`, and return where."""
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return str(directory)


@contextmanager
def at_step(trainer: type, step: int, act: Callable) -> Iterator[None]:
    """Have `act` called with the trainer before the micro-batch of this number in the block."""
    training_step, steps = trainer.training_step, count(1)

    def act_and_step(self, *args, **kwargs):
        if next(steps) == step:
            act(self)
        return training_step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "training_step", act_and_step)
        yield


@contextmanager
def interrupted_at(trainer: type, step: int) -> Iterator[None]:
    """Have the micro-batch of this number raise a KeyboardInterrupt in the block, and expect it."""
    with pytest.raises(KeyboardInterrupt), at_step(trainer, step, Mock(side_effect=KeyboardInterrupt)):
        yield


def with_template(name: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (TEMPLATES / name).read_text(encoding="utf-8")
    return tokenizer


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def training_rows(count: int) -> list[dict]:
    """Return OpenThoughts-114k rows of different lengths, under 100 byte tokens."""
    return [
        {
            "system": "Add.",
            "conversations": [
                {"from": "user", "value": f"{number}+{number}?"},
                {"from": "assistant", "value": f"It is {2 * number}."},
            ],
        }
        for number in range(0, 37 * count, 37)
    ]


def recipe(name: str) -> str:
    return str(ROOT / "sft" / "recipes" / name / "sft.yaml")


def hasten_runs(patch: pytest.MonkeyPatch) -> None:
    """Have a run draw no figure, count no costs for its card and collect no garbage: all take as long as its steps."""
    patch.setattr("iha.card_template._costs", lambda config: None)  # test_model_cards.py looks at them
    patch.setattr("sft.results.draw", lambda points, path: path.touch())
    patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: None))


def one_step(output: Path, **overrides) -> dict:
    """Return arguments of a trainer of TRL that takes a step on a CPU and saves nothing."""
    fields = {"output_dir": str(output), "max_steps": 1, "logging_steps": 1, "save_strategy": "no"}
    return {**fields, "report_to": "none", "use_cpu": True, "bf16": False, **overrides}


def sizes(model: str, rows: str, output: Path, **overrides) -> list[str]:
    """Return overrides that take a recipe to the size of a test; one that is None is left out."""
    values = {
        "model_name_or_path": model,
        "dataset_name": rows,
        "output_dir": output,
        "eval_size": 4,
        "max_length": 128,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "per_device_eval_batch_size": 4,
        "eval_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "use_cpu": "true",
        **overrides,
    }
    return [part for key, value in values.items() if value is not None for part in (f"--{key}", str(value))]
