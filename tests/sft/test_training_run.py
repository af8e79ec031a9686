"""Test what a training run refuses before it begins, what it records, how it stops, and how it goes on."""

import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from helpers import random_model
from safetensors.torch import load_file
from tiny_training import at_step, byte_config, interrupted_at, recipe, saved, sizes, write_jsonl
from trl import SFTConfig, SFTTrainer
from trl.scripts import sft as trl_sft

from conversion_scripts.checkpoint_checks import checkpoint_files
from iha_io import command_io
from iha_io.command_io import ROOT, UserError, run_cli, sole_writer
from modeling_iha import IHAForCausalLM
from sft import run as sft_run
from sft import train
from sft import trainer as trainer_module
from sft.arguments import RecipeParser, RunArguments
from sft.run import keep_record, make_record
from sft.trainer import (
    CHECKSUMS,
    RECORD,
    MixingTrainer,
    checkpoint_fault,
    checkpoint_to_resume,
    newest_complete_checkpoint,
    write_checksums,
)


STEPS = 6
DRAW = sft_run.draw

pytestmark = pytest.mark.usefixtures("in_repository_root")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """Save a tiny IHA model with a byte tokenizer, beside a card whose metadata is no YAML."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "README.md").write_text("---\nlicense: [apache\n---\n# A model\n")
    return saved(random_model(byte_config(bos_token_id=0)), directory)


def command(model: str, rows: str, output: Path, **overrides) -> list[str]:
    return ["--config", recipe("demo"), *sizes(model, rows, output, **{"max_steps": STEPS, **overrides})]


def parse(model, rows, output, **overrides) -> tuple[RunArguments, SFTConfig]:
    return RecipeParser(SFTConfig, train.USAGE).parse(command(model, rows, output, **overrides))


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
    assert (output / "loss.json").read_text() == (whole / "loss.json").read_text()


# What no run can have


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("max_length", 0, "at least 1"),
        ("learning_rate", -1, "0 or more"),
        ("save_steps", 0, "above 0"),
        *((key, "inf", "a finite number") for key in ("mixing_scale", "max_grad_norm", "logging_steps")),
        ("eval_size", "nan", "a finite number"),
        ("eval_size", 1.5, "a share below 1, or a whole number"),
        ("adam_beta1", 1, "below 1"),
        ("seed", 2**32, "from 0 to 4294967295"),
        ("max_steps", 0, "-1 to train for num_train_epochs"),
        ("push_to_hub", "true", "set push_repo_id"),
        ("load_in_4bit", "true", "is not used here"),
        ("hub_token", "secret", "is not used here: remove the key"),
        ("dataset_kwargs", '{"skip_prepare_dataset": true}', "is not used here"),
        ("model_init_kwargs", '{"dtype": "float16"}', "is not used here"),
        ("push_repo_id", "a/b/c", "no repository id"),
        ("chat_template_path", "absent", "absent is not a .jinja file"),
        ("resume_from_checkpoint", "absent", "absent cannot be continued from"),
        ("output_dir", "", "is empty"),
    ],
)
def test_an_impossible_value_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, key, value, named):
    monkeypatch.setattr(train, "prepare_model", lambda *_: pytest.fail("the model was loaded"))
    monkeypatch.setattr(sft_run, "make_record", lambda *_: {})
    monkeypatch.setattr(sft_run, "keep_record", lambda *_: None)
    given = ["--config", recipe("demo"), *sizes("absent/model", "absent/rows", tmp_path / "run", **{key: value})]
    with pytest.raises(UserError, match=f"{key}.*{named}"):
        train.main(given)
    assert not (tmp_path / "run").exists()


def test_what_may_be_null_or_a_list_stays_so(tmp_path):
    config = tmp_path / "sft.yaml"
    needed = f"model_name_or_path: m\ndataset_name: d\noutput_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n"
    config.write_text(
        f"{needed}max_length: null\nlearning_rate: 1\nlora_target_modules: q_proj\n"
        "lr_scheduler_kwargs: {num_cycles: 2}\nreport_to: [wandb]\n"
    )
    run, args = RecipeParser(SFTConfig, train.USAGE).parse(["--config", str(config)])
    # TRL takes a single name out of its list.
    assert (args.max_length, args.learning_rate, run.lora_target_modules) == (None, 1.0, "q_proj")
    assert (args.lr_scheduler_kwargs, args.report_to) == ({"num_cycles": 2}, ["wandb"])


# What a run is made of


def keep(place: Path, model="model", output="run", checkpoint: Path | None = None, **overrides) -> dict:
    """Keep the record of a run on the model and the rows in `place`, and return it."""
    record = make_record(*parse(place / model, place / "rows.jsonl", place / output, **overrides))
    keep_record(record, place / output, checkpoint)
    return record


@pytest.fixture
def begun(tiny, rows_file, tmp_path) -> Path:
    """Make a model, rows, and an output directory with a record and a checkpoint of a run."""
    shutil.copytree(tiny, tmp_path / "model")
    shutil.copy(rows_file, tmp_path / "rows.jsonl")
    (tmp_path / "run").mkdir()
    keep(tmp_path)
    (tmp_path / "run" / "checkpoint-2").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "changed, overrides, named",
    [
        ("model/model.safetensors", {}, r"base_model .*model \(sha256\) was \w{12} and is \w{12}"),
        ("model/config.json", {}, r"base_model .*model \(sha256\)"),
        ("rows.jsonl", {}, r"data .*rows.jsonl \(sha256\)"),
        (None, {"learning_rate": 0.5}, r"learning_rate was 0.0001 and is 0.5"),
        (None, {"eval_size": 5}, "eval_size was 4.0 and is 5.0"),
        (None, {"chat_template_path": "sft/chat_templates/chatml.jinja"}, r"chat_template was \w{12} and is \w{12}"),
    ],
)
def test_a_run_does_not_continue_as_another(begun, changed, overrides, named):
    if changed:
        with (begun / changed).open("a") as file:
            file.write("\n")
    with pytest.raises(UserError, match=f"belongs to another run: .*{named}"):
        train.main(command(begun / "model", begun / "rows.jsonl", begun / "run", **overrides))


def test_a_record_tells_code_and_processes_apart(begun, monkeypatch):
    record = keep(begun)
    for section, key in (("code", "sha256"), ("processes", "number")):
        with pytest.raises(UserError, match=rf"{section} \({key}\) was"):
            keep_record(record | {section: record[section] | {key: "another"}}, begun / "run")
    # The files of an optimiser depend on what shards it, and Transformers would begin with a new one.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"processes \(sharding\) was None and is 'FSDP'"):
        keep(begun)


def test_what_changes_nothing_that_is_learned_may_differ(begun, capsys):
    overrides = {"logging_steps": 3, "save_steps": 5, "save_total_limit": 7, "eval_steps": 3, "sample_prompts": 1}
    (begun / "run").rename(begun / "moved")
    shutil.move(begun / "model", begun / "elsewhere")
    record = keep(begun, "elsewhere", "moved", **overrides)
    then = record | {"versions": {"torch": "0.1"}, "code": record["code"] | {"commit": "another"}}
    (begun / "moved" / RECORD).write_text(json.dumps(then))
    keep_record(record, begun / "moved")
    assert f"began with torch 0.1 and continues with {record['versions']['torch']}" in capsys.readouterr().out


def test_a_stream_goes_on_with_as_many_workers(begun):
    keep(begun, dataloader_num_workers=2)
    (begun / "run" / "checkpoint-2").rmdir()
    keep(begun, dataset_streaming="true")  # a record without checkpoints is replaced
    (begun / "run" / "checkpoint-2").mkdir()
    with pytest.raises(UserError, match="dataloader_num_workers was 0 and is 2"):
        keep(begun, dataset_streaming="true", dataloader_num_workers=2)


@pytest.mark.parametrize("content", ["[]", "{}", '{"base_model": 1}', None])
def test_checkpoints_without_a_usable_record_are_refused(content, begun):
    (begun / "run" / RECORD).write_text(content) if content else (begun / "run" / RECORD).unlink()
    with pytest.raises(UserError, match=r"run\.json"):
        train.main(command(begun / "model", begun / "rows.jsonl", begun / "run"))


@pytest.mark.parametrize("moved", [False, True])
def test_a_checkpoint_of_another_run_is_not_resumed(moved, whole, tiny, rows_file, tmp_path):
    other = tmp_path / "run"
    given = {"learning_rate": 0.5, "resume_from_checkpoint": whole / "checkpoint-6"}
    if moved:
        keep_record(make_record(*parse(tiny, rows_file, other, learning_rate=0.5)), other)
        shutil.copytree(given.pop("resume_from_checkpoint"), other / "checkpoint-6")
    with pytest.raises(UserError, match="learning_rate was 0.0001 and is 0.5"):
        train.main(command(tiny, rows_file, other, **given))


@pytest.mark.parametrize("saved_by", ["steps", "no"])
def test_a_run_whose_directory_is_removed_does_not_succeed(saved_by, tiny, rows_file, tmp_path):
    output = tmp_path / "run"
    with (
        pytest.raises(UserError, match=r"run.*No such file"),
        at_step(MixingTrainer, 2, lambda _: shutil.rmtree(output)),
    ):
        train.main(command(tiny, rows_file, output, save_strategy=saved_by, max_steps=2))
    assert not (output / "final").exists()


def test_the_commit_is_that_of_this_checkout_alone(monkeypatch, tmp_path):
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a"]
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "file").write_text("1")
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "1"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(command_io, "ROOT", tmp_path)
    commit = command_io.current_commit()
    assert re.fullmatch("[0-9a-f]{40}", commit)
    (tmp_path / "copy" / "file").write_text("2")
    assert command_io.current_commit() == f"{commit}-dirty"
    monkeypatch.setattr(command_io, "ROOT", tmp_path / "copy")
    assert command_io.current_commit() == "unknown"


# One run in one directory


def test_a_second_run_in_one_directory_is_refused(tmp_path, monkeypatch):
    arguments = command("absent/model", "absent/rows", tmp_path / "run")
    with sole_writer(tmp_path / "run"):
        with pytest.raises(UserError, match="Another run is writing .*run"):
            train.main(arguments)
        # The other processes of the run that holds the lock.
        entered = []
        monkeypatch.setattr(sft_run, "train", lambda run, args, build: entered.append(args.output_dir))
        monkeypatch.setattr(SFTConfig, "process_index", 1)
        train.main(arguments)
        assert entered == [str(tmp_path / "run")]
    assert not (tmp_path / "run").exists()


def test_the_workers_of_a_killed_run_do_not_keep_its_lock(tmp_path):
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def train_until_killed():
        with sole_writer(tmp_path / "run"):
            worker = fork.Process(target=time.sleep, args=(60,))
            worker.start()
            theirs.send(worker.pid)
            os.kill(os.getpid(), signal.SIGKILL)

    run = fork.Process(target=train_until_killed)
    run.start()
    worker = ours.recv()
    run.join()
    try:
        with sole_writer(tmp_path / "run"):
            os.kill(worker, 0)  # it still runs
    finally:
        os.kill(worker, signal.SIGKILL)


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
        patch.setattr(sys.stderr, "isatty", lambda: what == "loss")  # with a progress bar, and without
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
        assert f"stopped before at step 5: the {what} is" in capsys.readouterr().out
        assert_same_run(output, whole)


def test_weights_that_are_not_numbers_are_not_saved(tiny, rows_file, tmp_path, monkeypatch):
    def spoil(self, *_):
        next(self.model.parameters()).data[0] = torch.nan

    monkeypatch.setattr(MixingTrainer, "_maybe_log_save_evaluate", lambda *_, **__: None)
    monkeypatch.setattr(sft_run, "write_losses", lambda *_: None)
    train_it = MixingTrainer.train
    monkeypatch.setattr(MixingTrainer, "train", lambda self, **kwargs: (train_it(self, **kwargs), spoil(self)))
    with pytest.raises(UserError, match="embed_tokens.weight of the model at step 1 holds NaN"):
        train.main(
            command(
                tiny, rows_file, tmp_path / "run", max_steps=1, eval_size=0, eval_strategy="no", eval_on_start="false"
            )
        )
    assert not (tmp_path / "run" / "final").exists()


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(whole, tiny, rows_file, tmp_path, monkeypatch):
    save = torch.save
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(content, path, *args, **kwargs):
        limit = 10_000 if str(path).endswith("checkpoint-4/optimizer.pt") else soft
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            save(content, path, *args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    output = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(UserError, match="checkpoint-4 cannot be written: ") as refused:
        patch.setattr(torch, "save", fill)
        train.main(command(tiny, rows_file, output))
    assert "\n" not in str(refused.value) and "Make room" in str(refused.value)
    assert newest_complete_checkpoint(output) == output / "checkpoint-2"
    assert not (output / "checkpoint-4").exists()


def test_a_run_that_ends_early_leaves_no_final_model(tiny, rows_file, tmp_path):
    def stop(trainer):
        trainer.control.should_training_stop = True

    with (
        pytest.raises(UserError, match="after 1 of 6 steps, so .* no final model. Give the same command again"),
        at_step(MixingTrainer, 1, stop),
    ):
        train.main(command(tiny, rows_file, tmp_path / "run"))
    assert not (tmp_path / "run" / "final").exists()


# Going on


@pytest.mark.parametrize(
    "keys",
    [{"packing": "true", "dataset_streaming": "true"}, {"use_peft": "true", "lora_r": 4, "packing": "true"}],
    ids=["streamed", "adapters"],
)
def test_an_interrupted_run_resumes_to_the_same_weights(keys, tiny, rows_file, tmp_path, capsys):
    # A pass over the 8 packed sequences takes 2 steps: the resume is in the third pass.
    keys = {**keys, "max_steps": 5, "lr_scheduler_type": "constant"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.main(command(tiny, rows_file, whole, **keys))
    with interrupted_at(MixingTrainer, 5):
        train.main(command(tiny, rows_file, stopped, **keys))
    for step in (4, 5):
        train.main(command(tiny, rows_file, stopped, **keys))
        assert f"Resuming from {stopped / f'checkpoint-{step}'}." in capsys.readouterr().out
        assert_same_run(stopped, whole)
        shutil.rmtree(stopped / "final")  # as if killed after the last checkpoint, which lies inside a pass


def test_a_finished_run_is_extended_to_the_weights_of_a_longer_one(tiny, rows_file, tmp_path, capsys):
    steady, output = {"lr_scheduler_type": "constant", "warmup_steps": 0}, tmp_path / "run"
    train.main(command(tiny, rows_file, tmp_path / "whole", max_steps=4, **steady))
    short = command(tiny, rows_file, output, max_steps=2, **steady)
    train.main(short)
    with pytest.raises(UserError, match="final exists: this run has finished. Raise max_steps"):
        train.main(short)
    with pytest.raises(UserError, match="belongs to another run: learning_rate was"):
        train.main(command(tiny, rows_file, output, max_steps=4, learning_rate=0.5, **steady))
    longer = command(tiny, rows_file, output, max_steps=4, **steady)
    with interrupted_at(MixingTrainer, 1):
        try:
            train.main(longer)
        except KeyboardInterrupt as stopped:
            assert stopped.__notes__ == ["Steps up to 2 are kept: the same command goes on from there."]
            raise
    assert (output / "final-2").is_dir() and not (output / "final").exists()
    with pytest.raises(UserError, match="belongs to another run: max_steps was 4 and is 2"):
        train.main(short)
    train.main(longer)
    assert "Going on after step 2" in capsys.readouterr().out
    assert_same_run(output, tmp_path / "whole")

    for checkpoint in output.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(UserError, match="this run has finished, and has no checkpoint to go on from"):
        train.main(command(tiny, rows_file, output, max_steps=6, **steady))


def test_a_run_is_not_extended_before_it_has_ended(begun):
    checkpoint = begun / "run" / "checkpoint-2"
    (checkpoint / "trainer_state.json").write_text('{"global_step": 2, "max_steps": 6}')
    with pytest.raises(UserError, match="max_steps was 6 and is 8"):
        keep(begun, checkpoint=checkpoint, max_steps=8)


def test_a_killed_run_goes_on_to_the_weights_of_an_undisturbed_one(
    whole, tiny, rows_file, tmp_path, capsys, monkeypatch
):
    """Stop a save before its end with half of the optimiser's file, by what no handler of a failed save takes."""
    output = tmp_path / "run"
    arguments = command(tiny, rows_file, output, save_total_limit=1)

    def leave_checksums(trainer):
        # Of a run before: they must not make the half of the next checkpoint whole.
        (output / "checkpoint-4").mkdir()
        (output / "checkpoint-4" / CHECKSUMS).write_text("{}")

    def die(checkpoint):
        if checkpoint.name == "checkpoint-4":
            os.truncate(checkpoint / "optimizer.pt", 1000)
            raise KeyboardInterrupt
        write_checksums(checkpoint)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), at_step(MixingTrainer, 3, leave_checksums):
        patch.setattr(trainer_module, "write_checksums", die)
        train.main(arguments)
    # The last complete checkpoint goes only after the next is complete.
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    os.utime(output / "checkpoint-2", (4e9, 4e9))  # by a clock that went wrong: steps say which is older
    train.main(arguments)
    out = capsys.readouterr().out
    assert f"Passing over {output / 'checkpoint-4'}: checksums.json is missing, which is written last." in out
    assert f"Resuming from {output / 'checkpoint-2'}." in out
    assert_same_run(output, whole)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-6"]
    # Killed after its last checkpoint, which lies inside an epoch.
    shutil.rmtree(output / "final")
    train.main(arguments)
    assert_same_run(output, whole)


def make_checkpoint(directory: Path, weights_file: str = "model.safetensors") -> Path:
    """Make a checkpoint; FSDP's sharded weights and their optimiser are folders."""
    directory.mkdir(parents=True)
    sharded = weights_file.endswith(".distcp")
    for name in (weights_file, "optimizer_0/__0_0.distcp" if sharded else "optimizer.pt"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(bytes(100))
    state = {"global_step": int(directory.name.partition("-")[2]), "max_steps": 20}
    (directory / "trainer_state.json").write_text(json.dumps(state))
    write_checksums(directory)
    return directory


def flip(file: Path):
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path):
    os.truncate(file, file.stat().st_size - 2)


@pytest.mark.parametrize(
    ("damage", "weights_file", "name"),
    [
        *((damage, "model.safetensors", "model.safetensors") for damage in (Path.unlink, cut_short, flip)),
        *((damage, "model.safetensors", CHECKSUMS) for damage in (Path.unlink, cut_short, flip)),
        *((flip, "model.safetensors", name) for name in ("optimizer.pt", "trainer_state.json")),
        (flip, "pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/__0_0.distcp"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_its_file_named(damage, weights_file, name, tmp_path, capsys):
    for step in (8, 10):
        make_checkpoint(tmp_path / f"checkpoint-{step}", weights_file)
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_complete_checkpoint(tmp_path).name == "checkpoint-10"
    damage(tmp_path / "checkpoint-10" / name)
    for newest in (None, True):
        args = Namespace(resume_from_checkpoint=newest, output_dir=tmp_path)
        assert checkpoint_to_resume(args) == tmp_path / "checkpoint-8"
        (line,) = capsys.readouterr().out.strip().splitlines()
        if name != CHECKSUMS:
            assert line.startswith(f"Passing over {tmp_path / 'checkpoint-10'}: {name} is ")
    with pytest.raises(UserError, match="checkpoint-10 cannot be continued from: "):
        checkpoint_to_resume(Namespace(resume_from_checkpoint=str(tmp_path / "checkpoint-10")))


@pytest.mark.parametrize(
    "name, content, fault",
    [
        ("optimizer.pt", None, "optimizer.pt is missing"),
        ("trainer_state.json", '{"global_step": 999, "max_steps": 999}', "trainer_state.json is of step 999"),
        ("trainer_state.json", '{"global_step": "2", "max_steps": 2}', "global_step is '2': expected a valid integer"),
    ],
)
def test_a_checkpoint_that_was_saved_wrong_is_passed_over(name, content, fault, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "checkpoint-2")
    assert checkpoint_fault(checkpoint) is None
    (checkpoint / name).write_text(content) if content else (checkpoint / name).unlink()
    write_checksums(checkpoint)
    assert fault in checkpoint_fault(checkpoint)


def test_the_best_checkpoint_is_kept_and_ends_as_the_final_model(tiny, rows_file, tmp_path, monkeypatch):
    losses = {0: 9.0, 2: 1.0, 4: 2.0, 6: 3.0}
    evaluate = MixingTrainer.evaluate

    def scripted(self, *args, **kwargs):
        return evaluate(self, *args, **kwargs) | {"eval_loss": losses[self.state.global_step]}

    monkeypatch.setattr(MixingTrainer, "evaluate", scripted)
    output = tmp_path / "run"
    arguments = command(tiny, rows_file, output, load_best_model_at_end="true", save_strategy="steps")
    with interrupted_at(MixingTrainer, 5):
        train.main(arguments)
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    best = weights(output / "checkpoint-2")
    shutil.copytree(output, tmp_path / "damaged")
    train.main(arguments)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    final = weights(output / "final")
    assert all(torch.equal(final[name], best[name]) for name in best)
    shutil.rmtree(output)
    shutil.move(tmp_path / "damaged", output)
    flip(output / "checkpoint-2" / "model.safetensors")
    with pytest.raises(UserError, match="checkpoint-2 cannot be loaded: model.safetensors is damaged.*Remove it and"):
        train.main(arguments)
    assert not (output / "final").exists()


# What a person sees


def test_a_run_shows_and_leaves_what_it_did(tiny, rows_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sft_run, "push", lambda directory, repo_id: print(f"Published: {repo_id}/{directory.name}"))
    monkeypatch.setattr(sft_run, "draw", DRAW)
    output, base = tmp_path / "run", shutil.copytree(tiny, tmp_path / "base")
    arguments = {"max_steps": 4, "sample_prompts": 2, "push_repo_id": "me/model", "eval_on_start": "false"}
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    with pytest.raises(UserError, match="license and base_model, which that of .* does not state"):
        train.main(command(base, rows_file, output, **arguments))
    assert not output.exists()
    (base / "README.md").write_text("---\nlicense: mit\nbase_model: me/base\n---\n")
    train.main(command(base, rows_file, output, **arguments))
    shown = capsys.readouterr()
    out = shown.out + shown.err
    assert "16 rows of 844 tokens: 4 steps an epoch of 4 sequences a step, 4 steps in all." in out
    for step in (2, 4):
        assert out.count(f"Step {step}, sample: ") == 2
    asked = next(line for line in out.splitlines() if "Step 2, sample: " in line).partition(" -> ")[0]
    assert "+" in asked and asked.endswith(r"<|im_start|>assistant\n'")
    assert "Published: me/model/final" in out

    curves = json.loads((output / "curves.json").read_text())
    for name, points in curves.items():
        assert [step for step, _ in points] == ([2, 4] if name.startswith("eval_") else [1, 2, 3, 4]), name
    values = {name: [value for _, value in points] for name, points in curves.items()}
    assert all(0 <= value <= 1 for value in values["mean_token_accuracy"])
    assert all(value > 0 for name in ("tokens_per_second", "grad_norm") for value in values[name])
    assert 0.5 < values["peak_memory_gib"][-1] * 2**30 / trainer_module.peak_memory() <= 1
    # Adam moves each entry by about the rate in a step.
    start, final = (IHAForCausalLM.from_pretrained(path).state_dict() for path in (tiny, output / "final"))
    mixing = [name for name in start if "_mix" in name or "collapse" in name]
    moved = sum((final[name] - start[name]).abs().sum() for name in mixing)
    assert values["mixing_distance"][-1] == pytest.approx((moved / sum(start[n].abs().sum() for n in mixing)).item())
    assert values["mixing_distance"] == sorted(values["mixing_distance"])

    card = (output / "final" / "README.md").read_text()
    assert "license: mit" in card and "base_model: me/base" in card
    record = json.loads((output / RECORD).read_text())
    for fact in (
        f"rows.jsonl, SHA-256 {hashlib.sha256(Path(rows_file).read_bytes()).hexdigest()}",
        f"SHA-256 {record['base_model']['sha256']}",
        record["code"]["sha256"],
        f"torch {version('torch')}",
        "| `learning_rate` | 0.0001 |",
        "| `lr_scheduler_type` | cosine |",
        f"| Held-out loss, first and last logged | {values['eval_loss'][0]:.4f}, {values['eval_loss'][-1]:.4f} |",
        "![Curves of the run](curves.png)",
    ):
        assert fact in card, fact
    assert str(tmp_path) not in card and str(Path(rows_file).parent) not in card
    names, others = checkpoint_files(output / "final")
    assert set(names) == {path.name for path in (output / "final").iterdir()} and others == []
    assert (output / "final" / "curves.png").read_bytes() == (output / "curves.png").read_bytes()
    assert all((output / name).read_bytes().startswith(b"\x89PNG") for name in ("loss.png", "curves.png"))
    assert not (output / "README.md").exists()
    assert not (output / ".lock").exists()


def test_the_curves_are_those_that_were_logged(tmp_path, monkeypatch):
    figures = {}
    monkeypatch.setattr(sft_run, "draw", DRAW)
    monkeypatch.setattr(sft_run.plots, "save_plot", lambda figure, path: figures.update({path.name: figure}))
    history = [{"step": step, "loss": 1.0, "learning_rate": 1e-4, "reward": 0.5, "kl": 0.1} for step in (1, 2)]
    sft_run.write_losses([*history, {"step": 2, "eval_reward": 0.25}], tmp_path)
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert curves.keys() == {"loss", "learning_rate", "reward", "kl", "eval_reward"}
    scales = {axes.get_ylabel(): axes.get_yscale() for axes in figures["curves.png"].axes}
    linear = dict.fromkeys(("loss", "reward", "KL from the reference"), "linear")
    assert scales == linear | {"learning rate": "log"}


def test_the_clock_counts_steps_and_neither_evaluation_nor_saving(tiny, rows_file, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(trainer_module, "time", Namespace(perf_counter=lambda: now[0]))
    for name, seconds in (("training_step", 1), ("evaluate", 10), ("_save_checkpoint", 10)):

        def taking(self, *args, act=getattr(SFTTrainer, name), seconds=seconds, **kwargs):
            now[0] += seconds
            return act(self, *args, **kwargs)

        monkeypatch.setattr(SFTTrainer, name, taking)
    train.main(command(tiny, rows_file, tmp_path / "run", max_steps=3, eval_steps=1, save_steps=1))
    history = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    tokens = [0, *(entry["num_tokens"] for entry in history if "learning_rate" in entry)]
    assert [entry["tokens_per_second"] for entry in history if "learning_rate" in entry] == [
        after - before for before, after in zip(tokens, tokens[1:])
    ]


def test_trl_trains_a_converted_checkpoint_by_itself(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = [{"role": role, "content": "1+1?"} for role in ("user", "assistant")]
    (tmp_path / "rows").mkdir()
    write_jsonl(tmp_path / "rows" / "train.jsonl", [{"messages": messages}] * 4)
    arguments = {"model_name_or_path": tiny, "dataset_name": "rows", "output_dir": "run", "max_steps": 1}
    arguments |= {"trust_remote_code": "true", "bf16": "false", "use_cpu": "true", "report_to": "none"}
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    trl_sft.main(*trl_sft.make_parser().parse_args_and_config(words))
    before, after = weights(Path(tiny)), weights(tmp_path / "run")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "run" / "modeling_iha.py").exists()
