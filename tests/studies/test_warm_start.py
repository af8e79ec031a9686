"""Test the studies that fine-tune SmolLM2: questions, measures and tables, and that they go on where they stopped."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers import greedy, random_ids, random_model, relative_error, small_config, uncached_logits
from tiny_sources import tiny_source
from tiny_training import byte_tokenizer, hasten_runs
from transformers import LlamaForCausalLM

from common.checkpoint_io import load_model
from common.command_io import write_json
from conversion_scripts.convert_llama_to_iha import convert_model
from experiments import warm_start
from experiments import warm_start_variants as study
from sft import train as sft_train


CORRECT = {"chain_sum": 5, "gcd": 20, "spell_backward": 0}


@pytest.fixture
def commands(monkeypatch) -> list[str]:
    """List the commands that the study runs; each leaves what the real one does, at once."""
    called = []

    def run(result, *command):
        if result.exists():
            return
        called.append(command[0])
        result.parent.mkdir(parents=True, exist_ok=True)
        if command[0] == "sft.train":
            result.mkdir()
            losses = {"train": [[2, 1.0], [4, 0.5]], "eval": [[0, 1.75], [4, 0.25 + 0.1 * ("iha" in str(result))]]}
            result.with_name("loss.json").write_text(json.dumps(losses))
        elif command[0] == "sft.score_reasoning":
            result.write_text(json.dumps({"correct": CORRECT[result.stem]}))
        elif result.suffix == ".jsonl":
            result.write_text("{}\n")
        else:
            result.mkdir()

    monkeypatch.setattr(warm_start, "run_module", run)
    monkeypatch.setattr(warm_start, "smollm2_gguf", lambda: "smollm2.gguf")
    return called


def test_the_table_holds_intervals_over_seeds_and_its_command(commands, run_study, tmp_path):
    table, made = run_study(warm_start, ["--seeds", "0", "1"], {}, {})
    assert made == [4, 0] and commands.count("sft.train") == 4
    assert [row["variant"] for row in table["rows"]] == ["mha", "iha_2"]
    assert [row["loss"]["mean"] for row in table["rows"]] == pytest.approx([0.25, 0.35])
    row = table["rows"][1]
    assert row["loss_minus_mha"]["mean"] == pytest.approx(0.1) and "loss_minus_mha" not in table["rows"][0]
    assert row["seeds"] == [0, 1] and row["gcd"]["values"] == [20 / warm_start.TEST_ROWS] * 2
    assert row["accuracy"]["values"] == [25 / 150] * 2
    words = f"experiments.warm_start --seeds 0 1 --output runs --results {tmp_path.name}"
    assert table["command"] == f"python -m {words}"


# Its variants


TINY = {"variants": ["mha", "iha_2", "x200"], "steps": 2, "batch": 3, "test_rows": 6}


def test_questions_are_distinct_and_answers_follow_from_the_facts():
    train, test = study.draw(TINY, seed=0)
    rows = train + test
    assert len(train) == 6 and len(test) == 6
    assert len({row["entry"]["question"] for row in rows}) == len(rows)
    assert sorted(row["entry"]["relations"] for row in test) == [1, 1, 2, 2, 3, 3]
    for row in rows:
        (_, question), (_, answer) = (turn.values() for turn in row["conversations"])
        boss = dict(re.findall(r"(\w+)'s boss is (\w+)\.", question))
        name, relations = re.search(r"Who is (?:the boss of )+(\w+)\?$", question)[1], question.count("the boss of")
        assert relations == row["entry"]["relations"]
        steps = []
        for _ in range(relations):
            steps.append(f"{name}'s boss is {boss[name]}.")
            name = boss[name]
        assert answer == " ".join(steps) and row["entry"]["answer"] == name
        assert set(boss) == set(boss.values()) and len(boss) == study.PEOPLE
    assert study.draw(TINY, seed=0) == (train, test) != study.draw(TINY, seed=1)


def rows_of_tokens(rows: list[tuple[list[int], list[int]]]) -> Dataset:
    return Dataset.from_list(
        [
            {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer, "num_tokens": len(prompt + answer)}
            for prompt, answer in rows
        ]
    )


def test_an_answer_is_right_when_greedy_decoding_gives_it():
    """Take rows of different lengths, so that most are padded."""
    model, rows, expected = random_model(small_config()), [], []
    with torch.autocast("cpu", torch.bfloat16):
        for length in (3, 7, 5):
            prompt = random_ids(1, length, seed=length)
            answer = greedy(model, prompt, 3)[0, length:].tolist()
            wrong = [*answer[:1], (answer[1] + 1) % 61, answer[2]]
            for labels in (answer, wrong):
                rows.append((prompt[0].tolist(), labels))
                logits = uncached_logits(model, torch.tensor([prompt[0].tolist() + labels]))[0, length - 1 : -1]
                loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(labels)).item()
                expected.append((pytest.approx(loss, rel=0.05), labels is answer))
    assert study.answers(model, rows_of_tokens(rows), batch_size=4) == expected


def test_the_exact_start_spreads_attention_evenly_and_collapses_to_the_last():
    model = convert_model(tiny_source(), num_pseudo_heads=3)
    tokens = rows_of_tokens([([1, 5, 9, 8], [4])])
    use = study.pseudo_head_use(model, tokens)
    layers = model.config.num_hidden_layers
    torch.testing.assert_close(use["collapse"], torch.tensor([[0.0, 0.0, 1.0]]).repeat(layers, 1))
    torch.testing.assert_close(use["attention"], torch.full((layers, 3), 1 / 3))
    for layer in model.base_model.layers:
        layer.self_attn.collapse.weight_start = layer.self_attn.collapse.weight_start.roll(1, dims=1)
    # The first pseudo-head of a token does not see the other copies of its own token.
    use = study.pseudo_head_use(model, rows_of_tokens([([], [5])]))
    torch.testing.assert_close(use["attention"], torch.tensor([[1.0, 0.0, 0.0]]).repeat(layers, 1))
    first, second, third = study.pseudo_head_use(model, tokens)["attention"].unbind(dim=1)
    assert (first > second + 0.1).all() and (first + second + third).allclose(torch.ones(layers))
    torch.testing.assert_close(second, third)


@pytest.fixture
def source(tmp_path, monkeypatch) -> LlamaForCausalLM:
    """Put a tiny Llama with a tokenizer of bytes in the place of SmolLM2."""
    tokenizer = byte_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = tiny_source(**ids, max_position_embeddings=512, num_hidden_layers=3)
    model.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    monkeypatch.setattr(study, "smollm2_gguf", lambda: tmp_path / "source")
    return model


def test_starts(source, tmp_path):
    """Compute what the source does, "noise" excepted; only "balanced" and "noise" have different pseudo-heads."""
    ids, models = random_ids(1, 9), {}
    for start in ("balanced", "zero", "noise"):
        models[start] = load_model(study.base_model(study.Variant(3, start), tmp_path))
    expected = source(ids).logits
    errors = {start: relative_error(model(ids).logits, expected) for start, model in models.items()}
    assert errors["balanced"] < 1e-5 and errors["zero"] < 1e-5 and errors["noise"] > 1e-3
    values = {start: study.mixing(model)["v_mix"] for start, model in models.items()}
    assert (values["zero"] == values["zero"][..., :1]).all() and (values["balanced"].std(dim=-1) > 0).any()
    for name, weight in study.mixing(models["noise"]).items():
        noise = weight - study.mixing(models["zero"])[name]
        assert 0.5 * study.NOISE < noise.std() < 2 * study.NOISE
    plain = load_model(study.base_model(study.VARIANTS["mha"], tmp_path))
    assert not hasattr(plain.config, "num_pseudo_heads") and torch.equal(plain(ids).logits, expected)


@pytest.fixture
def trained(source, tmp_path, monkeypatch) -> list[str]:
    """List the runs that the study trains; each trains nothing, and leaves what training does."""
    names = []

    def train(directory, model_name_or_path, **settings):
        names.append(directory.name)
        shutil.copytree(model_name_or_path, directory / "final")
        write_json(directory / "loss.json", {"train": [[step, 2.0 / step] for step in (1, 2)]})

    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(study, "SMALL", TINY)
    return names


SEEDS = ["--seeds", "0", "1"]


def test_the_study_writes_its_table_and_trains_nothing_twice(trained, run_study):
    table, made = run_study(study, SEEDS, {}, {"SMALL": {**TINY, "steps": 3}})
    assert trained == ["mha-0", "iha_2-0", "x200-0", "mha-1", "iha_2-1", "x200-1"] and made == [7, 0]
    assert [(row["variant"], row["seeds"]) for row in table["rows"]] == [(name, [0, 1]) for name in TINY["variants"]]
    assert table["complete"]
    mha, iha, _ = table["rows"]
    # Nothing was trained, and the start is exact.
    assert iha["minus_mha"]["mean"] == pytest.approx(0, abs=1e-2) and "moved" not in mha
    assert mha["loss"]["half_width"] > 0
    assert [part["accuracy"]["values"] for part in mha["relations"].values()] == [[0, 0]] * 3
    assert mha["accuracy"]["values"] == [0, 0]
    assert set(np.ravel(iha["moved"]["q_mix"])) == {0}
    assert all(layer == [0, 1] for layer in iha["use"]["collapse"])


def test_a_study_that_is_stopped_leaves_the_table_of_what_it_has(trained, tmp_path, monkeypatch):
    train = study.train

    def stopped(directory, **settings):
        if len(trained) == 3:
            raise KeyboardInterrupt
        train(directory, **settings)

    monkeypatch.setattr(study, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        where = ["--output", str(tmp_path / "runs"), "--results", str(tmp_path)]
        study.main([*SEEDS, "--variants", "iha_2", "mha", *where])
    table = json.loads((tmp_path / "warm_start_variants.json").read_text())
    rows = table["rows"]
    assert not table["complete"] and [(row["variant"], row["seeds"]) for row in rows] == [
        ("iha_2", [0, 1]),
        ("mha", [0]),
    ]
    assert rows[0]["minus_mha"]["half_width"] is None


def test_a_training_that_was_stopped_goes_on_with_its_own_setting_only(source, tmp_path, monkeypatch):
    found = []

    def stopped(directory, **settings):
        found.append((directory / "checkpoint-1").exists())
        (directory / "checkpoint-1").mkdir(exist_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "train", stopped)
    for size in (TINY, TINY, {**TINY, "steps": 3}):
        with pytest.raises(KeyboardInterrupt):
            study.run("mha", 0, size, tmp_path, "cpu")
    assert found == [False, True, False]


def test_the_recipe_trains_only_the_mixing_where_the_backbone_is_frozen(source, tmp_path, monkeypatch):
    """Train in earnest, in this process."""

    def run(result, module, *arguments):
        assert not result.exists()
        sft_train.main(list(map(str, arguments)))

    monkeypatch.setattr(warm_start, "run_module", run)
    hasten_runs(monkeypatch)
    kept = {}
    measure = study.measure

    def keep(variant, final, base, *rest):
        kept.update(final=load_model(final).state_dict(), base=load_model(base).state_dict())
        return measure(variant, final, base, *rest)

    monkeypatch.setattr(study, "measure", keep)
    left = tmp_path / "mixing_only-0" / "final"  # by a run that was stopped
    left.mkdir(parents=True)
    result = study.run("mixing_only", 0, TINY, tmp_path, "cpu")
    moved = {name for name, value in kept["final"].items() if not torch.equal(value, kept["base"][name])}
    assert moved and all("_mix." in name or "collapse" in name for name in moved)
    assert len(result["train"]) == 2 and not left.exists()
