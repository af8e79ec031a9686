"""Test what a run rejects, what it records, how it stops, and how it goes on."""

import copy
import json
import math
import os
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers import random_model
from matplotlib.image import imread
from safetensors.torch import load_file
from tiny_training import at_step, byte_config, interrupted_at, recipe, saved, sizes, write_jsonl
from transformers import TrainerState
from trl import SFTConfig, SFTTrainer

from iha.cards import Origin, origin_to_add
from iha.errors import ROOT, UserError, run_cli
from iha.files import read_json, sole_writer
from iha.hub.checkpoint_checks import checkpoint_files
from iha.sources import find_source
from sft import make_model, results, train
from sft.arguments import RecipeParser
from sft.base_model import identify_start
from sft.checkpoints import RECORD, clear_later_checkpoints, newest_whole_checkpoint
from sft.log_figures import CountTokens
from sft.record import FIXED_KEYS, Record, changed_keys, check_goes_on
from sft.trainer import SFTRecipeTrainer


STEPS = 6
NO_EVALUATION = {"eval_size": 0, "eval_strategy": "no", "eval_on_start": "false"}
DRAW = results.draw

pytestmark = pytest.mark.usefixtures("in_repository_root")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """Save a tiny IHA model with a byte tokenizer, next to a card whose metadata is no YAML."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "README.md").write_text("---\nlicense: [apache\n---\n# A model\n")
    return saved(random_model(byte_config(bos_token_id=0)), directory)


def command(model: str, rows: str, output: Path, **overrides) -> list[str]:
    return ["--config", recipe("demo"), *sizes(model, rows, output, **{"max_steps": STEPS, **overrides})]


@pytest.fixture(scope="module")
def whole(tiny, rows_file, tmp_path_factory) -> Path:
    """Run what nothing disturbs for more steps than an epoch has, and return its output directory."""
    output = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        train.main(command(tiny, rows_file, output))
    return output


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def assert_same_run(output: Path, whole: Path):
    """Compare the final weights and the logged losses bit by bit."""
    actual, expected = weights(output / "final"), weights(whole / "final")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    logged, others = (json.loads((run / "loss.json").read_text()) for run in (output, whole))
    assert logged.keys() == others.keys() and all(logged[name] == others[name] for name in ("train", "eval"))


# What no run can have


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("push_to_hub", "true", "push_to_hub is not used here: to publish the result, use iha push"),
        ("ignore_data_skip", "true", "is not used here: a resumed run would repeat rows"),
        ("trust_remote_code", "true", "is not used here: no run executes the code of a checkpoint"),
        ("chat_template_path", "absent", "absent is not a .jinja file"),
        ("resume_from_checkpoint", "absent", "resume_from_checkpoint: there is no directory absent"),
        ("resume_from_checkpoint", "false", "resume_from_checkpoint=false: expected a checkpoint's directory"),
        ("learning_rat", "1", "no key 'learning_rat'; similar: learning_rate"),
        ("eval_size", "0", "eval_strategy and eval_on_start need rows to evaluate on"),
        ("preset", "tiny", "preset and model_name_or_path both say what to start from"),
        ("tokenizer", "absent", "tokenizer: for runs that start from a preset"),
        ("lora_r", "8", "lora_r: without effect, as there are no adapters: set use_peft to true"),
        ("train_sampling_strategy", "group_by_length", "a resumed run would train on other rows: set it to random"),
    ],
)
def test_a_key_without_its_effect_is_refused(tiny, rows_file, tmp_path, monkeypatch, key, value, named):
    monkeypatch.setattr(train, "prepare_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match=named):
        train.main(command(tiny, rows_file, tmp_path / "run", **{key: value}))


@pytest.mark.parametrize(
    "line, named",
    [
        ("dtype: float64", "dtype=float64: expected one of float32, bfloat16, float16"),
        ("push_to_hub: true", "push_to_hub is not used here: to publish the result, use iha push"),
        (
            "eval_strategy: 'no'\neval_on_start: false\nresume_from_checkpoint: false",
            "resume_from_checkpoint=false: expected a checkpoint's directory",
        ),
        (
            "eval_strategy: 'no'\neval_on_start: false\nsave_strategy: 'no'\nload_best_model_at_end: true",
            "load_best_model_at_end: this run does not evaluate",
        ),
    ],
)
def test_a_line_of_a_recipe_without_its_effect_is_refused(line, named, tiny, rows_file, tmp_path):
    keys = [each.partition(":")[0] for each in line.splitlines()]
    text = Path(recipe("demo")).read_text()
    lines = [each for each in text.splitlines() if each.partition(":")[0] not in keys]
    (tmp_path / "recipe.yaml").write_text("\n".join([*lines, line]))
    with pytest.raises(UserError, match=named):
        train.main(["--config", str(tmp_path / "recipe.yaml"), *sizes(tiny, rows_file, tmp_path / "run", eval_size=0)])


def test_a_recipe_may_state_the_default_of_a_key_that_is_not_taken(tmp_path):
    (tmp_path / "recipe.yaml").write_text("save_only_model: false\nhub_strategy: every_save\nmodel_revision: main\n")
    words = sizes("model", "rows.jsonl", tmp_path / "run", eval_size=0)
    _, args = RecipeParser("").parse(["--config", str(tmp_path / "recipe.yaml"), *words])
    assert args.save_only_model is False


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("eos_token", "<absent>", "the recipe: .*'<absent>'.* is not found in the vocabulary"),
        ("chat_template_path", "no_system.jinja", "a row: the chat template does not take it: no system"),
    ],
)
def test_what_the_trainer_refuses_is_one_line(key, value, named, tiny, tmp_path):
    turns = [{"role": role, "content": "text"} for role in ("system", "user", "assistant")]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns[1:]}, {"messages": turns}])
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (tmp_path / "no_system.jinja").write_text(refusal + Path("sft/chat_templates/chatml.jinja").read_text())
    value = tmp_path / value if value.endswith("jinja") else value
    with pytest.raises(UserError, match=named):
        train.main(command(tiny, rows, tmp_path / "run", **NO_EVALUATION, **{key: value}))


def test_a_recipe_may_have_aliases(tmp_path, tiny, rows_file):
    (tmp_path / "recipe.yaml").write_text("seed: &number 3\ndata_seed: *number\neval_size: null")
    words = ["--config", str(tmp_path / "recipe.yaml"), *sizes(tiny, rows_file, tmp_path, eval_size=None)]
    run, args = RecipeParser("").parse(words)
    assert (args.data_seed, run.eval_size) == (3, 0)


def test_the_file_of_a_recipe_is_looked_for_before_trl_is_imported(monkeypatch, capsys):
    """Run the command up to an import of its own, which fails here."""
    monkeypatch.setitem(sys.modules, "sft.arguments", None)
    found = {}
    for words in (["--config"], ["--config", "absent/sft.yaml"], ["--config", recipe("demo")]):
        monkeypatch.setattr(sys, "argv", ["sft/train.py", *words])
        with pytest.raises((SystemExit, ImportError)):
            runpy.run_module("sft.train", run_name="__main__")
        found[words[-1]] = capsys.readouterr().err
    assert "argument --config: expected one argument" in found["--config"]
    assert "absent/sft.yaml: no such file here" in found["absent/sft.yaml"]
    assert found[recipe("demo")].endswith("Loading TRL (some seconds)\n")


def test_the_file_of_a_recipe_may_stand_behind_an_equals_sign(tiny, rows_file, tmp_path):
    words = command(tiny, rows_file, tmp_path)
    (run, args), (again, of_one_word) = (
        RecipeParser("").parse(given) for given in (words, [f"--config={words[1]}", *words[2:]])
    )
    assert (run, args.to_dict()) == (again, of_one_word.to_dict())


def test_the_best_weights_need_a_checkpoint_of_each_evaluation(tiny, rows_file, tmp_path):
    keys = {"load_best_model_at_end": "true", "eval_strategy": "steps", "eval_on_start": "false", "eval_steps": 1}
    with pytest.raises(UserError, match="save_steps=2 and eval_steps=1: the best evaluation may have no checkpoint"):
        RecipeParser("").parse(command(tiny, rows_file, tmp_path, **keys))
    for saves in ({"save_steps": 1}, {"save_strategy": "best"}):
        _, args = RecipeParser("").parse(command(tiny, rows_file, tmp_path, **keys, **saves))
        assert args.load_best_model_at_end


def test_a_run_without_a_start_is_refused(tmp_path):
    with pytest.raises(UserError, match="give a checkpoint to start from, or a preset"):
        train.main(["--dataset_name", "rows.jsonl", "--output_dir", str(tmp_path)])
    # Asking the Hub for the data first takes a minute without a network.
    with pytest.raises(UserError, match="There is no preset 'tyny'; similar: tiny. config"):
        train.main(["--preset", "tyny", "--dataset_name", "nobody/nothing", "--output_dir", str(tmp_path)])


# What a run is made of


def test_a_run_does_not_continue_on_another_model_or_other_data(tiny, rows_file, tmp_path):
    shutil.copytree(tiny, tmp_path / "model")
    shutil.copy(rows_file, tmp_path / "rows.jsonl")
    arguments = command(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "run", max_steps=3)
    with interrupted_at(SFTRecipeTrainer, 3):
        train.main(arguments)
    for changed in ("model/model.safetensors", "model/config.json", "rows.jsonl"):
        content = (tmp_path / changed).read_bytes()
        (tmp_path / changed).write_bytes(content + b"\n")
        named = "data" if changed == "rows.jsonl" else "base_model"
        with pytest.raises(UserError, match=f"checkpoint-2 belongs to a run with another {named}"):
            train.main(arguments)
        (tmp_path / changed).write_bytes(content)


def test_a_run_says_which_keys_it_continues_with(whole, tiny, rows_file, tmp_path, capsys):
    keys = {"max_steps": 8, "weight_decay": 0.0, "resume_from_checkpoint": whole / "checkpoint-6"}
    keys |= {"save_steps": 1, "save_total_limit": 3}
    train.main(command(tiny, rows_file, tmp_path / "run", **keys))
    assert (tmp_path / "run" / "checkpoint-7" / RECORD).exists()  # the steps of this run count
    said = capsys.readouterr().out
    assert "this run began with max_steps 6 and continues with 8" in said
    assert "weight_decay" not in said
    assert "output_dir" not in said and (tmp_path / "run" / "checkpoint-8" / RECORD).exists()


@pytest.mark.parametrize(
    "key, value, then",
    [
        ("learning_rate", 0.5, "0.0001"),
        ("adam_beta2", 0.95, "0.999"),
        ("packing", "true", "False"),
        ("data_seed", 3, "None"),
        ("dataset_text_field", "other", "text"),
        ("rope_theta", 20000, "None"),
    ],
)
def test_a_run_does_not_continue_with_what_the_checkpoint_would_not_take(
    key, value, then, whole, tiny, rows_file, tmp_path
):
    keys = {"max_steps": 8, "resume_from_checkpoint": whole / "checkpoint-6", key: value}
    with pytest.raises(UserError, match=f"{key}: the run began with {then} and cannot go on with"):
        train.main(command(tiny, rows_file, tmp_path / "run", **keys))


def test_a_run_does_not_continue_with_other_adapters_and_equal_values_do_not_differ(whole, tmp_path):
    before = read_json(whole / "checkpoint-6" / RECORD, Record)
    assert before["recipe"].keys() >= {*FIXED_KEYS}
    of_adapters = {name for name in before["recipe"] if name.startswith(("lora_", "load_in_", "use_rs", "use_do"))}
    assert of_adapters - {*FIXED_KEYS} == {"lora_dropout", "lora_task_type"}
    now = copy.deepcopy(before)
    now["recipe"] |= {"weight_decay": 0 if before["recipe"]["weight_decay"] == 0 else None, "max_steps": "6"}
    assert not changed_keys(before, now)
    now["recipe"]["lora_target_modules"] = ["q_proj"]
    with pytest.raises(UserError, match="lora_target_modules: the run began with None and cannot go on with"):
        check_goes_on(now, whole / "checkpoint-6")


def test_random_weights_are_the_same_on_another_transformers(monkeypatch):
    run, _ = RecipeParser("").parse(["--preset", "tiny", "--dataset_name", "rows.jsonl", "--output_dir", "run"])
    before = identify_start(train.find_start(run), seed=0)
    monkeypatch.setattr("transformers.configuration_utils.__version__", "5.99.0")
    start = train.find_start(run)
    assert start.config.to_dict()["transformers_version"] == "5.99.0"
    assert identify_start(start, seed=0) == before != identify_start(start, seed=1)


def test_a_run_does_not_continue_with_another_batch_or_before_its_last_checkpoint(whole, tiny, rows_file, tmp_path):
    shutil.copytree(whole / "checkpoint-6", tmp_path / "checkpoint-2")
    from_checkpoint = {"resume_from_checkpoint": tmp_path / "checkpoint-2", "max_steps": 8}
    with pytest.raises(UserError, match="a step has 8 rows, and one of .*checkpoint-2 had 4"):
        train.main(command(tiny, rows_file, tmp_path / "run", **from_checkpoint, gradient_accumulation_steps=2))
    with pytest.raises(UserError, match="seed: the run began with 0 and cannot go on with 1"):
        train.main(command(tiny, rows_file, tmp_path / "run", **from_checkpoint, seed=1))
    shutil.copytree(whole, tmp_path / "again", ignore=shutil.ignore_patterns("final"))
    with pytest.raises(UserError, match="again holds later checkpoints than .*: move checkpoint-6 away"):
        train.main(command(tiny, rows_file, tmp_path / "again", **from_checkpoint))


def test_what_a_stopped_first_save_left_is_removed(tmp_path, capsys):
    """The rotation of checkpoints would keep it, and remove those that are saved after it."""
    (tmp_path / "checkpoint-200").mkdir()
    clear_later_checkpoints(tmp_path, None)
    assert (tmp_path / "checkpoint-200").exists()  # somebody else's
    (tmp_path / RECORD).write_text("{}")
    clear_later_checkpoints(tmp_path, None)
    assert not (tmp_path / "checkpoint-200").exists() and "Removing" in capsys.readouterr().out


def test_checkpoints_of_others_are_left_alone(tiny, rows_file, tmp_path):
    """Begin a run where another tool has left a checkpoint."""
    (tmp_path / "run" / "checkpoint-100").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-100" / "model.safetensors").write_text("theirs")
    train.main(command(tiny, rows_file, tmp_path / "run", max_steps=2, save_total_limit=None, logging_steps=5))
    assert (tmp_path / "run" / "checkpoint-100" / "model.safetensors").read_text() == "theirs"
    # It is shorter than `logging_steps`, and has a curve.
    assert len(json.loads((tmp_path / "run" / "loss.json").read_text())["train"]) == 2


# One run in one directory


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "model-00001-of-00002.safetensors"])
def test_a_run_does_not_write_into_a_model(name, tiny, rows_file, tmp_path, monkeypatch):
    """Refuse the directory before anything is written there, whether the model is whole or not."""
    (tmp_path / name).write_text("{}")
    monkeypatch.setattr(train, "prepare_model", None)
    with pytest.raises(UserError, match=f"holds a model \\({name}\\) and no run: choose another output_dir"):
        train.main(command(tiny, rows_file, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_second_run_in_one_directory_is_refused(tmp_path, monkeypatch):
    arguments = command("absent/model", "absent/rows", tmp_path / "run")
    with sole_writer(tmp_path / "run"):
        with pytest.raises(UserError, match="Another run is writing .*run"):
            train.main(arguments)
        # The other processes of the run that holds the lock.
        entered = []
        for name in "find_start settle_pseudo_heads settle_training_options run_config prepare_tokenizer".split():
            monkeypatch.setattr(train, name, lambda *_: None)
        monkeypatch.setattr(train, "prepare_model", lambda start, config, run, args: entered.append(args.output_dir))
        for name in ("training_rows", "lora_config", "build_trainer", "train"):
            monkeypatch.setattr(train, name, lambda *_: None)
        monkeypatch.setattr(SFTConfig, "process_index", 1)
        train.main(arguments)
        assert entered == [str(tmp_path / "run")]
    assert not (tmp_path / "run").exists()


# Stopping


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_run_stops_before_it_learns_what_is_not_a_number(
    what, whole, tiny, rows_file, tmp_path, monkeypatch, capsys
):
    compute_loss = SFTTrainer.compute_loss

    def fail_in_step_5(self, model, *args, **kwargs):
        loss = compute_loss(self, model, *args, **kwargs)
        if model.training and self.state.global_step == 4:
            if what == "loss":
                return loss * torch.nan
            loss.register_hook(lambda gradient: gradient * torch.inf)
        return loss

    output = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(SFTTrainer, "compute_loss", fail_in_step_5)
        run_cli(lambda: train.main(command(tiny, rows_file, output)))
    assert stopped.value.code == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"Error: Training stopped at step 5: the {what} is ")
    assert f"last good checkpoint is {output / 'checkpoint-4'}." in line
    assert not (output / "final").exists() and not (output / "checkpoint-6").exists()
    assert all(value.isfinite().all() for value in weights(output / "checkpoint-4").values())
    if what == "loss":
        train.main(command(tiny, rows_file, output))
        assert_same_run(output, whole)


def test_an_evaluation_does_not_leave_out_what_is_not_a_number(tiny, rows_file, tmp_path, monkeypatch):
    prediction_step, spoiled = SFTTrainer.prediction_step, []

    def spoil_the_first(self, *args, **kwargs):
        loss, *others = prediction_step(self, *args, **kwargs)
        if not spoiled:
            spoiled.append(loss)
            loss = loss * torch.nan
        return loss, *others

    monkeypatch.setattr(SFTTrainer, "prediction_step", spoil_the_first)
    keys = {"max_steps": 1, "eval_steps": 1, "per_device_eval_batch_size": 2, "save_strategy": "no"}
    train.main(command(tiny, rows_file, tmp_path, eval_on_start="false", eval_strategy="steps", **keys))
    (evaluated,) = json.loads((tmp_path / "loss.json").read_text())["eval"]
    assert math.isnan(evaluated[1])


def test_a_run_without_a_best_evaluation_is_said(tiny, rows_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(SFTTrainer, "prediction_step", lambda *_, **__: (torch.tensor(torch.nan), None, None))
    keys = {"max_steps": 1, "eval_steps": 1, "save_steps": 1, "eval_on_start": "false", "eval_strategy": "steps"}
    train.main(command(tiny, rows_file, tmp_path, load_best_model_at_end="true", **keys))
    assert "there is no checkpoint of the best loss: final/ has the last weights" in capsys.readouterr().out


def test_weights_that_are_not_numbers_are_not_saved(tiny, rows_file, tmp_path, monkeypatch):
    def spoil(self, *_):
        next(self.model.parameters()).data[0] = torch.nan

    monkeypatch.setattr(SFTRecipeTrainer, "_maybe_log_save_evaluate", lambda *_, **__: None)
    monkeypatch.setattr(train, "write_curves", lambda *_: None)
    train_it = SFTRecipeTrainer.train
    monkeypatch.setattr(SFTRecipeTrainer, "train", lambda self, **kwargs: (train_it(self, **kwargs), spoil(self)))
    with pytest.raises(UserError, match="embed_tokens.weight of the model at step 1 holds NaN"):
        train.main(command(tiny, rows_file, tmp_path / "run", max_steps=1, **NO_EVALUATION))
    assert not (tmp_path / "run" / "final").exists()


def test_a_checkpoint_has_no_weights_that_are_not_numbers(tiny, rows_file, tmp_path, monkeypatch):
    # Trainer calls this between the last optimizer's step and the save.
    monkeypatch.setattr(
        SFTRecipeTrainer, "store_flos", lambda self: next(self.model.parameters()).data.fill_(torch.nan)
    )
    with pytest.raises(UserError, match="embed_tokens.weight of the model at step 1 holds NaN"):
        train.main(command(tiny, rows_file, tmp_path / "run", max_steps=1, save_steps=1, **NO_EVALUATION))
    assert not list((tmp_path / "run").glob("checkpoint-*/*"))


def test_a_run_that_ends_early_leaves_no_final_model(tiny, rows_file, tmp_path):
    def stop(trainer):
        trainer.control.should_training_stop = True

    with (
        pytest.raises(UserError, match="after 1 of 6 steps, so .* no final model. Give the same command again"),
        at_step(SFTRecipeTrainer, 1, stop),
    ):
        train.main(command(tiny, rows_file, tmp_path / "run"))
    assert not (tmp_path / "run" / "final").exists()


# Going on


@pytest.mark.parametrize(
    "keys",
    [
        {"packing": "true", "dataset_streaming": "true", **NO_EVALUATION},
        pytest.param({"use_peft": "true", "lora_r": 4, "packing": "true"}, marks=pytest.mark.slow),
    ],
    ids=["streamed", "adapters"],
)
def test_an_interrupted_run_resumes_to_the_same_weights(keys, tiny, rows_file, tmp_path, capsys):
    # A pass over the 8 packed sequences takes 2 steps: the resume is in the third pass.
    keys = {**keys, "max_steps": 5, "lr_scheduler_type": "constant"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.main(command(tiny, rows_file, whole, **keys))
    with interrupted_at(SFTRecipeTrainer, 5):
        train.main(command(tiny, rows_file, stopped, **keys))
    for step in (4, 5):
        train.main(command(tiny, rows_file, stopped, **keys))
        assert f"Resuming from {stopped / f'checkpoint-{step}'}." in capsys.readouterr().out
        assert_same_run(stopped, whole)
        shutil.rmtree(stopped / "final")  # as if killed after the last checkpoint, which lies inside a pass


def test_pretraining_on_a_text(rows_file, tmp_path, monkeypatch):
    """Train a preset on a stream of one document, which is read once for a pass, and count on after a resume."""
    (tmp_path / "train.txt").write_text("All that glisters is not gold. " * 400)
    (tmp_path / "held.txt").write_text("Often have you heard that tøld. " * 20)
    read = []
    monkeypatch.setattr("sft.data._to_text", lambda row, where: read.append(where) or {"text": row["text"]})
    text = {"dataset_streaming": "true", "eval_dataset_name": tmp_path / "held.txt", "eval_strategy": "steps"}
    keys = {**NO_EVALUATION, **text, "packing": "true", "assistant_only_loss": "false", "chat_template_path": None}
    keys |= {
        "preset": "tiny",
        "learning_rate": 0,
        "seed": 3,
        "peak_tflops": 0.5,
    }  # the recipe's own tokenizer is left out with its preset
    arguments = sizes(None, tmp_path / "train.txt", tmp_path / "run", **keys)
    fields = ["--preset-fields", "max_position_embeddings=128"]
    with interrupted_at(SFTRecipeTrainer, 3):
        train.main(["--config", recipe("pretrain"), *arguments, *fields])
    assert len(read) < 20, read  # not a thousand copies for TRL to pack
    for others, named in (
        (["--preset_fields", "max_position_embeddings=256"], "belongs to a run with another base_model, preset tiny"),
        ([*fields, "--seed", "4"], "seed: the run began with 3 and cannot go on with 4"),
    ):
        with pytest.raises(UserError, match=named):
            train.main(["--config", recipe("pretrain"), *arguments, *others])
    train.main(["--config", recipe("pretrain"), *arguments, *fields])
    assert json.loads((tmp_path / "run" / "final" / "config.json").read_text())["max_position_embeddings"] == 128

    make_model.main(["tiny", str(tmp_path / "start"), "--seed", "3", "--set", "max_position_embeddings=128"])
    start, final = (weights(tmp_path / name) for name in ("start", "run/final"))
    assert start.keys() == final.keys() and all(torch.equal(start[name], final[name]) for name in start)
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "| Start | random weights of the preset tiny, SHA-256" in card and "Trained from scratch" in card
    assert "base_model:" not in card and str(tmp_path) not in card
    logged = json.loads((tmp_path / "run" / "loss.json").read_text())
    assert {"eval_bits_per_byte", "tokens_per_second", "model_flops_utilization", "peak_memory_gb"} < logged.keys()
    # The next stage of it is from scratch too, and its card names the run.
    next_stage = {"max_steps": 1, "preset": None, "max_length": 64, **NO_EVALUATION}
    train.main(command(str(tmp_path / "run" / "final"), rows_file, tmp_path / "chat", **next_stage))
    assert origin_to_add(tmp_path / "chat" / "final", "mit", None) == Origin({"license": "mit"})
    card = (tmp_path / "chat" / "final" / "README.md").read_text()
    assert "| Start | run, fingerprint" in card and "Trained from scratch, here from run" in card
    history = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    counts = [entry["num_tokens"] for entry in history if "loss" in entry]
    assert counts == [512, 1024, 1536, 2048]
    assert all(entry["tokens_per_second"] > 0 for entry in history if "loss" in entry)
    # A token takes six FLOPs for each of 90,304 weights of linear layers and, in each of two layers, for mixing 16
    # heads' entries by 48 weights, and for two products of 16 entries in four heads: 256 virtual tokens have
    # 256 * 257 / 2 pairs, which are 257 for each of 128 tokens.
    flops = 6 * (90_304 + 2 * (16 * 48 + 2 * 16 * 4 * 257))
    for entry in (entry for entry in history if "loss" in entry):
        assert entry["model_flops_utilization"] == pytest.approx(entry["tokens_per_second"] * flops / 0.5e12)
    evaluated = [entry for entry in history if "eval_loss" in entry]
    size = len((tmp_path / "held.txt").read_bytes())
    for entry in evaluated:
        bits = entry["eval_loss"] / math.log(2)
        # The end of the text is predicted too, and the first byte of each of up to ten rows is not.
        assert bits < entry["eval_bits_per_byte"] < bits * (size - 9) / (size - 10)
    assert len(evaluated) == 2


def test_a_killed_run_goes_on_to_the_weights_of_an_undisturbed_one(
    whole, tiny, rows_file, tmp_path, capsys, monkeypatch
):
    """Stop a save before its end with half of the optimizer's file, in a directory that a run before had left."""
    output = tmp_path / "run"
    arguments = command(tiny, rows_file, output, save_total_limit=1)

    def leave_marker(trainer):
        (output / "checkpoint-4").mkdir()
        (output / "checkpoint-4" / RECORD).write_text("{}")

    def die(self):
        if (file := output / "checkpoint-4" / "optimizer.pt").exists():
            os.truncate(file, 1000)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), at_step(SFTRecipeTrainer, 3, leave_marker):
        patch.setattr(Accelerator, "wait_for_everyone", die)
        train.main(arguments)
    # The last whole checkpoint goes only after the next is whole.
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    os.utime(output / "checkpoint-2", (4e9, 4e9))  # by a clock that went wrong: steps say which is older
    train.main(arguments)
    out = capsys.readouterr().out
    assert f"Passing over {output / 'checkpoint-4'}: run.json is missing, which is written last." in out
    assert f"Resuming from {output / 'checkpoint-2'}." in out
    assert_same_run(output, whole)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-6"]
    with pytest.raises(UserError, match="final exists: this run has finished"):
        train.main(arguments)
    # Killed after its last checkpoint, which lies inside an epoch.
    shutil.rmtree(output / "final")
    train.main(arguments)
    assert_same_run(output, whole)


def test_the_newest_whole_checkpoint_is_found_by_its_step(tmp_path):
    assert newest_whole_checkpoint(tmp_path) is None
    for name in ("checkpoint-8", "checkpoint-10", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).touch()
    assert newest_whole_checkpoint(tmp_path).name == "checkpoint-10"
    (tmp_path / "checkpoint-10" / RECORD).unlink()
    assert newest_whole_checkpoint(tmp_path).name == "checkpoint-8"


def test_a_schedule_that_counts_evaluations_is_resumed(tiny, rows_file, tmp_path):
    """Its state counts no step before the first evaluation, but the optimizer is there."""
    keys = {"lr_scheduler_type": "reduce_lr_on_plateau", "max_steps": 4, "save_steps": 2}
    keys |= {"eval_on_start": "false", "eval_strategy": "steps", "eval_steps": 4}
    with interrupted_at(SFTRecipeTrainer, 3):
        train.main(command(tiny, rows_file, tmp_path / "run", **keys))
    train.main(command(tiny, rows_file, tmp_path / "run", **keys))
    assert (tmp_path / "run" / "final").is_dir()


def test_the_time_that_is_left_is_logged(monkeypatch):
    """Leave out the time of evaluations: the first step takes 20 s here, and the next two take 25 s each."""
    clock = iter((100.0, 130.0, 190.0))
    monkeypatch.setattr("sft.log_figures.time.monotonic", lambda: next(clock))
    state, logs = TrainerState(max_steps=10, log_history=[{}]), [{"num_tokens": 5}, {"num_tokens": 15}]
    counter = CountTokens()
    counter.on_train_begin(None, state, None)
    for state.global_step, each in zip((1, 3), logs):
        counter.on_evaluate(None, state, None, metrics={"eval_runtime": 10.0})
        counter.on_log(SimpleNamespace(device=torch.device("cpu")), state, None, logs=each)
    assert all(0 < each["peak_memory_gb"] < 1000 for each in logs)
    assert [each["minutes_left"] for each in logs] == [9 * 20 / 60, round(7 * 25 / 60, 1)]


def test_a_loss_that_is_not_plain_has_no_bits_per_byte(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"text {number} " * 20} for number in range(8)])
    keys = {"max_length": 64, "packing": "true", "packing_strategy": "bfd_split", "assistant_only_loss": "false"}
    for loss, has_bits in (({}, True), ({"loss_type": "dft"}, False), ({"label_smoothing_factor": 0.3}, False)):
        arguments = command("unused", tmp_path / "rows.jsonl", tmp_path / "run", eval_size=2, **keys, **loss)
        model = arguments.index("--model_name_or_path")
        arguments[model : model + 2] = ["--preset", "tiny"]
        run, args = RecipeParser("").parse(arguments)
        start = train.find_start(run)
        config = train.run_config(start, run, args)
        tokenizer = train.prepare_tokenizer(start, config, run)
        model = train.prepare_model(start, config, run, args)
        rows = train.training_rows(train.data_of(run, args), run, args, tokenizer)
        trainer = train.build_trainer(run, args, model, tokenizer, None, rows)
        assert (trainer.bits_per_byte is not None) == has_bits


def test_weights_in_half_precision_that_would_not_learn_are_said(tiny, rows_file, tmp_path, capsys):
    short = {"max_steps": 1, **NO_EVALUATION}
    train.main(command(tiny, rows_file, tmp_path / "run", dtype="bfloat16", **short))
    assert "in bfloat16 weights a step below 0.002 times a weight is rounded away" in capsys.readouterr().out
    train.main(command(tiny, rows_file, tmp_path / "adapters", dtype="bfloat16", use_peft="true", **short))
    merged = "merged into bfloat16 weights, where a change below 0.002 times a weight is rounded away"
    assert merged in capsys.readouterr().out
    train.main(command(tiny, rows_file, tmp_path / "other", **short))
    assert "rounded away" not in capsys.readouterr().out


def test_a_checkpoint_without_an_optimizer_of_this_launch_is_refused(whole, tiny, rows_file, tmp_path):
    shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("optimizer.pt", "final"))
    with pytest.raises(UserError, match="checkpoint-6 holds no optimizer for this launch"):
        train.main(command(tiny, rows_file, tmp_path / "run", max_steps=8))


# What a person sees


def test_a_run_leaves_what_it_did(tiny, rows_file, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "draw", DRAW)
    output, base = tmp_path / "run", shutil.copytree(tiny, tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: mit\nbase_model: me/base\n---\n")
    train.main(command(base, rows_file, output, max_steps=4, eval_on_start="false"))
    losses = json.loads((output / "loss.json").read_text())
    assert [step for step, _ in losses["train"]] == [1, 2, 3, 4] and [step for step, _ in losses["eval"]] == [2, 4]
    assert all(0 < losses[f"mixing_change_{part}"][-1][1] < 2 for part in ("queries", "keys", "values", "collapse"))

    card, record = (output / "final" / "README.md").read_text(), json.loads((output / RECORD).read_text())
    for fact in (
        "license: mit",
        "base_model: me/base",
        f"rows.jsonl, SHA-256 {record['data']['sha256']}",
        f"fingerprint {record['base_model']['fingerprint']}",
        f"torch {record['versions']['torch']}",
        "| `learning_rate` | 0.0001 |",
        f"| Held-out loss, first and last logged | {losses['eval'][0][1]:.4f}, {losses['eval'][-1][1]:.4f} |",
        "![Curves of the run](curves.png)",
    ):
        assert fact in card, fact
    assert not any(f"`{name}`" in card for name in ("report_to", "debug", "disable_tqdm"))
    assert str(tmp_path) not in card and str(Path(rows_file).parent) not in card
    names, others = checkpoint_files(find_source(output / "final"))
    assert set(names) == {path.name for path in (output / "final").iterdir()} and others == []
    assert (output / "final" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (output / "README.md").exists() and not (output / ".lock").exists()


def test_the_curves_fill_their_picture(tmp_path, monkeypatch):
    save, figures = results.plots.save_plot, []
    monkeypatch.setattr(results.plots, "save_plot", lambda figure, path: (save(figure, path), figures.append(figure)))
    losses = {"loss": [[1, 2.0], [2, 1.5]], "eval_loss": [[2, 1.6]]}
    DRAW({"peak_memory_gb": [[1, 0.736], [2, 0.74]], **losses}, tmp_path / "curves.png")
    picture = imread(tmp_path / "curves.png")
    assert all(half.min() < 0.5 for half in np.array_split(picture, 2, axis=1))  # drawn on white
    [axes] = figures[0].axes
    assert axes.get_ylabel() == "loss, nats per token"
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["training", "held-out rows"]
