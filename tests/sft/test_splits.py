"""Test that runs choose configurations and splits of datasets, local ones and those of a stand-in for the Hub."""

from pathlib import Path

import datasets
import pytest
from loopback_hub import LoopbackHub
from tiny_training import byte_tokenizer, interrupted_at, recipe, sizes, write_jsonl

from iha.errors import UserError
from iha.files import read_json
from sft import train
from sft.arguments import RecipeParser
from sft.base_model import find_start
from sft.checkpoints import RECORD
from sft.data import load_rows, training_rows
from sft.record import make_record
from sft.row_sources import check_splits, data_of
from sft.trainer import SFTRecipeTrainer


pytestmark = pytest.mark.usefixtures("in_repository_root")
CONFIGS = ("easy", "hard")
CARD = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: easy/train.jsonl}
  - {split: test, path: easy/test.jsonl}
- config_name: hard
  data_files:
  - {split: train, path: hard/train.jsonl}
  - {split: validation, path: hard/validation.jsonl}
---
"""


def write_dataset(directory: Path) -> str:
    """Write two configurations, neither of them the default, whose rows name their configuration and split."""
    for name in ("easy/train", "easy/test", "hard/train", "hard/validation"):
        file = directory / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(file, [{"text": f"{name}, row {number}"} for number in range(8)])
    (directory / "README.md").write_text(CARD)
    return str(directory)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep tests from each other's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0)  # seconds between two attempts
    monkeypatch.setattr(datasets.config, "STREAMING_OPEN_RETRY_INTERVAL", 0)


@pytest.fixture(params=["directory", "hub"])
def dataset(request, tmp_path, monkeypatch):
    """Return the name of a dataset of `write_dataset`: a directory, or an id on the stand-in for the Hub."""
    directory = write_dataset(tmp_path / "sums")
    if request.param == "directory":
        yield directory
        return
    with LoopbackHub() as hub:
        hub.use(monkeypatch, tmp_path / "home")
        hub.add("datasets/me/sums", tmp_path / "sums")
        yield "me/sums"


def parsed(name: str, tmp_path: Path, **keys):
    words = {"model_name_or_path": "none", "dataset_name": name, "output_dir": tmp_path / "run", "use_cpu": "true"}
    words |= {"assistant_only_loss": "false", "report_to": "none", **keys}
    argv = [part for key, value in words.items() if value is not None for part in (f"--{key}", str(value))]
    return RecipeParser("").parse(argv)


def check(run, args) -> None:
    check_splits(data_of(run, args))


def texts_of(name: str, tmp_path: Path, **keys) -> tuple[str, str | None]:
    """Return which rows a run trains and evaluates on, by the first of each."""
    run, args = parsed(name, tmp_path, **keys)
    data = data_of(run, args)
    check_splits(data)
    rows, held_out = training_rows(data, run, args, byte_tokenizer())
    first = next(iter(rows))["text"].partition(",")[0]
    return first, held_out and held_out["text"][0].partition(",")[0]


STEPS = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize("streaming", [{}, {"dataset_streaming": "true", "max_steps": 1}], ids=["whole", "stream"])
def test_a_run_reads_the_configuration_and_the_splits_that_it_names(streaming, dataset, tmp_path):
    keys = {"dataset_config": "easy", **streaming}
    assert texts_of(dataset, tmp_path, **keys) == ("easy/train", None)
    assert texts_of(dataset, tmp_path, **keys, **STEPS) == ("easy/train", "easy/test")
    keys |= {"dataset_config": "hard", "dataset_train_split": "validation", "dataset_test_split": "train", **STEPS}
    assert texts_of(dataset, tmp_path, **keys) == ("hard/validation", "hard/train")


def test_a_dataset_to_train_and_evaluate_on_has_one_configuration(dataset, tmp_path):
    keys = {"dataset_config": "easy", "eval_dataset_name": dataset, **STEPS}
    assert texts_of(dataset, tmp_path, **keys, dataset_test_split="test") == ("easy/train", "easy/test")
    names = [dataset]
    if Path(dataset).is_dir():
        names += [f"{dataset}/", f"{dataset}/../{Path(dataset).name}"]
    for name in names:
        for split in ("train", "train[:5%]"):
            named = {**keys, "eval_dataset_name": name, "dataset_test_split": split}
            with pytest.raises(UserError, match="the run would train and evaluate on the same rows of"):
                texts_of(dataset, tmp_path, **named)


def test_a_dataset_to_evaluate_on_has_a_split_of_its_own(dataset, tmp_path):
    held_out = tmp_path / "held"
    held_out.mkdir()
    for split in ("train", "test"):
        write_jsonl(held_out / f"{split}.jsonl", [{"text": f"held {split}, row 0"}])
    keys = {"dataset_config": "easy", "eval_dataset_name": held_out, **STEPS}
    assert texts_of(dataset, tmp_path, **keys) == ("easy/train", "held train")
    assert texts_of(dataset, tmp_path, **keys, dataset_test_split="test") == ("easy/train", "held test")


@pytest.mark.parametrize(
    "keys, named",
    [
        ({}, r"dataset_config=None.*'easy', 'hard'"),
        ({"dataset_config": "odd"}, r"dataset_config=odd.*'easy', 'hard'"),
        (
            {"dataset_config": "easy", "dataset_train_split": "dev"},
            "no split 'dev': set dataset_train_split to .* train, test",
        ),
        (
            {"dataset_config": "hard", **STEPS},
            "no split 'test': set dataset_test_split to .* validation",
        ),
        (
            {"dataset_config": "easy", "dataset_test_split": "train", **STEPS},
            "the run would train and evaluate on the same rows of",
        ),
        (
            {"dataset_config": "easy", "dataset_test_split": "dev", **STEPS},
            "set dataset_test_split to one of train, test",
        ),
    ],
)
def test_a_missing_configuration_or_split_is_refused_before_the_model_is_loaded(
    keys, named, dataset, tmp_path, tiny, monkeypatch
):
    monkeypatch.setattr(train, "prepare_model", lambda *_: pytest.fail("the model was loaded"))
    arguments = {"eval_size": 0, "eval_strategy": "no", "eval_on_start": "false", **keys}
    words = sizes(tiny, dataset, tmp_path / "run", **arguments)
    with pytest.raises(UserError, match=named) as refused:
        train.main(["--config", recipe("demo"), *words])
    assert "\n" not in str(refused.value)


def test_rows_to_train_on_are_known_by_another_path(tmp_path, tiny, rows_file):
    other = Path(rows_file).parent / ".." / Path(rows_file).parent.name / Path(rows_file).name
    words = sizes(tiny, rows_file, tmp_path / "run", eval_size=0, eval_dataset_name=other)
    with pytest.raises(UserError, match="the run would train and evaluate on the same rows of"):
        train.main(["--config", recipe("demo"), *words])


def test_a_file_whose_name_is_a_pattern_is_read_itself(tmp_path):
    for name in ("rows1.jsonl", "rows[1].jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    assert load_rows(str(tmp_path / "rows[1].jsonl"))["text"] == ["rows[1].jsonl"]


def test_a_slice_of_a_split_is_found(tmp_path):
    name = write_dataset(tmp_path / "sums")
    keys = {"dataset_config": "easy", "dataset_train_split": "train[4:]+test[:1]", "dataset_test_split": "train[:2]"}
    run, args = parsed(name, tmp_path, **keys, **STEPS)
    data = data_of(run, args)
    check_splits(data)
    rows, held_out = training_rows(data, run, args, byte_tokenizer())
    assert (len(rows), len(held_out)) == (5, 2)


@pytest.mark.parametrize(
    "keys, named",
    [
        (
            {"dataset_test_split": "test", "eval_size": 2, **STEPS},
            "dataset_test_split and eval_size both say what to evaluate on: give one",
        ),
        ({"dataset_test_split": "test"}, "this run does not evaluate"),
        ({"dataset_test_split": "test", **STEPS}, "need rows to evaluate on: set eval_size or eval_dataset_name"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(keys, named, rows_file, tmp_path):
    with pytest.raises(UserError, match=named):
        data_of(*parsed(rows_file, tmp_path, **keys))


def test_a_record_names_the_commit_the_configuration_and_the_splits(tmp_path, tiny, monkeypatch):
    write_dataset(tmp_path / "sums")
    with LoopbackHub() as hub:
        hub.use(monkeypatch, tmp_path / "home")
        commit = hub.add("datasets/me/sums", tmp_path / "sums")
        keys = {"model_name_or_path": tiny, "dataset_config": "easy", "dataset_test_split": "test", **STEPS}
        run, args = parsed("me/sums", tmp_path, **keys)
        record = make_record(data_of(run, args), find_start(run), run, args)
    assert record["data"] == {"name": "me/sums", "revision": commit}
    names = ("dataset_config", "dataset_train_split", "dataset_test_split")
    assert [record["recipe"][name] for name in names] == ["easy", "train", "test"]


def test_a_run_does_not_continue_on_another_configuration_or_split(tmp_path, tiny):
    name = write_dataset(tmp_path / "sums")
    keys = {"dataset_config": "easy", "eval_size": 0, "assistant_only_loss": "false", "max_steps": 3}

    def command(**changed) -> list[str]:
        return ["--config", recipe("demo"), *sizes(tiny, name, tmp_path / "run", **{**keys, **changed})]

    with interrupted_at(SFTRecipeTrainer, 3):
        train.main(command())
    for changed in (
        {"dataset_config": "hard", "dataset_test_split": "validation"},
        {"dataset_train_split": "test", "dataset_test_split": "train"},
    ):
        named = f"{next(iter(changed))}: the run began with .* and cannot go on with"
        with pytest.raises(UserError, match=named):
            train.main(command(**changed))
    train.main(command())
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "| Held-out data | sums, split test |" in card and "| `dataset_config` | easy |" in card
    assert read_json(tmp_path / "run" / RECORD, dict)["recipe"]["dataset_config"] == "easy"
