"""Test that rows of every schema become TRL's rows, with right labels, and that bad rows are named."""

import gzip
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset, IterableDataset
from helpers import small_config
from tiny_training import TEMPLATES, byte_tokenizer, recipe, sizes, training_rows, with_template, write_jsonl
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig

from examples import speedrun
from iha.errors import UserError
from modeling_iha import IHAForCausalLM
from sft.arguments import RecipeParser, RunArguments
from sft.bits_per_byte import bytes_of_token
from sft.checkpoints import checkpoint_to_resume
from sft.data import check_template, hold_out_first, load_rows, to_messages
from sft.data import training_rows as rows_of_data
from sft.make_tokenizer import train_tokenizer
from sft.row_sources import data_of, parts_of_mixture
from sft.trainer import SFTRecipeTrainer


CONVERSATIONS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi \n\n"},
        {"role": "assistant", "content": "\nHello, <b>you</b>.\n"},
        {"role": "user", "content": "assistant\nBye"},
        {"role": "assistant", "content": "Bye <|im_start|>"},
    ],
    [
        {"role": "assistant", "content": "I begin."},
        {"role": "user", "content": "Größe 🙂?"},
        {"role": "assistant", "content": "日本 🙂"},
    ],
]


pytestmark = pytest.mark.usefixtures("in_repository_root")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Keep tests from each other's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def rows_file(tmp_path) -> str:
    return write_jsonl(tmp_path / "rows.jsonl", training_rows(20))


def run_of(name: str, tmp_path: Path, **keys):
    run = RunArguments(
        model_name_or_path="none",
        dataset_name=str(name),
        **{key: keys.pop(key) for key in list(keys) if hasattr(RunArguments, key)},
    )
    fields = {"assistant_only_loss": True, "max_length": 128, "use_cpu": True, "bf16": False, "report_to": "none"}
    if run.eval_size or run.eval_dataset_name:
        fields |= {"eval_strategy": "steps", "eval_steps": 1}
    return run, SFTConfig(output_dir=str(tmp_path / "run"), **{**fields, **keys})


def rows_of_run(run, args, tokenizer):
    return rows_of_data(data_of(run, args), run, args, tokenizer)


def test_a_home_directory_is_found_in_every_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "rows.jsonl", training_rows(4))
    (tmp_path / "template.jinja").write_text("text")
    (tmp_path / "mix.yaml").write_text("[{path: ~/rows.jsonl, share: 1}]")
    run = RunArguments(model_name_or_path="~/model", tokenizer="~/bytes", dataset_name="~/mix.yaml")
    assert (run.model_name_or_path, run.tokenizer) == (f"{tmp_path}/model", f"{tmp_path}/bytes")
    assert parts_of_mixture(run.dataset_name) == [(f"{tmp_path}/rows.jsonl", 1)]
    assert (
        RunArguments(dataset_name="a", eval_dataset_name="~/rows.jsonl").eval_dataset_name == f"{tmp_path}/rows.jsonl"
    )
    assert SFTConfig(output_dir="~/run", use_cpu=True).output_dir == f"{tmp_path}/run"
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    assert checkpoint_to_resume("~/run/checkpoint-2", tmp_path) == tmp_path / "run" / "checkpoint-2"
    assert checkpoint_to_resume(None, tmp_path) is None
    with pytest.raises(UserError, match="resume_from_checkpoint=true: .* holds no whole checkpoint"):
        checkpoint_to_resume(True, tmp_path)
    words = sizes("model", str(tmp_path / "rows.jsonl"), tmp_path / "run", chat_template_path="~/template.jinja")
    run, args = RecipeParser("").parse(["--config", recipe("demo"), *words])
    assert run.chat_template == "text"
    assert args.chat_template_path == f"{tmp_path}/template.jinja"  # TRL reads it too


def test_one_name_is_a_list_and_unused_keys_are_not_offered(capsys):
    run = RunArguments(dataset_name="a", lora_modules_to_save="embed_tokens", lora_target_parameters="weight")
    assert (run.lora_modules_to_save, run.lora_target_parameters) == (["embed_tokens"], ["weight"])
    with pytest.raises(SystemExit):
        RecipeParser("usage").parse(["--help"])
    help = capsys.readouterr().out
    assert "--push_to_hub" not in help and "--learning_rate" in help
    first, others = help.split("keys of TRL and Transformers:")
    assert re.findall(r"^  --(\w+)", first, re.MULTILINE)[:3] == ["model_name_or_path", "preset", "preset_fields"]
    assert "--num_pseudo_heads" in first and "--num_pseudo_heads" not in others and "--lora_r" in others


# Rows

GOOD_TURNS = [{"from": "user", "value": "Q"}, {"from": "assistant", "value": "A"}]


@pytest.mark.parametrize(
    "row",
    [
        {"system": "S", "conversations": GOOD_TURNS},
        {"source": "x", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"messages": None, "system": None, "conversations": GOOD_TURNS},
        {"conversations": [GOOD_TURNS[0] | {"train": None}, GOOD_TURNS[1] | {"weight": 1.0, "train": True}]},
    ],
    ids=["openthoughts-114k", "openthoughts3", "messages", "columns-filled-with-null", "turns-to-learn"],
)
def test_both_openthoughts_schemas_become_messages(row):
    system = [{"role": "system", "content": "S"}] if row.get("system") else []
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    assert to_messages(row, "row 1") == system + turns


@pytest.mark.parametrize(
    "bad, named",
    [
        ({"prompt": "Q"}, "expected one column of 'conversations' and 'messages'.*the row has .*prompt"),
        ({"conversations": [{"from": "robot", "value": "A"}]}, "turn 1: 'from' is 'robot': expected one of system"),
        ({"conversations": GOOD_TURNS[:1]}, "the last turn must be the assistant's, got user"),
        ({"messages": [{"role": "assistant", "content": " \n"}]}, "turn 1: 'content' is .*: expected a text"),
        ({"messages": [{"role": "assistant", "content": "A", "tool_calls": [{"id": 1}]}]}, "turn 1: 'tool_calls'"),
        ({"messages": [{"role": "assistant", "content": "A", "weight": 0}]}, "turn 1: 'weight' would be lost"),
        ({"system": "S", "messages": CONVERSATIONS[1]}, "column 'system' and a turn both hold"),
        ({"messages": []}, "there are no turns"),
    ],
)
def test_a_bad_row_is_named_with_its_column(tmp_path, bad, named):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"conversations": GOOD_TURNS}, bad])
    with pytest.raises(UserError, match=f"rows.jsonl, row 2.*{named}"):
        load_rows(path)


# Chat templates and labels


@pytest.mark.parametrize("template", ["smollm2.jinja", "chatml.jinja"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_labels_cover_the_assistants_text_and_its_end_of_turn_token(template, messages):
    tokenizer = with_template(template)
    if template == "smollm2.jinja" and messages[0]["role"] != "system":
        default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        expected_messages = [{"role": "system", "content": default}, *messages]
    else:
        expected_messages = messages
    input_ids, labels = [], []
    for message in expected_messages:
        learned = message["role"] == "assistant"
        for text, is_label in (
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", learned),
            ("\n", False),
        ):
            tokens = tokenizer.encode(text)
            input_ids += tokens
            labels += tokens if is_label else [-100] * len(tokens)

    (row,) = trained_on([{"messages": messages}], tokenizer)
    assert row["input_ids"] == input_ids
    assert row["labels"] == labels


def test_the_paper_s_size_learns_to_end_answers_with_llama_3_s_tokens(tmp_path):
    tokens = speedrun.SIZES["2.4b"].chat_tokens
    template = Path(tokens["chat_template_path"]).read_text(encoding="utf-8")
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", tokens["eos_token"])
    tokenizer = byte_tokenizer(special=special)
    tokenizer.bos_token, tokenizer.chat_template = special[0], template
    _, args = run_of("rows.jsonl", tmp_path, assistant_only_loss=True)
    check_template(Dataset.from_list([{"messages": CONVERSATIONS[0]}]).features, tokenizer, args)
    (row,) = trained_on([{"messages": CONVERSATIONS[0]}], tokenizer)
    learned = tokenizer.decode([token for token in row["labels"] if token >= 0])
    answers = [turn["content"] for turn in CONVERSATIONS[0] if turn["role"] == "assistant"]
    assert learned == "".join(answer + "<|eot_id|>" for answer in answers)


def test_trl_marks_answers_of_a_family_that_it_knows(tmp_path):
    """Give no template: in place of Qwen's own, which marks nothing, TRL trains by one that does."""
    tokenizer = byte_tokenizer(special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    directory = Path(find_spec("trl").origin).parent / "chat_templates"
    tokenizer.chat_template = (directory / "qwen2_5.jinja").read_text(encoding="utf-8")
    _, args = run_of("rows.jsonl", tmp_path, assistant_only_loss=True)
    check_template(Dataset.from_list([{"messages": CONVERSATIONS[0]}]).features, tokenizer, args)
    (row,) = trained_on([{"messages": CONVERSATIONS[0]}], tokenizer)
    learned = tokenizer.decode([token for token in row["labels"] if token >= 0])
    answers = [turn["content"] for turn in CONVERSATIONS[0] if turn["role"] == "assistant"]
    assert learned.replace("\n", "") == "".join(answer + "<|im_end|>" for answer in answers).replace("\n", "")


def test_a_template_that_would_not_teach_the_model_to_stop_is_refused(tmp_path):
    _, args = run_of("rows.jsonl", tmp_path, assistant_only_loss=True)
    chats = Dataset.from_list([{"messages": CONVERSATIONS[0]}]).features
    without_chatml = byte_tokenizer(special=("<|endoftext|>", "</s>"))
    without_chatml.chat_template = (TEMPLATES / "chatml.jinja").read_text(encoding="utf-8")
    for tokenizer in (byte_tokenizer(), without_chatml):  # whose template marks nothing
        with pytest.raises(UserError, match="end-of-turn"):
            check_template(chats, tokenizer, args)
    for template, named in (
        (None, "has no chat template"),
        ("{% generation %}{{ 1 / 0 }}{% endgeneration %}", "does not take it: division by zero"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=named):
            check_template(chats, tokenizer, args)


@pytest.mark.parametrize("packing", [False, True])
def test_what_is_cut_is_said_and_rows_without_an_answer_are_refused(packing, tmp_path, capsys):
    answer = {"role": "assistant", "content": "0123456789" * 3}
    rows = [{"messages": [{"role": "user", "content": question}, answer]} for question in ("a", "a" * 40, "a")]
    path, tokenizer = write_jsonl(tmp_path / "rows.jsonl", rows), with_template("chatml.jinja")
    for length, lengths in ((100, [52, 91, 52]), (70, [52, 70, 52]), (55, None)):
        run, args = run_of(path, tmp_path, max_length=length, packing=packing)
        rows, _ = rows_of_run(run, args, tokenizer)
        if lengths:
            trained = trainer_of(args, rows, tokenizer).train_dataset
            found = [n for row in trained["seq_lengths"] for n in row] if packing else map(len, trained["labels"])
            assert sorted(found) == sorted(lengths)
            said = "1 of 3 rows are cut to max_length=70, which leaves out 10.8% of their tokens."
            assert (said in capsys.readouterr().out) == (length == 70)
        else:
            with pytest.raises(UserError, match=r"1 of 3 rows have no token to learn within max_length=55"):
                trainer_of(args, rows, tokenizer)


@pytest.mark.parametrize("packing", [False, True])
def test_a_row_of_a_stream_without_an_answer_is_refused(packing, tmp_path):
    """A packed stream would train on such rows with a loss of 0."""
    answer = {"role": "assistant", "content": "0123456789" * 3}
    rows = [{"messages": [{"role": "user", "content": question}, answer]} for question in ("a", "a" * 40)]
    path, tokenizer = write_jsonl(tmp_path / "rows.jsonl", rows), with_template("chatml.jinja")
    keys = {"dataset_streaming": True, "packing": packing, "max_steps": 1}
    run, args = run_of(path, tmp_path, max_length=70, **keys)
    assert list(trainer_of(args, rows_of_run(run, args, tokenizer)[0], tokenizer).train_dataset)
    run, args = run_of(path, tmp_path, max_length=55, **keys)
    with pytest.raises(UserError, match="a row of the stream has no token to learn within max_length=55"):
        list(trainer_of(args, rows_of_run(run, args, tokenizer)[0], tokenizer).train_dataset)


def test_plain_text_needs_an_end_token(tmp_path):
    path, tokenizer = write_jsonl(tmp_path / "rows.jsonl", [{"text": "abc"}]), byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end token, with which each text ends: set eos_token"):
        rows_of_run(*run_of(path, tmp_path, assistant_only_loss=False), tokenizer)
    run, args = run_of(path, tmp_path, assistant_only_loss=False, eos_token="<|im_end|>")
    assert len(trainer_of(args, rows_of_run(run, args, tokenizer)[0], tokenizer).train_dataset) == 1


def trainer_of(args: SFTConfig, rows: Dataset, tokenizer, eval_rows=None, **fields) -> SFTRecipeTrainer:
    model = IHAForCausalLM(small_config(vocab_size=len(tokenizer), **fields))
    return SFTRecipeTrainer(
        model=model, args=args, train_dataset=rows, eval_dataset=eval_rows, processing_class=tokenizer
    )


def trained_on(rows: list[dict], tokenizer, **keys) -> list[dict]:
    """Return tokens and labels of rows as the trainer has them."""
    _, args = run_of("rows", Path("."), max_length=512, **keys)
    return list(trainer_of(args, Dataset.from_list(rows), tokenizer).train_dataset)


# Sources


def test_every_type_of_file_holds_the_same_rows(rows_file, tmp_path):
    expected, path = list(load_rows(rows_file)), Path(rows_file)
    raw = path.read_bytes()
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(raw))
    Dataset.from_list([json.loads(line) for line in raw.splitlines()]).to_parquet(tmp_path / "rows.parquet")
    for name in (path.name, "packed.jsonl.gz", "rows.parquet"):
        for streaming in (False, True):
            rows = load_rows(str(tmp_path / name), streaming=streaming)
            assert isinstance(rows, IterableDataset) == streaming
            assert list(rows) == expected, name


def test_plain_text_is_learned_whole_and_ends(tmp_path):
    text, tokenizer = "Größe 🙂\n\nEnd", byte_tokenizer()
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    write_jsonl(tmp_path / "rows.jsonl", [{"text": text}])
    for name in ("a.txt", "b.txt.gz", "rows.jsonl"):
        (row,) = trained_on(list(load_rows(str(tmp_path / name))), tokenizer, assistant_only_loss=False)
        assert tokenizer.decode(row["input_ids"]) == f"{text}<|im_end|>"
        assert row["labels"] == row["input_ids"]


def test_the_files_of_a_directory_are_documents(tmp_path):
    texts = ["One.\n\nTwo.\n", "Three.\r\n", "\nFour."]
    (tmp_path / "texts").mkdir()  # the cache is in tmp_path
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(text.encode())
    (tmp_path / "texts" / "notes.md").write_text("no rows")
    for streaming in (False, True):
        found = [row["text"] for row in load_rows(str(tmp_path / "texts"), streaming=streaming)]
        assert found == [text.replace("\r\n", "\n") for text in texts]


def test_another_column_is_named_and_read_by_an_option(tmp_path):
    path, tokenizer = write_jsonl(tmp_path / "rows.jsonl", [{"content": "abc", "id": 1}]), byte_tokenizer()
    tokenizer.chat_template = None
    plain = {"assistant_only_loss": False}
    with pytest.raises(UserError, match=r"rows.jsonl: expected .*has \['content', 'id'\].*dataset_text_field"):
        rows_of_run(*run_of(path, tmp_path, **plain), tokenizer)
    with pytest.raises(UserError, match="rows.jsonl has no column 'body': its columns are content, id"):
        rows_of_run(*run_of(path, tmp_path, dataset_text_field="body", **plain), tokenizer)
    for streaming in ({}, {"dataset_streaming": True, "max_steps": 1}):
        run, args = run_of(path, tmp_path, dataset_text_field="content", **plain, **streaming)
        [row] = trainer_of(args, rows_of_run(run, args, tokenizer)[0], tokenizer).train_dataset
        assert tokenizer.decode(row["input_ids"]) == "abc<|im_end|>"
    words = sizes("model", path, tmp_path / "run", dataset_text_field="content")
    assert RecipeParser("").parse(["--config", recipe("demo"), *words])[1].dataset_text_field == "content"


def test_columns_that_are_not_read_are_said(tmp_path, capsys):
    for row in ({"text": "a", "prompt": "b"}, {"messages": TURNS[:2], "prompt": "b"}):
        list(load_rows(write_jsonl(tmp_path / "rows.jsonl", [row])))
        assert f"does not read these columns of {tmp_path / 'rows.jsonl'}: prompt." in capsys.readouterr().out
    list(load_rows(write_jsonl(tmp_path / "rows.jsonl", [{"system": "s", "messages": TURNS[:2]}])))
    assert "does not read" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("cut.jsonl.gz", gzip.compress(b'{"text": "Q"}\n' * 99, mtime=0)[:-9], "cannot be read"),
        ("empty.txt", b"", "no rows|the text is empty|cannot be read"),
        ("empty.jsonl", b"", "empty.jsonl: it holds no rows"),
        ("nothing.jsonl.gz", gzip.compress(b"", mtime=0), "gz: it holds no rows"),
        ("rows.csv", b"a,b", "expected a file .jsonl"),
        ("empty.jsonl.gz", gzip.compress(b"\n", mtime=0), "no rows|cannot be read"),
        ("rows.parquet", b"PAR1", "rows.parquet"),
        ("mixed.jsonl", b'{"text": "Q", "messages": null}\n{"text": null, "messages": []}', "row 2, column 'text'"),
        ("absent.jsonl", None, "no such file"),
        ("rows.jsonl", b'{"completion": "Q"}', "row 1: expected texts in 'prompt' and 'completion', got None"),
        ("dates.jsonl", b'{"prompt": "Q", "completion": "2024-01-02"}', "row 1: expected turns .* datetime"),
        ("cut.jsonl", b'{"text": "Q"}\n{"text": "', "cut.jsonl, line 2 is no object of JSON"),
    ],
)
def test_a_damaged_file_is_refused(name, content, named, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=named) as refused:
        list(load_rows(str(tmp_path / name)))
    assert "\n" not in str(refused.value)


# What a run reads


@pytest.mark.parametrize(
    "keys, named",
    [
        ({"dataset_streaming": True, "max_steps": 3, "eval_size": 0.1}, "length of a stream is not known"),
        ({"eval_dataset_name": "absent.txt"}, "absent.txt: no such file"),
        ({"eval_dataset_name": "README.md", "eval_size": 2}, "both say what to evaluate on"),
        ({"dataset_streaming": True}, "max_steps=-1: dataset_streaming has no last row"),
        ({"dataset_train_split": "test"}, "split 'test': .*has no split"),
        ({"eval_dataset_name": "held.txt"}, "held.txt is one row, of which only the first max_length=128 tokens"),
        ({"dataset_name": "held.txt"}, "held.txt is one row, of which only"),
        ({"dataset_name": "held.txt", "packing": True}, "set packing to true and packing_strategy to bfd_split"),
        ({"dataset_name": "mix.yaml"}, "mix.yaml: short.txt is one row, and a mixture ends with the first part"),
        ({"packing": True, "packing_strategy": "wrapped"}, "'wrapped' lets documents attend to one another"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, named, rows_file, tmp_path, monkeypatch):
    data_of(*run_of(rows_file, tmp_path))
    readme = Path("README.md").resolve()
    monkeypatch.chdir(tmp_path)
    Path("held.txt").write_text("A text. " * 20)
    Path("short.txt").write_text("A text.")  # of fewer bytes than a row has tokens
    data_of(*run_of("short.txt", tmp_path))
    Path("mix.yaml").write_text("[{path: short.txt, share: 0.5}, {path: rows.jsonl, share: 0.5}]")
    Path("README.md").symlink_to(readme)
    split = {"packing": True, "packing_strategy": "bfd_split", "assistant_only_loss": False}
    data_of(*run_of("held.txt", tmp_path, **split))
    with pytest.raises(UserError, match=named):
        data_of(*run_of(keys.pop("dataset_name", rows_file), tmp_path, **keys))


def test_a_stream_holds_out_its_first_rows():
    rows = Dataset.from_dict({"text": ["a", "b", "c"]}).to_iterable_dataset()
    rest, held_out = hold_out_first(rows, 2)
    assert held_out["text"] == ["a", "b"] and [row["text"] for row in rest] == ["c"]
    with pytest.raises(UserError, match="leaves no row of 3"):
        hold_out_first(rows, 3)
    twice = Dataset.from_dict({"text": ["a", "b", "a", "c", "b"]}).to_iterable_dataset()
    rest, _ = hold_out_first(twice, 2)
    assert [row["text"] for row in rest] == ["c"]


TURNS = [{"role": role, "content": text} for role, text in (("user", "1+1?"), ("assistant", "2."), ("user", "+1?"))]


@pytest.mark.parametrize(
    "row, learned",
    [
        ({"prompt": "The sky is", "completion": " blue."}, " blue.<|im_end|>"),
        ({"prompt": TURNS, "completion": [{**TURNS[1], "content": "3."}]}, "3.<|im_end|>\n"),
        ({"prompt": TURNS, "completion": [{**TURNS[1], "content": "3."}], "system": "Add."}, "3.<|im_end|>\n"),
    ],
    ids=["text", "turns", "system"],
)
def test_of_a_prompt_and_its_completion_the_completion_is_learned(row, learned, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    source = load_rows(write_jsonl(tmp_path / "rows.jsonl", [row, row]))
    tokens = trained_on(list(source), tokenizer, assistant_only_loss=False)[0]
    labels = [label for label in tokens["labels"] if label != -100]
    assert tokenizer.decode(labels) == learned and tokens["input_ids"][-len(labels) :] == labels
    assert ("Add." in tokenizer.decode(tokens["input_ids"])) == ("system" in row)


def test_no_row_is_both_learned_and_held_out(tmp_path, capsys):
    path, tokenizer = write_jsonl(tmp_path / "twice.jsonl", training_rows(9) * 2), with_template("chatml.jinja")
    run, args = run_of(path, tmp_path, eval_size=5)
    rows, held_out = rows_of_run(run, args, tokenizer)
    learned, held = ({str(row) for row in part} for part in (rows, held_out))
    assert len(held_out) == 5 and not learned & held and len(learned | held) == 9
    assert f"{13 - len(rows)} rows ask the same as a held-out row" in capsys.readouterr().out


def test_no_question_is_both_learned_and_held_out(tmp_path):
    """Give each question several answers, as OpenThoughts3 does."""
    rows = [
        {"messages": [{"role": "user", "content": f"{question}?"}, {"role": "assistant", "content": f"{answer}."}]}
        for question in range(3)
        for answer in range(4)
    ]
    path, tokenizer = write_jsonl(tmp_path / "rows.jsonl", rows), with_template("chatml.jinja")
    learned, held = rows_of_run(*run_of(path, tmp_path, eval_size=1), tokenizer)
    questions = [{row["messages"][0]["content"] for row in part} for part in (learned, held)]
    assert len(learned) == 8 and not questions[0] & questions[1]
    path = write_jsonl(tmp_path / "one.jsonl", rows[:4])
    with pytest.raises(UserError, match="every row to train on asks the same as a held-out row"):
        rows_of_run(*run_of(path, tmp_path, eval_size=1), tokenizer)
    prompts = [{"prompt": "", "completion": f"{number}."} for number in range(4)]  # which ask nothing
    path = write_jsonl(tmp_path / "empty.jsonl", prompts)
    learned, held = rows_of_run(*run_of(path, tmp_path, eval_size=1, assistant_only_loss=False), tokenizer)
    assert (len(learned), len(held)) == (3, 1)


def test_rows_to_evaluate_on_are_like_those_to_train_on(tmp_path):
    tokenizer = with_template("chatml.jinja")
    chats = write_jsonl(tmp_path / "rows.jsonl", training_rows(4))
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}, {"text": "b"}])
    with pytest.raises(UserError, match="to evaluate on have the columns text, and those to train on messages"):
        rows_of_run(*run_of(chats, tmp_path, eval_dataset_name=texts), tokenizer)
    with pytest.raises(UserError, match="assistant_only_loss is for chats, and these rows are plain text"):
        rows_of_run(*run_of(texts, tmp_path), tokenizer)
    answer = {"role": "assistant", "content": "0123456789" * 3}
    rows = [{"messages": [{"role": "user", "content": "a" * length}, answer]} for length in (1, 1, 40)]
    _, args = run_of(chats, tmp_path, max_length=55)
    parts = [
        Dataset.from_list(list(load_rows(write_jsonl(tmp_path / name, part))))
        for name, part in (("a.jsonl", rows[:1]), ("b.jsonl", rows))
    ]
    with pytest.raises(UserError, match="1 of 3 rows to evaluate on have no token to learn within max_length=55"):
        trainer_of(args, parts[0], tokenizer, parts[1])


@pytest.mark.parametrize("row", [{"text": "a"}, {"prompt": "a", "completion": "b"}, {"messages": CONVERSATIONS[0]}])
def test_content_beside_a_text_is_not_lost(row, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{**row, "tools": None}, {**row, "tools": ["content"]}])
    with pytest.raises(UserError, match="rows.jsonl, row 2: column 'tools' would be lost"):
        list(load_rows(path))


def test_bits_per_byte_are_those_of_all_tokens(tmp_path):
    """Evaluate batches of very different lengths: a mean of their means is another number."""
    texts = ["ab", "c" * 150, "d", "e" * 90]
    path, tokenizer = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts]), byte_tokenizer()
    _, args = run_of(path, tmp_path, max_length=None, assistant_only_loss=False, per_device_eval_batch_size=1)
    rows = Dataset.from_dict({"text": texts})
    trainer = trainer_of(args, rows, tokenizer, rows)
    expected = 0.0
    for row in trainer.eval_dataset:
        tokens = torch.tensor(row["input_ids"])[None]
        with torch.no_grad():
            logits = trainer.model(tokens).logits[0, :-1].float()
        expected += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
    seen = []
    trainer.add_callback(type("Seen", (TrainerCallback,), {"on_log": lambda *_, logs, **__: seen.append(dict(logs))}))
    bits = trainer.evaluate()["eval_bits_per_byte"]
    assert seen[-1]["eval_bits_per_byte"] == bits  # as a tracker sees it
    # The first byte of each text is not predicted.
    assert bits == pytest.approx(expected / math.log(2) / (sum(map(len, texts)) - len(texts)), rel=1e-5)


@pytest.mark.parametrize("max_length", [16, 100])
def test_bits_per_byte_do_not_depend_on_the_length_of_rows(max_length, tmp_path):
    """Evaluate a model that gives each byte the same probability, on one text in pieces of `max_length` tokens."""
    text, tokenizer = "Größe 🙂, " * 99, byte_tokenizer()
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": text}])
    packed = {"packing": True, "packing_strategy": "bfd_split", "assistant_only_loss": False}
    _, args = run_of(path, tmp_path, max_length=max_length, **packed)
    rows = Dataset.from_dict({"text": [text]})
    trainer = trainer_of(args, rows, tokenizer, rows)
    torch.nn.init.zeros_(trainer.model.get_output_embeddings().weight)
    size = len(text.encode())
    pieces = -(-(size + 1) // max_length)  # with the end of the text
    predicted = size - pieces
    bits = trainer.evaluate()["eval_bits_per_byte"]
    # The end of the text is predicted too, and has no bytes.
    assert bits == pytest.approx(math.log2(len(tokenizer)) * (predicted + 1) / predicted, rel=1e-5)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a mark for each space, and single bytes for what its vocabulary lacks, as Gemma's."""
    pieces = ["<s>", "\u2581", "G", "r", "ö", "Gr", "\u2581Gr", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("G", "r"), ("\u2581", "Gr")]
    model = models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize("kind", ["bytes", "byte_pairs", "sentencepiece"])
def test_the_bytes_of_the_tokens_are_those_of_the_text(kind):
    text = "<s> Größe 🙂\n Größe" if kind == "sentencepiece" else "Größe 🙂\n Größe<|im_end|>"
    makers = {
        "bytes": byte_tokenizer,
        "byte_pairs": lambda: train_tokenizer([" Größe"] * 9, 300),
        "sentencepiece": sentencepiece_like,
    }
    tokenizer = makers[kind]()
    tokens = tokenizer(text)["input_ids"]
    special = sum(
        len(tokenizer.convert_ids_to_tokens(token)) for token in tokens if token in tokenizer.all_special_ids
    )
    assert special > 0
    assert sum(bytes_of_token(tokenizer, token) for token in tokens) == len(text.encode()) - special


def test_rows_beyond_the_models_context_are_refused(tmp_path):
    path, tokenizer = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}]), byte_tokenizer()
    _, args = run_of(path, tmp_path, max_length=None, assistant_only_loss=False)
    rows = Dataset.from_dict({"text": ["a", "b" * 200]})
    trainer_of(args, rows, tokenizer, max_position_embeddings=201)
    with pytest.raises(UserError, match="a row has 201 tokens, and the model 200 positions: set max_length"):
        trainer_of(args, rows, tokenizer, max_position_embeddings=200)
