"""Test adapters next to mixing and collapse weights that stay trainable."""

import re
import shlex
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset
from helpers import (
    GEOMETRIES,
    OTHER_KINDS,
    PROJECTIONS,
    assert_close,
    random_ids,
    random_model,
    small_config,
    take_a_step,
)
from mechanism_checks import Mechanism
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_sources import tiny_source
from tiny_training import (
    LONG_ROPE,
    ROOT,
    byte_config,
    byte_tokenizer,
    recipe,
    saved,
    sizes,
    training_rows,
    write_jsonl,
)
from trl import SFTConfig
from trl.scripts import sft as trl_sft

from iha.card_template import render_card
from iha.errors import UserError
from modeling_iha import IHAForCausalLM
from modeling_iha.configuration_iha import OPTIONS_CLASSES
from modeling_iha.modeling_iha import ATTENTION_CLASSES
from sft import train
from sft.arguments import RunArguments
from sft.base_model import lora_config
from sft.trainer import SFTRecipeTrainer


# The modules that `train.py` trains at a separate rate, of each kind.
MODULES = {kind: sorted(attention.mixing_modules) for kind, attention in ATTENTION_CLASSES.items()}
MIXING = MODULES["iha"]


def lora(**overrides) -> LoraConfig:
    """Return adapters on the projections, far from their neutral start, next to trained mixing weights."""
    fields = {"r": 4, "target_modules": PROJECTIONS, "modules_to_save": MIXING, "init_lora_weights": False}
    return LoraConfig(task_type="CAUSAL_LM", **{**fields, **overrides})


def run(**keys) -> RunArguments:
    return RunArguments(model_name_or_path="model", dataset_name="rows", **keys)


def logits_of(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**({"input_ids": random_ids(2, 9)} | inputs)).logits


# Adapters


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("geometry", "use_dora"),
    [("hybrid", False), ("hybrid", True), *((geometry, False) for geometry in ("no_gqa", *OTHER_KINDS))],
)
def test_adapters_train_come_back_and_merge(geometry, use_dora, tmp_path):
    config = small_config(**GEOMETRIES[geometry])
    base = logits_of(random_model(config))
    modules = sorted({module for kind in config.attention_kinds for module in MODULES[kind]})
    model = get_peft_model(random_model(config), lora(use_dora=use_dora, modules_to_save=modules))

    changed = take_a_step(model)
    assert changed == {name for name, _ in model.named_parameters() if "lora_" in name or ".modules_to_save." in name}
    # The lambda vectors of "diff" are parameters of the attention module itself, as in DiffLlama: no adapter trains
    # them.
    parameters = {kind: list(own.values()).count(MIXES) for kind, own in OWN_PARAMETERS.items()}
    in_full = sum(parameters[kind] for kind in config.attention_kinds)
    assert sum(".modules_to_save." in name for name in changed) == in_full
    adapted = logits_of(model)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), base)
    assert (adapted - base).abs().max() > 0.1

    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(random_model(config), tmp_path / "adapter")
    assert torch.equal(logits_of(loaded), adapted)

    merged = model.merge_and_unload()
    assert_close(logits_of(merged), adapted)
    merged.save_pretrained(tmp_path / "merged")
    again, info = IHAForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits_of(again), logits_of(merged))


def test_all_linear_leaves_the_mixing_frozen():
    """Leave the mixing to `modules_to_save`: "all-linear" passes it over, and naming it is rejected."""
    model = get_peft_model(random_model(small_config()), lora(target_modules="all-linear", modules_to_save=None))
    trained = {name.split(".lora_")[0].rpartition(".")[2] for name in take_a_step(model)}
    assert trained == {*PROJECTIONS, "gate_proj", "up_proj", "down_proj"}
    with pytest.raises(ValueError, match="HeadMixing.* is not supported"):
        get_peft_model(random_model(small_config()), lora(target_modules=["q_mix"], modules_to_save=None))


# Commands of cards and documents

COMMAND = re.compile(r"^(?:trl|python -m) .*(?:--use_peft|recipes/lora/).*$", re.MULTILINE)
CARDS = {
    kind: small_config(vocab_size=300, attention_kinds=kind, rope_parameters=LONG_ROPE)
    for kind in ("iha", "mha", "talking_heads", "knocking_heads", "dcmha")
}
DOCUMENTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("docs/SUPPORT.md", "sft/recipes/README.md")}
NAMED = [
    pytest.param(command, config, id=f"{name}-{shlex.split(command)[0]}")
    for name, text, config in (
        *((kind, render_card(config, "smollm2-iha"), config) for kind, config in CARDS.items()),
        *((name, text, CARDS["iha"]) for name, text in DOCUMENTS.items()),
    )
    for command in COMMAND.findall(text)
    # The recipe asks the model for its adapters and its mixing: the cards of other kinds have the same command.
    if command.startswith("trl") or name in ("iha", "mha", *DOCUMENTS)
]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("command", "config"), NAMED)
def test_a_command_that_names_peft_runs_as_written(command, config, tmp_path, monkeypatch):
    """Run the command at the size of a test; its adapters are those of `sft/train.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model, tokenizer = random_model(config), byte_tokenizer()
    model.save_pretrained("smollm2-iha")
    tokenizer.save_pretrained("smollm2-iha")
    (tmp_path / "sft").symlink_to(ROOT / "sft")
    write_jsonl(Path("rows.jsonl"), training_rows(20))
    Path("rows").mkdir()
    messages = [{"role": role, "content": "1+1?"} for role in ("user", "assistant")]
    write_jsonl(Path("rows/train.jsonl"), [{"messages": messages}] * 4)

    size = (
        "--max_steps 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --use_cpu true --report_to none"
    )
    program, _, *arguments = shlex.split(f"{command.replace('$name', 'smollm2-iha')} {size}")
    if program == "trl":
        parsed = trl_sft.make_parser().parse_args_and_config(arguments)
        trl_sft.main(*parsed)
    else:
        train.main(arguments[arguments.index("--config") :])
    [tuned] = Path("tuned").glob("checkpoint-*")
    adapters, expected = LoraConfig.from_pretrained(tuned), lora_config(run(use_peft=True), model)
    assert adapters.modules_to_save == expected.modules_to_save
    targets = [get_peft_model(random_model(config), each).targeted_module_names for each in (adapters, expected)]
    assert targets[0] == targets[1]


# sft/train.py


# How `SFTRecipeTrainer` trains the parameters that a kind has besides its projections: (weight decay, whether they are
# trained next to adapters). The table of sft/recipes/README.md says the same.
MIXES, MATRIX, VECTOR = (0.0, True), (0.1, True), (0.0, False)
LINEAR = (0.1, False)  # they take adapters, as the projections do
OWN_PARAMETERS = {
    "mha": {},
    "iha": dict.fromkeys(("q_mix.weight", "k_mix.weight", "v_mix.weight", "collapse.weight"), MIXES),
    "paired_heads": {},
    "talking_heads": dict.fromkeys(("score_mix.weight", "weight_mix.weight"), MIXES),
    "diff": dict.fromkeys(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"), VECTOR),
    "diff_v2": {"lambda_proj.weight": LINEAR},
    "knocking_heads": dict.fromkeys(("q_map.weight", "k_map.weight", "v_map.weight"), MIXES),
    "dcmha": {
        **dict.fromkeys(("pre_base.weight", "post_base.weight"), MIXES),
        **{
            f"{stage}_{side}.{part}": MATRIX
            for stage in ("pre", "post")
            for side in ("query", "key")
            for part in ("w1.weight", "w2", "gate.weight")
        },
    },
    "hyper_feature": {},
    "hyper": {},
    "simplicial": {},
}


@pytest.mark.parametrize("kind", ATTENTION_CLASSES)
def test_the_weights_of_a_kind_are_declared_and_in_submodules(kind):
    """PEFT adapts and saves modules, so it never trains a parameter of the attention module itself."""
    assert kind in OWN_PARAMETERS, f"add {kind!r} to OWN_PARAMETERS"
    config = Mechanism(kind, getattr(OPTIONS_CLASSES[kind], "example", {})).config(num_hidden_layers=1)
    attention = random_model(config).model.layers[0].self_attn
    bare = [name for name, _ in attention.named_parameters(recurse=False)]
    expected = list(OWN_PARAMETERS["diff"]) if kind == "diff" else []  # of released checkpoints
    assert bare == expected, f"put the weights of {kind!r} into a submodule: {bare}"


@pytest.mark.parametrize("use_peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("kind", "additions"), [*((kind, {}) for kind in ATTENTION_CLASSES), ("mha", {"output_gate": "elementwise"})]
)
def test_what_trains_and_what_decays(kind, additions, use_peft, tmp_path):
    mechanism = Mechanism(kind, getattr(OPTIONS_CLASSES[kind], "example", {}))
    model = random_model(mechanism.config(num_hidden_layers=1, **additions))
    of_kind = OWN_PARAMETERS[kind] | dict.fromkeys(["output_gate.weight"] if additions else [], LINEAR)
    trainer = SFTRecipeTrainer(
        model=model,
        args=SFTConfig(str(tmp_path), learning_rate=1e-3, weight_decay=0.1, use_cpu=True, report_to="none"),
        train_dataset=Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]),
        processing_class=byte_tokenizer(),
        peft_config=lora_config(run(use_peft=use_peft), model),
    )
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    trained = {
        names.pop(id(parameter)).replace(".modules_to_save.default", "").rpartition("layers.0.")[2]: group[
            "weight_decay"
        ]
        for group in trainer.create_optimizer().param_groups
        for parameter in group["params"]
    }
    assert not names  # each in one group
    own = {f"self_attn.{name}": how for name, how in of_kind.items() if how[1] or not use_peft}
    others = {name: decay for name, decay in trained.items() if name not in own}
    assert {name: trained[name] for name in own} == {name: decay for name, (decay, _) in own.items()}
    if use_peft:
        assert set(others.values()) == {0.1} and all("lora_" in name for name in others)
    else:
        assert others == {name: 0.0 if "norm" in name else 0.1 for name in others}
        assert {name.split(".")[1] for name in others if name.startswith("self_attn.")} == set(PROJECTIONS)


def test_a_recipe_with_adapters_ends_in_a_merged_checkpoint(rows_file, in_repository_root, tmp_path):
    tiny, output = saved(random_model(byte_config()), tmp_path / "tiny"), tmp_path / "run"
    keys = {"learning_rate": 1e-3, "use_peft": "true", "lora_r": 4}
    train.main(["--config", recipe("demo"), *sizes(tiny, rows_file, output, **keys)])
    assert "LoRA adapters of rank 4" in (output / "final" / "README.md").read_text()

    models = [IHAForCausalLM.from_pretrained(path) for path in (tiny, output / "final")]
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    before, after = (dict(model.named_parameters()) for model in models)
    unchanged = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert unchanged == {name for name in before if "norm" in name or "embed_tokens" in name or "lm_head" in name}
    # The final model is the one that was trained: the adapter of the last checkpoint, merged.
    trained = PeftModel.from_pretrained(IHAForCausalLM.from_pretrained(tiny), output / "checkpoint-4")
    assert_close(logits_of(IHAForCausalLM.from_pretrained(output / "final")), logits_of(trained))


def test_adapters_of_a_model_without_mixing_weights():
    model = tiny_source("llama")
    config = lora_config(run(use_peft=True, lora_target_modules=["q_proj"]), model)
    assert config.modules_to_save is None and config.target_modules == {"q_proj"}
    with pytest.raises(UserError, match="no module named q_projj"):
        lora_config(run(use_peft=True, lora_target_modules=["q_projj"]), model)
    with pytest.raises(UserError, match="lora_modules_to_save: the model has no module named lm_heda"):
        lora_config(run(use_peft=True, lora_modules_to_save=["lm_heda", "embed_tokens"]), model)
    config = lora_config(run(use_peft=True, lora_modules_to_save=["lm_head"]), model)
    assert config.modules_to_save == ["lm_head"]
    assert lora_config(run(), model) is None
