"""Test pairs and rewards, and that both recipes train, resume and save a checkpoint that stands alone."""

import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from helpers import GEOMETRIES, random_model, train_mixing
from tiny_training import byte_config, decoder, interrupted_at, preset_config, saved, sizes, write_jsonl
from trl import DPOConfig, GRPOConfig

from iha.errors import UserError
from modeling_iha import IHAForCausalLM, interleave_heads
from modeling_iha.mixing_weights import mixing_parameters
from sft import data, make_reasoning_data, score_reasoning, train_dpo, train_grpo
from sft.arguments import RecipeParser
from sft.score_reasoning import is_right, read_rows


RECIPES = Path(__file__).resolve().parents[2] / "sft" / "recipes"
REAL_CORRECTNESS = train_grpo.correctness
COMMANDS = {"dpo": train_dpo, "grpo": train_grpo}
TRAINERS = {"dpo": train_dpo.DPORecipeTrainer, "grpo": train_grpo.GRPORecipeTrainer}


UNDISTURBED = {"eval_size": 0, "eval_strategy": "no", "save_strategy": "no"}
PAGED = {
    "use_transformers_continuous_batching": "true",
    "transformers_continuous_batching_config": '{"num_blocks": 16, "max_batch_tokens": 64}',
}


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory) -> str:
    """Make 20 reasoning rows of two generators, whose entries have different keys."""
    directory = tmp_path_factory.mktemp("rows")
    for generator in ("chain_sum", "spell_backward"):
        easy = ["--options", "max_terms=2"] if generator == "chain_sum" else []
        make_reasoning_data.main([str(directory / generator), "--rows", "10", "--generator", generator, *easy])
    made = (read_rows(directory / name) for name in ("chain_sum", "spell_backward"))
    return write_jsonl(directory / "rows.jsonl", [row for pair in zip(*made) for row in pair])


@pytest.fixture(scope="module")
def pairs_file(rows_file) -> str:
    """Pair the answer of each row with a wrong one, which has a digit more."""
    pairs = []
    for row in read_rows(rows_file):
        *prompt, answer = data.to_messages(row, "row")
        wrong = {**answer, "content": answer["content"].replace("\n<|end_of_solution|>", "0\n<|end_of_solution|>")}
        pairs.append({"prompt": prompt, "chosen": [answer], "rejected": [wrong]})
    return write_jsonl(Path(rows_file).with_name("pairs.jsonl"), pairs)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """Save a model of interleaved and plain, window and global layers, whose mixing is far from neutral."""
    config = byte_config(**GEOMETRIES["hybrid"], max_position_embeddings=1024)
    return saved(random_model(config), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def unread(tiny, monkeypatch) -> str:
    """Return the tiny model, whose weights must not be read."""
    for module in COMMANDS.values():
        monkeypatch.setattr(module, "prepare_model", lambda *_: pytest.fail("the model was loaded"))
    return tiny


def command(name: str, model: str, rows: str, output: Path, **overrides) -> list[str]:
    """Take a recipe to the size of a test."""
    lengths = {"num_generations": 2, "max_completion_length": 8} if name == "grpo" else {}
    values = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "bf16": "false", "eval_size": 2}
    others = {"max_length": None, **values, **lengths}
    arguments = sizes(model, rows, output, **{**others, **overrides})
    return ["--config", str(RECIPES / name / f"{name}.yaml"), *arguments]


def build(name: str, *arguments, **overrides):
    config_class = {"dpo": DPOConfig, "grpo": GRPOConfig}[name]
    run, args = RecipeParser(config_class, "").parse(command(name, *arguments, **overrides))
    return COMMANDS[name].build_trainer(run, args)


def reward_of_text(completions, **_):
    """Reward each reply for its text alone, because a model with random weights is never right."""
    return [sum(map(ord, reply["content"])) % 7 / 7 for (reply,) in completions]


@pytest.fixture(scope="module", autouse=True)
def rewards_that_differ():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_grpo, "correctness", reward_of_text)
        yield


# Training


@pytest.fixture(scope="module")
def runs(tiny, rows_file, pairs_file, tmp_path_factory) -> dict[str, Path]:
    """Run preference optimisation of the tiny model, then reinforcement learning of what it left."""
    outputs = {name: tmp_path_factory.mktemp("runs") / name for name in COMMANDS}
    train_dpo.main(command("dpo", tiny, pairs_file, outputs["dpo"]))
    train_grpo.main(command("grpo", str(outputs["dpo"] / "final"), rows_file, outputs["grpo"]))
    return outputs


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recipe_trains_every_weight(name, runs, tiny):
    logged = json.loads((runs[name] / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in logged if "learning_rate" in entry]
    assert len(steps) == 4
    for entry in steps:
        assert math.isfinite(entry["loss"])
    assert {entry["step"] for entry in logged if "eval_loss" in entry} == {2, 4}
    if name == "dpo":
        # Before the first step the model is its reference.
        assert abs(steps[0]["rewards/chosen"]) < 1e-5 < 1e-4 < abs(steps[-1]["rewards/chosen"])
    else:
        rewards = [entry["rewards/reward_of_text/mean"] for entry in steps]
        assert [entry["reward"] for entry in steps] == pytest.approx(rewards)
        assert abs(steps[0]["kl"]) < 1e-6

    source = IHAForCausalLM.from_pretrained(tiny if name == "dpo" else runs["dpo"] / "final")
    trained = dict(IHAForCausalLM.from_pretrained(runs[name] / "final").named_parameters())
    assert not [key for key, value in source.named_parameters() if torch.equal(value, trained[key])]
    assert f"TRL's {name.upper()}Trainer" in (runs[name] / "final" / "README.md").read_text()


@pytest.mark.parametrize("name", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_to_the_same_weights(name, runs, tiny, rows_file, pairs_file, tmp_path, capsys):
    inputs = {"dpo": (tiny, pairs_file), "grpo": (str(runs["dpo"] / "final"), rows_file)}[name]
    with interrupted_at(TRAINERS[name], 7):  # the first half of the fourth step
        COMMANDS[name].main(command(name, *inputs, tmp_path))
    for checkpoint in (2, 4):
        COMMANDS[name].main(command(name, *inputs, tmp_path))
        assert f"Resuming from {tmp_path / f'checkpoint-{checkpoint}'}" in capsys.readouterr().out
        whole, resumed = (output / "final" / "model.safetensors" for output in (runs[name], tmp_path))
        assert whole.read_bytes() == resumed.read_bytes()
        assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
        shutil.rmtree(tmp_path / "final")  # as if killed after the last checkpoint, which lies inside an epoch


def test_rewards_are_resumed_in_a_later_epoch(tiny, rows_file, tmp_path):
    """TRL would begin with the prompts of the first epoch again."""
    rows = write_jsonl(tmp_path / "rows.jsonl", read_rows(rows_file)[:3])
    # An epoch has 3 steps, and the run resumes after the first step of the second one.
    keys = {**UNDISTURBED, "save_strategy": "steps", "save_steps": 4, "max_steps": 6, "max_completion_length": 2}
    keys |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2, "lr_scheduler_type": "constant"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train_grpo.main(command("grpo", tiny, rows, whole, **keys))
    with interrupted_at(TRAINERS["grpo"], 5):
        train_grpo.main(command("grpo", tiny, rows, stopped, **keys))
    train_grpo.main(command("grpo", tiny, rows, stopped, **keys))
    weights = [(output / "final" / "model.safetensors").read_bytes() for output in (whole, stopped)]
    assert weights[0] == weights[1]


def test_a_run_does_not_resume_between_steps_that_learn_from_the_same_replies(tiny, rows_file, tmp_path):
    keys = {**UNDISTURBED, "num_iterations": 2, "save_strategy": "steps", "max_completion_length": 2}
    train_grpo.main(command("grpo", tiny, rows_file, tmp_path, **keys, max_steps=1))
    shutil.rmtree(tmp_path / "final")
    with pytest.raises(UserError, match="step 1 lies between two steps that learn from the same replies"):
        train_grpo.main(command("grpo", tiny, rows_file, tmp_path, **keys, max_steps=2))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recipe_trains_in_bf16_where_the_device_has_it(name, tmp_path, monkeypatch, capsys):
    config_class, path = {"dpo": DPOConfig, "grpo": GRPOConfig}[name], str(RECIPES / name / f"{name}.yaml")
    monkeypatch.setattr("transformers.utils.is_torch_bf16_gpu_available", lambda: False)
    for more, bf16 in (([], False), (["--use_cpu", "true"], True)):
        _, args = RecipeParser(config_class, "").parse(["--config", path, "--output_dir", str(tmp_path), *more])
        assert args.bf16 == bf16
        assert ("the run ignores bf16 and computes in float32" in capsys.readouterr().out) != bf16


def test_replies_of_continuous_batching_are_those_of_generate(tiny, rows_file, tmp_path):
    replies = {}
    for batching in ("false", "true"):
        keys = {"top_k": 1, "max_steps": 2, "learning_rate": 1e-3, "mixing_scale": 40, "max_completion_length": 12}
        keys |= {"per_device_train_batch_size": 2, "use_transformers_continuous_batching": batching}
        trainer = build("grpo", tiny, rows_file, tmp_path / batching, **{**PAGED, **UNDISTURBED, **keys})
        prompts = [trainer.processing_class.encode(text) for text in ("1", "12 + 34 =", "a longer prompt")]
        before = trainer._generate_single_turn(prompts, None, {}, 1)[0]
        trainer.train()  # equal replies earn equal rewards, which teach nothing but rounding errors
        train_mixing(trainer.model, 0.8)
        replies[batching] = before, trainer._generate_single_turn(prompts, None, {}, 1)[0]
    assert replies["true"] == replies["false"] and replies["true"][0] != replies["true"][1]


def test_an_interleaved_model_learns_from_replies_of_continuous_batching(rows_file, tmp_path):
    plain = saved(decoder("llama"), tmp_path / "plain")
    keys = {"num_pseudo_heads": 2, "max_steps": 1, "max_completion_length": 8}
    trainer = build("grpo", plain, rows_file, tmp_path / "run", **PAGED, **UNDISTURBED, **keys)
    trainer.train()
    assert trainer.state.global_step == 1 and list(mixing_parameters(trainer.model))


def test_a_saved_decoder_with_interleaved_heads_is_loaded_again_as_reference(rows_file, tmp_path):
    """TRL loads it by the first class in `auto_map`."""
    model = saved(interleave_heads(decoder("llama"), 2), tmp_path / "model")
    trainer = build("grpo", model, rows_file, tmp_path / "run", max_steps=1, **PAGED, **UNDISTURBED)
    trainer.train()
    assert type(trainer.ref_model).__name__ == "InterleavedForCausalLM"


def test_replies_that_the_model_cannot_give_are_refused_before_training(tiny, rows_file, tmp_path):
    model = saved(IHAForCausalLM(preset_config(attention_kinds="dcmha")), tmp_path / "dcmha")
    with pytest.raises(UserError, match="use_transformers_continuous_batching: .* kind 'dcmha' cache more"):
        build("grpo", model, rows_file, tmp_path / "run", use_transformers_continuous_batching="true")
    with pytest.raises(UserError, match="1024 positions"):
        build("grpo", tiny, rows_file, tmp_path / "run", max_completion_length=1000)


def test_the_reference_of_adapters_has_the_mixing_of_the_start(tiny, pairs_file, tmp_path):
    keys = {"use_peft": "true", "learning_rate": 1e-3, "mixing_scale": 10}
    trainer = build("dpo", tiny, pairs_file, tmp_path, **keys, **UNDISTURBED)
    trainer.train()
    moved = [name for name, value in trainer.model.named_parameters() if "q_mix" in name and value.requires_grad]
    assert moved and trainer.ref_model is None
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    ours = torch.cat(trainer.compute_ref_log_probs(trainer.model, inputs))
    start = build("dpo", tiny, pairs_file, tmp_path, eval_size=0, eval_strategy="no")
    expected = torch.cat(start.compute_ref_log_probs(start.ref_model, inputs))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)
    # The control: the policy itself has moved away.
    policy = torch.cat(
        start.compute_ref_log_probs(trainer.accelerator.unwrap_model(trainer.model).merge_and_unload(), inputs)
    )
    assert (policy - expected).abs().min() > 0.1


def test_the_reference_has_what_the_recipe_changes_in_the_config(tiny, pairs_file, rows_file, tmp_path):
    changes = {"rope_theta": 5e5, "sliding_window": 4}
    trainer = build("dpo", tiny, pairs_file, tmp_path, max_steps=1, **changes, **UNDISTURBED)
    trainer.train()
    step = trainer.state.log_history[0]
    assert abs(step["rewards/chosen"]) < 1e-5 and abs(step["rewards/rejected"]) < 1e-5
    with pytest.raises(UserError, match="^rope_theta, sliding_window with beta=0.04: TRL loads the reference"):
        build("grpo", tiny, rows_file, tmp_path, **changes)
    assert build("grpo", tiny, rows_file, tmp_path, **changes, **UNDISTURBED, beta=0).ref_model is None


# Rewards


def test_a_reply_is_scored_with_the_whole_entry_of_its_row(rows_file):
    rows, prompts = read_rows(rows_file), train_grpo.load_prompts(rows_file)
    assert [json.loads(text) for text in prompts["entry"]] == [row["entry"] for row in rows]
    answers = [row["conversations"][1]["value"] for row in rows]
    entries = {name: prompts[name] for name in ("generator", "entry")}

    def rewards(texts):
        return REAL_CORRECTNESS([[{"role": "assistant", "content": text}] for text in texts], **entries)

    assert rewards(answers) == rewards([row["entry"]["answer"] for row in rows]) == [1] * 20
    assert rewards(answers[1:] + answers[:1]) == [0] * 20
    # Right, with the answer first among other words: many verifiers give parts of the score to those.
    assert rewards([f"{text.removesuffix('<|end_of_solution|>')} x" for text in answers]) == [0] * 20
    assert rewards(["", "<|begin_of_solution|>", "nan", "9**9**9", "\ud83d"] * 4) == [0] * 20


def test_a_verifier_that_never_ends_or_fails_makes_a_reply_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(score_reasoning, "VERIFIER_SECONDS", 0.2)
    for generator, reply in (("countdown", "9**9**9"), ("prime_factorization", "two")):
        make_reasoning_data.main([str(tmp_path / generator), "--rows", "1", "--generator", generator])
        (row,) = read_rows(tmp_path / generator)
        assert is_right(row["conversations"][1]["value"], generator, row["entry"])
        assert not is_right(f"<|begin_of_solution|>{reply}", generator, row["entry"])
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


# Bad input

USER, ASSISTANT = ({"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "A")))
PAIR = {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{**ASSISTANT, "content": "B"}]}


@pytest.mark.parametrize(
    "bad, named",
    [
        ({"prompt": [USER], "chosen": [ASSISTANT]}, "rejected is None"),
        ({**PAIR, "rejected": [ASSISTANT, USER]}, "'rejected', .*last turn .*, got user"),
        ({**PAIR, "chosen": [USER, ASSISTANT]}, "column 'chosen': the first turn must be the assistant's"),
        ({**PAIR, "prompt": [USER, ASSISTANT]}, "column 'prompt': the last turn must be the user's"),
        ({**PAIR, "rejected": [{**ASSISTANT, "content": " A\n"}]}, "the same but for white space"),
        ({**PAIR, "tools": [{"name": "f"}]}, "column 'tools' would be lost"),
    ],
)
def test_a_bad_pair_is_named_with_its_column_before_the_model_is_loaded(unread, tmp_path, bad, named):
    path = write_jsonl(tmp_path / "pairs.jsonl", [PAIR, bad])
    with pytest.raises(UserError, match=f"pairs.jsonl, row 2.*{named}"):
        train_dpo.main(command("dpo", unread, path, tmp_path / "run"))


def test_the_system_column_of_a_pair_begins_its_prompt():
    system = {"role": "system", "content": "Be brief"}
    assert train_dpo.to_pair({**PAIR, "system": "Be brief"}, "row 1") == {**PAIR, "prompt": [system, USER]}


def test_pairs_that_teach_nothing_within_the_length_are_refused(tiny, pairs_file, tmp_path, capsys):
    # The first pair differs in its last signs only.
    with pytest.raises(UserError, match=r"row 1: .* max_length=100"):
        build("dpo", tiny, pairs_file, tmp_path, max_length=100)
    rows = [PAIR, {**PAIR, "chosen": [{**ASSISTANT, "content": "A" * 300}]}]
    path = write_jsonl(tmp_path / "pairs.jsonl", rows)
    trainer = build("dpo", tiny, path, tmp_path, max_length=200, eval_size=0, eval_strategy="no")
    assert "1 of 2 pairs are longer than max_length=200" in capsys.readouterr().out
    assert len(trainer.train_dataset) == 2


@pytest.mark.parametrize(
    ("name", "keys", "named"),
    [
        ("dpo", {"beta": 0}, "beta=0: expected a number above 0"),
        ("dpo", {"dataset_train_split": "test"}, "has no split"),
        ("grpo", {"dataset_train_split": "test"}, "dataset_train_split is not used here"),
        ("dpo", {"dataset_streaming": "true"}, "dataset_streaming is not used here"),
        ("dpo", {"precompute_ref_log_probs": "true"}, "precompute_ref_log_probs is not used here"),
        *((name, {"sync_ref_model": "true"}, "sync_ref_model is not used here") for name in COMMANDS),
        ("grpo", {"use_vllm": "true"}, "use_vllm is not used here"),
        (
            "grpo",
            {"use_transformers_continuous_batching": "true", "bf16": "true"},
            "use_transformers_continuous_batching with bf16 .* TRL would round the weights",
        ),
        ("grpo", {"num_iterations": 2, "save_steps": 3}, "save_steps=3: 2 steps learn .* a multiple of 2"),
        ("grpo", {"steps_per_generation": 6}, "save_steps=2: 3 steps learn .* a multiple of 3"),
        ("grpo", {"num_iterations": 2, "save_steps": 0.5}, "save_steps=0.5: 2 steps learn .* a multiple of 2"),
        (
            "grpo",
            {"num_iterations": 2, "save_strategy": "best", "eval_strategy": "steps", "eval_size": 2, "eval_steps": 1},
            "eval_steps=1: 2 steps learn",
        ),
        (
            "grpo",
            {
                **{"num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 3},
                "per_device_train_batch_size": 2,
            },
            "gradient_accumulation_steps=3: 2 batches learn .* a number that divides 2",
        ),
    ],
)
def test_an_impossible_run_is_refused(name, keys, named, unread, rows_file, pairs_file, tmp_path):
    rows = {"dpo": pairs_file, "grpo": rows_file}[name]
    with pytest.raises(UserError, match=named):
        COMMANDS[name].main(command(name, unread, rows, tmp_path / "run", **keys))


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda row: row.pop("entry"), "row 2: expected the columns 'generator' and 'entry'"),
        (
            lambda row: row.update(make_reasoning_data.make_rows(1, 0, "complex_arithmetic", {}, set())[0]),
            "row 2: the verifier of 'complex_arithmetic' accepts nonsense",
        ),
    ],
)
def test_a_row_without_a_fair_verifier_is_refused_before_the_model_is_loaded(
    change, named, unread, rows_file, tmp_path
):
    rows = read_rows(rows_file)[:2]
    change(rows[1])
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=named):
        train_grpo.main(command("grpo", unread, path, tmp_path / "run"))
