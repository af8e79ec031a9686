"""Run the commands of docs/FINE_TUNE.md on a tiny model, and compute its figures for the model that it names."""

import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from tiny_training import decoder, hasten_runs, saved, write_jsonl
from transformers import PreTrainedConfig, Qwen3Config

from conversion_scripts import push_to_hub
from iha.checkpoints import load_config
from iha.cost import seconds
from iha.counted_config import of_checkpoint
from iha.errors import ROOT
from iha.model_cost import cost_of_model
from iha.sources import find_source
from iha.step_memory import Way, of_sharded_training, of_training
from sft import train


PAGE = (ROOT / "docs" / "FINE_TUNE.md").read_text(encoding="utf-8")
TOKENS, WINDOW, GPUS, TFLOPS = 65_536, 8_192, 8, 400
SAVING = Way(checkpointing=True, tiled_loss=True)
QWEN3_8B = {
    **{"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960},
    **{"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}
# The two commands of training at the size of a test, on a CPU.
TINY = {
    "max_length": 64,
    "max_position_embeddings": 64,
    "max_steps": 2,
    "eval_size": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "gradient_accumulation_steps": 1,
    "bf16": "false",
}


def shell_commands() -> list[str]:
    """Return the commands of the page, each on one line."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def table_rows(heading: str) -> dict[str, list[str]]:
    """Return the rows of the table below a heading by their first cell."""
    section = PAGE.partition(f"# {heading}\n")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    return {first: others for first, *others in rows}


@pytest.fixture(scope="module")
def columns(tmp_path_factory) -> list[PreTrainedConfig]:
    """Return the configurations of the first table's columns."""
    directory = tmp_path_factory.mktemp("qwen3")
    Qwen3Config(**QWEN3_8B).save_pretrained(directory)
    source = find_source(directory)
    return [of_checkpoint(source, 2, WINDOW), of_checkpoint(source, 2), of_checkpoint(source)]


def test_the_table_is_what_cost_predicts(columns):
    rows = table_rows("What it takes")
    counts = [cost_of_model(config, TOKENS) for config in columns]
    for column, cost in enumerate(counts):
        rate = GPUS * TOKENS / seconds(cost, 1, TFLOPS)["activation checkpointing"]
        predicted = {"tokens/s, 8 GPUs": rate, "hours for a billion tokens, 8 GPUs": 1e9 / rate / 3600}
        for name, figure in predicted.items():
            told = float(rows[name][column].replace(",", ""))
            assert told == round(figure, -2 if figure > 100 else 1), (name, column)
    window, without, plain = counts
    assert (f"{window.training / plain.training:.2f}", f"{window.cache / plain.cache:.2f}") == ("0.97", "0.30")
    assert f"{without.training / plain.training:.1f}" == "2.8"
    page = " ".join(PAGE.split())
    assert "takes 0.97 times the FLOPs" in page and "the cache takes 0.30 times" in page and "takes 2.8 times" in page


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("column", [0, slow(1), slow(2)])
def test_the_memory_is_what_cost_predicts(column, columns):
    config = columns[column]
    way = SAVING._replace(offload=True)  # as the recipe trains
    told = table_rows("What it takes")["GB on each of 8 GPUs (FSDP2)"]
    peak = of_sharded_training(config, 1, TOKENS, way, GPUS).peak / 1e9
    assert float(told[column]) == pytest.approx(peak, abs=0.5)
    if column == 0:
        [told] = re.findall(r"All weights would take (\d+) GB", PAGE)
        assert float(told) == pytest.approx(of_training(config, 1, TOKENS, way).peak / 1e9, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [TOKENS, 16 * TOKENS])
def test_the_table_of_long_rows_is_what_cost_predicts(tokens, columns):
    told = [float(cell) for cell in table_rows("Longer rows")[f"{tokens:,}"]]
    ways = [SAVING._replace(offload=each, share_rows=share) for share in (1, GPUS) for each in (False, True)]
    peaks = [of_sharded_training(columns[0], 1, tokens, way, GPUS).peak / 1e9 for way in ways]
    assert told == pytest.approx(peaks, abs=0.51)


@pytest.mark.slow  # test_cost.py compares adapters with models
@pytest.mark.parametrize("bits", [32, 16, 4])
def test_the_table_of_adapters_is_what_cost_predicts(bits, columns):
    first = 2 * [32, 16, 4].index(bits)
    told = [float(cell) for cell in table_rows("One GPU")[f"{TOKENS:,}"][first : first + 2]]
    ways = [SAVING._replace(offload=each, lora_r=16, bits=bits) for each in (False, True)]
    assert told == pytest.approx([of_training(columns[0], 1, TOKENS, way).peak / 1e9 for way in ways], abs=0.51)


def test_the_commands_train_and_publish_a_tiny_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    hasten_runs(monkeypatch)
    base = saved(decoder("qwen3", num_hidden_layers=5, max_position_embeddings=32), tmp_path / "base")
    rows = write_jsonl(tmp_path / "long.jsonl", [{"text": f"Document {number}. " * 20} for number in range(20)])
    full, lora, push = [command for command in shell_commands() if not command.startswith("iha cost")]

    def trained(command: str, **changes: int | str | None) -> tuple[dict[str, str], Path]:
        """Run a command at the size of a test, without keys that change to None. Return its keys and output."""
        words = shlex.split(command.partition("train")[2].removeprefix(".py"))  # behind those of the launcher
        keys = dict(zip(words[::2], words[1::2]))
        output = tmp_path / changes.get("output_dir", keys["--output_dir"])
        replaced = {"model_name_or_path": base, "dataset_name": rows, **TINY, **changes, "output_dir": output}
        given = keys | {f"--{name}": value and str(value) for name, value in replaced.items()}
        train.main([word for pair in given.items() if pair[1] is not None for word in pair])
        return keys, output

    for command in (full, lora):
        keys, output = trained(command)
        printed = capsys.readouterr().out
        assert "Interleaved 4 of 5 layers, P = 2, window 8." in printed
        assert re.search(r"The mixing learns at (40|2) times learning_rate, 0.0004\.", printed)
        config = load_config(find_source(output / "final"))
        assert config.mixing_scale * float(keys["--learning_rate"]) == pytest.approx(4e-4)  # the R of the page
        assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (64, 8e6)
    without = dict.fromkeys(("interleaved_layers", "interleaved_window", "mixing_scale"))
    assert "`--num_pseudo_heads null`" in PAGE and all(f"`--{name}`" in PAGE for name in without)
    _, control = trained(full, output_dir="control", num_pseudo_heads="null", **without)
    assert type(load_config(find_source(control / "final"))) is Qwen3Config
    assert "Interleaved" not in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    push_to_hub.main(shlex.split(push)[2:])
    assert "Would upload to me/qwen3-8b-iha" in capsys.readouterr().out
