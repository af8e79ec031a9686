"""Test the study that fine-tunes SmolLM2: its table, and that it goes on where it stopped."""

import json

import pytest

from research.experiments import warm_start


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

    monkeypatch.setattr(warm_start, "run_command", run)
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
    words = f"research.experiments.warm_start --seeds 0 1 --output runs --results {tmp_path.name}"
    assert table["command"] == f"python -m {words}"
